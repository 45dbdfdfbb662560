"""Responses and conversations in SQLite, in a file or in memory.

No namespace sees another's. Above the limits, the least recently used chain or conversation goes first. A response
holds its own input and output, and its parent's id. Methods block, and raise sqlite3.Error.
"""

import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from server.api.responses.output import Item
from server.api.wire import json_text
from server.app.config import ServerConfig

logger = logging.getLogger(__name__)

FILE_NAME: Final = "responses.sqlite3"
MAX_RESPONSES: Final = 10_000
MAX_DISK_BYTES: Final = 1 << 30
MAX_MEMORY_BYTES: Final = 1 << 26
MAX_CHAIN: Final = 10_000
"""Responses of one chain read for a prompt."""
_MODE_ATTEMPTS: Final = 250
_MODE_SECONDS: Final = 0.02
_VERSION: Final = 1
_SCHEMA: Final = """
CREATE TABLE responses (
    namespace TEXT NOT NULL, id TEXT NOT NULL, parent TEXT, session TEXT NOT NULL,
    num_bytes INTEGER NOT NULL, input TEXT NOT NULL, body TEXT NOT NULL, PRIMARY KEY (namespace, id)
);
CREATE INDEX responses_by_chain ON responses (namespace, session, num_bytes);
CREATE TABLE chains (
    namespace TEXT NOT NULL, session TEXT NOT NULL, used INTEGER NOT NULL, PRIMARY KEY (namespace, session)
);
CREATE TABLE conversations (
    namespace TEXT NOT NULL, id TEXT NOT NULL, created INTEGER NOT NULL, metadata TEXT NOT NULL,
    used INTEGER NOT NULL, PRIMARY KEY (namespace, id)
);
CREATE TABLE conversation_items (
    place INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT NOT NULL, conversation TEXT NOT NULL,
    id TEXT NOT NULL, item TEXT NOT NULL, num_bytes INTEGER NOT NULL
);
CREATE INDEX items_of_conversations ON conversation_items (namespace, conversation, num_bytes);
"""
_CHAIN: Final = """
WITH RECURSIVE chain (id, parent, session, input, body, depth) AS (
    SELECT id, parent, session, input, body, 0 FROM responses WHERE namespace = :namespace AND id = :id
    UNION ALL
    SELECT r.id, r.parent, r.session, r.input, r.body, depth + 1 FROM responses r JOIN chain c
    ON r.id = c.parent AND r.namespace = :namespace WHERE depth < :limit
)
SELECT id, body, input, parent, session FROM chain ORDER BY depth DESC
"""
_SIZE: Final = """
SELECT (SELECT COUNT(*) FROM responses) + (SELECT COUNT(*) FROM conversations),
    (SELECT TOTAL(num_bytes) FROM responses) + (SELECT TOTAL(num_bytes) FROM conversation_items)
"""
_OLDEST: Final = """
SELECT is_chain, namespace, name FROM (
    SELECT 1 AS is_chain, namespace, session AS name, used FROM chains
    UNION ALL SELECT 0, namespace, id, used FROM conversations
) ORDER BY used LIMIT 1
"""
_ITEMS_DELETION: Final = "DELETE FROM conversation_items WHERE namespace = ? AND conversation = ?"
_CONVERSATION_DELETION: Final = (_ITEMS_DELETION, "DELETE FROM conversations WHERE namespace = ? AND id = ?")
_CHAIN_DELETION: Final = tuple(
    f"DELETE FROM {one} WHERE namespace = ? AND session = ?" for one in ("responses", "chains")
)


@dataclass(frozen=True)
class StoredResponse:
    """One response as it is kept."""

    id: str
    body: dict[str, Any]
    input: Sequence[Item]
    parent: str | None
    session: str
    """The name of the chain."""

    @property
    def items(self) -> list[Item]:
        return [*self.input, *self.body["output"]]


@dataclass(frozen=True)
class StoredConversation:
    """A stored conversation, without its items."""

    id: str
    created_at: int
    """Seconds since 1970."""
    metadata: dict[str, str]
    object: Literal["conversation"] = "conversation"


