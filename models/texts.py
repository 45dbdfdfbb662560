"""Text that can be encoded, the comparison of long texts, and numbers for people. Pure.

A lone surrogate, which JSON and a model's output can spell and UTF-8 cannot, becomes U+FFFD.
"""

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Any, Final

import pydantic_core

# A pair is one character and stays. An escaped backslash before `u` is no escape and stays too.
_ESCAPES = re.compile(
    r"\\u[dD][89aAbB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.", re.DOTALL
)


def well_formed(text: str) -> str:
    """`text` with U+FFFD for lone surrogates; the same object without any."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def well_formed_json(text: str) -> str:
    """A JSON text without lone surrogates, as characters or escapes."""
    return _ESCAPES.sub(lambda escape: "\\ufffd" if escape[1] else escape[0], well_formed(text))


def read_object(text: str, *, allow_nan: bool = False) -> dict[str, Any] | None:
    """The object of a JSON text, well-formed; None if it holds none.

    None also above some 200 levels, or for a number of more than 4300 digits.
    """
    try:
        value = pydantic_core.from_json(well_formed_json(text), allow_inf_nan=allow_nan)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def shared_length(sequence: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the common beginning, comparing whole slices."""
    low, high = 0, min(len(sequence), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if sequence[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


_MARK: Final = "mlx-serve-text-1:"


def enclose(text: str) -> str:
    """`text` in plain characters, for clients to send back; no secret."""
    return _MARK + base64.b64encode(text.encode(errors="replace")).decode()


def opened(enclosed: str) -> str | None:
    """Reverses `enclose`; None for any other text."""
    if not enclosed.startswith(_MARK):
        return None
    try:
        return base64.b64decode(enclosed.removeprefix(_MARK), validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def grouped(number: int) -> str:
    """A number such as `12 340`."""
    return f"{number:,}".replace(",", " ")


def size_text(num_bytes: int) -> str:
    """A size for people, such as `3.4 GB`; a GB is 10^9 bytes."""
    for unit, bytes_per_unit in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= bytes_per_unit:
            return f"{num_bytes / bytes_per_unit:.1f} {unit}"
    return f"{num_bytes} bytes"
