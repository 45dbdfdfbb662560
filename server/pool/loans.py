"""How a model that is short of memory for state borrows from models that are idle. Pure.

Each loaded model has the same share of the memory for state. An idle one lends what it does not use, and then what it
does, down to a floor; the one that was used longest ago lends first. It has its share back before its next request is
planned, so a loan is never the reason for a refusal. Sizes are bytes.

Invariants: the budgets add up to no more than before; only idle models get less, and none less than the floor.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
