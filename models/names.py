"""What a MODEL name stands for on this machine.

A name is one of `BUILT_IN`, a local name (`models.store`), a folder, a short name like `qwen3:0.6b`, or a repository
in Hugging Face's cache, as `org/name[@revision]` or its address. `short_names.toml` maps short names, as known from
Ollama, to repositories. Never touches the network.
"""

import contextlib
import difflib
import hashlib
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from models.errors import ModelBroken, ModelError, ModelNotFound, reason
from models.store.manifest import user_manifest
from models.store.stored_model import StoredModel, WeightsPlace
from models.weights import ADVICE, MTP_FILE, other_formats, read_json

DEMO = "demo"
DEMO_FOLDER = Path(__file__).resolve().parent / "demo"
BUILT_IN = {DEMO: DEMO_FOLDER, "demo-hybrid": DEMO_FOLDER.with_name("demo_hybrid")}

FILE_PATTERNS = ["*.json", "*.jinja", "*.jsonl", "*.model", "*.tiktoken", "*.txt", "model*.safetensors"]
"""Never `*.py`: a repository's code is not run."""
PULLED_PATTERNS = [*FILE_PATTERNS, MTP_FILE]
"""With files that a model is complete without."""

IGNORED_PATTERNS = ["*/*"]
"""Subfolders with other formats of the same weights."""

_NEEDED = "a model needs config.json and its weights, model*.safetensors"
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?"
_REPOSITORY = re.compile(
    rf"(?!.*(?:--|\.\.))(?!(?i:www\.)?(?i:huggingface\.co|hf\.co)/){_PART}/{_PART}(?:@[A-Za-z0-9][A-Za-z0-9_./+-]*)?"
)

_HOME = "models--"
_ADDRESS = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<repository>[^/?#]+/[^/?#]+)"
    r"(?:/(?:tree|blob|resolve)/(?P<revision>refs/[^/?#]+/[^/?#]+|[^/?#]+)[^?#]*)?/?(?:[?#].*)?",
    re.IGNORECASE,
)


# ------------------------------------------------------------------------------------------------- short names

ORGANIZATION = "mlx-community"
_PARAMETERS = "parameters"
_OVERHEAD = 1.06


@dataclass(frozen=True)
class ShortName:
    """A short name and its repository."""

    name: str
    family: str
    repository: str
    num_bytes: int
    """Estimated, of the weights."""
    is_usual: bool


def _read(families: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, ShortName]:
    found: dict[str, ShortName] = {}
    for family, sizes in families.items():
        for size, entry in sizes.items():
            kinds = [kind for kind in entry if kind != _PARAMETERS]
            for kind in kinds:
                num_bytes = int(entry[_PARAMETERS] * 1e9 * _bits(kind) / 8 * _OVERHEAD)
                usual = kind == kinds[0]
                repository = f"{ORGANIZATION}/{entry[kind]}"
                for name in [f"{family}:{size}", f"{family}:{size}-{kind}"] if usual else [f"{family}:{size}-{kind}"]:
                    found[name] = ShortName(name, family, repository, num_bytes, usual and name.endswith(size))
    return found


def _bits(kind: str) -> float:
    """A quantization's bits for each weight, scales included."""
    return {"bf16": 16.0, "mxfp4": 4.25}.get(kind) or int(kind.removesuffix("bit")) + 0.5


SHORT_NAMES = _read(tomllib.loads(Path(__file__).with_name("short_names.toml").read_text(encoding="utf-8")))
FAMILIES: Mapping[str, Sequence[ShortName]] = {
    family: sorted(
        (one for one in SHORT_NAMES.values() if one.family == family and one.is_usual), key=lambda one: one.num_bytes
    )
    for family in dict.fromkeys(one.family for one in SHORT_NAMES.values())
}


def find_short_name(text: str) -> ShortName | None:
    """The known name of `text`, in any case."""
    return SHORT_NAMES.get(text.lower())


