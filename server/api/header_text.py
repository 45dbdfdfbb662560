"""Text of HTTP headers: their bytes have no encoding; the server reads them as Latin-1, clients write UTF-8. Pure."""

import contextlib
from urllib.parse import quote


def header_text(value: str) -> str:
    """Returns what a client meant by a header's value: its bytes read as UTF-8 where they are, else as Latin-1."""
    with contextlib.suppress(UnicodeError):
        # Before white space is stripped: a byte of a letter may be one in Latin-1.
        value = value.encode("latin-1").decode()
    return value.strip()


def ascii_text(value: str) -> str:
    """Returns a value that a header can hold: as it is if it is printable ASCII, else in UTF-8 with percent signs."""
    is_plain = value.isascii() and value.isprintable() and value == value.strip()
    return value if is_plain else quote(value, safe="", errors="replace")
