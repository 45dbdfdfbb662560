"""The disk tier: state of past tokens that outlives memory and the process.

What is handed to `write_span` and `write_snapshot` is written by a thread of the tier's own, each token's state at
most once: the tier finds by tokens what files hold already, however the edges were cut when it was written. A
`FileSpan` or `FileSnapshot` stands for state on disk. It can be loaded once it `is_written`, and it may be `is_gone`
later, because it was evicted, damaged or cleared.

A failure here costs the reuse of some state and nothing else. A write that fails pauses writing, with one warning in
the log; state that cannot be read raises DiskFault, and is evaluated again. State of other weights, another format or
another machine's folder is never read. Files hold people's conversations: only their owner can read them, and their
names reveal no tokens.

`DiskTier` decides what is written. Its parts: `tree` (which files hold which tokens), `space` (recency and eviction),
`write_queue` and `write_budget` (when it is written), `reader` (loading), `listing` (for people), `folder` (files and
index). All methods belong to the worker thread.
"""

import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial, reduce
from pathlib import Path

from cache.disk.codec import StateImage, Unstorable
from cache.disk.files import FileSystem
from cache.disk.folder import DiskStore, WriteOrder, is_damage
from cache.disk.index import FileRow
from cache.disk.listing import DiskContents
from cache.disk.problem_log import ProblemLog
from cache.disk.read_ahead import Prefetch
from cache.disk.reader import FileReader
from cache.disk.space import DiskSpace
from cache.disk.spans import FileLoader, FileSnapshot, FileSpan, FileState, StoredFile
from cache.disk.tree import START, DiskPlace, DiskTree
from cache.disk.write_budget import WriteBudget
from cache.disk.write_queue import WriteQueue
from cache.errors import FolderUnusable
from cache.journal import Journal
from cache.layers.points import PointState
from cache.layers.segments import Segment
from cache.tokens import TokenArray

logger = logging.getLogger(__name__)

_HEADER_BYTES = 4096
"""Estimated bytes that a file takes besides its data."""

_CLOCK_WITH_SLEEP = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""A clock that never goes back and counts the time that the machine sleeps: macOS and Linux name it differently."""


def elapsed_seconds() -> float:
    """Returns the seconds since some fixed moment, the machine's sleep included."""
    return time.clock_gettime(_CLOCK_WITH_SLEEP)


