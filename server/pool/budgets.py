"""Gives each model the budget for state that `divide` plans. Event loop only.

Each engine has its own worker thread and ledger, so its budget is changed by a command between two of its steps.
Invariant: the budgets add up to no more than the memory for state. So models that get less are told first, and memory
that running requests hold goes to nobody else until they end.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from server.engine.engine import KeptState
from server.pool.members import Member
from server.pool.memory import ModelUse, PoolMemory, divide, due_bytes

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.1
"""Pause in seconds before a model is asked again for memory that its answers hold."""


@dataclass(frozen=True, eq=False)
class UnloadedModel:
    """A model that is not loaded any more, with the state that it left in memory."""

    id: str
    state: KeptState
    last_used: float

    def use(self) -> ModelUse:
        """Returns the facts that decide about its memory."""
        return ModelUse(self.id, self.last_used, used_bytes=self.state.num_bytes, is_loaded=False)


class Budgets:
    """The budgets of the loaded models, and the state that unloaded ones left."""

    def __init__(self, memory: PoolMemory, members: Mapping[str, Member], clock: Callable[[], float]) -> None:
        self._memory = memory
        self._members = members
        self._clock = clock
        self.unloaded: dict[str, UnloadedModel] = {}
        """The models that left state in memory."""
        self.joining: ModelUse | None = None
        """A model that is being loaded: the others' budgets leave memory for it."""
        self._due_bytes = 0
        self.on_change: Callable[[], None] = lambda: None
        """Called whenever the memory taken by models has changed."""
        self.on_given_up: Callable[[str], None] = lambda model_id: None
        """Called with an unloaded model whose last state is dropped."""

    @property
    def taken_bytes(self) -> int:
        """Bytes that all models together may take: weights, and state."""
        return sum(member.opened.weights_bytes for member in self._members.values()) + self._taken_for_state()

    def has_due(self, member: Member) -> bool:
        """Whether a model has, and is to keep, the least budget of a model in use."""
        return min(member.budget_bytes, member.planned_bytes) >= self._due_bytes

    def is_anybody_short(self) -> bool:
        """Whether more memory would keep more conversations of a model in use."""
        now = self._clock()
        return any(one.is_short and one.use(now).is_in_use for one in self._members.values())

    def plan(self) -> dict[str, int]:
        """Returns the budgets once the joining model is loaded, and the leaving ones are not."""
        uses = self._uses()
        due, plan = due_bytes(self._for_state(uses), uses), divide(self._for_state(uses), uses)
        # The others grow once it is loaded, and go on until then.
        self._due_bytes = due if self.joining is None else min(due, self._due_bytes)
        for member in self._members.values():
            member.planned_bytes = plan[member.source.id]
        return plan

    async def shrink(self, plan: Mapping[str, int], tell_wait: Callable[[Member], None] | None = None) -> None:
        """Cuts the budgets to those planned. With `tell_wait` it waits for running requests that hold more."""
        for member in [one for one in self._members.values() if not one.is_leaving]:
            budget_bytes = plan[member.source.id]
            while budget_bytes < member.budget_bytes and not await member.try_resize(budget_bytes):
                if tell_wait is None:
                    break
                tell_wait(member)
                await asyncio.sleep(RETRY_SECONDS)
        for gone in list(self.unloaded.values()):
            if gone.state.num_bytes > plan[gone.id]:
                gone.state.shrink(plan[gone.id])
                if not gone.state.num_bytes:
                    self.give_up(gone.id)

    async def divide(self) -> None:
        """Divides the memory anew between all models, as far as running requests allow."""
        plan, total_bytes = self.plan(), self._for_state(self._uses())
        await self.shrink(plan)
        for member in [self._members[model_id] for model_id in plan if model_id in self._members]:
            left_bytes = total_bytes - self._taken_for_state() + member.budget_bytes
            budget_bytes = min(plan[member.source.id], left_bytes)
            if budget_bytes > member.budget_bytes:
                await member.try_resize(budget_bytes)
        self.on_change()

    def give_up(self, model_id: str) -> None:
        """Drops all state of an unloaded model."""
        self.unloaded.pop(model_id).state.drop()
        self.on_given_up(model_id)
        logger.info("the conversations of %s are given up: other models need the memory", model_id)

    def _for_state(self, uses: Sequence[ModelUse]) -> int:
        return self._memory.for_state([one.weights_bytes for one in uses if one.is_loaded])

    def _taken_for_state(self) -> int:
        budgets = sum(member.budget_bytes for member in self._members.values())
        return budgets + sum(gone.state.num_bytes for gone in self.unloaded.values())

    def _uses(self) -> list[ModelUse]:
        now, joining = self._clock(), self.joining
        uses = {gone.id: gone.use() for gone in self.unloaded.values()}
        uses |= {member.source.id: member.use(now) for member in self._members.values()}
        if joining is not None:
            uses[joining.id] = joining
        return list(uses.values())
