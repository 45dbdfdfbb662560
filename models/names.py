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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from models.errors import ModelBroken, ModelError, ModelNotFound, told_as
from models.store.manifest import user_manifest
from models.store.stored_model import StoredModel, WeightsPlace
from models.weights import ADVICE, MTP_FILE, missing_files, other_formats, read_json

DEMO = "demo"
DEMO_FOLDER = Path(__file__).resolve().parent / "demo"
BUILT_IN = {DEMO: DEMO_FOLDER, "demo-hybrid": DEMO_FOLDER.with_name("demo_hybrid")}

FILE_PATTERNS = ["*.json", "*.jinja", "*.jsonl", "*.model", "*.tiktoken", "*.txt", "model*.safetensors"]
"""Never `*.py`: a repository's code is not run."""
PULLED_PATTERNS = [*FILE_PATTERNS, MTP_FILE]
"""With files that a model is complete without."""

IGNORED_PATTERNS = ["*/*"]
"""Subfolders with other formats of the same weights."""

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
_OVERHEAD = 1.06


@dataclass(frozen=True)
class ShortName:
    """A short name and its repository."""

    name: str
    repository: str
    num_bytes: int
    """Estimated, of the weights."""


def _num_bytes(num_weights: float, kind: str) -> int:
    """Estimated, a quantization's scales included."""
    bits = {"bf16": 16.0, "mxfp4": 4.25}.get(kind) or int(kind.removesuffix("bit")) + 0.5
    return int(num_weights * bits / 8 * _OVERHEAD)


SHORT_NAMES: dict[str, ShortName] = {}
FAMILIES: dict[str, list[ShortName]] = {}
"""Each family's models in the usual quantization, the smallest first."""


def _read(families: Mapping[str, Mapping[str, dict[str, Any]]]) -> None:
    for family, sizes in families.items():
        for size, entry in sizes.items():
            num_weights = entry.pop("parameters") * 1e9
            models = [
                ShortName(f"{family}:{size}-{kind}", f"{ORGANIZATION}/{model}", _num_bytes(num_weights, kind))
                for kind, model in entry.items()
            ]
            usual = replace(models[0], name=f"{family}:{size}")
            SHORT_NAMES.update({one.name: one for one in (usual, *models)})
            FAMILIES.setdefault(family, []).append(usual)
        FAMILIES[family].sort(key=lambda one: one.num_bytes)


_read(tomllib.loads(Path(__file__).with_name("short_names.toml").read_text(encoding="utf-8")))


def find_family(text: str) -> Sequence[ShortName]:
    """Usual names of a family, written `qwen3` or `qwen3:latest`, the smallest first."""
    return FAMILIES.get(text.lower().removesuffix(":latest"), ())


def largest(names: Iterable[ShortName], limit_bytes: int) -> ShortName | None:
    """The largest model with weights within `limit_bytes`, if any."""
    return max((one for one in names if one.num_bytes <= limit_bytes), key=lambda one: one.num_bytes, default=None)


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
    """A model that can be loaded."""

    name: str
    path: Path
    stored: StoredModel | None = None
    """What a local name stands for; None for other names."""

    @property
    def short_name(self) -> str:
        return next((one.name for one in SHORT_NAMES.values() if one.repository == self.name), "")

    @property
    def size_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.path.iterdir() if file.is_file())

    @cached_property
    def _config(self) -> dict[str, Any]:
        return read_json(self.path / "config.json")

    @property
    def architecture(self) -> str:
        return str(self._config.get("model_type", "unknown"))

    @property
    def quantization(self) -> str:
        declared = self._config.get("quantization") or self._config.get("quantization_config")
        bits = declared.get("bits") if isinstance(declared, dict) else None
        return f"{bits} bit" if bits else ""


def shorten(name: str) -> str:
    """`org/name[@revision]` for an address; other names unchanged."""
    address = _ADDRESS.fullmatch(name.strip())
    if address is None:
        return name
    return str(RepositoryName(unquote(address["repository"]), unquote(address["revision"] or "main")))


