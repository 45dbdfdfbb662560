"""One account of the bytes that hold past tokens, against one budget. Pure arithmetic.

Stored bytes belong to nodes of the trie; live bytes to slots. A slot counts with what it holds or with what was
reserved for it, whichever is more, so that a sequence that was admitted can grow to its expected length.

Errors of the cache.

CacheError
├── BudgetExceeded     a sequence does not fit the budget even with everything else evicted
├── PinnedFull         a sequence does not fit as long as other state is pinned
├── PinLimit           a pin would leave too little of the budget for everything else
├── FolderError        the folder for state on disk cannot be used
│   ├── DiskInUse          another process keeps its state in it
│   ├── FolderUnsafe       it belongs to another user, or others can write into it
│   └── FolderUnusable     it cannot be made, entered or written to
└── DiskFault          stored state cannot be read back; it is gone, and evaluated again
"""

from pathlib import Path

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


class CacheError(Exception):
    """Base of all errors the cache raises for a caller's or the machine's fault."""


class BudgetExceeded(CacheError):
    """The state of one sequence is larger than the whole budget."""

    def __init__(self, needed_bytes: int, budget_bytes: int) -> None:
        super().__init__(
            f"the conversation needs about {needed_bytes / 1e6:.1f} MB of cache memory, "
            f"the budget is {budget_bytes / 1e6:.1f} MB"
        )
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes


class PinnedFull(CacheError):
    """What is pinned leaves too little memory for a sequence."""

    def __init__(self, missing_bytes: int) -> None:
        super().__init__(
            f"about {missing_bytes / 1e6:.1f} MB of cache memory are missing, and what is left of it is pinned; "
            f"unpin a session"
        )
        self.missing_bytes = missing_bytes


class PinLimit(CacheError):
    """Pins may take half of the budget at most."""

    def __init__(self, pinned_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"with this pin, {pinned_bytes / 1e6:.1f} MB would be pinned; "
            f"at most {limit_bytes / 1e6:.1f} MB may be, half of the cache memory"
        )
        self.pinned_bytes = pinned_bytes
        self.limit_bytes = limit_bytes


class FolderError(CacheError):
    """The folder of the disk tier cannot be used. The message is one sentence for a person."""


class FolderUnusable(FolderError):
    """The folder of the disk tier cannot be made, entered or written to."""

    def __init__(self, folder: Path, cause: Exception) -> None:
        words = getattr(cause, "strerror", None) or str(cause)
        super().__init__(f"the cache folder {folder} cannot be used: {words[:1].lower()}{words[1:]}")
        self.folder = folder


class DiskInUse(FolderError):
    """Another process holds the folder of the disk tier."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"the cache folder {folder} is in use by another process; give each its own")
        self.folder = folder


class FolderUnsafe(FolderError):
    """The folder of the disk tier is not this user's alone to change."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(f"the cache folder {folder} {reason}; it holds people's conversations, so it is not used")
        self.folder = folder


class DiskFault(CacheError):
    """State on disk cannot be read: its file is gone, foreign or damaged, or the disk fails."""
