"""Admits requests: chooses a slot, frees memory, and restores as much of the prompt as possible.

A request is admitted as a whole, waits for other requests, or is refused with an error that states the reason.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cache import snapshots
from cache.budget import BudgetExceeded, PinnedFull
from cache.disk_moves import Promotion
from cache.layers.layout import SequenceSizes
from cache.lease import Lease, PrivateLease, Recorder, Tier
from cache.lookup import Lookup, LookupResult
from cache.memory_tier import MemoryTier
from cache.pager import Pager
from cache.pins import Pins, path_nodes
from cache.reclaim import Reclaimer, Reservations
from cache.slots import RequestClock, Slot, SlotView, choose_slot
from cache.snapshots import RestorePoint, RestorePointKind, deepest_up_to
from cache.trie import Match, Node, NodeMatch
from cache.types import TokenArray


@dataclass(frozen=True, eq=False)
class CacheRequest:
    """A request as the cache sees it."""

    tokens: TokenArray
    """The whole prompt."""
    lookup: Lookup
    session_id: str | None
    restore_points: Sequence[RestorePoint]
    """Offsets at which later requests should be able to restore the sequence."""
    expected_tokens: int
    """Number of output tokens to reserve memory for."""
    reuse: bool
    """Whether the request may reuse stored state and leave its own state to later requests."""
    is_volatile: bool
    """Whether the request's state must not be written to disk."""
    is_background: bool

    @property
    def namespace(self) -> str:
        """The namespace whose state the request may share."""
        return self.lookup.namespace


