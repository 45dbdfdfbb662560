"""Snapshots of window and point state on nodes, and the offsets that a path of them can restore.

Window rows are kept for the last W tokens before each restore point. A snapshot holds the rows that no snapshot above
it holds, and shares the others. An offset can be restored if its last W rows are held, by however many snapshots.
Point state is restored exactly where it was captured. Rows and state are carried here, and never looked into.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cache.token_trie import Match
from cache.trie import Node, NodeMatch
from cache.types import LayerKinds

if TYPE_CHECKING:
    from cache.layers.points import PointState
    from cache.layers.segments import Segment


@dataclass(frozen=True)
class Snapshot:
    """The window and point state for restoring at `offset`. Its window rows may also serve later offsets."""

    offset: int
    window: "Segment | None"
    points: "PointState | None"

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that dropping this frees."""
        return (self.window.num_bytes if self.window else 0) + (self.points.num_bytes if self.points else 0)

    def split(self, offset: int) -> "tuple[Snapshot | None, Snapshot]":
        """Returns the window rows before `offset`, if any, and the rest, which stays valid at the old offset."""
        if self.window is None or self.window.start >= offset:
            return None, self
        before, after = self.window.split(offset)
        return Snapshot(offset, before, None), Snapshot(self.offset, after, self.points)


def deepest(layout: LayerKinds, match: NodeMatch) -> int:
    """Returns the deepest offset on a match at which every layer can be restored from the trie."""
    if not layout.needs_snapshots:
        return match.length
    if not layout.window:
        ends = ((node, min(node.stop, match.length)) for node in reversed(match.path))
        return next((offset for node, offset in ends if _can_restore(layout, node, offset, None)), 0)
    deepest, cover = 0, None
    for node in match.path:
        cover = _extended(cover, node.snapshot)
        offset = min(node.stop, match.length)
        if _can_restore(layout, node, offset, cover):
            deepest = offset
    return deepest


def deepest_up_to(layout: LayerKinds, node: Node) -> int:
    """Returns the deepest offset up to a node's end that can be restored from the trie; 0 if the node was evicted."""
    path = node.path()
    return deepest(layout, Match(path, node.stop)) if path else 0


def is_restorable(layout: LayerKinds, node: Node) -> bool:
    """Whether a sequence can be restored where a node ends."""
    return deepest_up_to(layout, node) == node.stop


def _can_restore(layout: LayerKinds, node: Node, offset: int, cover: tuple[int, int] | None) -> bool:
    snapshot = node.snapshot
    if not isinstance(snapshot, Snapshot):
        return False
    if layout.has_points and (offset != node.stop or snapshot.points is None):
        return False
    if not layout.window:
        return True
    return cover is not None and cover[0] <= max(0, offset - layout.window) and offset <= cover[1]


def cover(path: Sequence[Node]) -> tuple[int, int] | None:
    """Returns the last unbroken range of window rows that the snapshots of a path hold."""
    cover = None
    for node in path:
        cover = _extended(cover, node.snapshot)
    return cover


def rows_before(layout: LayerKinds, path: Sequence[Node], offset: int) -> list[Node]:
    """Returns the nodes of a path that hold window rows of the window before `offset`, the last ones first.

    A sequence that is to be restored there needs these rows, so they must not be evicted before, even if nothing
    else needs them.
    """
    first, found = max(0, offset - layout.window), list[Node]()
    for node in reversed(path):
        if node.stop <= first:
            break
        window = _window(node)
        if window is not None and node.start < offset and window.start < offset:
            found.append(node)
    return found


def window_rows(layout: LayerKinds, path: Sequence[Node], offset: int) -> "list[Segment]":
    """Returns adjoining segments with the rows that a window needs before `offset`, as far as they are held."""
    rows: list[Segment] = []
    needed, first = offset, max(0, offset - layout.window)
    for node in rows_before(layout, path, offset):
        window = _window(node)
        if window is not None and first < needed and window.start < needed <= window.stop:
            rows.append(window.split(needed)[0] if needed < window.stop else window)
            needed = window.start
    rows.reverse()
    return rows


def has_shared_rows(layout: LayerKinds, node: Node) -> bool:
    """Whether a restore point further down needs window rows that are only here.

    Only restore points at the ends of nodes count. A request that is to be restored inside an edge protects the rows
    for that itself, see `rows_before`.
    """
    rows = _window(node)
    return rows is not None and any(_shares_rows(layout, child, rows) for child in node.children.values())


def _shares_rows(layout: LayerKinds, node: Node, rows: "Segment") -> bool:
    """Whether a node, or one below it, needs window rows that its own snapshot lacks and `rows` above it hold."""
    first, window = max(0, node.stop - layout.window), _window(node)
    if window is not None:
        return max(first, rows.start) < window.start <= rows.stop
    return first < rows.stop and any(_shares_rows(layout, child, rows) for child in node.children.values())


def _window(node: Node) -> "Segment | None":
    return node.snapshot.window if isinstance(node.snapshot, Snapshot) else None


def _extended(cover: tuple[int, int] | None, snapshot: Any) -> tuple[int, int] | None:
    """Returns the range of window rows so far, extended by the next snapshot, or replaced if the two do not meet."""
    window = snapshot.window if isinstance(snapshot, Snapshot) else None
    if window is None:
        return cover
    if cover is not None and window.start <= cover[1]:
        return min(cover[0], window.start), window.stop
    return window.start, window.stop
