"""State on disk as spans and snapshots that take no memory, but can be clipped and loaded.

A file is written once and never changed. Spans refer to row ranges of files, so splitting and joining spans reads
nothing. A `FileSpan` may have gaps: ranges without a file. Everything here belongs to the worker thread.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from typing import TYPE_CHECKING, Protocol

from cache.budget import DiskFault

if TYPE_CHECKING:
    from cache.disk.files import Receipt
    from cache.layers.state import PointState, Segment


class FileState(Enum):
    """The states of a file, in order."""

    PENDING = "pending"
    """Waiting to be written, or being written."""
    WRITTEN = "written"
    """Complete, synced, and in the index."""
    GONE = "gone"
    """Never written, found damaged, or deleted."""


class FileLoader(Protocol):
    """Loads files into memory; implemented by `cache.disk.io.FileReader`."""

    def load_rows(self, file: "StoredFile", start: int, stop: int) -> "Segment":
        """Returns rows of a file in evaluated arrays; raises DiskFault."""

    def load_points(self, file: "StoredFile") -> "PointState":
        """Returns a file's point state in evaluated arrays; raises DiskFault."""


@dataclass(eq=False)
class StoredFile:
    """One file of the tier: rows of the tokens `[start, stop)`, and for a snapshot maybe point state at `stop`."""

    loader: FileLoader
    namespace: str
    start: int
    stop: int
    num_bytes: int
    """Size on disk; an estimate until the file is written."""
    is_snapshot: bool = False
    has_points: bool = False
    name: str = ""
    """Empty until the file is being written."""
    receipt: "Receipt | None" = None
    state: FileState = FileState.PENDING
    last_used: int = 0


@dataclass(frozen=True)
class FilePart:
    """The rows `[start, stop)` of a file, in offsets of the sequence."""

    file: StoredFile
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """The part's share of the bytes of its file."""
        return self.file.num_bytes * (self.stop - self.start) // (self.file.stop - self.file.start)

    def clipped(self, start: int, stop: int) -> "FilePart | None":
        """Returns the overlap of the part with `[start, stop)`; None if there is none."""
        start, stop = max(start, self.start), min(stop, self.stop)
        return FilePart(self.file, start, stop) if start < stop else None


class FileSpan:
    """Rows of the tokens `[start, stop)` on disk, in one file or several. Immutable; takes no memory."""

    def __init__(self, start: int, stop: int, parts: tuple[FilePart, ...] = ()) -> None:
        self.start = start
        self.stop = stop
        self.parts = parts
        """Ascending, without overlap."""

    @property
    def files(self) -> list[StoredFile]:
        """The files it is in."""
        return list(dict.fromkeys(part.file for part in self.parts))

    @property
    def is_gone(self) -> bool:
        """Whether part of the span can no longer be loaded."""
        return any(file.state is FileState.GONE for file in self.files)

    @property
    def is_written(self) -> bool:
        """Whether the whole span is on disk and in the index, and so can be loaded."""
        return not any(self.missing()) and all(file.state is FileState.WRITTEN for file in self.files)

    @property
    def written_stop(self) -> int:
        """The offset up to which the rows are on disk without a gap."""
        stop = self.start
        for part in self.parts:
            if part.start > stop or part.file.state is not FileState.WRITTEN:
                break
            stop = part.stop
        return stop

    @property
    def file_bytes(self) -> int:
        """Bytes on disk; of a file that holds more than this span, only the span's part."""
        return sum(part.num_bytes for part in self.parts)

    def split(self, offset: int) -> "tuple[FileSpan, FileSpan]":
        """Returns `[start, offset)` and `[offset, stop)`. Reads nothing."""
        return self.clipped(self.start, offset), self.clipped(offset, self.stop)

    def load(self) -> "Segment":
        """Reads the rows into memory, evaluated. Raises DiskFault; the faulty file is then GONE."""
        if not self.is_written:
            raise DiskFault(f"the state of tokens {self.start} to {self.stop} is not on disk")
        loaded = (part.file.loader.load_rows(part.file, part.start, part.stop) for part in self.parts)
        return reduce(lambda before, after: before.join(after), loaded)

    def clipped(self, start: int, stop: int) -> "FileSpan":
        """Returns the part of the span in `[start, stop)`."""
        parts = (part.clipped(start, stop) for part in self.parts)
        return FileSpan(start, stop, tuple(part for part in parts if part is not None))

    def missing(self) -> Iterator[tuple[int, int]]:
        """Yields the ranges without a file."""
        done = self.start
        for part in self.parts:
            if part.file.state is FileState.GONE:
                continue
            if done < part.start:
                yield done, part.start
            done = part.stop
        if done < self.stop:
            yield done, self.stop

    def filled(self, file: StoredFile) -> "FileSpan":
        """Returns the span with `file` in the missing ranges that the file covers."""
        live = [part for part in self.parts if part.file.state is not FileState.GONE]
        new = [FilePart(file, *gap).clipped(file.start, file.stop) for gap in self.missing()]
        live.extend(part for part in new if part is not None)
        return FileSpan(self.start, self.stop, tuple(sorted(live, key=lambda part: part.start)))


@dataclass(frozen=True)
class FileSnapshot:
    """A snapshot on disk: window rows that end at `offset`, point state at `offset`, or both. Takes no memory."""

    file: StoredFile

    @property
    def offset(self) -> int:
        """The token offset at which the snapshot is valid."""
        return self.file.stop

    @property
    def window_start(self) -> int:
        """The offset of the first window row; `offset` if there are none."""
        return self.file.start

    @property
    def rows(self) -> FilePart | None:
        """The window rows; None if there are none."""
        return FilePart(self.file, self.file.start, self.file.stop) if self.file.start < self.file.stop else None

    @property
    def has_points(self) -> bool:
        """Whether there is point state."""
        return self.file.has_points

    @property
    def is_gone(self) -> bool:
        """Whether the snapshot can no longer be loaded."""
        return self.file.state is FileState.GONE

    @property
    def is_written(self) -> bool:
        """Whether the snapshot is on disk and in the index, and so can be loaded."""
        return self.file.state is FileState.WRITTEN

    @property
    def file_bytes(self) -> int:
        """Bytes on disk."""
        return self.file.num_bytes

    def load(self) -> "tuple[Segment | None, PointState | None]":
        """Reads window rows and point state into memory. Raises DiskFault; the file is then GONE."""
        if not self.is_written:
            raise DiskFault(f"the state at token {self.offset} is not on disk")
        rows, loader = self.rows, self.file.loader
        window = loader.load_rows(self.file, rows.start, rows.stop) if rows is not None else None
        return window, loader.load_points(self.file) if self.has_points else None


def merged(parts: Iterable[FilePart]) -> tuple[FilePart, ...]:
    """Joins adjoining parts of the same file."""
    found: list[FilePart] = []
    for part in parts:
        continues = found and found[-1].file is part.file and found[-1].stop == part.start
        found.append(FilePart(part.file, found.pop().start, part.stop) if continues else part)
    return tuple(found)
