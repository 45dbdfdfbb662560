"""How models divide memory, and which are unloaded for another. Pure.

What the weights leave is divided into budgets for state: one for each loaded model, and one for what each unloaded
model left.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from cache.budget import UNBOUNDED_BYTES
from models.texts import size_text
from server.pool.names import Alias, ModelTooLarge

SMALLEST_PART_BYTES = 64 << 20
"""A smaller budget holds no useful conversation."""
MUCH_WEIGHTS = 0.5
"""Memory is short where weights take more than this share."""
IDLE_SECONDS = 60.0
"""A model used within this time counts as in use."""
QUIET_SECONDS = 30.0
"""Time without pressure until idle state may grow."""
FLOOR_PART = 4
"""One part in so many: floors of idle and unloaded models, and a step of growth."""


def cache_memory_for_all(num_models: int, given_bytes: int | None) -> int | None:
    """The least `--cache-memory` with which all models are loaded at once; None if there is enough."""
    needed_bytes = SMALLEST_PART_BYTES * num_models
    return needed_bytes if num_models > 1 and given_bytes is not None and given_bytes < needed_bytes else None


@dataclass
class PoolMemory:
    """Limits of all models together."""

    total_bytes: int
    state_bytes: int | None = None
    """Limit for all state; None: what the weights leave."""
    largest_alone_bytes: int = 0
    """Weights up to this are loaded if alone, whatever they leave for state."""
    smallest_alone_bytes: int = 0
    """For state beside a single model."""
    largest_state_bytes: int | None = None
    """The most for state; None: whatever the weights leave."""

    def for_state(self, weights: Sequence[int]) -> int:
        """The memory that these weights leave for state."""
        if self.state_bytes is not None:
            return self.state_bytes
        left_bytes = max(self.total_bytes - sum(weights), self.smallest_alone_bytes if len(weights) == 1 else 0)
        return left_bytes if self.largest_state_bytes is None else min(left_bytes, self.largest_state_bytes)

    def fits(self, weights: Sequence[int]) -> bool:
        """Whether models fit together, each with a useful budget for state."""
        return weights[-1] <= self.largest_weights_bytes(weights[:-1])

    def largest_weights_bytes(self, others: Sequence[int]) -> int:
        """The most that weights may take beside others; below 0 for no model at all."""
        num_models, left_bytes = len(others) + 1, self.total_bytes - sum(others)
        if self.state_bytes is not None:
            is_useful = self.state_bytes // num_models >= min(self.state_bytes, SMALLEST_PART_BYTES)
            return left_bytes - self.state_bytes if is_useful else -1
        return max(left_bytes - SMALLEST_PART_BYTES * num_models, -1 if others else self.largest_alone_bytes)

    def is_short(self, weights_bytes: int) -> bool:
        """Whether idle models should be unloaded after a while."""
        return weights_bytes > self.total_bytes * MUCH_WEIGHTS


class Pressure(IntEnum):
    """How short of memory the machine is."""

    NORMAL = 0
    WARN = 1
    CRITICAL = 2


class IdleLimit:
    """The most state that may stay while the machine is short of memory: half of it at a warning, at critical none.

    Without pressure the limit doubles each `QUIET_SECONDS`, until it is as large as the budget.
    """

    def __init__(self) -> None:
        self.level = Pressure.NORMAL
        self.max_bytes: int | None = None
        """None: the budget alone limits."""
        self._since = 0.0

    def update(self, level: Pressure, now: float, held_bytes: int, budget_bytes: int) -> bool:
        """Takes a reading; returns whether the level has changed."""
        has_changed, is_worse = level is not self.level, level > self.level
        if level is Pressure.CRITICAL:
            self.max_bytes = 0
        elif is_worse:
            self.max_bytes = held_bytes // 2
        elif level is Pressure.NORMAL and self.max_bytes is not None and now - self._since >= QUIET_SECONDS:
            grown_bytes = max(2 * self.max_bytes, SMALLEST_PART_BYTES)
            self.max_bytes = None if grown_bytes >= budget_bytes else grown_bytes
            self._since = now
        if has_changed or level is not Pressure.NORMAL:
            self._since = now
        self.level = level
        return has_changed


@dataclass(frozen=True)
class ModelUse:
    """What decides a model's memory."""

    id: str
    last_used: float
    """By a clock."""
    weights_bytes: int = 0
    used_bytes: int = 0
    """A budget that holds all of the model's state."""
    useful_bytes: int = UNBOUNDED_BYTES
    """The model can use no more."""
    is_busy: bool = False
    is_in_use: bool = False
    """Loaded, and busy or used within `IDLE_SECONDS`."""
    is_loaded: bool = True


