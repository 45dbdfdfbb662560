"""Follows the text of one output to the end of its first tool call. Pure."""

from dataclasses import dataclass

from models.output.marker import MarkerSearch
from models.output.reasoning import ThoughtWatch


@dataclass(frozen=True)
class CallMarkers:
    """What stands around one call; neither is empty."""

    start: str
    end: str


class CallWatch:
    """Says when the first call of an output is complete, whatever it holds. Calls in a thought are none.

    It is told of every token after `thoughts` was, so that it knows whether the token was part of the thought.
    """

    def __init__(self, markers: CallMarkers, thoughts: ThoughtWatch | None) -> None:
        self.is_complete = False
        """Whether a call has ended."""
        self._markers = markers
        self._thoughts = thoughts
        self._is_thinking = thoughts is not None and thoughts.is_thinking
        self._is_in_call = False
        self._search = MarkerSearch([markers.start])

    def accept(self, token: int, text: str) -> None:
        """Takes the next token of the output and the text that became certain with it."""
        was_thinking, thoughts = self._is_thinking, self._thoughts
        self._is_thinking = thoughts is not None and thoughts.is_thinking
        if not self._is_thinking:
            self._read(thoughts.answer_begun if was_thinking and thoughts is not None else text)

    def forced(self) -> int | None:
        """It forces nothing."""
        return None

    def finish(self) -> None:
        """There is nothing to end."""

    def _read(self, text: str) -> None:
        while text and not self.is_complete:
            found = self._search.push(text)
            if found.marker is not None:
                self.is_complete = self._is_in_call
                self._is_in_call = True
                self._search = MarkerSearch([self._markers.end])
            text = found.after
