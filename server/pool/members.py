"""Loaded models, who uses them, and their budgets for state. Event loop only, but where a docstring says otherwise.

Each engine has its own worker thread and ledger, so a command changes the budget between two of its steps. The
budgets add up to no more than the memory for state: models that get less are told first, and memory that running
requests hold goes to nobody else until they end.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cache.budget import UNBOUNDED_BYTES
from server.engine.commands import limit_idle
from server.engine.engine import Engine
from server.engine.request import EngineStopped, EngineStuck, QueueFull
from server.engine.sequence import EngineState
from server.pool.memory import IDLE_SECONDS, IdleLimit, ModelUse, PoolMemory, Pressure, divide, due_bytes
from server.pool.names import ModelSource
from server.pool.served import ServedModel

logger = logging.getLogger(__name__)

GROWTH_PART = 4
LEAST_GROWTH_BYTES = 256 << 20
"""A server needs more than its state takes: a part of that, and at least this."""
RETRY_SECONDS = 0.1
"""Pause before a model is asked again for memory that its answers hold."""


@dataclass(frozen=True, eq=False)
class Around:
    """What else the memory holds when a model is loaded."""

    weights: Sequence[int]
    """Bytes of weights of each model that stays loaded."""
    budget_bytes: int
    """Budget for the new model's state."""
    kept: EngineState | None = None
    """State that the model left when it was unloaded; consumed."""


@dataclass(eq=False)
class Member:
    """A loaded model, its engine running."""

    source: ModelSource
    model: ServedModel
    engine: Engine
    weights_bytes: int = 0
    release: Callable[[], object] = lambda: None
    """Releases the weights of an ended engine. For any thread."""
    variants: Mapping[str, ServedModel] = field(default_factory=dict)
    """By the adapter's name."""
    useful_bytes: int = UNBOUNDED_BYTES
    budget_bytes: int = 0
    last_used: float = 0.0
    """When the model was loaded, or its last request ended."""
    keep_alive_seconds: float | None = None
    """How long a client asked the model to stay when idle."""
    planned_bytes: int = 0
    is_leaving: bool = False
    """Another model waits for the memory: this one takes no more requests."""
    num_holds: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    _labelled: dict[str, ServedModel] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.idle.set()

    @property
    def models(self) -> Sequence[ServedModel]:
        return self.model, *self.variants.values()

    def unload(self) -> EngineState | None:
        """Ends the engine, releases weights; returns state on no disk. Blocks; for any thread."""
        state = self.engine.park()
        self.release()
        return state

    def served(self, source: ModelSource) -> ServedModel:
        """The same object for a source each time. For any thread."""
        if source.adapter is not None:
            return self.variants[source.adapter]
        if source.label is None:
            return self.model
        known = self._labelled.get(source.label)
        if known is None or known.defaults != source.defaults:
            known = self._labelled[source.label] = self.model.labelled(source.label, source.defaults)
        return known

    def has(self, model: ServedModel) -> bool:
        """Whether `served` returned this object and would return it again."""
        return model in self.models or self._labelled.get(model.id) is model

    @property
    def is_busy(self) -> bool:
        """A stuck engine cannot be asked to end; one that other machines follow would end these."""
        return self.num_holds > 0 or self.engine.stuck_seconds is not None or self.engine.is_divided

    @property
    def held_bytes(self) -> int:
        cache = self.engine.stats().cache
        return cache.stored_bytes + cache.live_bytes

    def use(self, now: float) -> ModelUse:
        """The facts for `memory`."""
        cache = self.engine.stats().cache
        # With a disk, a part of the budget is for state on its way there.
        moving_bytes = max(self.budget_bytes - cache.budget_bytes, 0) if cache.budget_bytes else 0
        return ModelUse(
            self.source.id,
            self.last_used,
            self.weights_bytes,
            max(self.held_bytes + moving_bytes, 1),  # a budget is never 0
            self.useful_bytes,
            self.is_busy,
            is_in_use=not self.is_leaving and (self.is_busy or now - self.last_used < IDLE_SECONDS),
            is_loaded=not self.is_leaving,
        )

    async def try_resize(self, budget_bytes: int) -> bool:
        """Whether the budget could be changed; not below what running requests hold."""
        resizing = asyncio.ensure_future(self._resize(budget_bytes))
        try:
            return await asyncio.shield(resizing)
        except asyncio.CancelledError:
            # A command that already runs cannot be taken back, so its change of the budget must be noted.
            await asyncio.wait((resizing,))
            raise

    async def _resize(self, budget_bytes: int) -> bool:
        try:
            if await self.engine.try_resize(budget_bytes):
                return False
        except (QueueFull, EngineStuck):
            return False
        except EngineStopped:
            pass  # an ended engine holds no state
        self.budget_bytes = budget_bytes
        return True


class ModelHold(contextlib.ExitStack):
    """A request's use of a model, which stays loaded until `close`. Closing twice is harmless."""

    def __init__(self, member: Member, on_close: Callable[[Member], object]) -> None:
        super().__init__()
        self.member = member
        member.num_holds += 1
        member.idle.clear()
        self.callback(on_close, member)


