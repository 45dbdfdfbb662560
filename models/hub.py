"""Downloads models into the local Hugging Face cache: only what MLX needs, never the same bytes twice.

`huggingface_hub` keeps no part of an interrupted file. So weights are fetched here, into `blobs/<sha256>.part`, which
the next attempt continues.
"""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import httpx2
from huggingface_hub import HfApi, errors, hf_hub_url, snapshot_download
from huggingface_hub.utils import build_hf_headers, filter_repo_objects, get_session, hf_raise_for_status, tqdm  # type: ignore[attr-defined]

from models import names, providers
from models.errors import ModelError, ModelNotFound, PullFailed, RepositoryNotFound
from models.texts import size_text
from models.weights import MTP_FILE, find_weight_files, other_formats, read_header, read_json, total_bytes


@dataclass(frozen=True)
class PlannedFile:
    """A file to download."""

    name: str
    num_bytes: int
    digest: str
    """SHA-256 in hexadecimal; empty for a small file, not worth resuming."""


@dataclass(frozen=True)
class PullPlanned:
    """The files to fetch are known, and fit the disk."""

    repository: str
    files: tuple[PlannedFile, ...]
    needs: str = ""
    """What must be installed to run the model, as a sentence; empty where nothing."""


@dataclass(frozen=True)
class PullProgress:
    """Bytes fetched so far."""

    file: PlannedFile | None
    """None for the small files together."""
    file_bytes: int
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class PullChecking:
    """A complete file is compared with its digest."""

    file: PlannedFile


PullEvent: TypeAlias = PullPlanned | PullProgress | PullChecking
TellPull: TypeAlias = Callable[[PullEvent], None]
"""Called on the downloading thread; an exception ends the download, which keeps its bytes."""


_PATTERNS: Mapping[str, Any] = {"allow_patterns": names.PULLED_PATTERNS, "ignore_patterns": names.IGNORED_PATTERNS}
_BLOCK_BYTES = 1 << 20
_MAX_FUTILE_ATTEMPTS = 5
_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0
_BUSY = (429, 500, 502, 503, 504)
_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True)
class _Download:
    repository: names.RepositoryName
    commit: str
    files: tuple[PlannedFile, ...]
    others: tuple[str, ...]
    blobs: Path
    needs: str

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def part(self, file: PlannedFile) -> Path:
        return self.blobs / f"{file.digest}.part"

    def is_here(self, file: PlannedFile) -> bool:
        places = [self.blobs / file.digest] if file.digest else []
        places.append(self.blobs.parent / "snapshots" / self.commit / file.name)
        return any(place.is_file() and place.stat().st_size == file.num_bytes for place in places)

    def bytes_here(self, file: PlannedFile) -> int:
        if self.is_here(file):
            return file.num_bytes
        part = self.part(file)
        return part.stat().st_size if file.digest and part.exists() else 0


def pull(name: str, tell: TellPull = lambda event: None, *, max_weights_bytes: int | None = None) -> Path:
    """Returns the folder of the model called `name`, after downloading what is missing.

    Weights above `max_weights_bytes` are not fetched. Raises ModelNotFound and PullFailed; fetched bytes are kept.
    """
    if name in names.BUILT_IN:
        return names.resolve(name)
    repository = names.parse_repository(name)
    if repository is None:
        raise ModelNotFound(f"{name!r} is no repository org/name: {names.suggest(name, here='')}")
    with _explained(repository):
        download = _plan(repository)
        _require_weights(download)
        if max_weights_bytes is not None:
            weights_bytes = sum(file.num_bytes for file in download.files if file.name.endswith(".safetensors"))
            _require(download, name, weights_bytes, max_weights_bytes, "of memory for weights", "this machine")
        _fetch_weights(download, name, tell)
        revision = repository.revision
        folder = snapshot_download(repository.repository, revision=revision, tqdm_class=_SilentBar, **_PATTERNS)
        tell(PullProgress(None, 0, download.num_bytes, download.num_bytes))
        return Path(folder)


def find_mtp(name: str, folder: Path) -> str | None:
    """A repository with the MTP module that a downloaded model declares and lacks, if any."""
    # Qwen3.5-9B-MTP-4bit is for Qwen3.5-9B-4bit and Qwen3.5-9B-MLX-4bit.
    repository = names.parse_repository(name)
    parts = re.fullmatch(r"[^/]+/(.+?)(?:-MLX)?-(\d+bit|bf16)", repository.repository if repository else "")
    if parts is None or not _lacks_mtp(folder):
        return None
    for bits in dict.fromkeys((parts[2], "4bit")):
        with suppress(errors.HfHubHTTPError, httpx2.HTTPError, OSError):
            return HfApi().model_info(f"{names.ORGANIZATION}/{parts[1]}-MTP-{bits}", timeout=_TIMEOUT_SECONDS).id
    return None


