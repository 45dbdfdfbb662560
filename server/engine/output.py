"""The output of one sequence: its tokens, their text, why it ended, and what binds the next token. Pure.

A step may be prepared before the token of the last step is known. A bound speaks of what is behind all accepted
tokens, or behind a draft too. A grammar binds the answer behind the reasoning, or each call in it; a limit on
reasoning forces the tokens that close it.
"""

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from models.errors import GrammarFailed
from models.output.call_reader import CallWatch
from models.output.grammar import CallOpener, MaskWords, OutputGrammar, allows
from models.output.pieces import MarkerSearch, ReasoningWatch, TokenLogprob
from server.engine.request import Delta, FinishReason, GenerationRequest, LoopRule

logger = logging.getLogger(__name__)


class TextDecoder(Protocol):
    """Turns tokens into text, one at a time."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token."""

    def finish(self) -> str:
        """The text held back."""


MakeDecoder = Callable[[], TextDecoder]


class GrammarConstraint:
    """Says which tokens may come next."""

    is_binding = True
    """Earlier tokens decide which may come next, unless any may."""

    def __init__(self, grammar: OutputGrammar, reasoning: ReasoningWatch | None) -> None:
        self._matcher = grammar.compiled.begin()
        if grammar.begun:
            self._matcher.accept_text(grammar.begun)
        self._reasoning = reasoning
        self.is_thinking = reasoning is not None and reasoning.is_thinking
        """The next token is of the reasoning, which the grammar does not bind."""
        self._reasoning_start = grammar.reasoning_start

    @property
    def is_complete(self) -> bool:
        """Nothing may follow the answer."""
        return not self.is_thinking and self._matcher.is_complete

    def accept(self, token: int, answer: str) -> None:
        """Takes the next token; `answer` is its text after the reasoning, which has accepted it already."""
        begins_reasoning = not self.is_thinking and token == self._reasoning_start
        self._reasoning_start = None
        if begins_reasoning:
            self.is_thinking = True
        elif not self.is_thinking:
            self._matcher.accept(token)
        elif self._reasoning is not None and not self._reasoning.is_thinking:
            self.is_thinking = False
            if answer:
                self._matcher.accept_text(answer)

    def release(self) -> bool:
        """Leaves what follows free, where that may be; returns whether."""
        return False

    def mask(self) -> MaskWords:
        """Which tokens may come next; raises GrammarFailed."""
        if self.is_thinking:
            return self._matcher.mask_without_end()
        words = self._matcher.mask()
        if self._reasoning_start is not None:
            word, bit = divmod(self._reasoning_start, 32)
            words[word] |= 1 << bit if bit < 31 else -(1 << 31)
        return words

    def forced(self) -> Sequence[int]:
        """The tokens that must come next, as a matcher gives them."""
        if not self.is_binding:
            return ()
        return () if self.is_thinking or self._reasoning_start is not None else self._matcher.forced()

    def masks_along(self, draft: Sequence[int]) -> list[MaskWords]:
        """Which tokens may come next, and after each of `draft` up to one that may not come or ends the answer.

        The masks hold while `is_thinking` stays as it is. Raises GrammarFailed if the first is unknown.
        """
        masks, matcher = [self.mask()], None
        for token in draft:
            if token == self._reasoning_start or not allows(masks[-1], token):
                break
            if self.is_thinking:
                masks.append(masks[-1])
                continue
            matcher = matcher or self._matcher.copy()
            matcher.accept(token)
            if matcher.is_complete:
                break
            try:
                masks.append(matcher.mask())
            except GrammarFailed:  # raised again if the output comes so far
                break
        return masks


_MAX_OPENER = 256
"""Characters in which an opener is looked for, with white space."""