def due_bytes(total_bytes: int, models: Sequence[ModelUse]) -> int:
    """The least budget of a model in use: an equal part beside the floors of unloaded ones."""
    floor_bytes = _unloaded_floor(total_bytes, models)
    kept_bytes = sum(min(one.used_bytes, floor_bytes) for one in models if not one.is_loaded)
    return (total_bytes - kept_bytes) // max(sum(one.is_loaded for one in models), 1)


def _unloaded_floor(total_bytes: int, models: Sequence[ModelUse]) -> int:
    return total_bytes // FLOOR_PART // max(sum(one.used_bytes > 0 for one in models if not one.is_loaded), 1)


def divide(total_bytes: int, models: Sequence[ModelUse]) -> dict[str, int]:
    """The budget for state of each model, in sum at most `total_bytes`, each at most its `useful_bytes`.

    First, each model in use gets its due budget, and each other model its used bytes up to the floor. Then, while
    memory is left, models in use get their used bytes and a step of growth, other models get their used bytes, other
    loaded models get their due budget, and models in use share the rest. Each time the last used model comes first.
    """
    latest = sorted(models, key=lambda model: model.last_used, reverse=True)
    in_use, idle = [model for model in latest if model.is_in_use], [model for model in latest if not model.is_in_use]
    due = due_bytes(total_bytes, models)
    growth, unloaded_floor = due // FLOOR_PART, _unloaded_floor(total_bytes, models)
    claims = [
        *((model, due) for model in in_use),
        *((model, min(model.used_bytes, growth if model.is_loaded else unloaded_floor)) for model in idle),
        *((model, model.used_bytes) for model in in_use),
        *((model, model.used_bytes + growth) for model in in_use),
        *((model, model.used_bytes) for model in idle),
        *((model, due) for model in idle if model.is_loaded),
    ]
    budgets, left_bytes = dict.fromkeys((model.id for model in (*in_use, *idle)), 0), total_bytes
    for model, wanted_bytes in claims:
        given_bytes = max(min(min(wanted_bytes, model.useful_bytes) - budgets[model.id], left_bytes), 0)
        budgets[model.id] += given_bytes
        left_bytes -= given_bytes
    growing = in_use or [model for model in idle if model.is_loaded]
    for number, model in enumerate(sorted(growing, key=lambda model: model.useful_bytes - budgets[model.id])):
        given_bytes = min(left_bytes // (len(growing) - number), model.useful_bytes - budgets[model.id])
        budgets[model.id] += given_bytes
        left_bytes -= given_bytes
    return budgets


def choose_to_unload(
    loaded: Sequence[ModelUse], name: str, weights_bytes: int, memory: PoolMemory, max_models: int | None
) -> list[str]:
    """Ids of models to unload for another: idle ones first, then those used longest ago.

    Raises ModelTooLarge where the model does not fit alone.
    """
    if not memory.fits([weights_bytes]):
        size, limit = size_text(weights_bytes), size_text(max(memory.largest_weights_bytes([]), 0))
        raise ModelTooLarge(f"the weights of {name} take {size}, and there is memory for {limit}")

    def fits(staying: Sequence[ModelUse]) -> bool:
        is_within = max_models is None or len(staying) < max_models
        return is_within and memory.fits([*(one.weights_bytes for one in staying), weights_bytes])

    staying = sorted(loaded, key=lambda one: (one.is_busy, one.last_used))
    leaving: list[ModelUse] = []
    while not fits(staying):
        leaving.append(staying.pop(0))
    # After a large model goes, a small one chosen earlier may stay.
    for one in reversed(leaving[:-1]):
        if fits([*staying, one]):
            leaving.remove(one)
            staying.append(one)
    return [one.id for one in leaving]


@dataclass(frozen=True)
class PoolSettings:
    """What may be loaded, and for how long it stays."""

    memory: PoolMemory = field(default_factory=lambda: PoolMemory(UNBOUNDED_BYTES))
    max_models: int | None = None
    """None: as many as fit."""
    keep_alive_seconds: float | None = None
    """None: as `ModelPool.expires` says."""
    aliases: Sequence[Alias] = ()
    default_id: str | None = None
    wire: Callable[[int, bool], object] = lambda weights_bytes, is_quiet: None
    """Called with all weights' bytes, and whether nothing runs. Blocks."""
