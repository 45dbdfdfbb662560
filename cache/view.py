"""What the cache holds for one namespace, as plain values for reports: copied, and bounded in number."""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cache.disk.listing import DiskEntry
from cache.disk.write_budget import DiskWrites
from cache.restore_points import RestorePointKind
from cache.tokens import TokenArray
from cache.trie import Node, PrefixTrie

PREVIEW_TOKENS = 24


@dataclass(frozen=True)
class StateBytes:
    """Bytes by what they hold; stored state by kind, live state as a whole, and files."""

    span: int = 0
    window: int = 0
    point: int = 0
    live: int = 0
    disk: int = 0

    @property
    def in_memory(self) -> int:
        """All but the files."""
        return self.span + self.window + self.point + self.live


@dataclass(frozen=True, eq=False)
class EdgeView:
    """One edge `[start, stop)`, in memory or on disk. `index` is its place in the list, from 0, parents first."""

    index: int
    parent: int | None
    start: int
    stop: int
    last_used: int
    """A reading of a logical clock that all namespaces share."""
    num_bytes: int
    """Stored bytes: those of a live span are the slot's, and a file may hold rows of several edges."""
    first_tokens: TokenArray


@dataclass(frozen=True, eq=False)
class NodeView(EdgeView):
    """One edge of the trie."""

    is_live: bool
    """Its span is in a slot; otherwise stored in memory."""
    kind: RestorePointKind | None
    """Why a snapshot was kept at `stop`; None if there is none that can be restored by itself."""
    is_explicit: bool
    is_pinned: bool


@dataclass(frozen=True, eq=False)
class DiskNodeView(EdgeView):
    """One edge whose rows are on disk."""

    has_snapshot: bool
    """The snapshot that a model needs to be restored at `stop` is on disk too."""


@dataclass(frozen=True, eq=False)
class CacheView:
    """The state of one namespace."""

    nodes: list[NodeView]
    disk_nodes: list[DiskNodeView]
    num_nodes: int
    """All nodes, of which only the first may be listed."""
    num_tokens: int
    """Tokens on the edges of all nodes."""
    num_disk_nodes: int
    is_disk_truncated: bool
    """Whether `disk_nodes` leaves out edges because there are too many."""
    state: StateBytes
    disk_writes: DiskWrites | None
    """For all namespaces together; None without a disk tier."""
    num_evictions: int
    """Leaves and snapshots evicted since the start."""
    budget_bytes: int
    """For all namespaces together."""
    pinned: tuple[str, ...]
    """Labels of the explicit pins."""


@dataclass(frozen=True)
class NamespaceView:
    """What one namespace holds, in sums."""

    namespace: str
    num_nodes: int
    num_tokens: int
    num_disk_nodes: int
    state: StateBytes


def views(trie: PrefixTrie, max_nodes: int) -> list[NodeView]:
    """Returns up to `max_nodes` edges, parents before children, the last used first among siblings."""
    index_of: dict[Node, int] = {}
    found: list[NodeView] = []
    for node in _in_order(trie, max_nodes):
        if len(found) == max_nodes:
            break
        index_of[node] = len(found)
        found.append(_view(node, len(found), index_of.get(node.parent) if node.parent is not None else None))
    return found


def disk_views(entries: Iterable[DiskEntry]) -> list[DiskNodeView]:
    """Returns edges on disk, parents before children."""
    index_of: dict[DiskEntry | None, int] = {}
    found: list[DiskNodeView] = []
    for entry in entries:
        index_of[entry] = len(found)
        found.append(_disk_view(entry, len(found), index_of.get(entry.parent)))
    return found


def _in_order(trie: PrefixTrie, max_nodes: int) -> Iterator[Node]:
    stack = _newest_children(trie.root, max_nodes)
    while stack:
        node = stack.pop()
        yield node
        stack += _newest_children(node, max_nodes)


def _newest_children(node: Node, max_nodes: int) -> list[Node]:
    """Returns the children used last, the newest at the end; more than are listed need not be sorted."""
    newest_first = heapq.nlargest(max_nodes, reversed(node.children.values()), key=lambda child: child.last_used)
    return newest_first[::-1]


def _view(node: Node, index: int, parent: int | None) -> NodeView:
    return NodeView(
        index=index,
        parent=parent,
        start=node.start,
        stop=node.stop,
        is_live=node.home is not None,
        kind=node.kind if node.snapshot is not None else None,
        is_explicit=node.is_explicit,
        is_pinned=node.num_pins > 0,
        last_used=node.last_used,
        num_bytes=node.num_bytes,
        first_tokens=node.tokens[:PREVIEW_TOKENS].copy(),
    )


def _disk_view(entry: DiskEntry, index: int, parent: int | None) -> DiskNodeView:
    snapshot = entry.snapshot
    return DiskNodeView(
        index=index,
        parent=parent,
        start=entry.start,
        stop=entry.stop,
        has_snapshot=snapshot is not None,
        last_used=entry.last_used,
        num_bytes=entry.span.file_bytes + (snapshot.file_bytes if snapshot is not None else 0),
        first_tokens=entry.tokens[:PREVIEW_TOKENS].copy(),
    )