def _lacks_mtp(folder: Path) -> bool:
    config, keys = read_json(folder / "config.json"), ("mtp_num_hidden_layers", "num_nextn_predict_layers")
    sections = [one for one in (config, config.get("text_config")) if isinstance(one, dict)]
    declaring = [one for one in sections if any(one.get(key) for key in keys)]
    if not declaring or (folder / MTP_FILE).is_file():
        return False
    own = re.compile(rf"\b(mtp|layers\.{declaring[0].get('num_hidden_layers')}\.)")
    with suppress(ModelError):
        return not any(own.search(tensor) for file in find_weight_files(folder) for tensor in read_header(file))
    return False


def pull_mtp(folder: Path, module: _Download, check: Callable[[Path], None], tell: TellPull) -> None:
    """Fetches an MTP module for the model in `folder`, unless `check` raises ModelError for the file."""
    file, repository = module.files[0], str(module.repository)
    if folder.parent.name != "snapshots":
        raise PullFailed(
            f"{folder} was not pulled, so it cannot get the MTP module {repository}; name a pulled model"
        )
    if file.num_bytes > total_bytes(folder):
        raise PullFailed(f"{repository} is no MTP module: {size_text(file.num_bytes)} is more than the model takes")
    with _explained(module.repository):
        download = replace(module, blobs=folder.parent.parent / "blobs")
        blob, is_new = download.blobs / file.digest, not download.is_here(file)
        _fetch_weights(download, repository, tell)
        try:
            check(blob)
        except ModelError as error:
            if is_new:
                blob.unlink()
            raise PullFailed(f"{repository} holds no MTP module for this model: {error}") from error
        (folder / MTP_FILE).unlink(missing_ok=True)
        (folder / MTP_FILE).symlink_to(os.path.relpath(blob, folder))


def mtp_of(source: str) -> _Download:
    """The download of an MTP module, the only file of weights in its repository. Raises PullFailed."""
    repository = names.parse_repository(source)
    if repository is None:
        raise PullFailed(f"{source!r} is no repository org/name with an MTP module")
    with _explained(repository):
        plan = _plan(repository)
    weights = [file for file in plan.files if file.name.endswith(".safetensors")]
    modules = [file for file in weights if file.name == MTP_FILE] or weights
    if len(modules) != 1 or not modules[0].digest:
        holds, hint = f"{plan.repository} holds {len(modules)} files of weights", other_formats(plan.others)
        raise PullFailed(f"{holds}; an MTP module is a single one{hint}")
    return replace(plan, files=(modules[0],))


def _plan(repository: names.RepositoryName) -> _Download:
    info = HfApi().model_info(repository.repository, revision=repository.revision, files_metadata=True)
    siblings = info.siblings or ()
    wanted = list(filter_repo_objects(siblings, key=lambda one: one.rfilename, **_PATTERNS))
    files = (PlannedFile(one.rfilename, one.size or 0, one.lfs.sha256 if one.lfs else "") for one in wanted)
    others = tuple(one.rfilename for one in siblings if one not in wanted)
    blobs = names.cache_folder() / f"models--{repository.repository.replace('/', '--')}" / "blobs"
    model_type = (info.config or {}).get("model_type")
    need = providers.need_of(model_type)
    needs = need and f"Models of the type {model_type!r} are not known to mlx-lm; {need}"
    return _Download(repository, info.sha or repository.revision, tuple(files), others, blobs, needs)


def _require_weights(download: _Download) -> None:
    file_names = {file.name for file in download.files}
    if "config.json" not in file_names or not any(fnmatch(name, "model*.safetensors") for name in file_names):
        raise PullFailed(
            f"{download.repository} holds no weights that MLX can load (config.json and model*.safetensors)"
            f"{other_formats(download.others) or '; look for a conversion of it under mlx-community'}"
        )


def _require(download: _Download, name: str, needed_bytes: int, limit_bytes: int, what: str, place: object) -> None:
    if needed_bytes > limit_bytes:
        smaller = names.suggest_smaller(name, limit_bytes)
        needed, left = size_text(needed_bytes), size_text(max(limit_bytes, 0))
        hint = "" if smaller is None else f"; {smaller} would fit"
        raise PullFailed(f"{download.repository} needs {needed} {what}, and {place} has {left} left{hint}")


def _fetch_weights(download: _Download, name: str, tell: TellPull) -> None:
    place = next(one for one in (names.cache_folder(), *names.cache_folder().parents) if one.exists())
    here_bytes = sum(map(download.bytes_here, download.files))
    _require(download, name, download.num_bytes - here_bytes, shutil.disk_usage(place).free, "more", place)
    tell(PullPlanned(str(download.repository), download.files, download.needs))
    tell(PullProgress(None, 0, here_bytes, download.num_bytes))
    for file in download.files:
        if file.digest and not download.is_here(file):
            _fetch(download, file, tell)


