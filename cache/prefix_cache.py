"""The prefix cache of one model: the facade over its parts.

* `admission` gives a request a slot and restores its prompt; `recording` keeps what it evaluates;
* `lookup` says what memory holds of a prompt; `promotion` and `demotion` move state from disk and to it;
* `memory_tier` and `eviction/` hold stored state within the budget; `reclaim` frees memory for a request;
* `pager` moves state between slots and tries; `pinning` keeps chosen prefixes from eviction.

Matching compares every token, and the last prompt token is never restored, so that there is always one to evaluate.
All methods belong to the worker thread. Nothing here knows models, parameters of requests, or time: recency is a
counter.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from cache.admission import Admission, CacheRequest
from cache.budget import Ledger
from cache.disk.connector import DiskConnector
from cache.disk.io import Prefetch
from cache.disk.tier import DiskTier
from cache.disk_moves import Demotion, Promotion
from cache.journal import CacheStats, Journal
from cache.layers.layout import CHUNK_TOKENS, Layout, SequenceSizes
from cache.lease import Lease, Recorder
from cache.lookup import Lookup
from cache.memory_tier import MemoryTier
from cache.pager import Pager
from cache.pins import PinName, Pins
from cache.reclaim import Pinning, Reclaimer, Reservations
from cache.slots import RequestClock, Slot
from cache.snapshots import RestorePoint
from cache.types import LayerCache, TokenArray
from cache.views import CacheReports


class PrefixCache:
    """State of all conversations with one model. Worker thread only."""

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
        """Prompts are evaluated in calls of up to `chunk_tokens`, on which depends what window layers hold.

        `layout` says how the caches come apart; by default it is found from what `make_caches` makes.

        State that does not fit the budget goes to `disk`, if there is one, and so does idle state.
        """
        layout = layout or Layout(make_caches())
        self.clock = RequestClock()
        self.journal = disk.journal if disk is not None else Journal()
        self.memory = MemoryTier(layout, budget_bytes, self.journal)
        self.disk = DiskConnector(disk, layout) if disk is not None else None
        self.pager = Pager(layout, self.memory, make_caches, num_slots)
        self.sizes = SequenceSizes(layout, chunk_tokens)
        self._pinning = Pinning(self.pager, self.sizes)
        self.reclaimer = Reclaimer(self.memory, self.pager, self.pins, self.clock, self.sizes)
        self._promotion = Promotion(self.disk, self.memory, self.pager, self.reclaimer, self.clock)
        self._demotion = Demotion(self.disk, self.memory, self.pager)
        self._admission = self._connect()

    def _connect(self) -> Admission:
        """Returns the part that admits requests, connected with all that it needs."""
        memory, pager, clock, reclaimer = self.memory, self.pager, self.clock, self.reclaimer
        reservations = Reservations(pager, self.sizes, reclaimer)
        recorder = Recorder(memory, pager, clock, reclaimer, reservations, self._pinning)
        return Admission(
            memory, pager, self.pins, clock, self.sizes, reclaimer, reservations, self._promotion, recorder
        )

    @property
    def layout(self) -> Layout:
        """How the layer caches come apart."""
        return self.pager.layout

    @property
    def ledger(self) -> Ledger:
        """The account of all bytes."""
        return self.memory.ledger

    @property
    def slots(self) -> list[Slot]:
        """The places for live sequences."""
        return self.pager.slots

    @property
    def pins(self) -> Pins:
        """What must not be evicted, by name."""
        return self._pinning.pins

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
        """Gives a prompt a slot with as much of it restored as can be; None if it must wait for another request.

        Memory for `expected_tokens` of output is reserved. State that `is_volatile` is never written to disk. For a
        prompt that `is_background` the ends of sessions are evicted last. `lookup` is one of the same prompt, if it
        was matched before. Raises BudgetExceeded if the prompt can never fit, PinnedFull if it cannot while other
        state is pinned.
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
        """Returns how many tokens of a prompt could be restored now. Changes nothing."""
        return self._promotion.find_restorable(lookup or Lookup(tokens, namespace=namespace))

    def prefetch(self, tokens: TokenArray, *, namespace: str = "", lookup: Lookup | None = None) -> Prefetch | None:
        """Begins to read from disk what `begin` would have to wait for; None if disk has nothing to add."""
        return self._promotion.prefetch(lookup or Lookup(tokens, namespace=namespace))

    def calibrate(self, caches: Sequence[LayerCache]) -> None:
        """Learns from caches that hold a few tokens how large a sequence is, and which layers the model really uses.

        Before that, sizes of requests are not estimated, and every layer is taken for used.
        """
        self.layout.leave_out_unused(caches)
        self.sizes.calibrate(caches)
        if self.disk is not None:
            self.disk.bytes_per_token = self.sizes.bytes_per_token

    def bytes_for(self, num_tokens: int) -> int:
        """Returns about how many bytes a live sequence of `num_tokens` takes."""
        return self.sizes.bytes_for(num_tokens)

    def clear(self, namespace: str | None = None) -> None:
        """Drops everything of one namespace, or of all, that no running request holds; pins too."""
        self.pins.release_all(namespace)
        for slot in self.slots:
            if not slot.is_leased and namespace in (None, slot.namespace):
                self.pager.page_out(slot, 0)
        self.memory.clear(namespace)
        if self.disk is not None:
            self.disk.tier.clear(namespace)

    def relieve(self) -> None:
        """Evicts half of what is stored: the device has less memory than the budget says."""
        self.reclaimer.relieve()

    def try_resize(self, budget_bytes: int) -> int:
        """Has all state keep within another budget, by paging out and evicting what no running request holds.

        Returns by how many bytes these exceed it; if by any, the budget stays what it was.
        """
        before, self.ledger.budget_bytes = self.ledger.budget_bytes, budget_bytes
        self.reclaimer.free_excess()
        excess_bytes = max(self.ledger.excess_bytes(), 0)
        if excess_bytes:
            self.ledger.budget_bytes = before
        return excess_bytes

    # ------------------------------------------------------------------------------------------------- pins

    def pin(self, name: PinName, tokens: TokenArray) -> int:
        """Keeps what is stored of `tokens` from being evicted until it is unpinned; returns how many that are.

        If the name's label is a session's, the pin moves on to the end of each turn that this session closes.
        Raises PinLimit if explicit pins would take more than half of the budget.
        """
        return self._pinning.pin(name, tokens)

    def pin_until(self, name: PinName, tokens: TokenArray, until: float) -> None:
        """Keeps what is stored of `tokens` up to a reading of the clock, or until a request has to wait for it."""
        self._pinning.pin_until(name, tokens, until)

    def unpin(self, name: PinName) -> None:
        """Ends a pin, if there is one of that name."""
        self.pins.release(name)

    def release_expired(self, now: float) -> None:
        """Ends the soft pins whose time is over."""
        self.pins.release_expired(now)

    # -------------------------------------------------------------------------------------------------- disk

    def save(self) -> Iterator[None]:
        """Writes the state that is to be kept and not on disk yet, one piece with each step.

        For idle time: begin anew after any other call.
        """
        return self._demotion.save()

    def end(self, timeout_seconds: float) -> None:
        """Ends the cache; with a disk, what is not there yet is written first, as far as time allows."""
        if self.disk is not None:
            self.disk.close(self.save(), timeout_seconds)
            self.disk = self._promotion.disk = self._demotion.disk = None

    def park(self) -> None:
        """Pages all slots out, so that nothing here refers to the model any more. No request may be running.

        Until `resume` nothing but `try_resize` and reports may be asked for, on any one thread.
        """
        assert not any(slot.is_leased for slot in self.slots), "a request still runs"
        for slot in self.slots:
            self.pager.page_out(slot, 0)
        self.pager.use_caches_of(_no_caches)

    def resume(self, make_caches: Callable[[], list[LayerCache]], budget_bytes: int) -> None:
        """Goes on after `park` with the same model, loaded anew, and another budget; on its worker thread."""
        for slot in self.slots:
            slot.caches = []
        self.pager.use_caches_of(make_caches)
        self.try_resize(budget_bytes)

    # ------------------------------------------------------------------------------------------------- state

    @property
    def reports(self) -> CacheReports:
        """Tells what is held of each namespace."""
        return CacheReports(self.memory, self.pager, self.disk, self.pins)

    def stats(self) -> CacheStats:
        """Returns counts and bytes of now, for reports."""
        tier = self.disk.tier if self.disk is not None else None
        return CacheStats(
            num_nodes=self.memory.num_nodes,
            stored_bytes=self.ledger.stored_bytes,
            live_bytes=self.ledger.live_bytes,
            budget_bytes=self.ledger.budget_bytes,
            bytes_per_token=self.sizes.bytes_per_token,
            num_evictions=self.memory.num_evictions,
            moved=self.journal.moved,
            keeps_on_disk=tier is not None and tier.is_open,
            disk_bytes=tier.used_bytes if tier is not None else 0,
            num_disk_files_gone=tier.num_gone if tier is not None else 0,
        )

    def check(self) -> None:
        """Asserts the invariants of the parts. Tests call it after every step."""
        self.memory.check()
        self.pager.check()
        for trie, node in self.memory.nodes():
            if self.disk is not None:
                self.disk.check(trie.namespace, node)


def _no_caches() -> list[LayerCache]:
    raise AssertionError("a parked cache was asked for a sequence")
