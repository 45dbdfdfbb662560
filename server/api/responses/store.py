"""Responses and conversations in SQLite, in a file or in memory.

No namespace sees another's. A response holds its own input and output, and its parent's id. Items are kept as JSON
apart from bodies: what is read is neither parsed nor written again. A long file in a data: URL, such as an image, is
kept once for a namespace, as a blob, and goes with the last item that holds it. Beyond the limits a key over its
share of the store loses its least recently used chain or conversation first; what does not fit alone is refused and
costs nothing.

One connection writes to the file, and each thread reads with one of its own: the log written ahead lets them go on
beside a writer, and beside other servers. In memory all share one connection, and hold it for as long as copying
takes. A reserve, a file of bytes without meaning, lets go of space on a full disk, so that something can be deleted
even there. Deleted data is overwritten, or on a full disk given back. For any thread; what cannot be kept raises
ApiError (507), reading raises sqlite3.Error.
"""

import hashlib
import json
import logging
import os
import re
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from models.prompt.tokenize import spend
from server.api.errors import ApiError, Code, wrong
from server.api.responses.output import Item
from server.api.wire import json_text
from server.app.config import ServerConfig

logger = logging.getLogger(__name__)

MAX_RESPONSES: Final = 10_000
MAX_MEMORY_BYTES: Final = 1 << 26
MAX_CHAIN: Final = 10_000
"""Responses of one chain read for a prompt."""
MAX_PAGE_BYTES: Final = 1 << 24
"""A page of items ends early above this."""
ITEM_BYTES: Final = 256
"""What keeping an item or a response takes, besides its JSON."""
Kind: TypeAlias = Literal["response", "conversation"]
StoredRow: TypeAlias = tuple[str, bytes]
"""An item's id and JSON."""


class StoredResponse(NamedTuple):
    """One response to be kept."""

    id: str
    body: dict[str, Any]
    input: Sequence[Item]
    parent: str | None
    session: str
    """The name of the chain."""


class Link(NamedTuple):
    """One response of a chain, with its items and without its body."""

    id: str
    parent: str | None
    session: str
    status: str
    items: Sequence[Item]


@dataclass(frozen=True)
class StoredConversation:
    """A stored conversation, without its items."""

    id: str
    created_at: int
    """Seconds since 1970."""
    metadata: dict[str, str]
    object: Literal["conversation"] = "conversation"

    @property
    def num_bytes(self) -> int:
        return ITEM_BYTES + len(json_text(self.metadata).encode())


class PageWish(NamedTuple):
    """Which items of a list are wanted."""

    limit: int
    is_ascending: bool
    after: str | None = None


class Page(NamedTuple):
    """Some items of a longer list."""

    rows: Sequence[StoredRow]
    has_more: bool


def rows_of(items: Sequence[Item]) -> list[StoredRow]:
    """Items as they are kept."""
    return [(item["id"], json_text(item).encode()) for item in items]


def num_bytes_of(rows: Sequence[StoredRow]) -> int:
    """What rows count for."""
    return sum(ITEM_BYTES + len(item_id) + len(text) for item_id, text in rows)


MIN_BLOB_BYTES: Final = 4096
_FILE: Final = re.compile(rb";base64,([A-Za-z0-9+/]{%d,}={0,2})" % MIN_BLOB_BYTES)
_MARK: Final = re.compile(rb"\0([0-9a-f]{32})")
"""Stands for a blob, by its digest. JSON has no such byte."""


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).hexdigest().encode()


def _cut(rows: Sequence[StoredRow]) -> tuple[list[StoredRow], dict[bytes, bytes]]:
    """Rows with marks in place of files, and the files by their digests."""
    blobs: dict[bytes, bytes] = {}

    def mark(found: re.Match[bytes]) -> bytes:
        digest = _digest(found[1])
        blobs[digest] = found[1]
        return b";base64,\0" + digest

    return [(item_id, _FILE.sub(mark, text)) for item_id, text in rows], blobs


