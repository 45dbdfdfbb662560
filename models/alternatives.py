"""Names a smaller model for a machine that cannot hold the one that was asked for."""

import re
from collections.abc import Callable, Sequence

from models.short_names import FAMILIES, ShortName, largest

GENERAL = "qwen3"
"""The family that is named in place of one of which nothing is known."""


def suggest_smaller(name: str, limit_bytes: int) -> str | None:
    """Returns the short name of the largest model that takes at most `limit_bytes`; None if none does.

    Of the family that `name` belongs to, else of one that is called alike, else of any.
    """
    everything = [one for family in FAMILIES.values() for one in family]
    for candidates in (_within(name, _letters_and_digits), _within(name, _letters), FAMILIES[GENERAL], everything):
        found = largest(candidates, limit_bytes)
        if found is not None:
            return found.name
    return None


def _within(name: str, key: Callable[[str], str]) -> Sequence[ShortName]:
    """Returns the models of the families that `name` names, the longest name first."""
    families = [family for family in FAMILIES if key(family) in key(name)]
    longest = max((len(key(family)) for family in families), default=0)
    return [one for family in families if len(key(family)) == longest for one in FAMILIES[family]]


def _letters_and_digits(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _letters(text: str) -> str:
    return re.sub(r"[^a-z]", "", text.lower())
