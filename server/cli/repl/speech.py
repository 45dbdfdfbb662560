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

    def answer(
        self, turns: Sequence[Turn], conversation: int, parameters: Mapping[str, Any]
    ) -> AsyncGenerator[Said | AnswerCosts, None]:
        """Yields an answer, and its costs last; raises AnswerFailed. When cancelled it stops the model first.

        `parameters` are those of `server.cli.repl.parameters`; what is not there is as the model recommends.
        """
        ...


class ModelChoice(Protocol):
    """The models that a person can change between."""

    @property
    def current(self) -> Answerer:
        """The one that is talked to."""
        ...

    def names(self) -> Sequence[str]:
        """Returns what `change` takes; may read the disk, or ask a server."""
        ...

    def change(self, name: str) -> None:
        """Makes another one current; raises ModelError or AnswerFailed, and then the current one stays."""
        ...


class OneModel:
    """No choice."""

    def __init__(self, current: Answerer) -> None:
        self.current = current

    def names(self) -> Sequence[str]:
        """Returns the only one."""
        return [self.current.name]

    def change(self, name: str) -> None:
        """Raises AnswerFailed for any other name."""
        if name != self.current.name:
            raise AnswerFailed(f"there is no other model here than {self.current.name}")


def costs_of(timings: Mapping[str, Any]) -> AnswerCosts:
    """Returns the costs that an answer of the API reports as `timings`; raises KeyError or ValueError."""
    return AnswerCosts(
        int(timings["cache_n"]),
        int(timings["prompt_n"]),
        float(timings["prompt_ms"]),
        int(timings["predicted_n"]),
        float(timings["predicted_ms"]),
    )
