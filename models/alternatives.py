"""Names a smaller model for a machine that cannot hold the one that was asked for."""

import re

from models.names import SHORT_NAMES

BYTES_PER_WEIGHT = 0.6
"""Bytes per weight of the 4-bit weights that short names stand for, scales and embeddings included."""


def estimated_bytes(short_name: str) -> int:
    """Returns about how much memory the weights behind a short name take; `qwen3:8b` says 8 billion."""
    match = re.search(r":(\d+(?:\.\d+)?)b$", short_name)
    assert match is not None, f"{short_name} names no size"
    return int(float(match[1]) * 1e9 * BYTES_PER_WEIGHT)


def suggest_smaller(name: str, limit_bytes: int) -> str | None:
    """Returns the short name of the largest model that takes at most `limit_bytes`; None if none does.

    Of the family that `name` belongs to, if that has one.
    """
    fitting = [short for short in SHORT_NAMES if estimated_bytes(short) <= limit_bytes]
    if not fitting:
        return None
    letters = _letters(name)
    related = [short for short in fitting if _letters(short.split(":")[0]) in letters]
    return max(related or fitting, key=estimated_bytes)


def _letters(text: str) -> str:
    return re.sub(r"[^a-z]", "", text.lower())
