"""State on disk as files and spans that take no memory, but can be clipped. Worker thread only.

A file is written once and never changed. A span refers to row ranges of files: clipping reads nothing. A span may
have gaps, ranges without a file.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cache.disk.files import Receipt


@dataclass(eq=False)
class StoredFile:
    """One file: rows of the tokens `[start, stop)`.

    A snapshot has the window rows before `stop`, recurrent state at `stop`, or both.
    """

    namespace: str
    start: int
    stop: int
    num_bytes: int
    """Bytes on disk; an estimate until written."""
    is_snapshot: bool = False
    has_recurrent: bool = False
    name: str = ""
    """Empty until being written."""
    receipt: "Receipt | None" = None
    """Once the file is complete, synced and indexed."""
    last_used: int = 0
    is_gone: bool = False
    """Deleted, or never to be written."""

    @property
    def is_written(self) -> bool:
        return self.receipt is not None and not self.is_gone

    @property
    def parent_offset(self) -> int:
        """Where the tokens end on whose state this one depends."""
        return self.stop if self.is_snapshot else self.start

    @property
    def whole(self) -> "FilePart":
        return FilePart(self, self.start, self.stop)


@dataclass(frozen=True)
class FilePart:
    """Rows `[start, stop)` of a file, in offsets of the sequence, and all its recurrent state."""

    file: StoredFile
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        num_rows = max(1, self.file.stop - self.file.start)
        return (
            self.file.num_bytes
            if self.file.is_snapshot
            else self.file.num_bytes * (self.stop - self.start) // num_rows
        )

    def clipped(self, start: int, stop: int) -> "FilePart | None":
        """The overlap with `[start, stop)`, if any."""
        start, stop = max(start, self.start), min(stop, self.stop)
        return FilePart(self.file, start, stop) if start < stop else None


@dataclass(frozen=True, eq=False)
class FileSpan:
    """Rows of the tokens `[start, stop)` in files."""

    start: int
    stop: int
    parts: tuple[FilePart, ...] = ()
    """Ascending, disjoint."""

    @property
    def is_written(self) -> bool:
        return self.written_stop == self.stop

    @property
    def written_stop(self) -> int:
        """The end of rows on disk without a gap."""
        stop = self.start
        for part in self.parts:
            if part.start > stop or not part.file.is_written:
                break
            stop = part.stop
        return stop

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def clipped(self, start: int, stop: int) -> "FileSpan":
        """The part in `[start, stop)`."""
        parts = (part.clipped(start, stop) for part in self.parts)
        return FileSpan(start, stop, tuple(part for part in parts if part is not None))

    def missing(self) -> Iterator[tuple[int, int]]:
        """Yields the ranges without a file."""
        done = self.start
        for part in self.parts:
            if part.file.is_gone:
                continue
            if done < part.start:
                yield done, part.start
            done = part.stop
        if done < self.stop:
            yield done, self.stop

    def filled(self, file: StoredFile) -> "FileSpan":
        """With `file` in the missing ranges it covers."""
        live = [part for part in self.parts if not part.file.is_gone]
        new = [FilePart(file, *gap).clipped(file.start, file.stop) for gap in self.missing()]
        live.extend(part for part in new if part is not None)
        return FileSpan(self.start, self.stop, tuple(sorted(live, key=lambda part: part.start)))


def merged(parts: Iterable[FilePart]) -> tuple[FilePart, ...]:
    """Joins adjoining parts of one file."""
    found: list[FilePart] = []
    for part in parts:
        continues = found and found[-1].file is part.file and found[-1].stop == part.start
        found.append(FilePart(part.file, found.pop().start, part.stop) if continues else part)
    return tuple(found)
