"""The loaded models, their users, and the dormant conversations of unloaded ones.

A request holds its model while it runs, and a model that is held is not unloaded. Event loop only, except where a
docstring says otherwise.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from server.engine.engine import DormantState
from server.pool.memory import Resident
from server.pool.names import ModelSource
from server.pool.served import EnginePort, ServedModel

logger = logging.getLogger(__name__)


class PooledEngine(EnginePort, Protocol):
    """An engine as the pool sees it."""

    async def try_resize(self, budget_bytes: int) -> int:
        """Changes the budget for state; returns the bytes by which running requests exceed it.

        If there are any, the budget stays as before.
        """
        ...

    async def drain(self, timeout_seconds: float) -> bool:
        """Takes no more requests and waits for the running ones; False if some still ran after the time."""
        ...

    def stop(self) -> None:
        """Ends the engine; with a disk, state is written first. Blocks; for any thread."""
        ...

    def park(self) -> DormantState | None:
        """Ends the engine; returns the state that is on no disk, for the model's next engine. Blocks; for any
        thread.
        """
        ...


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

    def unload(self) -> DormantState | None:
        """Ends the engine and releases the weights; returns the state that is on no disk. Blocks; for any thread."""
        dormant = self.engine.park()
        self.release()
        return dormant


@dataclass(eq=False)
class Member:
    """A loaded model in the pool, and who holds it."""

    source: ModelSource
    opened: OpenedModel
    last_used: float
    """When the model was loaded, or its last request ended, by the pool's clock."""
    keep_alive_seconds: float | None = None
    """Idle time that a client asked for this model; None: the time for all models."""
    is_leaving: bool = False
    """Whether the model takes no more requests, because another model waits for its memory."""
    budget_bytes: int | None = None
    """Last budget set for its conversations; None: its share, as it was loaded."""
    is_lending: bool = False
    """Whether the model has less than its share; it gets the rest back before its next request."""
    num_holds: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    _labelled: dict[str, ServedModel] = field(default_factory=dict)
    """The model under each label that was asked for, with the label's defaults."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.idle.set()

    def served(self, source: ModelSource) -> ServedModel | None:
        """Returns the model as a source of the same id names it; None for an unknown adapter. For any thread.

        The same source gets the same object until the label's defaults change.
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
        """Whether `served` returned this object and still would."""
        return model is self.opened.served(model.adapter_name) or self._labelled.get(model.id) is model

    @property
    def is_busy(self) -> bool:
        return self.num_holds > 0

    def resident(self) -> Resident:
        """Returns the facts that decide which model makes way."""
        return Resident(self.source.id, self.opened.weights_bytes, self.last_used, self.is_busy)


class ModelHold:
    """A request's hold on a loaded model, which stays loaded until `close`."""

    def __init__(self, member: Member, on_close: Callable[[Member], None]) -> None:
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
        if not self._member.num_holds:
            self._member.idle.set()
        self._on_close(self._member)


def adopt(member: Member, on_close: Callable[[Member], None]) -> ModelHold:
    """Returns the hold counted when the model was loaded."""
    member.num_holds -= 1
    return ModelHold(member, on_close)


class Members:
    """The loaded models, by identity."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._members: dict[str, Member] = {}
        self._ready: Mapping[str, Member] = {}
        """Models that take requests. Replaced as a whole, since other threads read it."""
        self.on_release: Callable[[], None] = lambda: None
        """Called when a hold on a model has ended."""

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        """Iterates with the model used last at the end."""
        return iter(sorted(self._members.values(), key=lambda member: member.last_used))

    def find(self, model_id: str) -> Member | None:
        """Returns a loaded model, whether it takes requests or not."""
        return self._members.get(model_id)

    def find_ready(self, model_id: str) -> Member | None:
        """Returns a loaded model that takes requests. For any thread."""
        return self._ready.get(model_id)

    def add(self, member: Member) -> None:
        """Adds a loaded model."""
        self._members[member.source.id] = member
        self._publish()

    def remove(self, member: Member) -> None:
        """Removes a model about to be unloaded."""
        assert not member.is_busy, "a model was unloaded while it was held"
        del self._members[member.source.id]
        self._publish()

    def weights(self) -> list[int]:
        """Returns the bytes of weights of each model."""
        return [member.opened.weights_bytes for member in self._members.values()]

    def hold(self, member: Member) -> ModelHold:
        """Returns a hold on a model."""
        return ModelHold(member, self._released)

    def adopt(self, model_id: str) -> ModelHold:
        """Returns the hold counted for a waiter when the model was loaded."""
        return adopt(self._members[model_id], self._released)

    def _released(self, member: Member) -> None:
        member.last_used = self._clock()
        self.on_release()

    @contextlib.contextmanager
    def closed_to_others(self, leaving: Sequence[Member]) -> Iterator[None]:
        """Keeps new requests from leaving models, so that they become idle."""
        for member in leaving:
            member.is_leaving = True
        self._publish()
        try:
            yield
        finally:
            for member in leaving:
                member.is_leaving = False
            self._publish()

    def _publish(self) -> None:
        self._ready = {name: member for name, member in self._members.items() if not member.is_leaving}


class Dormitory:
    """Dormant state by model, in the order of unloading, within a memory limit."""

    def __init__(self) -> None:
        self._states: dict[str, DormantState] = {}
        self.on_given_up: Callable[[str], None] = lambda model_id: None
        """Called with a model whose last conversation is dropped."""

    @property
    def num_bytes(self) -> int:
        return sum(state.num_bytes for state in self._states.values())

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._states

    def keep(self, model_id: str, state: DormantState, limit_bytes: int) -> None:
        """Keeps the state of a model just unloaded within `limit_bytes` for all; older state makes way."""
        self._states[model_id] = state
        self.drop_until(lambda num_bytes: num_bytes <= limit_bytes or len(self._states) == 1)
        if state.num_bytes > limit_bytes:
            state.shrink(limit_bytes)
        if not 0 < state.num_bytes <= limit_bytes:
            self._states.pop(model_id).drop()
            self.on_given_up(model_id)

    def take(self, model_id: str) -> DormantState | None:
        """Removes and returns the state of a model being loaded again; None if there is none."""
        return self._states.pop(model_id, None)

    def give_back(self, model_id: str, state: DormantState) -> None:
        """Takes back what `take` returned, because the model was not loaded after all."""
        self._states[model_id] = state

    def forget(self, model_id: str, namespace: str) -> tuple[int, int]:
        """Drops a namespace of a model; returns the tokens and bytes dropped."""
        state = self._states.get(model_id)
        return (0, 0) if state is None else state.forget(namespace)

    def drop_until(self, is_enough: Callable[[int], bool]) -> None:
        """Drops state, of the model unloaded first first, until `is_enough(bytes left)` is true."""
        while self._states and not is_enough(self.num_bytes):
            oldest = next(iter(self._states))
            self._states.pop(oldest).drop()
            self.on_given_up(oldest)
            logger.info("the conversations of %s are given up: other models need the memory", oldest)
