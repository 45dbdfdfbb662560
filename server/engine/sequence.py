"""Requests being run: the tokens, text and times of one, and the table of all that have not ended.

Each sequence gets exactly one Finished or Failed, and each lease ends exactly once. Computed state stays in the
cache, except after a failed step, which may have damaged it. Knows no device and no queue.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from cache.disk.tier import Prefetch
from cache.lease import Lease
from cache.memory_tier import PinName
from cache.prefix_cache import PrefixCache
from cache.slots import Lookup
from cache.types import common_prefix_length
from cache.views import view
from models.adapter import client_namespace
from models.output.pieces import TokenLogprob
from server.engine.output import Output, TextDecoder
from server.engine.request import (
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    OutOfMemory,
    Priced,
    Progress,
    Started,
    StepFailed,
    Timings,
    TokenArray,
    check_device,
    is_out_of_memory,
)
from server.engine.scheduler import Scheduled, Scheduler, choose_to_wait
from server.engine.speculation import Drafting

if TYPE_CHECKING:
    from models.inference.runner import Runner
    from models.vision.features import Encoding

logger = logging.getLogger(__name__)

NO_TOKEN = -1
"""Stands after a prompt that is evaluated to its end; equal to no token."""

RELIEF_FAULTS = 2
"""For lack of memory; the second has stored state make way, and from the third on a sequence waits."""


class Sink(Protocol):
    """Where a request's events go."""

    @property
    def is_behind(self) -> bool: ...

    def post(self, events: list[Event]) -> None:
        """Hands events over, in order."""


