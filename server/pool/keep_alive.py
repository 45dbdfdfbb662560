"""How long a model that nobody uses stays loaded: durations as people and Ollama's clients write them. Pure."""

import math
import re

FOREVER = math.inf
WHEN_SHORT_SECONDS = 30 * 60.0
"""Where nothing was asked for and memory is short; forever where it is ample."""
LONGEST_SECONDS = 1e9
"""Longer is for ever: some thirty years."""

_UNIT_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_PART = r"(\d+(?:\.\d+)?)(ms|s|m|h|d)"


def parse_keep_alive(value: str | float) -> float:
    """Returns seconds from `30m`, `1h30m`, `90` or a number; below 0, and `forever`, is forever.

    Raises ValueError.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value != value:
        raise ValueError(_advice(value))
    if isinstance(value, str):
        value = _parse_text(value.strip().lower())
    return FOREVER if value < 0 or value > LONGEST_SECONDS else float(value)


def _parse_text(text: str) -> float:
    if text in ("forever", "none"):
        return -1.0
    if re.fullmatch(r"-?\d+(?:\.\d+)?", text, re.ASCII):
        return float(text)
    sign, digits = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
    if not re.fullmatch(rf"(?:{_PART})+", digits, re.ASCII):
        raise ValueError(_advice(text))
    return sign * sum(float(number) * _UNIT_SECONDS[unit] for number, unit in re.findall(_PART, digits, re.ASCII))


def _advice(value: object) -> str:
    return f"{str(value)[:60]!r} is no duration; write it like 30m, 1h30m, 90 (seconds), or -1 for ever"
