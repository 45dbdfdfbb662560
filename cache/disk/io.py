"""Input and output of the disk tier in its own threads: reading ahead, loading, and the queue of writes.

Requests that wait for the same state share one read: the first takes the memory, others find the state in the trie,
or read again. One thread writes, in order. All methods belong to the worker thread.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from cache.budget import DiskFault
from cache.disk.files import ProblemLog, Receipt
from cache.disk.folder import DiskStore, WriteOrder
from cache.disk.spans import FilePart, FileSpan, StoredFile
from cache.layers.state import RecurrentState, Segment


@dataclass(eq=False)
class _Read:
    file: StoredFile
    rows: FilePart | None
    num_bytes: int
    result: "Future[Any]"
    num_waiting: int = 1

    def holds(self, file: StoredFile, rows: FilePart | None) -> bool:
        """Whether the read covers `rows`, or for None the recurrent state."""
        if self.file is not file or self.rows is None or rows is None:
            return self.file is file and self.rows is rows
        return self.rows.start <= rows.start and rows.stop <= self.rows.stop


_CANCELLED: "Future[Any]" = Future()
_CANCELLED.cancel()


class Prefetch:
    """State being read ahead. The owner must cancel it after loading."""

    def __init__(self, reads: list[_Read], release: Callable[[_Read], None]) -> None:
        self._reads = reads
        self._release = release

    @property
    def is_done(self) -> bool:
        return all(read.result.done() for read in self._reads)

    def cancel(self) -> None:
        """Stops reading, and frees what no other prefetch shares. Idempotent."""
        while self._reads:
            self._release(self._reads.pop())


class FileReader:
    """Loads a folder's files, ahead or at once; drops and logs unreadable ones.

    Loads nothing once closed.
    """

    def __init__(
        self, store: DiskStore, *, max_ahead_bytes: int, drop: Callable[[Iterable[StoredFile]], None], log: ProblemLog
    ) -> None:
        self._store: DiskStore | None = store
        self._max_bytes = max_ahead_bytes
        self._drop = drop
        self._log = log
        self._num_bytes = 0
        self._reads: list[_Read] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cache-disk-reader")

    def prefetch(self, wanted: Iterable[FileSpan | StoredFile]) -> Prefetch:
        """Begins to read what is written, as memory allows."""
        reads = list[_Read]()
        for item in wanted:
            for file, rows, num_bytes in _parts_of(item) if item.is_written else ():
                read = self._find(file, rows)
                if read is not None:
                    read.num_waiting += 1
                    reads.append(read)
                elif self._store is not None and self._num_bytes + num_bytes <= self._max_bytes:
                    reads.append(_Read(file, rows, num_bytes, self._thread.submit(_fetch, self._store, file, rows)))
                    self._reads.append(reads[-1])
                    self._num_bytes += num_bytes
        return Prefetch(reads, self._release)

    def load_rows(self, file: StoredFile, start: int, stop: int) -> Segment:
        """As `RowReader.load_rows`."""
        segment: Segment = self._load(file, FilePart(file, start, stop))
        if stop < segment.stop:
            segment = segment.split(stop)[0]
        return segment.tail(start) if start > segment.start else segment

    def load_recurrent(self, file: StoredFile) -> RecurrentState:
        """As `RowReader.load_recurrent`."""
        state: RecurrentState = self._load(file, None)
        return state

    def _load(self, file: StoredFile, rows: FilePart | None) -> Any:
        if self._store is None:
            raise DiskFault("the cache folder is closed")
        read = self._find(file, rows)
        try:
            result = read.result if read is not None else _CANCELLED
            if read is not None:
                self._remove(read)
            # A read that has not begun is faster done here.
            return _fetch(self._store, file, rows) if result.cancelled() else result.result()
        except DiskFault as fault:
            self._log.report(f"a file cannot be read, what it held is evaluated again: {fault}")
            self._drop([file])
            raise

    def _find(self, file: StoredFile, rows: FilePart | None) -> _Read | None:
        return next((read for read in self._reads if read.holds(file, rows)), None)

    def _release(self, read: _Read) -> None:
        read.num_waiting -= 1
        if not read.num_waiting:
            self._remove(read)

    def _remove(self, read: _Read) -> None:
        if read in self._reads:
            self._reads.remove(read)
            self._num_bytes -= read.num_bytes
            read.result.cancel()
            read.result = _CANCELLED  # frees the memory although other prefetches still refer to the read

    def close(self) -> None:
        """Frees what was read ahead, and ends the thread."""
        for read in list(self._reads):
            self._remove(read)
        if self._store is not None:
            self._thread.submit(mx.clear_streams)  # MLX's streams of this thread would outlive it
        self._thread.shutdown()
        self._store = None


def _fetch(store: DiskStore, file: StoredFile, rows: FilePart | None) -> Segment | RecurrentState:
    return store.read_recurrent(file) if rows is None else store.read_rows(file, rows.start, rows.stop)


def _parts_of(item: FileSpan | StoredFile) -> Iterator[tuple[StoredFile, FilePart | None, int]]:
    """Yields each read: the file, its rows (None: the recurrent state), the bytes."""
    if isinstance(item, FileSpan):
        yield from ((part.file, part, part.num_bytes) for part in item.parts)
        return
    if item.start < item.stop:
        yield item, FilePart(item, item.start, item.stop), item.num_bytes
    if item.has_recurrent:
        yield item, None, item.num_bytes


RETRY_SECONDS = 60.0


class WriteQueue:
    """A folder's writer thread. Accepts nothing once closed."""

    def __init__(
        self, store: DiskStore, *, max_waiting_bytes: int, elapsed: Callable[[], float], log: ProblemLog
    ) -> None:
        self.waiting_bytes = 0
        self._store: DiskStore | None = store
        self._max_waiting_bytes = max_waiting_bytes
        self._elapsed = elapsed
        self._log = log
        self._writes: deque[tuple[StoredFile, int, Future[Receipt | None]]] = deque()
        """Each with the bytes held until it ends."""
        self._paused_until = -math.inf
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cache-disk-writer")

    @property
    def is_busy(self) -> bool:
        return 2 * self.waiting_bytes > self._max_waiting_bytes

    def accepts(self, num_bytes: int) -> bool:
        """Whether `num_bytes` more may wait; an empty queue accepts any file."""
        if self._store is None or self._elapsed() < self._paused_until:
            return False
        if self._writes and self.waiting_bytes + num_bytes > self._max_waiting_bytes:
            return False
        self._store.is_failing = False  # a failure before the pause must not fail what comes after it
        return True

    def add(self, order: WriteOrder, num_bytes: int) -> None:
        """Queues a file, which holds `num_bytes` until written. Requires `accepts`."""
        assert self._store is not None
        self._writes.append((order.file, num_bytes, self._thread.submit(self._store.write, order)))
        self.waiting_bytes += num_bytes

    def ended(self) -> Iterator[tuple[StoredFile, Receipt | None]]:
        """Yields files whose writes ended, with receipts if written."""
        while self._writes and self._writes[0][2].done():
            file, num_bytes, receipt = self._writes.popleft()
            self.waiting_bytes -= num_bytes
            error = None if receipt.cancelled() else receipt.exception()
            if error is not None:
                self._paused_until = self._elapsed() + RETRY_SECONDS
                self._log.report(f"writing failed, further state stays in memory for now: {error}")
            yield file, None if receipt.cancelled() or error is not None else receipt.result()

    def change(self, action: Callable[[DiskStore], None]) -> None:
        """Queues another change of the folder, after earlier writes."""
        if self._store is not None:
            self._thread.submit(action, self._store)

    def wait(self, timeout_seconds: float) -> bool:
        """Waits until all queued writes have ended; False on timeout."""
        if self._store is None:
            return True
        barrier = self._thread.submit(lambda: None)
        futures.wait([barrier], timeout_seconds)
        return barrier.done()

    def close(self) -> None:
        """Finishes the current file, drops waiting ones, ends the thread."""
        for _, _, receipt in self._writes:
            receipt.cancel()
        if self._store is not None:
            self._thread.submit(mx.clear_streams)  # MLX's streams of this thread would outlive it
        self._thread.shutdown()
        self._store = None

    def check(self) -> None:
        """Asserts the count of waiting bytes."""
        waiting = sum(num_bytes for _, num_bytes, _ in self._writes)
        assert waiting == self.waiting_bytes, f"{waiting} bytes are waiting, {self.waiting_bytes} counted"
