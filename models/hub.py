"""Downloads models into the local Hugging Face cache: only what MLX needs, and never the same bytes twice.

`huggingface_hub` keeps no part of a file whose download is interrupted, and a small model is one file. So weights
are fetched here first, each into `blobs/<sha256>.part`, which the next attempt continues, and moved to where
`snapshot_download` finds them; it then fetches the rest and files everything under its name.
"""

import errno
import fcntl
import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import httpx2
from huggingface_hub import HfApi, get_session, get_token, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import hf_raise_for_status, tqdm  # type: ignore[attr-defined]  # made on demand there

from models.errors import (
    DiskTooFull,
    HubUnreachable,
    ModelNotFound,
    PullFailed,
    RepositoryGated,
    RepositoryNotFound,
    RepositoryUnsuitable,
)
from models.names import (
    BUILT_IN,
    FILE_PATTERNS,
    IGNORED_PATTERNS,
    RepositoryName,
    cache_folder,
    parse_repository,
    resolve,
    suggest,
)

Report: TypeAlias = Callable[[int, int], None]
"""Called with the bytes that are here and the bytes there will be."""

_BLOCK_BYTES = 1 << 20
_MAX_FUTILE_ATTEMPTS = 5
"""Attempts in a row that bring nothing of a file, after which its download is given up for now."""
_PAUSE_SECONDS = 1.0
_TIMEOUT_SECONDS = 10.0
"""Longest silence of the hub, as in `huggingface_hub`."""


@dataclass(frozen=True)
class _File:
    name: str
    size_bytes: int
    sha256: str | None
    """Known for large files only; those are the ones worth resuming."""


@dataclass(frozen=True)
class _Download:
    repository: RepositoryName
    commit: str
    files: tuple[_File, ...]

    @property
    def blobs(self) -> Path:
        """Returns where the cache keeps this repository's contents, by their hashes."""
        return cache_folder() / f"models--{self.repository.repository.replace('/', '--')}" / "blobs"

    def part(self, file: _File) -> Path:
        """Returns where the unfinished bytes of a large file are kept."""
        return self.blobs / f"{file.sha256}.part"

    def is_here(self, file: _File) -> bool:
        """Returns whether `file` is complete and in its place."""
        return (self.blobs / (file.sha256 or "")).is_file() or self._snapshot_file(file).exists()

    def bytes_here(self, file: _File) -> int:
        """Returns how many bytes of `file` need not be fetched again."""
        if self.is_here(file):
            return file.size_bytes
        part = self.part(file)
        return part.stat().st_size if file.sha256 and part.exists() else 0

    def _snapshot_file(self, file: _File) -> Path:
        return self.blobs.parent / "snapshots" / self.commit / file.name


def pull(name: str, report: Report = lambda done, total: None) -> Path:
    """Returns the folder of the model called `name`, downloaded as far as it was not here yet.

    Raises ModelNotFound if `name` can be no repository, and PullFailed; what was fetched until then is kept.
    """
    if name in BUILT_IN:
        return resolve(name)
    repository = parse_repository(name)
    if repository is None:
        raise ModelNotFound(f"{name!r} is no repository org/name: {suggest(name)}")
    with _explained(repository):
        download = _plan(repository)
        _require_weights(download)
        _require_space(download)
        _fetch_large_files(download, report)
        return Path(
            snapshot_download(
                repository.repository,
                revision=repository.revision,
                allow_patterns=FILE_PATTERNS,
                ignore_patterns=IGNORED_PATTERNS,
                tqdm_class=_SilentBar,
            )
        )


def _plan(repository: RepositoryName) -> _Download:
    info = HfApi().model_info(repository.repository, revision=repository.revision, files_metadata=True)
    siblings = {file.rfilename: file for file in info.siblings or ()}
    files = (
        _File(name, file.size or 0, lfs.sha256 if (lfs := file.lfs) else None)
        for name, file in siblings.items()
        if _is_wanted(name)
    )
    return _Download(repository, info.sha or repository.revision, tuple(files))


def _is_wanted(name: str) -> bool:
    """Returns what `snapshot_download` decides by the same patterns."""
    return any(fnmatch(name, pattern) for pattern in FILE_PATTERNS) and not any(
        fnmatch(name, pattern) for pattern in IGNORED_PATTERNS
    )


def _require_weights(download: _Download) -> None:
    names = {file.name for file in download.files}
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        raise RepositoryUnsuitable(
            f"{download.repository} holds no weights that MLX can load (config.json and model*.safetensors); "
            "look for a conversion of it under mlx-community"
        )


