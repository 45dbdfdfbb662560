"""Threads that plan requests, shared fairly among clients.

A body waits only for bodies of its size class, where clients take turns, however many bodies each has sent. Waiting
bytes are bounded. A departed client's work keeps its thread until the renderer's next check
(`models.prompt.tokenize`), so that it does not pile up.
"""

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Final, TypeVar

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


class Planning:
    """The threads for planning. Event loop only."""

    def __init__(self, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._places = {size: FairPlaces(size.num_threads) for size in SIZES}
        self._threads = ThreadPoolExecutor(sum(size.num_threads for size in SIZES), "planning")
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_bytes = 0

    async def run(self, client: str, num_bytes: int, work: Callable[[], Result]) -> Result:
        """What `work` returns or raises, on a thread at its turn; cancellation ends `work` soon.

        Raises ApiError (429) if too many bytes wait.
        """
        places = self._places[next(size for size in SIZES if num_bytes <= size.max_bytes)]
        await self._wait(places, client, num_bytes)
        has_left = threading.Event()
        try:
            running = asyncio.get_running_loop().run_in_executor(
                self._threads, copy_context().run, _call, has_left, work
            )
        except BaseException:
            places.give_back()
            raise
        running.add_done_callback(lambda done: _ended(done, places))
        try:
            return await asyncio.shield(running)
        finally:
            has_left.set()

    async def _wait(self, places: "FairPlaces", client: str, num_bytes: int) -> None:
        if places.try_take():
            return
        if self._waiting_bytes + num_bytes > self._max_waiting_bytes:
            message = "too many long requests wait to be read"
            raise retry_later(Code.QUEUE_FULL, message, RETRY_SECONDS)
        self._waiting_bytes += num_bytes
        try:
            await places.take(client)
        finally:
            self._waiting_bytes -= num_bytes


class FairPlaces:
    """While all places are taken, waiting clients take turns. Event loop only."""

    def __init__(self, num_places: int) -> None:
        self._num_free = num_places
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Queues by client; the first client is next. No queue is empty."""

    def try_take(self) -> bool:
        """Takes a place if one is free."""
        if self._num_free == 0:
            return False
        self._num_free -= 1
        return True

    async def take(self, client: str) -> None:
        """Returns with a place. Cancellation leaves the queue."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                self._leave(client, waiter)
            else:
                self.give_back()
            raise

    def give_back(self) -> None:
        """Gives the place to the next client."""
        while self._waiting:
            waiter = self._next_waiter()
            # A cancelled waiter stays in the queue until its task has run once more.
            if not waiter.done():
                waiter.set_result(None)
                return
        self._num_free += 1

    def _next_waiter(self) -> "asyncio.Future[None]":
        client, queue = self._waiting.popitem(last=False)
        waiter = queue.popleft()
        if queue:
            self._waiting[client] = queue
        return waiter

    def _leave(self, client: str, waiter: "asyncio.Future[None]") -> None:
        queue = self._waiting.get(client, deque())
        if waiter in queue:
            queue.remove(waiter)
            if not queue:
                del self._waiting[client]


def _call(has_left: threading.Event, work: Callable[[], Result]) -> Result:
    with abandoned_when(has_left.is_set):
        return work()


def _ended(done: "asyncio.Future[Result]", places: FairPlaces) -> None:
    places.give_back()
    if not done.cancelled():
        # Marks the exception as retrieved: nobody awaits the work of a disconnected client.
        done.exception()
