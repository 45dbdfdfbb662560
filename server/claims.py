"""What each server of this user has claimed of the machine's memory, so that the next one leaves it alone.

One file for each process, in a folder that only the user can enter. A process keeps its file locked while it lives
(flock(2)), so a file that can be locked was left by one that has ended, however it ended, and is removed. Taking a
claim and reading those of others is one step under a lock of the folder. Only the process that starts a server uses
this; nothing here is asked while requests run.
"""

import contextlib
import fcntl
import json
import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

_SUFFIX = ".json"


@dataclass(frozen=True)
class Claim:
    """What one server told others about itself."""

    pid: int
    model: str
    memory_bytes: int
    """Weights, and the budget for the state of past tokens."""
    url: str
    """Where it can be asked, such as `http://127.0.0.1:8080`; empty while it starts."""


class OwnClaim:
    """The claim of this process; gone when closed, or when the process ends."""

    def __init__(self, path: Path, descriptor: int, claim: Claim) -> None:
        self._path = path
        self._descriptor = descriptor
        self.tell(claim)

    def tell(self, claim: Claim) -> None:
        """Replaces what others read."""
        text = json.dumps(asdict(claim)).encode()
        os.pwrite(self._descriptor, text.ljust(os.fstat(self._descriptor).st_size), 0)

    def close(self) -> None:
        """Gives the claim up."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def take(folder: Path, claim: Claim) -> tuple[OwnClaim, list[Claim]]:
    """Makes a claim and returns it with those of the servers that run already. Raises OSError.

    The folder is created if it is missing; PermissionError if it is not this user's alone.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(folder)
    with _locked(folder / "lock"):
        others = [other for path in sorted(folder.glob(f"*{_SUFFIX}")) if (other := _read(path)) is not None]
        path = folder / f"{claim.pid}{_SUFFIX}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return OwnClaim(path, descriptor, claim), others


def running(folder: Path) -> list[Claim]:
    """Returns the claims of the servers that run now; none if the folder cannot be read."""
    try:
        _check_owner(folder)
        with _locked(folder / "lock"):
            return [claim for path in sorted(folder.glob(f"*{_SUFFIX}")) if (claim := _read(path)) is not None]
    except OSError:
        return []


def _check_owner(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not this user's alone")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read(path: Path) -> Claim | None:
    """Returns a running server's claim; None, after removing the file, if its process has ended."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _parse(file.read())
    path.unlink(missing_ok=True)
    return None


def _parse(text: bytes) -> Claim | None:
    try:
        claim = Claim(**json.loads(text))
    except (ValueError, TypeError):
        logger.debug("a claim of another version is not understood: %r", text)
        return None
    return claim if isinstance(claim.memory_bytes, int) and isinstance(claim.pid, int) else None
