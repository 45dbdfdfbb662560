"""What the output of a model consists of, whatever its format: typed pieces in the order in which they were written.

A parser (`plain.py`, `reasoning.py`, `tool_calls.py`) turns the text of one answer into pieces, and a dialect writes
pieces as its clients expect them. So a new format is a new parser, and a new dialect sees no format. Pure.

Output in which nothing is looked for: all text is part of the answer.

How likely the model held one token of its output. Pure.
"""

from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Text:
    """Text of the answer, never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of what the model thinks before it answers, never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """A call of a tool begins; its arguments follow, then its end."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """The next part of the JSON text of the open call's arguments."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnded:
    """The open call is complete: its arguments together are the JSON text of an object."""


@dataclass(frozen=True, slots=True)
class ToolCallFailed:
    """The open call is malformed or was cut off: the arguments that were passed on so far do not count."""

    text: str
    """All that the model wrote of it, markers included: a part of the answer's text."""


@dataclass(frozen=True, slots=True)
class ToolCallCut:
    """The open call was cut off in an answer that can be nothing but calls: its arguments so far are all of it."""


Piece: TypeAlias = Text | Reasoning | ToolCallStarted | ToolArguments | ToolCallEnded | ToolCallFailed | ToolCallCut


class OutputParser(Protocol):
    """Splits the text of one answer into pieces. Used by one request, on the event loop."""

    @property
    def made_calls(self) -> bool:
        """Whether a complete tool call was returned so far."""
        ...

    def feed(self, text: str) -> list[Piece]:
        """Returns the pieces that `text` completes."""
        ...

    def finish(self, *, is_complete: bool) -> list[Piece]:
        """Returns the pieces that were held back. `is_complete`: the model ended the answer by itself."""
        ...


class PlainParser:
    """Passes text on as it comes."""

    made_calls = False

    def feed(self, text: str) -> list[Piece]:
        """Returns the text, unless it is empty."""
        return [Text(text)] if text else []

    def finish(self, *, is_complete: bool) -> list[Piece]:
        """Returns nothing: nothing is ever held back."""
        return []


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token that was put out, and what the model thought of it and of others in its place."""

    token_id: int
    logprob: float
    """Natural logarithm of its probability, before bias, penalties, temperature, filters and grammars."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens in its place with theirs, the likeliest first; it may be among them."""
