"""Connects the trie in memory to the disk tier.

Disk supplies rows that memory lacks, and a snapshot where they end. In memory a snapshot may share window rows with
those above; on disk each is complete. Worker thread only.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import cast

import numpy as np

from cache import snapshots
from cache.disk.codec import LoadedState
from cache.disk.tier import DiskTier
from cache.disk.tree import START, DiskPlace, FilePart, StoredFile, Target, gaps, written_stop
from cache.layers.layout import Layout
from cache.layers.state import Segment
from cache.snapshots import KeptPoint, has_whole_snapshot, window_rows
from cache.trie import Node, NodeMatch, Snapshot
from cache.types import TokenArray

logger = logging.getLogger(__name__)

GAIN_RATIO = 2.5
"""A snapshot is written once the rows since the last take this many times its bytes."""

MIN_RESTORE_TOKENS = 256
"""Disk must restore so many tokens more than memory: evaluating fewer is cheaper than reading."""


@dataclass(frozen=True)
class DiskMatch:
    """State on disk to restore up to `offset`."""

    offset: int
    rows: list[FilePart]
    """Rows that memory lacks."""
    snapshot: StoredFile | None
    """None if the model needs no snapshot."""
    place: DiskPlace

    @property
    def parts(self) -> list[FilePart]:
        return [*self.rows, *([self.snapshot.whole] if self.snapshot is not None else [])]

    @property
    def num_bytes(self) -> int:
        """Approximate, once loaded."""
        return sum(part.num_bytes for part in self.parts)


class DiskConnector:
    """Moves state between trie nodes and the disk tier."""

    def __init__(self, tier: DiskTier, layout: Layout) -> None:
        self.tier = tier
        self._layout = layout

    # ---------------------------------------------------------------------------------------------- reading

    def find(self, namespace: str, tokens: TokenArray, match: NodeMatch, *, restorable: int) -> DiskMatch | None:
        """What disk adds to `match`, of which memory restores `restorable` tokens; None if too little."""
        self.tier.notice_written()
        tree = self.tier.tree
        place = self._place(namespace, [node for node in match.node.path() if node.stop <= match.length])
        place = tree.follow(namespace, place, tokens[place.length :])
        if place.length - restorable < MIN_RESTORE_TOKENS:
            return None
        stop, snapshot = written_stop(tree.covered(place, match.length, len(tokens)), match.length), None
        if self._layout.needs_snapshots:
            snapshot = next((file for file in tree.snapshots(place) if self._restores(file, stop)), None)
            stop = snapshot.stop if snapshot is not None else 0
        if stop - restorable < MIN_RESTORE_TOKENS:
            return None
        return DiskMatch(stop, tree.covered(place, match.length, stop), snapshot, place)

    def _restores(self, file: StoredFile, stop: int) -> bool:
        has_rows = not self._layout.window or file.start <= max(0, file.stop - self._layout.window)
        has_recurrent = file.has_recurrent or not self._layout.has_recurrent
        return file.is_written and file.stop <= stop and has_rows and has_recurrent

    def load(self, match: DiskMatch) -> tuple[Segment | None, Snapshot | None]:
        """Reads the state. Raises DiskFault; the state is then no longer found."""
        reader, snapshot = self.tier.reader, match.snapshot
        segment = reader.load_rows(match.rows) if match.rows else None
        return segment, Snapshot(match.offset, *reader.load(snapshot.whole)) if snapshot is not None else None

    def _place(self, namespace: str, path: list[Node]) -> DiskPlace:
        """Nodes remember their places: only later tokens are compared."""
        kept = (node.place for node in reversed(path) if node.place is not None and not node.place.is_gone)
        place = cast(DiskPlace, next(kept, START))  # the trie in memory does not know the types of the disk tier
        for node in path:
            if node.stop > place.length:
                place = node.place = self.tier.tree.follow(namespace, place, node.tokens[place.length - node.start :])
                if place.length < node.stop:
                    break
        return place

    # ---------------------------------------------------------------------------------------------- writing

    def close(self, pieces: Iterator[None], timeout_seconds: float) -> None:
        """Writes `pieces` as time allows, and closes the folder."""
        deadline = time.monotonic() + timeout_seconds
        try:
            for _ in pieces:
                if time.monotonic() > deadline:
                    break
                if self.tier.is_busy:
                    self.tier.flush(deadline - time.monotonic())
        except Exception as error:
            logger.warning("not everything could be copied for the disk cache: %s", error)
        if not self.tier.flush(max(0.0, deadline - time.monotonic())):
            logger.warning("stopped before everything was written to the disk cache")
        self.tier.close()

    def save_dropped(self, node: Node) -> None:
        """Writes what memory will drop; where snapshots are needed, no rows after the last: they are useless."""
        self.tier.notice_written()
        path = node.path()
        place = self._place(node.trie.namespace, path)
        is_wanted = has_whole_snapshot(self._layout, node) and node in self._wanted_snapshots(path, place)
        is_needed = is_wanted or not self._layout.needs_snapshots or self.tier.tree.goes_on(place, node.stop)
        if node.span is not None and not node.children and is_needed and not node.is_volatile:
            self.tier.write_span(_target(node, place), self._layout.rounded(node.span))
        if is_wanted:
            self._save_snapshot(_target(node, place), node)

    def save_path(self, path: list[Node], live_rows: Callable[[Node], Segment], used_at: int) -> Iterator[None]:
        """Writes what disk lacks of a path, a piece a step. `live_rows` copies a node's rows; `used_at` is a tick."""
        self.tier.notice_written()
        place, stop = self._place(path[-1].trie.namespace, path), path[-1].stop
        self.tier.touch(place, stop, used_at)
        wanted = self._wanted_snapshots(path, place)
        if self._layout.needs_snapshots:
            if not wanted:
                return
            stop = wanted[-1].stop
        missing = list(gaps(self.tier.tree.covered(place, 0, stop), 0, stop))
        for node in path:
            is_missing = any(first < node.stop and node.start < last for first, last in missing)
            if is_missing and node.stop <= stop and not node.is_volatile:
                yield from self._wait_for_queue()
                segment = node.span if node.span is not None else live_rows(node)
                self.tier.write_span(_target(node, place, used_at), self._layout.rounded(segment))
                yield
        for node in wanted:
            yield from self._wait_for_queue()
            self._save_snapshot(_target(node, place, used_at), node)
            yield

    def _wait_for_queue(self) -> Iterator[None]:
        while self.tier.is_busy:
            yield

    def _wanted_snapshots(self, path: list[Node], place: DiskPlace) -> list[Node]:
        nodes = {node.stop: node for node in path if has_whole_snapshot(self._layout, node) and not node.is_volatile}
        points = [KeptPoint(node.stop, node.kind, len(node.children) > 1) for node in nodes.values()]
        if path[-1].children:
            # The conversation continues past the end of this path, so the newest turn is not on the path.
            points = [point for point in points if snapshots.outlasts_turns(point)]
        if not points:
            return []
        on_disk = [file.stop for file in self.tier.tree.snapshots(place)]
        size = max(snapshot.num_bytes for node in nodes.values() if (snapshot := node.snapshot) is not None)
        per_token = self._layout.stored_bytes_per_token
        min_gain = int(GAIN_RATIO * size / per_token) if per_token else 0
        return [nodes[offset] for offset in snapshots.choose_for_disk(points, on_disk, min_gain=min_gain)]

    def _save_snapshot(self, target: Target, node: Node) -> None:
        self.tier.write_snapshot(target, *stored_snapshot(self._layout, node))

    def check(self, node: Node) -> None:
        """Asserts that a node's kept place is right."""
        place = node.place
        if place is not None and not place.is_gone:
            tokens = np.concatenate([step.tokens for step in node.path()])[: place.length]
            step = self.tier.tree.follow(node.trie.namespace, START, tokens)
            assert step.length == place.length, f"{node} keeps a place at {place.length}, found {step.length}"


def stored_snapshot(layout: Layout, node: Node) -> LoadedState:
    """A node's snapshot in the form in which it is stored, with the window rows that are held above."""
    snapshot = node.snapshot
    assert snapshot is not None, "the node has a snapshot"
    window, recurrent = snapshot.window, snapshot.recurrent
    if window is not None:
        first = max(0, snapshot.offset - layout.window)
        rows = window_rows(layout, node.parent, window.start) if window.start > first else []
        window = reduce(Segment.join, [*rows, window]).tail(first)
    return window, recurrent and layout.rounded_recurrent(recurrent)


def _target(node: Node, place: DiskPlace, used_at: int | None = None) -> Target:
    return Target(node.trie.namespace, np.concatenate([step.tokens for step in node.path()]), place, used_at)