class DiskTier:
    """Immutable state on disk. Worker thread only; it writes and reads ahead in threads of its own."""

    def __init__(
        self,
        store: DiskStore | None,
        *,
        budget_bytes: int,
        write_budget_bytes_per_day: int | None,
        max_in_flight_bytes: int,
        now: Callable[[], float],
        elapsed: Callable[[], float] = elapsed_seconds,
        make_image: Callable[[Segment | None, PointState | None], StateImage] = StateImage,
    ) -> None:
        """See `open`. Without a store the tier stays empty; `make_image` is for a simulation."""
        log = ProblemLog()
        self.journal = Journal()
        self.write_budget = WriteBudget(write_budget_bytes_per_day, now, elapsed)
        self._store = store
        self._make_image = make_image
        self._tree = DiskTree()
        self._queue = WriteQueue(store, max_waiting_bytes=max_in_flight_bytes, elapsed=elapsed, log=log)
        self._space = DiskSpace(self._tree, self._queue, budget_bytes, self.journal)
        self._reader = FileReader(store, max_ahead_bytes=max_in_flight_bytes, drop=self._space.drop, log=log)

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        budget_bytes: int,
        fingerprint: str,
        write_budget_bytes_per_day: int | None = None,
        max_in_flight_bytes: int = 1 << 30,
        files: FileSystem | None = None,
        now: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = elapsed_seconds,
    ) -> "DiskTier":
        """Opens or creates a folder for the state of one model; reads names, sizes and tokens, no state.

        `fingerprint` says what the state depends on: weights, tokenizer, types, library versions. State with another
        one is deleted. At most `write_budget_bytes_per_day` are written in a day, see `write_budget`. At most
        `max_in_flight_bytes`, or one piece of state, wait in memory to be written, and as many are read ahead. `now`
        is the wall clock, `elapsed` one that never goes back.

        Raises DiskInUse while another process has the folder, FolderUnsafe if it is another user's or others could
        write into it, and FolderUnusable if it cannot be used for any other reason.
        """
        make = partial(
            cls,
            budget_bytes=budget_bytes,
            write_budget_bytes_per_day=write_budget_bytes_per_day,
            max_in_flight_bytes=max_in_flight_bytes,
            now=now,
            elapsed=elapsed,
        )
        store = None
        try:
            store = DiskStore.open(files or FileSystem(), folder, fingerprint)
            return _attached(make, store)
        except (OSError, sqlite3.Error, UnicodeDecodeError) as error:
            if store is not None:
                store.close()
            raise FolderUnusable(folder, error) from error

    def _attach(self, store: DiskStore) -> None:
        self._tree.attach(store.rows(), store.hasher, lambda row: _file_of(row, self._reader))
        files = self._tree.files()
        store.keep_only({file.name for file in files})
        self._space.adopt(files)
        self.write_budget.resume(store.write_day())

    @property
    def is_open(self) -> bool:
        """Whether it has a folder; without one it keeps nothing."""
        return self._store is not None

    @property
    def used_bytes(self) -> int:
        """Bytes of all files, those that wait to be written included."""
        return self._space.used_bytes

    @property
    def num_gone(self) -> int:
        """Files deleted since the tier was opened: evicted, damaged, cleared, or replaced by one that holds more."""
        return self._space.num_gone

    @property
    def is_busy(self) -> bool:
        """Whether so much waits to be written that what is not urgent should not be added."""
        self._notice_written()
        return self._queue.is_busy

    # ---------------------------------------------------------------------------------------------- what is there

    @property
    def contents(self) -> DiskContents:
        """Tells what is on disk of each namespace, as of now."""
        self._notice_written()
        return DiskContents(self._tree, self._space)

    def follow(self, namespace: str, place: DiskPlace, tokens: TokenArray) -> DiskPlace:
        """Returns the place where the match of `tokens` ends; they follow `place`, which is `START` or not gone.

        The place answers the questions below until it is gone. Files that are written later may lie beyond it.
        """
        return self._tree.follow(namespace, place, tokens)

    def covered(self, place: DiskPlace, start: int, stop: int) -> FileSpan:
        """Returns what is on disk, or waits to be written, of the tokens `[start, stop)`; it may have gaps."""
        self._notice_written()
        return self._tree.covered(place, start, stop)

    def snapshots(self, place: DiskPlace) -> Iterator[FileSnapshot]:
        """Yields the snapshots on the way to a place, on disk or waiting to be written, the deepest first."""
        self._notice_written()
        return map(FileSnapshot, self._tree.snapshots(place))

    def goes_on(self, place: DiskPlace, num_tokens: int) -> bool:
        """Returns whether a place stands for `num_tokens` tokens, and there is state of tokens behind them."""
        return self._tree.goes_on(place, num_tokens)

    # ------------------------------------------------------------------------------------------------- writing

    def write_span(
        self,
        namespace: str,
        tokens: TokenArray,
        segment: Segment,
        *,
        near: DiskPlace = START,
        used_at: int | None = None,
    ) -> FileSpan | None:
        """Has a segment written that stops at `len(tokens)`; `tokens` are all tokens from the sequence's start.

        Returns at once a span that can be loaded once it `is_written`; None if the segment cannot be taken now,
        because too much waits, the day's or the whole budget is used up, or the disk fails. Tokens whose state is on
        disk already are not written again. Borrows the segment's arrays. `near` is a place on the way to the tokens'
        end, which saves comparing. `used_at` is one of `times_of_use`, by default now; nothing that was used later is
        evicted for it.
        """
        self._notice_written()
        place = self._tree.locate(namespace, tokens, near)
        used_at = self.touch(place, len(tokens), used_at)
        held = self._tree.covered(place, segment.start, len(tokens))
        gaps = list(held.missing())
        if not gaps:
            return held
        image = self._make_image(segment, None)
        new = [StoredFile(self._reader, namespace, *gap, _file_bytes(image, *gap), last_used=used_at) for gap in gaps]
        return reduce(FileSpan.filled, new, held) if self._write(tokens, image, new, place) else None

    def write_snapshot(
        self,
        namespace: str,
        tokens: TokenArray,
        window: Segment | None,
        points: PointState | None,
        *,
        near: DiskPlace = START,
        used_at: int | None = None,
    ) -> FileSnapshot | None:
        """Has a snapshot written that is valid right after `tokens`, where the window's rows end.

        Returns like `write_span`; None also for point state of a class that cannot be stored. A snapshot on disk that
        holds less is replaced.
        """
        self._notice_written()
        place = self._tree.locate(namespace, tokens, near)
        used_at = self.touch(place, len(tokens), used_at)
        start, stop = window.start if window is not None else len(tokens), len(tokens)
        held = self._tree.snapshot(place, stop)
        if held is not None and held.start <= start and (points is None or held.has_points):
            return FileSnapshot(held)
        try:
            image = self._make_image(window, points)
        except Unstorable as error:
            logger.debug("not kept on disk: %s", error)
            return None
        new = StoredFile(self._reader, namespace, start, stop, _file_bytes(image, start, stop), last_used=used_at)
        new.is_snapshot, new.has_points = True, points is not None
        if not self._write(tokens, image, [new], place):
            return None
        self._space.drop([held] if held is not None else [])
        return FileSnapshot(new)

    def _write(self, tokens: TokenArray, image: StateImage, new: list[StoredFile], place: DiskPlace) -> bool:
        """Hands files to the writer if memory, the day's budget and the disk budget allow it."""
        num_bytes = sum(file.num_bytes for file in new)
        if not self._queue.accepts(image.num_bytes) or not self.write_budget.allows(num_bytes):
            return False
        if not self._space.evict_for(num_bytes, new[0].last_used):
            return False
        day = self.write_budget.count(num_bytes)
        tokens = tokens.copy()
        for file in new:
            self._tree.add(tokens[: file.stop], file, place)
            self._space.add(file)
            # All files borrow the same arrays, so their memory waits for the last one.
            waiting_bytes = image.num_bytes if file is new[-1] else 0
            self._queue.add(WriteOrder(file, image, tokens[: file.stop], day), waiting_bytes)
        self._space.save_recency()
        return True

    def _notice_written(self) -> None:
        """Updates the files whose writes have ended since the last call."""
        for file, receipt in self._queue.ended():
            written_bytes = receipt.num_bytes if receipt is not None else 0
            self.write_budget.correct(written_bytes - file.num_bytes)
            if receipt is None:
                self._space.drop([file])
            else:
                self._space.complete(file, receipt)
                num_tokens = file.stop - file.start
                self.journal.written(file.namespace, num_tokens, written_bytes, is_snapshot=file.is_snapshot)

    # ----------------------------------------------------------------------------------------- recency, deletion

    def touch(self, place: DiskPlace, stop: int, used_at: int | None = None) -> int:
        """Records a use, at `used_at` or now, of the files needed to restore at `stop` on the way to a place.

        Returns the time of use.
        """
        return self._space.touch(place, stop, used_at)

    def times_of_use(self, count: int) -> list[int]:
        """Returns `count` new readings of the clock of use, the latest first."""
        return self._space.times_of_use(count)

    def clear(self, namespace: str | None = None) -> None:
        """Deletes everything, or everything of one namespace, and overwrites its tokens in the index's files."""
        self._notice_written()
        self._space.drop(self._tree.files(namespace))
        self._queue.scrub()

    # -------------------------------------------------------------------------------------------------- reading

    def prefetch(self, wanted: Iterable[FileSpan | FileSnapshot]) -> Prefetch:
        """Begins to read state that is on disk, so that its `load` waits for no more than the rest of it.

        What would take more memory than may be in flight is not read ahead.
        """
        return self._reader.prefetch(wanted)

    # ---------------------------------------------------------------------------------------------------- ending

    def flush(self, timeout_seconds: float) -> bool:
        """Waits until everything handed over is on disk; returns False if that takes longer."""
        self._space.save_recency()
        is_all_written = self.wait(timeout_seconds)
        self._notice_written()
        return is_all_written

    def wait(self, timeout_seconds: float) -> bool:
        """Waits as `flush` does, but leaves it to the next call to update the files."""
        return self._queue.wait(timeout_seconds)

    def close(self) -> None:
        """Ends the tier: the file being written is finished, those that wait are not, and the folder is unlocked.

        Call `flush` first to keep them. Afterwards the tier takes nothing and loads nothing.
        """
        self._space.save_recency()
        self._queue.close()
        self._notice_written()
        self._reader.close()
        if self._store is not None:
            self._store.close()
        self._store = None

    def check(self) -> None:
        """Asserts the invariants. For tests."""
        self._tree.check()
        self._space.check()
        self._queue.check()


def _attached(make: Callable[[DiskStore], DiskTier], store: DiskStore) -> DiskTier:
    """Returns a tier with the content of a folder; an empty one, after a warning, if its index is damaged."""
    try:
        tier = make(store)
        tier._attach(store)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if not is_damage(error):
            raise
        logger.warning("disk cache: starting afresh, the index is damaged: %s", error)
        store.start_afresh()
        tier = make(store)
        tier._attach(store)
    return tier


def _file_of(row: FileRow, loader: FileLoader) -> StoredFile:
    """Returns the written file that a row of the index describes."""
    return StoredFile(
        *(loader, row.namespace, row.start, row.stop, row.receipt.num_bytes, row.is_snapshot, row.has_points),
        *(row.name, row.receipt, FileState.WRITTEN, row.last_used),
    )


def _file_bytes(image: StateImage, start: int, stop: int) -> int:
    """Returns about how many bytes a file of the rows `[start, stop)` takes."""
    return image.bytes_of(stop - start) + _HEADER_BYTES
