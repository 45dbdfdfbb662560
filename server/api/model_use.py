"""Has the model of a request loaded, and holds it while the request is planned and answered. Event loop only.

A request is planned on another thread, where its model is found by name. Where that is not loaded the planning ends
with ModelNotLoaded: the model is loaded, and the request is planned anew.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from server.api.context import HoldPort, PoolPort, ServedModel
from server.pool.errors import ModelNotLoaded

Planned = TypeVar("Planned")


@dataclass(frozen=True, eq=False)
class InUse(Generic[Planned]):
    """What was planned, and the hold on its model; no hold for what needs none any more."""

    planned: Planned
    hold: HoldPort | None = None

    def close(self) -> None:
        """Ends the use of the model."""
        if self.hold is not None:
            self.hold.close()


async def plan_held(
    pool: PoolPort,
    plan: Callable[[], Awaitable[Planned]],
    model_of: Callable[[Planned], ServedModel | None],
    hold: HoldPort | None = None,
) -> InUse[Planned]:
    """Returns what `plan` returns, with its model loaded and held.

    `model_of` says which model it needs from then on. `hold` is one that the caller has already, and is closed here
    unless it is returned. Raises what `plan` raises, PoolError and EngineStopped.
    """
    try:
        while True:
            try:
                planned = await plan()
            except ModelNotLoaded as error:
                if hold is not None:
                    hold.close()
                hold = None
                hold = await pool.load(error.source)
                continue
            model = model_of(planned)
            if model is not None and (hold is None or hold.model is not model):
                if hold is not None:
                    hold.close()
                hold = pool.try_hold(model)
                if hold is None:
                    # Unloaded while the request was planned, or short of memory that it has lent: planned anew.
                    hold = await pool.load(pool.source_of(model.base_id))
                    continue
            if model is None and hold is not None:
                hold.close()
            return InUse(planned, hold)
    except BaseException:
        if hold is not None:
            hold.close()
        raise


class LoadingUse(Generic[Planned]):
    """A request whose model is being loaded: it may be waited for, or given up."""

    def __init__(self, pool: PoolPort, error: ModelNotLoaded, work: Awaitable[InUse[Planned]]) -> None:
        """`work` waits for the model that `error` names."""
        self._pool = pool
        self._model_id = error.source.id
        self._task = asyncio.ensure_future(work)
        self._is_taken = False

    @property
    def progress(self) -> str:
        """What is being done, in a few words."""
        return f"loading {self._model_id}: {self._pool.loading.get(self._model_id, 'done')}"

    async def is_done_within(self, seconds: float | None) -> bool:
        """Waits; returns whether it came to an end, whichever."""
        done, _ = await asyncio.wait((self._task,), timeout=seconds)
        return bool(done)

    async def result(self) -> InUse[Planned]:
        """Returns what was planned, which is the caller's to close; raises what kept it from coming about."""
        found = await asyncio.shield(self._task)
        self._is_taken = True
        return found

    def close(self) -> None:
        """Gives it up, unless its result was taken."""
        if self._is_taken:
            return
        if not self._task.cancel() and not self._task.cancelled() and self._task.exception() is None:
            self._task.result().close()
