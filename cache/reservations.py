"""Memory for the live buffers of a running sequence: reserved when it begins, and grown while it generates."""

from cache.layers import layout
from cache.pager import Pager
from cache.reclaim import Reclaimer
from cache.sizes import SequenceSizes
from cache.slots import Slot


class Reservations:
    """Sizes the live buffers of leased slots within the budget. Worker thread only."""

    def __init__(self, pager: Pager, sizes: SequenceSizes, reclaimer: Reclaimer) -> None:
        self._pager = pager
        self._layout = pager.layout
        self._ledger = pager.ledger
        self._sizes = sizes
        self._reclaimer = reclaimer

    def reserve(self, slot: Slot, num_tokens: int, *, needed: int) -> None:
        """Reserves memory for a sequence of `num_tokens`, and resizes the live buffers unless they take `needed`.

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
        """Grows the live buffers by a step, up to `max_tokens` in all; False if not even one more token fits.

        Pages idle slots out and evicts stored state for it.
        """
        wanted = max(slot.offset + layout.GROWTH_TOKENS, slot.reserved_tokens)
        capacity = self._affordable(slot, min(wanted, max_tokens))
        if capacity <= slot.offset:
            return False
        self.reserve(slot, capacity, needed=capacity)
        self._pager.measure(slot)
        return True

    def _affordable(self, slot: Slot, num_tokens: int) -> int:
        """Frees memory for `num_tokens` in `slot`; returns how many of them fit the budget after that.

        The slot counts with its estimate, even where it holds more now: an allocator hands out larger buffers
        than it is asked for, and the next token cuts a window's buffer. Counted with what it holds, a sequence
        that was estimated to fit would not.
        """
        growth = self._sizes.bytes_for(num_tokens) - self._ledger.slot_bytes(slot.index)
        excess = self._ledger.excess_bytes(growth)
        missing = self._reclaimer.free(excess, busy=slot, is_background=slot.turn.is_background)
        return self._sizes.tokens_without(missing, num_tokens)