def _whole(database: "_Database", place: int, text: bytes) -> bytes:
    """The JSON of the item at `place`, with its files; raises ApiError (404) for a damaged one."""
    if b"\0" not in text:
        return text
    statement = "SELECT digest, data FROM blob_uses JOIN blobs USING (blob) WHERE place = ?"
    blobs = dict(database.execute(statement, (place,)).fetchall())

    def file(found: re.Match[bytes]) -> bytes:
        data: bytes = blobs.get(found[1], b"")
        if _digest(data) != found[1]:
            why = "an image that is stored here is damaged; send it again, or the conversation without it"
            raise ApiError(Code.RESPONSE_NOT_FOUND, why)
        return data

    return _MARK.sub(file, text)


def holder_of(namespace: str) -> str:
    """The key's part of a namespace: all its salts have one share."""
    return namespace.partition("/")[0]


class Held(NamedTuple):
    """What a chain or conversation takes of the store."""

    name: Any
    holder: str
    sizes: Sequence[int]
    """In the store bytes and responses; a conversation counts as one."""


def choose_evictions(stored: Sequence[Held], kept: Collection[Any], limits: Sequence[int]) -> list[Any] | None:
    """The names to be dropped of what is `stored`, in order of use; None if `kept` cannot stay.

    Whoever has more than an equal share of a limit that is exceeded loses its own: there is always somebody.
    """
    victims: dict[Any, None] = {}
    for measure, limit in enumerate(limits):
        left = [entry for entry in stored if entry.name not in victims]
        sums = Counter[str]()
        for entry in left:
            sums[entry.holder] += entry.sizes[measure]
        total, num_active = sums.total(), len(+sums)
        for name, holder, sizes in left:
            if total > limit and name not in kept and sums[holder] * num_active > limit:
                victims[name] = None
                sums[holder] -= sizes[measure]
                total, num_active = total - sizes[measure], num_active - (not sums[holder])
        if total > limit:
            return None
    return list(victims)


def not_stored(why: str) -> ApiError:
    """The error of what cannot be kept."""
    return ApiError(Code.INSUFFICIENT_STORAGE, f"this cannot be stored: {why}")


