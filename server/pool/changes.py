"""What happens to the models of a pool, for whoever is told. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias


class ChangeKind(StrEnum):
    """What happened."""

    LOADING = "loading"
    LOADED = "loaded"
    UNLOADED = "unloaded"
    FAILED = "failed"


@dataclass(frozen=True)
class ModelChange:
    """Something that happened to one model."""

    kind: ChangeKind
    model_id: str
    seconds: float | None = None
    """How long loading took."""
    message: str | None = None
    """Why it failed, as its clients are told."""


TellChange: TypeAlias = Callable[[ModelChange], None]
