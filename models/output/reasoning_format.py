"""How a model marks what it thinks before it answers, and the limit that a request sets to that. Pure."""

from collections.abc import Container
from dataclasses import dataclass
from typing import Final

KNOWN_MARKERS: Final = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<|channel>thought", "<channel|>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
)
"""What begins and what ends a thought, for the families of models whose thoughts are told apart."""

HARMONY_END: Final = "<|end|>"
"""Ends a thought of gpt-oss, which then names the channel of its answer."""

_IN_LINES: Final = "</"
"""End markers that begin like this stand on a line of their own, with an empty line before the answer."""


@dataclass(frozen=True)
class ReasoningFormat:
    """The markers around a thought."""

    start: str
    end: str
    closing_ids: tuple[int, ...] = ()
    """The tokens that close a thought which has gone on for long enough."""
    start_id: int | None = None
    """The token that is `start`, where one token is."""

    @property
    def closing(self) -> str:
        """The text of `closing_ids`: the end marker with the line breaks that models write around it."""
        if self.end == HARMONY_END:
            return f"{self.end}<|start|>assistant<|channel|>final<|message|>"
        return f"\n{self.end}\n\n" if self.end.startswith(_IN_LINES) else self.end

    def is_opened_by(self, prompt: str, begun: str = "") -> bool:
        """Whether a rendered prompt has begun the thought already, so that the answer goes on with it.

        `begun` is the end of the prompt that is part of the assistant's message, where that is continued.
        """
        return prompt.rstrip().endswith(self.start) or begun.rfind(self.start) > begun.rfind(self.end)

    def is_closed_by(self, prompt: str) -> bool:
        """Whether a rendered prompt holds a thought that is over, so that the answer begins without one."""
        return prompt.rstrip().endswith(self.end)


@dataclass(frozen=True)
class Thinking:
    """What the engine is to know of the thought of one request."""

    reasoning_format: ReasoningFormat
    is_open: bool = False
    """Whether the prompt has begun the thought."""
    max_tokens: int | None = None
    """The thought is closed after so many tokens; None: when the model closes it."""


def find_reasoning_format(vocabulary: Container[str], template: str) -> ReasoningFormat | None:
    """Returns the markers of a model: of those known, the first that it has tokens for or its template names."""
    for start, end in KNOWN_MARKERS:
        if (_has_token(start, vocabulary) and end in vocabulary) or end in template:
            return ReasoningFormat(start, end)
    return None


def _has_token(start: str, vocabulary: Container[str]) -> bool:
    """Whether the marker is a token, or begins with one: Gemma's goes on with a word."""
    return start in vocabulary or (start.startswith("<|channel>") and "<|channel>" in vocabulary)
