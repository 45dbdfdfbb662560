"""Finds marker strings in a text that arrives in pieces. Holds back only what may begin a marker."""

from collections.abc import Sequence
from typing import NamedTuple


class Found(NamedTuple):
    """What one piece of text made certain."""

    before: str
    marker: str | None
    """The complete marker right after `before`, if any."""
    after: str
    """The rest of the pushed piece after the marker."""


class MarkerSearch:
    """Finds the first marker to be completed; of two that end together, the longer one."""

    def __init__(self, markers: Sequence[str]) -> None:
        """`markers` may be empty; none of them is an empty string."""
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
        """Returns the text held back: the text has ended, so it is no marker."""
        held, self._held = self._held, ""
        return held


def _num_begun(marker: str, text: str) -> int:
    """Returns how many letters of `marker` the text ends with."""
    longest = min(len(marker) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
