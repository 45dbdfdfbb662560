"""The worker thread: requests and cancels in, one step at a time, events out; `scheduler` makes the choices.

A step is: prompt tokens up to one prefill chunk, memory for the tokens to come, then one decode step for all live
rows. Only the worker and its parts touch the runner and the prefix cache, on one thread. What happens depends only on
the messages, their order and what `measure` returns before each step, so a seed is a history, and workers of several
machines that get the same do the same.

While a step is under way nothing else is evaluated: MLX raises the step's error at whatever is evaluated next. An
error costs a replay: of the request for which something was evaluated, and of each whose state the error took. The
time to restore state counts towards the chunk: decoding rows wait for it too.
"""

import itertools
import logging
import math
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from cache.budget import BudgetExceeded, PinnedFull
from cache.lease import Lease, Tier
from cache.memory_tier import ROUNDED_TOKENS
from cache.slots import CacheRequest, Lookup
from cache.snapshots import RestorePoint, RestorePointKind
from models.errors import InvalidImage
from models.prompt.pictures import SeenChunk
from server.diagnosis.causes import OF_SCORED, Reuse
from server.engine.decisions import Scoring
from server.engine.decode import DecodePipeline, Seconds
from server.engine.embeddings import EmbeddingJob, Embeddings
from server.engine.output import MakeDecoder
from server.engine.request import (
    DeviceLost,
    EngineStats,
    EngineStopped,
    Failed,
    FinishReason,
    GenerationRequest,
    OutOfMemory,
    Priority,
    PromptTooLarge,
    RequestCounts,
    Started,
    StepFailed,
)
from server.engine.scheduler import LOOKAHEAD, Phase, choose_to_wait
from server.engine.sequence import EngineState, Sequence, SequenceTable, Sink
from server.engine.speculation import Speculation

if TYPE_CHECKING:
    from models.inference.embedding import Embedder
    from models.inference.runner import Runner

logger = logging.getLogger(__name__)

MAX_SCORED_TOKENS = 128
"""The longest chunk whose logits are all computed: 76 MiB of float32 with 150 000 words."""
ALONE_CHUNKS = 8
"""Chunks at once on a GPU, which one does not fill, while nobody waits for the end of the step."""
FAR_TOKENS = 65_536
"""Beyond it macOS may end a long call, as attention takes most of the time."""
COPIED_PER_EVALUATED = 64
"""Tokens whose state is copied while one is evaluated."""
SAVE_SECONDS = 10.0


class Measured(NamedTuple):
    """What a step depends on beside the messages before it. With several machines, that of the first one."""

    now: float
    behind: frozenset[str]
    """The requests whose readers are behind."""
    seconds: Seconds
    """What the step before took, see `DecodePipeline.seconds`."""


