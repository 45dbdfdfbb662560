"""Admits requests: reads state from disk, chooses a slot, frees memory, restores as much as possible.

A request is admitted whole, waits for others, or is refused with an error that says why. Only what memory lacks is
read; `cache.disk.connector` decides whether that is worth a read.
"""

from collections.abc import Iterable, Iterator

from cache import snapshots
from cache.budget import ASIDE, BudgetExceeded, CacheEvent, DiskFault, Happening, PinnedFull
from cache.disk.connector import DiskConnector, DiskMatch
from cache.disk.io import Prefetch
from cache.layers.state import Segment
from cache.lease import Lease, PrivateLease, Tier
from cache.memory_tier import path_nodes
from cache.reclaim import Reclaimer, is_in_place
from cache.slots import CacheRequest, Lookup, LookupResult, Slot, choose_slot, look_up
from cache.snapshots import RestorePoint, RestorePointKind, deepest_up_to
from cache.trie import Node, NodeMatch, Place, PrefixTrie, Snapshot

MAX_READS = 8
"""After so many unreadable files a prompt is evaluated without the disk."""


class Admission:
    """Looks up prompts in memory and on disk, and turns requests into leases. Worker thread only."""

    def __init__(self, reclaimer: Reclaimer) -> None:
        self._reclaimer = reclaimer
        self._pager = reclaimer.pager
        self._memory = reclaimer.memory
        self._layout = reclaimer.layout

    # -- memory and disk

    def find_in_memory(self, lookup: Lookup) -> LookupResult:
        """How much of a prompt memory can restore."""
        return self._result_of(lookup.match(self._memory.find_trie(lookup.namespace)))

    def _result_of(self, match: NodeMatch) -> LookupResult:
        return look_up(match, self._pager.slots, self._layout)

    def _find_on_disk(self, lookup: Lookup, found: LookupResult) -> DiskMatch | None:
        if self._memory.disk is None:
            return None
        return self._memory.disk.find(lookup.namespace, lookup.tokens, found.match, restorable=found.restorable)

    def find_restorable(self, lookup: Lookup) -> int:
        """Tokens that memory and disk can restore together."""
        found = self.find_in_memory(lookup)
        disk_match = self._find_on_disk(lookup, found)
        return found.restorable if disk_match is None else disk_match.offset

    def prefetch(self, lookup: Lookup) -> Prefetch | None:
        """Begins the reads that `admit` would wait for."""
        if self._memory.disk is None:
            return None
        disk_match = self._find_on_disk(lookup, self.find_in_memory(lookup))
        return self._memory.disk.tier.reader.prefetch(disk_match.parts) if disk_match is not None else None

    def _promote(self, lookup: Lookup, *, is_background: bool) -> tuple[LookupResult, bool]:
        """Reads what disk adds to a prompt, if memory can be freed.

        Returns what memory then holds, and whether anything was read.
        """
        found, ledger = self.find_in_memory(lookup), self._memory.ledger
        for _ in range(MAX_READS):
            disk_match = self._find_on_disk(lookup, found)
            if disk_match is None or self._memory.disk is None or disk_match.num_bytes > ledger.budget_bytes:
                break
            # Freeing memory may write to disk, and a write may evict files. Recording the use now protects the files.
            self._memory.disk.tier.touch(disk_match.place, disk_match.offset)
            excess = ledger.excess_bytes(disk_match.num_bytes)
            if self._reclaimer.free(excess, protected=found.path, is_background=is_background) > 0:
                return self._result_of(found.match), False
            try:
                loaded = self._memory.disk.load(disk_match)
                fields = {"tokens": disk_match.offset - found.restorable, "bytes": disk_match.num_bytes}
                self._memory.journal.record(CacheEvent(Happening.READ, lookup.namespace, fields))
                self._attach(lookup, disk_match.offset, *loaded)
            except DiskFault:
                # The faulty file is no longer found, but others may be. Freeing memory may have changed the match.
                found = self.find_in_memory(lookup)
                continue
            return self.find_in_memory(lookup), True
        return found, False

    def _attach(self, lookup: Lookup, offset: int, segment: Segment | None, snapshot: Snapshot | None) -> None:
        trie, tokens = self._pager.trie(lookup.namespace), lookup.tokens[:offset]
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
        self._memory.used(trie, tip)

    def save(self) -> Iterator[None]:
        """As `PrefixCache.save`, the last used first."""
        if self._memory.disk is None:
            return
        leaves = [(trie, node) for trie, node in self._memory.nodes() if not node.children]
        leaves.sort(key=lambda pair: pair[1].last_used, reverse=True)
        for (trie, leaf), used_at in zip(leaves, self._memory.disk.tier.ticks(len(leaves)), strict=True):
            if leaf.parent is not None:
                yield from self._save_path(self._memory.disk, trie, leaf, used_at)

    def _save_path(self, disk: DiskConnector, trie: PrefixTrie, leaf: Node, used_at: int) -> Iterator[None]:
        path = leaf.path()
        idle = [slot for slot in self._pager.slots if slot.tip in path and not slot.is_leased]
        tips = [slot.tip for slot in idle if not slot.tip.snapshot]
        for slot in idle:
            self._pager.keep_tip(slot)
        try:
            yield from disk.save_path(trie.namespace, path, self._pager.copy_live, used_at)
        finally:
            for node in tips:
                is_over = self._memory.ledger.excess_bytes() > 0
                if is_over and node.parent is not None and node.snapshot is not None:
                    trie.snap(node, None)

    # -- admission

    def admit(self, request: CacheRequest) -> Lease | None:
        """As `PrefixCache.begin`."""
        slots = self._pager.slots
        if all(slot.is_leased for slot in slots):
            return None
        clock = self._memory.clock
        clock.begin(request.namespace, request.session_id, is_background=request.is_background)
        found, is_promoted = self._look_up(request)
        slot = choose_slot(slots, found, request.namespace, request.session_id)
        if slot is None:
            return None
        found = self._leave_end(request, found)
        slot.is_background = request.is_background
        capacity = self._capacity(request)
        left = self._free_memory(request, slot, found, capacity)
        if left is None:
            return None
        shared = left.shared[slot.index]
        self._restore(request, slot, left, capacity)
        self._reclaimer.gather(is_short=False, also=slot)
        self._lease_slot(request, slot)
        self._reclaimer.reserve(slot, capacity, needed=len(request.tokens))
        is_live = max(shared, slot.origin) >= slot.offset
        tier = Tier.DISK if is_promoted else Tier.LIVE if is_live else Tier.MEMORY
        return self._make_lease(request, slot, found.match.length, tier if slot.offset else None)

    def _look_up(self, request: CacheRequest) -> tuple[LookupResult, bool]:
        trie = self._pager.trie(request.namespace)  # makes the trie, to which promotion attaches what it reads
        if request.reuse:
            return self._promote(request.lookup, is_background=request.is_background)
        return self._result_of(Place(trie.root, 0)), False

    def _look_again(self, request: CacheRequest, found: LookupResult) -> LookupResult:
        trie = self._pager.trie(request.namespace)
        return self._result_of(trie.match(request.tokens[: found.match.length]))

    def _leave_end(self, request: CacheRequest, found: LookupResult) -> LookupResult:
        """Has the session end where the prompt leaves it: the rest is evicted first. Returns `found` anew."""
        end = self._memory.order.end_of(request.namespace, request.session_id)
        if end is None or not found.stored or (end in found.path and end.stop <= found.match.length):
            return found
        trie = self._pager.trie(request.namespace)
        tip = self._pager.land(trie, found.path, found.stored)
        tip.session_id = request.session_id
        self._memory.ended(trie, tip)
        return self._look_again(request, found)

    def _capacity(self, request: CacheRequest) -> int:
        """Fewer tokens than expected, if the budget is too small."""
        num_tokens, budget = len(request.tokens), self._memory.ledger.budget_bytes
        needed = self._layout.bytes_for(num_tokens)
        if needed > budget:
            raise BudgetExceeded(needed, budget)
        wanted = num_tokens + request.expected_tokens
        excess = self._layout.bytes_for(wanted) - budget
        return max(num_tokens, self._layout.tokens_without(excess, wanted))

    def _free_memory(
        self, request: CacheRequest, slot: Slot, found: LookupResult, capacity: int
    ) -> LookupResult | None:
        """Shares a head where that pays, and frees memory.

        None if the request must wait; else what memory still holds of `found`.
        """
        if self._reclaimer.invite(slot, found, capacity):
            found = self._look_again(request, found)
        ledger, num_evictions = self._memory.ledger, self._memory.num_evictions
        is_shared = ledger.slot_bytes(ASIDE) > 0 or any(other.is_leased for other in self._pager.slots)
        offset = found.restorable_in(slot)
        missing = self._reclaimer.free_for(slot, found.path, offset, capacity, or_nothing=is_shared)
        if missing > 0 and is_shared:
            return None
        if missing > 0 and not path_nodes(self._reclaimer.pins.explicit()) <= set(found.path):
            raise PinnedFull(missing)
        return found if self._memory.num_evictions == num_evictions else self._look_again(request, found)

    def _restore(self, request: CacheRequest, slot: Slot, found: LookupResult, capacity: int) -> None:
        offset, trie = found.restorable_in(slot), self._pager.trie(request.namespace)
        if slot.namespace == trie.namespace and is_in_place(slot, found.path, offset):
            self._pager.keep_tip(slot)
            self._pager.enter(slot, trie)
        else:
            self._page_in(slot, request, found.path, offset, found.shared[slot.index], capacity)
        for node in slot.tip.path():
            node.num_uses += 1
        self._memory.used(trie, slot.tip)

    def _page_in(
        self, slot: Slot, request: CacheRequest, path: list[Node], offset: int, shared: int, capacity: int
    ) -> None:
        """Pages in less than `[0, offset)` if freeing memory evicts some; `slot` holds the first `shared`."""
        trie = self._pager.trie(request.namespace)
        landing = self._pager.land(trie, path, offset)
        arriving, keep = landing.path(), min(shared, offset)
        head = self._reclaimer.head_of(slot, arriving, offset)
        self._pager.page_out_heads(arriving)
        self._pager.page_out(slot, 0 if head is not None and keep <= head.offset and head is not slot.head else keep)
        self._pager.enter(slot, trie)
        try:
            if head is not None and not slot.offset:
                self._pager.enter_head(slot, head)
            elif head is not None and slot.head is None:
                self._pager.share_head(slot, head.tip, head)
            self._reclaimer.free_for(slot, arriving, offset, capacity)  # a request that was admitted waits no more
            left = deepest_up_to(self._layout, landing)
            if left == offset:
                self._pager.page_in(slot, trie, landing, request.tokens[:offset], capacity)
        except Exception:
            # Layers may have stopped at different offsets, and part of the state may already have been moved.
            self._pager.give_up(slot, arriving)
            raise
        if left < offset:
            self._page_in(slot, request, arriving, left, shared, capacity)

    def _lease_slot(self, request: CacheRequest, slot: Slot) -> None:
        slot.last_used = self._memory.clock.now
        slot.lease_to(request.session_id, is_volatile=request.is_volatile)
        self._memory.order.changed(request.namespace, slot.tip)
        ends = [p.offset for p in request.restore_points if p.kind is RestorePointKind.PROMPT_END]
        slot.turn_start = min(ends, default=len(request.tokens) - 1)

    def _make_lease(self, request: CacheRequest, slot: Slot, match_tokens: int, tier: Tier | None) -> Lease:
        points = self._plan(request, slot.offset, match_tokens) if request.reuse else ()
        kind = Lease if request.reuse else PrivateLease
        return kind(self._reclaimer, slot, len(request.tokens), match_tokens, points, tier)

    def _plan(self, request: CacheRequest, offset: int, match_tokens: int) -> Iterable[RestorePoint]:
        wanted, num_tokens = request.restore_points, len(request.tokens)
        if not self._layout.needs_snapshots:
            wanted = [point for point in wanted if point.kind is RestorePointKind.EXPLICIT]
        else:
            branch = RestorePoint(match_tokens, RestorePointKind.BRANCH)
            wanted = [*wanted, branch, *snapshots.intervals(offset, num_tokens)]
            ends = [point.offset for point in wanted if point.kind is RestorePointKind.PROMPT_END]
            if not any(0 < num_tokens - end <= snapshots.SAME_TOKENS for end in ends):
                wanted.append(RestorePoint(num_tokens - 1, RestorePointKind.PROMPT_END))
        return snapshots.plan(wanted, start=offset, stop=num_tokens)
