"""The folder of the disk tier: a lock, a secret, files and an index, changed in a safe order.

A file is written under a temporary name, synced, renamed, then indexed; it leaves the index before it is deleted. The
next opening deletes leftovers. A prefix's key is the keyed hash of namespace and tokens, a file's name a hash of the
key: without the folder's secret it reveals no tokens.
"""

import contextlib
import hashlib
import logging
import os
import re
import sqlite3
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from cache.budget import DiskFault, DiskInUse, FolderError
from cache.disk.codec import StateImage, read_state
from cache.disk.files import FileSystem, Receipt, TensorFile, read_exactly, write_tensors
from cache.disk.index import DATABASE, WriteDay, add, prepare, read_fingerprint, read_rows, read_write_day
from cache.disk.tree import DiskTree, FilePart, FileRow, StoredFile, extended
from cache.layers.state import RecurrentState, Segment
from cache.types import TokenArray

logger = logging.getLogger(__name__)

KEY_BYTES = 16
_SECRET_BYTES = 32
_ROOT = 0
_SUFFIX = ".safetensors"
_TEMPORARY = ".tmp"
_OURS = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}{re.escape(_SUFFIX)}({re.escape(_TEMPORARY)})?")


def _is_damage(error: Exception) -> bool:
    """Whether the index is damaged; otherwise the machine is the cause."""
    # SQLite's general error is a wrong table; errors of Python's module, as for text that is no UTF-8, have no code.
    is_of_machine = isinstance(error, sqlite3.OperationalError)
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) if is_of_machine else sqlite3.SQLITE_ERROR
    return code & 0xFF == sqlite3.SQLITE_ERROR


def _unusable(folder: Path, cause: Exception) -> FolderError:
    words = getattr(cause, "strerror", None) or str(cause)
    return FolderError(folder, f"cannot be used: {words[:1].lower()}{words[1:]}")


def _check_owner(files: FileSystem, folder: Path) -> None:
    """Raises FolderError if another user could replace the folder or add files."""
    (owner, mode), (above, mode_above) = files.owner_and_mode(folder), files.owner_and_mode(folder.parent)
    if owner != os.geteuid():
        reason = f"belongs to another user (id {owner}); name another one, or change its owner"
    elif mode & (stat.S_IWGRP | stat.S_IWOTH):
        reason = f"can be written to by other users (mode {mode:04o}); run chmod go-w on it"
    elif above not in (os.geteuid(), _ROOT):
        reason = f"is in a folder that belongs to another user (id {above}); name another one"
    elif mode_above & stat.S_IWOTH and not mode_above & stat.S_ISVTX:
        reason = f"is in a folder that anyone can write to (mode {mode_above:04o}); run chmod o-w on that"
    else:
        return
    raise FolderError(folder, f"{reason}; it holds people's conversations, so it is not used")


def find_fingerprint(folder: Path) -> str | None:
    """The fingerprint of the state in a folder, if there is state. Raises FolderError."""
    if not (folder / DATABASE).exists():
        return None
    try:
        with contextlib.closing(FileSystem().connect(folder / DATABASE)) as index:
            return read_fingerprint(index)
    except (OSError, sqlite3.Error, UnicodeDecodeError) as error:
        raise _unusable(folder, error) from error