def parse_repository(name: str) -> RepositoryName | None:
    """The repository of a name, short name or address, if possible."""
    head, at, revision = shorten(name).partition("@")
    short = SHORT_NAMES.get(head.lower())
    full = head if short is None else short.repository
    if len(full) > 96 or not _REPOSITORY.fullmatch(full + at + revision):
        return None
    return RepositoryName(full, revision or "main")


def as_stored(repository: str) -> str:
    """A repository in the letters of its folder, since the hub ignores case."""
    home = _home_name(repository)
    near = name_on_disk(cache_folder() / home)
    return repository if near == home else _repository_of(near)


def name_on_disk(path: Path) -> str:
    """The last part of a path as its folder lists it: the disk of most Macs ignores case."""
    with contextlib.suppress(OSError):
        names = os.listdir(path.parent)  # noqa: PTH208
        if path.name not in names:
            return next((one for one in names if one.lower() == path.name.lower()), path.name)
    return path.name


def _home_name(repository: str) -> str:
    return _HOME + repository.replace("/", "--")


def _repository_of(home_name: str) -> str:
    return home_name.removeprefix(_HOME).replace("--", "/")


def resolve(name: str) -> Path:
    """The folder of model `name`; raises as `place_of` and `folder_of`."""
    return folder_of(place_of(name))


def place_of(name: str) -> WeightsPlace:
    """The weights that a person calls `name`; files may be missing. Raises ModelNotFound, ModelBroken, StoreError."""
    stored = find_stored(name)
    if stored is not None:
        return stored.weights
    folder = None if name in BUILT_IN else _find_folder(name)
    return installed_place(name) if folder is None else WeightsPlace("folder", str(folder.resolve()))


def _find_folder(name: str) -> Path | None:
    """Raises ModelNotFound for any other path."""
    path = Path(name).expanduser()
    with told_as(ModelBroken, f"{name} is not readable"):
        is_folder, is_file = path.is_dir(), path.is_file()
    if is_folder:
        return path
    if name.lower().endswith(".gguf"):
        raise ModelNotFound(f"{name} is a GGUF file, made for llama.cpp, which MLX does not read: {ADVICE}")
    if is_file:
        raise ModelNotFound(f"{name} is a file; name the folder that holds config.json and model*.safetensors")
    if name.startswith(("/", "./", "../", "~")):
        raise ModelNotFound(f"There is no folder {name}. `mlx-serve list` shows the models of this machine.")
    return None


def installed_place(name: str) -> WeightsPlace:
    """A built-in model or a download; files may be missing. Raises ModelNotFound.

    Never takes a name for a path: it may come from anyone.
    """
    if name in BUILT_IN:
        return WeightsPlace("built-in", name)
    repository = parse_repository(_largest_here(name))
    if repository is None:
        raise ModelNotFound(f"There is no model {name!r}: {suggest(name)}")
    place = _find_download(repository)
    if place is None:
        raise ModelNotFound(f"{repository} is not on this machine yet; download it: mlx-serve pull {shorten(name)}")
    return place


def stands_for(name: str, place: WeightsPlace) -> bool:
    """Whether a name, maybe of nothing here any more, is of a built-in model or a download."""
    try:
        return installed_place(name) == place
    except ModelNotFound:
        return False


def _find_download(repository: RepositoryName) -> WeightsPlace | None:
    name = as_stored(repository.repository)
    home = home_of(name)
    ref = home / "refs" / repository.revision
    commit = ref.read_text().strip() if ref.is_file() else repository.revision
    is_here = "/" not in commit and (home / "snapshots" / commit).is_dir()
    return WeightsPlace("repository", name, commit) if is_here else None


def _largest_here(name: str) -> str:
    """The largest model here of the family `name`; else `name`. Raises ModelNotFound."""
    family = find_family(name)
    pulled = [size.name for size in family if _find_download(RepositoryName(size.repository)) is not None]
    if family and not pulled:
        raise ModelNotFound(f"No model of the family {name} is on this machine; download one: mlx-serve pull {name}")
    return pulled[-1] if pulled else name