class CallConstraint(GrammarConstraint):
    """Binds each call of an answer from after its opener to its end. A grammar that fails lets its call go free."""

    def __init__(self, grammar: OutputGrammar, opener: CallOpener) -> None:
        super().__init__(replace(grammar, begun=""), None)
        self.is_binding = False
        self._compiled, self._opener = grammar.compiled, opener
        self._text = ""
        """The end of the answer's text after the last call."""
        self._look(grammar.begun)

    @property
    def is_complete(self) -> bool:
        """An answer may always go on."""
        return False

    def accept(self, token: int, answer: str) -> None:
        """Takes the next token; `answer` is its text after the reasoning, in which nothing is bound."""
        if self.is_binding:
            self._matcher.accept(token)
            self.is_binding = not self._matcher.is_complete
        else:
            self._look(answer, token)

    def release(self) -> bool:
        """Leaves the rest of the call free."""
        self.is_binding = False
        return True

    def _look(self, text: str, token: int | None = None) -> None:
        self._text = (self._text + text)[-_MAX_OPENER:]
        match = self._opener.pattern.search(self._text) if self._opener.token in (None, token) else None
        if match is None:
            return
        self._text, self._matcher, self.is_binding = "", self._compiled.begin(), True
        if begun := match[match.re.groups]:
            self._matcher.accept_text(begun)
            with suppress(GrammarFailed):
                self._matcher.mask()
                return
            self.release()


def _constraint_of(grammar: OutputGrammar | None, reasoning: ReasoningWatch | None) -> GrammarConstraint | None:
    if grammar is None:
        return None
    return (
        GrammarConstraint(grammar, reasoning) if grammar.opener is None else CallConstraint(grammar, grammar.opener)
    )


class LoopWatch:
    """Tells when the last tokens are a loop.

    A token costs as much as it has places among the last `max_pattern` ones: a few in a text.
    """

    def __init__(self, rule: LoopRule) -> None:
        self._rule = rule
        self._num_tokens = 0
        self._places = defaultdict[int, deque[int]](lambda: deque(maxlen=rule.max_pattern))
        """The places of each token, the latest last."""
        self._runs: dict[int, int] = {}
        """By length of a pattern, how many last tokens equal those a pattern before."""

    def accept(self, token: int) -> bool:
        """Takes the next token; whether a loop ends with it."""
        places, rule = self._places[token], self._rule
        while places and self._num_tokens - places[0] > rule.max_pattern:
            places.popleft()
        patterns = [self._num_tokens - place for place in places]
        self._runs = {size: self._runs.get(size, 0) + 1 for size in patterns}
        places.append(self._num_tokens)
        self._num_tokens += 1
        return any(
            size >= rule.min_pattern and size + run >= max(size * rule.min_count, rule.min_tokens)
            for size, run in self._runs.items()
        )


