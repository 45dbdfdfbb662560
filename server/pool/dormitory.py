"""The conversations of unloaded models, as far as memory has a place for them. Event loop only."""

import logging
from collections.abc import Callable

from server.engine.engine import DormantState

logger = logging.getLogger(__name__)


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
