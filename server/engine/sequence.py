"""One request being run: its tokens, its text so far, its times. No device, no queue."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from cache.disk.read_ahead import Prefetch
from cache.lease import Lease
from cache.lookup import Lookup
from models.inference.sampling_params import SamplingParams
from models.output.grammar import MaskWords
from models.output.reasoning import ThoughtWatch
from server.engine.constraint import TokenConstraint
from server.engine.events import Event, Finished, FinishReason, Progress, Started, Timings
from server.engine.grammar_constraint import GrammarConstraint
from server.engine.output_text import MakeDecoder, OutputText, TextDecoder
from server.engine.request import GenerationRequest, TokenArray
from server.engine.scheduler import Ticket, ticket_for

NO_TOKEN = -1
"""Stands behind a prompt that is evaluated to its end: equal to no token that any model knows."""

SEED_BITS = 63


class Sink(Protocol):
    """Where a request's events go."""

    @property
    def is_behind(self) -> bool:
        """Whether the reader has left much of it unread."""
        ...

    def post(self, events: list[Event]) -> None:
        """Hands events over, in order."""


@dataclass
class Timestamps:
    """When a request came to which point, in seconds of the engine's clock; 0 before."""

    submitted: float
    started: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0


@dataclass
class DecodeState:
    """How far a sequence has come in decoding. A replay begins with a new one."""

    row: Any = None
    """The runner's row; None until the sequence decodes."""
    unrecorded: int | None = None
    """A token that is known but not yet evaluated, hence not in the lease's log."""
    num_launched: int = 0
    """Tokens sampled by all steps so far, those under way included."""
    is_suspect: bool = False
    """A step with this sequence failed: it decodes alone until one succeeds."""


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
        now: float,
    ) -> None:
        self.request = request
        self.sink = sink
        self.ticket: Ticket = ticket_for(request, arrival, _tokens_to_evaluate(request))
        self.lookup = Lookup(self.tokens, namespace=request.namespace)
        """Where the cache matched its tokens to last, so that matching them again compares only what is new."""
        self.lease: Lease | None = None
        self.prefetch: Prefetch | None = None
        """What is being read from disk for it, until it has a lease."""
        self.sampling = _seeded(request.sampling)
        """The request's, with a seed in any case: a replay is to go on with the same."""
        self.decode = DecodeState()
        self.generated: list[int] = []
        self.was_out_of_memory = False
        """A step of it failed for lack of memory before: the next time it waits for others, or fails alone."""
        self.reason: FinishReason | None = None
        """Why its answer ended; None until it does."""
        self.started: Started | None = None
        self.times = Timestamps(submitted=now)
        self._eos = frozenset[int]() if request.ignore_eos else eos_token_ids
        self._thoughts = ThoughtWatch(request.thinking) if request.thinking is not None else None
        self._constraints: list[TokenConstraint] = [] if self._thoughts is None else [self._thoughts]
        self._grammar = GrammarConstraint(request.grammar, self._thoughts) if request.grammar is not None else None
        if self._grammar is not None:
            self._constraints.append(self._grammar)  # behind the thoughts, which it asks
        self._text = OutputText(decoder, request.stop, self._constraints)
        self._reported_tokens = 0
        """Evaluated prompt tokens that the last Progress named."""

    @property
    def tokens(self) -> TokenArray:
        """All but the last must be evaluated before a token can be sampled: the prompt, after a replay the output."""
        return self.ticket.tokens

    @property
    def may_launch(self) -> bool:
        """Whether another token may be sampled."""
        return self.reason is None and self.decode.num_launched < self.request.max_tokens

    @property
    def max_offset(self) -> int:
        """The most tokens that its caches can come to hold."""
        return len(self.request.tokens) + self.request.max_tokens

    def replay(self, *, is_suspect: bool) -> None:
        """Goes back to the queue with prompt and output to be evaluated again; loses its state, not its text.

        One that is no suspect has only made way for others, and goes on before any newcomer begins.
        """
        tokens = np.concatenate([_tokens_to_evaluate(self.request), np.array(self.generated, np.int32)])
        num_passed = self.ticket.num_passed
        self.ticket = ticket_for(self.request, self.ticket.arrival, tokens)
        self.lookup = Lookup(tokens, namespace=self.request.namespace)
        self.ticket.num_passed, self.ticket.is_preempted = num_passed, not is_suspect
        self.lease = None
        self.decode = DecodeState(num_launched=len(self.generated), is_suspect=is_suspect)

    def record(self) -> None:
        """Adds the token that the step just launched evaluates to the lease's log, if it is known yet."""
        if self.decode.unrecorded is not None and self.lease is not None:
            self.lease.append(self.decode.unrecorded)
            self.decode.unrecorded = None

    def progress(self) -> list[Event]:
        """Returns the event of prompt tokens evaluated since the last one; none for what is evaluated again."""
        num_prompt = len(self.request.tokens)
        evaluated = min(self.ticket.offset, num_prompt)
        if self.generated or evaluated <= self._reported_tokens:
            return []
        self._reported_tokens = evaluated
        return [Progress(evaluated, num_prompt)]

    def accept(self, token: int, now: float) -> list[Event]:
        """Takes the next token and returns the events it makes; sets `reason` when it is the last one."""
        self.times.first_token = self.times.first_token or now
        self.times.last_token = now
        self.generated.append(token)
        if token in self._eos:
            return self.end(FinishReason.STOP, now)
        events: list[Event] = [*self._text.push(token)]
        if self._text.stop_text is not None:
            return [*events, *self.end(FinishReason.STOP, now)]
        if self._grammar is not None and self._grammar.is_complete:
            # Only the end of the turn may follow, which needs no step to be known.
            return [*events, *self.end(FinishReason.STOP, now)]
        if len(self.generated) >= self.request.max_tokens:
            return [*events, *self.end(FinishReason.LENGTH, now)]
        return events

    def end(self, reason: FinishReason, now: float) -> list[Event]:
        """Ends the answer where it is; returns the text held back so far and the last event.

        A stop string in that text makes `STOP` the reason, unless the request was cancelled.
        """
        events: list[Event] = [*self._text.finish()]
        stop_text = self._text.stop_text
        has_stopped = stop_text is not None and reason is not FinishReason.CANCELLED
        self.reason = FinishReason.STOP if has_stopped else reason
        num_prompt = len(self.request.tokens)
        num_thought = None if self._thoughts is None else self._thoughts.num_tokens
        return [*events, Finished(self.reason, num_prompt, self._timings(now), stop_text, self.started, num_thought)]

    def forced_token(self) -> int | None:
        """Returns the token that must follow those accepted so far; None where the sampled one counts."""
        if self.reason is not None:
            return None
        forced = (constraint.forced() for constraint in self._constraints)
        return next((token for token in forced if token is not None), None)

    @property
    def is_bound(self) -> bool:
        """Whether the tokens that may come next depend on those before, so that these must be read first."""
        return self._grammar is not None and self.reason is None

    def mask(self) -> MaskWords | None:
        """Returns which tokens may follow those accepted so far; None where any may. Raises GrammarFailed."""
        return self._grammar.mask() if self._grammar is not None and self.reason is None else None

    def end_prefetch(self) -> None:
        """Lets go of what was read ahead and is not needed any more."""
        if self.prefetch is not None:
            self.prefetch.cancel()
            self.prefetch = None

    def _timings(self, now: float) -> Timings:
        times = self.times
        hit = self.started.hit_tokens if self.started else 0
        started = times.started or now
        first = times.first_token or now
        return Timings(
            cache_tokens=hit,
            evaluated_tokens=len(self.request.tokens) - hit,
            prompt_ms=1000 * (first - started),
            predicted_tokens=len(self.generated),
            predicted_ms=1000 * ((times.last_token or now) - first),
            queue_ms=1000 * (started - times.submitted),
        )


class SequenceFactory:
    """Makes sequences in the order of their arrival."""

    def __init__(self, make_decoder: MakeDecoder, eos_token_ids: frozenset[int], clock: Callable[[], float]) -> None:
        self._make_decoder = make_decoder
        self._eos = eos_token_ids
        self._clock = clock
        self._num_arrivals = 0

    def __call__(self, request: GenerationRequest, sink: Sink) -> Sequence:
        """Returns the sequence of a request that has just arrived."""
        self._num_arrivals += 1
        decoder, now = self._make_decoder(), self._clock()
        return Sequence(request, sink, decoder, self._eos, arrival=self._num_arrivals, now=now)


def _seeded(sampling: SamplingParams) -> SamplingParams:
    if sampling.seed is not None or sampling.is_greedy:
        return sampling
    return replace(sampling, seed=secrets.randbits(SEED_BITS))


def _tokens_to_evaluate(request: GenerationRequest) -> TokenArray:
    if not request.is_prime:
        return request.tokens
    return np.append(request.tokens, np.int32(NO_TOKEN))