def find_stored(name: str) -> StoredModel | None:
    """The manifest's entry for a local name, never a path; raises StoreError."""
    return None if name in BUILT_IN else user_manifest().find(name)


def files_of(place: WeightsPlace) -> Path:
    """The folder of weights, which may be incomplete; raises ModelNotFound."""
    if place.kind == "built-in":
        if place.name not in BUILT_IN:
            raise ModelNotFound(f"There is no built-in model {place.name!r} in this version.")
        return BUILT_IN[place.name]
    folder = _snapshot(place) if place.kind == "repository" else Path(place.name)
    if folder.is_dir():
        return folder
    if place.kind == "repository":
        raise ModelNotFound(f"{place} is not on this machine any more; download it: mlx-serve pull {place}")
    raise ModelNotFound(f"There is no folder {folder} any more; put it back, or run `mlx-serve create` again.")


def _snapshot(place: WeightsPlace) -> Path:
    return home_of(place.name) / "snapshots" / place.commit


def home_of(repository: str) -> Path:
    """The folder of a repository in Hugging Face's cache, existing or not."""
    return cache_folder() / _home_name(repository)


def folder_of(place: WeightsPlace) -> Path:
    """The folder of complete weights; raises ModelNotFound or ModelBroken."""
    folder, name = files_of(place), identity_of(place)
    what, advice = {
        "built-in": (f"The model {name}", "reinstall mlx-serve"),
        "folder": (f"The folder {folder}", "a model needs config.json and its weights, model*.safetensors"),
        "repository": (f"The download of {name}", f"resume it: mlx-serve pull {name}"),
    }[place.kind]
    if place.kind == "repository" and not _has_small_files(place):
        raise ModelBroken(f"{what} is not complete; {advice}")
    with told_as(ModelBroken, f"{what} is not readable"):
        missing = missing_files(folder)
    if missing:
        hint = other_formats(folder.iterdir()) if any(name.endswith(".safetensors") for name in missing) else ""
        raise ModelBroken(f"{what} lacks {', '.join(missing[:3])}{hint or f'; {advice}'}")
    return folder


def _has_small_files(place: WeightsPlace) -> bool:
    """Whether all files that the hub listed are there: tokenizers have many names."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns: dict[str, Any] = {"allow_patterns": FILE_PATTERNS, "ignore_patterns": IGNORED_PATTERNS}
    with contextlib.suppress(LocalEntryNotFoundError):  # also where files are missing
        snapshot_download(place.name, revision=place.commit, local_files_only=True, **patterns)
        return True
    return False


def identity_of(place: WeightsPlace) -> str:
    """The weights' unique id, never a path.

    All branches, tags and the commit of a revision have one: `main`, else a branch, else the commit.
    """
    if place.kind == "built-in":
        return place.name
    if place.kind == "folder":
        return f"{Path(place.name).name}-{hashlib.sha256(os.path.realpath(place.name).encode()).hexdigest()[:8]}"
    refs = _refs(_snapshot(place))
    return str(RepositoryName(place.name, "main" if "main" in refs else min(refs, default=place.commit)))


def model_id(name: str) -> str:
    """The id of a name of the command line. Raises ModelError.

    A folder is its own id, if `resolve` takes it for one; a name of our own has the id of its weights.
    """
    stored = find_stored(name)
    if stored is not None:
        return identity_of(stored.weights)
    path = Path(name).expanduser()
    if name in BUILT_IN or not path.is_dir():
        repository, at, revision = shorten(_largest_here(name)).partition("@")
        return as_stored(repository) + at + revision
    # Not `resolve`: the link has the wanted name, and its target may be named by a hash.
    return name_on_disk(Path(os.path.abspath(path))) or name  # noqa: PTH100


def _refs(snapshot: Path) -> list[str]:
    """The branches and tags of a commit."""
    refs, revisions = snapshot.parent.parent / "refs", []
    for ref in refs.rglob("*"):
        with contextlib.suppress(OSError, ValueError):
            if ref.is_file() and ref.read_text().strip() == snapshot.name:
                revisions.append(str(ref.relative_to(refs)))
    return revisions


def installed() -> list[InstalledModel]:
    """Built-in models, local names, complete downloads. Raises StoreError."""
    models = [InstalledModel(name, folder) for name, folder in BUILT_IN.items() if _is_complete(folder)]
    for stored in user_manifest().models().values():
        with contextlib.suppress(ModelError):
            models.append(InstalledModel(stored.short_name, folder_of(stored.weights), stored))
    complete = [place for place in _downloads() if _is_complete(_snapshot(place))]
    cached = [InstalledModel(identity_of(place), _snapshot(place)) for place in complete]
    return models + sorted(cached, key=lambda model: model.name.lower())


def used_last() -> str | None:
    """The downloaded chat model that was read last, if any."""

    def read_at(place: WeightsPlace) -> float:
        return max((file.stat().st_atime for file in _snapshot(place).iterdir() if file.exists()), default=0.0)

    # In this order before any of their files is looked into.
    for place in sorted(_downloads(), key=read_at, reverse=True):
        folder = _snapshot(place)
        if identity_of(place) == place.name and _is_complete(folder) and _can_chat(folder):
            return place.name
    return None


def _downloads() -> list[WeightsPlace]:
    """All snapshots. The hub's own search takes a quarter of a second to import."""
    paths = [path for path in cache_folder().glob(f"{_HOME}*/snapshots/*") if path.is_dir()]
    return [WeightsPlace("repository", _repository_of(path.parent.parent.name), path.name) for path in paths]


