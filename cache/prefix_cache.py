"""The prefix cache of one model. All methods belong to the worker thread.

To admit a request is to read its state from disk, choose a slot, free memory, and restore as much as possible. A
request is admitted whole, waits for others, or is refused with an error that says why. Only what memory lacks is
read; `cache.disk.connector` decides whether that is worth a read. Nothing here knows models, request parameters, or
time.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from cache import snapshots
from cache.budget import ASIDE, PADDING, BudgetExceeded, CacheStats, DiskFault, Happening, PinnedFull
from cache.disk.connector import DiskConnector, DiskMatch
from cache.disk.tier import DiskTier, Prefetch
from cache.history import History
from cache.layers.layout import CHUNK_TOKENS, Layout
from cache.layers.state import Segment
from cache.lease import Lease, PrivateLease, Tier
from cache.memory_tier import ROUNDED_TOKENS, MemoryTier, Pins, path_nodes
from cache.pager import Pager
from cache.reclaim import Reclaimer, is_in_place
from cache.slots import CacheRequest, Lookup, LookupResult, Slot, choose_slot, look_up
from cache.snapshots import RestorePoint, RestorePointKind, deepest
from cache.trie import Node, Snapshot
from cache.types import LayerCache, TokenArray

MAX_READS = 8
"""After so many unreadable files a prompt is evaluated without the disk."""


class PrefixCache:
    """State of all conversations with one model."""

    def __init__(
        self,
        make_caches: Callable[[], list[LayerCache]],
        *,
        num_slots: int,
        budget_bytes: int,
        chunk_tokens: int = CHUNK_TOKENS,
        layout: Layout | None = None,
        disk: DiskTier | None = None,
        salt: bytes | None = None,
    ) -> None:
        """`layout` defaults to that of `make_caches`; `disk` gets idle state, and state beyond the budget.

        `salt`: see `History`.
        """
        self.layout = layout or Layout(make_caches(), chunk_tokens)
        self.history = History(stored=disk.tree if disk is not None else None, salt=salt)
        connector = DiskConnector(disk, self.layout) if disk is not None else None
        self.memory = MemoryTier(self.layout, budget_bytes, connector)
        self.ledger = self.memory.ledger
        self.journal = self.memory.journal
        self.pager = Pager(self.memory, make_caches, num_slots)
        self.slots = self.pager.slots
        self.pins = Pins(self.memory)
        self.reclaimer = Reclaimer(self.pager, self.pins)

    # ------------------------------------------------------------------------------------------ for requests

    def begin(self, request: CacheRequest) -> Lease | None:
        """Gives a prompt a slot, restored as far as possible; None if it must wait.

        The prompt waits for another request, or for stored state to be rounded.

        Raises BudgetExceeded if the prompt can never fit, PinnedFull if not while other state is pinned.
        """
        if all(slot.is_leased for slot in self.slots):
            return None
        self.memory.clock.begin(request.namespace, request.session_id, is_background=request.is_background)
        self.pager.trie(request.namespace)  # makes the trie, to which promotion attaches what it reads
        result, is_promoted = self._promote(request.lookup, is_background=request.is_background)
        slot = choose_slot(self.slots, result, request.namespace, request.session_id)
        result = self._leave_end(request, result)
        slot.is_background = request.is_background
        capacity = self._capacity(request)
        left = self._free_memory(request, slot, result, capacity)
        if left is None:
            return None
        shared = left.shared[slot.index]
        self._restore(request, slot, left, capacity)
        self.reclaimer.gather(is_short=False, also=slot)
        slot.lease_to(request, self.memory.clock.now)
        self.memory.order.changed(slot.tip)
        self.reclaimer.reserve(slot, capacity, needed=len(request.tokens))
        is_live = max(shared, slot.origin) >= slot.offset
        tier = Tier.DISK if is_promoted else Tier.LIVE if is_live else Tier.MEMORY
        points = self._plan(request, slot.offset, result.match.length) if request.lookup.reuse else ()
        kind = Lease if request.lookup.reuse else PrivateLease
        return kind(self.reclaimer, slot, request, result.match.length, points, tier if slot.offset else None)

    def peek(self, lookup: Lookup) -> int:
        """How many tokens of a prompt are restorable now. Changes nothing."""
        result = self._find_in_memory(lookup)
        disk_match = self._find_on_disk(lookup, result)
        return result.restorable if disk_match is None else disk_match.offset

    def prefetch(self, lookup: Lookup) -> Prefetch | None:
        """Begins to read from disk what `begin` would wait for."""
        if self.memory.disk is None:
            return None
        disk_match = self._find_on_disk(lookup, self._find_in_memory(lookup))
        return self.memory.disk.tier.reader.prefetch(disk_match.parts) if disk_match is not None else None

    def use_awaited(self, find_awaited: Callable[[], Iterable[Lookup]]) -> None:
        """Has what the prompts that `find_awaited` returns can restore evicted last."""
        find = self._find_in_memory
        self.memory.find_awaited = lambda: {node for lookup in find_awaited() for node in find(lookup).path}

    # ------------------------------------------------------------------------------------------- admission

    def _find_in_memory(self, lookup: Lookup) -> LookupResult:
        """How much of a prompt memory can restore."""
        return look_up(lookup.match(self.memory.find_trie(lookup.namespace)), self.slots, self.layout)

    def _find_on_disk(self, lookup: Lookup, result: LookupResult) -> DiskMatch | None:
        if self.memory.disk is None:
            return None
        return self.memory.disk.find(lookup.namespace, lookup.tokens, result.match, restorable=result.restorable)

    def _promote(self, lookup: Lookup, *, is_background: bool) -> tuple[LookupResult, bool]:
        """Reads what disk adds to a prompt, if memory can be freed: what memory then holds; whether it was read."""
        result, ledger = self._find_in_memory(lookup), self.ledger
        for _ in range(MAX_READS):
            disk, disk_match = self.memory.disk, self._find_on_disk(lookup, result)
            if disk is None or disk_match is None or disk_match.num_bytes > ledger.budget_bytes:
                break
            # Freeing memory may write to disk, and a write may evict files. Recording the use now protects the files.
            disk.tier.touch(disk_match.place, disk_match.offset)
            excess = ledger.excess_bytes(disk_match.num_bytes)
            missing = self.reclaimer.free(excess, protected=result.path, is_background=is_background)
            # The match may be lost with a running sequence.
            is_read = missing <= 0 and not result.match.is_gone and self._try_read(disk, lookup, disk_match, result)
            result = self._find_in_memory(lookup)
            if is_read or missing > 0:
                return result, is_read
        return result, False

    def _try_read(self, disk: DiskConnector, lookup: Lookup, match: DiskMatch, result: LookupResult) -> bool:
        """False for a faulty file, which is no longer found, but others may be."""
        try:
            segment, snapshot = disk.load(match)
        except DiskFault:
            return False
        num_tokens = match.offset - result.restorable
        self.journal.record(Happening.READ, lookup.namespace, tokens=num_tokens, bytes=match.num_bytes)
        self.memory.used(self.attach(lookup.namespace, lookup.tokens[: match.offset], segment, snapshot))
        return True

    def attach(self, namespace: str, tokens: TokenArray, segment: Segment | None, snapshot: Snapshot | None) -> Node:
        """Keeps state that ends with `tokens`; those before it are in memory. Returns the node at their end."""
        trie = self.pager.trie(namespace)
        first = segment.start if segment is not None else len(tokens)
        assert trie.match(tokens).length >= first, "the state that was to be extended was evicted meanwhile"
        tip = trie.extend(trie.root, tokens)
        for node in tip.path():
            node.is_volatile = False  # only state of ordinary requests goes to disk, or elsewhere
        if segment is not None:
            trie.store(tip, segment)
        if snapshot is not None:
            tip.kind = RestorePointKind.TURN_END
            trie.snap(tip, snapshot)
        return tip

    def _leave_end(self, request: CacheRequest, result: LookupResult) -> LookupResult:
        """Has the session end where the prompt leaves it: the rest is evicted first. Returns `result` anew."""
        end = self.memory.order.end_of(request.namespace, request.session_id)
        if end is None or not result.stored or (end in result.path and end.stop <= result.match.length):
            return result
        trie = self.pager.trie(request.namespace)
        tip = self.pager.land(trie, result.path, result.stored)
        tip.session_id = request.session_id
        self.memory.ended(tip)
        return self._find_in_memory(request.lookup)

    def _capacity(self, request: CacheRequest) -> int:
        """Fewer tokens than expected, if the budget is too small."""
        num_tokens, budget = len(request.tokens), self.ledger.budget_bytes
        needed = self.layout.bytes_for(num_tokens)
        if needed > budget:
            raise BudgetExceeded(needed, budget)
        wanted = num_tokens + request.expected_tokens
        excess = self.layout.bytes_for(wanted) - budget
        return max(num_tokens, self.layout.tokens_without(excess, wanted))

    def _free_memory(
        self, request: CacheRequest, slot: Slot, result: LookupResult, capacity: int
    ) -> LookupResult | None:
        """Shares a head where that pays, and frees memory: what memory still holds; None if the request must wait."""
        if self.reclaimer.invite(slot, result, capacity, is_wanted=request.wants_head):
            result = self._find_in_memory(request.lookup)
        offset = result.restorable_in(slot)
        excess = self.reclaimer.excess_for(slot, result.path, offset, capacity)
        if self.layout.form.rows and not result.shared[slot.index]:
            # What the slot holds will be stored, and can be rounded before anything is evicted.
            excess += self.ledger.slot_bytes(slot.index)
            if excess > 0:
                self.pager.page_out(slot, 0)
                result = self._find_in_memory(request.lookup)
        if excess <= 0:
            return result
        is_shared = self.ledger.slot_bytes(ASIDE) > 0 or any(other.is_leased for other in self.slots)
        missing = self.reclaimer.free_for(slot, result.path, offset, capacity, or_nothing=is_shared)
        if missing > 0 and is_shared:
            return None
        if missing > 0 and not path_nodes(self.reclaimer.pins.explicit()) <= set(result.path):
            raise PinnedFull(missing)
        return self._find_in_memory(request.lookup)  # state may have been evicted, or lost with a running sequence

    def _restore(self, request: CacheRequest, slot: Slot, result: LookupResult, capacity: int) -> None:
        offset, trie = result.restorable_in(slot), self.pager.trie(request.namespace)
        if slot.namespace == trie.namespace and is_in_place(slot, result.path, offset):
            self.pager.keep_tip(slot)
            self.pager.enter(slot, trie)
        else:
            self._page_in(slot, request, result.path, offset, result.shared[slot.index], capacity)
        for node in slot.tip.path():
            node.num_uses += 1
        self.memory.used(slot.tip)

    def _page_in(
        self, slot: Slot, request: CacheRequest, path: list[Node], offset: int, shared: int, capacity: int
    ) -> None:
        """Pages in less than `[0, offset)` if freeing memory evicts some; `slot` holds the first `shared`."""
        trie = self.pager.trie(request.namespace)
        landing = self.pager.land(trie, path, offset)
        arriving, keep = landing.path(), min(shared, offset)
        head = self.reclaimer.head_of(slot, arriving, offset)
        self.pager.page_out_heads(arriving)
        self.pager.page_out(slot, 0 if head is not None and keep <= head.offset and head is not slot.head else keep)
        self.pager.enter(slot, trie)
        try:
            if head is not None and not slot.offset:
                self.pager.enter_head(slot, head)
            elif head is not None and slot.head is None:
                self.pager.share_head(slot, head.tip, head)
            self.reclaimer.free_for(slot, arriving, offset, capacity)  # a request that was admitted waits no more
            left = deepest(self.layout, landing.path(), landing.stop)
            if left == offset:
                self.pager.page_in(slot, trie, landing, request.tokens[:offset], capacity)
        except Exception:
            # Layers may have stopped at different offsets, and part of the state may already have been moved.
            self.pager.give_up(slot, arriving)
            raise
        if left < offset:
            self._page_in(slot, request, arriving, left, shared, capacity)

    def _plan(self, request: CacheRequest, offset: int, match_tokens: int) -> Iterable[RestorePoint]:
        wanted, num_tokens = request.restore_points, len(request.tokens)
        if not self.layout.needs_snapshots:
            wanted = [point for point in wanted if point.kind is RestorePointKind.EXPLICIT]
        else:
            branch = RestorePoint(match_tokens, RestorePointKind.BRANCH)
            wanted = [*wanted, branch, *snapshots.intervals(offset, num_tokens)]
            ends = [point.offset for point in wanted if point.kind is RestorePointKind.PROMPT_END]
            if not any(0 < num_tokens - end <= snapshots.SAME_TOKENS for end in ends):
                wanted.append(RestorePoint(num_tokens - 1, RestorePointKind.PROMPT_END))
        return snapshots.plan(wanted, start=offset, stop=num_tokens)

    # ---------------------------------------------------------------------------------------------- upkeep

    def clear(self, namespace: str | None = None) -> None:
        """Drops state, history and pins, all or one namespace's, but what a request holds."""
        self.pins.release_if(lambda name: namespace in (None, name.namespace))
        for slot in self.slots:
            if not slot.is_leased and namespace in (None, slot.namespace):
                self.pager.page_out(slot, 0)
        self.pager.page_out_heads()
        self.memory.clear(namespace)
        if self.memory.disk is not None:
            self.memory.disk.tier.clear(namespace)
        self.history.forget(namespace)

    def try_resize(self, budget_bytes: int) -> int:
        """Changes the budget; returns the bytes by which requests exceed it, which leaves it unchanged."""
        before, self.ledger.budget_bytes = self.ledger.budget_bytes, budget_bytes
        try:
            self.reclaimer.free()
        except Exception:
            self.ledger.budget_bytes = before
            raise
        excess_bytes = max(self.ledger.excess_bytes(), 0)
        if excess_bytes:
            self.ledger.budget_bytes = before
        return excess_bytes

    def limit_idle(self, max_bytes: int) -> bool:
        """Evicts what no request holds down to `max_bytes`, with 0 history too; returns whether there was more."""
        if not max_bytes:
            self.history.forget()
        running = {live for slot in self.slots if slot.is_leased for live in (slot, slot.head) if live is not None}
        running_bytes = sum(self.ledger.slot_bytes(slot.index) for slot in running)
        running_bytes += self.ledger.slot_bytes(ASIDE) + self.ledger.slot_bytes(PADDING)
        idle_bytes = self.ledger.charged_bytes - running_bytes
        self.reclaimer.free(idle_bytes - max_bytes)
        return idle_bytes > max_bytes

    # -------------------------------------------------------------------------------------------------- disk

    def save(self) -> Iterator[None]:
        """Rounds stored state, then writes what is unsaved and worth keeping, the last used first, a piece a step.

        Invalid after any other call.
        """
        while self.memory.has_exact:
            self.memory.round_stored(ROUNDED_TOKENS)
            yield
        if self.memory.disk is None:
            return
        leaves = [node for node in self.memory.nodes() if not node.children]
        leaves.sort(key=lambda leaf: leaf.last_used, reverse=True)
        for leaf, used_at in zip(leaves, self.memory.disk.tier.ticks(len(leaves)), strict=True):
            if leaf.parent is not None:
                yield from self._save_path(self.memory.disk, leaf, used_at)

    def _save_path(self, disk: DiskConnector, leaf: Node, used_at: int) -> Iterator[None]:
        with self.idle_ends(path := leaf.path()):
            yield from disk.save_path(path, self.pager.copy_live, used_at)

    @contextmanager
    def idle_ends(self, path: Sequence[Node]) -> Iterator[None]:
        """Keeps snapshots at the ends of idle sequences on a path; after the block only where memory allows."""
        idle = [slot for slot in self.slots if slot.tip in path and not slot.is_leased]
        before = {slot.tip: slot.tip.snapshot for slot in idle}
        for slot in idle:
            self.pager.keep_tip(slot)
        kept = {node: node.snapshot for node in before if node.snapshot is not before[node]}
        try:
            yield
        finally:
            for node, snapshot in kept.items():
                if self.ledger.excess_bytes() > 0 and node.snapshot is snapshot:
                    node.trie.snap(node, before[node])

    def end(self, timeout_seconds: float) -> None:
        """Ends the cache; first writes unsaved state as time allows."""
        if self.memory.disk is not None:
            self.memory.disk.close(self.save(), timeout_seconds)
            self.memory.disk = None

    def park(self) -> None:
        """Pages all slots out, so that nothing refers to the model. No request may run.

        Until `resume` only `try_resize` and reports may be called, on any one thread.
        """
        assert not any(slot.is_leased for slot in self.slots), "a request still runs"
        for slot in self.slots:
            self.pager.page_out(slot, 0)
        self.pager.page_out_heads()
        self.pager.take_back_padding()
        self.pager.make_caches, self.memory.may_round = _no_caches, False
        self.pager.shared = None
        self.use_awaited(tuple)

    def resume(self, make_caches: Callable[[], list[LayerCache]], budget_bytes: int) -> None:
        """Continues after `park`, on the worker thread of the reloaded model."""
        self.pager.make_caches, self.memory.may_round = make_caches, True
        self.try_resize(budget_bytes)

    # ------------------------------------------------------------------------------------------------- state

    def stats(self) -> CacheStats:
        """Current counts and bytes."""
        tier = self.memory.disk.tier if self.memory.disk is not None else None
        return CacheStats(
            num_nodes=sum(trie.num_nodes for trie in self.memory.tries.values()),
            stored_bytes=self.ledger.stored_bytes,
            live_bytes=self.ledger.live_bytes,
            budget_bytes=self.ledger.budget_bytes,
            bytes_per_token=self.layout.bytes_per_token,
            stored_bytes_per_token=self.layout.stored_bytes_per_token,
            stored_form=self.layout.form.told,
            num_evictions=self.memory.num_evictions,
            moved=self.journal.moved,
            keeps_on_disk=tier is not None,
            disk_bytes=tier.tree.num_bytes if tier is not None else 0,
            num_disk_files_gone=tier.num_gone if tier is not None else 0,
        )

    def check(self) -> None:
        """Asserts the invariants of the parts."""
        self.memory.check()
        self.pager.check()
        for node in self.memory.nodes():
            if self.memory.disk is not None:
                self.memory.disk.check(node)


def _no_caches() -> list[LayerCache]:
    raise AssertionError("a parked cache was asked for a sequence")