class Sequence(Scheduled):
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
        sampling = request.sampling.within(len(request.tokens) + request.max_tokens)
        if sampling.min_tokens:
            sampling = replace(sampling, end_token_ids=tuple(sorted(ends)))
        super().__init__(replace(request, sampling=sampling), arrival)
        self.sink = sink
        self.prefetch: Prefetch | None = None
        """State being read from disk, until there is a lease."""
        self.output = Output(request, decoder, ends)
        self.prompt_logprobs: list[TokenLogprob] = []
        """Log-probabilities of evaluated prompt tokens after the first, where requested."""
        self._output_logprobs: list[TokenLogprob] = []
        self.num_faults = 0
        """Errors since the sequence last came further."""
        self._reached = 0
        """Tokens, of prompt and output, at the latest error."""
        self.started: Started | None = None
        self.begun: float | None = None
        """When the request got its slot, in seconds of the clock."""
        self._first_token: float | None = None
        self._last_token: float | None = None
        self._reported_tokens = 0
        self.drafting: Drafting | None = None
        self.may_draft = request.speculates
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.begin()

    def begin(self, *, is_suspect: bool = False) -> None:
        """Waits to be evaluated: the prompt and, in a replay, the output. All but the last are prefilled."""
        behind = [NO_TOKEN] if self.request.is_prefix_only else self.output.tokens
        self.queue(np.append(self.request.tokens, np.array(behind, np.int32)) if behind else self.request.tokens)
        self.lookup = Lookup(
            self.tokens,
            namespace=self.namespace,
            reuse=self.request.cache_prompt,
            pictures=self.request.pictures.ranges,
        )
        """The next match compares only new tokens."""
        self.encoding: Encoding | None = None
        """The encoding of the next picture, while the prompt is evaluated up to it."""
        self.lease: Lease | None = None
        self.row: Any = None
        """A `DecodeRow`, while the sequence decodes. The lease's log has all tokens but the known ones."""
        self.is_suspect = is_suspect
        """A step failed: the sequence decodes alone until one succeeds."""

    @property
    def may_launch(self) -> bool:
        """The output goes on after the step under way, which samples the next token of a row without known ones."""
        num_sampled = len(self.output.tokens) + (not self.row.known)
        return self.output.reason is None and num_sampled < self.request.max_tokens

    @property
    def needed(self) -> int:
        """Tokens that the next step evaluates at least."""
        return len(self.row.known) or 1

    @property
    def needs_no_step(self) -> bool:
        """Once answered: no last token is to be evaluated for the next turn."""
        return not (self.row.known and self.request.cache_prompt and self.request.line is None)

    @property
    def has_memory(self) -> bool:
        """Memory for the next step is reserved."""
        return self.lease is not None and self.lease.spare_tokens >= self.needed

    @property
    def awaits_pixels(self) -> bool:
        """The next place is of a picture that is still being decoded."""
        is_inside = self.request.pictures.at(self.offset) is not None
        return is_inside and self.encoding is not None and not self.encoding.is_ready

    @property
    def is_drafted_for(self) -> bool:
        return self.may_draft and not self.is_suspect and self.output.reason is None

    @property
    def has_lost_state(self) -> bool:
        return self.lease is not None and self.lease.is_lost

    def note_fault(self) -> None:
        """Counts an error."""
        num_output = len(self.output.tokens)
        reached = len(self.request.tokens) + num_output if num_output else self.offset
        self.num_faults = 1 if reached > self._reached else self.num_faults + 1
        self._reached = max(self._reached, reached)

    def post(self, events: list[Event]) -> None:
        """Hands events to the client."""
        if events:
            self.sink.post(events)

    def log(self, num_tokens: int) -> None:
        """Moves the first known tokens, which the layer caches hold by now, to the lease's log."""
        if num_tokens:
            assert self.lease is not None
            self.lease.append(*self.row.known[:num_tokens])
            self.row.known = self.row.known[num_tokens:]

    def progress(self) -> list[Event]:
        """Tells of newly evaluated prompt tokens, not of replayed ones."""
        num_prompt = len(self.request.tokens)
        evaluated = min(self.offset, num_prompt)
        if self.output.tokens or evaluated <= self._reported_tokens:
            return []
        self._reported_tokens = evaluated
        return [Progress(evaluated, num_prompt)]

    def accept(self, samples: Iterable[int], now: float, logprob: Callable[[int, int], TokenLogprob | None]) -> int:
        """Takes samples while the row's draft agrees with them, up to the output's end; tells the client.

        Adds what was chosen to the row's known tokens; returns how many of them are of the draft.
        """
        row, output, events, num_accepted = self.row, self.output, list[Event](), 0
        follows_grammar = bool(row.draft) and output.follows_grammar
        if (line := self.request.line) is not None:
            told = [logprob(token, 0) for token in line.wanted[len(output.tokens)]]
            events.append(Priced(tuple(one.logprob for one in told if one is not None)))
        for place, (sample, drafted) in enumerate(zip_longest(samples, row.draft)):
            forced = output.forced_token()
            token = sample if forced is None else forced
            events += self._push(token, now, logprob(token, place))
            row.known.append(token)
            row.is_forced = token != sample
            # After a change of what binds the output, samples were drawn within a wrong mask.
            if token != drafted or (output.reason is None and output.follows_grammar != follows_grammar):
                break
            num_accepted += 1
            if output.reason is not None:
                break
        self.is_suspect = False
        self.drafted_tokens += len(row.draft)
        self.accepted_tokens += num_accepted
        self.post([*events, *self.finished(now)])
        return num_accepted

    def _push(self, token: int, now: float, logprob: TokenLogprob | None) -> list[Delta]:
        """Takes the next token; returns the text that it completes."""
        self._first_token = now if self._first_token is None else self._first_token
        self._last_token = now
        if logprob is not None and self.request.prompt_logprobs is not None:
            self._output_logprobs.append(logprob)
        deltas = self.output.accept(token, logprob)
        if self.drafting is not None:
            self.drafting.push(token)
        return deltas

    def finished(self, now: float) -> list[Event]:
        """Finished, if the output has ended."""
        reason, followed = self.output.reason, self.drafting.prediction if self.drafting is not None else None
        if reason is None:
            return []
        predicts = self.request.prediction is not None
        finished = Finished(
            reason,
            len(self.request.tokens),
            self._timings(now),
            self.output.stop_text,
            self.started,
            self.output.reasoning_tokens,
            stop_token=self.output.stop_token,
            rest=self.output.rest,
            scored=(*self.prompt_logprobs[: len(self.request.tokens) - 1], *self._output_logprobs),
            accepted_prediction_tokens=(followed.num_confirmed if followed else 0) if predicts else None,
            rejected_prediction_tokens=(followed.num_missed if followed else 0) if predicts else None,
            is_loop=self.output.is_loop,
        )
        return [finished]

    def end_prefetch(self) -> None:
        """Cancels a needless read from disk."""
        if self.prefetch is not None:
            self.prefetch.cancel()
            self.prefetch = None

    def _timings(self, now: float) -> Timings:
        hit = self.started.hit_tokens if self.started else 0
        begun, first, last = (now if at is None else at for at in (self.begun, self._first_token, self._last_token))
        return Timings(
            cache_tokens=hit,
            evaluated_tokens=len(self.request.tokens) - hit,
            prompt_ms=1000 * (first - begun),
            predicted_tokens=len(self.output.tokens),
            predicted_ms=1000 * (last - first),
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
        )


MAX_SESSIONS = 1024
MAX_BYTES = 64 << 20
"""Some 160 turns of 100 000 tokens."""
_TURN_BYTES = 512


