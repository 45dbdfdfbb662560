"""Files that a person in the terminal names: saved conversations, and images that no model here can see."""

import contextlib
import os
import re
import tempfile
from pathlib import Path

from models.errors import reason
from server.cli.repl.conversation import is_conversation

MAX_BYTES = 256 * 2**20
"""A longer file is no conversation."""
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tiff", ".heic")
NO_IMAGES = "models here take text only, so {} cannot be shown to them; describe it in words"

_PATH = re.compile(r"""(?P<quote>['"])(?P<quoted>.+?)(?P=quote)|(?P<bare>(?:\\.|\S)+)""")
_SIGNATURES = ("\ufffdPNG\r\n", "\ufffdPNG\n", "GIF87a", "GIF89a", "\ufffd\ufffd\ufffd\ufffd\x00\x10JFIF")
"""How images begin that were read as text."""


class FileRefused(Exception):
    """A file cannot be read or must not be written; the message is one sentence."""


def save_text(path: Path, text: str) -> None:
    """Writes a conversation, readable by its owner only, whole or not at all; raises FileRefused.

    A file that is there is replaced if it is a saved conversation itself.
    """
    if path.exists() and not (path.is_file() and is_conversation(read_text(path))):
        raise FileRefused(f"{path} is there already and is no saved conversation; choose another name")
    try:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            try:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).replace(path)
            except BaseException:
                with contextlib.suppress(OSError):
                    Path(file.name).unlink()
                raise
    except (OSError, UnicodeEncodeError) as error:
        raise FileRefused(f"{path} cannot be written: {reason(error)}") from error


def read_text(path: Path) -> str:
    """Returns a file's text; raises FileRefused."""
    try:
        if not path.is_file() and path.exists():
            raise FileRefused(f"{path} is no file")
        if path.stat().st_size > MAX_BYTES:
            raise FileRefused(f"{path} is too long for a conversation")
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise FileRefused(f"{path} cannot be read: {reason(error)}") from error


def find_image(text: str) -> str | None:
    """Returns the first path in a message that leads to an image, as a terminal writes one that is dropped on it.

    A bare name is none: it may only be spoken of.
    """
    for match in _PATH.finditer(text):
        path = match["quoted"] or re.sub(r"\\(.)", r"\1", match["bare"])
        path = path.removeprefix("file://")
        if path.startswith(("/", "./", "../", "~/")) and path.lower().endswith(IMAGE_SUFFIXES) and _is_file(path):
            return path
    return None


def is_image(text: str) -> bool:
    """Returns whether a text that was read from a pipe is really an image."""
    return text.startswith(_SIGNATURES)


def _is_file(path: str) -> bool:
    try:
        return Path(path).expanduser().is_file()
    except (OSError, ValueError, RuntimeError):
        return False
