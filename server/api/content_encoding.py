"""Bodies that a client has compressed.

A few bytes can stand for gigabytes, so no more is expanded than a body may have that is not compressed.
"""

import zlib
from collections.abc import Mapping
from typing import Final

from server.api.errors import ApiError, Code

_GZIP: Final = 16 + zlib.MAX_WBITS
_WINDOWS: Final[Mapping[str, int]] = {"gzip": _GZIP, "x-gzip": _GZIP, "deflate": zlib.MAX_WBITS}
"""By name, how zlib is told the format."""
MAX_MEMBERS: Final = 64
"""Parts of one gzip body. Each costs a copy of all that follow it."""


def find_encoding(header: str) -> str | None:
    """Returns the encoding that `Content-Encoding` names, None for none; raises ApiError (415) for one not known."""
    name = header.strip().lower()
    if name in ("", "identity"):
        return None
    if name not in _WINDOWS:
        message = f"Content-Encoding: {name[:40]!r} is not understood; send gzip, deflate or no encoding"
        raise ApiError(
            Code.UNSUPPORTED_ENCODING, message, "Content-Encoding", headers={"Accept-Encoding": "gzip, deflate"}
        )
    return name


def expand(raw: bytes, encoding: str, max_bytes: int) -> bytes | None:
    """Returns the body that was compressed to `raw`; None if it has more than `max_bytes`. Raises ApiError (400)."""
    parts: list[bytes] = []
    num_left, window = max_bytes, _window(raw, encoding)
    while raw and len(parts) < MAX_MEMBERS:
        stream = zlib.decompressobj(window)
        try:
            parts.append(stream.decompress(raw, num_left + 1))
        except zlib.error as error:
            raise _broken(encoding) from error
        num_left -= len(parts[-1])
        if num_left < 0:
            return None
        if not stream.eof:
            raise _broken(encoding)
        raw = stream.unused_data
    if raw or not parts:
        raise _broken(encoding)
    return b"".join(parts)


def _window(raw: bytes, encoding: str) -> int:
    """Returns how zlib is told the format; by "deflate" some clients mean the bare stream without zlib's head."""
    has_head = len(raw) > 1 and raw[0] & 0xF == 8 and int.from_bytes(raw[:2], "big") % 31 == 0
    return -zlib.MAX_WBITS if encoding == "deflate" and not has_head else _WINDOWS[encoding]


def _broken(encoding: str) -> ApiError:
    return ApiError(Code.INVALID_VALUE, f"the body is not what Content-Encoding says: {encoding}", "Content-Encoding")
