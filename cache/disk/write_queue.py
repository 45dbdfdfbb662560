"""What waits to be written to disk, and the thread that writes, deletes and updates the index, in order.

After a write has failed, nothing new is accepted for `RETRY_SECONDS`. Methods belong to the worker thread; it learns
from `ended` which writes are over.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent import futures
from dataclasses import dataclass

import mlx.core as mx

from cache.disk.files import Receipt
from cache.disk.folder import DiskStore, WriteOrder
from cache.disk.problem_log import ProblemLog
from cache.disk.spans import StoredFile

RETRY_SECONDS = 60.0
"""How long nothing is written after a write failed."""


@dataclass
class _Write:
    """A file that was handed to the thread, and the bytes of memory that are free once it is written."""

    file: StoredFile
    num_bytes: int
    receipt: "futures.Future[Receipt | None]"


class WriteQueue:
    """The writer thread of one folder. Without a store it accepts nothing, like one that is closed."""

    def __init__(
        self,
        store: DiskStore | None,
        *,
        max_waiting_bytes: int,
        elapsed: Callable[[], float],
        log: ProblemLog,
    ) -> None:
        self.waiting_bytes = 0
        """Bytes of memory held by what waits to be written."""
        self._store = store
        self._max_waiting_bytes = max_waiting_bytes
        self._elapsed = elapsed
        self._log = log
        self._writes: deque[_Write] = deque()
        self._paused_until = -math.inf
        self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix="cache-disk-writer")

    @property
    def is_busy(self) -> bool:
        """Whether more than half of the memory for waiting state is in use."""
        return 2 * self.waiting_bytes > self._max_waiting_bytes

    def accepts(self, num_bytes: int) -> bool:
        """Returns whether state of `num_bytes` in memory may wait too; an empty queue takes one piece of any size."""
        if self._store is None or self._elapsed() < self._paused_until:
            return False
        if self._writes and self.waiting_bytes + num_bytes > self._max_waiting_bytes:
            return False
        self._store.is_failing = False  # a failure before the pause must not fail what comes after it
        return True

    def add(self, order: WriteOrder, num_bytes: int) -> None:
        """Has a file written; `num_bytes` of memory wait until it is. Needs `accepts`."""
        assert self._store is not None
        self._writes.append(_Write(order.file, num_bytes, self._thread.submit(self._store.write, order)))
        self.waiting_bytes += num_bytes

    def ended(self) -> Iterator[tuple[StoredFile, Receipt | None]]:
        """Yields each file whose write is over since the last call, with its receipt; None if it was not written."""
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
        """Has files deleted, after everything that was added before is written."""
        if self._store is not None:
            self._thread.submit(self._store.delete, files)

    def save_recency(self, files: Collection[StoredFile]) -> None:
        """Has the index record when files were last used."""
        if self._store is not None:
            self._thread.submit(self._store.touch, files)

    def scrub(self) -> None:
        """Has the index overwrite what was deleted from it."""
        if self._store is not None:
            self._thread.submit(self._store.scrub)

    def wait(self, timeout_seconds: float) -> bool:
        """Waits until everything that was added is written or has failed; False if that takes longer."""
        if self._store is None:
            return True
        barrier = self._thread.submit(lambda: None)
        futures.wait([barrier], timeout_seconds)
        return barrier.done()

    def close(self) -> None:
        """Ends the thread: the file being written is finished, those that wait are not written."""
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
