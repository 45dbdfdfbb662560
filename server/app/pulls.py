"""Downloads that clients ask for: one at a time for each repository, shared by all who wait for it.

A download runs on a thread of its own while anybody listens; the next one continues from the bytes already here.
Event loop only, except where a docstring says otherwise.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

from models.hub import PullEvent, PullProgress, TellPull
from models.names import parse_repository
from server.pool.loader import on_thread

MAX_TOGETHER = 2


class Fetch(Protocol):
    """`models.hub.pull`, which blocks."""

    def __call__(self, name: str, tell: TellPull, /, *, max_weights_bytes: int | None) -> Path:
        """Returns the model's folder; raises ModelError."""
        ...


class PullAbandoned(Exception):
    """Raised into a download that nobody waits for any more."""


class Pulls:
    """The downloads of one server."""

    def __init__(self, fetch: Fetch, max_weights_bytes: Callable[[], int]) -> None:
        """`max_weights_bytes` is called on the download's thread."""
        self._fetch = fetch
        self._max_weights_bytes = max_weights_bytes
        self._running: dict[str, _Pull] = {}
        self._places = asyncio.Semaphore(MAX_TOGETHER)

    async def steps(self, name: str) -> AsyncIterator[PullEvent]:
        """Yields a download's steps, though not every one of a file. Raises ModelError."""
        key = str(parse_repository(name) or name)
        pull = self._running.get(key)
        if pull is None:
            pull = self._running[key] = _Pull()
            task = asyncio.ensure_future(self._run(key, name, pull))
            pull.task = task
        listener = pull.join()
        try:
            async for event in listener.events():
                yield event
        finally:
            pull.leave(listener)

    async def _run(self, key: str, name: str, pull: "_Pull") -> None:
        try:
            async with self._places:
                # Somebody may have come since the download was given up.
                while pull.is_wanted and not await self._is_done(key, name, pull):
                    pass
        except Exception as error:  # told to whoever waits for it
            pull.end(error)
        finally:
            del self._running[key]
            pull.end(None)

    async def _is_done(self, key: str, name: str, pull: "_Pull") -> bool:
        """False where nobody waited any more."""
        try:
            fetch = partial(self._fetch, name, pull.tell)
            await on_thread(f"pull {key}", lambda: fetch(max_weights_bytes=self._max_weights_bytes()))
        except PullAbandoned:
            return False
        return True


class _Pull:
    def __init__(self) -> None:
        self._listeners: list[_Listener] = []
        self._told: list[PullEvent] = []
        """For later listeners."""
        self._loop = asyncio.get_running_loop()
        self._is_over = False
        self._error: Exception | None = None
        self.task: asyncio.Future[None] | None = None
        self.is_wanted = True
        """Somebody listens. Read on any thread."""

    def join(self) -> "_Listener":
        listener = _Listener(self._told)
        self._listeners.append(listener)
        self.is_wanted = True
        if self._is_over:
            listener.end(self._error)
        return listener

    def leave(self, listener: "_Listener") -> None:
        self._listeners.remove(listener)
        self.is_wanted = bool(self._listeners)

    def tell(self, event: PullEvent) -> None:
        """Passes on a step, on the download's thread. Raises PullAbandoned."""
        if not self.is_wanted:
            raise PullAbandoned
        # The loop ends with the server: then nobody listens, and the process ends.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._take, event)

    def end(self, error: Exception | None) -> None:
        if self._is_over:
            return
        self._is_over, self._error = True, error
        for listener in self._listeners:
            listener.end(error)

    def _take(self, event: PullEvent) -> None:
        _add(self._told, event)
        for listener in self._listeners:
            listener.take(event)


class _Listener:
    def __init__(self, told: list[PullEvent]) -> None:
        self._waiting = list(told)
        self._has_more = asyncio.Event()
        self._has_more.set()
        self._is_over = False
        self._error: Exception | None = None

    def take(self, event: PullEvent) -> None:
        _add(self._waiting, event)
        self._has_more.set()

    def end(self, error: Exception | None) -> None:
        self._is_over, self._error = True, error
        self._has_more.set()

    async def events(self) -> AsyncIterator[PullEvent]:
        """Yields the steps to the end. Raises the error of the download."""
        while True:
            await self._has_more.wait()
            self._has_more.clear()
            events, self._waiting = self._waiting, []
            for event in events:
                yield event
            if self._is_over and not self._waiting:
                if self._error is not None:
                    raise self._error
                return


def _add(events: list[PullEvent], event: PullEvent) -> None:
    last = events[-1] if events else None
    if isinstance(event, PullProgress) and isinstance(last, PullProgress) and last.file == event.file:
        events.pop()
    events.append(event)
