"""The folders of a cache directory, one per model: finding, naming, listing and removing them.

A folder `NAME-FINGERPRINT` is found by the fingerprint; the name is for people. Only files that the disk tier wrote
are ever removed.
"""

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cache.budget import DiskInUse

FINGERPRINT_DIGITS = 16
LONGEST_NAME = 80
LOCK = "lock"
_FOLDER = re.compile(rf"(?:(?P<name>.+)-)?(?P<fingerprint>[0-9a-f]{{{FINGERPRINT_DIGITS}}})")
_OURS = re.compile(r"lock|secret|index\.sqlite3?.*|[0-9a-f]{32}\.safetensors(\.tmp)?")


@dataclass(frozen=True)
class ModelFolder:
    """One model's folder."""

    path: Path
    model: str
    """The model's first name, as a file name; may be empty."""
    num_bytes: int
    last_used: float
    """Seconds since 1970; 0 if never written."""
    is_in_use: bool


def place(parent: Path, model: str, fingerprint: str) -> Path:
    """A model's folder, which need not exist; renames one with only a fingerprint."""
    digits = fingerprint[:FINGERPRINT_DIGITS]
    wanted = parent / f"{_file_name(model)}-{digits}"
    with contextlib.suppress(OSError):
        folder = next((path for path, _, known in _folders(parent) if known == digits), wanted)
        return folder.rename(wanted) if folder.name == digits else folder
    return wanted


def find_former(parent: Path, model: str, fingerprint: str) -> list[Path]:
    """Folders of models with the same name but other files, by folder name."""
    name, digits = _file_name(model), fingerprint[:FINGERPRINT_DIGITS]
    with contextlib.suppress(OSError):
        return [path for path, held_name, known in _folders(parent) if held_name == name and known != digits]
    return []


def find_all(parent: Path) -> list[ModelFolder]:
    """The models' folders by name. Raises OSError."""
    return [_describe(path, name) for path, name, _ in _folders(parent)] if parent.exists() else []


def remove(folder: ModelFolder) -> bool:
    """Deletes what the disk tier wrote; False if foreign files, and so the folder, remain.

    Raises OSError, and DiskInUse while a server has it open.
    """
    with _locked(folder.path):
        # The lock goes last: until then no server can open a half-removed folder.
        for path in sorted(folder.path.iterdir(), key=lambda path: path.name == LOCK):
            if _OURS.fullmatch(path.name):
                path.unlink()
    if any(folder.path.iterdir()):
        return False
    folder.path.rmdir()
    return True


def _folders(parent: Path) -> Iterator[tuple[Path, str, str]]:
    """Yields folders by name, each with its model's name and fingerprint."""
    for path in sorted(parent.iterdir()):
        match = _FOLDER.fullmatch(path.name)
        if match is not None and path.is_dir():
            yield path, match["name"] or "", match["fingerprint"]


def _describe(path: Path, model: str) -> ModelFolder:
    written = [file for file in path.iterdir() if _OURS.fullmatch(file.name) and file.name not in (LOCK, "secret")]
    stats = [file.stat() for file in written if file.is_file()]
    num_bytes, last_used = sum(stat.st_size for stat in stats), max((stat.st_mtime for stat in stats), default=0.0)
    return ModelFolder(path, model, num_bytes, last_used, is_in_use(path))


def is_in_use(path: Path) -> bool:
    """Whether a server has the folder, if any, open."""
    if not (path / LOCK).exists():
        return False
    try:
        with _locked(path):
            return False
    except DiskInUse:
        return True


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Raises DiskInUse while a server has the folder."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise DiskInUse(folder) from error
    finally:
        os.close(descriptor)


def _file_name(model: str) -> str:
    return re.sub(r"[^A-Za-z0-9._@+]+", "-", model).strip("-.")[:LONGEST_NAME] or "model"
