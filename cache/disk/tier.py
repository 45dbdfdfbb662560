"""The disk tier: state of past tokens that outlives memory and the process. Worker thread only.

A thread of the tier writes each token's state at most once: files are found by tokens, however edges were cut. A
`FileSpan` or `StoredFile` is loadable once it `is_written`; a file `is_gone` after eviction, damage or clearing. A
failure costs the reuse of state and nothing else: writing pauses, unreadable state is evaluated again. State of other
weights, formats or machines is never read. Files hold people's conversations: only their owner can read them.
"""

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial, reduce

from cache.budget import CacheEvent, DiskFault, Happening, Journal
from cache.disk.codec import StateImage, Unstorable
from cache.disk.folder import DiskStore
from cache.disk.index import WriteBudget
from cache.disk.io import FileReader, WriteQueue
from cache.disk.tree import DiskPlace, FileSpan, StoredFile, Target
from cache.layers.state import RecurrentState, Segment
from cache.types import TokenArray

logger = logging.getLogger(__name__)

_LOW_WATERMARK = 0.95
"""Eviction stops at this fraction, or after `tree.MAX_SPARE_FILES`."""


_HEADER_BYTES = 4096

elapsed_seconds = partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
"""Seconds since a fixed moment, sleep included; macOS and Linux name the clock differently."""


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
        self._store = store
        self.queue = WriteQueue(store, max_waiting_bytes=max_in_flight_bytes, elapsed=elapsed, report=self._report)
        self.reader = FileReader(store, max_ahead_bytes=max_in_flight_bytes, lose=self._lose)
        self.budget_bytes = budget_bytes
        self.num_gone = 0
        """Files evicted, damaged, cleared or replaced since the start."""
        self._now = max((file.last_used for file in self.tree.files()), default=0) + 1
        self._touched: set[StoredFile] = set()
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
            self._touched.discard(file)
        self.num_gone += len(gone)
        if gone:
            self.tree.prune(gone)
            self.queue.change(lambda store: store.delete(gone))

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
            fields = {"files": len(freed), "bytes": sum(freed)}
            self.journal.record(CacheEvent(Happening.DELETED, name, fields))
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
                self._touched.add(file)
        return used_at

    def _save_recency(self) -> None:
        touched, self._touched = self._touched, set()
        if touched:
            self.queue.change(lambda store: store.touch(touched))

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
            kind = "snapshot" if file.is_snapshot else "rows"
            fields = {"kind": kind, "tokens": file.stop - file.start, "bytes": num_bytes}
            self.journal.record(CacheEvent(Happening.WRITTEN, file.namespace, fields))

    def write_span(self, target: Target, segment: Segment) -> FileSpan | None:
        """Writes a segment that stops where `target` does.

        Returns at once a span, loadable once it `is_written`; None if too much waits, a budget is used up, or the
        disk fails. Writes nothing twice. Borrows the arrays. Evicts nothing used after `target.used_at`.
        """
        place, used_at = self._use(target)
        held = self.tree.covered(place, segment.start, len(target.tokens))
        gaps = list(held.missing())
        if not gaps:
            return held
        image = self._store.image(segment, None)
        new = [self._new_file(target.namespace, *gap, image, used_at) for gap in gaps]
        return reduce(FileSpan.filled, new, held) if self._write(target.tokens, image, new, place) else None

    def write_snapshot(
        self, target: Target, window: Segment | None, recurrent: RecurrentState | None
    ) -> StoredFile | None:
        """Writes a snapshot valid right after `target`, where the window ends.

        Returns like `write_span`; None also for unstorable state. Replaces a snapshot that holds less.
        """
        place, used_at = self._use(target)
        stop = len(target.tokens)
        start = window.start if window is not None else stop
        held = self.tree.snapshot(place, stop)
        if held is not None and held.start <= start and (recurrent is None or held.has_recurrent):
            return held
        try:
            image = self._store.image(window, recurrent)
        except Unstorable as error:
            logger.debug("not kept on disk: %s", error)
            return None
        new = self._new_file(target.namespace, start, stop, image, used_at)
        new.is_snapshot, new.has_recurrent = True, recurrent is not None
        if not self._write(target.tokens, image, [new], place):
            return None
        self._drop([held] if held is not None else [])
        return new

    def _use(self, target: Target) -> tuple[DiskPlace, int]:
        self.notice_written()
        place = self.tree.locate(target)
        return place, self.touch(place, len(target.tokens), target.used_at)

    def _new_file(self, namespace: str, start: int, stop: int, image: StateImage, used_at: int) -> StoredFile:
        num_bytes = image.bytes_of(stop - start) + _HEADER_BYTES
        return StoredFile(namespace, start, stop, num_bytes, last_used=used_at)

    def _write(self, tokens: TokenArray, image: StateImage, new: list[StoredFile], place: DiskPlace) -> bool:
        num_bytes = sum(file.num_bytes for file in new)
        if not self.queue.accepts(image.num_bytes) or not self.write_budget.allows(num_bytes):
            return False
        if not self._evict_for(num_bytes, new[0].last_used):
            return False
        day = self.write_budget.count(num_bytes)
        tokens = tokens.copy()
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
        self.queue.change(lambda store: store.scrub())

    # ---------------------------------------------------------------------------------------------------- ending

    def flush(self, timeout_seconds: float) -> bool:
        """Waits until all is on disk; False on timeout."""
        self._save_recency()
        is_all_written = self.queue.wait(timeout_seconds)
        self.notice_written()
        return is_all_written

    def close(self) -> None:
        """Finishes the current file, drops waiting ones (`flush` keeps them), unlocks the folder."""
        self._save_recency()
        self.queue.close()
        self.notice_written()
        self.reader.close()
        self._store.close()

    def check(self) -> None:
        """Asserts the invariants. For tests."""
        self.tree.check()
