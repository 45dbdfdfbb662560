"""Signatures of thoughts: what clients keep beside a thought, and send back with it.

A signature proves nothing here: a thought counts as it comes back, whoever wrote it. For a thought that is not shown,
the signature holds the text, so that the client sends the thought back with it. Pure.
"""

import base64
import binascii
import hashlib
from typing import Final

_DIGEST: Final = "mlx-serve-1:"
_TEXT: Final = "mlx-serve-text-1:"


def sign(thought: str) -> str:
    """Returns the signature of a thought that is shown."""
    return _DIGEST + base64.b64encode(hashlib.sha256(_encoded(thought)).digest()).decode()


def enclose(thought: str) -> str:
    """Returns the signature of a thought that is not shown, which holds it."""
    return _TEXT + base64.b64encode(_encoded(thought)).decode()


def thought_of(shown: str, signature: str) -> str:
    """Returns the thought of a block that came back: what is shown, or what its signature encloses."""
    if shown or not signature.startswith(_TEXT):
        return shown
    try:
        return base64.b64decode(signature.removeprefix(_TEXT), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


def _encoded(thought: str) -> bytes:
    return thought.encode(errors="replace")
