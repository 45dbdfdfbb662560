"""What comes back for a message, whoever answers: parts of speech as they are said, and what they cost. Pure."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeAlias


class Manner(StrEnum):
    """How a part is meant."""

    ANSWER = "answer"
    THOUGHT = "thought"


@dataclass(frozen=True)
class Said:
    """A part of an answer, never empty."""

    text: str
    manner: Manner = Manner.ANSWER


@dataclass(frozen=True)
class AnswerCosts:
    """Tokens and milliseconds of one answer; `cached_tokens + evaluated_tokens` = prompt tokens."""

    cached_tokens: int
    evaluated_tokens: int
    prompt_ms: float
    predicted_tokens: int
    predicted_ms: float

    def describe(self) -> str:
        """Returns two lines: what the prompt cost and how fast the answer came."""
        prompt_tokens = self.cached_tokens + self.evaluated_tokens
        share = self.cached_tokens / prompt_tokens if prompt_tokens else 0
        # The time runs from the first token to the last, so one token fewer was made in it.
        seconds = self.predicted_ms / 1000
        speed = f", {(self.predicted_tokens - 1) / seconds:.1f} tokens/s" if seconds else ""
        return (
            f"prompt: {prompt_tokens} tokens, {self.cached_tokens} cached ({share:.0%}), "
            f"{self.evaluated_tokens} evaluated in {self.prompt_ms:.0f} ms\n"
            f"answer: {self.predicted_tokens} tokens{speed}"
        )


class AnswerFailed(Exception):
    """There is no answer, or no more of it; the message is one sentence for the person."""


Turn: TypeAlias = dict[str, Any]
"""A message of the conversation, as templates and the API take it."""


class Answerer(Protocol):
    """A model that can be talked to."""

    @property
    def name(self) -> str:
        """What the model is called."""
        ...

    def answer(self, turns: Sequence[Turn], conversation: int) -> AsyncGenerator[Said | AnswerCosts, None]:
        """Yields an answer, and its costs last; raises AnswerFailed. When cancelled it stops the model first."""
        ...


def costs_of(timings: Mapping[str, Any]) -> AnswerCosts:
    """Returns the costs that an answer of the API reports as `timings`; raises KeyError or ValueError."""
    return AnswerCosts(
        int(timings["cache_n"]),
        int(timings["prompt_n"]),
        float(timings["prompt_ms"]),
        int(timings["predicted_n"]),
        float(timings["predicted_ms"]),
    )
