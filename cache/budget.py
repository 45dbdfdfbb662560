"""The cache's accounts: bytes against one budget, counts and events of moved and dropped state, and errors. Pure.

Stored bytes belong to nodes of the trie, live bytes to slots. A slot is charged the larger of held and reserved
bytes: an admitted sequence can grow to its expected length. Statistics are frozen: any thread may hold them.

CacheError
├── BudgetExceeded
├── PinnedFull
├── PinLimit
├── FolderError
│   └── DiskInUse
└── DiskFault
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

ASIDE = -1
"""Owner of memory without a slot."""
UNBOUNDED_BYTES = 1 << 62
PADDING = -2
"""Owner of what shared buffers hold beyond what their sequences reserved: a loan, given back first."""


class Ledger:
    """Bytes by owner as the allocator holds them; only reservations are estimates."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.stored_bytes = 0
        self._live: dict[int, int] = {}
        self._reserved: dict[int, int] = {}
        self._slot_bytes = 0

    @property
    def live_bytes(self) -> int:
        return sum(self._live.values())

    @property
    def charged_bytes(self) -> int:
        return self.stored_bytes + self._slot_bytes

    def slot_bytes(self, slot: int) -> int:
        """Bytes charged to one slot, or to `ASIDE`."""
        return max(self._live.get(slot, 0), self._reserved.get(slot, 0))

    def excess_bytes(self, extra_bytes: int = 0) -> int:
        """Bytes to free for `extra_bytes` more; 0 or less if they fit."""
        return self.charged_bytes + extra_bytes - self.budget_bytes

    def store(self, num_bytes: int) -> None:
        """Counts a node's new bytes; negative for released ones."""
        self.stored_bytes += num_bytes
        assert self.stored_bytes >= 0, "more bytes were dropped than stored"

    def set_live(self, slot: int, num_bytes: int) -> None:
        """Records a slot's held bytes."""
        self._charge(slot, self._live, num_bytes)

    def reserve(self, slot: int, num_bytes: int) -> None:
        """Reserves `num_bytes` in total; 0 ends the reservation."""
        self._charge(slot, self._reserved, num_bytes)

    def _charge(self, slot: int, kind: dict[int, int], num_bytes: int) -> None:
        before = self.slot_bytes(slot)
        kind[slot] = num_bytes
        self._slot_bytes += self.slot_bytes(slot) - before


class CacheError(Exception):
    """Base of errors caused by callers or the machine."""


class BudgetExceeded(CacheError):
    """One sequence exceeds the whole budget."""

    def __init__(self, needed_bytes: int, budget_bytes: int) -> None:
        super().__init__(
            f"the conversation needs about {needed_bytes / 1e6:.1f} MB of cache memory, "
            f"the budget is {budget_bytes / 1e6:.1f} MB"
        )


class PinnedFull(CacheError):
    """Pinned state leaves a sequence too little memory."""

    def __init__(self, missing_bytes: int) -> None:
        super().__init__(
            f"about {missing_bytes / 1e6:.1f} MB of cache memory are missing, and what is left of it is pinned; "
            f"unpin a session"
        )


class PinLimit(CacheError):
    """Explicit pins may take half of the budget."""

    def __init__(self, pinned_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"with this pin, {pinned_bytes / 1e6:.1f} MB would be pinned; "
            f"at most {limit_bytes / 1e6:.1f} MB may be, half of the cache memory"
        )


class FolderError(CacheError):
    """The folder cannot be used; the message is one sentence for a person."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(f"the cache folder {folder} {reason}")


class DiskInUse(FolderError):
    """Another process has locked the folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "is in use by another process; give each its own")


class DiskFault(CacheError):
    """State on disk is missing, foreign or damaged, or the disk fails."""


class Happening(StrEnum):
    """What may happen to state, named for clients."""

    PAGED_IN = "cache.page_in"
    PAGED_OUT = "cache.page_out"
    EVICTED = "cache.evicted"
    WRITTEN = "disk.written"
    READ = "disk.read"
    DELETED = "disk.evicted"


class EvictionReason(StrEnum):
    """Why state was evicted."""

    MEMORY = "memory"
    """The state of least value, while memory was short."""
    SUPERSEDED = "superseded"
    """Newer restore points replace the state."""
    UNUSABLE = "unusable"
    NAMESPACES = "namespaces"


@dataclass(frozen=True)
class CacheEvent:
    """Something that happened to one namespace's state."""

    what: Happening
    namespace: str
    fields: Mapping[str, Any]
    """Named for clients: of `slot`, `kind`, `tokens`, `bytes`, `files` and `reason`."""


Tell: TypeAlias = Callable[[CacheEvent], object]


@dataclass(frozen=True)
class MovedState:
    """Sums since the cache was made."""

    page_ins: int = 0
    page_outs: int = 0
    disk_written_bytes: int = 0
    disk_read_bytes: int = 0


class Journal:
    """Sums of one cache, and its listener. Worker thread only, except for `tell`."""

    def __init__(self) -> None:
        self.tell: Tell | None = None
        """Must not fail. Any thread may set it."""
        self._num_events = Counter[Happening]()
        self._num_bytes = Counter[Happening]()

    @property
    def moved(self) -> MovedState:
        num_events, num_bytes = self._num_events, self._num_bytes
        paged = num_events[Happening.PAGED_IN], num_events[Happening.PAGED_OUT]
        return MovedState(*paged, num_bytes[Happening.WRITTEN], num_bytes[Happening.READ])

    def record(self, what: Happening, namespace: str, **fields: Any) -> None:
        """Counts an event and tells the listener."""
        self._num_events[what] += 1
        self._num_bytes[what] += fields.get("bytes", 0)
        if (tell := self.tell) is not None:
            tell(CacheEvent(what, namespace, fields))


@dataclass(frozen=True)
class CacheStats:
    """What the prefix cache holds, all namespaces together."""

    num_nodes: int = 0
    stored_bytes: int = 0
    live_bytes: int = 0
    budget_bytes: int = 0
    bytes_per_token: float = 0.0
    stored_bytes_per_token: float = 0.0
    stored_form: str = ""
    """Words for which state is stored in 8 bits; empty without `--cache-bits`."""
    num_evictions: int = 0
    moved: MovedState = field(default_factory=MovedState)
    keeps_on_disk: bool = False
    disk_bytes: int = 0
    num_disk_files_gone: int = 0
