"""What an output consists of in any format: typed pieces in the order of writing. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Text:
    """The answer's text, never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The model's reasoning, never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """A call begins; its arguments follow, then its end."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """The next part of the open call's JSON text of arguments."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnded:
    """The open call is complete: its joined arguments are a JSON object."""


@dataclass(frozen=True, slots=True)
class ToolCallFailed:
    """The open call is malformed or cut off: its arguments do not count."""

    text: str
    """All of the call with its markers, part of the answer's text."""


@dataclass(frozen=True, slots=True)
class ToolCallCut:
    """An answer that must be calls was cut off: the arguments end here."""


Piece: TypeAlias = Text | Reasoning | ToolCallStarted | ToolArguments | ToolCallEnded | ToolCallFailed | ToolCallCut


class OutputParser(Protocol):
    """Splits one answer's text into pieces. On the event loop."""

    @property
    def made_calls(self) -> bool:
        """A complete tool call was returned."""
        ...

    def feed(self, text: str) -> list[Piece]:
        """The pieces that `text` completes."""
        ...

    def finish(self, *, is_complete: bool) -> list[Piece]:
        """The pieces held back. `is_complete`: the model ended the answer by itself."""
        ...


class PlainParser:
    """Passes all text on as the answer."""

    made_calls = False

    def feed(self, text: str) -> list[Piece]:
        """The text, unless empty."""
        return [Text(text)] if text else []

    def finish(self, *, is_complete: bool) -> list[Piece]:
        """Nothing is held back."""
        return []


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """An output token's log-probability, and other tokens' in its place."""

    token_id: int
    logprob: float
    """Natural logarithm, before anything that changes sampling."""
    top: tuple[tuple[int, float], ...] = ()
    """Likeliest tokens, the likeliest first; may include this token."""


class Found(NamedTuple):
    """What a piece of text made certain."""

    before: str
    marker: str | None
    """The complete marker right after `before`, if any."""
    after: str


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
        return bool(self._held)

    def flush(self) -> str:
        """The text held back, which is no marker since the text has ended."""
        held, self._held = self._held, ""
        return held


def _num_begun(marker: str, text: str) -> int:
    """How many letters of `marker` end the text."""
    longest = min(len(marker) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
