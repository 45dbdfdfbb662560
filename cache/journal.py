"""What happens to the state of past tokens: counted always, and told to whoever listens. Pure.

Every part of the cache that moves, drops, reads or writes state notes it here. Nothing is made of it but a sum,
unless somebody listens.

The cache's counters and gauges, for reports. Frozen: any thread may hold one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias


class Happening(StrEnum):
    """What may happen to state, by the name that it has for clients."""

    PAGED_IN = "cache.page_in"
    PAGED_OUT = "cache.page_out"
    EVICTED = "cache.evicted"
    WRITTEN = "disk.written"
    READ = "disk.read"
    DELETED = "disk.evicted"


class EvictionReason(StrEnum):
    """Why state was given up."""

    MEMORY = "memory"
    """It was worth the least when memory was short."""
    SUPERSEDED = "superseded"
    """Newer restore points of its conversation replace it."""
    UNUSABLE = "unusable"
    """No request could have been restored with it."""
    NAMESPACES = "namespaces"
    """There were too many namespaces."""


@dataclass(frozen=True)
class CacheEvent:
    """Something that happened to state of one namespace."""

    what: Happening
    namespace: str
    num_tokens: int = 0
    num_bytes: int = 0
    num_files: int = 0
    slot: int | None = None
    is_snapshot: bool = False
    """It concerns a snapshot; otherwise rows, or a whole edge."""
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
    """Sums of one cache, and who is told. Worker thread only, but for `tell`."""

    def __init__(self) -> None:
        self.tell: Tell | None = None
        """Called with each event from now on; must not fail. May be set by any thread."""
        self._num_page_ins = 0
        self._num_page_outs = 0
        self._written_bytes = 0
        self._read_bytes = 0

    @property
    def moved(self) -> MovedState:
        """The sums of now."""
        return MovedState(self._num_page_ins, self._num_page_outs, self._written_bytes, self._read_bytes)

    def paged_in(self, namespace: str, slot: int, num_tokens: int) -> None:
        """State of so many tokens was made live in a slot."""
        self._num_page_ins += 1
        if (tell := self.tell) is not None:
            tell(CacheEvent(Happening.PAGED_IN, namespace, num_tokens, slot=slot))

    def paged_out(self, namespace: str, slot: int, num_tokens: int) -> None:
        """State of so many tokens left a slot."""
        self._num_page_outs += 1
        if (tell := self.tell) is not None:
            tell(CacheEvent(Happening.PAGED_OUT, namespace, num_tokens, slot=slot))

    def evicted(
        self, namespace: str, num_tokens: int, num_bytes: int, reason: EvictionReason, *, is_snapshot: bool
    ) -> None:
        """An edge of so many tokens, or the snapshot at its end, was given up."""
        if (tell := self.tell) is not None:
            what = Happening.EVICTED
            tell(CacheEvent(what, namespace, num_tokens, num_bytes, is_snapshot=is_snapshot, reason=reason))

    def written(self, namespace: str, num_tokens: int, num_bytes: int, *, is_snapshot: bool) -> None:
        """A file was written."""
        self._written_bytes += num_bytes
        if (tell := self.tell) is not None:
            tell(CacheEvent(Happening.WRITTEN, namespace, num_tokens, num_bytes, is_snapshot=is_snapshot))

    def read(self, namespace: str, num_tokens: int, num_bytes: int) -> None:
        """State of so many tokens was read from files."""
        self._read_bytes += num_bytes
        if (tell := self.tell) is not None:
            tell(CacheEvent(Happening.READ, namespace, num_tokens, num_bytes))

    def deleted(self, namespace: str, num_files: int, num_bytes: int) -> None:
        """Files gave way to others."""
        if (tell := self.tell) is not None:
            tell(CacheEvent(Happening.DELETED, namespace, num_bytes=num_bytes, num_files=num_files))


@dataclass(frozen=True)
class CacheStats:
    """What the prefix cache holds, of all namespaces together."""

    num_nodes: int = 0
    stored_bytes: int = 0
    """State on nodes, in memory."""
    live_bytes: int = 0
    """State in slots."""
    budget_bytes: int = 0
    bytes_per_token: float = 0.0
    """Of a conversation's state, as it grows; 0 for a model whose state does not."""
    num_evictions: int = 0
    """Leaves and snapshots given up for lack of memory, since the start."""
    moved: MovedState = field(default_factory=MovedState)
    """What was paged, written and read, since the start."""
    keeps_on_disk: bool = False
    """Whether there is a disk tier with a folder it can use."""
    disk_bytes: int = 0
    num_disk_files_gone: int = 0
    """Files that were missing or damaged when they were to be read, since the start."""
