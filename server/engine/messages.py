"""From the worker thread to the event loop: a `Generation` iterates over the events of one request.

A reader with more than `MAX_PENDING` events unread gets text in one piece: none of it is lost, and no other request
waits.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from server.engine.request import Delta, Event, Failed, Finished, Progress

Result = TypeVar("Result")


class Mailbox:
    """Runs deliveries on one event loop, in the order of their posts.

    One wake-up of the loop serves many posts: each costs a system call and a switch of the interpreter lock.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._posted: deque[Callable[[], object]] = deque()
        self._wakes = False
        """The loop was woken and has not begun to read since."""

    def post(self, delivery: Callable[[], object]) -> bool:
        """Runs `delivery` on the loop; False if the loop is closed, so that nobody listens. For any thread."""
        self._posted.append(delivery)
        if self._wakes:
            return True
        # Marked before the call: else the loop might read between the two, and the mark would stand for ever.
        self._wakes = True
        try:
            self.loop.call_soon_threadsafe(self._read)
        except RuntimeError:
            self._wakes = False
            return False
        return True

    def _read(self) -> None:
        # Later posts wake the loop again, even if this call still reads them.
        self._wakes = False
        try:
            for _ in range(len(self._posted)):
                self._posted.popleft()()
        except Exception:
            self.loop.call_soon(self._read)  # the loop reports the error; the deliveries after it are not lost
            raise


MAX_PENDING = 64
"""Events that a slow reader gets one by one."""


class Generation:
    """Events of one request. Used on the event loop; fed from the worker thread by `post`."""

    def __init__(self, cancel: Callable[[], None], mailbox: Mailbox) -> None:
        self.cancel = cancel
        """Ends the request at the next step; its progress stays cached. For any thread."""
        self.on_end: Callable[[], None] = lambda: None
        """Called on the worker thread before the last event is handed over."""
        self._mailbox = mailbox
        self._pending: deque[Event] = deque()
        self._arrived = asyncio.Event()

    @property
    def is_behind(self) -> bool:
        """So much is unread that text is joined. For any thread."""
        return len(self._pending) > MAX_PENDING

    def post(self, events: list[Event]) -> None:
        """Worker thread only."""
        if [event for event in events if isinstance(event, Finished | Failed)]:
            self.on_end()
        if not self._mailbox.post(partial(self._put, events)):
            self.cancel()

    def fail(self, error: Exception) -> None:
        """Ends the iteration at once, and the request at the worker's next step. Event loop only."""
        self.cancel()
        self._put([Failed(error)])

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yields events; the last one ends the request."""
        while True:
            while not self._pending:
                self._arrived.clear()
                await self._arrived.wait()
            event = self._next()
            yield event
            if isinstance(event, Finished | Failed):
                return

    def _next(self) -> Event:
        """The next event, or all text that comes next for a reader who is behind."""
        texts = list[Delta]()
        if self.is_behind:
            while self._pending and isinstance(event := self._pending[0], Delta):
                texts.append(event)
                self._pending.popleft()
        if not texts:
            return self._pending.popleft()
        token_ids = tuple(token for delta in texts for token in delta.token_ids)
        logprobs = tuple(one for delta in texts for one in delta.logprobs)
        return Delta("".join(delta.text for delta in texts), token_ids, logprobs)

    def _put(self, events: list[Event]) -> None:
        for event in events:
            if not (self.is_behind and isinstance(event, Progress)):  # a later one replaces it
                self._pending.append(event)
        self._arrived.set()


async def on_thread(name: str, work: Callable[[], Result]) -> Result:
    """Awaits `work` on a daemon thread: asyncio's few threads are not for work that may wait for long."""
    done: Future[Result] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # handed to whoever awaits it
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(done)
