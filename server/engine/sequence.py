"""One running request: its tokens, its text so far, its times. Knows no device and no queue."""

import secrets
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from cache.disk.io import Prefetch
from cache.lease import Lease
from cache.lookup import Lookup
from models.inference.sampling_params import SamplingParams
from models.output.pieces import TokenLogprob
from server.engine.output import Output, TextDecoder
from server.engine.request import (
    Event,
    Finished,
    FinishReason,
    GenerationRequest,
    Progress,
    Started,
    Timings,
    TokenArray,
)
from server.engine.scheduler import Ticket, ticket_for

NO_TOKEN = -1
"""Stands behind a prompt that is evaluated to its end; equal to no token."""

SEED_BITS = 63


class Sink(Protocol):
    """Where a request's events go."""

    @property
    def is_behind(self) -> bool: ...

    def post(self, events: list[Event]) -> None:
        """Hands events over, in order."""


@dataclass
class DecodeState:
    """Decoding state; a replay begins with a new one."""

    row: Any = None
    unrecorded: int | None = None
    """A known token, not evaluated yet, hence not in the lease's log."""
    num_launched: int = 0
    """Tokens sampled in all steps, running steps included."""
    is_suspect: bool = False
    """A step failed: the sequence decodes alone until one succeeds."""


class Sequence:
    """The mutable side of a request. Worker thread only."""

    def __init__(
        self,
        request: GenerationRequest,
        sink: Sink,
        decoder: TextDecoder,
        eos_token_ids: frozenset[int],
        *,
        arrival: int,
    ) -> None:
        ends = request.stop_token_ids | (frozenset() if request.ignore_eos else eos_token_ids)
        # A request without a seed gets one, so that a replay samples the same tokens.
        sampling = _seeded(request.sampling).within(len(request.tokens) + request.max_tokens)
        if sampling.min_tokens:
            sampling = replace(sampling, end_token_ids=tuple(sorted(ends)))
        self.request = replace(request, sampling=sampling)
        self.sink = sink
        self.ticket: Ticket = ticket_for(request, arrival, _tokens_to_evaluate(request))
        self.lookup = Lookup(self.tokens, namespace=request.state_namespace)
        """The next match compares only new tokens."""
        self.lease: Lease | None = None
        self.prefetch: Prefetch | None = None
        """State being read from disk, until there is a lease."""
        self.decode = DecodeState()
        self.output = Output(request, decoder, ends)
        self.prompt_logprobs: list[TokenLogprob] = []
        """Of evaluated prompt tokens after the first, where requested."""
        self._output_logprobs: list[TokenLogprob] = []
        self.was_out_of_memory = False
        """A step lacked memory before: the next time the sequence waits for others, or fails alone."""
        self.started: Started | None = None
        self.begun: float | None = None
        """When the request got its slot, in seconds of the clock."""
        self._first_token: float | None = None
        self._last_token: float | None = None
        self._reported_tokens = 0

    @property
    def tokens(self) -> TokenArray:
        """The prompt and, after a replay, the output; all but the last are evaluated before sampling."""
        return self.ticket.tokens

    @property
    def may_launch(self) -> bool:
        return self.output.reason is None and self.decode.num_launched < self.request.max_tokens

    @property
    def max_offset(self) -> int:
        return len(self.request.tokens) + self.request.max_tokens

    def replay(self, *, is_suspect: bool) -> None:
        """Begins again: the text is kept, prompt and output are evaluated anew.

        A sequence that is not suspect only made way, and goes on before any newcomer.
        """
        tokens = np.concatenate([_tokens_to_evaluate(self.request), np.array(self.output.tokens, np.int32)])
        num_passed = self.ticket.num_passed
        self.ticket = ticket_for(self.request, self.ticket.arrival, tokens)
        self.lookup = Lookup(tokens, namespace=self.request.state_namespace)
        self.ticket.num_passed, self.ticket.is_preempted = num_passed, not is_suspect
        self.lease = None
        self.decode = DecodeState(num_launched=len(self.output.tokens), is_suspect=is_suspect)

    def post(self, events: list[Event]) -> None:
        """Hands events to the client."""
        if events:
            self.sink.post(events)

    def record(self) -> None:
        """Adds the token of the last step to the lease's log, if it is known."""
        if self.decode.unrecorded is not None and self.lease is not None:
            self.lease.append(self.decode.unrecorded)
            self.decode.unrecorded = None

    def progress(self) -> list[Event]:
        """Tells of newly evaluated prompt tokens, not of tokens evaluated again."""
        num_prompt = len(self.request.tokens)
        evaluated = min(self.ticket.offset, num_prompt)
        if self.output.tokens or evaluated <= self._reported_tokens:
            return []
        self._reported_tokens = evaluated
        return [Progress(evaluated, num_prompt)]

    def accept(self, token: int, now: float, logprob: TokenLogprob | None = None) -> list[Event]:
        """Takes the next token; returns its events, with Finished at the end."""
        self._first_token = now if self._first_token is None else self._first_token
        self._last_token = now
        if logprob is not None and self.request.prompt_logprobs is not None:
            self._output_logprobs.append(logprob)
        deltas: list[Event] = [*self.output.accept(token, logprob)]
        return deltas if self.output.reason is None else [*deltas, self._finished(self.output.reason, now)]

    def end(self, reason: FinishReason, now: float) -> list[Event]:
        """Returns the text held back and Finished."""
        deltas: list[Event] = [*self.output.end(reason)]
        return [*deltas, self._finished(self.output.reason or reason, now)]

    def _finished(self, reason: FinishReason, now: float) -> Finished:
        return Finished(
            reason,
            len(self.request.tokens),
            self._timings(now),
            self.output.stop_text,
            self.started,
            self.output.reasoning_tokens,
            stop_token=self.output.stop_token,
            rest=self.output.rest,
            scored=(*self.prompt_logprobs[: len(self.request.tokens) - 1], *self._output_logprobs),
        )

    def end_prefetch(self) -> None:
        """Cancels a needless read from disk."""
        if self.prefetch is not None:
            self.prefetch.cancel()
            self.prefetch = None

    def _timings(self, now: float) -> Timings:
        hit = self.started.hit_tokens if self.started else 0
        first = now if self._first_token is None else self._first_token
        return Timings(
            cache_tokens=hit,
            evaluated_tokens=len(self.request.tokens) - hit,
            prompt_ms=1000 * (first - (now if self.begun is None else self.begun)),
            predicted_tokens=len(self.output.tokens),
            predicted_ms=1000 * ((now if self._last_token is None else self._last_token) - first),
        )


def _seeded(sampling: SamplingParams) -> SamplingParams:
    if sampling.seed is not None or sampling.is_greedy:
        return sampling
    return replace(sampling, seed=secrets.randbits(SEED_BITS))


def _tokens_to_evaluate(request: GenerationRequest) -> TokenArray:
    return np.append(request.tokens, np.int32(NO_TOKEN)) if request.is_prefix_only else request.tokens
