"""How the models of one process share the machine's memory, and which make way for another one. Pure.

Weights and state of all loaded models together stay within one figure. What the weights leave is shared out evenly:
each loaded model has the same budget for the state of its conversations. Sizes are bytes.

How a model that is short of memory for state borrows from models that are idle. Pure.

Each loaded model has the same share of the memory for state. An idle one lends what it does not use, and then what it
does, down to a floor; the one that was used longest ago lends first. It has its share back before its next request is
planned, so a loan is never the reason for a refusal. Sizes are bytes.

Invariants: the budgets add up to no more than before; only idle models get less, and none less than the floor.

What may be loaded into a pool, and for how long it stays. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from models.short_names import size_text
from server.pool.errors import ModelTooLarge
from server.pool.names import Alias

SMALLEST_SHARE_BYTES = 64 << 20
"""Less memory for state would hold no conversation worth the name: rather one model makes way for the other."""
DORMANT_SHARE = 0.25
"""Of the memory for state: what conversations of unloaded models may keep of it."""
SHORT_SHARE = 0.5
"""Memory is short where weights take more than this part of it."""


@dataclass(frozen=True)
class PoolMemory:
    """What the weights and the state of all models may take together."""

    total_bytes: int
    state_bytes: int | None = None
    """The budget for the state of all models, where it was asked for; None: what the weights leave."""
    largest_alone_bytes: int = 0
    """Weights up to this are loaded where they are alone, however little they leave for state."""
    smallest_alone_bytes: int = 1
    """The budget for state that a model alone is granted then."""

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
        """Returns how much state of unloaded models may stay in memory beside models of these weights."""
        return max(int(self._left_bytes(weights) * DORMANT_SHARE), 0)

    def fits(self, weights: Sequence[int]) -> bool:
        """Whether models of these weights can be loaded together, each with a share that serves."""
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
        """Whether the weights take so much that an idle model is better unloaded after a while."""
        return sum(weights) > self.total_bytes * SHORT_SHARE


@dataclass(frozen=True)
class Resident:
    """A loaded model, as far as it matters for what makes way."""

    id: str
    weights_bytes: int
    last_used: float
    """Reading of a clock."""
    is_busy: bool = False


def choose_to_leave(
    residents: Sequence[Resident], name: str, weights_bytes: int, memory: PoolMemory, max_models: int | None
) -> list[str]:
    """Returns the ids of the models that make way for another one, none where it fits beside all.

    Idle models go before busy ones, and of these those that were used longest ago; no more than are needed.
    Raises ModelTooLarge where the model does not even fit alone.
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
    # A small one that went first may not have been needed once a large one went.
    for one in reversed(leaving[:-1]):
        if _fits([*staying, one], weights_bytes, memory, max_models):
            leaving.remove(one)
            staying.append(one)
    return [one.id for one in leaving]


def _fits(staying: Sequence[Resident], weights_bytes: int, memory: PoolMemory, max_models: int | None) -> bool:
    is_within = max_models is None or len(staying) < max_models
    return is_within and memory.fits([*(one.weights_bytes for one in staying), weights_bytes])


IDLE_SECONDS = 60.0
"""A model that was used since is about to be used again: it lends nothing."""
FLOOR_PART = 4
"""What a model keeps of its share at least is one part of so many; a loan is one more of them."""
SHORT_PART = 0.9
"""A model is short that uses more than this of what it may."""


@dataclass(frozen=True)
class StateUse:
    """What a loaded model may take for state, and what it does."""

    id: str
    budget_bytes: int
    used_bytes: int
    limit_bytes: int
    """Of what it uses: the budget, less what is on its way to and from a disk."""
    last_used: float
    """Reading of a clock."""
    is_idle: bool

    @property
    def is_short(self) -> bool:
        """Whether more memory would keep more of its conversations."""
        return not self.is_idle and self.used_bytes > self.limit_bytes * SHORT_PART

    @property
    def wanted_bytes(self) -> int:
        """A budget that holds what it uses."""
        return self.used_bytes + max(self.budget_bytes - self.limit_bytes, 0)


def plan_loans(uses: Sequence[StateUse], share_bytes: int) -> dict[str, int]:
    """Returns the new budgets of the models that lend and borrow, lenders first; empty where none is to change.

    The one that borrows is the model used last of those that are short. No model grows without lenders: what they
    turn out not to be able to give, it must not get.
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
    """The model of requests that name none; None: the only one there is."""
