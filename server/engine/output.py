"""The output of one sequence: its tokens, their text, why it ended, and what binds the next token.

Text is decoded token by token, and stop strings are found in it. Knows no queue and no device.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from models.output.grammar import MaskWords
from models.output.marker import MarkerSearch
from models.output.pieces import TokenLogprob
from models.output.reasoning import ThoughtWatch
from models.output.tool_calls import CallWatch
from server.engine.constraint import GrammarConstraint, TokenConstraint
from server.engine.request import Delta, FinishReason, GenerationRequest


class TextDecoder(Protocol):
    """Turns tokens into text, one at a time."""

    def push(self, token_id: int) -> str:
        """Returns the text that became certain with this token."""

    def finish(self) -> str:
        """Returns the text held back."""


MakeDecoder = Callable[[], TextDecoder]


class OutputText:
    """The text of one answer. Text that may begin a stop string is held back until that is certain."""

    def __init__(
        self,
        decoder: TextDecoder,
        stop: tuple[str, ...],
        constraints: Sequence[TokenConstraint] = (),
        *,
        keeps_stop: bool = False,
    ) -> None:
        """`constraints` accept every token and its text, those of a stop string too.

        With `keeps_stop` the stop string is emitted as the end of the text.
        """
        self.stop_text: str | None = None
        """The stop string found; nothing behind it is emitted."""
        self._decoder = decoder
        self._stops = MarkerSearch(stop)
        self._keeps_stop = keeps_stop
        self._constraints = constraints
        self._pending: list[int] = []
        """Tokens whose text is not emitted yet."""
        self._logprobs: list[TokenLogprob] = []
        """Log-probabilities of the pending tokens, where the request asked for them."""

    def push(self, token: int, logprob: TokenLogprob | None = None, *, may_stop: bool = True) -> list[Delta]:
        """Returns the text that a token completes, at most one delta.

        Without `may_stop` no stop string is looked for.
        """
        self._pending.append(token)
        if logprob is not None:
            self._logprobs.append(logprob)
        text = self._decoder.push(token)
        for constraint in self._constraints:
            constraint.accept(token, text)
        return self._emit(text) if may_stop else self._delta(self._stops.flush() + text)

    def leave_out(self, token: int, logprob: TokenLogprob | None = None) -> None:
        """Takes a token that ends the output and adds no text."""
        self._pending.append(token)
        self._logprobs += [] if logprob is None else [logprob]

    def finish(self) -> list[Delta]:
        """Returns the text held back; none where a stop string was found."""
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
        """The tokens that completed no text."""
        return Delta("", tuple(self._pending), tuple(self._logprobs))

    def _emit(self, text: str) -> list[Delta]:
        emitted, self.stop_text, _ = self._stops.push(text)
        kept = self.stop_text if self._keeps_stop else None
        return self._delta(emitted + (kept or ""))

    def _delta(self, text: str) -> list[Delta]:
        if not text:
            return []
        delta = Delta(text, tuple(self._pending), tuple(self._logprobs))
        self._pending, self._logprobs = [], []
        return [delta]


class Output:
    """The output of one request. It survives replays."""

    def __init__(self, request: GenerationRequest, decoder: TextDecoder, end_token_ids: frozenset[int]) -> None:
        """Any of `end_token_ids` ends the output."""
        self.tokens: list[int] = []
        self.reason: FinishReason | None = None
        """Why the output ended; None until it does."""
        self.stop_token: int | None = None
        """The token that ended the output, if one did."""
        self._max_tokens = request.max_tokens
        self._min_tokens = request.sampling.min_tokens
        self._ends = end_token_ids
        self._kept_ends = request.stop_token_ids if request.keeps_stop else frozenset[int]()
        self._thoughts = ThoughtWatch(request.thinking) if request.thinking is not None else None
        self._grammar = GrammarConstraint(request.grammar, self._thoughts) if request.grammar is not None else None
        self._calls = CallWatch(request.single_call, self._thoughts) if request.single_call is not None else None
        # The other constraints read the thoughts, so they take a token after the thoughts.
        bounds: Sequence[TokenConstraint | None] = (self._thoughts, self._grammar, self._calls)
        self._constraints = [bound for bound in bounds if bound is not None]
        self._text = OutputText(decoder, request.stop, self._constraints, keeps_stop=request.keeps_stop)

    @property
    def stop_text(self) -> str | None:
        return self._text.stop_text

    @property
    def rest(self) -> Delta:
        """The tokens whose text was not emitted, nor ever will be once the output has ended."""
        return self._text.rest

    @property
    def reasoning_tokens(self) -> int | None:
        """Number of thought tokens; None where thoughts are not told apart."""
        return None if self._thoughts is None else self._thoughts.num_tokens

    @property
    def is_bound(self) -> bool:
        """Whether the next tokens depend on earlier ones, so the earlier ones must be read first."""
        return self._grammar is not None and self.reason is None

    def mask(self) -> MaskWords | None:
        """Returns which tokens may follow the accepted ones; None where any may. Raises GrammarFailed."""
        return self._grammar.mask() if self._grammar is not None and self.reason is None else None

    def forced_token(self) -> int | None:
        """Returns the token that must follow the accepted ones; None where the sampled one counts."""
        if self.reason is not None:
            return None
        forced = (constraint.forced() for constraint in self._constraints)
        return next((token for token in forced if token is not None), None)

    def accept(self, token: int, logprob: TokenLogprob | None = None) -> list[Delta]:
        """Takes the next token and returns the text that it completes; sets `reason` at the last token."""
        self.tokens.append(token)
        if token in self._ends:
            self.stop_token = token
            if token in self._kept_ends:
                return [*self._text.push(token, logprob, may_stop=False), *self.end(FinishReason.STOP)]
            deltas = self.end(FinishReason.STOP)
            self._text.leave_out(token, logprob)
            return deltas
        deltas = self._text.push(token, logprob, may_stop=len(self.tokens) > self._min_tokens)
        if self._text.stop_text is not None or self._is_complete:
            return [*deltas, *self.end(FinishReason.STOP)]
        if len(self.tokens) >= self._max_tokens:
            return [*deltas, *self.end(FinishReason.LENGTH)]
        return deltas

    @property
    def _is_complete(self) -> bool:
        """Whether only the end of the turn may follow, which needs no step to be known."""
        ends = (self._grammar, self._calls)
        return any(bound is not None and bound.is_complete for bound in ends)

    def end(self, reason: FinishReason) -> list[Delta]:
        """Ends the output here and returns the text held back.

        A stop string in that text makes `STOP` the reason, unless the request was cancelled.
        """
        deltas = self._text.finish()
        has_stopped = self._text.stop_text is not None and reason is not FinishReason.CANCELLED
        self.reason = FinishReason.STOP if has_stopped else reason
        return deltas
