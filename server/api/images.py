"""Images in conversations of all dialects: where their bytes are, and which become pictures.

An image in what the person says last must be readable, else the request is refused; one in the history becomes a
constant line, so that no conversation is refused for ever. Nothing is fetched.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from models.errors import InvalidImage
from models.prompt.pictures import Picture
from models.prompt.shapes import Message
from server.api.errors import ApiError, Code, path_of

MAX_NEW_IMAGES = 20
UNREAD = "[{}: this model reads none]"
"""The line in a prompt in place of a picture, a document, a sound or a film that the model does not read."""
UNREADABLE = "[image: it cannot be read]"
"""What a model that sees images is shown for one of the history that is damaged or was not sent, or that neither the
user nor a tool shows."""
_SHOWN_ROLES = ("user", "tool")


class ImageOpener(Protocol):
    """A model's way to open images."""

    def open(self, data: bytes) -> Picture:
        """The picture in an encoded file; raises InvalidImage."""


class MediaPlace(NamedTuple):
    """Where a part stands in what the person says last: of a message's list in `field`, the part `number`."""

    param: str
    message: int | str
    number: int | None
    """None: the part is all of the field."""
    field: str = "content"

    @property
    def steps(self) -> tuple[int | str, ...]:
        return self.param, self.message, self.field, *(() if self.number is None else (self.number,))


class GivenImage:
    """An image of a body, unread. No JSON makes one."""

    def __init__(self, part: Mapping[str, Any], place: MediaPlace | None = None) -> None:
        """`place`: of an image in what the person says last."""
        self.part, self.place = part, place


def image_part(part: Mapping[str, Any], place: MediaPlace | None = None) -> dict[str, Any]:
    """An image as a text part, which says what a model that sees nothing gets."""
    text = {"type": "text", "text": UNREAD.format("image"), "image": GivenImage(part, place)}
    return {**text, "cache_control": part.get("cache_control")}


def refuse_media(place: MediaPlace, kind: str, why: str = "") -> ApiError:
    """The error of a part that is not read, with the path and class by which Claude Code sends the rest again."""
    reader = "this model takes no images, only text" if kind == "image" else f"no model here takes a {kind}"
    why = why or f"{reader}; send the message without it"
    is_part = place.field == "content"
    path = ".".join(map(str, (*place.steps, *([kind] if is_part else []))))
    where = path_of(*place.steps, *(["type"] if is_part else []))
    return ApiError(Code.INVALID_VALUE, f"{path}: {why} (capability_rejected: {kind}_block)", where)


def with_pictures(messages: Sequence[Message], vision: ImageOpener | None) -> Sequence[Message]:
    """Messages with their images opened, if the model sees any; raises ApiError (400)."""
    num_new = 0

    def opened(message: Message, part: Mapping[str, Any]) -> Mapping[str, Any]:
        nonlocal num_new
        given = part.get("image") if isinstance(part, Mapping) else None
        if not isinstance(given, GivenImage):
            return part
        num_new += given.place is not None
        words = {name: value for name, value in part.items() if name != "image"}
        if given.place is not None and num_new > MAX_NEW_IMAGES:
            raise refuse_media(given.place, "image", f"a message may hold {MAX_NEW_IMAGES} images")
        if message["role"] in _SHOWN_ROLES or vision is None:
            return _opened(given, words, vision)
        return {**words, "text": UNREADABLE}

    return [
        {**message, "content": [opened(message, part) for part in content]}
        if isinstance(content := message.get("content"), list | tuple)
        else message
        for message in messages
    ]


def _opened(given: GivenImage, words: Mapping[str, Any], vision: ImageOpener | None) -> Mapping[str, Any]:
    if vision is None:
        if given.place is not None:
            raise refuse_media(given.place, "image")
        return words
    try:
        picture = vision.open(encoded_image(given.part))
    except InvalidImage as error:
        if given.place is not None:
            raise refuse_media(given.place, "image", str(error)) from error
        return {**words, "text": UNREADABLE}
    return {**words, "text": picture.label, "picture": picture}


def encoded_image(part: Mapping[str, Any]) -> bytes:
    """The file in a part of any dialect, a data: URL or base64; raises InvalidImage."""
    source, url = part.get("source"), part.get("image_url")
    holder = source if isinstance(source, Mapping) else part
    text = url or holder.get("url") or holder.get("data") or holder.get("image")
    if isinstance(url, Mapping):
        text = url.get("url")
    if not isinstance(text, str) or part.get("file_id") or holder.get("file_id"):
        raise InvalidImage("an image is sent in its message, as base64 or a data: URL; files are not kept here")
    if text.startswith("data:"):
        head, _, text = text.partition(",")
        if not head.endswith(";base64"):
            raise InvalidImage("a data: URL of an image holds base64")
    elif "://" in text[:16]:
        raise InvalidImage("no image is fetched; send it in its message, as base64 or a data: URL")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidImage("the image's base64 is damaged") from error
