"""What the cache holds, as plain values for reports: copied, bounded in number. Worker thread only."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from cache.disk.index import DiskWrites
from cache.disk.tree import DiskNode, DiskTree
from cache.prefix_cache import PrefixCache
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
    first_tokens: TokenArray
    last_used: int
    """By a logical clock of all namespaces."""
    num_bytes: int
    """Stored; a live span's are the slot's, a file may hold rows of several edges."""

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
class NamespaceView:
    """Sums of one namespace."""

    namespace: str
    num_nodes: int
    num_tokens: int
    num_disk_nodes: int
    state: StateBytes


@dataclass(frozen=True, eq=False)
class CacheView(NamespaceView):
    """The state of one namespace."""

    nodes: list[NodeView]
    disk_nodes: list[DiskNodeView]
    is_disk_truncated: bool
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


def view(cache: PrefixCache, namespace: str, max_nodes: int) -> CacheView:
    """One namespace, with at most `max_nodes` edges."""
    memory, files = cache.memory, _files_of(cache)
    trie = memory.find_trie(namespace)
    edges, is_truncated = files.listing(namespace, max_nodes)
    in_memory, on_disk = _find_shared(trie, edges)
    return CacheView(
        **vars(_sums(cache, files, namespace)),
        nodes=[_node_view(node, on_disk.get(node, 0)) for node in _in_order(trie, max_nodes)],
        disk_nodes=[_disk_view(edge, in_memory[edge]) for edge in edges],
        is_disk_truncated=is_truncated,
        disk_writes=memory.disk.tier.write_budget.writes() if memory.disk is not None else None,
        num_evictions=memory.evictions[namespace],
        budget_bytes=memory.ledger.budget_bytes,
        pinned=cache.pins.labels(namespace),
    )


@dataclass(frozen=True)
class Traced:
    """The edges `(number, start, stop)` of one prompt, from the root, and the number of its tokens found there."""

    edges: list[tuple[int, int, int]]
    length: int


def trace(cache: PrefixCache, namespace: str, prompts: Iterable[TokenArray]) -> list[tuple[Traced, Traced]]:
    """The edges of each prompt in memory and on disk."""
    tries = cache.memory.find_trie(namespace), _files_of(cache).find_trie(namespace)
    return [(_traced(tries[0].match(tokens)), _traced(tries[1].match(tokens))) for tokens in prompts]


def _traced(place: Place[Node] | Place[DiskNode]) -> Traced:
    return Traced([(node.number, node.start, node.stop) for node in place.node.path()], place.length)


def view_edge(cache: PrefixCache, namespace: str, number: int, max_tokens: int) -> EdgeDetail | None:
    """One edge in memory, with at most `max_tokens`; None if gone."""
    node = next((edge for edge in cache.memory.find_trie(namespace).nodes() if edge.number == number), None)
    if node is None:
        return None
    return EdgeDetail(node.start, node.stop, node.tokens[:max_tokens].copy(), node.num_uses, _sessions_below(node))


def view_namespaces(cache: PrefixCache) -> list[NamespaceView]:
    """Sums of each namespace, the most bytes first."""
    files = _files_of(cache)
    views = [_sums(cache, files, name) for name in {*cache.memory.tries, *files.namespaces()}]
    used = [view for view in views if view.num_nodes or view.num_disk_nodes]
    return sorted(used, key=lambda view: (-view.state.in_memory - view.state.disk, view.namespace))


def _files_of(cache: PrefixCache) -> DiskTree:
    if cache.memory.disk is None:
        return DiskTree()
    cache.memory.disk.tier.notice_written()
    return cache.memory.disk.tier.tree


def _sums(cache: PrefixCache, files: DiskTree, namespace: str) -> NamespaceView:
    trie, on_disk = cache.memory.find_trie(namespace), files.find_trie(namespace)
    live = sum(cache.pager.live_bytes(slot) for slot in cache.pager.all_live if slot.namespace == namespace)
    holding = trie.holding
    state = StateBytes(holding.span_bytes, holding.window_bytes, holding.recurrent_bytes, live, on_disk.num_bytes)
    return NamespaceView(namespace, trie.num_nodes, holding.num_tokens, on_disk.num_nodes, state)


def _find_shared(trie: PrefixTrie, edges: Iterable[DiskNode]) -> tuple[dict[DiskNode, Place[Node]], dict[Node, int]]:
    """Where edges on disk, parents before children, end in memory; how many tokens of nodes are on disk."""
    in_memory, on_disk, start = dict[DiskNode, Place[Node]](), dict[Node, int](), Place(trie.root, 0)
    for edge in edges:
        before = in_memory.get(edge.parent, start) if edge.parent is not None else start
        is_whole = before.length == edge.start
        place = in_memory[edge] = trie.follow(before, edge.tokens) if is_whole else before
        for node in place.edges(edge.start, edge.stop):
            on_disk[node] = max(on_disk.get(node, 0), min(node.stop, place.length) - node.start)
    return in_memory, on_disk


def _in_order(trie: PrefixTrie, max_nodes: int) -> list[Node]:
    """Parents first, among siblings the last used."""
    nodes, stack = list[Node](), [trie.root]
    while stack and len(nodes) <= max_nodes:
        nodes.append(stack.pop())
        children = reversed(nodes[-1].children.values())
        stack += heapq.nlargest(max_nodes, children, key=lambda child: child.last_used)[::-1]
    return nodes[1:]


def _edge(node: TokenNode) -> tuple[int, int | None, int, int, TokenArray]:
    first_tokens = node.tokens[:PREVIEW_TOKENS].copy()
    return node.number, _number_of(node.parent), node.start, node.stop, first_tokens


def _number_of(node: TokenNode | None) -> int | None:
    return None if node is None or node.parent is None else node.number


def _node_view(node: Node, disk_tokens: int) -> NodeView:
    return NodeView(
        *_edge(node),
        node.last_used,
        node.num_bytes,
        tier="live" if node.home is not None else "memory",
        restore_point=node.kind if node.snapshot is not None else None,
        is_explicit=node.is_explicit,
        is_pinned=node.num_pins > 0,
        num_uses=node.num_uses,
        disk_tokens=disk_tokens,
    )


def _disk_view(edge: DiskNode, in_memory: Place[Node]) -> DiskNodeView:
    return DiskNodeView(
        *_edge(edge),
        max(file.last_used for file in edge.files),
        edge.num_bytes,
        has_snapshot=edge.snapshot is not None,
        memory_tokens=max(0, min(in_memory.length, edge.stop) - edge.start),
        memory_id=_number_of(in_memory.node),
    )


def _sessions_below(top: Node) -> list[str]:
    ends = (node for node in (top, *top.below()) if node.session_id is not None)
    newest = heapq.nlargest(MAX_SESSIONS, ends, key=lambda node: node.last_used)
    return list(dict.fromkeys(node.session_id for node in newest if node.session_id is not None))
