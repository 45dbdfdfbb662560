"""Gives each loaded model its share of the memory for state. Event loop only."""

import asyncio
from collections.abc import Callable, Sequence

from server.engine.errors import EngineStopped, QueueFull
from server.pool.dormitory import Dormitory
from server.pool.loading import Loading
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
        """Gives each loaded model its share."""
        share_bytes = self._share_bytes(self._members.weights())
        for member in list(self._members):
            await _resized(member, share_bytes)
        self.on_change()

    async def shrink(self, loading: Loading, staying: Sequence[Member], weights_bytes: int) -> None:
        """Gives the models that stay the share that they have beside one more; waits for answers that hold more."""
        weights = [*(member.opened.weights_bytes for member in staying), weights_bytes]
        limit_bytes = self._memory.largest_dormant_bytes(weights)
        self._dormitory.drop_until(lambda dormant_bytes: dormant_bytes <= limit_bytes)
        share_bytes = self._share_bytes(weights)
        for member in staying:
            while await _resized(member, share_bytes):
                loading.step = f"waiting for memory that answers of {member.source.id} hold"
                await asyncio.sleep(RETRY_SECONDS)

    def _share_bytes(self, weights: Sequence[int]) -> int:
        return self._memory.share_bytes(weights, self._dormitory.num_bytes)


async def _resized(member: Member, budget_bytes: int) -> int:
    """Returns the bytes by which a model's running requests exceed its new budget; see `PooledEngine.try_resize`."""
    try:
        return await member.opened.engine.try_resize(budget_bytes)
    except QueueFull:
        return budget_bytes
    except EngineStopped:
        return 0
