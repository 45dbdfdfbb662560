"""A loaded model, its users and its budget. Event loop only, except where a docstring says otherwise.

A request holds its model while it is planned and answered, and a model that is held is not unloaded.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from server.engine.engine import KeptState
from server.engine.request import EngineStopped, QueueFull
from server.pool.memory import IDLE_SECONDS, ModelUse
from server.pool.names import ModelSource
from server.pool.served import EnginePort, ServedModel

SHORT_PART = 0.9
"""A model is short of memory above this part of its budget."""


class PooledEngine(EnginePort, Protocol):
    """An engine as the pool sees it."""

    async def try_resize(self, budget_bytes: int) -> int:
        """Changes the budget for state; returns by how much running requests exceed it, which leaves it as it was."""

    async def drain(self, timeout_seconds: float) -> bool:
        """Takes no more requests and waits for the running ones; False if some still ran after the time."""

    def stop(self) -> None:
        """Ends the engine; with a disk, state is written first. Blocks; for any thread."""

    def park(self) -> KeptState | None:
        """Ends the engine; returns the state that is on no disk. Blocks; for any thread."""


@dataclass(frozen=True, eq=False)
class OpenedModel:
    """One model in memory, with its engine running."""

    model: ServedModel
    engine: PooledEngine
    weights_bytes: int = 0
    release: Callable[[], object] = lambda: None
    """Releases the weights, once the engine has ended. For any thread."""
    variants: Mapping[str, ServedModel] = field(default_factory=dict)
    """The model with each of its adapters, by the adapter's name."""

    def served(self, adapter: str | None) -> ServedModel | None:
        """Returns the model, or its variant with an adapter; None for an unknown adapter."""
        return self.model if adapter is None else self.variants.get(adapter)

    def unload(self) -> KeptState | None:
        """Ends the engine and releases the weights; returns the state that is on no disk. Blocks; for any thread."""
        state = self.engine.park()
        self.release()
        return state


@dataclass(eq=False)
class Member:
    """A loaded model in the pool, and who holds it."""

    source: ModelSource
    opened: OpenedModel
    budget_bytes: int
    """The last budget set for its state."""
    last_used: float
    """When the model was loaded or asked for, or its last request ended, by the pool's clock."""
    keep_alive_seconds: float | None = None
    """Idle time that a client asked for this model; None: the time for all models."""
    planned_bytes: int = 0
    """The budget that it is to get."""
    is_leaving: bool = False
    """Whether the model takes no more requests, because another model waits for its memory."""
    num_holds: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    _labelled: dict[str, ServedModel] = field(default_factory=dict)
    """The model under each label that was asked for, with the label's defaults."""

    def __post_init__(self) -> None:
        self.idle.set()

    def served(self, source: ModelSource) -> ServedModel | None:
        """Returns the model as a source of the same id names it; None for an unknown adapter. For any thread.

        The same source gets the same object until the label's defaults change.
        """
        served = self.opened.served(source.adapter)
        if served is None or source.adapter is not None or source.label is None:
            return served
        known = self._labelled.get(source.label)
        if known is None or known.defaults != source.defaults:
            known = self._labelled[source.label] = served.labelled(source.label, source.defaults)
        return known

    def has(self, model: ServedModel) -> bool:
        """Whether `served` returned this object and still would."""
        return model is self.opened.served(model.adapter_name) or self._labelled.get(model.id) is model

    @property
    def is_busy(self) -> bool:
        return self.num_holds > 0

    @property
    def is_short(self) -> bool:
        """Whether more memory would keep more of its conversations."""
        cache = self.opened.engine.stats().cache
        return cache.stored_bytes + cache.live_bytes > (cache.budget_bytes or self.budget_bytes) * SHORT_PART

    def use(self, now: float) -> ModelUse:
        """Returns the facts that decide about its memory."""
        cache = self.opened.engine.stats().cache
        # With a disk, a part of the budget is for state on its way there.
        moving_bytes = max(self.budget_bytes - cache.budget_bytes, 0) if cache.budget_bytes else 0
        return ModelUse(
            self.source.id,
            self.last_used,
            self.opened.weights_bytes,
            max(cache.stored_bytes + cache.live_bytes + moving_bytes, 1),  # a budget is never 0
            self.is_busy,
            is_in_use=not self.is_leaving and (self.is_busy or now - self.last_used < IDLE_SECONDS),
            is_loaded=not self.is_leaving,
        )

    async def try_resize(self, budget_bytes: int) -> bool:
        """Whether the budget could be changed; not below what running requests hold."""
        try:
            if await self.opened.engine.try_resize(budget_bytes):
                return False
        except QueueFull:
            return False
        except EngineStopped:
            pass  # it holds nothing any more
        self.budget_bytes = budget_bytes
        return True


class ModelHold:
    """A request's hold on a loaded model, which stays loaded until `close`."""

    def __init__(self, member: Member, on_close: Callable[[Member], object]) -> None:
        self._member = member
        self._on_close = on_close
        self._is_open = True
        member.num_holds += 1
        member.idle.clear()

    @property
    def model(self) -> ServedModel:
        return self._member.opened.model

    def set_keep_alive(self, seconds: float) -> None:
        """Sets how long the model stays loaded after its last request."""
        self._member.keep_alive_seconds = seconds

    def close(self) -> None:
        """Ends the hold; closing twice is harmless."""
        if not self._is_open:
            return
        self._is_open = False
        self._member.num_holds -= 1
        if not self._member.is_busy:
            self._member.idle.set()
        self._on_close(self._member)
