"""What is on disk of one namespace, for people to look at; bounded, because the worker waits meanwhile."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from cache.disk.space import DiskSpace
from cache.disk.spans import FileSnapshot, FileSpan
from cache.disk.tree import DiskNode, DiskTree
from cache.tokens import TokenArray

MAX_VISITED = 4096
"""No listing looks at more edges than these, listed or not."""


@dataclass(frozen=True, eq=False)
class DiskEntry:
    """What is on disk of one edge `[start, stop)`."""

    namespace: str
    number: int
    """Names the edge among those of the namespace."""
    parent: "DiskEntry | None"
    """The entry that stops at `start`; None at the root."""
    start: int
    stop: int
    tokens: TokenArray
    span: FileSpan
    snapshot: FileSnapshot | None
    last_used: int


@dataclass(frozen=True, eq=False)
class DiskListing:
    """Some or all of the edges of one namespace whose rows are on disk from the root on."""

    entries: list[DiskEntry]
    """Parents before children."""
    num_edges: int
    """Edges in all: those that are not listed, and those that wait to be written, included."""
    is_truncated: bool
    """Whether edges were left out because there are too many."""


NO_LISTING = DiskListing([], 0, False)
"""The listing of a cache without a disk tier."""


class DiskContents:
    """What is on disk, by namespace."""

    def __init__(self, tree: DiskTree, space: DiskSpace) -> None:
        self._tree = tree
        self._space = space

    def namespaces(self) -> list[str]:
        """Returns the namespaces of which there is anything."""
        return self._tree.namespaces()

    def num_edges(self, namespace: str) -> int:
        """Returns how many edges of a namespace there are."""
        return self._tree.num_edges(namespace)

    def bytes_of(self, namespace: str) -> int:
        """Returns the bytes of a namespace's files, those that wait to be written included."""
        return self._space.bytes_of(namespace)

    def listing(self, namespace: str, max_edges: int) -> DiskListing:
        """Returns up to `max_edges` edges of a namespace whose rows are there from the root on."""
        num_edges = self.num_edges(namespace)
        visited = itertools.islice(_walk(self._tree, namespace), MAX_VISITED)
        found = list(itertools.islice((entry for entry in visited if entry is not None), max_edges + 1))
        is_truncated = len(found) > max_edges or num_edges > MAX_VISITED
        return DiskListing(found[:max_edges], num_edges, is_truncated)


def _walk(tree: DiskTree, namespace: str) -> Iterator[DiskEntry | None]:
    """Yields an entry for each edge, depth first; None for an edge that is not on disk, and nothing below it."""
    waiting: list[tuple[DiskEntry | None, Iterator[DiskNode]]] = [(None, tree.children(namespace))]
    while waiting:
        parent, children = waiting[-1]
        node = next(children, None)
        if node is None:
            waiting.pop()
            continue
        entry = _entry(tree, namespace, parent, node)
        yield entry
        if entry is not None:
            waiting.append((entry, iter(node.children.values())))


def _entry(tree: DiskTree, namespace: str, parent: DiskEntry | None, node: DiskNode) -> DiskEntry | None:
    span, snapshot = tree.state_on(node)
    if not span.is_written:
        return None
    files = [*span.files, *([snapshot.file] if snapshot is not None else [])]
    return DiskEntry(
        *(namespace, node.number, parent, node.start, node.stop, node.tokens, span, snapshot),
        last_used=max(file.last_used for file in files),
    )
