"""Files of images: what is read of them, and how fast what is no image is refused."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from models.errors import InvalidImage
from models.vision.image_files import MAX_BYTES, read_header, read_pixels

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def photo(width: int = 60, height: int = 40, mode: str = "RGB") -> Image.Image:
    """Returns an image of smooth colours, its left upper quarter red."""
    rows, columns = np.mgrid[:height, :width]
    found = np.stack([columns * 255 // width, rows * 255 // height, np.full_like(rows, 90)], -1).astype(np.uint8)
    found[: height // 2, : width // 2] = (255, 0, 0)
    return Image.fromarray(found).convert(mode)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    """Returns the file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    """Returns a part of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *parts: bytes) -> bytes:
    """Returns a PNG that says it is of that size."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(parts) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("size", [(60, 40), (33, 77), (1, 1)])
def test_sizes_are_those_of_the_decoder(kind: str, size: tuple[int, int]) -> None:
    data = encoded(photo(*size), kind)
    assert read_header(data).size == size == read_pixels(data).size


@pytest.mark.parametrize(
    "options", [{"lossless": True}, {"exif": Image.Exif().tobytes()}, {"lossless": True, "method": 0}]
)
def test_all_kinds_of_webp(options: dict[str, Any]) -> None:
    assert read_header(encoded(photo(), "WEBP", **options)).size == (60, 40)
    assert read_header(encoded(photo(mode="RGBA"), "WEBP", **options)).size == (60, 40)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_an_image(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(photo(), kind, exif=exif.tobytes())
    wanted = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert read_header(data).size == wanted.size
    assert np.array_equal(np.asarray(read_pixels(data)), np.asarray(wanted))


def test_what_was_transparent_is_white_and_an_animation_its_first_frame() -> None:
    clear = Image.new("RGBA", (4, 4), (200, 0, 0, 0))
    assert np.asarray(read_pixels(encoded(clear, "PNG"))).min() == 255
    first, second = photo(), photo(mode="L").convert("RGB")
    for kind, options in {"GIF": {}, "WEBP": {"lossless": True}, "PNG": {}}.items():
        moving = encoded(first, kind, save_all=True, append_images=[second], **options)
        shown = np.asarray(read_pixels(moving), np.int32)
        assert abs(shown - np.asarray(first, np.int32)).mean() < 8


def refusals() -> dict[str, bytes]:
    whole = {kind: encoded(photo(300, 200), kind) for kind in FORMATS}
    flipped = bytearray(whole["PNG"])
    flipped[len(flipped) // 2] ^= 1
    return {
        **{f"{kind} cut by {count}": data[:-count] for kind, data in whole.items() for count in (3, len(data) // 2)},
        **{f"{kind} of {count} bytes": data[:count] for kind, data in whole.items() for count in (4, 12, 20, 30)},
        "a wrong checksum": bytes(flipped),
        "nothing": b"",
        "a text": b"no image at all",
        "a PDF as PNG": b"%PDF-1.7 ...",
        "SVG": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        "BMP": encoded(photo(), "BMP"),
        "TIFF": encoded(photo(), "TIFF"),
        "41 megapixels": png(8200, 5000),
        "a bomb": png(65_535, 65_535, chunk(b"IDAT", zlib.compress(bytes(1 << 20)))),
        "no size": png(0, 5),
        "a large webp": b"RIFF"
        + struct.pack("<I", 22)
        + b"WEBPVP8X"
        + struct.pack("<I", 10)
        + b"\0" * 4
        + b"\xff" * 6,
        "too many bytes": png(5, 5, chunk(b"IDAT", bytes(MAX_BYTES))),
        "many parts": png(5, 5, chunk(b"tEXt", b"") * 400_000),
        "a jpeg of empty parts": b"\xff\xd8" + b"\xff\xe0\0\x02" * 4_000_000,
        "a jpeg of markers": b"\xff" * 1_000 + b"\xff\xd8" + b"\xff" * 10_000_000,
        "a gif of comments": b"GIF89a\5\0\5\0\0\0\0" + b"\x21\xfe" + b"\1a" * 5_000_000 + b"\0;",
    }


def is_refused(data: bytes) -> bool:
    try:
        read_header(data)
    except InvalidImage:
        return True
    return False


def test_what_is_no_image_is_refused() -> None:
    for name, data in refusals().items():
        assert is_refused(data), f"{name} was taken"


def test_a_file_whose_pixels_are_damaged_says_so() -> None:
    data = png(50, 50, chunk(b"IDAT", b"no deflate stream"))
    assert read_header(data).size == (50, 50)
    with pytest.raises(InvalidImage, match="cannot be decoded"):
        read_pixels(data)


def test_a_decoder_that_sees_another_size_is_not_believed() -> None:
    inner = encoded(photo(), "PNG")
    with pytest.raises(InvalidImage):
        read_pixels(inner[:16] + struct.pack(">II", 70, 40) + inner[24:])
