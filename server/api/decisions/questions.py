"""Questions about a state, and their answers, in no API's words. Pure.

A question is asked in words, and its options are scored as texts of the answer. Probabilities are the softmax of the
options' log-probabilities; nothing is divided by an option's length. Confidence is 0 where all options are as likely,
and 1 where one is certain.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np

from models.errors import InvalidParameter

MAX_OPTIONS = 255
MAX_LEVELS = 10
YES, NO = "yes", "no"

Content: TypeAlias = str | dict[str, Any] | list[Any]
"""A text, or JSON that is shown as text."""


class QuestionKind(StrEnum):
    """The kinds of answers: the probability of yes, one of some options, or a level of a scale."""

    NOUL = "noul"
    CHOICE = "choice"
    SCORE = "score"


def text_of(content: Content | None) -> str:
    """A text as it is, JSON as its text, nothing as an empty text."""
    return json.dumps(content, ensure_ascii=False) if isinstance(content, dict | list) else content or ""


@dataclass(frozen=True)
class Asked:
    """One question, as the model reads it."""

    name: str
    """The question's field in the body, for errors."""
    kind: QuestionKind
    instructions: str
    criteria: Mapping[str, str]
    """What the answer may be (labels, numbers of levels, or yes and no), and what each means, if that is said."""

    def __post_init__(self) -> None:
        """Raises InvalidParameter."""
        limit = MAX_LEVELS if self.kind is QuestionKind.SCORE else MAX_OPTIONS
        if not 1 <= len(self.criteria) <= limit:
            raise self.wrong(f"it has {len(self.criteria)} options; from 1 to {limit} are taken")
        if not all(map(str.strip, self.criteria)):
            raise self.wrong("an option is an empty text")
        if not (self.instructions.strip() or any(self.criteria.values()) or self.kind is QuestionKind.CHOICE):
            raise self.wrong("it has neither instructions nor criteria")

    def wrong(self, why: str) -> InvalidParameter:
        """The error of this question."""
        return InvalidParameter(self.name, f"{self.name}: {why}")

    @property
    def text(self) -> str:
        """The question, with its options and how to answer."""
        lines = [f"Question: {self.instructions.strip() or 'Which option fits?'}"]
        if self.kind is not QuestionKind.NOUL or any(self.criteria.values()):
            lines += [f"- {option}: {said}" if said else f"- {option}" for option, said in self.criteria.items()]
        lines.append(_HOW[self.kind])
        return "\n".join(lines)


_HOW: Mapping[QuestionKind, str] = {
    QuestionKind.NOUL: "Answer with one word, yes or no.",
    QuestionKind.CHOICE: "Answer with one of these options, word for word, and nothing else.",
    QuestionKind.SCORE: "Answer with the number of the level that fits, and nothing else.",
}


@dataclass(frozen=True)
class Judged:
    """A question's answer."""

    asked: Asked
    probabilities: tuple[float, ...]
    """In the order of the options; their sum is 1."""

    @property
    def best(self) -> int:
        """The likeliest option's place, the first of equal ones."""
        return self.probabilities.index(max(self.probabilities))

    @property
    def confidence(self) -> float:
        num_options, most = len(self.probabilities), max(self.probabilities)
        return max(0.0, (num_options * most - 1) / (num_options - 1)) if num_options > 1 else 1.0

    @property
    def expected(self) -> float:
        """The expected level."""
        return float(sum(level * one for level, one in enumerate(self.probabilities)))


def judged(asked: Asked, logprobs: Sequence[float]) -> Judged:
    """The answer by the options' log-probabilities, numbers; as likely where the model holds none possible."""
    values = np.array(logprobs, np.float64)
    weights = np.exp(values - values.max()) if values.max() > -np.inf else np.ones(len(values))
    return Judged(asked, tuple((weights / weights.sum()).tolist()))