class Output:
    """The output of one request. It survives replays. Text that may begin a stop string is held back."""

    def __init__(self, request: GenerationRequest, decoder: TextDecoder, end_token_ids: frozenset[int]) -> None:
        self.tokens: list[int] = []
        self.reason: FinishReason | None = None
        self.stop_token: int | None = None
        self.stop_text: str | None = None
        """Nothing after it is emitted."""
        self.is_loop = False
        """A loop has ended the output."""
        self._request = request
        self._loops = LoopWatch(request.loops) if request.loops is not None else None
        self._ends = end_token_ids
        self._decoder = decoder
        self._stops = MarkerSearch(request.stop)
        self._pending: list[int] = []
        """Tokens whose text is not emitted yet."""
        self._logprobs: list[TokenLogprob] = []
        self._reasoning = ReasoningWatch(request.thinking) if request.thinking is not None else None
        self._grammar = _constraint_of(request.grammar, self._reasoning)
        self._calls = CallWatch(*request.single_call) if request.single_call is not None else None
        self._bounds = [bound for bound in (self._grammar, self._calls) if bound is not None]

    @property
    def rest(self) -> Delta:
        return Delta("", tuple(self._pending), tuple(self._logprobs))

    @property
    def reasoning_tokens(self) -> int | None:
        """None unless reasoning is told apart."""
        return None if self._reasoning is None else self._reasoning.num_tokens

    @property
    def is_bound(self) -> bool:
        """Earlier tokens must be read before the next is sampled."""
        return self._grammar is not None and self._grammar.is_binding and self.reason is None

    def masks_along(self, draft: Sequence[int]) -> list[MaskWords | None]:
        """Which tokens may come next, and after each of `draft`, up to one that may not come or ends the output.

        None where any may. After an end nothing is sampled, but the end itself may be evaluated ahead. Raises
        GrammarFailed.
        """
        if self._grammar is not None and self.is_bound:
            try:
                return [*self._grammar.masks_along(draft)]
            except GrammarFailed as error:
                if not self._grammar.release():
                    raise
                logger.warning("request %s: the rest of a call goes unbound: %s", self._request.request_id, error)
        num_tokens = next((place + 1 for place, token in enumerate(draft) if token in self._ends), len(draft))
        return [None] * (num_tokens + 1)

    @property
    def follows_grammar(self) -> bool:
        """False in reasoning, where only calls are bound between them, and without a grammar.

        Masks looked up ahead hold while it stays the same.
        """
        return self._grammar is not None and self._grammar.is_binding and not self._grammar.is_thinking

    def forced_token(self) -> int | None:
        """The token that replaces the next sample, if there is one."""
        if self._request.line is not None:
            return next(iter(self._request.line.forced[len(self.tokens) :]), None)
        closing = self._closing() if self._reasoning is not None else ()
        return closing[0] if closing else None

    def forced(self) -> Sequence[int]:
        """The next tokens, as far as there is no choice."""
        if self._grammar is None or self.reason is not None:
            return self._closing()
        return self._closing() or self._grammar.forced()

    def _closing(self) -> Sequence[int]:
        return self._reasoning.forced() if self._reasoning is not None and self.reason is None else ()

    def accept(self, token: int, logprob: TokenLogprob | None = None) -> list[Delta]:
        """Returns the text that the next token completes; sets `reason` at the last one."""
        self.tokens.append(token)
        is_end = token in self._ends
        if is_end:
            self.stop_token = token
            if not (self._request.keeps_stop and token in self._request.stop_token_ids):
                deltas = self.end(FinishReason.STOP)
                self._note(token, logprob)
                return deltas
        self._note(token, logprob)
        text = self._decode(token)
        repeats = self._loops is not None and self._loops.accept(token)
        may_stop = not is_end and len(self.tokens) > self._request.sampling.min_tokens
        text = self._emitted(text) if may_stop else self._stops.flush() + text
        if is_end or self.stop_text is not None or any(bound.is_complete for bound in self._bounds):
            text += self._ended(FinishReason.STOP)
        elif len(self.tokens) >= self._request.max_tokens:
            text += self._ended(FinishReason.LENGTH)
        elif repeats and may_stop:
            text += self._without_loop()
        return self._delta(text)

    def _without_loop(self) -> str:
        """Ends the thought that repeats itself, or else the output; returns the text held back."""
        assert self._request.loops is not None
        self._loops = LoopWatch(self._request.loops)
        if self._reasoning is not None and self._reasoning.close():
            return ""
        self.is_loop = True
        return self._ended(FinishReason.LENGTH)

    def end(self, reason: FinishReason) -> list[Delta]:
        """Returns the text held back; a stop string in it makes `STOP` the reason, except after a cancel."""
        return self._delta(self._ended(reason))

    def _ended(self, reason: FinishReason) -> str:
        if self._reasoning is not None:
            self._reasoning.finish()
        text = self._emitted(self._decoder.finish()) if self.stop_text is None else ""
        if self.stop_text is None:
            text += self._stops.flush()
        has_stopped = self.stop_text is not None and reason is not FinishReason.CANCELLED
        self.reason = FinishReason.STOP if has_stopped else reason
        return text

    def _note(self, token: int, logprob: TokenLogprob | None) -> None:
        self._pending.append(token)
        if logprob is not None:
            self._logprobs.append(logprob)

    def _decode(self, token: int) -> str:
        text = self._decoder.push(token)
        answer = text if self._reasoning is None else self._reasoning.accept(text)
        if self._grammar is not None:
            self._grammar.accept(token, answer)
        if self._calls is not None:
            self._calls.accept(answer)
        return text

    def _emitted(self, text: str) -> str:
        emitted, self.stop_text, _ = self._stops.push(text)
        return emitted + (self.stop_text or "") if self._request.keeps_stop else emitted

    def _delta(self, text: str) -> list[Delta]:
        if not text:
            return []
        delta = Delta(text, tuple(self._pending), tuple(self._logprobs))
        self._pending, self._logprobs = [], []
        return [delta]
