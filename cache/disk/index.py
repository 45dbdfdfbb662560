"""The index of the disk tier: which files exist, their content and last use, and today's writes.

One SQLite database in write-ahead mode. A row is added after its file is complete, removed before the file is
deleted. Functions raise sqlite3.Error, or UnicodeDecodeError from a message that quotes a damaged page.
"""

import contextlib
import math
import sqlite3
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from cache.disk.files import Receipt
from cache.disk.tree import FileRow, StoredFile

DAY_SECONDS = 86_400.0


@dataclass(frozen=True)
class WriteDay:
    """The day as indexed, from which a restart continues."""

    saved_at: float
    """Wall clock, seconds since 1970."""
    age_seconds: float
    num_bytes: int


@dataclass(frozen=True)
class DiskWrites:
    """All namespaces' bytes written today, for people."""

    today_bytes: int
    budget_bytes: int | None


class WriteBudget:
    """Counts the current day's bytes against a limit. Worker thread only.

    A day is 24 hours from its first write, by a clock that never goes back; the wall clock tells only for how long no
    process ran.
    """

    def __init__(
        self,
        bytes_per_day: int | None,
        now: Callable[[], float],
        elapsed: Callable[[], float],
        saved: WriteDay | None = None,
    ) -> None:
        """`now` is the wall clock, `elapsed` never goes back; `saved` is the day of an earlier process."""
        self._bytes_per_day = bytes_per_day
        self._now = now
        self._elapsed = elapsed
        self._started: float | None = None
        """None before the day's first write."""
        self._num_bytes = 0
        if saved is not None:
            downtime = max(0.0, now() - saved.saved_at)
            self._started, self._num_bytes = elapsed() - saved.age_seconds - downtime, saved.num_bytes

    @property
    def written_bytes(self) -> int:
        if self._started is not None and self._elapsed() - self._started >= DAY_SECONDS:
            self._started, self._num_bytes = None, 0
        return self._num_bytes

    def allows(self, num_bytes: int) -> bool:
        """Whether `num_bytes` more may be written today."""
        return self._bytes_per_day is None or self.written_bytes + num_bytes <= self._bytes_per_day

    def count(self, num_bytes: int) -> WriteDay:
        """Counts bytes for the writer; returns the day, to save with them."""
        total = self.written_bytes + num_bytes
        if self._started is None:
            self._started = self._elapsed()
        self._num_bytes = total
        return WriteDay(self._now(), self._elapsed() - self._started, total)

    def writes(self) -> DiskWrites:
        """The current day's bytes and their limit."""
        return DiskWrites(self.written_bytes, self._bytes_per_day)

    def correct(self, difference_bytes: int) -> None:
        """Adds the difference between written and counted bytes."""
        self._num_bytes = max(0, self.written_bytes + difference_bytes)


FORMAT = 1
"""State of other versions is deleted."""

_ENCODING = ("utf-8", "surrogatepass")
"""JSON may name a namespace with half a surrogate pair."""

DATABASE = "index.sqlite3"
_TABLES = """
    CREATE TABLE IF NOT EXISTS state (fingerprint TEXT NOT NULL);
    DROP TABLE IF EXISTS written;
    CREATE TABLE IF NOT EXISTS write_day (
        saved_at REAL NOT NULL, age_seconds REAL NOT NULL, num_bytes INTEGER NOT NULL
    );
    CREATE TABLE IF NOT EXISTS files (
        name TEXT PRIMARY KEY, is_snapshot INTEGER NOT NULL, has_points INTEGER NOT NULL,
        namespace BLOB NOT NULL, start INTEGER NOT NULL, stop INTEGER NOT NULL,
        parent_key BLOB NOT NULL, key BLOB NOT NULL, tokens BLOB NOT NULL,
        num_bytes INTEGER NOT NULL, header_bytes INTEGER NOT NULL, checksums_bytes INTEGER NOT NULL,
        digest BLOB NOT NULL, last_used INTEGER NOT NULL
    ) WITHOUT ROWID;
"""
_COLUMNS = (
    "name, is_snapshot, has_points, namespace, start, stop, parent_key, key, tokens, "
    "num_bytes, header_bytes, checksums_bytes, digest, last_used"
)