def _fetch(download: _Download, file: PlannedFile, tell: TellPull) -> None:
    part = download.part(file)
    part.parent.mkdir(parents=True, exist_ok=True)
    with part.open("ab") as target:
        try:
            fcntl.flock(target, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PullFailed(f"{download.repository} is being downloaded by another process already") from error
        _receive_rest(download, file, target, tell)
        target.flush()
        tell(PullChecking(file))
        with part.open("rb") as source:
            digest = hashlib.file_digest(source, "sha256").hexdigest()
        if digest != file.digest:
            part.unlink()
            raise PullFailed(f"{file.name} of {download.repository} arrived damaged and was removed; pull it again")
        part.rename(part.with_suffix(""))


def _receive_rest(download: _Download, file: PlannedFile, target: BinaryIO, tell: TellPull) -> None:
    others_bytes = sum(download.bytes_here(one) for one in download.files if one != file)

    def report() -> None:
        tell(PullProgress(file, target.tell(), others_bytes + target.tell(), download.num_bytes))

    report()
    num_futile = 0
    while target.tell() < file.num_bytes:
        before_bytes = target.tell()
        try:
            return _receive(download, file, target, report)
        except (httpx2.TransportError, errors.HfHubHTTPError) as error:
            num_futile = 0 if target.tell() > before_bytes else num_futile + 1
            pause_seconds = _pause_after(error)
            if num_futile == _MAX_FUTILE_ATTEMPTS or pause_seconds is None:
                raise
            time.sleep(pause_seconds)
    return None


def _pause_after(error: httpx2.TransportError | errors.HfHubHTTPError) -> float | None:
    """The seconds until another attempt; None if that makes no sense."""
    if not isinstance(error, errors.HfHubHTTPError):
        return _PAUSE_SECONDS
    if error.response.status_code not in _BUSY:
        return None
    asked = error.response.headers.get("retry-after", "")
    return min(float(asked), _LONGEST_PAUSE_SECONDS) if asked.isdecimal() else _PAUSE_SECONDS


def _receive(download: _Download, file: PlannedFile, target: BinaryIO, report: Callable[[], None]) -> None:
    url = hf_hub_url(download.repository.repository, file.name, revision=download.commit)
    # A range of a compressed answer would contain other bytes.
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if target.tell():
        headers["Range"] = f"bytes={target.tell()}-"
    with get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT_SECONDS) as response:
        hf_raise_for_status(response)
        if response.status_code != httpx2.codes.PARTIAL_CONTENT:
            # The whole file arrives, although a range was requested.
            target.seek(0)
            target.truncate()
        for block in response.iter_bytes(_BLOCK_BYTES):
            target.write(block)
            report()


class _SilentBar(tqdm):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "disable": True})  # type: ignore[no-untyped-call]


@contextmanager
def _explained(repository: names.RepositoryName) -> Iterator[None]:
    try:
        yield
    except (httpx2.HTTPError, OSError) as error:
        raise _explanation(repository, HfApi().endpoint, error) from error


def _explanation(repository: names.RepositoryName, endpoint: str, error: Exception) -> PullFailed:
    match error:
        case errors.OfflineModeIsEnabled():
            return PullFailed("HF_HUB_OFFLINE is set, so nothing can be downloaded")
        case errors.GatedRepoError():
            return PullFailed(
                f"{repository} asks for consent: accept its terms on {endpoint}/{repository.repository}, set "
                f"HF_TOKEN to a token of {endpoint}/settings/tokens, and pull it again"
            )
        case errors.RevisionNotFoundError():
            return RepositoryNotFound(f"{repository.repository} has no revision {repository.revision!r}")
        case errors.RepositoryNotFoundError():
            hint = "or it is private; if it is yours, set HF_TOKEN"
            return RepositoryNotFound(f"There is no repository {repository.repository}, {hint}")
        case errors.HfHubHTTPError(response=response):
            wrong_token = "does not take the token; set HF_TOKEN to another, or unset it"
            busy = "is asked too often from here; try again later, or set HF_TOKEN"
            other = f"answered with status {response.status_code}; try again later"
            explanation = {401: wrong_token, 403: wrong_token, 429: busy}.get(response.status_code, other)
            return PullFailed(f"{endpoint} {explanation}")
        case httpx2.HTTPError() | ConnectionError() | errors.LocalEntryNotFoundError():
            proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
            way = f" through the proxy of HTTPS_PROXY, {proxy.rpartition('@')[2]}" if proxy else ""
            return PullFailed(f"{endpoint} cannot be reached{way}; is there a network?")
        case OSError(errno=errno.ENOSPC):
            return PullFailed(f"The disk is full; make room and pull {repository} again")
    return PullFailed(f"{repository} could not be stored: {error}")
