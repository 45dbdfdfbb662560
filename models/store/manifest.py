"""The manifest: one JSON file with all stored models. Invariants:

* a reader sees one state or the next: a change is written beside the file, synced, and renamed;
* changes of several processes come one after another, under a lock file;
* a damaged file is set aside under another name, never written over; a newer version's file is left as it is.
"""

import contextlib
import fcntl
import functools
import itertools
import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from models.errors import InvalidParameter, StoreError, reason, told_as
from models.store.stored_model import StoredModel, find_full_name

if TYPE_CHECKING:
    from pydantic import TypeAdapter

VERSION = 1
FILE_NAME = "models.json"


def data_folder(environment: Mapping[str, str]) -> Path:
    """The folder of this user's manifest."""
    return Path(environment.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "mlx-serve"


class Manifest:
    """One folder's stored models. For any thread and several processes."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        self._fault = f"{self.path} cannot be used"
        self._last: tuple[tuple[int, int, int], Mapping[str, StoredModel]] | None = None
        self._lock = threading.Lock()

    def models(self) -> Mapping[str, StoredModel]:
        """All stored models by full name.

        Raises StoreError, for a damaged file after setting it aside.
        """
        try:
            return self._read()
        except _DAMAGE:
            with self._alone():
                # Another process may have repaired the file meanwhile.
                return self._read_or_set_aside()

    def find(self, name: str) -> StoredModel | None:
        """By name, tagged or not; raises like `models`."""
        full = find_full_name(name)
        return None if full is None else self.models().get(full)

    @contextlib.contextmanager
    def change(self) -> Iterator[dict[str, StoredModel]]:
        """Yields the models for exclusive changes, written at the end without an error. Raises StoreError."""
        with self._alone():
            models = dict(self._read_or_set_aside())
            yield models
            self._write(models)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with self._lock:
            with told_as(StoreError, self._fault):
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                lock = open(f"{self.path}.lock", "ab", opener=as_owner)  # noqa: SIM115
            with lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield

    def _read(self) -> Mapping[str, StoredModel]:
        """Reads the file only if changed; raises StoreError, and `_DAMAGE` for a malformed one."""
        with told_as(StoreError, self._fault):
            try:
                stat = self.path.stat()
            except FileNotFoundError:
                return {}
            stamp = stat.st_ino, stat.st_mtime_ns, stat.st_size
            if self._last is not None and self._last[0] == stamp:
                return self._last[1]
            text = self.path.read_bytes()
        self._last = stamp, (models := _parse(text, self.path))
        return models

    def _read_or_set_aside(self) -> Mapping[str, StoredModel]:
        """For the lock's holder; raises StoreError."""
        try:
            return self._read()
        except _DAMAGE as error:
            names = (f"{FILE_NAME}.damaged-{number}" for number in itertools.count(1))
            aside = next(path for path in map(self.path.with_name, names) if not path.exists())
            with told_as(StoreError, self._fault):
                self.path.rename(aside)
            advice = "mend it and move it back, or create the names anew"
            damage = f"{self.path} is damaged ({reason(error)}) and was set aside as {aside.name}"
            raise StoreError(f"{damage}; {advice}") from error

    def _write(self, models: Mapping[str, StoredModel]) -> None:
        records = _adapter().dump_python([models[name] for name in sorted(models)], mode="json")
        text = json.dumps({"version": VERSION, "models": records}, indent=2, ensure_ascii=False).encode() + b"\n"
        beside = self.path.with_name(f"{FILE_NAME}.new")
        with told_as(StoreError, self._fault):
            with open(beside, "wb", opener=as_owner) as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self.path)
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def as_owner(path: str, flags: int) -> int:
    """For `open`: only the owner reads a new file; follows no link."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


_DAMAGE = (ValueError, RecursionError, InvalidParameter)


def _parse(text: bytes, path: Path) -> Mapping[str, StoredModel]:
    """Raises `_DAMAGE`, and StoreError for a newer version's file."""
    from pydantic import ValidationError

    records = json.loads(text)
    version = records.get("version") if isinstance(records, dict) else None
    if not isinstance(version, int) or version < VERSION:
        raise ValueError("it names no version")
    if version > VERSION:
        raise StoreError(f"{path} was written by a newer mlx-serve; use that, or move the file")
    try:
        models = _adapter().validate_python(records.get("models"))
        for model in models:
            if find_full_name(model.name) != model.name:
                raise ValueError(f"{model.name[:100]!r} is no name")
            model.defaults.check()
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    return {model.name: model for model in models}


def _adapter() -> "TypeAdapter[list[StoredModel]]":
    # Not at the top: commands without a manifest start faster this way.
    from pydantic import TypeAdapter

    return TypeAdapter(list[StoredModel])


_manifest_in = functools.cache(Manifest)


def user_manifest() -> Manifest:
    """This user's manifest, the same object each time."""
    return _manifest_in(data_folder(os.environ))
