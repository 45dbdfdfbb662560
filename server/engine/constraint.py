"""What binds the tokens of one sequence beside its sampling. Pure.

Decode steps are double-buffered, so the token that a step samples is not known when the next step is prepared. A
constraint therefore speaks of one position only: with all tokens before it accepted, it names the token that must
stand there. `decode_pipeline.py` feeds that one in place of what was sampled, and accepts it when the step is read.

Binds the answer of one sequence to a grammar, from the end of its thought on. Pure.
"""

from typing import Protocol

from models.output.grammar import MaskWords, OutputGrammar
from models.output.reasoning import ThoughtWatch


class TokenConstraint(Protocol):
    """Follows the output of one sequence. Worker thread only."""

    def accept(self, token: int, text: str) -> None:
        """Takes the next token of the output, and the text that became certain with it."""

    def forced(self) -> int | None:
        """Returns the token that must come next, whatever is sampled; None where any may."""

    def finish(self) -> None:
        """Says that the output is over."""


class GrammarConstraint:
    """Follows the output of one sequence and says which tokens may come next. Worker thread only.

    It is told of every token after `thoughts` was, so that it knows whether the token was part of the thought.
    """

    def __init__(self, grammar: OutputGrammar, thoughts: ThoughtWatch | None) -> None:
        self._matcher = grammar.compiled.begin()
        if grammar.begun:
            self._matcher.accept_text(grammar.begun)
        self._thoughts = thoughts
        self._is_thinking = thoughts is not None and thoughts.is_thinking
        self._thought_start = grammar.thought_start

    @property
    def is_complete(self) -> bool:
        """Whether the answer is allowed as it is and nothing may follow."""
        return not self._is_thinking and self._matcher.is_complete

    def accept(self, token: int, text: str) -> None:
        """Takes the next token of the output."""
        begins_thought = not self._is_thinking and token == self._thought_start
        self._thought_start = None
        if begins_thought:
            self._is_thinking = True
        elif not self._is_thinking:
            self._matcher.accept(token)
        elif self._thoughts is not None and not self._thoughts.is_thinking:
            self._is_thinking = False
            if self._thoughts.answer_begun:
                self._matcher.accept_text(self._thoughts.answer_begun)

    def forced(self) -> int | None:
        """A mask of one token says the same."""
        return None

    def finish(self) -> None:
        """There is nothing to end."""

    def mask(self) -> MaskWords:
        """Returns which tokens may come next; raises GrammarFailed where that cannot be said."""
        if self._is_thinking:
            return self._matcher.mask_without_end()
        words = self._matcher.mask()
        if self._thought_start is not None:
            words[self._thought_start // 32] |= _bit(self._thought_start % 32)
        return words


def _bit(number: int) -> int:
    """Returns a bit of a signed word of 32 bits."""
    return 1 << number if number < 31 else -(1 << 31)
