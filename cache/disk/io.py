"""Input and output of the disk tier in threads of its own: reading ahead, loading, and the queue of writes.

Requests that wait for the same piece share one read. The first to load the piece, or part of it, takes its memory;
the others find the loaded state in the trie, and read again what they still need. One writer thread writes, deletes
and updates the index, in order. After a failed write the queue accepts nothing for `RETRY_SECONDS`. All methods
belong to the worker thread.
"""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from cache.budget import DiskFault
from cache.disk.files import ProblemLog, Receipt
from cache.disk.folder import DiskStore, WriteOrder
from cache.disk.spans import FilePart, FileSnapshot, FileSpan, StoredFile
from cache.layers.state import PointState, Segment


@dataclass(eq=False)
class _Piece:
    """Rows of a file, or its point state: being read, or read."""

    file: StoredFile
    rows: FilePart | None
    """The rows; None for point state."""
    num_bytes: int
    state: "Future[Any]"
    num_waiting: int = 1
    """Number of prefetches that share the piece."""

    def holds(self, file: StoredFile, rows: FilePart | None) -> bool:
        """Returns whether the piece contains these rows of a file, or is its point state if `rows` is None."""
        if self.file is not file or self.rows is None or rows is None:
            return self.file is file and self.rows is rows
        return self.rows.start <= rows.start and rows.stop <= self.rows.stop


_CANCELLED: "Future[Any]" = Future()
_CANCELLED.cancel()


class Prefetch:
    """State that is being read ahead. The owner must cancel the prefetch after loading."""

    def __init__(self, pieces: list[_Piece], release: Callable[[_Piece], None]) -> None:
        self._pieces = pieces
        self._release = release

    @property
    def is_done(self) -> bool:
        """Whether every read has ended, with or without success."""
        return all(piece.state.done() for piece in self._pieces)

    def cancel(self) -> None:
        """Stops reading, and frees the pieces that no other prefetch shares. May be called twice."""
        while self._pieces:
            self._release(self._pieces.pop())


class ReadAhead:
    """The reading thread, and the pieces it has read."""

    def __init__(self, store: DiskStore, max_bytes: int) -> None:
        self._num_bytes = 0
        """Approximate bytes of memory that the pieces take."""
        self._store = store
        self._max_bytes = max_bytes
        self._pieces: list[_Piece] = []
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="cache-disk-reader")

    def begin(self, wanted: Iterable[FileSpan | FileSnapshot]) -> Prefetch:
        """Begins to read state from disk, as far as memory allows."""
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
        """Returns rows that were read ahead, after waiting for a running read; None if no piece has them.

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
        """Waits for a piece; None if its read has not started, since the caller can then read it faster."""
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
    """Returns rows `[start, stop)` of a segment; the segment itself if these are all its rows."""
    segment = segment.tail(start)
    return segment if stop == segment.stop else segment.split(stop)[0]


class FileReader:
    """Loads the files of one folder, read ahead or from disk. Drops and logs a file that cannot be read."""

    def __init__(
        self,
        store: DiskStore | None,
        *,
        max_ahead_bytes: int,
        drop: Callable[[Iterable[StoredFile]], None],
        log: ProblemLog,
    ) -> None:
        self._sources = (store, ReadAhead(store, max_ahead_bytes)) if store is not None else None
        self._drop = drop
        self._log = log

    def prefetch(self, wanted: Iterable[FileSpan | FileSnapshot]) -> Prefetch:
        """Begins to read state from disk, as far as memory allows."""
        return self._sources[1].begin(wanted) if self._sources is not None else Prefetch([], lambda piece: None)

    def load_rows(self, file: StoredFile, start: int, stop: int) -> Segment:
        """Returns rows of a file in evaluated arrays. Drops an unreadable file and raises DiskFault."""
        with self._reading(file) as (store, ahead):
            return ahead.take_rows(file, start, stop) or store.read_rows(file, start, stop)

    def load_points(self, file: StoredFile) -> PointState:
        """Returns a file's point state in evaluated arrays. Drops an unreadable file and raises DiskFault."""
        with self._reading(file) as (store, ahead):
            return ahead.take_points(file) or store.read_points(file)

    @contextlib.contextmanager
    def _reading(self, file: StoredFile) -> Iterator[tuple[DiskStore, ReadAhead]]:
        if self._sources is None:
            raise DiskFault("the cache folder is closed")
        try:
            yield self._sources
        except DiskFault as fault:
            self._log.report(f"a file cannot be read, what it held is evaluated again: {fault}")
            self._drop([file])
            raise

    def close(self) -> None:
        """Ends reading ahead; nothing can be loaded afterwards."""
        if self._sources is not None:
            self._sources[1].close()
        self._sources = None


