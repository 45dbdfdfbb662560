"""The prefix cache of one model: the facade over its parts. All methods belong to the worker thread.

Nothing here knows models, request parameters, or time.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from cache.admission import Admission, CacheRequest, DiskMoves
from cache.budget import ASIDE, PADDING, CacheStats, Journal
from cache.disk.connector import DiskConnector
from cache.disk.io import Prefetch
from cache.disk.tier import DiskTier
from cache.history import History
from cache.layers.layout import CHUNK_TOKENS, Layout
from cache.lease import Lease, Recorder
from cache.memory_tier import MemoryTier, PinName, Pins
from cache.pager import Pager
from cache.reclaim import Heads, Reclaimer
from cache.slots import Lookup, RequestClock
from cache.snapshots import RestorePoint
from cache.types import LayerCache, TokenArray
from cache.views import CacheReports


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
    ) -> None:
        """`layout` defaults to that of `make_caches`.

        `disk`, if any, gets idle state, and state beyond the budget.
        """
        self.layout = layout or Layout(make_caches(), chunk_tokens)
        self.clock = RequestClock()
        self.journal = disk.journal if disk is not None else Journal()
        self.memory = MemoryTier(self.layout, budget_bytes, self.journal)
        self.ledger = self.memory.ledger
        self.disk = DiskConnector(disk, self.layout) if disk is not None else None
        self.history = History(stored=disk.tree if disk is not None else None)
        self.pager = Pager(self.layout, self.memory, make_caches, num_slots)
        self.slots = self.pager.slots
        self.pins = Pins(self.ledger, self.layout)
        heads = Heads(self.pager)
        self.reclaimer = Reclaimer(self.memory, self.pager, self.pins, self.clock, heads)
        self._disk_moves = DiskMoves(self.disk, self.memory, self.pager, self.reclaimer, self.clock)
        parts = self.memory, self.pager, self.clock, self.reclaimer, self.pins
        self._admission = Admission(*parts, self._disk_moves, Recorder(*parts), heads)

    # ------------------------------------------------------------------------------------------ for requests

    def begin(
        self,
        tokens: TokenArray,
        *,
        namespace: str = "",
        session_id: str | None = None,
        restore_points: Iterable[RestorePoint] = (),
        expected_tokens: int = 0,
        reuse: bool = True,
        is_volatile: bool = False,
        is_background: bool = False,
        lookup: Lookup | None = None,
    ) -> Lease | None:
        """Gives a prompt a slot, restored as far as possible; None if it must wait for another request.

        Reserves `expected_tokens` of output. `is_volatile` state never goes to disk; `is_background` evicts session
        ends last; `lookup` is an earlier look-up. Raises BudgetExceeded if the prompt can never fit, PinnedFull if
        not while other state is pinned.
        """
        request = CacheRequest(
            tokens,
            lookup or Lookup(tokens, namespace=namespace),
            session_id,
            tuple(restore_points),
            expected_tokens,
            reuse=reuse,
            is_volatile=is_volatile,
            is_background=is_background,
        )
        return self._admission.admit(request)

    def peek(self, tokens: TokenArray, *, namespace: str = "", lookup: Lookup | None = None) -> int:
        """How many tokens of a prompt are restorable now. Changes nothing."""
        return self._disk_moves.find_restorable(lookup or Lookup(tokens, namespace=namespace))

    def use_awaited(self, find_awaited: Callable[[], Iterable[Lookup]]) -> None:
        """Has what the prompts that `find_awaited` returns can restore evicted last."""
        self.memory.find_awaited = lambda: {
            node for lookup in find_awaited() for node in self._disk_moves.find_in_memory(lookup).path
        }

    def prefetch(self, tokens: TokenArray, *, namespace: str = "", lookup: Lookup | None = None) -> Prefetch | None:
        """Begins to read from disk what `begin` would wait for."""
        return self._disk_moves.prefetch(lookup or Lookup(tokens, namespace=namespace))

    def calibrate(self, caches: Sequence[LayerCache]) -> None:
        """Learns a sequence's size and the layers in use from caches with a few tokens."""
        self.layout.calibrate(caches)

    def clear(self, namespace: str | None = None) -> None:
        """Drops state, history and pins, all or one namespace's, but what a request holds."""
        self.pins.release_all(namespace)
        for slot in self.slots:
            if not slot.is_leased and namespace in (None, slot.namespace):
                self.pager.page_out(slot, 0)
        self.pager.page_out_heads()
        self.memory.clear(namespace)
        if self.disk is not None:
            self.disk.tier.clear(namespace)
        if namespace is None:
            self.history.forget_all()
        else:
            self.history.forget(namespace)

    def try_resize(self, budget_bytes: int) -> int:
        """Changes the budget, paging out and evicting what no request holds.

        Returns the bytes by which requests exceed it; it is then unchanged.
        """
        before, self.ledger.budget_bytes = self.ledger.budget_bytes, budget_bytes
        try:
            self.reclaimer.free_excess()
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
            self.history.forget_all()
        running = {one for slot in self.slots if slot.is_leased for one in (slot, slot.head) if one is not None}
        running_bytes = sum(self.ledger.slot_bytes(slot.index) for slot in running)
        running_bytes += self.ledger.slot_bytes(ASIDE) + self.ledger.slot_bytes(PADDING)
        idle_bytes = self.ledger.charged_bytes - running_bytes
        self.reclaimer.free(idle_bytes - max_bytes)
        return idle_bytes > max_bytes

    # ------------------------------------------------------------------------------------------------- pins

    def pin(self, name: PinName, tokens: TokenArray) -> int:
        """Protects the stored state of `tokens` until released; returns their number.

        A session's pin moves to each turn's end. Raises PinLimit if explicit pins would exceed half the budget.
        """
        return self.pins.pin(name, self.pager.trie(name.namespace), tokens)

    def pin_until(self, name: PinName, tokens: TokenArray, until: float) -> None:
        """Protects the stored state of `tokens` until the clock reads `until`, or a request must wait."""
        self.pins.pin_until(name, self.pager.trie(name.namespace), tokens, until)

    # -------------------------------------------------------------------------------------------------- disk

    def save(self) -> Iterator[None]:
        """Writes unsaved state worth keeping, a piece a step. Invalid after any other call."""
        return self._disk_moves.save()

    def end(self, timeout_seconds: float) -> None:
        """Ends the cache; first writes unsaved state as time allows."""
        if self.disk is not None:
            self.disk.close(self.save(), timeout_seconds)
            self.disk = self._disk_moves.disk = None

    def park(self) -> None:
        """Pages all slots out, so that nothing refers to the model. No request may run.

        Until `resume` only `try_resize` and reports may be called, on any one thread.
        """
        assert not any(slot.is_leased for slot in self.slots), "a request still runs"
        for slot in self.slots:
            self.pager.page_out(slot, 0)
        self.pager.page_out_heads()
        self.pager.take_back_padding()
        self.pager.use_caches_of(_no_caches)
        self.pager.shared = None
        self.use_awaited(tuple)

    def resume(self, make_caches: Callable[[], list[LayerCache]], budget_bytes: int) -> None:
        """Continues after `park`, on the worker thread of the reloaded model."""
        for slot in self.slots:
            slot.caches = []
        self.pager.use_caches_of(make_caches)
        self.try_resize(budget_bytes)

    # ------------------------------------------------------------------------------------------------- state

    @property
    def reports(self) -> CacheReports:
        return CacheReports(self.memory, self.pager, self.disk, self.pins)

    def stats(self) -> CacheStats:
        """Current counts and bytes."""
        tier = self.disk.tier if self.disk is not None else None
        return CacheStats(
            num_nodes=self.memory.num_nodes,
            stored_bytes=self.ledger.stored_bytes,
            live_bytes=self.ledger.live_bytes,
            budget_bytes=self.ledger.budget_bytes,
            bytes_per_token=self.layout.bytes_per_token,
            num_evictions=self.memory.num_evictions,
            moved=self.journal.moved,
            keeps_on_disk=tier is not None,
            disk_bytes=tier.space.used_bytes if tier is not None else 0,
            num_disk_files_gone=tier.space.num_gone if tier is not None else 0,
        )

    def check(self) -> None:
        """Asserts the invariants of the parts."""
        self.memory.check()
        self.pager.check()
        for trie, node in self.memory.nodes():
            if self.disk is not None:
                self.disk.check(trie.namespace, node)


def _no_caches() -> list[LayerCache]:
    raise AssertionError("a parked cache was asked for a sequence")