class EngineState:
    """The cache, and last turn, pins and slot claim of each session. One thread at a time may use it.

    Turns are bounded in number and bytes; the least recently used go. Once parked, it outlives the engine.
    """

    def __init__(self, prefix_cache: PrefixCache, fingerprint: str = "") -> None:
        """`fingerprint`: of model, precision and libraries."""
        self.prefix_cache, self.fingerprint = prefix_cache, fingerprint
        self.last_used = 0.0
        """The time of last use of a model that is not loaded."""
        self._turns: OrderedDict[tuple[str, str], TokenArray] = OrderedDict()
        self.turn_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of parked state."""
        return self.prefix_cache.ledger.stored_bytes

    def shrink(self, budget_bytes: int) -> None:
        """Drops the least valuable state down to `budget_bytes`; all of it where pins forbid that."""
        if self.prefix_cache.try_resize(budget_bytes):
            self.prefix_cache.clear()

    def clear(self, namespace: str) -> tuple[int, int, int]:
        """Drops state, except what running requests use; returns its tokens, bytes in memory and bytes on disk."""
        before = view(self.prefix_cache, namespace, max_nodes=0)
        self.prefix_cache.clear(namespace)
        after = view(self.prefix_cache, namespace, max_nodes=0)
        memory_bytes = before.state.in_memory - after.state.in_memory
        return before.num_tokens - after.num_tokens, memory_bytes, before.state.disk - after.state.disk

    def forget_client(self, namespace: str, session_id: str) -> None:
        """As `forget`, with whatever adapter the client's namespace was used."""
        for name in {*self.prefix_cache.memory.tries, *self.prefix_cache.history.namespaces}:
            if client_namespace(name)[0] == namespace:
                self.forget(name, session_id)

    def record(self, namespace: str, session_id: str, tokens: TokenArray) -> None:
        """Keeps a turn, unless it begins the kept one."""
        last = self._take(namespace, session_id)
        if last is not None and common_prefix_length(tokens, last) == len(tokens):
            tokens = last
        # A view would keep a longer array alive.
        tokens = tokens if tokens.base is None else tokens.copy()
        self._turns[namespace, session_id] = tokens
        self.turn_bytes += tokens.nbytes + _TURN_BYTES
        while len(self._turns) > MAX_SESSIONS or self.turn_bytes > MAX_BYTES:
            self._take(*next(iter(self._turns)))

    def last(self, namespace: str, session_id: str) -> TokenArray | None:
        """The last turn."""
        return self._turns.get((namespace, session_id))

    def pin(self, namespace: str, session_id: str) -> int:
        """As the command."""
        tokens = self.last(namespace, session_id)
        return 0 if tokens is None else self.prefix_cache.pins.pin(PinName(namespace, session_id), tokens)

    def forget(self, namespace: str, session_id: str) -> None:
        """As the command."""
        self._take(namespace, session_id)
        self.prefix_cache.history.forget(namespace, session_id)
        for is_soft in (False, True):
            self.prefix_cache.pins.release(PinName(namespace, session_id, is_soft))
        for slot in self.prefix_cache.slots:
            if (slot.namespace, slot.session_id) == (namespace, session_id):
                slot.session_id = None

    def _take(self, namespace: str, session_id: str) -> TokenArray | None:
        tokens = self._turns.pop((namespace, session_id), None)
        if tokens is not None:
            self.turn_bytes -= tokens.nbytes + _TURN_BYTES
        return tokens


