"""Snapshots of window and recurrent state, and the offsets they restore. Pure.

A *restore point* is an offset at which every layer can be restored: any if all state is sliceable per token, else
where a snapshot was taken. A snapshot holds only window rows that no snapshot above holds: an offset can be restored
if its last W rows are held, by however many. Recurrent state is restored exactly where it was captured.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from cache.trie import Node
from cache.types import LayerKinds

if TYPE_CHECKING:
    from cache.layers.state import Segment


def deepest(layout: LayerKinds, path: Sequence[Node], length: int) -> int:
    """The deepest restorable offset up to `length` tokens of a path."""
    if not layout.needs_snapshots:
        return length if path else 0
    gap = length
    for node in reversed(path):
        offset = min(node.stop, length)
        first = max(0, offset - layout.window)
        is_whole = has_whole_snapshot(layout, node) and (offset == node.stop or not layout.has_recurrent)
        if is_whole and not first < gap < offset:  # else the gap found below is in this window too
            gap = first_row(layout, node, offset)
            if gap <= first:
                return offset
    return 0


def is_restorable(layout: LayerKinds, node: Node) -> bool:
    """Whether a node's end is restorable."""
    return deepest(layout, node.path(), node.stop) == node.stop


def has_whole_snapshot(layout: LayerKinds, node: Node) -> bool:
    """Whether a node has a snapshot with all of its kinds of state; of window rows perhaps some."""
    return node.snapshot is not None and (node.snapshot.recurrent is not None or not layout.has_recurrent)


def first_row(layout: LayerKinds, node: Node | None, offset: int) -> int:
    """From where on window rows are held without a gap up to `offset`."""
    kept = rows_before(layout, node, offset)
    return kept[-1][1].start if kept else offset


def rows_before(layout: LayerKinds, node: Node | None, offset: int) -> "list[tuple[Node, Segment]]":
    """Nodes from `node` up that hold the window rows before `offset`, and these; ends at a gap."""
    first = max(0, offset - layout.window)
    holders: list[tuple[Node, Segment]] = []
    while node is not None and first < offset <= node.stop:
        rows = _window(node)
        if rows is not None and rows.start < offset:
            holders.append((node, rows))
            offset = rows.start
        node = node.parent
    return holders


def window_rows(layout: LayerKinds, node: Node | None, offset: int) -> "list[Segment]":
    """Adjoining segments of window rows before `offset`, as held from `node` up."""
    segments: list[Segment] = []
    for _, rows in rows_before(layout, node, offset):
        segments.append(rows.split(offset)[0] if offset < rows.stop else rows)
        offset = rows.start
    return segments[::-1]


def has_shared_rows(layout: LayerKinds, node: Node) -> bool:
    """Whether restore points below need window rows only held here."""
    rows = _window(node)
    return rows is not None and any(_shares_rows(layout, child, rows) for child in node.children.values())


def _shares_rows(layout: LayerKinds, node: Node, rows: "Segment") -> bool:
    first, window = max(0, node.stop - layout.window), _window(node)
    if window is not None:
        return max(first, rows.start) < window.start <= rows.stop
    return first < rows.stop and any(_shares_rows(layout, child, rows) for child in node.children.values())


def _window(node: Node) -> "Segment | None":
    return node.snapshot.window if node.snapshot is not None else None


class RestorePointKind(StrEnum):
    """Why an offset should be restorable."""

    SYSTEM_END = "system_end"
    USER_START = "user_start"
    PROMPT_END = "prompt_end"
    TURN_END = "turn_end"
    BRANCH = "branch"
    INTERVAL = "interval"
    EXPLICIT = "explicit"


@dataclass(frozen=True, order=True)
class RestorePoint:
    """An offset to make restorable, in tokens from the sequence's start."""

    offset: int
    kind: RestorePointKind