RETRY_SECONDS = 60.0
"""Pause after a failed write."""


@dataclass
class _Write:
    """A file handed to the thread, and the bytes of memory that become free once it is written."""

    file: StoredFile
    num_bytes: int
    receipt: "futures.Future[Receipt | None]"


class WriteQueue:
    """The writer thread of one folder. Without a store the queue accepts nothing, like a closed one."""

    def __init__(
        self,
        store: DiskStore | None,
        *,
        max_waiting_bytes: int,
        elapsed: Callable[[], float],
        log: ProblemLog,
    ) -> None:
        self.waiting_bytes = 0
        """Bytes of memory that unwritten state holds."""
        self._store = store
        self._max_waiting_bytes = max_waiting_bytes
        self._elapsed = elapsed
        self._log = log
        self._writes: deque[_Write] = deque()
        self._paused_until = -math.inf
        self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix="cache-disk-writer")

    @property
    def is_busy(self) -> bool:
        """Whether unwritten state holds more than half of its memory limit."""
        return 2 * self.waiting_bytes > self._max_waiting_bytes

    def accepts(self, num_bytes: int) -> bool:
        """Returns whether state of `num_bytes` in memory may wait too; an empty queue accepts one piece of any
        size.
        """
        if self._store is None or self._elapsed() < self._paused_until:
            return False
        if self._writes and self.waiting_bytes + num_bytes > self._max_waiting_bytes:
            return False
        self._store.is_failing = False  # a failure before the pause must not fail what comes after it
        return True

    def add(self, order: WriteOrder, num_bytes: int) -> None:
        """Queues a file for writing; it holds `num_bytes` of memory until written. Requires `accepts`."""
        assert self._store is not None
        self._writes.append(_Write(order.file, num_bytes, self._thread.submit(self._store.write, order)))
        self.waiting_bytes += num_bytes

    def ended(self) -> Iterator[tuple[StoredFile, Receipt | None]]:
        """Yields each file whose write has ended since the last call, with its receipt; None if it was not
        written.
        """
        while self._writes and self._writes[0].receipt.done():
            write = self._writes.popleft()
            self.waiting_bytes -= write.num_bytes
            yield write.file, self._receipt(write.receipt)

    def _receipt(self, future: "futures.Future[Receipt | None]") -> Receipt | None:
        if future.cancelled():
            return None
        error = future.exception()
        if error is None:
            return future.result()
        self._paused_until = self._elapsed() + RETRY_SECONDS
        self._log.report(f"writing failed, further state stays in memory for now: {error}")
        return None

    def delete(self, files: Collection[StoredFile]) -> None:
        """Queues files for deletion, after all earlier writes."""
        if self._store is not None:
            self._thread.submit(self._store.delete, files)

    def save_recency(self, files: Collection[StoredFile]) -> None:
        """Queues an update of when files were last used."""
        if self._store is not None:
            self._thread.submit(self._store.touch, files)

    def scrub(self) -> None:
        """Queues overwriting of what was deleted from the index."""
        if self._store is not None:
            self._thread.submit(self._store.scrub)

    def wait(self, timeout_seconds: float) -> bool:
        """Waits until every queued write has succeeded or failed; False on timeout."""
        if self._store is None:
            return True
        barrier = self._thread.submit(lambda: None)
        futures.wait([barrier], timeout_seconds)
        return barrier.done()

    def close(self) -> None:
        """Ends the thread: finishes the file being written, and drops the waiting files."""
        for write in self._writes:
            write.receipt.cancel()
        if self._store is not None:
            self._thread.submit(mx.clear_streams)  # MLX's streams of this thread would outlive it
        self._thread.shutdown()
        self._store = None

    def check(self) -> None:
        """Asserts that the count of waiting bytes is right."""
        waiting = sum(write.num_bytes for write in self._writes)
        assert waiting == self.waiting_bytes, f"{waiting} bytes are waiting, {self.waiting_bytes} counted"
