"""What limits the next token of one sequence beside its sampling: a grammar, or one forced token. Pure.

Decode steps are double-buffered, so the token that a step samples is unknown while the next step is prepared. A
constraint therefore speaks of one position only: once all earlier tokens are accepted, it names the token that must
stand there. `decode.py` feeds the forced token in place of the sampled one, and accepts it when the step is read. A
grammar binds the answer from the end of the thought on.
"""

from typing import Protocol

from models.output.grammar import MaskWords, OutputGrammar
from models.output.reasoning import ThoughtWatch


class TokenConstraint(Protocol):
    """Follows the output of one sequence. Worker thread only."""

    def accept(self, token: int, text: str) -> None:
        """Takes the next output token, and the text that became certain with it."""

    def forced(self) -> int | None:
        """Returns the token that must come next, whatever is sampled; None where any may."""

    def finish(self) -> None:
        """Says that the output is over."""


class GrammarConstraint:
    """Follows the output of one sequence and says which tokens may come next. Worker thread only.

    Accepts a token after `thoughts` has accepted it, so it knows whether the token was part of the thought.
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
        """Whether the answer is complete and nothing may follow."""
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
        """Returns None: a mask with one token forces it."""
        return None

    def finish(self) -> None:
        """Does nothing."""

    def mask(self) -> MaskWords:
        """Returns which tokens may come next. Raises GrammarFailed where the grammar cannot say."""
        if self._is_thinking:
            return self._matcher.mask_without_end()
        words = self._matcher.mask()
        if self._thought_start is not None:
            words[self._thought_start // 32] |= _bit(self._thought_start % 32)
        return words


def _bit(number: int) -> int:
    return 1 << number if number < 31 else -(1 << 31)