FILE_NAME: Final = "responses.sqlite3"
MAX_DISK_BYTES: Final = 1 << 30
RESERVE_BYTES: Final = 4 << 20
_PAGES_PER_STEP: Final = 256
_ROWS_PER_STEP: Final = 100
"""Most items written at once: each step waits for Python's lock, while others wait for the store."""
_MODE_ATTEMPTS: Final = 250
_MODE_SECONDS: Final = 0.02
_VERSION: Final = 3
_WITHOUT_BLOBS: Final = 2
"""The version before, whose items hold their files."""
_TABLES: Final = (
    *("responses", "chains", "conversations", "conversation_items", "items", "threads"),
    *("blobs", "blob_uses"),
)
"""The tables, those of earlier versions too."""
_SCHEMA: Final = """
CREATE TABLE threads (
    thread INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT NOT NULL, holder TEXT NOT NULL, kind TEXT NOT NULL,
    name TEXT NOT NULL, used INTEGER DEFAULT 0, num_bytes INTEGER DEFAULT 0, number INTEGER DEFAULT 0,
    created INTEGER, metadata TEXT, UNIQUE (namespace, kind, name)
);
CREATE INDEX threads_by_use ON threads (used);
CREATE TABLE responses (
    response INTEGER PRIMARY KEY AUTOINCREMENT, thread INTEGER NOT NULL, namespace TEXT NOT NULL, id TEXT NOT NULL,
    parent TEXT, status TEXT NOT NULL, num_bytes INTEGER NOT NULL, body BLOB NOT NULL, UNIQUE (namespace, id)
);
CREATE INDEX responses_of_threads ON responses (thread);
CREATE TABLE items (
    place INTEGER PRIMARY KEY AUTOINCREMENT, thread INTEGER NOT NULL, response INTEGER NOT NULL,
    is_output INTEGER NOT NULL, id TEXT NOT NULL, item BLOB NOT NULL
);
CREATE INDEX items_in_order ON items (thread, response);
CREATE INDEX items_by_id ON items (thread, response, id);
"""
"""A thread is a chain or a conversation; the items of a conversation have the response 0."""
_BLOBS: Final = """
CREATE TABLE blobs (
    blob INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT NOT NULL, digest BLOB NOT NULL,
    num_bytes INTEGER NOT NULL, data BLOB NOT NULL, UNIQUE (namespace, digest)
);
CREATE INDEX blob_sizes ON blobs (num_bytes);
CREATE TABLE blob_uses (place INTEGER NOT NULL, blob INTEGER NOT NULL, PRIMARY KEY (place, blob)) WITHOUT ROWID;
CREATE INDEX uses_of_blobs ON blob_uses (blob);
CREATE TRIGGER item_dropped AFTER DELETE ON items BEGIN DELETE FROM blob_uses WHERE place = OLD.place; END;
CREATE TRIGGER use_dropped AFTER DELETE ON blob_uses WHEN NOT EXISTS (SELECT 1 FROM blob_uses WHERE blob = OLD.blob)
BEGIN DELETE FROM blobs WHERE blob = OLD.blob; END;
"""
"""Triggers count uses, so that whatever drops items drops blobs, also in a server of an earlier version."""
_HELD: Final = """
WITH last_use AS (SELECT num_bytes, (SELECT t.thread FROM blob_uses u JOIN items i USING (place)
    JOIN threads t ON t.thread = i.thread WHERE u.blob = b.blob ORDER BY used DESC LIMIT 1) AS thread FROM blobs b)
SELECT t.thread, holder, t.num_bytes + TOTAL(l.num_bytes), number FROM threads t
LEFT JOIN last_use l ON l.thread = t.thread GROUP BY t.thread ORDER BY used
"""
"""What each thread takes, by use. A blob counts for whoever used it last, with whom it goes."""
_CHAIN: Final = """
WITH RECURSIVE chain (thread, response, parent, age) AS (
    SELECT thread, response, parent, 0 FROM responses WHERE namespace = :namespace AND id = :name
    UNION ALL SELECT r.thread, r.response, r.parent, age + 1 FROM chain c JOIN responses r
    ON r.namespace = :namespace AND r.id = c.parent WHERE age < :limit
)
"""
_LINKS: Final = f"""{_CHAIN}
SELECT r.thread, r.response, r.id, r.parent, t.name, r.status FROM chain c
CROSS JOIN responses r ON r.response = c.response CROSS JOIN threads t ON t.thread = r.thread ORDER BY age DESC
"""
_OWNER: Final[Mapping[Kind, str]] = {
    "response": "SELECT thread, response, num_bytes FROM responses WHERE namespace = ? AND id = ?",
    "conversation": "SELECT thread, 0, created, metadata FROM threads"
    " WHERE namespace = ? AND kind = 'conversation' AND name = ?",
}
_LISTED: Final[Mapping[Kind, str]] = {
    "response": f"{_CHAIN}, listed AS (SELECT -age AS age, place, id FROM chain CROSS JOIN items i"
    " ON i.thread = chain.thread AND i.response = chain.response WHERE age > 0 OR NOT is_output)",
    "conversation": "WITH listed AS (SELECT 0 AS age, place, i.id FROM threads t JOIN items i"
    " ON i.thread = t.thread AND i.response = 0 WHERE namespace = :namespace AND kind = 'conversation'"
    " AND name = :name)",
}
_ITEMS_OF: Final = "FROM items WHERE thread = ? AND response = ?"
_Database: TypeAlias = sqlite3.Connection
_Owner: TypeAlias = Sequence[Any]
"""Thread and response of items, and what else `_OWNER` says."""