def _require_space(download: _Download) -> None:
    needed_bytes = sum(file.size_bytes - download.bytes_here(file) for file in download.files)
    place = cache_folder()
    while not place.exists():
        place = place.parent
    free_bytes = shutil.disk_usage(place).free
    if needed_bytes > free_bytes:
        raise DiskTooFull(
            f"{download.repository} needs {needed_bytes / 1e9:.1f} GB more, "
            f"and {place} has {free_bytes / 1e9:.1f} GB left"
        )


def _fetch_large_files(download: _Download, report: Report) -> None:
    total_bytes = sum(file.size_bytes for file in download.files)
    done_bytes = sum(map(download.bytes_here, download.files))
    report(done_bytes, total_bytes)

    def add(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += num_bytes
        report(done_bytes, total_bytes)

    for file in download.files:
        if file.sha256 is not None and not download.is_here(file):
            _fetch(download, file, add)
    report(total_bytes, total_bytes)


def _fetch(download: _Download, file: _File, add: Callable[[int], None]) -> None:
    """Fetches what is missing of one file, and moves it to its place if its contents are right."""
    part = download.part(file)
    part.parent.mkdir(parents=True, exist_ok=True)
    with part.open("ab") as target, _alone(target, download.repository):
        _receive_rest(download, file, target, add)
        target.flush()
        if _sha256(part) != file.sha256:
            part.unlink()
            raise PullFailed(f"{file.name} of {download.repository} arrived damaged and was removed; pull it again")
        part.rename(part.with_suffix(""))


def _receive_rest(download: _Download, file: _File, target: BinaryIO, add: Callable[[int], None]) -> None:
    """Appends what is missing of a file, going on where the connection was cut as long as anything comes."""
    num_futile = 0
    while target.tell() < file.size_bytes:
        before_bytes = target.tell()
        try:
            _receive(download, file, target, add)
        except httpx2.TransportError:
            num_futile = 0 if target.tell() > before_bytes else num_futile + 1
            if num_futile == _MAX_FUTILE_ATTEMPTS:
                raise
            time.sleep(_PAUSE_SECONDS)
        else:
            return


def _receive(download: _Download, file: _File, target: BinaryIO, add: Callable[[int], None]) -> None:
    """Appends to what is there already until the hub has sent everything or the connection is cut."""
    url = hf_hub_url(download.repository.repository, file.name, revision=download.commit)
    with get_session().stream("GET", url, headers=_headers(target.tell()), timeout=_TIMEOUT_SECONDS) as response:
        hf_raise_for_status(response)
        if response.status_code != httpx2.codes.PARTIAL_CONTENT:
            # The whole file comes, whatever was asked for.
            add(-target.tell())
            target.truncate(0)
        for block in response.iter_bytes(_BLOCK_BYTES):
            target.write(block)
            add(len(block))


def _headers(num_bytes_here: int) -> dict[str, str]:
    token = get_token()
    return {
        # A range of a compressed answer would be one of other bytes.
        "Accept-Encoding": "identity",
        **({"Range": f"bytes={num_bytes_here}-"} if num_bytes_here else {}),
        **({"Authorization": f"Bearer {token}"} if token else {}),
    }


@contextmanager
def _alone(target: BinaryIO, repository: RepositoryName) -> Iterator[None]:
    try:
        fcntl.flock(target, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise PullFailed(f"{repository} is being downloaded by another process already") from error
    yield


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as source:
        while block := source.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


class _SilentBar(tqdm):
    """Stands where `huggingface_hub` wants a progress bar; shows nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "disable": True})  # type: ignore[no-untyped-call]


@contextmanager
def _explained(repository: RepositoryName) -> Iterator[None]:
    """Turns what can go wrong with the hub, the network and the disk into PullFailed with one sentence."""
    endpoint = HfApi().endpoint
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise HubUnreachable("HF_HUB_OFFLINE is set, so nothing can be downloaded") from error
    except GatedRepoError as error:
        raise RepositoryGated(
            f"{repository} asks for consent: accept its terms on its page, set HF_TOKEN, and pull it again"
        ) from error
    except RevisionNotFoundError as error:
        raise RepositoryNotFound(f"{repository.repository} has no revision {repository.revision!r}") from error
    except RepositoryNotFoundError as error:
        raise RepositoryNotFound(
            f"There is no repository {repository.repository}, or it is private; if it is yours, set HF_TOKEN"
        ) from error
    except HfHubHTTPError as error:
        raise HubUnreachable(
            f"{endpoint} answered with status {error.response.status_code}; try again later"
        ) from error
    except (httpx2.HTTPError, ConnectionError, LocalEntryNotFoundError) as error:
        raise HubUnreachable(f"{endpoint} cannot be reached; is there a network?") from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise DiskTooFull(f"The disk is full; make room and pull {repository} again") from error
        raise PullFailed(f"{repository} could not be stored: {error}") from error