class Worker:
    """Runs requests, on one thread."""

    def __init__(
        self,
        runner: "Runner",
        state: EngineState,
        make_decoder: MakeDecoder,
        *,
        eos_token_ids: frozenset[int],
        chunk_tokens: int,
        expected_tokens: int,
        clock: Callable[[], float],
        embedder: "Embedder",
        speculation: Speculation | None = None,
    ) -> None:
        """Without `speculation`, each token has a decode step of its own."""
        self.state = state
        self.prefix_cache = prefix_cache = state.prefix_cache
        self.now = clock
        prefix_cache.pager.shared = runner
        if runner.encoder is not None:
            runner.encoder.kept = prefix_cache.memory.features
        self._table = SequenceTable(runner, state, clock, chunk_tokens)
        self._decode = DecodePipeline(self._table, speculation)
        prefix_cache.use_awaited(self._find_awaited)
        self._embeddings = Embeddings(embedder, prefix_cache.reclaimer, chunk_tokens, self._table.check)
        self._scorings: dict[str, Scoring] = {}
        self._make_decoder = make_decoder
        self._eos = eos_token_ids
        self._arrivals = itertools.count(1)
        self._speculation = speculation
        self._chunk_tokens = self._alone_tokens = chunk_tokens
        """The second of a prompt beside which nothing runs or waits; a multiple, so that the ends agree."""
        self._expected_tokens = expected_tokens
        self._stepped_at = 0.0
        """When the step began, by the clock of the first machine."""
        self.token_seconds = 0.0
        """At most what a token of a chunk takes; 0: not measured."""

    @property
    def chunk_seconds(self) -> float:
        return self.token_seconds * self._alone_tokens

    @property
    def has_work(self) -> bool:
        return len(self._table) > 0 or self._embeddings.has_work or bool(self._scorings)

    # -------------------------------------------------------------------------------------------- messages

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        """Queues a request. A bug of ours fails this request only."""
        try:
            self._submit(request, sink)
        except Exception as error:
            logger.exception("the engine could not take request %s", request.request_id)
            reported = StepFailed(f"the server failed: {error}")
            self._scorings.pop(request.request_id, None)
            if (sequence := self._table.sequences.get(request.request_id)) is not None:
                self._table.fail(sequence, reported)
            else:
                sink.post([Failed(reported)])

    def _submit(self, request: GenerationRequest, sink: Sink) -> None:
        if not request.is_idle_work:
            self._end_idle_work()
        if request.questions:
            num_rows = len(self.prefix_cache.slots)
            sink = self._scorings[request.request_id] = Scoring(request, sink, self._eos, num_rows, self.now)
        sequence = Sequence(request, sink, self._make_decoder(), self._eos, arrival=next(self._arrivals))
        self._table.add(sequence)
        sequence.prefetch = self.prefix_cache.prefetch(sequence.lookup)
        self._share_prefixes(sequence)
        others = self._table.others(sequence)
        if request.is_idle_work and any(other.phase is not Phase.DECODING for other in others):
            self.cancel(request.request_id)

    def embed(self, job: EmbeddingJob) -> None:
        """Queues texts to embed."""
        self._embeddings.add(job)
        self._end_idle_work()

    def cancel(self, request_id: str) -> None:
        """Ends a request; its progress stays cached. Unknown ids are ignored."""
        self.finish_step()
        if (sequence := self._table.sequences.get(request_id)) is not None:
            self._table.end(sequence, FinishReason.CANCELLED)
        elif (scoring := self._scorings.get(request_id)) is not None:
            scoring.cancel()

    def finish_step(self) -> None:
        """Waits for the step under way, so that something else may be evaluated."""
        self._decode.read()

    def close_answered(self, namespace: str | None = None) -> None:
        """Ends sequences whose clients have the whole answer, of one namespace or all."""
        self.finish_step()
        self._table.close_finished([one for one in self._table if namespace in (None, one.request.state_namespace)])

    def recover(self, error: Exception) -> None:
        """After an error that belongs to no request: drops all live state, and evaluates each request again.

        A second time without progress a request fails. Raises DeviceLost.
        """
        self._table.check(error)
        self._decode.forget()
        self._table.runner.drain()
        self._for_each(lambda sequence: self._table.fail_step(sequence, error))

    def _end_all(self, error: Exception) -> None:
        """Ends every request with an error, keeping progress where possible."""
        with suppress(DeviceLost):
            self.finish_step()
        self._for_each(lambda sequence: self._table.fail(sequence, error))
        for scoring in self._scorings.values():
            scoring.fail(error)
        self._scorings = {}
        self._embeddings.fail_all(error)

    def _for_each(self, act: Callable[[Sequence], None]) -> None:
        for sequence in self._table:
            try:
                act(sequence)
            except Exception:  # a bug of ours, which must not keep the others from their end
                logger.exception("request %s could not be ended", sequence.request.request_id)

    def stop(self, *, parks: bool = False) -> None:
        """Ends every request, and releases the device. With `parks` the state is detached, for another worker."""
        try:
            self._end_all(EngineStopped("the server is shutting down"))
            self.prefix_cache.end(SAVE_SECONDS)
            if parks:
                self.prefix_cache.park()
        finally:
            self._table.runner.close()

    def stats(self) -> EngineStats:
        """Current counts and bytes."""
        phases = Counter([sequence.phase for sequence in self._table])
        requests = RequestCounts(phases[Phase.WAITING], phases[Phase.PREFILLING], phases[Phase.DECODING])
        drafts = None if self._speculation is None else self._speculation.stats
        runner, cache = self._table.runner, self.prefix_cache.stats()
        encoded = 0 if runner.encoder is None else runner.encoder.num_encoded
        forms = runner.abilities.rows_form, drafts, runner.abilities.drafts_form
        waits = self._table.waits(has_slot=self._has_free_slot()) if requests.waiting else {}
        return EngineStats(requests, self._table.num_suspended, cache, *forms, num_encoded=encoded, waits=waits)

    def digest(self) -> int:
        """A checksum of what the last step did and left: equal for workers that go the same way."""
        rows = [(one.request.request_id, one.phase.name, one.offset, one.output.tokens[-4:]) for one in self._table]
        slots = [(slot.offset, slot.is_leased, slot.session_id) for slot in self.prefix_cache.slots]
        ledger = self.prefix_cache.ledger
        left = rows, slots, ledger.stored_bytes, ledger.live_bytes, self._embeddings.progress
        return zlib.crc32(repr(left).encode())

    def use_long_chunks(self) -> None:
        """A prompt beside which nothing runs gets longer chunks, as pays on a GPU.

        Not where layers have windows: their buffers hold a chunk more, in each slot.
        """
        if not self.prefix_cache.layout.has_windows:
            self._alone_tokens *= ALONE_CHUNKS

    def _end_idle_work(self) -> None:
        """Evaluated tokens stay."""
        for sequence in self._table:
            if sequence.request.is_idle_work:
                self.cancel(sequence.request.request_id)

    # ------------------------------------------------------------------------------------------------ steps

    def measure(self) -> Measured:
        """What the next step depends on beside the messages."""
        behind = frozenset([one.request.request_id for one in self._table if one.sink.is_behind])
        return Measured(self.now(), behind, self._decode.seconds)

    def step(self, measured: Measured | None = None) -> None:
        """Evaluates up to one chunk of prompt tokens, and runs one decode step."""
        measured = self.measure() if measured is None else measured
        self._decode.learn(measured.seconds)
        self._stepped_at = measured.now
        if self._table.lacks_memory:
            self._table.lacks_memory = False
            self.prefix_cache.reclaimer.relieve()
        self._round_stored()
        self._go_on_scoring()
        for sequence in self._table:
            sequence.is_unread = sequence.request.request_id in measured.behind
            is_read = sequence.prefetch is None or sequence.prefetch.is_done
            sequence.is_loading = not is_read or sequence.awaits_pixels
        self._prefill()
        if self._table.is_stalled and self._has_free_slot() and self._embeddings.give_way():
            self._table.is_stalled = False
        self._reserve_next_step()
        if [sequence for sequence in self._table if sequence.has_lost_state]:
            self._finish_decode_step()
        self._decode.step()
        wants_memory = self._has_free_slot() and any(one.phase is Phase.WAITING for one in self._table)
        if self._embeddings.is_due(is_behind_chat=len(self._table) > 0):
            self.finish_step()
            self._table.lacks_memory |= self._embeddings.step(
                is_behind_chat=len(self._table) > 0, may_take_memory=not wants_memory
            )

    def _round_stored(self) -> None:
        """Rounds a piece of stored state, so that waiting requests may be tried again."""
        if self.prefix_cache.memory.has_exact:
            self.finish_step()
            self.prefix_cache.memory.round_stored(ROUNDED_TOKENS)
            self._table.is_stalled = False

    def _go_on_scoring(self) -> None:
        """Queues the next rows of scored options, and ends those that nobody waits for."""
        for request_id, scoring in list(self._scorings.items()):
            if scoring.may_branch:
                self.finish_step()
                for lease in filter(None, [one.lease for one in self._table if one.request.line is not None]):
                    lease.publish()
            for row in scoring.next_rows():
                self.submit(row.request, row)
            if scoring.is_over:
                del self._scorings[request_id]
                for row in list(scoring.rows):
                    self.cancel(row.request.request_id)

    def _has_free_slot(self) -> bool:
        return bool([slot for slot in self.prefix_cache.slots if not slot.is_leased])

    def _find_awaited(self) -> list[Lookup]:
        return [sequence.lookup for sequence in self._table.in_phase(Phase.WAITING)[:LOOKAHEAD]]

    def _finish_decode_step(self) -> None:
        self._decode.read()
        self._table.close_finished(self._table)
        for sequence in self._table:
            if sequence.has_lost_state and sequence.output.reason is None:
                self._table.replay(sequence)

    # -- prefill

    def _prefill(self) -> None:
        """Fills one chunk with parts of prompts; a part ends with the chunk, its prompt, or at a restore point."""
        left_tokens = self._chunk_tokens
        while left_tokens > 0 and (sequence := self._table.choose_prefill(self._restorable, left_tokens)) is not None:
            self._finish_decode_step()  # may end the chosen sequence
            if sequence in self._table:
                left_tokens -= self._advance(sequence)

    def _chunk_for(self, sequence: Sequence) -> int:
        """The tokens to evaluate in one call.

        While the sequence is alone that depends on the position only: what is restored of a prompt changes no end of
        a chunk after it, unless the rest fits into one (`chunk_end`).
        """
        if sequence.request.prompt_logprobs is not None:
            return min(self._chunk_tokens, MAX_SCORED_TOKENS)
        assert sequence.lease is not None
        is_far = sequence.lease.offset >= FAR_TOKENS
        is_alone = not self._table.others(sequence) and not sequence.request.is_idle_work
        return self._alone_tokens if is_alone and not is_far else self._chunk_tokens

    def _share_prefixes(self, sequence: Sequence) -> None:
        """Makes prefills keep a restore point where their prefix in common with the sequence ends."""
        for other in self._table.others(sequence):
            for one in (sequence, other):
                if one.phase is Phase.PREFILLING and one.lease is not None:
                    shared = self._table.common_tokens(sequence, other)
                    one.lease.want(RestorePoint(shared, RestorePointKind.BRANCH))

    def _restorable(self, sequence: Sequence) -> int:
        return self.prefix_cache.peek(sequence.lookup)

    def _advance(self, sequence: Sequence) -> int:
        """The part of the chunk taken, in tokens; all of it by a failure."""
        try:
            lease, taken_tokens = sequence.lease, 0
            if lease is None:
                lease = self._admit(sequence)
                if lease is None:
                    return 0
                taken_tokens = self._restore_cost(lease)
            if lease.offset < sequence.limit and not lease.is_lost:
                taken_tokens += self._evaluate(sequence, lease)
            if lease.is_lost:  # while memory was freed
                self._table.replay(sequence)
            elif lease.offset >= sequence.limit:
                finish = self._end_prefix if sequence.request.is_prefix_only else self._start_decoding
                finish(sequence, lease)
            return taken_tokens
        except InvalidImage as error:
            self._table.fail(sequence, error)
            return 0
        except Exception as error:  # of the model or of paging, or a bug of ours: none concerns other requests
            self._table.check(error)
            self._table.runner.drain()
            self._table.fail_step(sequence, error)
            return self._chunk_tokens

    def _restore_cost(self, lease: Lease) -> int:
        """The time to restore, in tokens that could be evaluated meanwhile."""
        if lease.tier is Tier.MEMORY:
            return math.ceil(lease.hit_tokens / COPIED_PER_EVALUATED)
        return self._chunk_tokens if lease.tier is Tier.DISK else 0

    def _evaluate(self, sequence: Sequence, lease: Lease) -> int:
        pictures = sequence.request.pictures
        if pictures.placed and (taken_tokens := self._encode(sequence, lease.offset)):
            return taken_tokens
        stop = pictures.chunk_end(lease.offset, lease.chunk_stop(self._chunk_for(sequence), sequence.limit))
        stop = min(stop, sequence.limit)
        chunk, num_top = sequence.tokens[lease.offset : stop], sequence.request.prompt_logprobs
        if num_top is None:
            features = None if sequence.encoding is None else sequence.encoding.features
            seen = SeenChunk(pictures, lease.offset, features) if pictures.placed else None
            self._table.runner.prefill(lease.caches, chunk, sequence.request.adapter_index, seen)
        else:
            following = sequence.tokens[lease.offset + 1 : stop + 1]
            scored = self._table.runner.score(lease.caches, chunk, following, num_top, sequence.request.adapter_index)
            sequence.prompt_logprobs[lease.offset : stop] = scored
        lease.advance(chunk)
        sequence.offset = lease.offset
        sequence.post(sequence.progress())
        sequence.is_loading = sequence.awaits_pixels
        return len(chunk)

    def _encode(self, sequence: Sequence, offset: int) -> int:
        """Evaluates a part of the vision tower for a picture at `offset`; returns its cost in tokens, 0 for none.

        Elsewhere the next picture is decoded meanwhile.
        """
        placed = sequence.request.pictures.next(offset)
        if placed is None:
            sequence.encoding = None
            return 0
        encoder = self._table.runner.encoder
        assert encoder is not None, "a model that sees nothing was given a picture"
        sequence.encoding = encoder.begin(placed.picture, sequence.namespace)
        if offset < placed.start or sequence.encoding.features is not None:
            return 0
        num_tokens = sequence.encoding.step()
        self.prefix_cache.reclaimer.free()  # finished features are charged
        return num_tokens

    # -- admission

    def _admit(self, sequence: Sequence) -> Lease | None:
        """None if the sequence must wait for a slot or for memory, or was refused."""
        begun = self.now()
        self.prefix_cache.pins.release_expired(self._stepped_at)
        try:
            lease = self._begin(sequence)
        except (BudgetExceeded, PinnedFull) as error:
            self._refuse(sequence, error)
            return None
        if lease is None:
            self._table.is_stalled = True
            return None
        sequence.lease = lease
        sequence.end_prefetch()
        sequence.phase, sequence.offset = Phase.PREFILLING, lease.offset
        if sequence.started is None:
            self._post_started(sequence, lease, begun)
        if self._speculation is not None and sequence.drafting is None:
            sequence.drafting = self._speculation.begin(sequence.request, lease.match_tokens, sequence.output.forced)
        self._share_prefixes(sequence)
        return lease

    def _begin(self, sequence: Sequence) -> Lease | None:
        request = sequence.request
        return self.prefix_cache.begin(
            CacheRequest(
                sequence.lookup,
                request.session_id,
                request.restore_points,
                min(request.max_tokens - len(sequence.output.tokens), self._expected_tokens),
                is_volatile=request.is_volatile,
                is_background=request.priority is Priority.BACKGROUND,
                wants_head=request.line is not None,
            )
        )

    def _refuse(self, sequence: Sequence, error: BudgetExceeded | PinnedFull) -> None:
        if sequence.output.tokens:
            self._table.end_truncated(sequence)
        else:
            kind = PromptTooLarge if isinstance(error, BudgetExceeded) else OutOfMemory
            self._table.fail(sequence, kind(str(error)))

    def _post_started(self, sequence: Sequence, lease: Lease, begun: float) -> None:
        request, now = sequence.request, self.now()
        sequence.begun = begun
        tokens = len(request.tokens), lease.match_tokens, lease.hit_tokens
        reuse = Reuse() if request.prompt_logprobs is None else OF_SCORED
        restore_ms, rounded_tokens = 1000 * (now - begun), lease.rounded_tokens
        sequence.started = Started(lease.slot_index, *tokens, restore_ms, lease.tier, reuse, rounded_tokens)
        sequence.post([sequence.started])

    # -- the end of a prompt

    def _start_decoding(self, sequence: Sequence, lease: Lease) -> None:
        sequence.row = self._table.runner.make_row(
            lease.caches,
            sequence.request.sampling,
            int(sequence.tokens[-1]),
            prompt=sequence.request.tokens,
            generated=sequence.output.tokens,
            adapter=sequence.request.adapter_index,
            shift=sequence.request.pictures.shift(len(sequence.request.tokens)),
        )
        sequence.phase = Phase.DECODING

    def _end_prefix(self, sequence: Sequence, lease: Lease) -> None:
        is_asked_for = not sequence.request.is_idle_work
        lease.keep(RestorePointKind.EXPLICIT if is_asked_for else RestorePointKind.PROMPT_END)
        self._table.end(sequence, FinishReason.LENGTH)

    # -- memory

    def _reserve_next_step(self) -> None:
        """Where memory is short, the youngest waits."""
        if not [one for one in self._table if one.phase is Phase.DECODING and not one.has_memory]:
            return
        for sequence in self._decode.next_sequences():
            if sequence.lease is not None and not sequence.has_memory:
                # Recover from a fault of the running step first; a sequence that will wait must have its tokens.
                self._decode.read()
                self._grow(sequence)

    def _grow(self, sequence: Sequence) -> None:
        max_offset = len(sequence.request.tokens) + sequence.request.max_tokens
        while sequence.lease is not None and sequence.lease.is_open:
            try:
                if sequence.lease.try_grow(max_offset, sequence.needed):
                    return
            except Exception as error:  # the device has less memory than the budget says, or paging failed
                self._table.fail_step(sequence, error)
                return
            self._make_way(sequence)

    def _make_way(self, sequence: Sequence) -> None:
        if self._embeddings.give_way():
            return
        running = self._table.leased()
        if any(other.output.reason is not None for other in running):
            self._table.close_finished(running)
        elif (preempted := choose_to_wait(running)) is not None:
            self._preempt(preempted)
        else:
            self._table.end_truncated(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        request_id = sequence.request.request_id
        if sequence.request.is_idle_work:
            self.cancel(request_id)
            return
        logger.info("request %s waits for memory after %d tokens", request_id, sequence.offset)
        self._table.suspend(sequence)
        self._table.is_stalled = True
