"""The disk tier: state of past tokens that outlives memory and the process. Worker thread only.

One thread writes, in order, each token's state at most once: files are found by tokens, however edges were cut. One
reads ahead; requests that wait for the same state share the read: the first takes the memory. A failure costs the
reuse of state and nothing else: writing pauses, unreadable state is evaluated again. State of other weights, formats
or machines is never read. Files hold people's conversations: only their owner can read them.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from cache.budget import DiskFault, Happening, Journal
from cache.disk.codec import LoadedState, StateImage, Unstorable
from cache.disk.files import Receipt
from cache.disk.folder import DiskStore
from cache.disk.index import WriteBudget, WriteDay
from cache.disk.tree import START, DiskPlace, FilePart, StoredFile, Target, gaps
from cache.layers.state import RecurrentState, Segment
from cache.types import TokenArray

logger = logging.getLogger(__name__)

_LOW_WATERMARK = 0.95
"""Eviction stops at this fraction, or after `tree.MAX_SPARE_FILES`."""
_HEADER_BYTES = 4096

elapsed_seconds = partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
"""Seconds since a fixed moment, sleep included; macOS and Linux name the clock differently."""


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


def _end(thread: ThreadPoolExecutor) -> None:
    thread.submit(mx.clear_streams)  # MLX's streams of this thread would outlive it
    thread.shutdown()


class FileReader:
    """Loads a folder's files, ahead or at once."""

    def __init__(self, store: DiskStore, *, max_bytes: int, lose: Callable[[StoredFile, DiskFault], None]) -> None:
        """`lose` gets files that cannot be read."""
        self._store = store
        self._max_bytes = max_bytes
        self._lose = lose
        self._reads: list[_Read] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cache-disk-reader")

    def prefetch(self, parts: Iterable[FilePart]) -> Prefetch:
        """Begins to read written files, as memory allows."""
        reads = list[_Read]()
        for part in parts:
            read = self._find(part)
            num_bytes = sum(read.part.num_bytes for read in self._reads) + part.num_bytes
            if read is None and num_bytes <= self._max_bytes:
                read = _Read(part, self._thread.submit(self._store.read, part))
                self._reads.append(read)
            if read is not None:
                read.num_waiting += 1
                reads.append(read)
        return Prefetch(reads, self._release)

    def load_rows(self, parts: Iterable[FilePart]) -> Segment:
        """Reads adjoining rows, evaluated. Raises DiskFault; a damaged file is then gone."""
        first, *later = map(self._load_rows, parts)
        return first.join(*later) if later else first

    def _load_rows(self, part: FilePart) -> Segment:
        segment, _ = self.load(part)
        if segment is None:
            raise DiskFault("the file holds no rows")
        return segment.between(part.start, part.stop)

    def load(self, part: FilePart) -> LoadedState:
        """Reads rows, perhaps more, and recurrent state, evaluated. Raises DiskFault; a damaged file is then gone."""
        if not part.file.is_written:
            raise DiskFault(f"the state of tokens {part.start} to {part.stop} is not on disk")
        read = self._find(part)
        try:
            result = self._take(read) if read is not None else _CANCELLED
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
        if not read.num_waiting and read in self._reads:
            self._take(read)

    def _take(self, read: _Read) -> "Future[LoadedState]":
        """Forgets a read; what it reads is cancelled unless it has begun."""
        self._reads.remove(read)
        result, read.result = read.result, _CANCELLED  # other prefetches may still refer to the read
        result.cancel()
        return result

    def close(self) -> None:
        """Frees what was read ahead, and ends the thread."""
        for read in list(self._reads):
            self._take(read)
        _end(self._thread)


RETRY_SECONDS = 60.0
WAIT_SECONDS, WAIT_SHARE = 1.0, 0.1
"""The longest that writes wait for room in a full queue, and the part of all time: answers wait too."""


