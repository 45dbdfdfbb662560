"""Generated tokens to text: decoding, stop strings, and which tokens completed which text. Knows no queue."""

from collections.abc import Callable, Sequence
from typing import Protocol

from models.output.marker import StopStringMatcher
from models.output.pieces import TokenLogprob
from server.engine.constraint import TokenConstraint
from server.engine.events import Delta


class TextDecoder(Protocol):
    """Turns tokens into text, one at a time."""

    def push(self, token_id: int) -> str:
        """Returns the text that became certain with this token."""

    def finish(self) -> str:
        """Returns what was held back."""


MakeDecoder = Callable[[], TextDecoder]


class OutputText:
    """The text of one answer. Text that may be the beginning of a stop string is held back until that is certain."""

    def __init__(
        self,
        decoder: TextDecoder,
        stop: tuple[str, ...],
        constraints: Sequence[TokenConstraint] = (),
        *,
        keeps_stop: bool = False,
    ) -> None:
        """`constraints` are told of every token and its text, those of a stop string too.

        With `keeps_stop` the stop string is emitted as the end of the text.
        """
        self.stop_text: str | None = None
        """The stop string that was found; nothing behind it is emitted."""
        self._decoder = decoder
        self._stops = StopStringMatcher(stop)
        self._keeps_stop = keeps_stop
        self._constraints = constraints
        self._pending: list[int] = []
        """Tokens whose text is not emitted yet."""
        self._logprobs: list[TokenLogprob] = []
        """Theirs, where they are told."""

    def push(self, token: int, logprob: TokenLogprob | None = None, *, may_stop: bool = True) -> list[Delta]:
        """Returns the text that a token completes, at most one delta.

        Unless it `may_stop`, no stop string is looked for.
        """
        self._pending.append(token)
        if logprob is not None:
            self._logprobs.append(logprob)
        text = self._decoder.push(token)
        for constraint in self._constraints:
            constraint.accept(token, text)
        return self._emit(text) if may_stop else self._delta(self._stops.flush() + text)

    def leave_out(self, token: int, logprob: TokenLogprob | None = None) -> None:
        """Takes a token that ends the output and has no text there."""
        self._pending.append(token)
        self._logprobs += [] if logprob is None else [logprob]

    def finish(self) -> list[Delta]:
        """Returns what was held back; nothing where a stop string was found."""
        for constraint in self._constraints:
            constraint.finish()
        deltas: list[Delta] = []
        if self.stop_text is None:
            deltas += self._emit(self._decoder.finish())
        if self.stop_text is None:
            deltas += self._delta(self._stops.flush())
        return deltas

    @property
    def rest(self) -> Delta:
        """The tokens that have completed no text."""
        return Delta("", tuple(self._pending), tuple(self._logprobs))

    def _emit(self, text: str) -> list[Delta]:
        emitted, self.stop_text = self._stops.push(text)
        kept = self.stop_text if self._keeps_stop else None
        return self._delta(emitted + (kept or ""))

    def _delta(self, text: str) -> list[Delta]:
        if not text:
            return []
        delta = Delta(text, tuple(self._pending), tuple(self._logprobs))
        self._pending, self._logprobs = [], []
        return [delta]
