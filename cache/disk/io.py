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

import mlx.core as mx

from cache.budget import DiskFault
from cache.disk.codec import LoadedState, StateImage
from cache.disk.files import Receipt
from cache.disk.folder import DiskStore
from cache.disk.index import WriteDay
from cache.disk.tree import FilePart, FileSpan, StoredFile
from cache.layers.state import Segment
from cache.types import TokenArray


@dataclass(eq=False)
class _Read:
    part: FilePart
    result: "Future[LoadedState]"
    num_waiting: int = 0


_CANCELLED: "Future[LoadedState]" = Future()
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
    """Loads a folder's files, ahead or at once; nothing once closed."""

    def __init__(
        self, store: DiskStore, *, max_ahead_bytes: int, lose: Callable[[StoredFile, DiskFault], None]
    ) -> None:
        """`lose` gets files that cannot be read."""
        self._store: DiskStore | None = store
        self._max_bytes = max_ahead_bytes
        self._lose = lose
        self._reads: list[_Read] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cache-disk-reader")

    def prefetch(self, parts: Iterable[FilePart]) -> Prefetch:
        """Begins to read written files, as memory allows."""
        reads = list[_Read]()
        for part in parts:
            read = self._find(part)
            if read is None and self._store is not None and self._has_memory(part):
                read = _Read(part, self._thread.submit(self._store.read, part))
                self._reads.append(read)
            if read is not None:
                read.num_waiting += 1
                reads.append(read)
        return Prefetch(reads, self._release)

    def _has_memory(self, part: FilePart) -> bool:
        return sum(read.part.num_bytes for read in self._reads) + part.num_bytes <= self._max_bytes

    def load_span(self, span: FileSpan) -> Segment:
        """Reads rows, evaluated. Raises DiskFault; a damaged file is then gone."""
        first, *later = [self._load_rows(part) for part in span.parts]
        return first.join(*later) if later else first

    def load_snapshot(self, file: StoredFile) -> LoadedState:
        """Reads a snapshot, evaluated. Raises DiskFault; a damaged file is then gone."""
        return self._load(file.whole)

    def _load_rows(self, part: FilePart) -> Segment:
        segment, _ = self._load(part)
        if segment is None:
            raise DiskFault("the file holds no rows")
        if part.stop < segment.stop:
            segment = segment.split(part.stop)[0]
        return segment.tail(part.start) if part.start > segment.start else segment

    def _load(self, part: FilePart) -> LoadedState:
        if self._store is None:
            raise DiskFault("the cache folder is closed")
        if not part.file.is_written:
            raise DiskFault(f"the state of tokens {part.start} to {part.stop} is not on disk")
        read = self._find(part)
        try:
            result = read.result if read is not None else _CANCELLED
            if read is not None:
                self._remove(read)
            # A read that has not begun is faster done here.
            return self._store.read(part) if result.cancelled() else result.result()
        except DiskFault as fault:
            self._lose(part.file, fault)
            raise

    def _find(self, part: FilePart) -> _Read | None:
        same_file = (read for read in self._reads if read.part.file is part.file)
        return next(
            (read for read in same_file if read.part.start <= part.start <= part.stop <= read.part.stop), None
        )

    def _release(self, read: _Read) -> None:
        read.num_waiting -= 1
        if not read.num_waiting:
            self._remove(read)

    def _remove(self, read: _Read) -> None:
        if read in self._reads:
            self._reads.remove(read)
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


RETRY_SECONDS = 60.0


class WriteQueue:
    """A folder's writer thread. Accepts nothing once closed."""

    def __init__(
        self, store: DiskStore, *, max_waiting_bytes: int, elapsed: Callable[[], float], report: Callable[[str], None]
    ) -> None:
        self._store: DiskStore | None = store
        self.max_waiting_bytes = max_waiting_bytes
        self.waiting_bytes = 0
        self._elapsed = elapsed
        self._report = report
        self._writes: deque[tuple[StoredFile, int, Future[Receipt | None]]] = deque()
        """Each with the bytes held until it ends."""
        self._paused_until = -math.inf
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cache-disk-writer")

    def accepts(self, num_bytes: int) -> bool:
        """Whether `num_bytes` more may wait; an empty queue accepts any file."""
        if self._store is None or self._elapsed() < self._paused_until:
            return False
        if self._writes and self.waiting_bytes + num_bytes > self.max_waiting_bytes:
            return False
        self._store.is_failing = False  # a failure before the pause must not fail what comes after it
        return True

    def add(self, num_bytes: int, file: StoredFile, image: StateImage, tokens: TokenArray, day: WriteDay) -> None:
        """Queues `DiskStore.write`, which holds `num_bytes` of memory until it ends. Requires `accepts`."""
        assert self._store is not None
        self._writes.append((file, num_bytes, self._thread.submit(self._store.write, file, image, tokens, day)))
        self.waiting_bytes += num_bytes

    def ended(self) -> Iterator[tuple[StoredFile, Receipt | None]]:
        """Yields files whose writes ended, with receipts if written."""
        while self._writes and self._writes[0][2].done():
            file, num_bytes, receipt = self._writes.popleft()
            self.waiting_bytes -= num_bytes
            error = None if receipt.cancelled() else receipt.exception()
            if error is not None:
                self._paused_until = self._elapsed() + RETRY_SECONDS
                self._report(f"writing failed, further state stays in memory for now: {error}")
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
