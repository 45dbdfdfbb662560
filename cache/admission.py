"""Admits requests: reads state from disk, chooses a slot, frees memory, restores as much as possible.

A request is admitted whole, waits for others, or is refused with an error that says why. Only what memory lacks is
read; `cache.disk.connector` decides whether that is worth a read.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cache import snapshots
from cache.budget import ASIDE, BudgetExceeded, CacheEvent, DiskFault, Happening, PinnedFull
from cache.disk.connector import DiskConnector, DiskMatch
from cache.disk.io import Prefetch
from cache.layers.state import Segment
from cache.lease import Lease, PrivateLease, Recorder, Tier
from cache.memory_tier import MemoryTier, Pins, path_nodes
from cache.pager import Pager
from cache.reclaim import Heads, Reclaimer, is_in_place
from cache.slots import Lookup, LookupResult, RequestClock, Slot, choose_slot, look_up
from cache.snapshots import RestorePoint, RestorePointKind, deepest_up_to
from cache.trie import Match, Node, NodeMatch, PrefixTrie, Snapshot
from cache.types import TokenArray

MAX_READS = 8
"""After so many unreadable files a prompt is evaluated without the disk."""


@dataclass(eq=False)
class DiskMoves:
    """Looks up prompts in memory and on disk, and moves state."""

    disk: DiskConnector | None
    """None without a disk tier, or once closed."""
    memory: MemoryTier
    pager: Pager
    reclaimer: Reclaimer
    clock: RequestClock

    def __post_init__(self) -> None:
        self.memory.before_eviction = self._save_dropped

    def find_in_memory(self, lookup: Lookup) -> LookupResult:
        """How much of a prompt memory can restore."""
        return self.result_of(lookup.match(self.memory.find_trie(lookup.namespace)))

    def result_of(self, match: NodeMatch) -> LookupResult:
        """How much of a match can be restored now."""
        return look_up(match, self.pager.slots, self.pager.layout)

    def _find_on_disk(self, lookup: Lookup, found: LookupResult) -> DiskMatch | None:
        if self.disk is None:
            return None
        return self.disk.find(lookup.namespace, lookup.tokens, found.match, restorable=found.restorable)

    def find_restorable(self, lookup: Lookup) -> int:
        """Tokens that memory and disk can restore together."""
        found = self.find_in_memory(lookup)
        disk_match = self._find_on_disk(lookup, found)
        return found.restorable if disk_match is None else disk_match.offset

    def prefetch(self, lookup: Lookup) -> Prefetch | None:
        """Begins the reads that `promote` would wait for."""
        disk_match = self._find_on_disk(lookup, self.find_in_memory(lookup)) if self.disk is not None else None
        if self.disk is None or disk_match is None:
            return None
        return self.disk.tier.reader.prefetch(disk_match.parts)

    def promote(self, lookup: Lookup, *, is_background: bool = False) -> tuple[LookupResult, bool]:
        """Reads what disk adds to a prompt, if memory can be freed.

        Returns what memory then holds, and whether anything was read.
        """
        found, ledger = self.find_in_memory(lookup), self.memory.ledger
        for _ in range(MAX_READS):
            disk_match = self._find_on_disk(lookup, found)
            if disk_match is None or self.disk is None or disk_match.num_bytes > ledger.budget_bytes:
                break
            # Freeing memory may write to disk, and a write may evict files. Recording the use now protects the files.
            self.disk.tier.space.touch(disk_match.place, disk_match.offset)
            excess = ledger.excess_bytes(disk_match.num_bytes)
            if self.reclaimer.free(excess, protected=found.path, is_background=is_background) > 0:
                return self.result_of(found.match), False
            try:
                loaded = self.disk.load(disk_match)
                num_tokens, num_bytes = disk_match.offset - found.restorable, disk_match.num_bytes
                self.memory.journal.record(CacheEvent(Happening.READ, lookup.namespace, num_tokens, num_bytes))
                self._attach(lookup, disk_match.offset, *loaded)
            except DiskFault:
                # The faulty file is no longer found, but others may be. Freeing memory may have changed the match.
                found = self.find_in_memory(lookup)
                continue
            return self.find_in_memory(lookup), True
        return found, False

    def _attach(self, lookup: Lookup, offset: int, segment: Segment | None, snapshot: Snapshot | None) -> None:
        trie, tokens = self.pager.trie(lookup.namespace), lookup.tokens[:offset]
        first = segment.start if segment is not None else offset
        assert trie.match(tokens).length >= first, "the state that a read was to extend was evicted meanwhile"
        tip = trie.extend(trie.root, tokens)
        for node in tip.path():
            node.is_volatile = False  # only ordinary requests are written to disk
        if segment is not None:
            trie.store(tip, segment)
        if snapshot is not None:
            tip.kind = RestorePointKind.TURN_END
            trie.snap(tip, snapshot)
        self.memory.order.used(trie.namespace, tip, self.clock.now)

    def _save_dropped(self, trie: PrefixTrie, node: Node) -> None:
        if self.disk is not None:
            self.disk.save_dropped(trie.namespace, node)

    def save(self) -> Iterator[None]:
        """As `PrefixCache.save`, the last used first."""
        if self.disk is None:
            return
        leaves = [(trie, node) for trie, node in self.memory.nodes() if not node.children]
        leaves.sort(key=lambda pair: pair[1].last_used, reverse=True)
        for (trie, leaf), used_at in zip(leaves, self.disk.tier.space.ticks(len(leaves)), strict=True):
            if leaf.parent is not None:
                yield from self._save_path(self.disk, trie, leaf, used_at)

    def _save_path(self, disk: DiskConnector, trie: PrefixTrie, leaf: Node, used_at: int) -> Iterator[None]:
        path = leaf.path()
        ends = [
            slot for slot in self.pager.slots if slot.tip in path and not slot.is_leased and not slot.tip.snapshot
        ]
        tips = [slot.tip for slot in ends]
        for slot in ends:
            self.pager.keep_tip(slot)
        try:
            yield from disk.save_path(trie.namespace, path, self.pager.copy_live, used_at)
        finally:
            for node in tips:
                is_over = self.memory.ledger.excess_bytes() > 0
                if is_over and node.parent is not None and node.snapshot is not None:
                    trie.snap(node, None)


@dataclass(frozen=True, eq=False)
class CacheRequest:
    """A request as the cache sees it."""

    tokens: TokenArray
    lookup: Lookup
    session_id: str | None
    restore_points: Sequence[RestorePoint]
    expected_tokens: int
    reuse: bool
    is_volatile: bool
    is_background: bool

    @property
    def namespace(self) -> str:
        return self.lookup.namespace


@dataclass(frozen=True, eq=False)
class Admission:
    """Turns requests into leases. Worker thread only."""

    memory: MemoryTier
    pager: Pager
    clock: RequestClock
    reclaimer: Reclaimer
    pins: Pins
    disk_moves: DiskMoves
    recorder: Recorder
    heads: Heads

    def admit(self, request: CacheRequest) -> Lease | None:
        """A lease with the prompt restored as far as possible; None if the request must wait.

        Raises BudgetExceeded if the prompt can never fit, PinnedFull if not while other state is pinned.
        """
        if all(slot.is_leased for slot in self.pager.slots):
            return None
        self.clock.begin(request.namespace, request.session_id, is_background=request.is_background)
        found, is_promoted = self._look_up(request)
        slot = choose_slot(self.pager.slots, found, request.namespace, request.session_id)
        if slot is None:
            return None
        found = self._leave_end(request, found)
        slot.turn.is_background = request.is_background
        capacity = self._capacity(request)
        left = self._free_memory(request, slot, self._share_head(request, slot, found, capacity), capacity)
        if left is None:
            return None
        shared = left.shared[slot.index]
        self._restore(request, slot, left, capacity)
        self.heads.gather(is_short=False, also=slot)
        self._lease_slot(request, slot)
        self.reclaimer.reserve(slot, capacity, needed=len(request.tokens))
        is_live = max(shared, slot.origin) >= slot.offset
        tier = Tier.DISK if is_promoted else Tier.LIVE if is_live else Tier.MEMORY
        return self._make_lease(request, slot, found.match, tier if slot.offset else None)

    def _look_up(self, request: CacheRequest) -> tuple[LookupResult, bool]:
        self.pager.trie(request.namespace)  # makes the trie, to which promotion attaches what it reads
        if request.reuse:
            return self.disk_moves.promote(request.lookup, is_background=request.is_background)
        return self.disk_moves.result_of(Match([], 0)), False

    def _leave_end(self, request: CacheRequest, found: LookupResult) -> LookupResult:
        """Has the session end where the prompt leaves it: the rest is evicted first. Returns `found` anew."""
        end = self.memory.order.end_of(request.namespace, request.session_id)
        if end is None or not found.stored or (end in found.path and end.stop <= found.match.length):
            return found
        trie = self.pager.trie(request.namespace)
        tip = self.pager.land(trie, found.path, found.stored)
        tip.session_id = request.session_id
        self.memory.order.used(trie.namespace, tip, self.clock.now)
        self.memory.order.ended(trie.namespace, tip)
        return self._look_again(request, found)

    def _capacity(self, request: CacheRequest) -> int:
        """Fewer tokens than expected, if the budget is too small."""
        num_tokens, budget = len(request.tokens), self.pager.ledger.budget_bytes
        needed = self.pager.layout.bytes_for(num_tokens)
        if needed > budget:
            raise BudgetExceeded(needed, budget)
        wanted = num_tokens + request.expected_tokens
        excess = self.pager.layout.bytes_for(wanted) - budget
        return max(num_tokens, self.pager.layout.tokens_without(excess, wanted))

    def _share_head(self, request: CacheRequest, slot: Slot, found: LookupResult, capacity: int) -> LookupResult:
        """Shares a head with running sequences, where that pays; returns what memory then holds."""
        is_short = self.reclaimer.shortage(slot, found.path, found.restorable_in(slot), capacity) > 0
        return self._look_again(request, found) if self.heads.invite(slot, found, is_short=is_short) else found

    def _look_again(self, request: CacheRequest, found: LookupResult) -> LookupResult:
        trie = self.pager.trie(request.namespace)
        return self.disk_moves.result_of(trie.match(request.tokens[: found.match.length]))

    def _free_memory(
        self, request: CacheRequest, slot: Slot, found: LookupResult, capacity: int
    ) -> LookupResult | None:
        """None if the request must wait; else what memory still holds of `found`."""
        offset = found.restorable_in(slot)
        excess = self.reclaimer.excess_for(slot, found.path, offset, capacity)
        if excess <= 0:
            return found
        needed, head = found.needed_in(slot, self.pager.layout), self.heads.head_of(slot, found.path, offset)
        needed = needed if head is None else [*needed, head.tip]
        is_shared = self.pager.ledger.slot_bytes(ASIDE) > 0 or any(other.is_leased for other in self.pager.slots)
        missing = self.reclaimer.free(
            excess, protected=needed, busy=slot, is_background=slot.turn.is_background, or_nothing=is_shared
        )
        if missing > 0 and is_shared:
            return None
        if missing > 0 and not path_nodes(self.pins.explicit()) <= set(found.path):
            raise PinnedFull(missing)
        return self._look_again(request, found)

    def _restore(self, request: CacheRequest, slot: Slot, found: LookupResult, capacity: int) -> None:
        offset, trie = found.restorable_in(slot), self.pager.trie(request.namespace)
        if slot.namespace == trie.namespace and is_in_place(slot, found.path, offset):
            self.pager.keep_tip(slot)
            self.pager.enter(slot, trie)
        else:
            self._page_in(slot, request, found.path, offset, found.shared[slot.index], capacity)
        self.memory.restored(trie, slot.tip, self.clock.now)

    def _page_in(
        self, slot: Slot, request: CacheRequest, path: list[Node], offset: int, shared: int, capacity: int
    ) -> None:
        """Pages in less than `[0, offset)` if freeing memory evicts some; `slot` holds the first `shared`."""
        trie = self.pager.trie(request.namespace)
        landing = self.pager.land(trie, path, offset)
        arriving, keep = landing.path(), min(shared, offset)
        head = self.heads.head_of(slot, arriving, offset)
        self.pager.page_out_heads(arriving)
        self.pager.page_out(slot, 0 if head is not None and keep <= head.offset and head is not slot.head else keep)
        self.pager.enter(slot, trie)
        try:
            if head is not None and not slot.offset:
                self.pager.enter_head(slot, head)
            elif head is not None and slot.head is None:
                self.pager.share_head(slot, head.tip, head)
            self.reclaimer.free_to_restore(slot, arriving, offset, capacity)
            left = deepest_up_to(self.pager.layout, landing)
            if left == offset:
                self.pager.page_in(slot, trie, landing, request.tokens[:offset], capacity)
        except Exception:
            # Layers may have stopped at different offsets, and part of the state may already have been moved.
            self.pager.give_up(slot, arriving)
            raise
        if left < offset:
            self._page_in(slot, request, arriving, left, shared, capacity)

    def _lease_slot(self, request: CacheRequest, slot: Slot) -> None:
        slot.turn.last_used = self.clock.now
        slot.lease_to(request.session_id, is_volatile=request.is_volatile)
        self.memory.order.changed(request.namespace, slot.tip)
        ends = [p.offset for p in request.restore_points if p.kind is RestorePointKind.PROMPT_END]
        slot.turn.start = min(ends, default=len(request.tokens) - 1)

    def _make_lease(self, request: CacheRequest, slot: Slot, match: NodeMatch, tier: Tier | None) -> Lease:
        points = self._plan(request, slot.offset, match.length) if request.reuse else ()
        kind = Lease if request.reuse else PrivateLease
        return kind(self.recorder, slot, request.tokens, match, points, tier)

    def _plan(self, request: CacheRequest, offset: int, match_tokens: int) -> Iterable[RestorePoint]:
        wanted, num_tokens = request.restore_points, len(request.tokens)
        if not self.pager.layout.needs_snapshots:
            wanted = [point for point in wanted if point.kind is RestorePointKind.EXPLICIT]
        else:
            branch = RestorePoint(match_tokens, RestorePointKind.BRANCH)
            wanted = [*wanted, branch, *snapshots.intervals(offset, num_tokens)]
            ends = [point.offset for point in wanted if point.kind is RestorePointKind.PROMPT_END]
            if not any(0 < num_tokens - end <= snapshots.SAME_TOKENS for end in ends):
                wanted.append(RestorePoint(num_tokens - 1, RestorePointKind.PROMPT_END))
        return snapshots.plan(wanted, start=offset, stop=num_tokens)
