"""A loaded model in the pool, and who holds it. Event loop only, but for what says otherwise."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from server.api.context import EnginePort, ServedModel
from server.engine.engine import DormantState
from server.pool.memory import Resident
from server.pool.source import ModelSource


class PooledEngine(EnginePort, Protocol):
    """An engine as the pool sees it."""

    async def try_resize(self, budget_bytes: int) -> int:
        """Gives the state of conversations another budget; returns the bytes by which running requests exceed it.

        If there are any, the budget stays what it was.
        """
        ...

    async def drain(self, timeout_seconds: float) -> bool:
        """Takes no more requests and waits for the running ones; False if some were still running then."""
        ...

    def stop(self) -> None:
        """Ends; with a disk, state is written first. Blocks; for any thread."""
        ...

    def park(self) -> DormantState | None:
        """Ends, and returns the state that no disk has for the next engine of the model. Blocks; for any thread."""
        ...


@dataclass(frozen=True, eq=False)
class OpenedModel:
    """One model in memory, with its engine running."""

    model: ServedModel
    engine: PooledEngine
    weights_bytes: int = 0
    release: Callable[[], object] = lambda: None
    """Lets go of the weights, once the engine has ended. For any thread."""
    variants: Mapping[str, ServedModel] = field(default_factory=dict)
    """The model with each of its adapters, by the adapter's name."""

    def served(self, adapter: str | None) -> ServedModel | None:
        """Returns the model, or one of its variants; None for one that it has not."""
        return self.model if adapter is None else self.variants.get(adapter)

    def unload(self) -> DormantState | None:
        """Ends the engine and lets go of the weights; returns the state that no disk has. Blocks; for any thread."""
        dormant = self.engine.park()
        self.release()
        return dormant


@dataclass(eq=False)
class Member:
    """A loaded model, and whether it is used."""

    source: ModelSource
    opened: OpenedModel
    last_used: float
    """Reading of the pool's clock: when it was loaded, or when the last request for it ended."""
    keep_alive_seconds: float | None = None
    """As a client asked for this model; None: as for all models."""
    is_leaving: bool = False
    """Whether it takes no more requests, because another model waits for its memory."""
    budget_bytes: int | None = None
    """For the state of its conversations, as it was set last; None: as it was loaded with, its share."""
    is_lending: bool = False
    """Whether it has less than its share, which it gets back before its next request."""
    num_holds: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    _labelled: dict[str, ServedModel] = field(default_factory=dict)
    """The model under the labels by which it was asked for, with their defaults."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.idle.set()

    def served(self, source: ModelSource) -> ServedModel | None:
        """Returns the model as a source of the same id names it; None for an adapter that it has not. For any thread.

        The same source is answered with the same object until the label's defaults change.
        """
        served = self.opened.served(source.adapter)
        if served is None or source.adapter is not None or source.label is None:
            return served
        with self._lock:
            known = self._labelled.get(source.label)
            if known is None or known.defaults != source.defaults:
                known = self._labelled[source.label] = served.labelled(source.label, source.defaults)
        return known

    def has(self, model: ServedModel) -> bool:
        """Whether `model` is one that `served` returned and still would."""
        return model is self.opened.served(model.adapter_name) or self._labelled.get(model.id) is model

    @property
    def is_busy(self) -> bool:
        """Whether somebody uses it now."""
        return self.num_holds > 0

    def resident(self) -> Resident:
        """Returns what matters for who makes way."""
        return Resident(self.source.id, self.opened.weights_bytes, self.last_used, self.is_busy)
