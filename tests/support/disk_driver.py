"""State for the disk tier that says of itself which tokens it is of, and a file system that fails when told to.

Every number in a row depends on all tokens up to it, its component and its head: rows that were read back are
compared with what the tokens would have given, so state of other tokens cannot pass for right.
"""

import errno
import io
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np

from cache.disk.files import FileSystem, as_owner
from cache.disk.folder import DiskStore
from cache.disk.tier import DiskTier, Prefetch
from cache.disk.tree import START, FilePart, StoredFile, Target, gaps, written_stop
from cache.layers.state import RecurrentState, Segment
from cache.types import TokenArray

# isort: split
from mlx_lm.models.cache import ArraysCache

NUM_COMPONENTS, NUM_HEADS, WIDTH = 3, 2, 4
WINDOW = 8
BUDGET_BYTES = 1 << 30


@dataclass(frozen=True, eq=False)
class FileSpan:
    """Rows of the tokens `[start, stop)` in files."""

    start: int
    stop: int
    parts: list[FilePart]

    @property
    def is_written(self) -> bool:
        return written_stop(self.parts, self.start) == self.stop

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def clipped(self, start: int, stop: int) -> "FileSpan":
        """The part in `[start, stop)`."""
        parts = (FilePart(part.file, max(start, part.start), min(stop, part.stop)) for part in self.parts)
        return FileSpan(start, stop, [part for part in parts if part.start < part.stop])


def tokens_of(values: Iterable[int]) -> TokenArray:
    return np.array(list(values), np.int32)


def _sums(tokens: TokenArray) -> np.ndarray[Any, Any]:
    """Returns for each token a number that depends on it and on all before it."""
    sums, total = [], 1
    for token in tokens.tolist():
        total = (total * 31 + token + 1) % 65521
        sums.append(total)
    return np.array(sums, np.float32)


def rows_of(tokens: TokenArray, start: int, num_components: int = NUM_COMPONENTS) -> np.ndarray[Any, Any]:
    """Returns [num_components, NUM_HEADS, num_tokens, WIDTH] numbers for the tokens from `start` on."""
    offsets = np.arange(num_components * NUM_HEADS * WIDTH, dtype=np.float32).reshape(
        num_components, NUM_HEADS, 1, WIDTH
    )
    return _sums(tokens)[start:][None, None, :, None] + offsets * 65536


