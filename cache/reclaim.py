"""Frees memory of one model's budget, and decides who keeps it: live buffers, memory set aside, pinned prefixes.

Memory is freed in this order: idle slots are paged out, stored state is evicted, soft pins end and more is evicted.
Live buffers are reserved when a sequence begins, and grow while it generates. Worker thread only.
"""

import contextlib
from collections.abc import Sequence

from cache.budget import ASIDE, Ledger, PinLimit
from cache.layers import layout
from cache.layers.layout import SequenceSizes
from cache.lookup import nodes_to_restore
from cache.memory_tier import MemoryTier
from cache.pager import Pager
from cache.pins import PinName, Pins, choose_nodes, path_nodes
from cache.slots import RequestClock, Slot
from cache.trie import Node, PrefixTrie
from cache.types import TokenArray


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
        """Frees `excess_bytes` without evicting `protected` nodes; returns the bytes that could not be freed.

        `busy` is the slot that needs the memory; it is not paged out. For a request that `is_background` the ends of
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

        A remaining shortage is tolerated: it is too late for the request to wait.
        """
        self.free(
            self.excess_for(slot, path, offset, num_tokens),
            protected=nodes_to_restore(self._pager.layout, path, offset),
            busy=slot,
            is_background=slot.turn.is_background,
        )

    def excess_for(self, slot: Slot, path: Sequence[Node], offset: int, num_tokens: int) -> int:
        """Returns the bytes to free for a sequence of `num_tokens` in `slot`, `[0, offset)` coming from `path`.

        If there are any, idle slots are paged out first. State that was live only there can then be moved into
        `slot`, and no longer counts twice.
        """
        excess = self._ledger.excess_bytes(self._growth(slot, path, offset, num_tokens))
        if excess > 0:
            self._pager.page_out_idle(self._ledger.charged_bytes - excess, slot)
            excess = self._ledger.excess_bytes(self._growth(slot, path, offset, num_tokens))
        return excess

    def _growth(self, slot: Slot, path: Sequence[Node], offset: int, num_tokens: int) -> int:
        """Returns the additional bytes charged once `slot` has `num_tokens`, `[0, offset)` moved in from `path`."""
        moving = 0.0
        for node in path:
            start, stop, span = node.start, node.stop, node.span
            if span is not None and start < offset:
                moving += span.num_bytes if stop <= offset else span.num_bytes * (offset - start) / (stop - start)
        return int(self._sizes.bytes_for(num_tokens) - moving) - self._ledger.slot_bytes(slot.index)

    def relieve(self) -> None:
        """Evicts half of the stored state: the device has less memory than the budget says.

        Pages nothing out, since that takes memory before it frees any.
        """
        self._pins.release_soft()
        target = self._ledger.charged_bytes - self._ledger.stored_bytes // 2
        self._memory.evict(target, (), self._clock.now)


class Reservations:
    """Sizes the live buffers of leased slots within the budget. Worker thread only."""

    def __init__(self, pager: Pager, sizes: SequenceSizes, reclaimer: Reclaimer) -> None:
        self._pager = pager
        self._layout = pager.layout
        self._ledger = pager.ledger
        self._sizes = sizes
        self._reclaimer = reclaimer

    def reserve(self, slot: Slot, num_tokens: int, *, needed: int) -> None:
        """Reserves memory for a sequence of `num_tokens`, and resizes the live buffers unless they have room for
        `needed`.

        After an error the slot is empty and no longer leased.
        """
        self._ledger.reserve(slot.index, self._sizes.bytes_for(num_tokens))
        slot.reserved_tokens, capacity = num_tokens, self._layout.capacity(slot.caches)
        if capacity is not None and needed <= capacity <= num_tokens + layout.GROWTH_TOKENS:
            slot.capacity = capacity
            return
        slot.capacity = num_tokens
        try:
            self._layout.resize(slot.caches, num_tokens)
        except Exception:
            self._pager.discard(slot)
            raise

    def try_grow(self, slot: Slot, max_tokens: int) -> bool:
        """Grows the live buffers by a step, up to `max_tokens` in total; False if not even one more token fits.

        May page idle slots out and evict stored state.
        """
        wanted = max(slot.offset + layout.GROWTH_TOKENS, slot.reserved_tokens)
        capacity = self._affordable(slot, min(wanted, max_tokens))
        if capacity <= slot.offset:
            return False
        self.reserve(slot, capacity, needed=capacity)
        self._pager.measure(slot)
        return True

    def _affordable(self, slot: Slot, num_tokens: int) -> int:
        """Frees memory for `num_tokens` in `slot`; returns how many of them then fit the budget.

        The slot counts with its estimate, even where it holds more now: an allocator returns larger buffers than
        requested, and the next token cuts a window's buffer. Counted by what it holds, a sequence that was estimated
        to fit would not.
        """
        growth = self._sizes.bytes_for(num_tokens) - self._ledger.slot_bytes(slot.index)
        excess = self._ledger.excess_bytes(growth)
        missing = self._reclaimer.free(excess, busy=slot, is_background=slot.turn.is_background)
        return self._sizes.tokens_without(missing, num_tokens)


