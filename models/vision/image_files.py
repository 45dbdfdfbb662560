"""Encoded images: what their headers say, read without decoding, and their pixels.

A walk over a file's parts tells whether the file is whole, its size, and how the image is turned. The walk takes
milliseconds and no memory, whatever the file says. PNG (W3C, 2003) has a checksum for each part; JPEG (ITU-T T.81),
WEBP (RFC 9649) and GIF (89a) are cut short where their end is missing. Any thread.
"""

import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from models.errors import InvalidImage

MAX_BYTES = 20 << 20
MAX_PIXELS = 40_000_000
_MAX_PARTS = 1 << 15
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_ORIENTATION_TAG = 0x0112
_IMAGE_HEADERS = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
"""JPEG's markers of frames."""
_MIRRORED = (None, None, "FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM")
_TURNS = (*_MIRRORED, "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")
"""How Pillow calls what undoes an orientation."""


@dataclass(frozen=True)
class ImageHeader:
    """Size in pixels as stored, and Exif's orientation, 1 to 8."""

    stored_width: int
    stored_height: int
    orientation: int = 1

    @property
    def size(self) -> tuple[int, int]:
        """Width and height as shown."""
        is_turned = self.orientation >= 5
        return (self.stored_height, self.stored_width) if is_turned else (self.stored_width, self.stored_height)


def is_image(data: bytes) -> bool:
    """Whether a file begins as those that are read."""
    with suppress(InvalidImage):
        return bool(_reader_of(data))
    return False


def read_header(data: bytes) -> ImageHeader:
    """What a whole PNG, JPEG, WEBP or GIF says; raises InvalidImage."""
    if len(data) > MAX_BYTES:
        raise InvalidImage(f"an image may have {MAX_BYTES >> 20} MiB, and this one has {len(data) / (1 << 20):.1f}")
    try:
        header = _reader_of(data)(data)
    except (IndexError, ValueError) as error:
        raise InvalidImage("the image is cut short or damaged") from error
    width, height = header.size
    if not width or not height:
        raise InvalidImage("the image is cut short or damaged: it says nothing of its size")
    if width * height > MAX_PIXELS:
        limit = MAX_PIXELS // 1_000_000
        raise InvalidImage(f"the image has {width}x{height} pixels; {limit} megapixels are the limit")
    return header


def read_pixels(data: bytes) -> Any:
    """The image in red, green and blue, turned as it is shown, the first frame, on white; raises InvalidImage."""
    # Not at the top: text needs none of it.
    from PIL import Image

    header = read_header(data)
    try:
        image: Any = Image.open(io.BytesIO(data), formats=_FORMATS)
        if image.size != (header.stored_width, header.stored_height):
            raise ValueError(f"it is {image.size[0]}x{image.size[1]} pixels large, and its header says otherwise")
        image.load()
    except Exception as error:  # decoders raise anything for a damaged file
        raise InvalidImage(f"an image cannot be decoded: {error or type(error).__name__}") from error
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image, turn = image.convert("RGB"), _TURNS[header.orientation]
    return image if turn is None else image.transpose(Image.Transpose[turn])


def _reader_of(data: bytes) -> Callable[[bytes], ImageHeader]:
    starts = {b"\x89PNG\r\n\x1a\n": _read_png, b"\xff\xd8\xff": _read_jpeg, b"GIF8": _read_gif}
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _read_webp
    reader = next((read for start, read in starts.items() if data.startswith(start)), None)
    if reader is None:
        kind = "a PDF" if data.startswith(b"%PDF") else "of another kind" if data else "empty"
        raise InvalidImage(f"only PNG, JPEG, WEBP and GIF images are read, and this file is {kind}")
    return reader


def _parts() -> Iterator[int]:
    yield from range(_MAX_PARTS)
    raise InvalidImage(f"the image has more than {_MAX_PARTS} parts")