class WriteQueue:
    """A folder's writer thread."""

    def __init__(
        self, store: DiskStore, *, max_waiting_bytes: int, elapsed: Callable[[], float], report: Callable[[str], None]
    ) -> None:
        self._store = store
        self.max_waiting_bytes = max_waiting_bytes
        self.waiting_bytes = 0
        self._elapsed = elapsed
        self._report = report
        self._writes: deque[tuple[StoredFile, int, Future[Receipt | None]]] = deque()
        """Each with the bytes held until it ends."""
        self._paused_until = -math.inf
        self._patience, self._waited_at = WAIT_SECONDS, 0.0
        """Seconds that writes may wait for room, and when one last did."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cache-disk-writer")

    def accepts(self, num_bytes: int) -> bool:
        """Whether `num_bytes` more may wait; a full queue is waited for. An empty queue accepts any file."""
        if self._elapsed() < self._paused_until:
            return False
        excess, ahead = self.waiting_bytes + num_bytes - self.max_waiting_bytes, list[Future[Receipt | None]]()
        for _, held_bytes, write in self._writes:
            if excess > 0:
                ahead.append(write)
                excess -= held_bytes
        if ahead and not self._have_ended(ahead):
            self._pause("the disk is slower than what is to be written")
            return False
        if any(write.cancelled() or write.exception() is not None for write in ahead):
            return False  # `ended` will pause
        self._store.is_failing = False  # a failure before the pause must not fail what comes after it
        return True

    def _have_ended(self, writes: "list[Future[Receipt | None]]") -> bool:
        """Waits for writes, as long as waiting may take yet."""
        begun = self._elapsed()
        self._patience = min(self._patience + WAIT_SHARE * (begun - self._waited_at), WAIT_SECONDS)
        is_over = not futures.wait(writes, self._patience).not_done
        self._waited_at = self._elapsed()
        self._patience = max(self._patience - (self._waited_at - begun), 0.0)
        return is_over

    def _pause(self, why: str) -> None:
        self._paused_until = self._elapsed() + RETRY_SECONDS
        self._report(f"{why}; further state stays in memory for now")

    def add(self, num_bytes: int, file: StoredFile, image: StateImage, tokens: TokenArray, day: WriteDay) -> None:
        """Queues `DiskStore.write`, which holds `num_bytes` of memory until it ends. Requires `accepts`."""
        self._writes.append((file, num_bytes, self._thread.submit(self._store.write, file, image, tokens, day)))
        self.waiting_bytes += num_bytes

    def ended(self) -> Iterator[tuple[StoredFile, Receipt | None]]:
        """Yields files whose writes ended, with receipts if written."""
        while self._writes and self._writes[0][2].done():
            file, num_bytes, receipt = self._writes.popleft()
            self.waiting_bytes -= num_bytes
            error = None if receipt.cancelled() else receipt.exception()
            if error is not None:
                self._pause(f"writing failed: {error}")
            yield file, None if receipt.cancelled() or error is not None else receipt.result()

    def change(self, action: Callable[[], None]) -> None:
        """Queues another change of the folder, after earlier writes."""
        self._thread.submit(action)

    def wait(self, timeout_seconds: float | None) -> bool:
        """Waits until all that is queued has ended; False on timeout."""
        barrier = self.barrier()
        futures.wait([barrier], timeout_seconds)
        return barrier.done()

    def barrier(self) -> "Future[None]":
        """Done once all that is queued now has ended."""
        return self._thread.submit(lambda: None)

    def cancel(self) -> None:
        """Drops waiting writes."""
        for _, _, receipt in self._writes:
            receipt.cancel()

    def close(self) -> None:
        """Ends the thread once all that is queued has ended."""
        _end(self._thread)


class DiskTier:
    """Decides what is written to disk, and finds it again."""

    def __init__(
        self,
        store: DiskStore,
        *,
        budget_bytes: int,
        write_budget_bytes_per_day: int | None = None,
        max_in_flight_bytes: int = 1 << 30,
        now: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = elapsed_seconds,
    ) -> None:
        """At most `max_in_flight_bytes`, or one file, wait to be written, and as many are read ahead."""
        self._has_warned = False
        self.journal = Journal()
        self.write_budget = WriteBudget(write_budget_bytes_per_day, now, elapsed, store.day)
        self.tree = store.tree
        self.store = store
        self.queue = WriteQueue(store, max_waiting_bytes=max_in_flight_bytes, elapsed=elapsed, report=self._report)
        self.reader = FileReader(store, max_bytes=max_in_flight_bytes, lose=self._lose)
        self.budget_bytes = budget_bytes
        self.num_gone = 0
        """Files evicted, damaged, cleared or replaced since the start."""
        self._now = max((file.last_used for file in self.tree.files()), default=0) + 1
        self._touched = dict[StoredFile, None]()
        self._evict_for(0, self._now)

    @property
    def is_busy(self) -> bool:
        """Whether only urgent writes should be added."""
        self.notice_written()
        return 2 * self.queue.waiting_bytes > self.queue.max_waiting_bytes

    def _report(self, problem: str) -> None:
        """Logs the first problem as a warning, later ones for debugging."""
        logger.log(logging.DEBUG if self._has_warned else logging.WARNING, "disk cache: %s", problem)
        self._has_warned = True

    # ------------------------------------------------------------------------------------------ space and recency

    def _lose(self, file: StoredFile, fault: DiskFault) -> None:
        self._report(f"a file cannot be read, what it held is evaluated again: {fault}")
        self._drop([file])

    def _drop(self, files: Iterable[StoredFile]) -> None:
        """Deletes files, after all earlier writes."""
        gone = [file for file in files if not file.is_gone]
        for file in gone:
            file.is_gone = True
            self._touched.pop(file, None)
        self.num_gone += len(gone)
        if gone:
            self.tree.prune(gone)
            self.queue.change(partial(self.store.delete, gone))

    def _evict_for(self, num_bytes: int, newest: int) -> bool:
        """Evicts the least recently used so that `num_bytes` fit; files used at `newest` or later stay.

        Returns False, deleting nothing, if that is impossible.
        """
        excess = self.tree.num_bytes + num_bytes - self.budget_bytes
        if excess <= 0:
            return True
        spare = int(self.budget_bytes * (1 - _LOW_WATERMARK))
        victims = self.tree.victims(excess, spare, newest)
        if sum(file.num_bytes for file in victims) < excess:
            return False
        for name in dict.fromkeys(file.namespace for file in victims):
            freed = [file.num_bytes for file in victims if file.namespace == name]
            self.journal.record(Happening.DELETED, name, files=len(freed), bytes=sum(freed))
        self._drop(victims)
        return True

    def ticks(self, count: int) -> list[int]:
        """`count` new ticks, the latest first."""
        self._now += count
        return list(range(self._now, self._now - count, -1))

    def touch(self, place: DiskPlace, stop: int, used_at: int | None = None) -> int:
        """Records a use, at `used_at` or now, of files that restore at `stop`; returns the tick."""
        used_at = used_at if used_at is not None else self.ticks(1)[0]
        for file in self.tree.on_path(place, stop):
            if file.last_used < used_at:
                file.last_used = used_at
                self._touched[file] = None
        return used_at

    def _save_recency(self) -> None:
        touched, self._touched = self._touched, {}
        if touched:
            self.queue.change(partial(self.store.touch, touched))

    # ------------------------------------------------------------------------------------------------- writing

    def notice_written(self) -> None:
        """Updates files whose writes have ended."""
        for file, receipt in self.queue.ended():
            num_bytes = receipt.num_bytes if receipt is not None else 0
            self.write_budget.correct(num_bytes - file.num_bytes)
            if receipt is None:
                self._drop([file])
                continue
            if not file.is_gone:
                file.receipt = receipt
                self.tree.resize(file, num_bytes - file.num_bytes)
            fields = {"kind": "snapshot" if file.is_snapshot else "rows", "tokens": file.stop - file.start}
            self.journal.record(Happening.WRITTEN, file.namespace, **fields, bytes=num_bytes)

    def write_span(self, target: Target, segment: Segment) -> None:
        """Begins to write what disk lacks of a segment that stops where `target` does.

        Waits for a full queue. Nothing if the disk is too slow, a budget is used up, or the disk fails. Borrows the
        arrays. Evicts nothing used after `target.used_at`.
        """
        place, used_at = self._use(target)
        start, stop = segment.start, len(target.tokens)
        if missing := list(gaps(self.tree.covered(place, start, stop), start, stop)):
            image = self.store.image(segment, None)
            new = [self._new_file(target.namespace, *gap, image, used_at) for gap in missing]
            self._write(target.tokens, image, new, place)

    def write_snapshot(self, target: Target, window: Segment | None, recurrent: RecurrentState | None) -> None:
        """As `write_span`, a snapshot valid right after `target`, where the window ends; not unstorable state.

        Replaces a snapshot that holds less.
        """
        place, used_at = self._use(target)
        stop = len(target.tokens)
        start = window.start if window is not None else stop
        stored = self.tree.snapshot(place, stop)
        if stored is not None and stored.start <= start and (recurrent is None or stored.has_recurrent):
            return
        try:
            image = self.store.image(window, recurrent)
        except Unstorable as error:
            logger.debug("not kept on disk: %s", error)
            return
        new = self._new_file(target.namespace, start, stop, image, used_at)
        new.is_snapshot, new.has_recurrent = True, recurrent is not None
        if self._write(target.tokens, image, [new], place) and stored is not None:
            self._drop([stored])

    def _use(self, target: Target) -> tuple[DiskPlace, int]:
        self.notice_written()
        near = START if target.near.is_gone else target.near
        place = self.tree.follow(target.namespace, near, target.tokens[near.length :])
        return place, self.touch(place, len(target.tokens), target.used_at)

    def _new_file(self, namespace: str, start: int, stop: int, image: StateImage, used_at: int) -> StoredFile:
        num_bytes = image.bytes_of(stop - start) + _HEADER_BYTES
        return StoredFile(namespace, start, stop, num_bytes, last_used=used_at)

    def _write(self, tokens: TokenArray, image: StateImage, new: list[StoredFile], place: DiskPlace) -> bool:
        num_bytes = sum(file.num_bytes for file in new)
        may_write = self.queue.accepts(image.num_bytes) and self.write_budget.allows(num_bytes)
        if not may_write or not self._evict_for(num_bytes, new[0].last_used):
            return False
        day = self.write_budget.count(num_bytes)
        for file in new:
            self.tree.add(tokens[: file.stop], file, place)
            # All files borrow the same arrays, so the memory is charged to the last one.
            waiting_bytes = image.num_bytes if file is new[-1] else 0
            self.queue.add(waiting_bytes, file, image, tokens[: file.stop], day)
        self._save_recency()
        return True

    def clear(self, namespace: str | None = None) -> None:
        """Deletes all, or one namespace, and overwrites its indexed tokens."""
        self.notice_written()
        self._drop(self.tree.files(namespace))
        self.queue.change(self.store.scrub)

    # ---------------------------------------------------------------------------------------------------- ending

    def flush(self, timeout_seconds: float | None) -> bool:
        """Waits until all is on disk; False on timeout."""
        self._save_recency()
        is_all_written = self.queue.wait(timeout_seconds)
        self.notice_written()
        return is_all_written

    def close(self) -> None:
        """Finishes the current file, drops waiting ones (`flush` keeps them), unlocks the folder."""
        self.queue.cancel()
        self.flush(None)
        self.queue.close()
        self.reader.close()
        self.store.close()
