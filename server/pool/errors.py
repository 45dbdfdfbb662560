"""Errors of the model pool, and the changes that it reports. No error ends the pool. Pure.

PoolError
├── ModelNameNeeded
├── ModelUnknown
├── ModelNotLoaded
├── LoadFailed
├── ModelTooLarge
├── PoolBusy
└── ModelInUse
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from server.pool.names import MAX_NAME_LENGTH, ModelSource


class PoolError(Exception):
    """The message is one sentence for a person."""


class ModelNameNeeded(PoolError):
    """A request names no model, and there is no default."""


class ModelUnknown(PoolError):
    """No such model may be served here."""

    def __init__(self, name: str, instead: str) -> None:
        super().__init__(f"there is no model {name[:MAX_NAME_LENGTH]!r}: {instead}")
        self.instead = instead


class ModelNotLoaded(PoolError):
    """Ask the pool to load the model."""

    def __init__(self, source: ModelSource) -> None:
        super().__init__(f"the model {source.id} is not loaded")
        self.source = source


class LoadFailed(PoolError):
    """A model's files are gone, damaged or of an unknown kind."""


class ModelTooLarge(PoolError):
    """The machine cannot hold the model, whatever is unloaded."""


class PoolBusy(PoolError):
    """Others hold the memory, and did not finish in time."""

    retry_after_seconds = 10


class ModelInUse(PoolError):
    """A model that answers requests is not unloaded."""


class ChangeKind(StrEnum):
    """What happened to a model."""

    LOADING = "loading"
    LOADED = "loaded"
    UNLOADED = "unloaded"
    FAILED = "failed"


@dataclass(frozen=True)
class ModelChange:
    """A change of one model."""

    kind: ChangeKind
    model_id: str
    seconds: float | None = None
    message: str | None = None


TellChange: TypeAlias = Callable[[ModelChange], None]