class ResponseStore:
    """All stored responses and conversations. For any thread."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: None for memory, which is also used if the file cannot be opened."""
        self._path = path
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None

    def save(self, namespace: str, response: StoredResponse, conversation: str | None = None) -> None:
        """Stores a response, also in an existing conversation, and marks its chain as used."""
        given, body = json_text(response.input), json_text(response.body)
        row = (namespace, response.id, response.parent, response.session, len(given) + len(body), given, body)
        used = (namespace, response.session, time.time_ns())
        with self._opened() as database:
            database.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            database.execute("INSERT OR REPLACE INTO chains VALUES (?, ?, ?)", used)
            if conversation is not None:
                self._add(database, namespace, conversation, response.items)
            self._evict(database)

    def chain(self, namespace: str, response_id: str, num_before: int = MAX_CHAIN) -> list[StoredResponse]:
        """A response and those before it, oldest first, if stored.

        The first one has a parent if the parent was deleted.
        """
        place = {"namespace": namespace, "id": response_id, "limit": num_before}
        with self._opened() as database:
            rows = database.execute(_CHAIN, place).fetchall()
        return [StoredResponse(row[0], *map(json.loads, row[1:3]), *row[3:]) for row in rows]

    def find(self, namespace: str, response_id: str) -> StoredResponse | None:
        """A response."""
        return next(iter(self.chain(namespace, response_id, 0)), None)

    def delete(self, namespace: str, response_id: str) -> bool:
        """Forgets a response; returns whether it was there. Responses that continue it lose their beginning."""
        return self._forget((namespace, response_id), "DELETE FROM responses WHERE namespace = ? AND id = ?")

    def put_conversation(self, namespace: str, conversation: StoredConversation) -> None:
        """Stores a conversation, or new metadata for it."""
        metadata = json_text(conversation.metadata)
        row = (namespace, conversation.id, conversation.created_at, metadata, time.time_ns())
        with self._opened() as database:
            database.execute("INSERT OR REPLACE INTO conversations VALUES (?, ?, ?, ?, ?)", row)
            self._evict(database)

    def find_conversation(self, namespace: str, conversation_id: str) -> StoredConversation | None:
        """A conversation."""
        statement = "SELECT created, metadata FROM conversations WHERE namespace = ? AND id = ?"
        with self._opened() as database:
            row = database.execute(statement, (namespace, conversation_id)).fetchone()
        return None if row is None else StoredConversation(conversation_id, row[0], json.loads(row[1]))

    def delete_conversation(self, namespace: str, conversation_id: str) -> bool:
        """Forgets a conversation; returns whether it was there."""
        return self._forget((namespace, conversation_id), *_CONVERSATION_DELETION)

    def items(self, namespace: str, conversation_id: str) -> list[Item] | None:
        """A conversation's items in order; None without the conversation."""
        statement = "SELECT item FROM conversation_items WHERE namespace = ? AND conversation = ? ORDER BY place"
        with self._opened() as database:
            found = [json.loads(text) for (text,) in database.execute(statement, (namespace, conversation_id))]
        return found if found or self.find_conversation(namespace, conversation_id) is not None else None

    def add_items(self, namespace: str, conversation_id: str, items: Sequence[Item]) -> bool:
        """Adds items with ids; returns whether the conversation is there."""
        with self._opened() as database:
            return self._add(database, namespace, conversation_id, items)

    def delete_item(self, namespace: str, item_id: str, conversation_id: str) -> bool:
        """Removes an item; returns whether it was there."""
        return self._forget((namespace, conversation_id, item_id), f"{_ITEMS_DELETION} AND id = ?")

    def _forget(self, place: Sequence[str], *statements: str) -> bool:
        """Runs the deletions; returns whether the last one deleted a row.

        Empties the log unless another server reads it.
        """
        with self._opened() as database:
            *_, num_found = [database.execute(statement, place).rowcount for statement in statements]
        with self._opened() as database:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return num_found > 0

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """Gives the database to one thread at a time, in a transaction."""
        with self._lock:
            if self._database is None:
                self._database = _opened(self._path)
            with self._database:
                yield self._database

    def _add(self, database: sqlite3.Connection, namespace: str, conversation_id: str, items: Sequence[Item]) -> bool:
        used = "UPDATE conversations SET used = ? WHERE namespace = ? AND id = ?"
        if database.execute(used, (time.time_ns(), namespace, conversation_id)).rowcount == 0:
            return False
        texts = [(item["id"], json_text(item)) for item in items]
        rows = [(namespace, conversation_id, item_id, text, len(text)) for item_id, text in texts]
        columns = "namespace, conversation, id, item, num_bytes"
        database.executemany(f"INSERT INTO conversation_items ({columns}) VALUES (?, ?, ?, ?, ?)", rows)
        self._evict(database)
        return True

    def _evict(self, database: sqlite3.Connection) -> None:
        max_bytes = MAX_MEMORY_BYTES if self._path is None else MAX_DISK_BYTES
        while True:
            number, num_bytes = database.execute(_SIZE).fetchone()
            is_within = number <= MAX_RESPONSES and num_bytes <= max_bytes
            if is_within or (oldest := database.execute(_OLDEST).fetchone()) is None:
                return
            is_chain, *place = oldest
            for statement in _CHAIN_DELETION if is_chain else _CONVERSATION_DELETION:
                database.execute(statement, place)


def store_of(config: ServerConfig) -> ResponseStore:
    """The configured store."""
    if config.cache_disk_bytes is None:
        return ResponseStore()
    return ResponseStore(Path(config.cache_dir).expanduser() / FILE_NAME)


def _opened(path: Path | None) -> sqlite3.Connection:
    if path is not None:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # The file holds conversations, so only its owner may read it; SQLite gives its other files the same mode.
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            return _prepared(str(path))
        except (OSError, sqlite3.Error) as error:
            logger.warning("responses are kept in memory, for %s cannot be opened: %s", path, error)
    return _prepared(":memory:")


def _prepared(name: str) -> sqlite3.Connection:
    database = sqlite3.connect(name, timeout=30, check_same_thread=False)
    _write_ahead(database)
    database.execute("PRAGMA synchronous = NORMAL")
    # Overwrites deleted data.
    database.execute("PRAGMA secure_delete = ON")
    with database:
        # Another server may open the file at the same moment: one makes the tables, the other waits and finds them.
        database.execute("BEGIN IMMEDIATE")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version != _VERSION:
            _make_tables(database)
    return database


def _write_ahead(database: sqlite3.Connection) -> None:
    """Retries, since SQLite does not wait while another server sets the mode."""
    for attempt in range(_MODE_ATTEMPTS):
        try:
            database.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError:
            if attempt == _MODE_ATTEMPTS - 1:
                raise
            time.sleep(_MODE_SECONDS)
        else:
            return


def _make_tables(database: sqlite3.Connection) -> None:
    for table in ("responses", "chains", "conversations", "conversation_items"):
        database.execute(f"DROP TABLE IF EXISTS {table}")
    for statement in _SCHEMA.split(";"):
        database.execute(statement)
    database.execute(f"PRAGMA user_version = {_VERSION}")