def find_family(text: str) -> Sequence[ShortName]:
    """Usual names of a family, written `qwen3` or `qwen3:latest`."""
    return FAMILIES.get(text.lower().removesuffix(":latest"), ())


def like(text: str) -> list[str]:
    """Usual names of families that begin like `text`."""
    wanted = _plain(text.partition(":")[0])
    families = [family for family in FAMILIES if wanted and _plain(family).startswith(wanted)]
    return [one.name for family in families for one in FAMILIES[family]]


def largest(names: Sequence[ShortName], limit_bytes: int) -> ShortName | None:
    """The largest model with weights within `limit_bytes`, if any."""
    fitting = [one for one in names if one.num_bytes <= limit_bytes]
    return max(fitting, key=lambda one: one.num_bytes, default=None)


def _plain(text: str) -> str:
    return re.sub(r"[\s_-]", "", text).lower()


# ------------------------------------------------------------------------------------------- what a name means


@dataclass(frozen=True)
class RepositoryName:
    """A hub repository and revision: a branch, tag or commit."""

    repository: str
    revision: str = "main"

    def __str__(self) -> str:
        return self.repository if self.revision == "main" else f"{self.repository}@{self.revision}"


@dataclass(frozen=True)
class InstalledModel:
    """`stored` and `identity` are of local names."""

    name: str
    path: Path
    size_bytes: int
    architecture: str
    quantization: str
    short_name: str = ""
    stored: StoredModel | None = None
    identity: str = ""


def shorten(name: str) -> str:
    """`org/name[@revision]` for an address; other names unchanged."""
    address = _ADDRESS.fullmatch(name.strip())
    if address is None:
        return name
    return str(RepositoryName(unquote(address["repository"]), unquote(address["revision"] or "main")))


def parse_repository(name: str) -> RepositoryName | None:
    """The repository of a name, short name or address, if possible."""
    head, at, revision = shorten(name).partition("@")
    short = find_short_name(head)
    full = head if short is None else short.repository
    if len(full) > 96 or not _REPOSITORY.fullmatch(full + at + revision):
        return None
    return RepositoryName(full, revision or "main")


def as_stored(repository: str) -> str:
    """A repository in the letters of its folder, since the hub ignores case."""
    home = _home_name(repository)
    near = name_on_disk(cache_folder() / home)
    return repository if near == home else near.removeprefix(_HOME).replace("--", "/")


def name_on_disk(path: Path) -> str:
    """The last part of a path as its folder lists it: the disk of most Macs ignores case."""
    with contextlib.suppress(OSError):
        names = os.listdir(path.parent)  # noqa: PTH208
        if path.name not in names:
            return next((one for one in names if one.lower() == path.name.lower()), path.name)
    return path.name


def _home_name(repository: str) -> str:
    return _HOME + repository.replace("/", "--")


def resolve(name: str) -> Path:
    """The folder of model `name`; raises ModelNotFound or ModelBroken."""
    return _found(name)[1]


def _found(name: str) -> tuple[WeightsPlace, Path]:
    if name in BUILT_IN:
        return WeightsPlace("built-in", name), _complete(BUILT_IN[name], f"the model {name!r}", "reinstall mlx-serve")
    stored = find_stored(name)
    if stored is not None:
        return stored.weights, folder_of(stored.weights)
    path = Path(name).expanduser()
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:
        raise ModelBroken(f"{name} is not readable: {reason(error)}") from error
    if is_folder:
        return WeightsPlace("folder", str(path.resolve())), _complete(path, f"the folder {name}", _NEEDED)
    if name.lower().endswith(".gguf"):
        raise ModelNotFound(f"{name} is a GGUF file, made for llama.cpp, which MLX does not read: {ADVICE}")
    if is_file:
        raise ModelNotFound(f"{name} is a file; name the folder that holds config.json and model*.safetensors")
    if name.startswith(("/", "./", "../", "~")):
        raise ModelNotFound(f"There is no folder {name}. `mlx-serve list` shows the models of this machine.")
    return _downloaded(name)


