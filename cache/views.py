"""What the cache holds, as plain values for reports: copied, bounded in number. Worker thread only."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from cache.disk.connector import DiskConnector
from cache.disk.index import DiskWrites
from cache.disk.tree import DiskNode, DiskTree
from cache.memory_tier import MemoryTier, Pins
from cache.pager import Pager
from cache.snapshots import RestorePointKind
from cache.trie import Node, Place, PrefixTrie, TokenNode
from cache.types import TokenArray

PREVIEW_TOKENS = 24
MAX_SESSIONS = 32


@dataclass(frozen=True)
class StateBytes:
    """Stored state by kind, live state, and files."""

    span: int = 0
    window: int = 0
    point: int = 0
    """Recurrent state."""
    live: int = 0
    disk: int = 0

    @property
    def in_memory(self) -> int:
        return self.span + self.window + self.point + self.live


@dataclass(frozen=True, eq=False)
class EdgeView:
    """One edge `[start, stop)`, in memory or on disk."""

    id: int
    """Unique in its tier and namespace."""
    parent: int | None
    start: int
    stop: int
    last_used: int
    """By a logical clock of all namespaces."""
    num_bytes: int
    """Stored; a live span's are the slot's, a file may hold rows of several edges."""
    first_tokens: TokenArray

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class NodeView(EdgeView):
    """One edge of the trie."""

    tier: str
    """`live` or `memory`."""
    restore_point: RestorePointKind | None
    """Kind of the snapshot at `stop`; None unless it restores by itself."""
    is_explicit: bool
    is_pinned: bool
    num_uses: int
    disk_tokens: int


@dataclass(frozen=True, eq=False)
class DiskNodeView(EdgeView):
    """One edge with rows on disk."""

    has_snapshot: bool
    memory_tokens: int
    memory_id: int | None
    """Where these or earlier tokens end."""


@dataclass(frozen=True, eq=False)
class CacheView:
    """The state of one namespace."""

    nodes: list[NodeView]
    disk_nodes: list[DiskNodeView]
    num_nodes: int
    num_tokens: int
    num_disk_nodes: int
    is_disk_truncated: bool
    state: StateBytes
    disk_writes: DiskWrites | None
    """Writes of all namespaces; None without a disk tier."""
    num_evictions: int
    budget_bytes: int
    pinned: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class EdgeDetail:
    """One edge in memory, in detail."""

    start: int
    stop: int
    first_tokens: TokenArray
    num_uses: int
    sessions: list[str]
    """With their last turn through the edge, the latest first; some of many."""


@dataclass(frozen=True)
class NamespaceView:
    """Sums of one namespace."""

    namespace: str
    num_nodes: int
    num_tokens: int
    num_disk_nodes: int
    state: StateBytes


class SharedTokens:
    """Which tokens on disk are in memory too, and vice versa."""

    def __init__(self, trie: PrefixTrie, edges: Iterable[DiskNode]) -> None:
        """`edges` have parents before children."""
        self.in_memory: dict[DiskNode, Place[Node]] = {}
        self.on_disk: dict[Node, int] = {}
        start = Place(trie.root, 0)
        for edge in edges:
            before = self.in_memory.get(edge.parent, start) if edge.parent is not None else start
            is_whole = before.length == edge.start
            place = self.in_memory[edge] = trie.follow(before, edge.tokens) if is_whole else before
            for node in place.edges(edge.start, edge.stop):
                num_tokens = min(node.stop, place.length) - node.start
                self.on_disk[node] = max(self.on_disk.get(node, 0), num_tokens)


def _in_order(trie: PrefixTrie, max_nodes: int) -> list[Node]:
    """Parents first, among siblings the last used."""
    found, stack = list[Node](), _newest_children(trie.root, max_nodes)
    while stack and len(found) < max_nodes:
        found.append(stack.pop())
        stack += _newest_children(found[-1], max_nodes)
    return found


def _newest_children(node: Node, max_nodes: int) -> list[Node]:
    """The newest last."""
    newest_first = heapq.nlargest(max_nodes, reversed(node.children.values()), key=lambda child: child.last_used)
    return newest_first[::-1]


def _view(node: Node, disk_tokens: int) -> NodeView:
    return NodeView(
        id=node.number,
        parent=_number_of(node.parent),
        start=node.start,
        stop=node.stop,
        tier="live" if node.home is not None else "memory",
        restore_point=node.kind if node.snapshot is not None else None,
        is_explicit=node.is_explicit,
        is_pinned=node.num_pins > 0,
        num_uses=node.num_uses,
        disk_tokens=disk_tokens,
        last_used=node.last_used,
        num_bytes=node.num_bytes,
        first_tokens=node.tokens[:PREVIEW_TOKENS].copy(),
    )


def _disk_view(edge: DiskNode, in_memory: Place[Node]) -> DiskNodeView:
    return DiskNodeView(
        id=edge.number,
        parent=_number_of(edge.parent),
        start=edge.start,
        stop=edge.stop,
        has_snapshot=edge.snapshot is not None,
        memory_tokens=max(0, min(in_memory.length, edge.stop) - edge.start),
        memory_id=_number_of(in_memory.node),
        last_used=max(file.last_used for file in edge.files),
        num_bytes=edge.span.num_bytes + (edge.snapshot.num_bytes if edge.snapshot is not None else 0),
        first_tokens=edge.tokens[:PREVIEW_TOKENS].copy(),
    )


def _sessions_below(top: Node) -> list[str]:
    below = [top]
    for node in below:
        below.extend(node.children.values())
    ends = [node for node in below if node.session_id is not None]
    newest = heapq.nlargest(MAX_SESSIONS, ends, key=lambda node: node.last_used)
    return list(dict.fromkeys(node.session_id for node in newest if node.session_id is not None))


def _number_of(node: TokenNode | None) -> int | None:
    return None if node is None or node.parent is None else node.number


class CacheReports:
    """Reports on the tiers of one cache."""

    def __init__(self, memory: MemoryTier, pager: Pager, disk: DiskConnector | None, pins: Pins) -> None:
        self._memory = memory
        self._pager = pager
        self._tier = disk.tier if disk is not None else None
        if self._tier is not None:
            self._tier.notice_written()
        self._files = self._tier.tree if self._tier is not None else DiskTree()
        self._pins = pins

    def view(self, namespace: str, max_nodes: int) -> CacheView:
        """One namespace, with at most `max_nodes` edges."""
        memory, tier = self._memory, self._tier
        trie = memory.find_trie(namespace)
        edges, is_truncated = self._files.listing(namespace, max_nodes)
        shared = SharedTokens(trie, edges)
        return CacheView(
            nodes=[_view(node, shared.on_disk.get(node, 0)) for node in _in_order(trie, max_nodes)],
            disk_nodes=[_disk_view(edge, shared.in_memory[edge]) for edge in edges],
            num_nodes=trie.num_nodes,
            num_tokens=memory.find_trie(namespace).held.num_tokens,
            num_disk_nodes=self._files.find_trie(namespace).num_nodes,
            is_disk_truncated=is_truncated,
            state=self.bytes_of(namespace),
            disk_writes=tier.write_budget.writes() if tier is not None else None,
            num_evictions=memory.evictions[namespace],
            budget_bytes=memory.ledger.budget_bytes,
            pinned=self._pins.labels(namespace),
        )

    def edge(self, namespace: str, number: int, max_tokens: int) -> EdgeDetail | None:
        """One edge in memory, with at most `max_tokens`; None if gone."""
        node = next((one for one in self._memory.find_trie(namespace).nodes() if one.number == number), None)
        if node is None:
            return None
        first_tokens = node.tokens[:max_tokens].copy()
        return EdgeDetail(node.start, node.stop, first_tokens, node.num_uses, _sessions_below(node))

    def namespaces(self) -> list[NamespaceView]:
        """Sums of each namespace, the most bytes first."""
        names = {*self._memory.namespaces, *self._files.namespaces()}
        held = [self._namespace_view(name) for name in names]
        held = [view for view in held if view.num_nodes or view.num_disk_nodes]
        return sorted(held, key=lambda view: (-view.state.in_memory - view.state.disk, view.namespace))

    def bytes_of(self, namespace: str) -> StateBytes:
        """Bytes of one namespace."""
        live = sum(self._pager.live_bytes(slot) for slot in self._pager.all_live if slot.namespace == namespace)
        disk = self._files.find_trie(namespace).num_bytes
        held = self._memory.find_trie(namespace).held
        return StateBytes(held.span_bytes, held.window_bytes, held.recurrent_bytes, live, disk)

    def _namespace_view(self, namespace: str) -> NamespaceView:
        return NamespaceView(
            namespace,
            self._memory.find_trie(namespace).num_nodes,
            self._memory.find_trie(namespace).held.num_tokens,
            self._files.find_trie(namespace).num_nodes,
            self.bytes_of(namespace),
        )
