"""Finds marker strings in text that arrives in pieces. Holds back only what may begin a marker."""

from collections.abc import Sequence
from typing import NamedTuple


class Found(NamedTuple):
    """What a piece of text made certain."""

    before: str
    marker: str | None
    """Complete, right after `before`, if any."""
    after: str
    """The piece's rest after the marker."""


class MarkerSearch:
    """Finds the first marker to be completed; of two ending together, the longer."""

    def __init__(self, markers: Sequence[str]) -> None:
        """`markers` may be empty; none is an empty string."""
        self._markers = markers
        self._first_letters = {marker[0] for marker in markers}
        self._held = ""

    def push(self, text: str) -> Found:
        """Reads up to the first complete marker; the next search begins after it."""
        if not self._held and self._first_letters.isdisjoint(text):
            return Found(text, None, "")
        read, self._held = self._held + text, ""
        ends = [(read.find(marker) + len(marker), -len(marker), marker) for marker in self._markers if marker in read]
        if ends:
            stop, _, marker = min(ends)
            return Found(read[: stop - len(marker)], marker, read[stop:])
        num_safe = len(read) - max(_num_begun(marker, read) for marker in self._markers)
        self._held = read[num_safe:]
        return Found(read[:num_safe], None, "")

    @property
    def is_holding(self) -> bool:
        """Whether text is held back."""
        return bool(self._held)

    def flush(self) -> str:
        """The text held back: the text has ended, so it is no marker."""
        held, self._held = self._held, ""
        return held


def _num_begun(marker: str, text: str) -> int:
    """How many letters of `marker` end the text."""
    longest = min(len(marker) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