def _downloaded(name: str) -> tuple[WeightsPlace, Path]:
    family = find_family(name)
    repository = parse_repository(_largest_here(family, name) if family else name)
    if repository is None:
        raise ModelNotFound(f"There is no model {name!r}: {suggest(name)}")
    repository = replace(repository, repository=as_stored(repository.repository))
    folder = _cached(name, repository)
    return WeightsPlace("repository", repository.repository, folder.name), folder


def settle(name: str) -> str:
    """The largest model here of the family `name`; else `name`. Raises like `resolve`."""
    family = () if _is_no_download(name) else find_family(name)
    return _largest_here(family, name) if family else name


def _is_no_download(name: str) -> bool:
    return name in BUILT_IN or find_stored(name) is not None or Path(name).expanduser().is_dir()


def _largest_here(family: Sequence[ShortName], name: str) -> str:
    for one in sorted(family, key=lambda one: one.num_bytes, reverse=True):
        with contextlib.suppress(ModelNotFound):
            _cached(one.name, RepositoryName(one.repository))
            return one.name
    raise ModelNotFound(f"No model of the family {name} is on this machine yet; download one: mlx-serve pull {name}")


def find_stored(name: str) -> StoredModel | None:
    """The manifest's entry for a local name, never a path; raises StoreError."""
    return None if name in BUILT_IN else user_manifest().find(name)


def installed_place(name: str) -> WeightsPlace | None:
    """As `find_installed`, for local names too; raises StoreError too."""
    stored = find_stored(name)
    found = find_installed(name) if stored is None else (stored.weights, None)
    return None if found is None else found[0]


def find_installed(name: str) -> tuple[WeightsPlace, Path] | None:
    """Place and folder of an installed model, if any; local names do not count.

    Never takes a name for a path: it may come from anyone. Raises ModelBroken for half a download.
    """
    if name in BUILT_IN:
        return WeightsPlace("built-in", name), resolve(name)
    with contextlib.suppress(ModelNotFound):
        return _downloaded(name)
    return None


def folder_of(place: WeightsPlace) -> Path:
    """The folder of stored weights; raises ModelNotFound or ModelBroken."""
    if place.kind == "repository":
        return _cached(str(place), RepositoryName(place.name, place.commit))
    if place.kind == "built-in":
        if place.name not in BUILT_IN:
            raise ModelNotFound(f"There is no built-in model {place.name!r} in this version.")
        return resolve(place.name)
    folder = Path(place.name)
    if not folder.is_dir():
        raise ModelNotFound(f"There is no folder {folder} any more; put it back, or run `mlx-serve create` again.")
    return _complete(folder, f"the folder {folder}", _NEEDED)


def identity_of(place: WeightsPlace, folder: Path | None = None) -> str:
    """The weights' unique id, never a path; raises like `folder_of`, unless the `folder` is given."""
    folder = folder or folder_of(place)
    if place.kind == "repository":
        return _repository_identity(place.name, folder)
    if place.kind == "built-in":
        return place.name
    return f"{folder.name}-{hashlib.sha256(os.path.realpath(folder).encode()).hexdigest()[:8]}"


def model_id(name: str) -> str:
    """The id of a name of the command line. Raises ModelError.

    A folder is its own id, if `resolve` takes it for one; a name of our own has the id of its weights.
    """
    stored = find_stored(name)
    if stored is not None:
        return identity_of(stored.weights)
    path = Path(name).expanduser()
    if name in BUILT_IN or not path.is_dir():
        repository, at, revision = shorten(name).partition("@")
        return as_stored(repository) + at + revision
    # Not `resolve`: the link has the wanted name, and its target may be named by a hash.
    return name_on_disk(Path(os.path.abspath(path))) or name  # noqa: PTH100


def place_of(name: str) -> WeightsPlace:
    """Where the weights of `name`, perhaps a path, are; raises like `resolve`."""
    stored = find_stored(name)
    return _found(name)[0] if stored is None else stored.weights


