"""Threads that plan requests, and do other work of requests, shared fairly among clients.

A body waits only for bodies of its size class, where clients take turns, however many bodies each has sent. Waiting
bytes are bounded. A departed client's work keeps its thread until the renderer's next check
(`models.prompt.tokenize`), so that it does not pile up.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Final, TypeVar
from weakref import WeakValueDictionary

from models.prompt.tokenize import abandoned_when
from server.api.errors import Code, retry_later

Result = TypeVar("Result")

MAX_WAITING_BYTES: Final = 256 << 20
RETRY_SECONDS: Final = 5


@dataclass(frozen=True)
class Size:
    """Bodies up to `max_bytes`, planned by `num_threads` threads."""

    max_bytes: float
    num_threads: int


SIZES: Final = (Size(64 << 10, 4), Size(1 << 20, 2), Size(float("inf"), 1))
"""Ascending. More threads for long bodies would compete with the worker for Python's lock."""


class FairPlaces(asyncio.Semaphore):
    """While all places are taken, waiting clients take turns: one request of each waits for the next place."""

    def __init__(self, num_places: int) -> None:
        super().__init__(num_places)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By client; held by those who wait."""

    async def take(self, client: str) -> None:
        """Returns with a place."""
        async with self._turns.setdefault(client, asyncio.Lock()):
            await self.acquire()


class FairThreads(FairPlaces):
    """Threads of one kind of work, which no other kind takes. Event loop only."""

    def __init__(self, num_threads: int, name: str) -> None:
        super().__init__(num_threads)
        self._threads = ThreadPoolExecutor(num_threads, name)

    async def run(self, client: str, work: Callable[[], Result]) -> Result:
        """What `work` returns or raises, on a thread at its turn; cancellation ends `work` soon."""
        await self.take(client)
        return await self.start(work)

    async def start(self, work: Callable[[], Result]) -> Result:
        """As `run`, at a place that was taken."""
        has_left = threading.Event()
        running = asyncio.get_running_loop().run_in_executor(self._threads, copy_context().run, _call, has_left, work)
        running.add_done_callback(lambda _: self.release())
        # Marks the exception as retrieved: nobody awaits the work of a disconnected client.
        running.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            return await asyncio.shield(running)
        finally:
            has_left.set()


class Planning:
    """The threads for planning. Event loop only."""

    def __init__(self, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._threads = {size: FairThreads(size.num_threads, "planning") for size in SIZES}
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_bytes = 0

    async def run(self, client: str, num_bytes: int, work: Callable[[], Result]) -> Result:
        """As `FairThreads.run`; raises ApiError (429) if too many bytes wait."""
        threads = self._threads[next(size for size in SIZES if num_bytes <= size.max_bytes)]
        if threads.locked() and self._waiting_bytes + num_bytes > self._max_waiting_bytes:
            raise retry_later(Code.QUEUE_FULL, "too many long requests wait to be read", RETRY_SECONDS)
        self._waiting_bytes += num_bytes
        try:
            await threads.take(client)
        finally:
            self._waiting_bytes -= num_bytes
        return await threads.start(work)


def _call(has_left: threading.Event, work: Callable[[], Result]) -> Result:
    with abandoned_when(has_left.is_set):
        return work()
