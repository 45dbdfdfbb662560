"""The prefix cache's door to the disk tier: what of a prompt is on disk beyond memory, and what goes there.

Rows are taken from disk for the tokens that the trie does not know, and a snapshot for the offset where they end; in
memory a snapshot may lean on window rows of those above it, on disk each holds all that its offset needs. Restoring
is taken to be cheaper than evaluating from `MIN_RESTORE_TOKENS` on. Worker thread only.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import cast

import numpy as np

from cache import placement
from cache.disk import DiskTier
from cache.disk_ahead import Prefetch
from cache.disk_spans import FileSnapshot, FileSpan
from cache.layers import Layout, Segment
from cache.placement import KeptPoint
from cache.snapshots import Snapshot, window_rows
from cache.trie import Node, TokenArray

logger = logging.getLogger(__name__)

GAIN_SHARE = 2.5
"""A snapshot is written once the rows gained since the last one weigh so many times as much."""

MIN_RESTORE_TOKENS = 256
"""What disk must add to what memory knows, for reading files to be worth it."""


@dataclass(frozen=True)
class Recall:
    """State on disk with which a prompt can be restored at `offset`, further than memory can."""

    offset: int
    span: FileSpan | None
    """Rows of the tokens that the trie does not know, up to `offset`; None if it knows them all."""
    snapshot: FileSnapshot | None
    """For a model that needs one."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that it takes, about."""
        return sum(part.file_bytes for part in (self.span, self.snapshot) if part is not None)