def files_of(name: str) -> tuple[WeightsPlace, Path]:
    """Place and folder of `name`; files may be missing. Raises ModelNotFound."""
    repository = None if _is_no_download(name) else parse_repository(name)
    if repository is not None:
        repository = replace(repository, repository=as_stored(repository.repository))
    snapshot = None if repository is None else _snapshot(repository)
    if repository is not None and snapshot is not None:
        return WeightsPlace("repository", repository.repository, snapshot.name), snapshot
    place = place_of(name)
    if place.kind == "repository":
        return place, _snapshot(RepositoryName(place.name, place.commit)) or folder_of(place)
    return place, BUILT_IN[place.name] if place.kind == "built-in" else Path(place.name)


def _snapshot(repository: RepositoryName) -> Path | None:
    home = cache_folder() / _home_name(repository.repository)
    ref = home / "refs" / repository.revision
    folder = home / "snapshots" / (ref.read_text().strip() if ref.is_file() else repository.revision)
    return folder if folder.is_dir() else None


def _repository_identity(repository: str, snapshot: Path) -> str:
    """One id for every branch, tag or commit of a revision: `main`, else a branch, else the commit."""
    refs = _refs(snapshot)
    return str(RepositoryName(repository, "main" if "main" in refs else min(refs, default=snapshot.name)))


def _refs(snapshot: Path) -> frozenset[str]:
    refs = snapshot.parent.parent / "refs"
    return frozenset(str(ref.relative_to(refs)) for ref in refs.rglob("*") if _holds(ref, snapshot.name))


def _holds(ref: Path, commit: str) -> bool:
    try:
        return ref.is_file() and ref.read_text().strip() == commit
    except (OSError, ValueError):
        return False


def installed() -> list[InstalledModel]:
    """Built-in models, local names, complete downloads. Raises StoreError."""
    models = [describe(name, folder) for name, folder in BUILT_IN.items() if not missing_files(folder)]
    models += [model for stored in user_manifest().models().values() if (model := _described(stored)) is not None]
    paths = filter(_is_usable, _snapshots())
    cached = [describe(_repository_identity(_repository_of(path), path), path) for path in paths]
    return models + sorted(cached, key=lambda model: model.name.lower())


def used_last() -> str | None:
    """The downloaded chat model that was read last, if any."""

    def read_at(folder: Path) -> float:
        return max((file.stat().st_atime for file in folder.iterdir() if file.exists()), default=0.0)

    # In this order before any of their files is looked into.
    latest_first = sorted(_snapshots(), key=read_at, reverse=True)
    usable = (path for path in latest_first if "main" in _refs(path) and _is_usable(path) and _can_chat(path))
    return next(map(_repository_of, usable), None)


def missing_files(folder: Path) -> list[str]:
    """What a model in `folder` lacks."""
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    index = read_json(folder / "model.safetensors.index.json")
    shards = sorted(set(index.get("weight_map", {}).values()))
    if not shards and not any(folder.glob("model*.safetensors")):
        shards = ["model.safetensors"]
    return missing + [shard for shard in shards if not (folder / shard).is_file()]


def cache_folder() -> Path:
    """The folder of Hugging Face repositories, existing or not."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def cache_stamp() -> tuple[tuple[str, int], ...]:
    """Each folder's modification time in nanoseconds."""
    repositories = cache_folder().glob("models--*")
    folders = [one for repository in repositories for one in (repository / "refs", *repository.glob("snapshots/*"))]
    stamps = []
    for folder in sorted(folders):
        with contextlib.suppress(OSError):
            stamps.append((str(folder), folder.stat().st_mtime_ns))
    return tuple(stamps)


