"""Questions and orders to a running engine, answered on its worker thread between two steps.

A command is a small frozen dataclass whose `run` is called there once, in the order in which commands and requests
came in. `Engine.ask` hands one over and waits for what it returns. This module knows no cache and no request.
"""

import asyncio
import logging
from typing import Any, Generic, Protocol, TypeVar

from server.engine.errors import EngineStopped

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
ResultCo = TypeVar("ResultCo", covariant=True)
ContextContra = TypeVar("ContextContra", contravariant=True)


class Command(Protocol[ContextContra, ResultCo]):
    """Something to do with the worker. What `run` raises reaches whoever asked, and nobody else."""

    def run(self, worker: ContextContra, /) -> ResultCo:
        """Does it; a fraction of a step's time at most, since every live row waits meanwhile."""
        ...


class Reply(Generic[Result]):
    """Where a command's outcome is awaited: made and awaited on the event loop, settled from the worker thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[Result] = self._loop.create_future()

    @property
    def is_wanted(self) -> bool:
        """False once whoever asked has given up."""
        return not self._future.done()

    async def wait(self) -> Result:
        """Returns the command's result, or raises its error."""
        return await self._future

    def succeed(self, result: Result) -> None:
        """Hands the result over."""
        self._settle(self._future.set_result, result)

    def fail(self, error: Exception) -> None:
        """Hands an error over."""
        self._settle(self._future.set_exception, error)

    def _settle(self, settle: Any, outcome: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(self._settle_here, settle, outcome)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    def _settle_here(self, settle: Any, outcome: Any) -> None:
        if self.is_wanted:
            settle(outcome)


class Unheard(Generic[Result]):
    """The reply to a command whose outcome nobody waits for."""

    is_wanted = True

    def succeed(self, result: Result) -> None:
        """Nobody is to know."""

    def fail(self, error: Exception) -> None:
        """Only the log is to know, unless the engine just ended."""
        if not isinstance(error, EngineStopped):
            logger.error("a command failed", exc_info=error)