class DiskStore:
    """One model's folder, open and locked. Any thread may read; the other methods are for one thread at a time.

    `fingerprint` covers what state depends on: weights, tokenizer, types, library versions. State with another
    fingerprint is deleted; if the index is damaged, all is.
    """

    def __init__(self, folder: Path, fingerprint: str, files: FileSystem | None = None) -> None:
        """Creates what is missing. Raises FolderError."""
        self._files = files or FileSystem()
        self._folder = folder
        self._fingerprint = fingerprint
        self.is_failing = False
        """A write has failed; no other is tried until the write queue resets this."""
        try:
            self._files.make_folder(folder)
            _check_owner(self._files, folder)
            self._lock = self._files.lock(folder / "lock")
        except BlockingIOError as error:
            raise DiskInUse(folder) from error
        except OSError as error:
            raise _unusable(folder, error) from error
        try:
            self._secret = self._load_secret()
            self._index, self.tree, self.day = self._recover()
        except (OSError, sqlite3.Error, UnicodeDecodeError) as error:
            self._unlock()
            raise _unusable(folder, error) from error

    def _load_secret(self) -> bytes:
        path = self._folder / "secret"
        with contextlib.suppress(FileNotFoundError, DiskFault), self._files.open(path) as opened:
            return read_exactly(opened, _SECRET_BYTES, 0)
        secret = os.urandom(_SECRET_BYTES)
        with self._files.create(path) as file:
            file.write(secret)
            self._files.sync(file)
        return secret

    # ------------------------------------------------------------------------------------------------- keys

    def hasher(self, namespace: str) -> "hashlib.blake2b":
        """The hasher of a namespace's empty prefix."""
        hasher = hashlib.blake2b(key=self._secret, digest_size=KEY_BYTES)
        for text in (self._fingerprint.encode(), namespace.encode("utf-8", "surrogatepass")):
            hasher.update(len(text).to_bytes(8, "little") + text)
        return hasher

    def name_of(self, file: StoredFile, key: bytes) -> str:
        """A file's name, from its prefix's `key`."""
        what = key + file.start.to_bytes(8, "little") + bytes([file.is_snapshot, file.has_recurrent])
        return hashlib.blake2b(what, key=self._secret, digest_size=KEY_BYTES).hexdigest() + _SUFFIX

    # ----------------------------------------------------------------------------------------------- opening

    def _recover(self) -> tuple[sqlite3.Connection, DiskTree, WriteDay | None]:
        try:
            return self._open_index()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            if not _is_damage(error):
                raise
            logger.warning("disk cache: starting afresh, the index is damaged: %s", error)
            for suffix in ("-wal", "-shm", ""):
                self._files.remove(self._folder / (DATABASE + suffix))
            return self._open_index()

    def _open_index(self) -> tuple[sqlite3.Connection, DiskTree, WriteDay | None]:
        if DATABASE not in self._files.sizes(self._folder):
            # SQLite would make the file readable by others. Its further files copy the permissions of this one.
            self._files.create(self._folder / DATABASE).close()
        index = self._files.connect(self._folder / DATABASE)
        try:
            num_foreign = prepare(index, self._fingerprint)
            self._scrub(index)
            if num_foreign:
                logger.warning(
                    "disk cache: removed %d files of state of other weights, of another --speculate or --cache-bits, "
                    "or of another version of mlx or mlx-lm",
                    num_foreign,
                )
            return index, self._find(index), read_write_day(index)
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                index.close()
            raise

    def _find(self, index: sqlite3.Connection) -> DiskTree:
        """Finds files by index, name and size, and deletes all others and their rows; foreign files stay."""
        sizes, rows, tree = self._files.sizes(self._folder), read_rows(index), DiskTree()
        present = [row for row in rows if sizes.get(row.file.name) == row.file.num_bytes]
        tree.attach([row for row in present if row.file.name == self.name_of(row.file, row.key)], self.hasher)
        kept = {file.name for file in tree.files()}
        if lost := [row.file.name for row in rows if row.file.name not in kept]:
            _drop(index, lost)
        for name in sizes:
            if _OURS.fullmatch(name) and name not in kept:
                with self._logging_errors():
                    self._files.remove(self._folder / name)
        return tree

    # ----------------------------------------------------------------------------------------------- writing

    def image(self, rows: Segment | None, recurrent: RecurrentState | None) -> StateImage:
        """State to write, made on the thread that owns it. Raises Unstorable."""
        return StateImage(rows, recurrent)

    def write(self, file: StoredFile, image: StateImage, tokens: TokenArray, day: WriteDay) -> Receipt | None:
        """Writes and indexes a file that stops at the end of `tokens`; None if the file is gone.

        Raises OSError or sqlite3.Error after deleting what was written.
        """
        if file.is_gone:
            return None
        if self.is_failing:
            raise OSError("an earlier write failed")
        try:
            return self._write(file, image, tokens, day)
        except BaseException:
            self.is_failing = True
            for name in (file.name, file.name + _TEMPORARY) if file.name else ():
                with contextlib.suppress(OSError):
                    self._files.remove(self._folder / name)
            raise

    def _write(self, file: StoredFile, image: StateImage, tokens: TokenArray, day: WriteDay) -> Receipt:
        edge = tokens[file.stop if file.is_snapshot else file.start :]
        parent = extended(self.hasher(file.namespace), tokens[: len(tokens) - len(edge)])
        key = extended(parent, edge).digest()
        file.name = self.name_of(file, key)
        path, temporary = self._folder / file.name, self._folder / (file.name + _TEMPORARY)
        metadata = {**image.metadata(), "name": file.name}
        receipt = write_tensors(self._files, temporary, image.tensors(file.start, file.stop), metadata)
        self._files.rename(temporary, path)
        self._files.sync_folder(self._folder)
        add(self._index, FileRow(file, parent.digest(), key, edge), receipt, day)
        return receipt

    def delete(self, files: Iterable[StoredFile]) -> None:
        """Deletes files and rows. Errors are logged; the next opening deletes the rest."""
        names = [file.name for file in files if file.name]
        with self._logging_errors():
            _drop(self._index, names)
        for name in names:
            with self._logging_errors():
                self._files.remove(self._folder / name)

    def scrub(self) -> None:
        """Overwrites removed rows: they remain readable in the write-ahead log. Errors are logged."""
        self._scrub(self._index)

    def _scrub(self, index: sqlite3.Connection) -> None:
        with self._logging_errors():
            index.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def touch(self, files: Iterable[StoredFile]) -> None:
        """Records files' last use. Errors are logged."""
        last_used = [(file.last_used, file.name) for file in files if file.name]
        with self._logging_errors(), self._index:
            self._index.executemany("UPDATE files SET last_used = ? WHERE name = ?", last_used)

    @contextlib.contextmanager
    def _logging_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error, UnicodeDecodeError) as error:
            logger.debug("cache folder %s: %s", self._folder, error)

    def close(self) -> None:
        """Closes the index and unlocks the folder."""
        with contextlib.suppress(sqlite3.Error):
            self._index.close()
        self._unlock()

    def _unlock(self) -> None:
        with contextlib.suppress(OSError):
            self._lock.close()

    # ----------------------------------------------------------------------------------------------- reading

    def read(self, part: FilePart, read_part: Callable[..., Any] = read_state) -> Any:
        """Rows of a written file, and its recurrent state: by default a LoadedState. Any thread. Raises DiskFault."""
        file = part.file
        assert file.receipt is not None, "the file was never written"
        try:
            with self._files.open(self._folder / file.name) as opened:
                file_of_tensors = TensorFile(opened, file.receipt)
                if file_of_tensors.metadata.get("name") != file.name:
                    raise DiskFault("the file holds other state than its name says")
                return read_part(file_of_tensors, file.start, part.start, part.stop)
        except OSError as error:
            raise DiskFault(str(error)) from error


def _drop(index: sqlite3.Connection, names: Iterable[str]) -> None:
    with index:
        index.executemany("DELETE FROM files WHERE name = ?", [(name,) for name in names])