def _cached(name: str, repository: RepositoryName) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import IncompleteSnapshotError, LocalEntryNotFoundError

    pull = f"mlx-serve pull {shorten(name)}"
    try:
        folder = snapshot_download(
            repository.repository,
            revision=repository.revision,
            local_files_only=True,
            allow_patterns=FILE_PATTERNS,
            ignore_patterns=IGNORED_PATTERNS,
        )
    except IncompleteSnapshotError as error:
        raise ModelBroken(f"The download of {repository} is not complete; resume it: {pull}") from error
    except LocalEntryNotFoundError as error:
        raise ModelNotFound(f"{repository} is not on this machine yet; download it: {pull}") from error
    return _complete(Path(folder), f"the download of {repository}", f"resume it: {pull}")


def _complete(folder: Path, what: str, advice: str) -> Path:
    try:
        missing = missing_files(folder)
    except OSError as error:
        raise ModelBroken(f"{what[0].upper()}{what[1:]} is not readable: {reason(error)}") from error
    if missing:
        hint = other_formats(folder.iterdir()) if any(name.endswith(".safetensors") for name in missing) else ""
        raise ModelBroken(f"{what[0].upper()}{what[1:]} lacks {', '.join(missing[:3])}{hint or f'; {advice}'}")
    return folder


def suggest(name: str) -> str:
    """What to type in place of an unknown name."""
    sizes = like(name)
    if sizes:
        return f"choose a size: {', '.join(sizes)}"
    close = difflib.get_close_matches(name.lower(), [*BUILT_IN, *SHORT_NAMES, *FAMILIES], n=1)
    if close:
        return f"did you mean {close[0]}?"
    families = ", ".join(FAMILIES)
    return f"give 'demo', a folder, a repository org/name, or a short name such as qwen3:8b; families: {families}"


def _snapshots() -> list[Path]:
    """The hub's own search takes a quarter of a second to import."""
    return [path for path in cache_folder().glob("models--*/snapshots/*") if path.is_dir()]


def _repository_of(snapshot: Path) -> str:
    return snapshot.parent.parent.name.removeprefix("models--").replace("--", "/")


def _can_chat(folder: Path) -> bool:
    has_template = (folder / "chat_template.jinja").is_file()
    return has_template or "chat_template" in read_json(folder / "tokenizer_config.json")


def _described(stored: StoredModel) -> InstalledModel | None:
    try:
        folder = folder_of(stored.weights)
        identity = identity_of(stored.weights, folder)
        return replace(describe(stored.short_name, folder), stored=stored, identity=identity)
    except ModelError:
        return None


def _is_usable(folder: Path) -> bool:
    try:
        return not missing_files(folder)
    except OSError:
        return False


def describe(name: str, folder: Path) -> InstalledModel:
    """A model by its files, under the given name."""
    config = read_json(folder / "config.json")
    bits = config.get("quantization", config.get("quantization_config", {})).get("bits")
    return InstalledModel(
        name=name,
        path=folder,
        size_bytes=sum(file.stat().st_size for file in folder.iterdir() if file.is_file()),
        architecture=str(config.get("model_type", "unknown")),
        quantization=f"{bits} bit" if bits else "",
        short_name=next((one.name for one in SHORT_NAMES.values() if one.repository == name), ""),
    )


GENERAL = "qwen3"


def suggest_smaller(name: str, limit_bytes: int) -> str | None:
    """The short name of the largest model within `limit_bytes`, if any.

    Models of the same family come first, then of a similar one, then all.
    """
    everything = [one for family in FAMILIES.values() for one in family]
    for candidates in (_within(name, "[^a-z0-9]"), _within(name, "[^a-z]"), FAMILIES[GENERAL], everything):
        found = largest(candidates, limit_bytes)
        if found is not None:
            return found.name
    return None


def _within(name: str, ignored: str) -> Sequence[ShortName]:
    spelled = {family: re.sub(ignored, "", family) for family in FAMILIES}
    families = [family for family in FAMILIES if spelled[family] in re.sub(ignored, "", name.lower())]
    longest = max((len(spelled[family]) for family in families), default=0)
    return [one for family in families if len(spelled[family]) == longest for one in FAMILIES[family]]
