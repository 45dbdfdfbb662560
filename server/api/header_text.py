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
    """Returns a value that any client can read: as it is if it is ASCII, else in UTF-8 with percent signs."""
    return value if value.isascii() else quote(value, safe="")
