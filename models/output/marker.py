"""Finds marker strings in a text that arrives in pieces, wherever the pieces are cut.

Text is held back only while it could be the beginning of a marker. Stop strings and the markers around tool calls are
found this way; the search knows neither.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Found(NamedTuple):
    """What one piece of text made certain."""

    before: str
    """Text outside markers that was not returned before."""
    marker: str | None
    """The complete marker right after `before`, if any."""
    after: str
    """The rest of the pushed piece after the marker; empty without a marker."""


class MarkerSearch:
    """Finds the first marker to be completed. Of two that end at the same character, the longer one counts."""

    def __init__(self, markers: Sequence[str]) -> None:
        """`markers` may be empty; none of them is an empty string."""
        self._automata = [_PrefixAutomaton(marker) for marker in markers]
        self._first_letters = {marker[0] for marker in markers}
        self._held = ""

    def push(self, text: str) -> Found:
        """Reads one piece up to the first complete marker; the next search begins after it."""
        if not self._held and self._first_letters.isdisjoint(text):
            return Found(text, None, "")
        for index, letter in enumerate(text):
            for automaton in self._automata:
                automaton.advance(letter)
            complete = [automaton.pattern for automaton in self._automata if automaton.is_complete]
            if complete:
                marker = max(complete, key=len)
                read = self._held + text[: index + 1]
                self._reset()
                return Found(read[: len(read) - len(marker)], marker, text[index + 1 :])
        read = self._held + text
        num_safe = len(read) - max(automaton.num_matched for automaton in self._automata)
        self._held = read[num_safe:]
        return Found(read[:num_safe], None, "")

    @property
    def is_holding(self) -> bool:
        """Whether text is held back that could be the beginning of a marker."""
        return bool(self._held)

    def flush(self) -> str:
        """Returns the text held back: the text has ended, so it is no marker."""
        held = self._held
        self._reset()
        return held

    def _reset(self) -> None:
        self._held = ""
        for automaton in self._automata:
            automaton.num_matched = 0


class _PrefixAutomaton:
    """Counts the letters of `pattern` that the text read so far ends with (Knuth, Morris, Pratt, 1977)."""

    def __init__(self, pattern: str) -> None:
        assert pattern, "a marker is not empty"
        self.pattern = pattern
        self.num_matched = 0
        self._fallback = [0] * (len(pattern) + 1)
        """For each number of letters: the longest shorter prefix that those letters end with."""
        for end in range(2, len(pattern) + 1):
            self._fallback[end] = self._step(self._fallback[end - 1], pattern[end - 1])

    @property
    def is_complete(self) -> bool:
        return self.num_matched == len(self.pattern)

    def advance(self, letter: str) -> None:
        self.num_matched = self._step(self.num_matched, letter)

    def _step(self, num_matched: int, letter: str) -> int:
        while num_matched == len(self.pattern) or self.pattern[num_matched] != letter:
            if num_matched == 0:
                return 0
            num_matched = self._fallback[num_matched]
        return num_matched + 1


class StopStringMatcher:
    """Finds the first stop string in the text of one sequence; holds back a possible beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` may be empty; none of them is an empty string."""
        self._search = MarkerSearch(stops)

    def push(self, text: str) -> tuple[str, str | None]:
        """Returns the text that is safe to emit, up to a complete stop string, and the stop string, if any.

        After a stop string nothing more may be pushed.
        """
        found = self._search.push(text)
        return found.before, found.marker

    def flush(self) -> str:
        """Returns the text held back: the text has ended, so it is no stop string."""
        return self._search.flush()