class Archive:
    """Moves state between the trie's nodes and the disk tier."""

    def __init__(self, tier: DiskTier, layout: Layout) -> None:
        self.tier = tier
        self.bytes_per_token = 0.0
        """What the rows of one token weigh; 0 until it is known."""
        self._layout = layout

    # ---------------------------------------------------------------------------------------------- reading

    def find(self, namespace: str, tokens: TokenArray, *, known: int, restorable: int) -> Recall | None:
        """Returns what disk can add to the first `known` tokens' rows, `restorable` of which memory can restore."""
        span = self.tier.covered(namespace, tokens, known)
        stop, snapshot = span.written_stop, None
        if self._layout.needs_snapshots:
            snapshot = self._deepest(namespace, tokens[:stop])
            stop = snapshot.offset if snapshot is not None else 0
        if stop - restorable < MIN_RESTORE_TOKENS:
            return None
        return Recall(stop, span.clipped(known, stop) if stop > known else None, snapshot)

    def _deepest(self, namespace: str, tokens: TokenArray) -> FileSnapshot | None:
        """Returns the last snapshot on the way to the end of `tokens` that restores every layer by itself."""
        layout = self._layout
        for snapshot in self.tier.snapshots(namespace, tokens):
            first = snapshot.window.start if snapshot.window is not None else snapshot.offset
            has_rows = not layout.window or first <= max(0, snapshot.offset - layout.window)
            if has_rows and snapshot.has_points >= layout.has_points:
                return snapshot
        return None

    def prefetch(self, recall: Recall) -> Prefetch:
        """Begins to read; `load` then waits for no more than the rest."""
        return self.tier.prefetch(part for part in (recall.span, recall.snapshot) if part is not None)

    def load(self, recall: Recall) -> tuple[Segment | None, Snapshot | None]:
        """Reads into memory. Raises DiskFault, and then what cannot be read is no longer found."""
        segment = recall.span.load() if recall.span is not None else None
        if recall.snapshot is None:
            return segment, None
        return segment, Snapshot(recall.offset, *recall.snapshot.load())

    # ---------------------------------------------------------------------------------------------- writing

    def close(self, pieces: Iterator[None], timeout_seconds: float) -> None:
        """Writes the `pieces` that are left, as far as time allows, and gives the folder back."""
        deadline = time.monotonic() + timeout_seconds
        for _ in pieces:
            if time.monotonic() > deadline:
                break
            if self.tier.is_busy:
                self.tier.flush(deadline - time.monotonic())
        if not self.tier.flush(max(0.0, deadline - time.monotonic())):
            logger.warning("stopped before everything was written to the disk cache")
        self.tier.close()

    def save_dropped(self, namespace: str, node: Node) -> None:
        """Has written what a node is about to lose: all of a leaf, the snapshot of any other.

        Rows behind the last snapshot on disk are of no use to a model that needs one, and are not written.
        """
        path = node.path()
        tokens = tokens_of(path)
        is_wanted = self._has_whole_snapshot(node) and node in self._wanted_snapshots(namespace, path, tokens)
        is_needed = is_wanted or not self._layout.needs_snapshots or self.tier.goes_on(namespace, tokens)
        if node.span is not None and not node.children and is_needed:
            self._save_span(namespace, tokens, node)
        if is_wanted:
            self._save_snapshot(namespace, path)

    def save_path(
        self, namespace: str, path: list[Node], live_rows: Callable[[Node], Segment], tick: int
    ) -> Iterator[None]:
        """Has written what disk lacks of a path, a piece with each step.

        `live_rows` copies what lives in a slot; `tick`, one of the tier's, says when the path was used.
        """
        tokens = tokens_of(path)
        self.tier.touch(namespace, tokens, tick)
        wanted = self._wanted_snapshots(namespace, path, tokens)
        stop = wanted[-1].stop if self._layout.needs_snapshots and wanted else len(tokens)
        if self._layout.needs_snapshots and not wanted:
            return
        gaps = list(self.tier.covered(namespace, tokens[:stop], 0).missing())
        for node in path:
            if node.stop <= stop and any(first < node.stop and node.start < last for first, last in gaps):
                self._save_span(namespace, tokens, node, live_rows, tick)
                yield
        for node in wanted:
            self._save_snapshot(namespace, path[: path.index(node) + 1], tick)
            yield

    def _wanted_snapshots(self, namespace: str, path: list[Node], tokens: TokenArray) -> list[Node]:
        """Returns the nodes of a path whose snapshots are worth writing and are not on disk, in ascending order."""
        nodes = {node.stop: node for node in path if self._has_whole_snapshot(node) and not node.is_volatile}
        points = [KeptPoint(node.stop, node.kind, len(node.children) > 1) for node in nodes.values()]
        if path[-1].children:
            # The conversation goes on behind the end of this path: no turn of it is the newest.
            points = [point for point in points if placement.outlasts_turns(point)]
        if not points:
            return []
        on_disk = [snapshot.offset for snapshot in self.tier.snapshots(namespace, tokens)]
        size = max(snapshot.num_bytes for node in nodes.values() if (snapshot := node.snapshot) is not None)
        min_gain = int(GAIN_SHARE * size / self.bytes_per_token) if self.bytes_per_token else 0
        return [nodes[offset] for offset in placement.worth_writing(points, on_disk, min_gain=min_gain)]

    def _has_whole_snapshot(self, node: Node) -> bool:
        """Whether a node has more than window rows on which others lean."""
        snapshot = node.snapshot
        return isinstance(snapshot, Snapshot) and (snapshot.points is not None) >= self._layout.has_points

    def _save_span(
        self,
        namespace: str,
        tokens: TokenArray,
        node: Node,
        live_rows: Callable[[Node], Segment] | None = None,
        tick: int | None = None,
    ) -> None:
        if node.is_volatile:
            return
        segment = cast(Segment, node.span) if node.span is not None else live_rows(node) if live_rows else None
        if segment is not None:
            self.tier.write_span(namespace, tokens[: node.stop], segment, tick=tick)

    def _save_snapshot(self, namespace: str, path: list[Node], tick: int | None = None) -> None:
        """Has the snapshot at the end of a path written, with all window rows that it needs."""
        snapshot = cast(Snapshot, path[-1].snapshot)
        window = snapshot.window
        if window is not None:
            first = max(0, snapshot.offset - self._layout.window)
            rows = window_rows(self._layout, path[:-1], window.start) if window.start > first else []
            window = reduce(Segment.join, [*rows, window]).tail(first)
        self.tier.write_snapshot(namespace, tokens_of(path), window, snapshot.points, tick=tick)


def tokens_of(path: list[Node]) -> TokenArray:
    """Returns all tokens of a path from the root."""
    return np.concatenate([node.tokens for node in path])