def _read_png(data: bytes) -> ImageHeader:
    view, at, size, orientation = memoryview(data), 8, (0, 0), 1
    for _ in _parts():
        length, kind = int.from_bytes(data[at : at + 4]), data[at + 4 : at + 8]
        stop = at + 12 + length
        if zlib.crc32(view[at + 4 : stop - 4]) != int.from_bytes(data[stop - 4 : stop]) or stop > len(data):
            raise ValueError("a checksum is wrong")
        if kind == b"IHDR":
            size = int.from_bytes(data[at + 8 : at + 12]), int.from_bytes(data[at + 12 : at + 16])
        elif kind == b"eXIf":
            orientation = _orientation(data[at + 8 : stop - 4])
        elif kind == b"IEND":
            break
        at = stop
    return ImageHeader(*size, orientation)


def _read_jpeg(data: bytes) -> ImageHeader:
    at, size, orientation = 2, (0, 0), 1
    for _ in _parts():
        marker = data[at + 1]
        if data[at] != 0xFF:
            raise ValueError("a marker is missing")
        if marker == 0xFF:  # before a marker
            at += 1
            continue
        body, stop = at + 4, at + 2 + int.from_bytes(data[at + 2 : at + 4])
        if stop < body or stop > len(data):
            raise ValueError("a part is cut short")
        if marker in _IMAGE_HEADERS:
            size = int.from_bytes(data[body + 3 : body + 5]), int.from_bytes(data[body + 1 : body + 3])
        elif marker == 0xE1 and data[body : body + 6] == b"Exif\0\0":
            orientation = _orientation(data[body + 6 : stop])
        elif marker == 0xDA:
            break
        at = stop
    if data.rfind(b"\xff\xd9", at) < 0:
        raise ValueError("the end is missing")
    return ImageHeader(*size, orientation)


def _read_gif(data: bytes) -> ImageHeader:
    if data.rstrip(b"\0")[-1:] != b";":
        raise ValueError("the end is missing")
    width, height = int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little")
    at = 13 + (3 << ((data[10] & 7) + 1) if data[10] & 0x80 else 0)
    parts = _parts()
    while data[at] == 0x21:  # what stands before the first frame
        at += 2
        while length := data[at]:
            at += length + 1
            next(parts)
        at += 1
        next(parts)
    if data[at] != 0x2C:
        raise ValueError("there is no frame")
    left, top, *frame = (int.from_bytes(data[at + place : at + place + 2], "little") for place in (1, 3, 5, 7))
    return ImageHeader(max(width, left + frame[0]), max(height, top + frame[1]))


def _read_webp(data: bytes) -> ImageHeader:
    end, at, size, orientation = 8 + int.from_bytes(data[4:8], "little"), 12, (0, 0), 1
    if end > len(data):
        raise ValueError("the end is missing")
    for _ in _parts():
        if at + 8 > end:
            break
        kind, body = data[at : at + 4], at + 8
        stop = body + int.from_bytes(data[at + 4 : body], "little")
        if kind == b"VP8X":
            size = (
                1 + int.from_bytes(data[body + 4 : body + 7], "little"),
                1 + int.from_bytes(data[body + 7 : body + 10], "little"),
            )
        elif kind == b"VP8L" and size == (0, 0):
            bits = int.from_bytes(data[body + 1 : body + 5], "little")
            size = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        elif kind == b"VP8 " and size == (0, 0):
            sides = (int.from_bytes(data[body + place : body + place + 2], "little") & 0x3FFF for place in (6, 8))
            size = next(sides), next(sides)
        elif kind == b"EXIF":
            orientation = _orientation(data[body:stop].removeprefix(b"Exif\0\0"))
        at = stop + (stop & 1)
    return ImageHeader(*size, orientation)


def _orientation(exif: bytes) -> int:
    """The orientation in a TIFF header's first directory; 1 where it says none."""
    order = {b"II": "little", b"MM": "big"}.get(exif[:2])
    if order is None:
        return 1

    def number(at: int, length: int) -> int:
        return int.from_bytes(exif[at : at + length], "little" if order == "little" else "big")

    start = number(4, 4)
    for at in range(start + 2, start + 2 + 12 * min(number(start, 2), 512), 12):
        if number(at, 2) == _ORIENTATION_TAG:
            return value if 1 <= (value := number(at + 8, 2)) <= 8 else 1
    return 1
