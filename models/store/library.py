"""Makes and removes local names, and verifies models' files.

A file of Hugging Face's cache links to a blob named by its hash: SHA-256 for large files, Git's SHA-1 for others.
Elsewhere only the headers of weights are checked, and their length.
"""

import fcntl
import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from models.errors import ModelBroken, ModelfileError, StoreError, reason, told_as
from models.names import BUILT_IN, cache_folder, find_family, find_stored, folder_of, home_of, parse_repository
from models.store.manifest import user_manifest
from models.store.stored_model import LATEST, ModelDefaults, Modelfile, StoredModel, WeightsPlace, parse_full_name
from models.weights import missing_files, read_header

if TYPE_CHECKING:
    from huggingface_hub import DeleteCacheStrategy


def create(name: str, weights: WeightsPlace, modelfile: Modelfile, *, replaces: bool = True) -> StoredModel:
    """Makes a model of `weights`, keeping settings that a Modelfile leaves out.

    Raises ModelNotFound, ModelBroken, StoreError, and ModelfileError for a parameter that cannot be honoured.
    """
    full = parse_free_name(name)
    parent = find_stored(modelfile.base)
    if parent is None:
        folder_of(weights)
    defaults = (ModelDefaults() if parent is None else parent.defaults).with_parameters(modelfile.parameters)
    _check_template_arguments(defaults)
    system = defaults.system if modelfile.system is None else modelfile.system
    defaults = replace(defaults, system=system, messages=tuple(modelfile.messages) or defaults.messages)
    text = modelfile.license if modelfile.license is not None else "" if parent is None else parent.license
    now = datetime.now(UTC)
    with user_manifest().change() as stored:
        before = stored.get(full)
        if before is not None and not replaces:
            raise StoreError(f"there is a name {before.short_name} already; remove it first, or give --force")
        made = StoredModel(full, weights, now if before is None else before.created, now, defaults, text)
        stored[full] = made
    return made


def remove(name: str) -> StoredModel:
    """Removes a name, no weights; returns the removed model. Raises StoreError."""
    full = parse_full_name(name)
    with user_manifest().change() as stored:
        if full not in stored:
            raise StoreError(f"there is no name {full.removesuffix(f':{LATEST}')!r} of your own")
        return stored.pop(full)


def find_removal(place: WeightsPlace) -> "DeleteCacheStrategy":
    """What deletes a download from Hugging Face's cache.

    Raises StoreError where names stand for the download, where it is being pulled, and where its files are not whole.
    """
    from huggingface_hub import scan_cache_dir

    if others := names_with(place):
        raise StoreError(
            f"{', '.join(others)} would have no weights; remove these names first: mlx-serve rm {others[0]}"
        )
    home = home_of(place.name)
    # The last revision goes with all its repository has, also with what arrives for another one.
    if any(map(is_locked, home.glob("blobs/*.part"))):
        raise StoreError(f"{place.name} is being pulled; delete it after that")
    cache = scan_cache_dir(cache_folder())
    # A copy of the repository has the same commits.
    own = frozenset(one for one in cache.repos if (one.repo_type, one.repo_id) == ("model", place.name))
    removal = replace(cache, repos=own).delete_revisions(place.commit)
    if not removal.repos and not removal.snapshots:
        advice = f"mend it first: mlx-serve pull {place}; or delete the folder {home.name} of Hugging Face's cache"
        raise StoreError(f"the download of {place.name} is not whole, and was not deleted; {advice}")
    return removal


def delete(removal: "DeleteCacheStrategy") -> None:
    """Deletes a download; raises StoreError where files stay, which the hub's own library only logs."""
    with told_as(StoreError, "not all its files were deleted"):
        removal.execute()
    if any(path.exists() for path in (*removal.repos, *removal.snapshots)):
        raise StoreError("not all its files were deleted: the folder of Hugging Face's cache does not let go of them")


def is_locked(file: Path) -> bool:
    """Whether a process holds a file's lock, as a pull does."""
    try:
        with file.open("rb") as opened:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # it has just arrived
        return False
    return False


def names_with(place: WeightsPlace) -> list[str]:
    """The names of the same weights; raises StoreError."""
    return [model.short_name for model in user_manifest().models().values() if model.weights == place]


def parse_free_name(name: str) -> str:
    """`name:tag` for a name that may be stored; raises StoreError."""
    full = parse_full_name(name)
    short = full.removesuffix(f":{LATEST}")
    if short in BUILT_IN:
        raise StoreError(f"{short} stands for a model that comes with mlx-serve; choose another name")
    if parse_repository(short) is not None or find_family(short):
        raise StoreError(f"{short} is a short name of models to pull; choose another name")
    return full


def _check_template_arguments(defaults: ModelDefaults) -> None:
    if not defaults.template_arguments:
        return
    # This import loads the tokenizers.
    from models.prompt.chat_template import RESERVED_TEMPLATE_ARGUMENTS

    for name in defaults.template_arguments.keys() & RESERVED_TEMPLATE_ARGUMENTS:
        raise ModelfileError(f"chat_template_kwargs.{name} cannot be set: the server itself tells it to the template")


_HASH = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")
"""SHA-256, or Git's SHA-1."""


def verify(folder: Path) -> tuple[Mapping[str, str], int, int]:
    """Faults by file, the number of files, and of those whose hash is known. Reads about a gigabyte a second."""
    files = sorted(path for path in folder.iterdir() if not path.is_dir())
    missing = missing_files(folder)
    faults, num_compared = dict.fromkeys(missing, "missing"), 0
    for file in files:
        if file.name in missing:
            continue
        linked = file.readlink().name if file.is_symlink() else ""
        expected = linked if _HASH.fullmatch(linked) else None
        num_compared += expected is not None
        if (fault := _fault(file, expected)) is not None:
            faults[file.name] = fault
    return dict(sorted(faults.items())), len(files), num_compared


def _fault(file: Path, expected: str | None) -> str | None:
    if not file.exists():
        return "missing"
    try:
        if file.suffix == ".safetensors":
            read_header(file)
        is_damaged = expected is not None and _hash(file, expected) != expected
    except ModelBroken as error:
        return str(error).removeprefix(f"{file} is ")
    except OSError as error:
        return f"not readable: {reason(error)}"
    return "damaged: its hash is not the hub's" if is_damaged else None


def _hash(file: Path, expected: str) -> str:
    is_sha256 = len(expected) == hashlib.sha256().digest_size * 2
    # Git's hash covers a file's kind and size before its contents.
    begun = hashlib.sha256() if is_sha256 else hashlib.sha1(f"blob {file.stat().st_size}\0".encode())
    with file.open("rb") as source:
        return hashlib.file_digest(source, lambda: begun).hexdigest()
