"""The asyncio side of one request: an async iterator over its events that can be cancelled.

For a slow reader `MAX_PENDING` events wait, then one piece of text that grows. No event is lost, and no other request
waits. The HTTP side limits how long a reader may read nothing.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial

from server.engine.request import Delta, Event, Failed, Finished, Progress


class Mailbox:
    """Runs deliveries on one event loop, in the order of their posts.

    One wake-up of the loop serves many posts: each costs a system call and a switch of the interpreter lock.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._posted: deque[Callable[[], None]] = deque()
        self._wakes = False
        """The loop was woken and has not begun to read since."""

    def post(self, delivery: Callable[[], None]) -> None:
        """Runs `delivery` on the loop. For any thread; raises RuntimeError if the loop is closed."""
        self._posted.append(delivery)
        if self._wakes:
            return
        # Marked before the call: else the loop might read between the two, and the mark would stand for ever.
        self._wakes = True
        try:
            self.loop.call_soon_threadsafe(self._read)
        except RuntimeError:
            self._wakes = False
            raise

    def _read(self) -> None:
        # Later posts wake the loop again, even if this call still reads them.
        self._wakes = False
        for _ in range(len(self._posted)):
            self._posted.popleft()()


MAX_PENDING = 64
"""Events kept one by one for a slow reader."""


class Generation:
    """Events of one request. Used on the event loop; fed from the worker thread by `post`."""

    def __init__(self, request_id: str, cancel: Callable[[str], None], mailbox: Mailbox) -> None:
        """`mailbox` belongs to the reader's event loop."""
        self.request_id = request_id
        self.on_end: Callable[[], None] = lambda: None
        """Called on the worker thread before the last event is handed over."""
        self.is_over = False
        """The last event was posted. Worker thread only."""
        self._cancel = cancel
        self._mailbox = mailbox
        self._pending: deque[Event] = deque()
        self._joined: list[Delta] = []
        """Read after the pending events, as one piece."""
        self._arrived = asyncio.Event()

    @property
    def is_behind(self) -> bool:
        """So much is unread that text is joined. For any thread."""
        return bool(self._joined)

    def post(self, events: list[Event]) -> None:
        """Worker thread only. A closed loop means that nobody listens."""
        if any(isinstance(event, Finished | Failed) for event in events):
            self.is_over = True
            self.on_end()
        try:
            self._mailbox.post(partial(self._put_all, events))
        except RuntimeError:
            self.cancel()

    def cancel(self) -> None:
        """Ends the request at the next step; its progress stays cached. For any thread."""
        self._cancel(self.request_id)

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yields events; the last one ends the request."""
        while True:
            event = await self._next()
            yield event
            if isinstance(event, Finished | Failed):
                return

    async def _next(self) -> Event:
        while not self._pending:
            self._arrived.clear()
            await self._arrived.wait()
        event = self._pending.popleft()
        if not self._pending:
            self._end_joining()
        return event

    def _put_all(self, events: list[Event]) -> None:
        for event in events:
            self._put(event)
        self._arrived.set()

    def _put(self, event: Event) -> None:
        is_full = bool(self._joined) or len(self._pending) >= MAX_PENDING
        if is_full and isinstance(event, Delta):
            self._joined.append(event)
        elif is_full and isinstance(event, Progress):
            return  # a later one replaces it
        else:
            self._end_joining()
            self._pending.append(event)

    def _end_joining(self) -> None:
        if self._joined:
            joined, self._joined = self._joined, []
            token_ids = tuple(token for delta in joined for token in delta.token_ids)
            logprobs = tuple(one for delta in joined for one in delta.logprobs)
            self._pending.append(Delta("".join(delta.text for delta in joined), token_ids, logprobs))
