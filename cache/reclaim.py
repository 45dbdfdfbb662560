"""Frees and reserves memory of one model's budget. Worker thread only.

In this order: padding of shared buffers is given back, running sequences share heads, idle slots are paged out,
stored state is evicted, soft pins end and more is evicted. Live buffers are reserved when a sequence begins, and grow
while it generates.

Heads are also made where the runner measured that steps become faster; much shorter ones wherever memory is short. A
sequence reads one head at most, and a head reads none.
"""

import logging
import math
from collections import Counter
from collections.abc import Sequence

from cache.budget import ASIDE, PADDING
from cache.layers import layout
from cache.memory_tier import Pins, path_nodes
from cache.pager import Pager
from cache.slots import LookupResult, Slot
from cache.snapshots import rows_before
from cache.trie import Node

logger = logging.getLogger(__name__)

MAX_ROUNDED_TOKENS = 1024
"""Tokens whose stored state is rounded at once while requests run: twice what a row grows by."""
MIN_HEAD_TOKENS = 256
"""Where memory is short; a shorter head saves less than a buffer grows by, and costs every step."""


class Reclaimer:
    """Frees memory, reserves it for leased slots, and has sequences share heads."""

    def __init__(self, pager: Pager, pins: Pins) -> None:
        self.pager = pager
        self.pins = pins
        self.memory = pager.memory
        self.ledger = pager.ledger
        self.layout = pager.layout

    @property
    def spare_bytes(self) -> int:
        """What shared buffers may hold beyond what is reserved: nothing else needs it."""
        return self.ledger.slot_bytes(PADDING) - self.ledger.excess_bytes()

    def free(
        self,
        excess_bytes: int | None = None,
        *,
        protected: Sequence[Node] = (),
        busy: Slot | None = None,
        is_background: bool = False,
        or_nothing: bool = False,
        may_wait: bool = False,
    ) -> int:
        """Frees `excess_bytes`, by default what is charged beyond the budget; returns the bytes not freed.

        What an error takes was of another sequence, which is evaluated again. `protected` is not evicted; `busy`, the
        slot in need, is not paged out. `is_background` evicts session ends last. With `or_nothing`, nothing is
        evicted where all that may be would not do: who waits takes nothing from others. With `may_wait`, nothing is
        evicted while stored state is still to be rounded.
        """
        excess_bytes = self.ledger.excess_bytes() if excess_bytes is None else excess_bytes
        if excess_bytes <= 0:
            return 0
        target = self.ledger.charged_bytes - excess_bytes
        self.pager.take_back_padding()
        self.gather(is_short=True, target_bytes=target)
        self.pager.page_out_idle(target, busy, protected)
        is_running = any(slot.is_leased for slot in self.pager.slots)
        self.memory.round_stored(MAX_ROUNDED_TOKENS if is_running else math.inf, target)
        if may_wait and self.memory.has_exact and self.ledger.charged_bytes > target:
            return self.ledger.charged_bytes - target
        if or_nothing and self.ledger.charged_bytes - target > self._evictable_bytes(protected):
            return self.ledger.charged_bytes - target
        self.memory.evict(target, set(protected), guards_sessions=is_background)
        if self.ledger.charged_bytes > target and self.pins.release_soft():
            self.memory.evict(target, set(protected), guards_sessions=is_background)
        return self.ledger.charged_bytes - target

    def _evictable_bytes(self, protected: Sequence[Node]) -> int:
        """The most that evicting all but `protected` frees; less if state is pinned."""
        kept = sum(node.span.num_bytes for node in path_nodes(protected) if node.span is not None)
        kept += sum(node.snapshot.num_bytes for node in set(protected) if node.snapshot is not None)
        return self.ledger.stored_bytes - kept - self.memory.features.used_bytes

    def free_for(
        self, slot: Slot, path: Sequence[Node], offset: int, num_tokens: int, *, or_nothing: bool = False
    ) -> int:
        """Frees memory for `num_tokens` in `slot`, `[0, offset)` coming from `path`; returns the bytes not freed.

        Idle slots are paged out before the rest is counted: what was live only there moves here, counted once.
        """
        excess = self.excess_for(slot, path, offset, num_tokens)
        if excess <= 0:
            return 0
        continues = is_in_place(slot, path, offset)
        target = self.ledger.charged_bytes - excess
        self.gather(is_short=True, target_bytes=target, also=slot if continues else None)
        excess = self.excess_for(slot, path, offset, num_tokens)
        if excess > 0:
            self.pager.page_out_idle(self.ledger.charged_bytes - excess, slot, path)
            excess = self.excess_for(slot, path, offset, num_tokens)
        needed = [node for node in path if node.start < offset][-1:]
        if slot.is_cut or not continues:
            needed += [node for last in needed for node, _ in rows_before(self.layout, last, offset)]
        head, is_background = self.head_of(slot, path, offset), slot.is_background
        protected = needed if head is None else [*needed, head.tip]
        waits = {"or_nothing": or_nothing, "may_wait": or_nothing}
        return self.free(excess, protected=protected, busy=slot, is_background=is_background, **waits)

    def excess_for(self, slot: Slot, path: Sequence[Node], offset: int, num_tokens: int) -> int:
        """Bytes to free; padding alone is given back first."""
        moving = 0.0
        for node in path:
            start, stop, span = node.start, node.stop, node.span
            if span is not None and start < offset:
                moving += span.num_bytes if stop <= offset else span.num_bytes * (offset - start) / (stop - start)
        head = self.head_of(slot, path, offset)
        own_bytes = self.layout.bytes_for(num_tokens, head.offset if head is not None else 0)
        growth = int(own_bytes - moving) - self.ledger.slot_bytes(slot.index)
        if self.ledger.excess_bytes(growth) > 0:
            self.pager.take_back_padding()
        return self.ledger.excess_bytes(growth)

    def relieve(self) -> None:
        """Evicts half of the stored state: the device lacks memory. Paging out would take memory first."""
        self.pins.release_soft()
        self.memory.evict(self.ledger.charged_bytes - self.ledger.stored_bytes // 2, ())

    def reserve(self, slot: Slot, num_tokens: int, *, needed: int) -> None:
        """Reserves memory for `num_tokens`; resizes buffers unless `needed` fit. An error discards the slot."""
        self.ledger.reserve(slot.index, self.layout.bytes_for(num_tokens, slot.origin))
        slot.reserved_tokens, capacity = num_tokens, self.layout.capacity(slot.caches)
        if capacity is not None and needed <= capacity <= num_tokens + layout.GROWTH_TOKENS:
            slot.capacity = capacity
            return
        slot.capacity = num_tokens
        try:
            self.layout.resize(slot.caches, num_tokens)
        except Exception:
            self.pager.discard(slot)
            raise

    def try_grow(self, slot: Slot, max_tokens: int, needed: int = 1) -> bool:
        """As `Lease.try_grow`; a lost slot needs no memory."""
        wanted = min(max(slot.offset + max(layout.GROWTH_TOKENS, needed), slot.reserved_tokens), max_tokens)
        # The slot counts with its estimate even where it holds more: an allocator may return larger buffers.
        growth = self.layout.bytes_for(wanted, slot.origin) - self.ledger.slot_bytes(slot.index)
        missing = self.free(self.ledger.excess_bytes(growth), busy=slot, is_background=slot.is_background)
        capacity = self.layout.tokens_without(missing, wanted)
        if slot.is_lost:
            return True
        if capacity < slot.offset + needed:
            return False
        self.reserve(slot, capacity, needed=capacity)
        self.pager.measure(slot)
        return True

    def try_set_aside(self, num_tokens: int) -> bool:
        """Sets memory aside for a sequence without a slot, evicting session ends last; False if requests hold it."""
        num_bytes = self.layout.bytes_for(num_tokens)
        excess = self.ledger.excess_bytes(num_bytes)
        if num_bytes > self.ledger.budget_bytes or self.free(excess, is_background=True, or_nothing=True) > 0:
            return False
        self.ledger.reserve(ASIDE, num_bytes)
        return True

    def release_aside(self) -> None:
        """Releases the memory set aside."""
        self.ledger.reserve(ASIDE, 0)

    # -- heads

    def _least_tokens(self, *, is_short: bool) -> float:
        """Tokens from which a head pays; inf if none does."""
        fast = self.pager.shared.head_tokens if self.pager.shared is not None else None
        if fast is None or not self.layout.can_share_heads:
            return math.inf
        return min(fast, MIN_HEAD_TOKENS) if is_short else fast

    def head_of(self, slot: Slot, path: Sequence[Node], offset: int) -> Slot | None:
        """The head that a request will read once `slot` has restored it at `offset` on `path`."""
        if is_in_place(slot, path, offset):
            return slot.head
        fitting = [head for head in self.pager.heads if head.offset <= offset and head.tip in path]
        return slot.head if slot.head in fitting else max(fitting, key=lambda head: head.offset, default=None)

    def invite(self, slot: Slot, result: LookupResult, num_tokens: int, *, is_wanted: bool = False) -> bool:
        """Makes a head of what running sequences share with a request for `num_tokens` in `slot`, if that saves most.

        Returns whether it did; then `result` is no longer valid.
        """
        offset = result.restorable_in(slot)
        is_short = is_wanted or self.excess_for(slot, result.path, offset, num_tokens) > 0
        least = self._least_tokens(is_short=is_short)
        if least == math.inf or is_in_place(slot, result.path, offset):
            return False
        shared = [min(result.shared[other.index], offset) for other in self._loose(None)]
        saved = {num: num * sum(other >= num for other in shared) for num in shared if num >= least}
        head = self.head_of(slot, result.path, offset)
        if not saved or (head is not None and head.offset >= max(saved.values())):
            return False
        length = max(saved, key=lambda num: (saved[num], num))
        source = next(other for other in self._loose(None) if result.shared[other.index] >= length)
        self._share(self.pager.land(self.pager.trie(source.namespace), result.path, length), None)
        return True

    def gather(self, *, is_short: bool, target_bytes: float = -1, also: Slot | None = None) -> None:
        """Has running sequences, and `also`, share the heads that save most, until `target_bytes` are charged.

        An error loses a sequence; it is raised if that is `also`.
        """
        least = self._least_tokens(is_short=is_short)
        while least < math.inf and self.ledger.charged_bytes > target_bytes:
            tip = self._best(least, also)
            if tip is None:
                return
            self._share(tip, also)

    def _loose(self, also: Slot | None) -> list[Slot]:
        running = (slot for slot in self.pager.slots if slot.is_leased or slot is also)
        return [slot for slot in running if slot.head is None and slot.tip.parent is not None]

    def _best(self, least: float, also: Slot | None) -> Node | None:
        """The end of the head, there already or not, that saves most."""
        made = {head.tip for head in self.pager.heads}
        counts = Counter(node for slot in self._loose(also) for node in slot.tip.path() if node.stop >= least)
        saved = {tip: tip.stop * (num - (tip not in made)) for tip, num in counts.items()}
        best = max(saved, key=lambda tip: (saved[tip], tip.stop), default=None)
        return best if best is not None and saved[best] > 0 else None

    def _share(self, tip: Node, also: Slot | None) -> None:
        head = next((head for head in self.pager.heads if head.tip is tip), None)
        for slot in self._loose(also):
            if tip not in slot.tip.path():
                continue
            try:
                head = self.pager.share_head(slot, tip, head)
            except Exception as error:
                if slot is also:
                    raise
                logger.warning("slot %d is evaluated again: %s", slot.index, error)
                continue
            if slot.is_leased:
                self.ledger.reserve(slot.index, self.layout.bytes_for(slot.reserved_tokens, slot.origin))


def is_in_place(slot: Slot, path: Sequence[Node], offset: int) -> bool:
    """Whether a request to be restored at `offset` on `path` continues where `slot` is."""
    return slot.offset == offset and (not offset or slot.tip in path)
