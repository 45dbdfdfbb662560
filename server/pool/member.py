"""A loaded model in the pool, and who holds it. Event loop only."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from server.api.context import EnginePort, ServedModel
from server.engine.dormant import DormantState
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
    num_holds: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.idle.set()

    @property
    def is_busy(self) -> bool:
        """Whether somebody uses it now."""
        return self.num_holds > 0

    def resident(self) -> Resident:
        """Returns what matters for who makes way."""
        return Resident(self.source.id, self.opened.weights_bytes, self.last_used, self.is_busy)
