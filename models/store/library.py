"""Making, copying and removing names of our own."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from models.errors import ModelfileError, StoreError
from models.names import BUILT_IN, find_stored, parse_repository
from models.short_names import find_family
from models.store.defaults import ExampleMessage, ModelDefaults
from models.store.manifest import user_manifest
from models.store.parameters import with_parameters
from models.store.stored_model import LATEST, StoredModel, WeightsPlace, parse_full_name


@dataclass(frozen=True)
class Making:
    """What a new model says of itself; None leaves what the model has that it is made from."""

    parameters: Sequence[tuple[str, Any]] = ()
    system: str | None = None
    messages: Sequence[ExampleMessage] = ()
    license: str | None = None
    replaces: bool = True
    """Whether a model of that name makes way."""


def create(name: str, base: WeightsPlace, base_name: str, making: Making) -> StoredModel:
    """Makes a model from another, whose defaults it has where `making` says nothing, and returns it.

    Raises StoreError, and ModelfileError for a parameter that cannot be honoured.
    """
    full = parse_free_name(name)
    parent = find_stored(base_name)
    defaults = with_parameters(ModelDefaults() if parent is None else parent.defaults, making.parameters)
    _check_template_arguments(defaults)
    if making.system is not None:
        defaults = replace(defaults, system=making.system)
    if making.messages:
        defaults = replace(defaults, messages=tuple(making.messages))
    text = making.license if making.license is not None else "" if parent is None else parent.license
    return _store(full, base, defaults, text, replaces=making.replaces)


def copy(source_name: str, base: WeightsPlace, name: str, *, replaces: bool) -> StoredModel:
    """Gives a model another name, with all its defaults; raises StoreError."""
    return create(name, base, source_name, Making(replaces=replaces))


def remove(name: str) -> StoredModel:
    """Removes a name, and nothing of the weights; returns what it stood for. Raises StoreError."""
    full = parse_full_name(name)
    with user_manifest().change() as stored:
        if full not in stored:
            raise StoreError(f"there is no name {full.removesuffix(f':{LATEST}')!r} of your own")
        return stored.pop(full)


def names_with(place: WeightsPlace) -> list[str]:
    """Returns the names that stand for the same weights; raises StoreError."""
    return [one.short_name for one in user_manifest().models().values() if one.weights == place]


def parse_free_name(name: str) -> str:
    """Returns `name:tag` for a name that may be stored; raises StoreError for what stands for something else."""
    full = parse_full_name(name)
    short = full.removesuffix(f":{LATEST}")
    if short in BUILT_IN:
        raise StoreError(f"{short} stands for a model that comes with mlx-serve; choose another name")
    if parse_repository(short) is not None or find_family(short):
        raise StoreError(f"{short} is a short name of models to pull; choose another name")
    return full


def _store(full: str, place: WeightsPlace, defaults: ModelDefaults, text: str, *, replaces: bool) -> StoredModel:
    now = datetime.now(UTC)
    with user_manifest().change() as stored:
        before = stored.get(full)
        if before is not None and not replaces:
            raise StoreError(f"there is a name {before.short_name} already; remove it first, or give --force")
        created = now if before is None else before.created
        made = stored[full] = StoredModel(full, place, created, now, defaults, text)
    return made


def _check_template_arguments(defaults: ModelDefaults) -> None:
    if not defaults.template_arguments:
        return
    # Brings along the tokenizers.
    from models.prompt.chat_template import RESERVED_TEMPLATE_ARGUMENTS

    for name in defaults.template_arguments.keys() & RESERVED_TEMPLATE_ARGUMENTS:
        raise ModelfileError(f"chat_template_kwargs.{name} cannot be set: the server itself tells it to the template")
