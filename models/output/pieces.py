"""What an output consists of in any format: typed pieces in the order of writing. Pure.

Parsers make pieces of an answer's text; dialects write them as clients expect.
"""

from dataclasses import dataclass
from typing import Protocol, TypeAlias


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
        """Whether it returned a complete tool call."""
        ...

    def feed(self, text: str) -> list[Piece]:
        """Returns the pieces that `text` completes."""
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
