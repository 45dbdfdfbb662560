"""The loaded models: who uses them, and which of them take requests. Event loop only, but for what says otherwise.

A loaded model in the pool, and who holds it. Event loop only, but for what says otherwise.

A request's use of a loaded model, which is not unloaded meanwhile. Event loop only.

The conversations of unloaded models, as far as memory has a place for them. Event loop only.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from server.api.served import EnginePort, ServedModel
from server.engine.engine import DormantState
from server.pool.memory import Resident
from server.pool.names import ModelSource

logger = logging.getLogger(__name__)


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


class ModelHold:
    """Somebody's use of a loaded model; it stays loaded until `close`."""

    def __init__(self, member: Member, on_close: Callable[[Member], None]) -> None:
        self._member = member
        self._on_close = on_close
        self._is_open = True
        member.num_holds += 1
        member.idle.clear()

    @property
    def model(self) -> ServedModel:
        """The model."""
        return self._member.opened.model

    def set_keep_alive(self, seconds: float) -> None:
        """Has the model stay loaded for so long after its last request, from now on."""
        self._member.keep_alive_seconds = seconds

    def close(self) -> None:
        """Ends the use; more than once is the same as once."""
        if not self._is_open:
            return
        self._is_open = False
        self._member.num_holds -= 1
        if not self._member.num_holds:
            self._member.idle.set()
        self._on_close(self._member)


def adopt(member: Member, on_close: Callable[[Member], None]) -> ModelHold:
    """Returns the hold that was counted when the model had been loaded."""
    member.num_holds -= 1
    return ModelHold(member, on_close)


class Members:
    """The loaded models, by identity."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._members: dict[str, Member] = {}
        self._ready: Mapping[str, Member] = {}
        """Those of them that take requests. Replaced as a whole, since other threads read it."""
        self.on_release: Callable[[], None] = lambda: None
        """Called when a use of a model has ended."""

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        """The one used last comes last."""
        return iter(sorted(self._members.values(), key=lambda member: member.last_used))

    def find(self, model_id: str) -> Member | None:
        """Returns a loaded model, whether it takes requests or not."""
        return self._members.get(model_id)

    def find_ready(self, model_id: str) -> Member | None:
        """Returns a loaded model that takes requests. For any thread."""
        return self._ready.get(model_id)

    def add(self, member: Member) -> None:
        """Takes a model that was loaded."""
        self._members[member.source.id] = member
        self._publish()

    def remove(self, member: Member) -> None:
        """Lets go of one that is about to be unloaded."""
        assert not member.is_busy, "a model was unloaded while it was held"
        del self._members[member.source.id]
        self._publish()

    def weights(self) -> list[int]:
        """Returns the bytes of weights of each."""
        return [member.opened.weights_bytes for member in self._members.values()]

    def hold(self, member: Member) -> ModelHold:
        """Returns a hold on a model."""
        return ModelHold(member, self._released)

    def adopt(self, model_id: str) -> ModelHold:
        """Returns the hold that was counted for somebody when the model had been loaded."""
        return adopt(self._members[model_id], self._released)

    def _released(self, member: Member) -> None:
        member.last_used = self._clock()
        self.on_release()

    @contextlib.contextmanager
    def closed_to_others(self, leaving: Sequence[Member]) -> Iterator[None]:
        """Keeps new requests from models that make way, so that they become idle."""
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
    """Dormant state by model, in the order in which the models were unloaded."""

    def __init__(self) -> None:
        self._states: dict[str, DormantState] = {}
        self.on_given_up: Callable[[str], None] = lambda model_id: None
        """Called when nothing is held any more of the conversations of a model."""

    @property
    def num_bytes(self) -> int:
        """Memory that all of it takes."""
        return sum(state.num_bytes for state in self._states.values())

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._states

    def keep(self, model_id: str, state: DormantState, limit_bytes: int) -> None:
        """Keeps the state of a model just unloaded within `limit_bytes` for all; others give way to it."""
        self._states[model_id] = state
        self.drop_until(lambda num_bytes: num_bytes <= limit_bytes or len(self._states) == 1)
        if state.num_bytes > limit_bytes:
            state.shrink(limit_bytes)
        if not 0 < state.num_bytes <= limit_bytes:
            self._states.pop(model_id).drop()
            self.on_given_up(model_id)

    def take(self, model_id: str) -> DormantState | None:
        """Removes and returns the state of a model that is loaded again; None if there is none."""
        return self._states.pop(model_id, None)

    def give_back(self, model_id: str, state: DormantState) -> None:
        """Takes back what `take` returned, because the model was not loaded after all."""
        self._states[model_id] = state

    def forget(self, model_id: str, namespace: str) -> tuple[int, int]:
        """Drops what is held for a namespace; returns how many tokens and bytes that were."""
        state = self._states.get(model_id)
        return (0, 0) if state is None else state.forget(namespace)

    def drop_until(self, is_enough: Callable[[int], bool]) -> None:
        """Drops state, of the model unloaded first first, until `is_enough` of the bytes that are left."""
        while self._states and not is_enough(self.num_bytes):
            oldest = next(iter(self._states))
            self._states.pop(oldest).drop()
            self.on_given_up(oldest)
            logger.info("the conversations of %s are given up: other models need the memory", oldest)
