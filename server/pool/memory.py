"""How the models of one process share the machine's memory, what they lend, and which make way. Pure.

Weights and state of all loaded models together stay within one figure. Each loaded model has the same share of the
memory that the weights leave for the state of conversations. A loan is memory that an idle model gives a busy one for
a time: first what it does not use, then what it does, down to a floor. The model idle longest lends first, and has
its share back before its next request is planned, so a loan is never the reason for a refusal. Sizes are bytes.

Invariants of loans: the sum of the budgets never grows; only idle models get less, and none less than the floor.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from models.short_names import size_text
from server.pool.errors import ModelTooLarge
from server.pool.names import Alias

SMALLEST_SHARE_BYTES = 64 << 20
"""Less memory for state would hold no useful conversation: one model makes way for the other instead."""
DORMANT_SHARE = 0.25
"""Part of the memory for state that conversations of unloaded models may keep."""
SHORT_SHARE = 0.5
"""Memory is short where weights take more than this part of it."""


@dataclass(frozen=True)
class PoolMemory:
    """Limits of the weights and the state of all models together."""

    total_bytes: int
    state_bytes: int | None = None
    """The requested budget for the state of all models; None: what the weights leave."""
    largest_alone_bytes: int = 0
    """Weights up to this are loaded if alone, however little they leave for state."""
    smallest_alone_bytes: int = 1
    """The least budget for state of a model loaded alone."""

    def share_bytes(self, weights: Sequence[int], dormant_bytes: int = 0) -> int:
        """Returns each model's budget for state, where models of these weights are loaded together.

        `dormant_bytes` are kept for models that are not loaded.
        """
        num_models = max(len(weights), 1)
        left_bytes = (self._left_bytes(weights) - dormant_bytes) // num_models
        return max(left_bytes, self.smallest_alone_bytes if num_models == 1 else 1)

    def _left_bytes(self, weights: Sequence[int]) -> int:
        return self.total_bytes - sum(weights) if self.state_bytes is None else self.state_bytes

    def largest_dormant_bytes(self, weights: Sequence[int]) -> int:
        """Returns the limit of dormant state beside models of these weights."""
        return max(int(self._left_bytes(weights) * DORMANT_SHARE), 0)

    def fits(self, weights: Sequence[int]) -> bool:
        """Whether models of these weights can be loaded together, each with a useful share."""
        if self.state_bytes is None:
            if len(weights) == 1 and weights[0] <= self.largest_alone_bytes:
                return True
            return self.share_bytes(weights) >= SMALLEST_SHARE_BYTES
        is_served = self.share_bytes(weights) >= min(self.state_bytes, SMALLEST_SHARE_BYTES)
        return is_served and sum(weights) + self.state_bytes <= self.total_bytes

    def largest_weights_bytes(self, weights: Sequence[int]) -> int:
        """Returns the most that another model's weights may take beside these."""
        if self.state_bytes is not None:
            return self.total_bytes - self.state_bytes - sum(weights)
        if not weights and self.largest_alone_bytes:
            return self.largest_alone_bytes
        return self.total_bytes - sum(weights) - SMALLEST_SHARE_BYTES * (len(weights) + 1)

    def is_short(self, weights: Sequence[int]) -> bool:
        """Whether the weights take so much that an idle model should be unloaded after a while."""
        return sum(weights) > self.total_bytes * SHORT_SHARE


@dataclass(frozen=True)
class Resident:
    """The facts of a loaded model that decide which makes way."""

    id: str
    weights_bytes: int
    last_used: float
    """Reading of a clock."""
    is_busy: bool = False


def choose_to_leave(
    residents: Sequence[Resident], name: str, weights_bytes: int, memory: PoolMemory, max_models: int | None
) -> list[str]:
    """Returns the ids of the models that make way for another one, none where it fits beside all.

    Idle models go before busy ones, then the one used longest ago; no more than are needed. Raises ModelTooLarge
    where the model does not even fit alone.
    """
    if not memory.fits([weights_bytes]):
        raise ModelTooLarge(
            f"the weights of {name} take {size_text(weights_bytes)}, and there is memory for "
            f"{size_text(max(memory.largest_weights_bytes([]), 0))}"
        )
    staying = sorted(residents, key=lambda one: (one.is_busy, one.last_used))
    leaving: list[Resident] = []
    while not _fits(staying, weights_bytes, memory, max_models):
        leaving.append(staying.pop(0))
    # After a large model goes, a small one chosen earlier may stay.
    for one in reversed(leaving[:-1]):
        if _fits([*staying, one], weights_bytes, memory, max_models):
            leaving.remove(one)
            staying.append(one)
    return [one.id for one in leaving]


def _fits(staying: Sequence[Resident], weights_bytes: int, memory: PoolMemory, max_models: int | None) -> bool:
    is_within = max_models is None or len(staying) < max_models
    return is_within and memory.fits([*(one.weights_bytes for one in staying), weights_bytes])


IDLE_SECONDS = 60.0
"""A model used within this time is likely to be used again soon, so it lends nothing."""
FLOOR_PART = 4
"""A model keeps at least a share / FLOOR_PART; a loan is another such part."""
SHORT_PART = 0.9
"""A model is short of memory above this fraction of its limit."""


@dataclass(frozen=True)
class StateUse:
    """Memory for state of a loaded model: budget, limit, use."""

    id: str
    budget_bytes: int
    used_bytes: int
    limit_bytes: int
    """Most bytes that it may use: the budget, less state on its way to and from a disk."""
    last_used: float
    """Reading of a clock."""
    is_idle: bool

    @property
    def is_short(self) -> bool:
        """Whether more memory would keep more of its conversations."""
        return not self.is_idle and self.used_bytes > self.limit_bytes * SHORT_PART

    @property
    def wanted_bytes(self) -> int:
        """A budget that holds the used state."""
        return self.used_bytes + max(self.budget_bytes - self.limit_bytes, 0)


def plan_loans(uses: Sequence[StateUse], share_bytes: int) -> dict[str, int]:
    """Returns the new budgets of lenders and borrower, lenders first; empty for no change.

    The borrower is the model used last of those short of memory. It grows only by what lenders give: memory that they
    turn out not to be able to give must not be promised.
    """
    short = [one for one in uses if one.is_short]
    if not short:
        return {}
    borrower = max(short, key=lambda one: one.last_used)
    floor_bytes = share_bytes // FLOOR_PART
    wanted = left = share_bytes // FLOOR_PART
    lenders = sorted((one for one in uses if one.is_idle), key=lambda one: one.last_used)
    budgets = {one.id: one.budget_bytes for one in lenders}
    for kept in (lambda one: max(one.wanted_bytes, floor_bytes), lambda one: floor_bytes):
        for one in lenders:
            lent = min(left, max(budgets[one.id] - kept(one), 0))
            budgets[one.id] -= lent
            left -= lent
    if left == wanted:
        return {}
    changed = {one.id: budgets[one.id] for one in lenders if budgets[one.id] != one.budget_bytes}
    return {**changed, borrower.id: borrower.budget_bytes + wanted - left}


@dataclass(frozen=True)
class PoolSettings:
    """What may be loaded, and for how long it stays."""

    memory: PoolMemory = field(default_factory=lambda: PoolMemory(1 << 62))
    max_models: int | None = None
    """Models that may be loaded together; None: as many as fit."""
    keep_alive_seconds: float | None = None
    """How long an idle model stays; None: for ever while memory is ample, half an hour where it is short."""
    aliases: Sequence[Alias] = ()
    default_id: str | None = None
    """The model of requests that name none; None: the only one."""
