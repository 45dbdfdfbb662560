"""Reading state from disk before it is needed, in a thread of its own.

Requests that wait for the same piece share one read. The first to load the piece, or part of it, gets it and owns its
memory. The others find in the trie what was loaded, and read the rest again if they need it. Methods belong to the
worker thread.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from cache.disk.folder import DiskStore
from cache.disk.spans import FilePart, FileSnapshot, FileSpan, StoredFile
from cache.layers.points import PointState
from cache.layers.segments import Segment


@dataclass(eq=False)
class _Piece:
    """Rows of a file, or its point state, that are being read or were read."""

    file: StoredFile
    rows: FilePart | None
    """The rows; None for the point state."""
    num_bytes: int
    state: "Future[Any]"
    num_waiting: int = 1
    """Prefetches that have this piece."""

    def holds(self, file: StoredFile, rows: FilePart | None) -> bool:
        """Returns whether the piece contains some rows of a file, or is its point state."""
        if self.file is not file or self.rows is None or rows is None:
            return self.file is file and self.rows is rows
        return self.rows.start <= rows.start and rows.stop <= self.rows.stop


_CANCELLED: "Future[Any]" = Future()
_CANCELLED.cancel()


class Prefetch:
    """State that is being read ahead. Its owner must cancel it once it has loaded what it needs."""

    def __init__(self, pieces: list[_Piece], release: Callable[[_Piece], None]) -> None:
        self._pieces = pieces
        self._release = release

    @property
    def is_done(self) -> bool:
        """Whether every read is over, with or without success."""
        return all(piece.state.done() for piece in self._pieces)

    def cancel(self) -> None:
        """Stops reading, and frees the pieces that no other prefetch shares. May be called twice."""
        while self._pieces:
            self._release(self._pieces.pop())


class ReadAhead:
    """The reading thread and the pieces it has read."""

    def __init__(self, store: DiskStore, max_bytes: int) -> None:
        self._num_bytes = 0
        """About how many bytes of memory the pieces take."""
        self._store = store
        self._max_bytes = max_bytes
        self._pieces: list[_Piece] = []
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="cache-disk-reader")

    def begin(self, wanted: Iterable[FileSpan | FileSnapshot]) -> Prefetch:
        """Begins to read state that is on disk, as far as there is memory for it."""
        pieces = list[_Piece]()
        for item in wanted:
            for file, rows, num_bytes in _pieces_of(item) if item.is_written else ():
                piece = next((piece for piece in self._pieces if piece.holds(file, rows)), None)
                if piece is not None:
                    piece.num_waiting += 1
                    pieces.append(piece)
                elif self._num_bytes + num_bytes <= self._max_bytes:
                    pieces.append(self._begin(file, rows, num_bytes))
        return Prefetch(pieces, self._release)

    def _begin(self, file: StoredFile, rows: FilePart | None, num_bytes: int) -> _Piece:
        if rows is None:
            piece = _Piece(file, None, num_bytes, self._reader.submit(self._store.read_points, file))
        else:
            state = self._reader.submit(self._store.read_rows, file, rows.start, rows.stop)
            piece = _Piece(file, rows, num_bytes, state)
        self._pieces.append(piece)
        self._num_bytes += num_bytes
        return piece

    def take_rows(self, file: StoredFile, start: int, stop: int) -> Segment | None:
        """Returns rows that were read ahead, waiting if they are just being read; None if no piece has them.

        Raises DiskFault.
        """
        for piece in self._pieces:
            rows = piece.rows
            if rows is not None and piece.file is file and rows.start <= start and stop <= rows.stop:
                segment = self._take(piece)
                return _cut(segment, start, stop) if isinstance(segment, Segment) else None
        return None

    def take_points(self, file: StoredFile) -> PointState | None:
        """Returns point state that was read ahead, as `take_rows` does."""
        for piece in self._pieces:
            if piece.rows is None and piece.file is file:
                state = self._take(piece)
                return state if isinstance(state, PointState) else None
        return None

    def _take(self, piece: _Piece) -> Any:
        """Waits for a piece; returns None if its read has not started, since reading it now is faster then."""
        state = piece.state
        self._remove(piece)
        return None if state.cancelled() else state.result()

    def _release(self, piece: _Piece) -> None:
        piece.num_waiting -= 1
        if not piece.num_waiting:
            self._remove(piece)

    def _remove(self, piece: _Piece) -> None:
        if piece in self._pieces:
            self._pieces.remove(piece)
            self._num_bytes -= piece.num_bytes
            piece.state.cancel()
            piece.state = _CANCELLED  # frees the memory although other prefetches still refer to the piece

    def close(self) -> None:
        """Frees all pieces and ends the thread."""
        for piece in list(self._pieces):
            self._remove(piece)
        self._reader.submit(mx.clear_streams)  # MLX's streams of this thread would outlive it
        self._reader.shutdown()


def _pieces_of(item: FileSpan | FileSnapshot) -> Iterator[tuple[StoredFile, FilePart | None, int]]:
    rows = item.parts if isinstance(item, FileSpan) else [item.rows] if item.rows is not None else []
    for part in rows:
        yield part.file, part, part.num_bytes
    if isinstance(item, FileSnapshot) and item.has_points:
        yield item.file, None, item.file.num_bytes


def _cut(segment: Segment, start: int, stop: int) -> Segment:
    """Returns the rows `[start, stop)` of a segment; the segment itself if these are all its rows."""
    segment = segment.tail(start)
    return segment if stop == segment.stop else segment.split(stop)[0]
