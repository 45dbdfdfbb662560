"""Records what happens to the state of past tokens: counted always, and told to a listener, if any. Pure.

Every part of the cache that moves, drops, reads or writes state records it here. Without a listener the journal only
keeps sums. The statistics are frozen: any thread may hold one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias


class Happening(StrEnum):
    """What may happen to state, under the name that clients see."""

    PAGED_IN = "cache.page_in"
    PAGED_OUT = "cache.page_out"
    EVICTED = "cache.evicted"
    WRITTEN = "disk.written"
    READ = "disk.read"
    DELETED = "disk.evicted"


class EvictionReason(StrEnum):
    """Why state was evicted."""

    MEMORY = "memory"
    """The state had the lowest value when memory was short."""
    SUPERSEDED = "superseded"
    """Newer restore points of the conversation replace the state."""
    UNUSABLE = "unusable"
    """No request could have been restored with the state."""
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
    """The event concerns a snapshot; otherwise rows, or a whole edge."""
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
        """Called with each event from now on; must not fail. Any thread may set it."""
        self._num_page_ins = 0
        self._num_page_outs = 0
        self._written_bytes = 0
        self._read_bytes = 0

    @property
    def moved(self) -> MovedState:
        """The current sums."""
        return MovedState(self._num_page_ins, self._num_page_outs, self._written_bytes, self._read_bytes)

    def paged_in(self, namespace: str, slot: int, num_tokens: int) -> None:
        """State of this many tokens was made live in a slot."""
        self._num_page_ins += 1
        if (tell := self.tell) is not None:
            tell(CacheEvent(Happening.PAGED_IN, namespace, num_tokens, slot=slot))

    def paged_out(self, namespace: str, slot: int, num_tokens: int) -> None:
        """State of this many tokens left a slot."""
        self._num_page_outs += 1
        if (tell := self.tell) is not None:
            tell(CacheEvent(Happening.PAGED_OUT, namespace, num_tokens, slot=slot))

    def evicted(
        self, namespace: str, num_tokens: int, num_bytes: int, reason: EvictionReason, *, is_snapshot: bool
    ) -> None:
        """An edge of this many tokens, or the snapshot at its end, was evicted."""
        if (tell := self.tell) is not None:
            what = Happening.EVICTED
            tell(CacheEvent(what, namespace, num_tokens, num_bytes, is_snapshot=is_snapshot, reason=reason))

    def written(self, namespace: str, num_tokens: int, num_bytes: int, *, is_snapshot: bool) -> None:
        """A file was written."""
        self._written_bytes += num_bytes
        if (tell := self.tell) is not None:
            tell(CacheEvent(Happening.WRITTEN, namespace, num_tokens, num_bytes, is_snapshot=is_snapshot))

    def read(self, namespace: str, num_tokens: int, num_bytes: int) -> None:
        """State of this many tokens was read from files."""
        self._read_bytes += num_bytes
        if (tell := self.tell) is not None:
            tell(CacheEvent(Happening.READ, namespace, num_tokens, num_bytes))

    def deleted(self, namespace: str, num_files: int, num_bytes: int) -> None:
        """Files were evicted or replaced."""
        if (tell := self.tell) is not None:
            tell(CacheEvent(Happening.DELETED, namespace, num_bytes=num_bytes, num_files=num_files))


@dataclass(frozen=True)
class CacheStats:
    """What the prefix cache holds, for all namespaces together."""

    num_nodes: int = 0
    stored_bytes: int = 0
    """State on nodes, in memory."""
    live_bytes: int = 0
    """State in slots."""
    budget_bytes: int = 0
    bytes_per_token: float = 0.0
    """Bytes by which a conversation's state grows per token; 0 for a model whose state does not grow."""
    num_evictions: int = 0
    """Leaves and snapshots evicted for lack of memory, since the start."""
    moved: MovedState = field(default_factory=MovedState)
    """State paged, written and read, since the start."""
    keeps_on_disk: bool = False
    """Whether the cache has a disk tier with a usable folder."""
    disk_bytes: int = 0
    num_disk_files_gone: int = 0
    """Files found missing or damaged on reading, since the start."""
