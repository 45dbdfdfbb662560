"""What an output consists of in any format: typed pieces in the order of writing. Pure.

Parsers make pieces of an answer's text; dialects write them as their clients expect.
"""

from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Text:
    """Text of the answer, never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning, never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """A call begins; its arguments follow, then its end."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """The next part of the JSON text of the open call's arguments."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnded:
    """The open call is complete: its joined arguments are the JSON text of an object."""


@dataclass(frozen=True, slots=True)
class ToolCallFailed:
    """The open call is malformed or was cut off: its arguments so far do not count."""

    text: str
    """The whole text of the call with its markers, which is part of the answer's text."""


@dataclass(frozen=True, slots=True)
class ToolCallCut:
    """The open call was cut off in an answer that must consist of calls: its arguments end here."""


Piece: TypeAlias = Text | Reasoning | ToolCallStarted | ToolArguments | ToolCallEnded | ToolCallFailed | ToolCallCut


class OutputParser(Protocol):
    """Splits the text of one answer into pieces. On the event loop."""

    @property
    def made_calls(self) -> bool:
        """Whether a complete tool call has been returned."""
        ...

    def feed(self, text: str) -> list[Piece]:
        """Returns the pieces that `text` completes."""
        ...

    def finish(self, *, is_complete: bool) -> list[Piece]:
        """Returns the pieces held back. `is_complete`: the model ended the answer by itself."""
        ...


class PlainParser:
    """Passes all text on as part of the answer."""

    made_calls = False

    def feed(self, text: str) -> list[Piece]:
        """Returns the text, unless it is empty."""
        return [Text(text)] if text else []

    def finish(self, *, is_complete: bool) -> list[Piece]:
        """Returns nothing: nothing is held back."""
        return []


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """An output token with its log-probability, and those of other tokens in its place."""

    token_id: int
    logprob: float
    """Natural logarithm of its probability, before anything that changes sampling."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with their log-probabilities, the likeliest first; may include this token."""
