"""Counts what happens to the state of past tokens, and tells a listener, if any. Pure.

Statistics are frozen: any thread may hold them.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias


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
    """Of least value while memory was short."""
    SUPERSEDED = "superseded"
    """Newer restore points replace the state."""
    UNUSABLE = "unusable"
    NAMESPACES = "namespaces"


@dataclass(frozen=True)
class CacheEvent:
    """Something that happened to one namespace's state."""

    what: Happening
    namespace: str
    num_tokens: int = 0
    num_bytes: int = 0
    num_files: int = 0
    slot: int | None = None
    is_snapshot: bool = False
    """A snapshot alone, not rows or an edge."""
    reason: EvictionReason | None = None


Tell: TypeAlias = Callable[[CacheEvent], None]


@dataclass(frozen=True)
class MovedState:
    """Sums since the cache was made."""

    num_page_ins: int = 0
    num_page_outs: int = 0
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
        events, num_bytes = self._num_events, self._num_bytes
        return MovedState(
            *(events[Happening.PAGED_IN], events[Happening.PAGED_OUT]),
            *(num_bytes[Happening.WRITTEN], num_bytes[Happening.READ]),
        )

    def record(self, event: CacheEvent) -> None:
        """Counts an event and tells the listener."""
        self._num_events[event.what] += 1
        self._num_bytes[event.what] += event.num_bytes
        if (tell := self.tell) is not None:
            tell(event)


@dataclass(frozen=True)
class CacheStats:
    """What the prefix cache holds, all namespaces together."""

    num_nodes: int = 0
    stored_bytes: int = 0
    live_bytes: int = 0
    budget_bytes: int = 0
    bytes_per_token: float = 0.0
    num_evictions: int = 0
    moved: MovedState = field(default_factory=MovedState)
    keeps_on_disk: bool = False
    disk_bytes: int = 0
    num_disk_files_gone: int = 0
