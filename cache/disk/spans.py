"""State on disk as files and spans that take no memory, but can be clipped and loaded. Worker thread only.

A file is written once and never changed. A span refers to row ranges of files: clipping reads nothing. A span may
have gaps, ranges without a file.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from cache.budget import DiskFault

if TYPE_CHECKING:
    from cache.disk.files import Receipt
    from cache.layers.state import RecurrentState, Segment


class FileState(Enum):
    """A file's states, in order."""

    PENDING = "pending"
    WRITTEN = "written"
    """Complete, synced, indexed."""
    GONE = "gone"
    """Deleted, or never written."""


class RowReader(Protocol):
    """Reads files for spans, which know no folder: `cache.disk.io.FileReader`. Both raise DiskFault."""

    def load_rows(self, file: "StoredFile", start: int, stop: int) -> "Segment":
        """The rows of the tokens `[start, stop)`, evaluated."""

    def load_recurrent(self, file: "StoredFile") -> "RecurrentState":
        """The recurrent state at the file's end, evaluated."""


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
    state: FileState = FileState.PENDING
    last_used: int = 0
    reader: "RowReader | None" = None

    @property
    def is_gone(self) -> bool:
        return self.state is FileState.GONE

    @property
    def is_written(self) -> bool:
        return self.state is FileState.WRITTEN

    def load(self) -> "tuple[Segment | None, RecurrentState | None]":
        """Reads a snapshot. Raises DiskFault; the file is then GONE."""
        if not self.is_written or self.reader is None:
            raise DiskFault(f"the state at token {self.stop} is not on disk")
        window = self.reader.load_rows(self, self.start, self.stop) if self.start < self.stop else None
        return window, self.reader.load_recurrent(self) if self.has_recurrent else None


@dataclass(frozen=True)
class FilePart:
    """Rows `[start, stop)` of a file, in offsets of the sequence."""

    file: StoredFile
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.file.num_bytes * (self.stop - self.start) // (self.file.stop - self.file.start)

    def clipped(self, start: int, stop: int) -> "FilePart | None":
        """The overlap with `[start, stop)`, if any."""
        start, stop = max(start, self.start), min(stop, self.stop)
        return FilePart(self.file, start, stop) if start < stop else None

    def load(self) -> "Segment":
        """Reads the rows. Raises DiskFault; the file is then GONE."""
        assert self.file.reader is not None, "a written file has a reader"
        return self.file.reader.load_rows(self.file, self.start, self.stop)


@dataclass(frozen=True, eq=False)
class FileSpan:
    """Rows of the tokens `[start, stop)` in files."""

    start: int
    stop: int
    parts: tuple[FilePart, ...] = ()
    """Ascending, disjoint."""

    @property
    def files(self) -> list[StoredFile]:
        return list(dict.fromkeys(part.file for part in self.parts))

    @property
    def is_written(self) -> bool:
        return not any(self.missing()) and all(file.is_written for file in self.files)

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

    def split(self, offset: int) -> "tuple[FileSpan, FileSpan]":
        """`[start, offset)` and `[offset, stop)`. Reads nothing."""
        return self.clipped(self.start, offset), self.clipped(offset, self.stop)

    def load(self) -> "Segment":
        """Reads the rows, evaluated. Raises DiskFault; the file is then GONE."""
        if not self.is_written:
            raise DiskFault(f"the state of tokens {self.start} to {self.stop} is not on disk")
        first, *later = [part.load() for part in self.parts]
        return first.join(*later) if later else first

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