class ResponseStore:
    """All stored responses and conversations."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: None for memory. Raises OSError and sqlite3.Error if the file cannot be opened."""
        self._path = path
        self._writing, self._own = threading.RLock(), threading.local()
        self._readers: list[_Database] = []
        self._reserve = None if path is None else path.with_name(f"{path.name}-reserve")
        if path is not None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # The file holds conversations, so only its owner may read it; SQLite gives its other files the same mode.
            path.touch(0o600)
        self._writer = _prepared(path)
        self._keep_reserve()

    def close(self) -> None:
        """Ends all use."""
        with self._writing, suppress(sqlite3.Error):
            self._empty_log()
            for database in (*self._readers, self._writer):
                database.close()

    def save(self, namespace: str, response: StoredResponse, conversation: str | None = None) -> bool:
        """Stores a response, and adds its items to a conversation; returns whether that is there.

        If it is not, the stored body names none.
        """
        rows, blobs = _cut(rows_of([*response.input, *response.body["output"]]))
        body = json_text(response.body).encode()
        status, num_bytes = str(response.body.get("status")), num_bytes_of(rows)
        with self._change() as database:
            joined = None if conversation is None else _owner(database, namespace, "conversation", conversation)
            if is_lost := conversation is not None and joined is None:
                body = json_text({**response.body, "conversation": None}).encode()
            if (before := _owner(database, namespace, "response", response.id)) is not None:
                _drop_response(database, before)
            thread = _thread(database, namespace, "response", response.session)
            row = (thread, namespace, response.id, response.parent, status, ITEM_BYTES + len(body) + num_bytes, body)
            columns = "thread, namespace, id, parent, status, num_bytes, body"
            inserted = database.execute(f"INSERT INTO responses ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            _add(database, namespace, (thread, inserted.lastrowid), rows, blobs, len(response.input))
            _grow(database, thread, row[5], 1)
            if joined:
                _add(database, namespace, (joined[0], 0), rows, blobs)
                _grow(database, joined[0], num_bytes)
            self._evict(database, [thread, *(joined or ())[:1]])
        return not is_lost

    def count(self) -> int:
        """How many responses and conversations are stored. Raises sqlite3.Error."""
        counted = (
            "SELECT (SELECT COUNT(*) FROM responses) + (SELECT COUNT(*) FROM threads WHERE kind = 'conversation')"
        )
        with self._reading() as database:
            (number,) = database.execute(counted).fetchone()
        return int(number)

    def chain(self, namespace: str, response_id: str) -> list[Link]:
        """A response and those before it, oldest first, if stored; the first one has a parent if that was deleted.

        Raises what `spend` raises.
        """
        asked = {"namespace": namespace, "name": response_id, "limit": MAX_CHAIN}
        with self._reading() as database:
            links = database.execute(_LINKS, asked).fetchall()
            texts = [_texts(database, *row[:2]) for row in links]
        return [Link._make((*row[2:], list(map(json.loads, own)))) for row, own in zip(links, texts, strict=True)]

    def find(self, namespace: str, response_id: str) -> tuple[str, bytes] | None:
        """A response's status and body."""
        statement = "SELECT status, body FROM responses WHERE namespace = ? AND id = ?"
        with self._reading() as database:
            row: tuple[str, bytes] | None = database.execute(statement, (namespace, response_id)).fetchone()
        return row

    def delete(self, namespace: str, response_id: str) -> bool:
        """Forgets a response; returns whether it was there. Responses that continue it lose their beginning."""
        return self._forget(namespace, "response", response_id, _drop_response)

    def put_conversation(self, namespace: str, conversation: StoredConversation, items: Sequence[Item] = ()) -> None:
        """Stores a conversation, or new metadata for it; adds items with ids."""
        rows, blobs = _cut(rows_of(items))
        with self._change() as database:
            before = self.find_conversation(namespace, conversation.id)
            thread = _thread(database, namespace, "conversation", conversation.id)
            changed = (conversation.created_at, json_text(conversation.metadata), thread)
            database.execute("UPDATE threads SET created = ?, metadata = ? WHERE thread = ?", changed)
            num_more = conversation.num_bytes - (before.num_bytes if before is not None else 0)
            _add(database, namespace, (thread, 0), rows, blobs)
            _grow(database, thread, num_more + num_bytes_of(rows), int(before is None))
            self._evict(database, [thread])

    def find_conversation(self, namespace: str, conversation_id: str) -> StoredConversation | None:
        """A conversation."""
        with self._reading() as database:
            owner = _owner(database, namespace, "conversation", conversation_id)
        return None if owner is None else StoredConversation(conversation_id, owner[2], json.loads(owner[3]))

    def delete_conversation(self, namespace: str, conversation_id: str) -> bool:
        """Forgets a conversation; returns whether it was there."""
        return self._forget(namespace, "conversation", conversation_id, _drop)

    def items(self, namespace: str, conversation_id: str) -> list[Item] | None:
        """A conversation's items in order; None without the conversation. Raises what `spend` raises."""
        with self._reading() as database:
            owner = _owner(database, namespace, "conversation", conversation_id)
            texts = None if owner is None else _texts(database, owner[0], 0)
        return None if texts is None else list(map(json.loads, texts))

    def add_items(self, namespace: str, conversation_id: str, items: Sequence[Item]) -> bool:
        """Adds items with ids; returns whether the conversation is there."""
        conversation = self.find_conversation(namespace, conversation_id)
        if conversation is not None:
            self.put_conversation(namespace, conversation, items)
        return conversation is not None

    def delete_item(self, namespace: str, item_id: str, conversation_id: str) -> bool:
        """Removes an item; returns whether it was there."""
        return self._forget(namespace, "conversation", conversation_id, partial(_drop_item, item_id))

    def find_item(self, namespace: str, item_id: str, kind: Kind, name: str) -> bytes | None:
        """An item of a response or conversation."""
        with self._reading() as database:
            place = _owner(database, namespace, kind, name) or (0, 0)
            statement = f"SELECT place, item {_ITEMS_OF} AND id = ? ORDER BY place LIMIT 1"
            row = database.execute(statement, (*place[:2], item_id)).fetchone()
            return None if row is None else _whole(database, *row)

    def page(self, namespace: str, name: str, kind: Kind, wish: PageWish) -> Page | None:
        """Items of a conversation, or those before a response; raises ApiError (400)."""
        order, sign = ("ASC", ">") if wish.is_ascending else ("DESC", "<")
        listed, in_order = _LISTED[kind], f"ORDER BY age {order}, place {order}"
        asked = {"namespace": namespace, "name": name, "limit": MAX_CHAIN, "after": wish.after, "age": 0, "place": 0}
        with self._reading() as database:
            if _owner(database, namespace, kind, name) is None:
                return None
            if wish.after:
                first = f"{listed} SELECT age, place FROM listed WHERE id = :after {in_order} LIMIT 1"
                if (row := database.execute(first, asked).fetchone()) is None:
                    raise wrong("after", f"there is no item {wish.after[:200]!r} here")
                asked["age"], asked["place"] = row
            after = f"WHERE (age, place) {sign} (:age, :place)" if wish.after else ""
            statement = f"{listed} SELECT place FROM listed {after} {in_order} LIMIT {wish.limit + 1}"
            places, rows, num_bytes = database.execute(statement, asked).fetchall(), list[StoredRow](), 0
            for (place,) in places[: wish.limit]:
                item_id, text = database.execute("SELECT id, item FROM items WHERE place = ?", (place,)).fetchone()
                text = _whole(database, place, text)
                num_bytes += len(text)
                if rows and num_bytes > MAX_PAGE_BYTES:
                    break
                rows.append((item_id, text))
            return Page(rows, len(rows) < len(places))

    # ---------------------------------------------------------------------------------------------- transactions

    @contextmanager
    def _reading(self) -> Iterator[_Database]:
        """A connection in a transaction that sees one state: this thread's own, in memory the only one."""
        if self._path is None:
            with self._writing:
                yield self._writer
            return
        database: _Database | None = getattr(self._own, "database", None)
        if database is None:
            database = self._own.database = _connected(self._path)
            self._readers.append(database)
        database.execute("BEGIN")
        try:
            yield database
        finally:
            database.execute("ROLLBACK")

    def _evict(self, database: _Database, kept: Sequence[int]) -> None:
        max_bytes = MAX_MEMORY_BYTES if self._path is None else MAX_DISK_BYTES
        total = "SELECT TOTAL(num_bytes) + (SELECT TOTAL(num_bytes) FROM blobs), TOTAL(number) FROM threads"
        num_bytes, number = database.execute(total).fetchone()
        if num_bytes > max_bytes or number > MAX_RESPONSES:
            rows = database.execute(_HELD).fetchall()
            stored = [Held(thread, holder, sizes) for thread, holder, *sizes in rows]
            if (victims := choose_evictions(stored, kept, (max_bytes, MAX_RESPONSES))) is None:
                raise not_stored("it is larger than this key's share of the store")
            for thread in victims:
                _drop(database, (thread,))

    @contextmanager
    def _change(self) -> Iterator[_Database]:
        """The writing connection, in a transaction; raises ApiError (507) where the disk takes none."""
        with self._writing:
            try:
                with self._writer as database:
                    database.execute("BEGIN IMMEDIATE")
                    yield database
            except sqlite3.Error as error:
                self._empty_log()  # which gives back what the attempt has written
                raise not_stored(f"the file of responses cannot be written ({error})") from error

    def _forget(self, namespace: str, kind: Kind, name: str, drop: Callable[[_Database, _Owner], bool]) -> bool:
        """Whether something was dropped, also on a full disk; empties the log unless another server reads it."""

        def work() -> bool:
            with self._change() as database:
                owner = _owner(database, namespace, kind, name)
                return owner is not None and drop(database, owner)

        try:
            is_found = work()
        except ApiError:
            with self._without_reserve():
                is_found = work()
        self._empty_log()
        return is_found

    def _empty_log(self) -> None:
        """Does what can be done: the log may be read by another server, or the disk may fail."""
        with self._writing, suppress(sqlite3.Error):
            self._writer.execute("PRAGMA busy_timeout = 1000")
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            self._writer.execute("PRAGMA busy_timeout = 30000")

    @contextmanager
    def _without_reserve(self) -> Iterator[None]:
        """In the block, deletions take little space; then free pages are given back to the disk."""
        assert self._reserve is not None, "memory is no disk"
        with self._writing:
            self._reserve.unlink(missing_ok=True)
            self._writer.execute("PRAGMA secure_delete = OFF")
            try:
                yield
            finally:
                with suppress(sqlite3.Error):
                    self._give_back()
                self._writer.execute("PRAGMA secure_delete = ON")
                self._keep_reserve()

    def _give_back(self) -> None:
        num_before = None
        while (num_free := self._writer.execute("PRAGMA freelist_count").fetchone()) not in ((0,), num_before):
            self._empty_log()
            self._writer.execute(f"PRAGMA incremental_vacuum({_PAGES_PER_STEP})").fetchall()
            num_before = num_free
        self._empty_log()

    def _keep_reserve(self) -> None:
        if self._reserve is not None:
            with suppress(OSError):
                self._reserve.touch(0o600)
                if self._reserve.stat().st_size < RESERVE_BYTES:
                    self._reserve.write_bytes(os.urandom(RESERVE_BYTES))  # zeros take no space on some disks


def store_of(config: ServerConfig) -> ResponseStore:
    """The configured store, in memory also if the file cannot be opened."""
    if config.cache_disk_bytes is None:
        return ResponseStore()
    path = Path(config.cache_dir).expanduser() / FILE_NAME
    try:
        return ResponseStore(path)
    except (OSError, sqlite3.Error) as error:
        logger.warning("responses are kept in memory, for %s cannot be opened: %s", path, error)
        return ResponseStore()


def _owner(database: _Database, namespace: str, kind: Kind, name: str) -> _Owner | None:
    row: _Owner | None = database.execute(_OWNER[kind], (namespace, name)).fetchone()
    return row


def _texts(database: _Database, thread: int, response: int) -> list[bytes]:
    """An owner's items in order; raises what `spend` raises."""
    texts: list[bytes] = []
    for place, text in database.execute(f"SELECT place, item {_ITEMS_OF} ORDER BY place", (thread, response)):
        text = _whole(database, place, text)
        spend(len(text), "input")
        texts.append(text)
    return texts


def _thread(database: _Database, namespace: str, kind: Kind, name: str) -> int:
    """A new or known thread."""
    row, columns = (namespace, holder_of(namespace), kind, name), "namespace, holder, kind, name"
    known = "ON CONFLICT DO UPDATE SET used = used RETURNING thread"
    ((thread,),) = database.execute(f"INSERT INTO threads ({columns}) VALUES (?, ?, ?, ?) {known}", row).fetchall()
    return int(thread)


def _add(
    database: _Database,
    namespace: str,
    owner: _Owner,
    rows: Sequence[StoredRow],
    blobs: Mapping[bytes, bytes],
    num_input: int = 0,
) -> None:
    for start in range(0, len(rows), _ROWS_PER_STEP):
        part = rows[start : start + _ROWS_PER_STEP]
        numbered = ((*owner, at >= num_input, *row) for at, row in enumerate(part, start))
        places = ", ".join(["(?, ?, ?, ?, ?)"] * len(part))
        columns = "thread, response, is_output, id, item"
        made = database.execute(f"INSERT INTO items ({columns}) VALUES {places}", [*chain.from_iterable(numbered)])
        for place, (_, text) in enumerate(part, (made.lastrowid or 0) - len(part) + 1):
            for digest in {*_MARK.findall(text)}:
                _use(database, namespace, place, digest, blobs[digest])


def _use(database: _Database, namespace: str, place: int, digest: bytes, data: bytes) -> None:
    """Keeps a blob for the item at `place`, in place of a damaged one."""
    row = namespace, digest, len(data), data
    known = "ON CONFLICT DO UPDATE SET data = excluded.data WHERE data IS NOT excluded.data"
    database.execute(f"INSERT INTO blobs (namespace, digest, num_bytes, data) VALUES (?, ?, ?, ?) {known}", row)
    uses = "INSERT INTO blob_uses SELECT ?, blob FROM blobs WHERE namespace = ? AND digest = ?"
    database.execute(uses, (place, namespace, digest))


def _grow(database: _Database, thread: int, num_bytes: int, number: int = 0) -> None:
    """Counts, and marks as used: by a counter, since clocks go back."""
    changes = "used = (SELECT MAX(used) + 1 FROM threads), num_bytes = num_bytes + ?, number = number + ?"
    database.execute(f"UPDATE threads SET {changes} WHERE thread = ?", (num_bytes, number, thread))


def _drop_response(database: _Database, owner: _Owner) -> bool:
    thread, response, num_bytes = owner
    database.execute(f"DELETE {_ITEMS_OF}", (thread, response))
    database.execute("DELETE FROM responses WHERE response = ?", (response,))
    _grow(database, thread, -num_bytes, -1)
    database.execute("DELETE FROM threads WHERE thread = ? AND number = 0", (thread,))
    return True


def _drop_item(item_id: str, database: _Database, owner: _Owner) -> bool:
    place = (*owner[:2], item_id)
    rows = database.execute(f"SELECT id, item {_ITEMS_OF} AND id = ?", place).fetchall()
    database.execute(f"DELETE {_ITEMS_OF} AND id = ?", place)
    _grow(database, owner[0], -num_bytes_of(rows))
    return bool(rows)


def _drop(database: _Database, owner: _Owner) -> bool:
    for table in ("items", "responses", "threads"):
        database.execute(f"DELETE FROM {table} WHERE thread = ?", owner[:1])
    return True


def _connected(path: Path | None) -> _Database:
    return sqlite3.connect(path or ":memory:", timeout=30, check_same_thread=False, isolation_level=None)


def _prepared(path: Path | None) -> _Database:
    database = _connected(path)
    database.execute("PRAGMA auto_vacuum = INCREMENTAL")
    _write_ahead(database)
    # Overwrites deleted data.
    database.execute(f"PRAGMA secure_delete = {'OFF' if path is None else 'ON'}")
    with database:
        # Another server may open the file at the same moment: one makes the tables, the other waits and finds them.
        database.execute("BEGIN IMMEDIATE")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version != _VERSION:
            _make_tables(database, keeps=version == _WITHOUT_BLOBS)
    if version not in (0, _WITHOUT_BLOBS, _VERSION):
        logger.warning("%s was written by another version: the responses in it are not kept", path)
        database.execute("VACUUM")  # from here on, free pages can be given back
    return database


def _write_ahead(database: _Database) -> None:
    """Retries, since SQLite does not wait while another server sets the mode."""
    for attempt in range(_MODE_ATTEMPTS):
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
        except sqlite3.OperationalError:
            if attempt == _MODE_ATTEMPTS - 1:
                raise
            time.sleep(_MODE_SECONDS)
        else:
            return


def _make_tables(database: _Database, *, keeps: bool) -> None:
    """`keeps`: those without blobs."""
    for table in () if keeps else _TABLES:
        database.execute(f"DROP TABLE IF EXISTS {table}")
    for statement in f"{'' if keeps else _SCHEMA}{_BLOBS}".split(";\n"):
        database.execute(statement)
    database.execute(f"PRAGMA user_version = {_VERSION}")
