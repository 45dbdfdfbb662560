"""Images in conversations of all dialects: where their bytes are, and which become pictures.

An image in what the person says last must be readable, else the request is refused; one in the history becomes a
constant line, so that no conversation is refused for ever. Nothing is fetched.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from models.errors import InvalidImage
from models.prompt.shapes import Message
from server.api.errors import ApiError, Code

if TYPE_CHECKING:
    from models.vision.loading import Vision

MAX_NEW_IMAGES = 20
UNREAD = "[{}: this model reads none]"
"""What stands in a prompt for a picture, a document, a sound or a film."""
UNREADABLE = "[image: it cannot be read]"
"""What a model that sees images is shown for one of the history that is damaged or was not sent."""
_SHOWN_ROLES = ("user", "tool")


class GivenImage:
    """An image of a body, unread. No JSON makes one."""

    def __init__(self, part: Mapping[str, Any], place: tuple[str, int, int] | None = None) -> None:
        """`place`: parameter, message and part, of an image in what the person says last."""
        self.part, self.place = part, place


def image_part(part: Mapping[str, Any], place: tuple[str, int, int] | None = None) -> dict[str, Any]:
    """An image as a text part, which says what a model that sees nothing gets."""
    text = {"type": "text", "text": UNREAD.format("image"), "image": GivenImage(part, place)}
    return {**text, "cache_control": part.get("cache_control")}


def refuse_media(place: tuple[str, int, int], kind: str, why: str = "") -> ApiError:
    """The error of a part that is not read, with the path and class by which Claude Code sends the rest again."""
    param, index, number = place
    reader = "this model takes no images, only text" if kind == "image" else f"no model here takes a {kind}"
    why = why or f"{reader}; send the message without it"
    where = f"{param}.{index}.content.{number}.{kind}"
    told = f"{where}: {why} (capability_rejected: {kind}_block)"
    return ApiError(Code.INVALID_VALUE, told, f"{param}[{index}].content[{number}].type")


def with_pictures(messages: Sequence[Message], vision: "Vision | None") -> Sequence[Message]:
    """Messages with their images opened; raises ApiError (400)."""
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
        return _opened(given, words, vision) if message["role"] in _SHOWN_ROLES else words

    return [
        {**message, "content": [opened(message, part) for part in content]}
        if isinstance(content := message.get("content"), list | tuple)
        else message
        for message in messages
    ]


def _opened(given: GivenImage, words: Mapping[str, Any], vision: "Vision | None") -> Mapping[str, Any]:
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
    held = source if isinstance(source, Mapping) else part
    found = (
        url.get("url")
        if isinstance(url, Mapping)
        else url or held.get("url") or held.get("data") or held.get("image")
    )
    if not isinstance(found, str) or part.get("file_id") or held.get("file_id"):
        raise InvalidImage("an image is sent in its message, as base64 or a data: URL; files are not kept here")
    if found.startswith("data:"):
        head, _, found = found.partition(",")
        if not head.endswith(";base64"):
            raise InvalidImage("a data: URL of an image holds base64")
    elif "://" in found[:16]:
        raise InvalidImage("no image is fetched; send it in its message, as base64 or a data: URL")
    try:
        return base64.b64decode(found, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidImage("the image's base64 is damaged") from error
