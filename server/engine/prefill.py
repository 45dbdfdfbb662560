"""Prefill: waiting requests get a lease, and prompts are evaluated, one chunk a step.

A failed prefill fails only its own request. The time to restore state counts towards the chunk: decoding rows wait
for it too.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from cache.budget import BudgetExceeded, PinnedFull
from cache.lease import Lease, Tier
from cache.prefix_cache import PrefixCache
from cache.snapshots import RestorePoint, RestorePointKind
from server.engine.diagnosis import Cause, Miss, MissReason, Reuse
from server.engine.request import FinishReason, OutOfMemory, Priority, PromptTooLarge, Started
from server.engine.runner_port import RunnerPort
from server.engine.scheduler import Phase, Scheduler, Ticket
from server.engine.sequence import Sequence, SequenceTable
from server.engine.speculation import Speculation

MAX_SCORED_TOKENS = 128
"""The longest chunk whose logits are all computed: 76 MiB of float32 with 150 000 words."""
ALONE_CHUNKS = 8
"""Chunks at once on a GPU, which one does not fill, while nobody waits for the end of the step."""
FAR_TOKENS = 65_536
"""Beyond it macOS may end a long call, as attention takes most of the time."""
COPIED_PER_EVALUATED = 64
"""Tokens whose state is copied while one is evaluated."""


class Prefill:
    """Admits sequences and evaluates prompts. Worker thread only."""

    def __init__(
        self,
        runner: RunnerPort,
        prefix_cache: PrefixCache,
        scheduler: Scheduler,
        table: SequenceTable,
        clock: Callable[[], float],
        *,
        chunk_tokens: int,
        expected_tokens: int,
        speculation: Speculation | None,
    ) -> None:
        self._runner = runner
        self._prefix_cache = prefix_cache
        self._scheduler = scheduler
        self._table = table
        self._clock = clock
        self._chunk_tokens = chunk_tokens
        self._expected_tokens = expected_tokens
        self._speculation = speculation
        self.alone_tokens = chunk_tokens
        """Of a prompt beside which nothing runs or waits; a multiple of `chunk_tokens`, so that the ends agree."""

    def run_chunk(self, before_each: Callable[[], None]) -> None:
        """Fills one chunk with parts of prompts; a part ends with the chunk, its prompt, or at a restore point.

        `before_each` may end sequences, the chosen one too.
        """
        left_tokens = self._chunk_tokens
        while left_tokens > 0:
            ticket = self._scheduler.choose_prefill(self._restorable, left_tokens)
            if ticket is None:
                return
            before_each()
            sequence = self._table.find(ticket.request_id)
            if sequence is not None:
                left_tokens -= self._advance(sequence)

    def _chunk_for(self, sequence: Sequence) -> int:
        """The tokens to evaluate in one call.

        While the sequence is alone that depends on the position only: what is restored of a prompt changes no end of
        a chunk behind it, unless the rest fits into one (`chunk_end`).
        """
        if sequence.request.prompt_logprobs is not None:
            return min(self._chunk_tokens, MAX_SCORED_TOKENS)
        assert sequence.lease is not None
        is_far = sequence.lease.offset >= FAR_TOKENS
        is_alone = not self._table.others(sequence) and not sequence.request.is_idle_work
        return self.alone_tokens if is_alone and not is_far else self._chunk_tokens

    def share_prefixes(self, sequence: Sequence) -> None:
        """Makes prefills keep a restore point where their prefix in common with the sequence ends."""
        for other in self._table.others(sequence):
            prefills = [one for one in (sequence, other) if one.ticket.phase is Phase.PREFILLING]
            for one in prefills:
                if one.lease is not None:
                    shared = self._scheduler.common_tokens(sequence.ticket, other.ticket)
                    one.lease.want(RestorePoint(shared, RestorePointKind.BRANCH))

    def _restorable(self, ticket: Ticket) -> int:
        if not ticket.shares:
            return 0
        sequence = self._table.find(ticket.request_id)
        return self._prefix_cache.peek(ticket.tokens, lookup=sequence.lookup) if sequence is not None else 0

    def _advance(self, sequence: Sequence) -> int:
        """The part of the chunk taken, in tokens."""
        is_newcomer = sequence.lease is None
        if is_newcomer and not self._admit(sequence):
            return 0
        lease, limit = sequence.lease, len(sequence.tokens) - 1
        assert lease is not None
        taken_tokens = self._restore_cost(lease) if is_newcomer else 0
        if lease.offset < limit:
            stop = lease.chunk_stop(self._chunk_for(sequence), limit)
            taken_tokens += self._evaluate(sequence, lease, stop)
        if lease.is_open and lease.offset >= limit:
            finish = self._end_prefix if sequence.request.is_prefix_only else self._start_decoding
            finish(sequence, lease)
        return taken_tokens

    def _restore_cost(self, lease: Lease) -> int:
        """The time to restore, in tokens that could be evaluated meanwhile."""
        if lease.tier is Tier.MEMORY:
            return math.ceil(lease.hit_tokens / COPIED_PER_EVALUATED)
        return self._chunk_tokens if lease.tier is Tier.DISK else 0

    def _evaluate(self, sequence: Sequence, lease: Lease, stop: int) -> int:
        chunk, num_top = sequence.tokens[lease.offset : stop], sequence.request.prompt_logprobs
        try:
            if num_top is None:
                self._runner.prefill(lease.caches, chunk, sequence.request.adapter_index)
            else:
                following = sequence.tokens[lease.offset + 1 : stop + 1]
                found = self._runner.score(lease.caches, chunk, following, num_top, sequence.request.adapter_index)
                sequence.prompt_logprobs[lease.offset : stop] = found
            lease.advance(chunk)
        except Exception as error:  # whatever the model raises is this request's failure, not the engine's
            self._table.fail_step(sequence, error)
            return len(chunk)
        sequence.ticket.offset = lease.offset
        sequence.post(sequence.progress())
        return len(chunk)

    # -- admission

    def _admit(self, sequence: Sequence) -> bool:
        """False if the sequence must wait for a lease, or failed."""
        try:
            return self._try_admit(sequence)
        except (BudgetExceeded, PinnedFull) as error:
            self._refuse(sequence, error)
        except Exception as error:  # paging failed, or a bug of ours: neither concerns other requests
            self._table.fail_step(sequence, error)
        return False

    def _try_admit(self, sequence: Sequence) -> bool:
        begun = self._clock()
        self._prefix_cache.pins.release_expired(begun)
        lease = self._begin(sequence)
        if lease is None:
            self._scheduler.is_stalled = True
            return False
        sequence.lease = lease
        sequence.end_prefetch()
        sequence.ticket.phase, sequence.ticket.offset = Phase.PREFILLING, lease.offset
        if sequence.started is None:
            self._post_started(sequence, lease, begun)
        if self._speculation is not None and sequence.drafting is None:
            begin_drafting = self._speculation.begin
            sequence.drafting = begin_drafting(sequence.request, lease.match_tokens, sequence.output.forced)
        self.share_prefixes(sequence)
        return True

    def _begin(self, sequence: Sequence) -> Lease | None:
        request = sequence.request
        return self._prefix_cache.begin(
            sequence.tokens,
            namespace=request.state_namespace,
            session_id=request.session_id,
            restore_points=request.restore_points,
            expected_tokens=min(request.max_tokens - len(sequence.output.tokens), self._expected_tokens),
            reuse=request.cache_prompt,
            is_volatile=request.is_volatile,
            is_background=request.priority is Priority.BACKGROUND,
            lookup=sequence.lookup,
        )

    def _refuse(self, sequence: Sequence, error: BudgetExceeded | PinnedFull) -> None:
        if sequence.output.tokens:
            self._table.end_truncated(sequence)
        else:
            kind = PromptTooLarge if isinstance(error, BudgetExceeded) else OutOfMemory
            self._table.fail(sequence, kind(str(error)))

    def _post_started(self, sequence: Sequence, lease: Lease, begun: float) -> None:
        request, now = sequence.request, self._clock()
        sequence.begun = begun
        reuse = Reuse(lease.match_tokens, lease.hit_tokens)
        if request.prompt_logprobs is not None:
            reuse = replace(reuse, miss=Miss(MissReason.DISABLED, token=0, cause=Cause.LOGPROBS))
        restore_ms = 1000 * (now - begun)
        sequence.started = Started(lease.slot_index, len(request.tokens), reuse, restore_ms, lease.tier)
        sequence.post([sequence.started])

    # -- the end of a prompt

    def _start_decoding(self, sequence: Sequence, lease: Lease) -> None:
        last = int(sequence.tokens[-1])
        try:
            sequence.decode.row = self._runner.make_row(
                lease.caches,
                sequence.request.sampling,
                last,
                prompt=sequence.request.tokens,
                generated=sequence.output.tokens,
                adapter=sequence.request.adapter_index,
            )
        except Exception as error:  # an error of the device fails this request only, as in `_evaluate`
            self._table.fail_step(sequence, error)
            return
        sequence.decode.known = [last]
        sequence.ticket.phase = Phase.DECODING

    def _end_prefix(self, sequence: Sequence, lease: Lease) -> None:
        try:
            is_asked_for = not sequence.request.is_idle_work
            lease.keep(RestorePointKind.EXPLICIT if is_asked_for else RestorePointKind.PROMPT_END)
        except Exception as error:  # an error of the device fails this request only, as in `_evaluate`
            self._table.fail_step(sequence, error)
            return
        self._table.end(sequence, FinishReason.LENGTH)
