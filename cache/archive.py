"""The prefix cache's door to the disk tier: what of a prompt is on disk beyond memory, and what goes there.

Rows are taken from disk for the tokens that the trie does not know, and a snapshot for the offset where they end; in
memory a snapshot may lean on window rows of those above it, on disk each holds all that its offset needs. Restoring
is taken to be cheaper than evaluating from `MIN_RESTORE_TOKENS` on. Worker thread only.
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

import numpy as np

from cache.disk import DiskTier
from cache.disk_ahead import Prefetch
from cache.disk_spans import FileSnapshot, FileSpan
from cache.layers import Layout, Segment
from cache.snapshots import Snapshot, window_rows
from cache.trie import Node, TokenArray

logger = logging.getLogger(__name__)

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

    def load(self, namespace: str, tokens: TokenArray, recall: Recall) -> tuple[Segment | None, Snapshot | None]:
        """Reads into memory. Raises DiskFault, and then what cannot be read is no longer found."""
        self.tier.touch(namespace, tokens[: recall.offset])
        segment = recall.span.load() if recall.span is not None else None
        if recall.snapshot is None:
            return segment, None
        return segment, Snapshot(recall.offset, *recall.snapshot.load())

    # ---------------------------------------------------------------------------------------------- writing

    def has_snapshot(self, namespace: str, tokens: TokenArray) -> bool:
        """Whether there is a snapshot right after `tokens` on disk."""
        return self.tier.find_snapshot(namespace, tokens) is not None

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

    def missing(self, namespace: str, tokens: TokenArray, start: int) -> bool:
        """Whether rows of the tokens `[start, len(tokens))` are not on disk, nor on their way there."""
        return any(self.tier.covered(namespace, tokens, start).missing())

    def save_span(self, namespace: str, tokens: TokenArray, segment: Segment) -> bool:
        """Has rows that end after `tokens` written; False if the disk takes nothing now."""
        return self.tier.write_span(namespace, tokens, segment) is not None

    def save_snapshot(self, namespace: str, path: list[Node], snapshot: Snapshot) -> bool:
        """Has a snapshot at the end of a path written, with all window rows that it needs; False as above."""
        window = snapshot.window
        if window is not None:
            first = max(0, snapshot.offset - self._layout.window)
            rows = window_rows(self._layout, path[:-1], window.start) if window.start > first else []
            window = reduce(Segment.join, [*rows, window]).tail(first)
        return self.tier.write_snapshot(namespace, tokens_of(path), window, snapshot.points) is not None

    def save_node(self, namespace: str, node: Node, *, with_span: bool = True) -> None:
        """Has what a node stores written, as far as the disk takes it."""
        if node.is_volatile:
            return
        path = node.path()
        if with_span and isinstance(node.span, Segment):
            self.save_span(namespace, tokens_of(path), node.span)
        if isinstance(node.snapshot, Snapshot) and self.is_worth_keeping(node):
            self.save_snapshot(namespace, path, node.snapshot)

    @staticmethod
    def is_worth_keeping(node: Node) -> bool:
        """Whether a node's snapshot is one that later turns may want: older turns' are not written."""
        return node.last_used > 0 or node.is_explicit


def tokens_of(path: list[Node]) -> TokenArray:
    """Returns all tokens of a path from the root."""
    return np.concatenate([node.tokens for node in path])