class Budgets:
    """Gives each model the memory that `divide` plans."""

    def __init__(self, memory: PoolMemory, members: Mapping[str, Member], clock: Callable[[], float]) -> None:
        self._memory = memory
        self.members = members
        self._clock = clock
        self.unloaded: dict[str, EngineState] = {}
        """What models left in memory, by id."""
        self.joining: ModelUse | None = None
        """A model being loaded, which already counts in `plan`."""
        self._due_bytes = 0
        self.idle_limit = IdleLimit()
        self.on_change: Callable[[], None] = lambda: None
        self.on_given_up: Callable[[str], None] = lambda model_id: None
        """Called with an unloaded model's id once its last state is dropped from memory."""

    @property
    def taken_bytes(self) -> int:
        return self.weights_bytes + self._taken_for_state()

    @property
    def weights_bytes(self) -> int:
        return sum(member.weights_bytes for member in self.members.values())

    @property
    def needed_bytes(self) -> int:
        """All state, and a part to grow."""
        held_bytes = sum(self._held().values())
        return held_bytes + max(held_bytes // GROWTH_PART, LEAST_GROWTH_BYTES)

    def has_due(self, member: Member) -> bool:
        """Whether a model has, and is to keep, its due budget."""
        return min(member.budget_bytes, member.planned_bytes) >= min(self._due_bytes, member.useful_bytes)

    def plan(self) -> dict[str, int]:
        """The budgets with the joining model, without the leaving ones."""
        uses = self._uses()
        due, plan = due_bytes(self._for_state(uses), uses), divide(self._for_state(uses), uses)
        # The other models grow once this one is loaded, and keep running until then.
        self._due_bytes = due if self.joining is None else min(due, self._due_bytes)
        for member in self.members.values():
            member.planned_bytes = plan[member.source.id]
        return plan

    async def shrink(self, plan: Mapping[str, int], tell_wait: Callable[[Member], None] | None = None) -> None:
        """Cuts budgets to the plan. With `tell_wait` it waits for running requests that hold more."""
        for member in [one for one in self.members.values() if not one.is_leaving]:
            budget_bytes = plan[member.source.id]
            while budget_bytes < member.budget_bytes and not await member.try_resize(budget_bytes):
                if tell_wait is None:
                    break
                tell_wait(member)
                await asyncio.sleep(RETRY_SECONDS)
        self._shrink_unloaded(plan, "other models or servers")

    def _shrink_unloaded(self, plan: Mapping[str, int], for_whom: str) -> None:
        for model_id, state in list(self.unloaded.items()):
            if state.num_bytes > plan[model_id]:
                state.shrink(plan[model_id])
                if not state.num_bytes:
                    self.give_up(model_id, for_whom)

    async def divide(self) -> None:
        """Divides memory anew, as running requests allow."""
        plan, total_bytes = self.plan(), self._for_state(self._uses())
        await self.shrink(plan)
        for member in [self.members[model_id] for model_id in plan if model_id in self.members]:
            left_bytes = total_bytes - self._taken_for_state() + member.budget_bytes
            budget_bytes = min(plan[member.source.id], left_bytes)
            if budget_bytes > member.budget_bytes:
                await member.try_resize(budget_bytes)
        self.on_change()

    def relieve(self, level: Pressure) -> bool:
        """Adapts to a lack of memory; returns whether its level has changed."""
        state_bytes = self._held()
        total_bytes = sum(state_bytes.values())
        limit = self.idle_limit
        has_changed = limit.update(level, self._clock(), total_bytes, self._for_state(self._uses()))
        if limit.max_bytes is None or total_bytes <= limit.max_bytes:
            return has_changed
        parts = {model_id: limit.max_bytes * num_bytes // total_bytes for model_id, num_bytes in state_bytes.items()}
        for member in self.members.values():
            member.engine.execute_later(limit_idle, parts[member.source.id])
        self._shrink_unloaded(parts, "other programs")
        return has_changed

    def give_up(self, model_id: str, for_whom: str) -> None:
        """Drops all state of an unloaded model."""
        self.unloaded.pop(model_id).prefix_cache.clear()
        self.on_given_up(model_id)
        logger.info("the conversations of %s are given up: %s need the memory", model_id, for_whom)

    def _held(self) -> dict[str, int]:
        held_bytes = {member.source.id: member.held_bytes for member in self.members.values()}
        return held_bytes | {model_id: state.num_bytes for model_id, state in self.unloaded.items()}

    def _for_state(self, uses: Sequence[ModelUse]) -> int:
        return self._memory.for_state([one.weights_bytes for one in uses if one.is_loaded])

    def _taken_for_state(self) -> int:
        budgets = sum(member.budget_bytes for member in self.members.values())
        return budgets + sum(state.num_bytes for state in self.unloaded.values())

    def _uses(self) -> list[ModelUse]:
        now, joining = self._clock(), self.joining
        uses = {
            model_id: ModelUse(model_id, state.last_used, used_bytes=state.num_bytes, is_loaded=False)
            for model_id, state in self.unloaded.items()
        }
        uses |= {member.source.id: member.use(now) for member in self.members.values()}
        if joining is not None:
            uses[joining.id] = joining
        return list(uses.values())
