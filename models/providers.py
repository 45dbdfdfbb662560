"""Whose code a model runs on: mlx-lm's, else that of an installed distribution that names the type, else mlx-vlm's.

A distribution names a type by an entry point of `GROUP`: a module with `Model` and `ModelArgs`, as mlx-lm's have.
Only what is installed decides; no request, Modelfile or name does. Code that came with a model, in its folder or in
the hub's cache, is never imported. Only mlx-lm's types are proven elsewhere: all others pass `models.inference.gate`.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, distribution, entry_points, version
from pathlib import Path
from typing import Any, Final, TypeAlias

from models.errors import brief
from models.names import cache_folder

GROUP: Final = "mlx_serve.models"
VLM: Final = "mlx-vlm"
VLM_VERSION: Final = "0.7.10"
INSTALL: Final = f"pip install --no-deps {VLM}=={VLM_VERSION}"
VLM_TYPES = frozenset(
    (
        *("cohere2_moe", "glm5_next", "k2_horizon", "kolibri1", "longcat_flash_sparse", "mimo_v2", "qwen4_exp"),
        *("step3p7", "xing4_0"),
    )
)
"""Types of mlx-vlm that pass every check of docs/architectures-mlx-vlm.md."""
VLM_FAILING: Final = frozenset(("deepseek_v4", "hy_v4"))
"""Types of mlx-vlm that do not."""

GetClasses: TypeAlias = Callable[..., tuple[Any, Any]]
"""Of `config`: the classes of model and arguments. Imports the code."""


class ProviderFault(Exception):
    """The provider of a type cannot be used; the message is a clause."""


@dataclass(frozen=True)
class Provider:
    """An installed distribution with the code of a model type."""

    told: str
    """Name and version."""
    get_classes: GetClasses
    is_mlx_lm: bool = False


def find(model_type: str, folder: Path) -> Provider | None:
    """The provider of a type for the model in `folder`. Raises ProviderFault, as its classes do."""
    from models.mlx_lm_import import MODEL_REMAPPING, get_classes

    if importlib.util.find_spec(f"mlx_lm.models.{MODEL_REMAPPING.get(model_type, model_type)}") is not None:
        return Provider(f"mlx-lm {version('mlx-lm')}", get_classes, is_mlx_lm=True)
    points = entry_points(group=GROUP, name=model_type)
    owners = {f"{owner.name} {owner.version}": (owner, point) for point in points if (owner := point.dist)}
    if len(owners) > 1:
        names = " and ".join(sorted(owners))
        raise ProviderFault(f"model type {model_type!r} has several providers, {names}: uninstall all but one")
    for label, (owner, point) in owners.items():
        _check_place(owner, point.module, folder, label)
        return Provider(label, partial(_imported, label, partial(_registered, point)))
    if model_type not in VLM_TYPES or need_of(model_type):
        return None
    label = f"{VLM} {VLM_VERSION}"
    _check_place(distribution(VLM), "mlx_vlm", folder, label)
    from models import vlm_text

    return Provider(label, partial(_imported, label, vlm_text.get_classes))


def need_of(model_type: object) -> str:
    """What a person must know or install for the type, as a clause; empty where nothing, or nobody knows the type."""
    name = str(model_type)
    if name not in VLM_TYPES | VLM_FAILING or _is_in_mlx_lm(name) or entry_points(group=GROUP, name=name):
        return ""
    if name not in VLM_TYPES:
        return f"{VLM} {VLM_VERSION} has it, but its answers are wrong: it fails the checks of a provider"
    try:
        installed = version(VLM)
    except PackageNotFoundError:
        return f"{VLM} has it: {INSTALL}"
    if installed != VLM_VERSION:
        return f"{VLM} {installed} is installed, and {VLM_VERSION} alone is tested here: {INSTALL}"
    return ""


def _is_in_mlx_lm(model_type: str) -> bool:
    """Of types that mlx-lm gives no other name; does not import mlx-lm, as asking for a submodule would."""
    spec = importlib.util.find_spec("mlx_lm")
    places = [] if spec is None else spec.submodule_search_locations or []
    return any(Path(place, "models", f"{model_type}.py").is_file() for place in places)


def _registered(point: EntryPoint, **_: Any) -> tuple[Any, Any]:
    module = point.load()
    return module.Model, module.ModelArgs


def _imported(told: str, get_classes: GetClasses, config: dict[str, Any]) -> tuple[Any, Any]:
    """Whatever the import raises is the provider's fault."""
    try:
        return get_classes(config=config)
    except (Exception, SystemExit) as error:
        fault = brief(f"{type(error).__name__}: {error}", 200)
        raise ProviderFault(
            f"{told}, which provides {config['model_type']!r}, cannot be imported: {fault}"
        ) from error


def _check_place(owner: Distribution, module: str, folder: Path, told: str) -> None:
    """Refuses code that came with a model: a folder from which Python was started is looked into for packages too."""
    spec = importlib.util.find_spec(module.partition(".")[0])  # of a whole package, which is not imported for this
    if spec is None:
        raise ProviderFault(f"{told} is installed only in part: there is no {module}; install it again")
    origin = [] if spec.origin is None else [spec.origin]
    for place in map(Path, (*origin, *(spec.submodule_search_locations or ()), str(owner.locate_file("")))):
        if _came_with_a_model(place, folder):
            raise ProviderFault(
                f"{told} lies with a model, and such code is never run; install it elsewhere: {place}"
            )


def _came_with_a_model(place: Path, folder: Path) -> bool:
    places = {one for path in (place.absolute(), place.resolve()) for one in (path, *path.parents)}
    if places & {folder.absolute(), folder.resolve(), cache_folder().absolute(), cache_folder().resolve()}:
        return True
    return any((one / "config.json").is_file() and any(one.glob("*.safetensors")) for one in places)
