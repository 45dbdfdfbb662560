"""Frees memory: pages idle slots out, then evicts stored state, then ends soft pins and evicts again."""

from collections.abc import Sequence

from cache.clock import RequestClock
from cache.lookup import nodes_to_restore
from cache.memory_tier import MemoryTier
from cache.pager import Pager
from cache.pins import Pins
from cache.sizes import SequenceSizes
from cache.slots import Slot
from cache.trie import Node


class Reclaimer:
    """Frees memory within the budget of one model. Worker thread only."""

    def __init__(
        self, memory: MemoryTier, pager: Pager, pins: Pins, clock: RequestClock, sizes: SequenceSizes
    ) -> None:
        self._memory = memory
        self._ledger = memory.ledger
        self._pager = pager
        self._pins = pins
        self._clock = clock
        self._sizes = sizes

    def free(
        self,
        excess_bytes: int,
        *,
        protected: Sequence[Node] = (),
        busy: Slot | None = None,
        is_background: bool = False,
    ) -> int:
        """Frees `excess_bytes`, without evicting what is `protected`; returns how many of them could not be freed.

        `busy` is the slot that the memory is for; it is not paged out. For a request that `is_background` the ends of
        sessions are evicted last.
        """
        if excess_bytes <= 0:
            return 0
        target = self._ledger.charged_bytes - excess_bytes
        self._pager.page_out_idle(target, busy)
        kept, now = set(protected), self._clock.now
        self._memory.evict(target, kept, now, guards_sessions=is_background)
        if self._ledger.charged_bytes > target and self._pins.release_soft():
            self._memory.evict(target, kept, now, guards_sessions=is_background)
        return self._ledger.charged_bytes - target

    def free_excess(self, *, protected: Sequence[Node] = (), is_background: bool = False) -> None:
        """Frees what is charged beyond the budget."""
        self.free(self._ledger.excess_bytes(), protected=protected, is_background=is_background)

    def free_to_restore(self, slot: Slot, path: Sequence[Node], offset: int, num_tokens: int) -> None:
        """Frees memory for a sequence of `num_tokens` in `slot` whose first `offset` tokens are paged in from `path`.

        What cannot be freed stays missing: it is too late for the request to wait.
        """
        self.free(
            self.excess_for(slot, path, offset, num_tokens),
            protected=nodes_to_restore(self._pager.layout, path, offset),
            busy=slot,
            is_background=slot.turn.is_background,
        )

    def excess_for(self, slot: Slot, path: Sequence[Node], offset: int, num_tokens: int) -> int:
        """Returns the bytes to free for a sequence of `num_tokens` in `slot`, `[0, offset)` coming from `path`.

        If there are any, idle slots are paged out first. What was live only there can then be moved into
        `slot`, and no longer counts twice.
        """
        excess = self._ledger.excess_bytes(self._growth(slot, path, offset, num_tokens))
        if excess > 0:
            self._pager.page_out_idle(self._ledger.charged_bytes - excess, slot)
            excess = self._ledger.excess_bytes(self._growth(slot, path, offset, num_tokens))
        return excess

    def _growth(self, slot: Slot, path: Sequence[Node], offset: int, num_tokens: int) -> int:
        """Returns the bytes charged in addition once `slot` has `num_tokens`, `[0, offset)` moved in from `path`."""
        moving = 0.0
        for node in path:
            start, stop, span = node.start, node.stop, node.span
            if span is not None and start < offset:
                moving += span.num_bytes if stop <= offset else span.num_bytes * (offset - start) / (stop - start)
        return int(self._sizes.bytes_for(num_tokens) - moving) - self._ledger.slot_bytes(slot.index)

    def relieve(self) -> None:
        """Evicts half of what is stored: the device has less memory than the budget says.

        Pages nothing out, since that takes memory before it frees any.
        """
        self._pins.release_soft()
        target = self._ledger.charged_bytes - self._ledger.stored_bytes // 2
        self._memory.evict(target, (), self._clock.now)
