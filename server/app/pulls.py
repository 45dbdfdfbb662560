"""Downloads for clients: one at a time per repository, shared by all who wait.

A download runs on a thread of its own while anybody listens; the next one continues from the bytes already here.
Event loop only, except where a docstring says otherwise.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from models.hub import PullEvent, PullProgress, TellPull
from models.names import parse_repository
from server.pool.loader import on_thread

MAX_TOGETHER = 2

_Listener: TypeAlias = "asyncio.Queue[PullEvent | None]"
"""None is the end."""


class PullAbandoned(Exception):
    """Nobody waits for the download any more."""


class Pulls:
    """The downloads of one server."""

    def __init__(self, fetch: Callable[[str, TellPull], object]) -> None:
        """`fetch` downloads a model: it blocks, tells its steps, and raises ModelError."""
        self._fetch = fetch
        self._running: dict[str, _Pull] = {}
        self._places = asyncio.Semaphore(MAX_TOGETHER)

    async def steps(self, name: str) -> AsyncIterator[PullEvent]:
        """Yields a download's steps, of those before only the last within each file. Raises ModelError."""
        key = str(parse_repository(name) or name)
        pull = self._running.get(key)
        if pull is None:
            pull = self._running[key] = _Pull(asyncio.get_running_loop())
            pull.task = asyncio.ensure_future(self._run(key, name, pull))
        listener: _Listener = asyncio.Queue()
        pull.listeners.add(listener)
        try:
            for earlier in tuple(pull.told):
                yield earlier
            while (event := await listener.get()) is not None:
                yield event
        finally:
            pull.listeners.discard(listener)
        if pull.error is not None:
            raise pull.error

    async def _run(self, key: str, name: str, pull: "_Pull") -> None:
        try:
            async with self._places:
                # Somebody may come while a download is given up.
                while pull.listeners:
                    with suppress(PullAbandoned):
                        await on_thread(f"pull {key}", partial(self._fetch, name, pull.tell))
                        break
        except Exception as error:  # raised for whoever waits for the download
            pull.error = error
        finally:
            del self._running[key]
            for listener in pull.listeners:
                listener.put_nowait(None)


@dataclass(eq=False)
class _Pull:
    loop: asyncio.AbstractEventLoop
    listeners: set[_Listener] = field(default_factory=set)
    told: list[PullEvent] = field(default_factory=list)
    """Steps so far; of the progress within one file, only the last."""
    error: Exception | None = None
    task: "asyncio.Future[None] | None" = None

    def tell(self, event: PullEvent) -> None:
        """Passes on a step, on the download's thread. Raises PullAbandoned."""
        if not self.listeners:
            raise PullAbandoned
        # The loop ends with the server: then nobody listens, and the process ends.
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._take, event)

    def _take(self, event: PullEvent) -> None:
        last = self.told[-1] if self.told else None
        if isinstance(event, PullProgress) and isinstance(last, PullProgress) and last.file == event.file:
            self.told.pop()
        self.told.append(event)
        for listener in self.listeners:
            listener.put_nowait(event)