class Admission:
    """Turns requests into leases. Worker thread only."""

    def __init__(
        self,
        memory: MemoryTier,
        pager: Pager,
        pins: Pins,
        clock: RequestClock,
        sizes: SequenceSizes,
        reclaimer: Reclaimer,
        reservations: Reservations,
        promotion: Promotion,
        recorder: Recorder,
    ) -> None:
        self._memory = memory
        self._pager = pager
        self._pins = pins
        self._clock = clock
        self._sizes = sizes
        self._reclaimer = reclaimer
        self._reservations = reservations
        self._promotion = promotion
        self._recorder = recorder

    def admit(self, request: CacheRequest) -> Lease | None:
        """Returns a lease on a slot with the prompt restored as far as possible; None if the request must wait for
        another.

        Raises BudgetExceeded if the prompt can never fit, PinnedFull if it cannot fit while other state is pinned.
        """
        if all(slot.is_leased for slot in self._pager.slots):
            return None
        self._clock.begin(request.namespace, request.session_id, is_background=request.is_background)
        found, is_promoted = self._look_up(request)
        slot = self._choose_slot(request, found)
        if slot is None:
            return None
        slot.turn.is_background = request.is_background
        capacity = self._capacity(request)
        left = self._free_memory(request, slot, found, capacity)
        if left is None:
            return None
        shared = left.shared[slot.index]
        self._restore(request, slot, left, capacity)
        self._lease_slot(request, slot)
        self._reservations.reserve(slot, capacity, needed=len(request.tokens))
        is_live = shared >= slot.offset
        tier = Tier.DISK if is_promoted else Tier.LIVE if is_live else Tier.MEMORY
        return self._make_lease(request, slot, found.match, tier if slot.offset else None)

    def _look_up(self, request: CacheRequest) -> tuple[LookupResult, bool]:
        """Reads from disk what memory lacks of the prompt; returns the match in memory, and whether anything was
        read.
        """
        self._pager.trie(request.namespace)  # makes the trie, to which promotion attaches what it reads
        if request.reuse:
            return self._promotion.promote(request.lookup, is_background=request.is_background)
        return self._promotion.result_of(Match([], 0)), False

    def _choose_slot(self, request: CacheRequest, found: LookupResult) -> Slot | None:
        views = [
            SlotView(
                slot=slot.index,
                is_leased=slot.is_leased,
                offset=slot.offset,
                common=shared,
                is_same_session=slot.runs_session(request.namespace, request.session_id),
                turn_start=slot.turn.start,
                last_used=slot.turn.last_used,
            )
            for slot, shared in zip(self._pager.slots, found.shared, strict=True)
        ]
        index = choose_slot(views, found.stored)
        return None if index is None else self._pager.slots[index]

    def _capacity(self, request: CacheRequest) -> int:
        """Returns how many tokens to reserve memory for: fewer than expected if the budget has no more room."""
        num_tokens, budget = len(request.tokens), self._pager.ledger.budget_bytes
        needed = self._sizes.bytes_for(num_tokens)
        if needed > budget:
            raise BudgetExceeded(needed, budget)
        wanted = num_tokens + request.expected_tokens
        excess = self._sizes.bytes_for(wanted) - budget
        return max(num_tokens, self._sizes.tokens_without(excess, wanted))

    def _free_memory(
        self, request: CacheRequest, slot: Slot, found: LookupResult, capacity: int
    ) -> LookupResult | None:
        """Frees memory for a sequence of `capacity` tokens in `slot`; None if the request must wait for other leases.

        Freeing memory may evict part of `found`, so the result is what memory holds of the prompt afterwards.
        """
        excess = self._reclaimer.excess_for(slot, found.path, found.restorable_in(slot), capacity)
        if excess <= 0:
            return found
        needed = found.needed_in(slot, self._pager.layout)
        missing = self._reclaimer.free(excess, protected=needed, busy=slot, is_background=slot.turn.is_background)
        is_shared = self._pager.ledger.set_aside_bytes or any(other.is_leased for other in self._pager.slots)
        if missing > 0 and is_shared:
            return None
        if missing > 0 and not path_nodes(self._pins.explicit()) <= set(found.path):
            raise PinnedFull(missing)
        trie = self._pager.trie(request.namespace)
        return self._promotion.result_of(trie.match(request.tokens[: found.match.length]))

    def _restore(self, request: CacheRequest, slot: Slot, found: LookupResult, capacity: int) -> None:
        """Pages out what `slot` holds beyond the prompt, and pages in what can be restored of the prompt."""
        offset, trie = found.restorable_in(slot), self._pager.trie(request.namespace)
        is_there = slot.namespace == trie.namespace and slot.offset == offset
        if is_there and (not offset or slot.tip in found.path):
            self._pager.keep_tip(slot)
            self._pager.enter(slot, trie)
        else:
            self._page_in(slot, request, found.path, offset, found.shared[slot.index], capacity)
        self._memory.restored(trie, slot.tip, self._clock.now)

    def _page_in(
        self, slot: Slot, request: CacheRequest, path: list[Node], offset: int, shared: int, capacity: int
    ) -> None:
        """Pages `[0, offset)` of the prompt in from `path`; less if freeing memory has evicted part of it.

        The slot already holds the first `shared` tokens of the path.
        """
        trie = self._pager.trie(request.namespace)
        landing = self._pager.land(trie, path, offset)
        self._pager.page_out(slot, min(shared, offset))
        self._pager.enter(slot, trie)
        arriving = landing.path()
        try:
            self._reclaimer.free_to_restore(slot, arriving, offset, capacity)
            left = deepest_up_to(self._pager.layout, landing)
            if left == offset:
                self._pager.page_in(slot, trie, landing, request.tokens[:offset], capacity)
        except Exception:
            # Layers may have stopped at different offsets, and part of the state may already have been moved.
            self._pager.give_up(slot, arriving)
            raise
        if left < offset:
            self._page_in(slot, request, arriving, left, shared, capacity)

    def _lease_slot(self, request: CacheRequest, slot: Slot) -> None:
        slot.turn.last_used = self._clock.now
        slot.lease_to(request.session_id, is_volatile=request.is_volatile)
        self._memory.changed(self._pager.trie(request.namespace), slot.tip)
        ends = [p.offset for p in request.restore_points if p.kind is RestorePointKind.PROMPT_END]
        slot.turn.start = min(ends, default=len(request.tokens) - 1)

    def _make_lease(self, request: CacheRequest, slot: Slot, match: NodeMatch, tier: Tier | None) -> Lease:
        points = self._plan(request, slot.offset, match.length) if request.reuse else ()
        kind = Lease if request.reuse else PrivateLease
        return kind(self._recorder, slot, request.tokens, match, points, tier)

    def _plan(self, request: CacheRequest, offset: int, match_tokens: int) -> Iterable[RestorePoint]:
        """Returns the restore points to capture while the rest of the prompt is evaluated."""
        wanted, num_tokens = request.restore_points, len(request.tokens)
        if not self._pager.layout.needs_snapshots:
            wanted = [point for point in wanted if point.kind is RestorePointKind.EXPLICIT]
        else:
            branch = RestorePoint(match_tokens, RestorePointKind.BRANCH)
            prompt_end = RestorePoint(num_tokens - 1, RestorePointKind.PROMPT_END)
            wanted = [*wanted, branch, prompt_end, *snapshots.intervals(offset, num_tokens)]
        return snapshots.plan(wanted, start=offset, stop=num_tokens)
