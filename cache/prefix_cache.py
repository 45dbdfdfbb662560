"""The prefix cache of one model: the facade over its parts. All methods belong to the worker thread.

Nothing here knows models, request parameters, or time.
"""

from collections.abc import Callable, Iterable, Iterator

from cache.admission import Admission
from cache.budget import ASIDE, PADDING, CacheStats
from cache.disk.connector import DiskConnector
from cache.disk.io import Prefetch
from cache.disk.tier import DiskTier
from cache.history import History
from cache.layers.layout import CHUNK_TOKENS, Layout
from cache.lease import Lease
from cache.memory_tier import MemoryTier, Pins
from cache.pager import Pager
from cache.reclaim import Reclaimer
from cache.slots import CacheRequest, Lookup
from cache.types import LayerCache
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
        self.history = History(stored=disk.tree if disk is not None else None)
        connector = DiskConnector(disk, self.layout) if disk is not None else None
        self.memory = MemoryTier(self.layout, budget_bytes, connector)
        self.ledger = self.memory.ledger
        self.journal = self.memory.journal
        self.pager = Pager(self.memory, make_caches, num_slots)
        self.slots = self.pager.slots
        self.pins = Pins(self.memory)
        self.reclaimer = Reclaimer(self.pager, self.pins)
        self._admission = Admission(self.reclaimer)

    # ------------------------------------------------------------------------------------------ for requests

    def begin(self, request: CacheRequest) -> Lease | None:
        """Gives a prompt a slot, restored as far as possible; None if it must wait for another request.

        Raises BudgetExceeded if the prompt can never fit, PinnedFull if not while other state is pinned.
        """
        return self._admission.admit(request)

    def peek(self, lookup: Lookup) -> int:
        """How many tokens of a prompt are restorable now. Changes nothing."""
        return self._admission.find_restorable(lookup)

    def prefetch(self, lookup: Lookup) -> Prefetch | None:
        """Begins to read from disk what `begin` would wait for."""
        return self._admission.prefetch(lookup)

    def use_awaited(self, find_awaited: Callable[[], Iterable[Lookup]]) -> None:
        """Has what the prompts that `find_awaited` returns can restore evicted last."""
        find = self._admission.find_in_memory
        self.memory.find_awaited = lambda: {node for lookup in find_awaited() for node in find(lookup).path}

    def clear(self, namespace: str | None = None) -> None:
        """Drops state, history and pins, all or one namespace's, but what a request holds."""
        self.pins.release_all(namespace)
        for slot in self.slots:
            if not slot.is_leased and namespace in (None, slot.namespace):
                self.pager.page_out(slot, 0)
        self.pager.page_out_heads()
        self.memory.clear(namespace)
        if self.memory.disk is not None:
            self.memory.disk.tier.clear(namespace)
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

    # -------------------------------------------------------------------------------------------------- disk

    def save(self) -> Iterator[None]:
        """Writes unsaved state worth keeping, a piece a step. Invalid after any other call."""
        return self._admission.save()

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
        self.pager.make_caches = _no_caches
        self.pager.shared = None
        self.use_awaited(tuple)

    def resume(self, make_caches: Callable[[], list[LayerCache]], budget_bytes: int) -> None:
        """Continues after `park`, on the worker thread of the reloaded model."""
        self.pager.make_caches = make_caches
        self.try_resize(budget_bytes)

    # ------------------------------------------------------------------------------------------------- state

    @property
    def reports(self) -> CacheReports:
        return CacheReports(self.memory, self.pager, self.memory.disk, self.pins)

    def stats(self) -> CacheStats:
        """Current counts and bytes."""
        tier = self.memory.disk.tier if self.memory.disk is not None else None
        return CacheStats(
            num_nodes=self.memory.num_nodes,
            stored_bytes=self.ledger.stored_bytes,
            live_bytes=self.ledger.live_bytes,
            budget_bytes=self.ledger.budget_bytes,
            bytes_per_token=self.layout.bytes_per_token,
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
        for trie, node in self.memory.nodes():
            if self.memory.disk is not None:
                self.memory.disk.check(trie.namespace, node)


def _no_caches() -> list[LayerCache]:
    raise AssertionError("a parked cache was asked for a sequence")
