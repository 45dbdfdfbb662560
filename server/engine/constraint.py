"""What binds the tokens of one sequence beside its sampling. Pure.

Decode steps are double-buffered, so the token that a step samples is not known when the next step is prepared. A
constraint therefore speaks of one position only: with all tokens before it accepted, it names the token that must
stand there. `decode_pipeline.py` feeds that one in place of what was sampled, and accepts it when the step is read.
"""

from typing import Protocol


class TokenConstraint(Protocol):
    """Follows the output of one sequence. Worker thread only."""

    def accept(self, token: int, text: str) -> None:
        """Takes the next token of the output, and the text that became certain with it."""

    def forced(self) -> int | None:
        """Returns the token that must come next, whatever is sampled; None where any may."""

    def finish(self) -> None:
        """Says that the output is over."""
