"""The asyncio side of one request: an async iterator over its events, and a way to cancel it."""

import asyncio
from collections.abc import AsyncIterator, Callable

from server.engine.events import Event, Failed, Finished


class Generation:
    """Events of one submitted request. Used on the event loop; fed from the worker thread by `post`."""

    def __init__(self, request_id: str, cancel: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._cancel = cancel
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def post(self, events: list[Event]) -> None:
        """Hands events over. Called on the worker thread; a closed loop means nobody listens any more."""
        try:
            self._loop.call_soon_threadsafe(self._put_all, events)
        except RuntimeError:
            self.cancel()

    def cancel(self) -> None:
        """Stops the sequence at the next step; its progress stays cached. Safe from any thread, any time."""
        self._cancel(self.request_id)

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yields events up to and including the one that ends the request."""
        while True:
            event = await self._events.get()
            yield event
            if isinstance(event, Finished | Failed):
                return

    def _put_all(self, events: list[Event]) -> None:
        for event in events:
            self._events.put_nowait(event)
