"""One account of the bytes that hold past tokens, against one budget. Pure arithmetic.

Stored bytes belong to nodes of the trie; live bytes to slots. A slot counts with what it holds or with what was
reserved for it, whichever is more, so that a sequence that was admitted can grow to its expected length.
"""

ASIDE = -1
"""Stands for what is set aside for a sequence without a slot; slots count from 0."""


class Ledger:
    """Bytes by owner. Every figure is what the allocator holds, never an estimate of it, except reservations."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.stored_bytes = 0
        self._live: dict[int, int] = {}
        self._reserved: dict[int, int] = {}
        self._slot_bytes = 0
        """Bytes charged to all slots."""

    @property
    def live_bytes(self) -> int:
        """Bytes that slots hold now."""
        return sum(self._live.values())

    @property
    def charged_bytes(self) -> int:
        """Stored bytes, and for each slot the larger of held and reserved."""
        return self.stored_bytes + self._slot_bytes

    def slot_bytes(self, slot: int) -> int:
        """Bytes charged to one slot."""
        return max(self._live.get(slot, 0), self._reserved.get(slot, 0))

    @property
    def set_aside_bytes(self) -> int:
        """Bytes that a sequence without a slot holds for a while."""
        return self.slot_bytes(ASIDE)

    def excess_bytes(self, extra_bytes: int = 0) -> int:
        """Bytes that must be freed before `extra_bytes` more fit; 0 or less if they fit already."""
        return self.charged_bytes + extra_bytes - self.budget_bytes

    def store(self, num_bytes: int) -> None:
        """Counts bytes that a node now owns; negative when it let go of them."""
        self.stored_bytes += num_bytes
        assert self.stored_bytes >= 0, "more bytes were dropped than stored"

    def set_live(self, slot: int, num_bytes: int) -> None:
        """Records what a slot holds now."""
        self._charge(slot, self._live, num_bytes)

    def reserve(self, slot: int, num_bytes: int) -> None:
        """Sets aside `num_bytes` in all for a slot; 0 ends the reservation."""
        self._charge(slot, self._reserved, num_bytes)

    def _charge(self, slot: int, kind: dict[int, int], num_bytes: int) -> None:
        before = self.slot_bytes(slot)
        kind[slot] = num_bytes
        self._slot_bytes += self.slot_bytes(slot) - before