def _can_chat(folder: Path) -> bool:
    has_template = (folder / "chat_template.jinja").is_file()
    return has_template or "chat_template" in read_json(folder / "tokenizer_config.json")


def _is_complete(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return not missing_files(folder)
    return False


def cache_folder() -> Path:
    """The folder of Hugging Face repositories, existing or not."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def cache_stamp() -> tuple[tuple[str, int], ...]:
    """Each folder's modification time in nanoseconds."""
    repositories = cache_folder().glob(f"{_HOME}*")
    folders = [one for repository in repositories for one in (repository / "refs", *repository.glob("snapshots/*"))]
    stamps = []
    for folder in sorted(folders):
        with contextlib.suppress(OSError):
            stamps.append((str(folder), folder.stat().st_mtime_ns))
    return tuple(stamps)


def suggest(name: str, here: str = "'demo', a folder, ") -> str:
    """What to type in place of an unknown name; `here` begins the list with what needs no download."""
    typed = _plain(name.partition(":")[0])
    families = [family for family in FAMILIES if typed and _plain(family).startswith(typed)]
    if families:
        return f"choose a size: {', '.join(one.name for family in families for one in FAMILIES[family])}"
    close = difflib.get_close_matches(name.lower(), [*BUILT_IN, *SHORT_NAMES, *FAMILIES], n=1)
    if close:
        return f"did you mean {close[0]}?"
    known = f"{here}a repository org/name, or a short name such as qwen3:8b"
    return f"give {known}; families: {', '.join(FAMILIES)}"


GENERAL = "qwen3"


def suggest_smaller(name: str, limit_bytes: int) -> str | None:
    """The short name of the largest model within `limit_bytes`, if any.

    Models of the same family come first, then of a similar one, then all.
    """
    everything = [size for family in FAMILIES.values() for size in family]
    candidates = (_within(name, "[^a-z0-9]"), _within(name, "[^a-z]"), FAMILIES[GENERAL], everything)
    return next((smaller.name for some in candidates if (smaller := largest(some, limit_bytes)) is not None), None)


def _within(name: str, ignored: str) -> Sequence[ShortName]:
    spelled = {family: re.sub(ignored, "", family) for family in FAMILIES}
    families = [family for family in FAMILIES if spelled[family] in re.sub(ignored, "", name.lower())]
    longest = max((len(spelled[family]) for family in families), default=0)
    return [one for family in families if len(spelled[family]) == longest for one in FAMILIES[family]]
