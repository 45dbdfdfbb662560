"""A disk for state without a device: what is on it is remembered by its size.

The disk tier above it is the real one: what it writes, keeps and gives up is what a server's would.
"""

import itertools
from collections.abc import Iterable
from typing import Any

from cache.disk.files import Receipt
from cache.disk.index import WriteDay
from cache.disk.tier import DiskTier
from cache.disk.tree import DiskTree, FilePart, StoredFile
from cache.types import TokenArray
from scripts.replay.layout import SizedLayout, SizedRecurrent, SizedSegment


class SizedImage:
    """What a file would hold of rows and whole state."""

    def __init__(self, rows: SizedSegment | None, points: SizedRecurrent | None) -> None:
        self._bytes_per_token = rows.bytes_per_token if rows is not None else 0
        self._recurrent_bytes = points.num_bytes if points is not None else 0
        self.num_bytes = (rows.num_bytes if rows is not None else 0) + self._recurrent_bytes

    def bytes_of(self, num_tokens: int) -> int:
        """Returns the bytes of a file of `num_tokens` of the rows, and the whole state."""
        return int(num_tokens * self._bytes_per_token) + self._recurrent_bytes


class SizedStore:
    """Stands in for `cache.disk.folder.DiskStore`: takes everything at once, forgets nothing, counts."""

    def __init__(self, layout: SizedLayout) -> None:
        self.is_failing = False
        self.tree, self.day = DiskTree(), None
        self.written_bytes_total = 0
        self.read_bytes_total = 0
        self._layout = layout
        self._names = map(str, itertools.count(1))

    def image(self, rows: SizedSegment | None, recurrent: SizedRecurrent | None) -> SizedImage:
        """What a file would hold."""
        return SizedImage(rows, recurrent)

    def write(self, file: StoredFile, image: SizedImage, tokens: TokenArray, day: WriteDay) -> Receipt:
        """Counts a file."""
        file.name = next(self._names)
        num_bytes = image.bytes_of(file.stop - file.start)
        self.written_bytes_total += num_bytes
        return Receipt(num_bytes, 0, 0, b"")

    def read(self, part: FilePart) -> tuple[SizedSegment | None, SizedRecurrent | None]:
        """Returns rows of a file, and the whole state of a snapshot."""
        layout = self._layout
        rows = SizedSegment(part.start, part.stop, layout.stored_bytes_per_token, layout.form.rows)
        self.read_bytes_total += rows.num_bytes
        if not part.file.has_recurrent:
            return rows, None
        self.read_bytes_total += layout.stored_snapshot_bytes
        recurrent = SizedRecurrent(part.file.stop, layout.stored_snapshot_bytes, layout.form.recurrent)
        return rows if rows.num_bytes else None, recurrent

    def delete(self, files: Iterable[StoredFile]) -> None:
        """Nothing is there to delete."""

    def touch(self, files: Iterable[StoredFile]) -> None:
        """Recency is the tier's own while it is open."""

    def scrub(self) -> None:
        """Nothing is there to scrub."""

    def close(self) -> None:
        """Nothing is open."""


def sized_tier(store: Any, budget_bytes: int) -> DiskTier:
    """Returns a real disk tier over a sized store."""
    return DiskTier(
        store,
        budget_bytes=budget_bytes,
        max_in_flight_bytes=1 << 60,
        now=lambda: 0.0,
    )
