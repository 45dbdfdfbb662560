"""Gives each loaded model its share of the memory for state, and has idle ones lend of theirs. Event loop only.

Invariant: the budgets of all models add up to no more than their shares. So whoever gets less is told first, and
what it cannot give, because running requests hold it, nobody else gets.
"""

import asyncio
from collections.abc import Callable, Sequence

from server.engine.request import EngineStopped, QueueFull
from server.pool.dormitory import Dormitory
from server.pool.loading import Loading
from server.pool.loans import IDLE_SECONDS, StateUse, plan_loans
from server.pool.member import Member
from server.pool.members import Members
from server.pool.memory import PoolMemory

RETRY_SECONDS = 0.1
"""Pause before a model that stays is asked again for memory that its answers hold."""


class StateShares:
    """The shares of all loaded models, which are the same for each."""

    def __init__(self, memory: PoolMemory, members: Members, dormitory: Dormitory) -> None:
        self._memory = memory
        self._members = members
        self._dormitory = dormitory
        self.on_change: Callable[[], None] = lambda: None
        """Called whenever what the models take has changed."""

    @property
    def taken_bytes(self) -> int:
        """What the loaded models may take together: weights, and budgets for state."""
        weights = self._members.weights()
        return sum(weights) + self._share_bytes(weights) * len(weights) + self._dormitory.num_bytes

    @property
    def largest_dormant_bytes(self) -> int:
        """How much state of unloaded models may stay in memory now."""
        return self._memory.largest_dormant_bytes(self._members.weights())

    async def share_out(self) -> None:
        """Gives each loaded model its share: more comes after less, and what is still lent comes back later."""
        share_bytes = self._share_bytes(self._members.weights())
        members = sorted(self._members, key=lambda member: -_budget(member, share_bytes))
        for member in members:
            others = sum(_budget(other, share_bytes) for other in members if other is not member)
            left_bytes = share_bytes * len(members) - others
            await _resized(member, max(min(share_bytes, left_bytes), 1))
            member.is_lending = _budget(member, share_bytes) < share_bytes
        self.on_change()

    async def lend(self, now: float) -> None:
        """Has idle models lend to one that is short of memory, if there are any."""
        share_bytes = self._share_bytes(self._members.weights())
        members = {member.source.id: member for member in self._members}
        plan = plan_loans([_state_use(member, share_bytes, now) for member in members.values()], share_bytes)
        lent_bytes = 0
        for model_id, budget_bytes in plan.items():
            member = members[model_id]
            before = _budget(member, share_bytes)
            if budget_bytes > before:
                await _resized(member, before + lent_bytes)
                continue
            # First of all, so that no request is planned for it meanwhile.
            member.is_lending = True
            await _resized(member, budget_bytes)
            lent_bytes += before - _budget(member, share_bytes)

    async def take_back(self, loading: Loading) -> None:
        """Gives a model that has lent of its share all of it again; waits for answers that hold more."""
        share_bytes = self._share_bytes(self._members.weights())
        for member in [one for one in self._members if one.source.id != loading.source.id]:
            while _budget(member, share_bytes) > share_bytes and await _resized(member, share_bytes):
                loading.step = f"waiting for memory that answers of {member.source.id} hold"
                await asyncio.sleep(RETRY_SECONDS)
        await self.share_out()

    async def shrink(self, loading: Loading, staying: Sequence[Member], weights_bytes: int) -> None:
        """Gives the models that stay the share that they have beside one more; waits for answers that hold more."""
        weights = [*(member.opened.weights_bytes for member in staying), weights_bytes]
        limit_bytes = self._memory.largest_dormant_bytes(weights)
        self._dormitory.drop_until(lambda dormant_bytes: dormant_bytes <= limit_bytes)
        share_bytes, share_now = self._share_bytes(weights), self._share_bytes(self._members.weights())
        # Who has borrowed first: one that has lent may get more by this.
        for member in sorted(staying, key=lambda member: -_budget(member, share_now)):
            while await _resized(member, share_bytes):
                loading.step = f"waiting for memory that answers of {member.source.id} hold"
                await asyncio.sleep(RETRY_SECONDS)

    def _share_bytes(self, weights: Sequence[int]) -> int:
        return self._memory.share_bytes(weights, self._dormitory.num_bytes)


async def _resized(member: Member, budget_bytes: int) -> int:
    """Returns the bytes by which a model's running requests exceed its new budget; see `PooledEngine.try_resize`."""
    try:
        excess_bytes = await member.opened.engine.try_resize(budget_bytes)
    except QueueFull:
        return budget_bytes
    except EngineStopped:
        return 0
    if not excess_bytes:
        member.budget_bytes = budget_bytes
    return excess_bytes


def _budget(member: Member, share_bytes: int) -> int:
    return share_bytes if member.budget_bytes is None else member.budget_bytes


def _state_use(member: Member, share_bytes: int, now: float) -> StateUse:
    cache, budget_bytes = member.opened.engine.stats().cache, _budget(member, share_bytes)
    return StateUse(
        member.source.id,
        budget_bytes,
        cache.stored_bytes + cache.live_bytes,
        cache.budget_bytes or budget_bytes,
        member.last_used,
        is_idle=not member.is_busy and now - member.last_used >= IDLE_SECONDS,
    )