class SequenceTable(Scheduler[Sequence]):
    """The unfinished sequences; how they end and start over. Worker thread only."""

    def __init__(self, runner: "Runner", state: EngineState, clock: Callable[[], float], chunk_tokens: int) -> None:
        super().__init__(chunk_tokens)
        self.runner, self.prefix_cache, self.state, self.clock = runner, state.prefix_cache, state, clock
        self.num_suspended = 0
        self.lacks_memory = False
        """The device had none for the state of requests that are tried again: stored state is to make way."""

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Over a snapshot, so sequences may be removed meanwhile."""
        return iter(list(self.sequences.values()))

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.request.request_id in self.sequences

    def others(self, sequence: Sequence) -> list[Sequence]:
        """All sequences except this one."""
        return [other for other in self if other is not sequence]

    def leased(self) -> list[Sequence]:
        """The sequences with a slot."""
        return [sequence for sequence in self if sequence.lease is not None]

    def check(self, error: Exception) -> None:
        """Raises DeviceLost where nothing can be evaluated after an error."""
        check_device(error, is_divided=self.runner.is_divided)

    # -- endings

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends the sequence, and its answer unless that has ended."""
        if sequence.output.reason is None:
            sequence.post([*sequence.output.end(reason), *sequence.finished(self.clock())])
        self.close(sequence)

    def end_truncated(self, sequence: Sequence) -> None:
        """Ends an answer that has outgrown the whole budget."""
        logger.warning("request %s ends early: its state fills the cache memory", sequence.request.request_id)
        self.end(sequence, FinishReason.LENGTH)

    def fail(self, sequence: Sequence, error: Exception) -> None:
        """Ends a sequence with an error."""
        if sequence.output.reason is None:
            sequence.post([Failed(error)])
        self.close(sequence)

    def close(self, sequence: Sequence) -> None:
        """Ends a sequence whose client has the last event."""
        self._forget(sequence)
        request, lease = sequence.request, sequence.lease
        if lease is None:
            return
        if request.session_id is not None and request.cache_prompt and not request.is_idle_work:
            tokens = np.append(request.tokens, np.array(sequence.output.tokens, np.int32))
            self.state.record(sequence.namespace, request.session_id, tokens[: lease.offset])
        self._release(sequence, lease, lease.close)

    def close_finished(self, sequences: Iterable[Sequence]) -> None:
        """Closes answered sequences."""
        for sequence in sequences:
            if sequence.output.reason is not None and sequence in self:
                self.close(sequence)

    def fail_step(self, sequence: Sequence, error: Exception) -> None:
        """Evaluates a sequence again, alone, or fails it. Evaluates nothing. Raises DeviceLost.

        After a second error without progress the sequence fails; where memory is short, stored state makes way, then
        the sequence waits for another's end.
        """
        self.check(error)
        lacks_memory = is_out_of_memory(error)
        if sequence.output.reason is None and self._try_again(sequence, lacks_memory=lacks_memory):
            logger.warning("request %s is tried again: %s", sequence.request.request_id, error)
            return
        if sequence.output.reason is None:
            logger.error("request %s failed", sequence.request.request_id, exc_info=error)
            reported = StepFailed(f"the model failed on this request: {error}")
            no_memory = OutOfMemory("there is not enough memory for this request now")
            sequence.post([Failed(no_memory if lacks_memory else reported)])
        self._forget(sequence)
        if sequence.lease is not None:
            sequence.lease.discard()

    # -- starting over

    def replay(self, sequence: Sequence) -> None:
        """Queues a sequence again without its live state, which may be damaged."""
        if sequence.lease is not None:
            sequence.lease.discard()
        self._begin_again(sequence, is_suspect=True)

    def suspend(self, sequence: Sequence) -> None:
        """Takes a sequence's slot and queues it; the trie keeps its state."""
        assert sequence.lease is not None
        self.num_suspended += 1
        self._release(sequence, sequence.lease, sequence.lease.suspend)
        self._begin_again(sequence, is_suspect=False)
        sequence.is_preempted = True

    def defer_youngest(self, sequences: list[Sequence]) -> None:
        """Makes the youngest replayed sequence wait for another's end: together they might fail again."""
        waits = choose_to_wait(sequence for sequence in sequences if sequence in self)
        if waits is not None:
            self._defer(waits)

    def _try_again(self, sequence: Sequence, *, lacks_memory: bool) -> bool:
        sequence.note_fault()
        waits, others = sequence.num_faults > RELIEF_FAULTS, [one for one in self.leased() if one is not sequence]
        if (sequence.num_faults > 1 and not lacks_memory) or (waits and not others):
            return False
        self.replay(sequence)
        self.lacks_memory |= sequence.num_faults > 1
        if waits:
            self._defer(sequence)
        return True

    def _defer(self, sequence: Sequence) -> None:
        sequence.is_preempted = sequence.is_deferred = True
        self.num_suspended += 1

    def _begin_again(self, sequence: Sequence, *, is_suspect: bool) -> None:
        self.take_out(sequence)
        sequence.begin(is_suspect=is_suspect)
        self.add(sequence)

    def _release(self, sequence: Sequence, lease: Lease, end: Callable[[], None]) -> None:
        try:
            if sequence.row is not None:
                self.runner.detach(sequence.row)
            end()
        except Exception as error:  # what cannot be read out is dropped; the client has got all that was generated
            logger.warning("the state of request %s was lost: %s", sequence.request.request_id, error)
            if lease.is_open:
                lease.discard()

    def _forget(self, sequence: Sequence) -> None:
        self.remove(sequence)
        sequence.end_prefetch()
        if sequence.drafting is not None:
            sequence.drafting.end()