class SetAside:
    """Sets memory aside for one sequence without a slot. Worker thread only."""

    def __init__(self, ledger: Ledger, sizes: SequenceSizes, reclaimer: Reclaimer) -> None:
        self._ledger = ledger
        self._sizes = sizes
        self._reclaimer = reclaimer

    def try_take(self, num_tokens: int) -> bool:
        """Sets aside memory for a sequence of `num_tokens`; False if running requests hold too much.

        May page idle slots out and evict stored state, the ends of sessions last.
        """
        num_bytes = self._sizes.bytes_for(num_tokens)
        if num_bytes > self._ledger.budget_bytes:
            return False
        if self._reclaimer.free(self._ledger.excess_bytes(num_bytes), is_background=True) > 0:
            return False
        self._ledger.reserve(ASIDE, num_bytes)
        return True

    def give_back(self) -> None:
        """Releases the memory set aside."""
        self._ledger.reserve(ASIDE, 0)


class Pinning:
    """Pins the state of given tokens, bounds explicit pins, and moves a session's pin along. Worker thread only."""

    def __init__(self, pager: Pager, sizes: SequenceSizes) -> None:
        self.pins = Pins()
        self._pager = pager
        self._sizes = sizes

    def pin(self, name: PinName, tokens: TokenArray) -> int:
        """Pins the stored state of `tokens` until it is unpinned; returns the number of tokens.

        Raises PinLimit if explicit pins would take more than half of the budget.
        """
        trie = self._pager.trie(name.namespace)
        match = trie.match(tokens)
        if match.path:
            self._pin_path(name, trie, match.path)
        return match.length

    def pin_until(self, name: PinName, tokens: TokenArray, until: float) -> None:
        """Pins the stored state of `tokens` softly, until the caller's clock reads `until`."""
        assert name.is_soft
        trie = self._pager.trie(name.namespace)
        path = trie.match(tokens).path
        if path:
            self.pins.hold(name, trie, choose_nodes(path), until)

    def follow(self, slot: Slot) -> None:
        """Moves the pin of a slot's session, if any, to the end of its sequence."""
        name = PinName(slot.namespace, slot.turn.session_id or "")
        if name in self.pins and slot.tip.parent is not None:
            with contextlib.suppress(PinLimit):  # the earlier part of the session stays pinned
                self._pin_path(name, self._pager.trie(slot.namespace), slot.tip.path())

    def _pin_path(self, name: PinName, trie: PrefixTrie, path: list[Node]) -> None:
        nodes = choose_nodes(path)
        num_bytes = self._bytes_of({*nodes, *self.pins.explicit(but=name)})
        limit = self._pager.ledger.budget_bytes // 2
        if num_bytes > limit:
            raise PinLimit(num_bytes, limit)
        self.pins.hold(name, trie, nodes)

    def _bytes_of(self, nodes: set[Node]) -> int:
        """Returns the approximate bytes that pins on `nodes` protect: the spans of their paths and their own
        snapshots.
        """
        snapshots = sum(node.snapshot.num_bytes for node in nodes if node.snapshot is not None)
        return snapshots + sum(
            node.span.num_bytes if node.span is not None else int(len(node.tokens) * self._sizes.bytes_per_token)
            for node in path_nodes(nodes)
        )