def segment_of(tokens: TokenArray, start: int, num_components: int = NUM_COMPONENTS) -> Segment:
    """Returns the segment of `[start, len(tokens))`, in two packs."""
    rows = rows_of(tokens, start, num_components)
    split = max(1, num_components // 2)
    packs = [(tuple(range(split)), rows[:split]), (tuple(range(split, num_components)), rows[split:])]
    return Segment(start, len(tokens), [(indices, mx.array(part)) for indices, part in packs if indices])


def window_of(tokens: TokenArray) -> Segment:
    """Returns the last rows before the end of some tokens."""
    return segment_of(tokens, max(0, len(tokens) - WINDOW), 2)


def recurrent_of(tokens: TokenArray) -> RecurrentState:
    """Returns recurrent state of a sequence."""
    cache = ArraysCache(2)
    cache[0] = mx.array(_sums(tokens)[-1:])
    cache[1] = mx.array(_sums(tokens)[-3:][None])
    return RecurrentState([cache])


def assert_rows(segment: Segment, tokens: TokenArray, num_components: int = NUM_COMPONENTS) -> None:
    """Asserts that a segment stands for the tokens `[start, stop)` of a sequence."""
    expected = rows_of(tokens[: segment.stop], segment.start, num_components)
    for index in range(num_components):
        assert np.array_equal(np.array(segment.component(index))[0], expected[index]), "rows of other tokens"


def assert_span(tier: DiskTier, span: FileSpan, tokens: TokenArray) -> None:
    """Loads a span and asserts that it stands for its part of some tokens."""
    assert_rows(tier.reader.load_rows(span.parts), tokens)


def assert_recurrent(state: RecurrentState, tokens: TokenArray) -> None:
    """Asserts that recurrent state is of exactly these tokens."""
    (actual,), (expected,) = state.caches, recurrent_of(tokens).caches
    assert [np.array(array).tolist() for array in actual.cache] == [
        np.array(array).tolist() for array in expected.cache
    ]


def assert_snapshot(tier: DiskTier, snapshot: StoredFile, tokens: TokenArray) -> None:
    """Loads a snapshot and asserts that it is the one right after some tokens."""
    window, points = tier.reader.load(snapshot.whole)
    assert snapshot.stop == len(tokens)
    if window is not None:
        assert window.stop == len(tokens)
        assert_rows(window, tokens, 2)
    if points is not None:
        assert_recurrent(points, tokens)


def write(tier: DiskTier, tokens: TokenArray, start: int = 0, namespace: str = "") -> FileSpan | None:
    """Writes the span of `[start, len(tokens))`; None if that is refused."""
    tier.write_span(Target(namespace, tokens), segment_of(tokens, start))
    span = _covered(tier, tokens, start, namespace)
    return None if list(gaps(span.parts, span.start, span.stop)) else span


def _covered(tier: DiskTier, tokens: TokenArray, start: int, namespace: str) -> FileSpan:
    place = tier.tree.follow(namespace, START, tokens)
    return FileSpan(start, len(tokens), tier.tree.covered(place, start, len(tokens)))


def snap(tier: DiskTier, tokens: TokenArray, namespace: str = "") -> StoredFile | None:
    """Writes the snapshot after some tokens; None if that is refused."""
    return write_snapshot(tier, tokens, window_of(tokens), recurrent_of(tokens), namespace)


def write_snapshot(
    tier: DiskTier, tokens: TokenArray, window: Segment | None, recurrent: RecurrentState | None, namespace: str = ""
) -> StoredFile | None:
    """Writes a snapshot; returns the one that stands after the tokens then, if any."""
    tier.write_snapshot(Target(namespace, tokens), window, recurrent)
    return tier.tree.snapshot(tier.tree.follow(namespace, START, tokens), len(tokens))


def find_span(tier: DiskTier, tokens: TokenArray, start: int = 0, namespace: str = "") -> FileSpan | None:
    """Returns the state of the tokens `[start, len(tokens))` if all of it is on disk."""
    span = _covered(tier, tokens, start, namespace)
    return span if span.is_written else None


@dataclass(frozen=True, eq=False)
class Entry:
    """State on disk of one edge, as it was when it was listed."""

    namespace: str
    parent: "Entry | None"
    start: int
    stop: int
    tokens: TokenArray
    span: FileSpan
    snapshot: StoredFile | None


def entries(tier: DiskTier) -> list[Entry]:
    """Returns every edge of every namespace that is on disk, parents first."""
    entries_by_key: dict[Any, Entry] = {}
    tier.notice_written()
    for name in tier.tree.namespaces():
        for node in tier.tree.listing(name, 1 << 30)[0]:
            above = entries_by_key.get(node.parent)
            assert node.rows is not None
            span = FileSpan(node.start, node.stop, [FilePart(node.rows, node.start, node.stop)])
            entries_by_key[node] = Entry(name, above, node.start, node.stop, node.tokens, span, node.snapshot)
    return list(entries_by_key.values())


def find_snapshot(tier: DiskTier, tokens: TokenArray, namespace: str = "") -> StoredFile | None:
    """Returns the snapshot right after some tokens if it is on disk."""
    snapshots = tier.tree.snapshots(tier.tree.follow(namespace, START, tokens))
    at_end = (snapshot for snapshot in snapshots if snapshot.stop == len(tokens) and snapshot.is_written)
    return next(at_end, None)


def open_tier(folder: Path, **options: Any) -> DiskTier:
    """Opens a tier that does not wait for the disk, which would take most of a test's time."""
    options = {"budget_bytes": BUDGET_BYTES, "fingerprint": "model", "files": CountingFiles(), **options}
    store = DiskStore(folder, options.pop("fingerprint"), options.pop("files"))
    return DiskTier(store, **options)


def wait_until_read(ahead: Prefetch) -> None:
    """Returns once all that is read ahead is in memory."""
    deadline = time.monotonic() + 120
    while not ahead.is_done:
        assert time.monotonic() < deadline, "it was not read in time"
        time.sleep(0.001)


def close_if_open(tier: DiskTier) -> None:
    """Closes a tier unless the test has."""
    if not tier.store._lock.closed:
        tier.close()


def restorable(
    tier: DiskTier, check: Callable[[TokenArray, FileSpan, StoredFile | None], None]
) -> set[tuple[str, bytes]]:
    """Calls `check` with all tokens up to each entry's stop and its state; returns namespaces and these tokens."""
    prefixes: dict[Any, TokenArray] = {None: tokens_of(())}
    offsets = set()
    for entry in entries(tier):
        tokens = np.concatenate([prefixes[entry.parent], entry.tokens])
        assert (len(tokens), entry.span.start, entry.span.stop) == (entry.stop, entry.start, entry.stop)
        prefixes[entry] = tokens
        check(tokens, entry.span, entry.snapshot)
        offsets.add((entry.namespace, tokens.tobytes()))
    return offsets


def assert_all_right(tier: DiskTier) -> set[tuple[str, bytes]]:
    """Loads every entry and asserts that each is of its tokens; returns what `restorable` does."""

    def check(tokens: TokenArray, span: FileSpan, snapshot: StoredFile | None) -> None:
        assert_span(tier, span, tokens)
        if snapshot is not None:
            assert_snapshot(tier, snapshot, tokens)

    tier.tree.check()
    return restorable(tier, check)


def stored_names(folder: Path) -> set[str]:
    """Returns the names of the files with state, temporary ones included."""
    return {path.name for path in folder.iterdir() if ".safetensors" in path.name and not path.is_dir()}


class CountingFiles(FileSystem):
    """Counts operations by name, database ones included, and waits for none; subclasses do something before each."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.read_bytes = 0

    def before(self, operation: str) -> None:
        self.counts[operation] = self.counts.get(operation, 0) + 1

    def lock(self, path: Path) -> BinaryIO:
        self.before("lock")
        return super().lock(path)

    def make_folder(self, path: Path) -> None:
        self.before("make_folder")
        super().make_folder(path)

    def create(self, path: Path) -> BinaryIO:
        self.before("create")
        return io.BufferedWriter(_WatchedFile(self, path, "wb"))

    def open(self, path: Path) -> BinaryIO:
        self.before("open")
        return io.BufferedReader(_WatchedFile(self, path, "rb"))

    def sync(self, file: BinaryIO) -> None:
        file.flush()
        self.before("sync")

    def sync_folder(self, path: Path) -> None:
        self.before("sync")

    def rename(self, source: Path, target: Path) -> None:
        self.before("rename")
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self.before("remove")
        super().remove(path)

    def sizes(self, folder: Path) -> dict[str, int]:
        self.before("sizes")
        return super().sizes(folder)

    def connect(self, path: Path) -> sqlite3.Connection:
        self.before_database("connect")
        database = sqlite3.connect(path, check_same_thread=False, factory=_WatchedConnection)
        database.files = self
        sqlite3.Connection.execute(database, "PRAGMA journal_mode = WAL").fetchone()
        sqlite3.Connection.execute(database, "PRAGMA synchronous = OFF")
        sqlite3.Connection.execute(database, "PRAGMA secure_delete = ON")
        return database

    def before_database(self, operation: str) -> None:
        try:
            self.before(operation)
        except OSError as error:
            failure = sqlite3.OperationalError(str(error))
            failure.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise failure from error


class _WatchedFile(io.FileIO):
    def __init__(self, files: CountingFiles, path: Path, mode: str) -> None:
        self.files = files
        super().__init__(path, mode, opener=as_owner)

    def write(self, data: Any) -> int:
        # In two steps, so that a failure leaves half of it behind.
        if len(data) > 1:
            return super().write(data[: len(data) // 2])
        self.files.before("write")
        return super().write(data)

    def readinto(self, buffer: Any) -> int:
        self.files.before("read")
        num_bytes = super().readinto(buffer)
        self.files.read_bytes += num_bytes
        return num_bytes

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.files.before("seek")
        return super().seek(offset, whence)


class _WatchedConnection(sqlite3.Connection):
    files: CountingFiles

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        self.files.before_database("execute")
        return super().execute(*arguments)

    def executemany(self, *arguments: Any) -> sqlite3.Cursor:
        self.files.before_database("execute")
        return super().executemany(*arguments)

    def __exit__(self, *error: Any) -> Any:
        if error[0] is None:
            try:
                self.files.before_database("commit")
            except sqlite3.Error:
                self.rollback()
                raise
        return super().__exit__(*error)


class FailingFiles(CountingFiles):
    """Fails at its n-th operation, or from then on."""

    def __init__(self, fails_at: int, *, forever: bool = False, code: int = errno.ENOSPC) -> None:
        super().__init__()
        self.fails_at = fails_at
        self.forever = forever
        self.code = code
        self.num_operations = 0
        self.has_failed = False

    def before(self, operation: str) -> None:
        super().before(operation)
        self.num_operations += 1
        if self.num_operations == self.fails_at or (self.forever and self.num_operations > self.fails_at):
            self.has_failed = True
            raise OSError(self.code, f"{os.strerror(self.code)} ({operation})")


class KillingFiles(CountingFiles):
    """Ends the process, as `kill -9` does, at its n-th operation."""

    def __init__(self, dies_at: int) -> None:
        super().__init__()
        self.dies_at = dies_at
        self.num_operations = 0

    def before(self, operation: str) -> None:
        self.num_operations += 1
        if self.num_operations == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)


def conversation(random: np.random.Generator, known: Sequence[TokenArray], max_tokens: int = 40) -> TokenArray:
    """Returns a prefix of something known, or nothing, with some new tokens of a small alphabet."""
    head = known[int(random.integers(len(known)))] if known and random.random() < 0.8 else tokens_of(())
    head = head[: random.integers(len(head) + 1)]
    return np.concatenate([head, random.integers(0, 3, random.integers(1, max_tokens), dtype=np.int32)])


def touch(tier: DiskTier, tokens: TokenArray, namespace: str = "") -> None:
    """Says that the state after some tokens was used now."""
    tier.touch(tier.tree.follow(namespace, START, tokens), len(tokens))