KEPT_POINTS = 4
"""Pinned at a conversation's end: about two turns."""
SAME_TOKENS = 64
"""Of points closer together than this, one is kept."""
THINNING_TOKENS, THINNING_RATIO = 512, 8
"""Before the newest turn, points are kept at least that many tokens apart, and ever sparser by that ratio."""
INTERVAL_TOKENS = 8192
"""Distance of restore points along a new prompt."""


def chunk_end(offset: int, limit: int, chunk_tokens: int) -> int:
    """Where a prefill chunk from `offset` of a prompt of `limit` tokens ends, restore points aside.

    Chunks end at multiples of their size, so that a hit and a miss evaluate the same shapes if possible. A rest that
    fits is one chunk: each reads all weights.
    """
    if limit - offset <= chunk_tokens:
        return limit
    return (offset // chunk_tokens + 1) * chunk_tokens


class KeptPoint(NamedTuple):
    """An existing restore point of one conversation."""

    offset: int
    kind: RestorePointKind | None
    is_branch: bool


def superseded(points: Sequence[KeptPoint], landing: int) -> list[int]:
    """The points that later turns will hardly need, ascending like `points`.

    `landing` is where the conversation's newest turn was restored. Requests continue nearly always at the end, the
    last prompt's end or `landing` (`eviction.py`: `Chance`). Points there are kept, and ever fewer before: a
    point is superseded if its neighbours are, seen from the end, less than `THINNING_RATIO` apart.
    """
    inner = [point for point in reversed(points[:-1]) if not outlasts_turns(point)]
    if not inner:
        return []
    stop, gone = points[-1].offset, list[int]()
    before_turn = next((point for point in inner if point.offset <= landing), None)
    if len(inner) > 1 and inner[0].offset - inner[1].offset < SAME_TOKENS:
        gone.append(inner.pop(1 if inner[0] is before_turn else 0).offset)
    nearer = stop - inner[0].offset
    for point, older in pairwise(inner[1:]):
        if point is not before_turn and stop - older.offset <= THINNING_RATIO * max(nearer, THINNING_TOKENS):
            gone.append(point.offset)
        else:
            nearer = stop - point.offset
    return sorted(gone)


def choose_for_disk(points: Sequence[KeptPoint], on_disk: Iterable[int], *, min_gain: int) -> list[int]:
    """The points to write to disk, ascending like `points`.

    Written are all shared and explicit points; the newest prompt's end, which the next turn contains anyway; and the
    sequence's end if at least `min_gain` tokens after the last on disk: writing all whole state would wear the disk
    out.
    """
    written = set(on_disk)
    chosen = {point.offset for point in points if outlasts_turns(point)}
    prompts = [point.offset for point in points if point.kind is RestorePointKind.PROMPT_END]
    for offset in (max(prompts, default=points[-1].offset), points[-1].offset):
        before = [other for other in chosen | written if other <= offset]
        if not before or offset - max(before) >= min_gain:
            chosen.add(offset)
    return sorted(chosen - written)


def outlasts_turns(point: KeptPoint) -> bool:
    """Whether a point stays useful, however the conversation continues."""
    return point.is_branch or point.kind in (RestorePointKind.SYSTEM_END, RestorePointKind.EXPLICIT)


def intervals(start: int, stop: int) -> list[RestorePoint]:
    """Points along `[start, stop)`; none if no longer than one turn."""
    if stop - start < 2 * INTERVAL_TOKENS:
        return []
    first = (start // INTERVAL_TOKENS + 1) * INTERVAL_TOKENS
    return [RestorePoint(offset, RestorePointKind.INTERVAL) for offset in range(first, stop, INTERVAL_TOKENS)]


def plan(wanted: Iterable[RestorePoint], *, start: int, stop: int) -> tuple[RestorePoint, ...]:
    """The points to capture while `[start, stop)` is evaluated, ascending, one per offset.

    At one offset an explicit kind wins, since it is never merged away.
    """
    chosen: dict[int, RestorePoint] = {}
    for point in wanted:
        if start < point.offset <= stop and (point.offset not in chosen or point.kind is RestorePointKind.EXPLICIT):
            chosen[point.offset] = point
    return tuple(sorted(chosen.values()))
