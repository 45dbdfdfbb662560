"""How thoughts survive a round trip: as what clients call their encrypted content.

It is no secret here and proves nothing: it is the thought itself, for clients that send back nothing
else of it. Pure.
"""

import base64
import binascii
from typing import Final

_MARK: Final = "mlx-serve-text-1:"


def enclose(thought: str) -> str:
    """Returns the encrypted content of a thought."""
    return _MARK + base64.b64encode(thought.encode(errors="replace")).decode()


def thought_of(enclosed: str | None, content: str | None, summary: str) -> str:
    """Returns the thought of an item that came back: what is enclosed, else its content, else its summary."""
    return (_opened(enclosed) if enclosed else None) or content or summary


def _opened(enclosed: str) -> str | None:
    """Returns the thought that `enclose` has enclosed; None for what another server has encrypted."""
    if not enclosed.startswith(_MARK):
        return None
    try:
        return base64.b64decode(enclosed.removeprefix(_MARK), validate=True).decode()
    except (binascii.Error, ValueError):
        return None