def prepare(database: sqlite3.Connection, fingerprint: str) -> int:
    """Makes missing tables; deletes another fingerprint's rows, and returns how many. Refuses another format."""
    num_foreign = 0
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version not in (0, FORMAT):
        raise sqlite3.DatabaseError(f"the index has format {version}, this version writes {FORMAT}")
    with database:
        database.execute("BEGIN")
        for statement in filter(str.strip, _TABLES.split(";")):
            database.execute(statement)
        if database.execute("SELECT fingerprint FROM state").fetchall() != [(fingerprint,)]:
            (num_foreign,) = database.execute("SELECT COUNT(*) FROM files").fetchone()
            database.execute("DELETE FROM files")
            database.execute("DELETE FROM state")
            database.execute("INSERT INTO state VALUES (?)", (fingerprint,))
        database.execute(f"PRAGMA user_version = {FORMAT}")
    return num_foreign


def read_fingerprint(database: sqlite3.Connection) -> str | None:
    """The fingerprint that all rows share, if there are rows."""
    (has_table,) = database.execute("SELECT COUNT(*) FROM sqlite_master WHERE name = 'state'").fetchone()
    row = database.execute("SELECT fingerprint FROM state").fetchone() if has_table else None
    return str(row[0]) if row is not None else None


def read_rows(database: sqlite3.Connection) -> list[FileRow]:
    """All rows with valid columns."""
    rows = []
    for values in database.execute(f"SELECT {_COLUMNS} FROM files"):
        # A damaged database may hold anything in any column.
        with contextlib.suppress(TypeError, ValueError):
            rows.append(_row(values))
    return rows


def read_write_day(database: sqlite3.Connection) -> WriteDay | None:
    """The day saved last, if valid."""
    row = database.execute("SELECT saved_at, age_seconds, num_bytes FROM write_day").fetchone()
    if row is None:
        return None
    saved_at, age_seconds, num_bytes = row
    are_times = all(isinstance(value, float) and math.isfinite(value) for value in (saved_at, age_seconds))
    is_valid = are_times and isinstance(num_bytes, int) and age_seconds >= 0 and num_bytes >= 0
    return WriteDay(saved_at, age_seconds, num_bytes) if is_valid else None


def add(database: sqlite3.Connection, row: FileRow, receipt: Receipt, day: WriteDay) -> None:
    """Adds a complete file's row; saves the day."""
    file = row.file
    values = (
        *(file.name, file.is_snapshot, file.has_recurrent),
        *(file.namespace.encode(*_ENCODING), file.start, file.stop),
        *(row.parent_key, row.key, row.tokens.tobytes(), *astuple(receipt), file.last_used),
    )
    with database:
        database.execute(f"INSERT OR REPLACE INTO files VALUES ({', '.join('?' * len(values))})", values)
        database.execute("DELETE FROM write_day")
        database.execute("INSERT INTO write_day VALUES (?, ?, ?)", astuple(day))


def _row(columns: tuple[Any, ...]) -> FileRow:
    """Raises TypeError or ValueError for invalid columns."""
    name, is_snapshot, has_points, namespace, start, stop, parent_key, key, tokens, *sizes, digest, last_used = (
        columns
    )
    expected = {
        str: (name,),
        bytes: (namespace, parent_key, key, tokens, digest),
        int: (start, stop, last_used, *sizes),
    }
    if not all(isinstance(value, kind) for kind, values in expected.items() for value in values):
        raise TypeError("a column holds something of another type")
    edge = np.frombuffer(tokens, np.int32)
    if not 0 <= start <= stop or len(edge) != (0 if is_snapshot else stop - start):
        raise ValueError("tokens and offsets disagree")
    file = StoredFile(
        *(namespace.decode(*_ENCODING), start, stop, sizes[0], bool(is_snapshot), bool(has_points)),
        *(name, Receipt(sizes[0], sizes[1], sizes[2], digest), last_used),
    )
    return FileRow(file, parent_key, key, edge)
