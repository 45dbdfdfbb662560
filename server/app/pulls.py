"""Downloads for clients: one at a time per repository, shared by all who wait.

A download runs on a thread of its own while anybody listens; the next one continues from the bytes already here.
Event loop only, except where a docstring says otherwise.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial

from models.hub import PullEvent, PullProgress, TellPull
from models.names import parse_repository
from server.engine.messages import on_thread

MAX_TOGETHER = 2


class _Abandoned(Exception):
    """Nobody waits for the download any more."""


class Pulls:
    """The downloads of one server."""

    def __init__(self, fetch: Callable[[str, TellPull], object]) -> None:
        """`fetch` downloads a model: it blocks, tells its steps, and raises ModelError."""
        self._fetch = fetch
        self._running: dict[str, _Pull] = {}
        self._places = asyncio.Semaphore(MAX_TOGETHER)

    async def steps(self, name: str) -> AsyncIterator[PullEvent]:
        """Yields most of a download's steps. Raises ModelError."""
        key = str(parse_repository(name) or name)
        pull = self._running.get(key)
        if pull is None:
            pull = self._running[key] = _Pull()
            pull.task = asyncio.ensure_future(self._run(key, name, pull))
        pull.num_listeners += 1
        try:
            async for event in pull.events():
                yield event
        finally:
            pull.num_listeners -= 1

    async def _run(self, key: str, name: str, pull: "_Pull") -> None:
        try:
            async with self._places:
                # Somebody may come while a download is given up.
                while pull.num_listeners and not pull.is_over:
                    with suppress(_Abandoned):
                        await on_thread(f"pull {key}", partial(self._fetch, name, pull.tell))
                        pull.is_over = True
        except Exception as error:  # raised for whoever waits for the download
            pull.error = error
        finally:
            del self._running[key]
            pull.is_over = True
            pull.wake()


class _Pull:
    def __init__(self) -> None:
        self.num_listeners = 0
        """Read on any thread."""
        self.is_over = False
        self.error: Exception | None = None
        self.task: asyncio.Future[None] | None = None
        self._told: list[PullEvent] = []
        """Steps so far; of the progress within one file, only the last."""
        self._loop = asyncio.get_running_loop()
        self._more = asyncio.Event()

    def tell(self, event: PullEvent) -> None:
        """Passes on a step, on the download's thread. Raises _Abandoned."""
        if not self.num_listeners:
            raise _Abandoned
        # The loop ends with the server: then nobody listens, and the process ends.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._take, event)

    def wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()

    async def events(self) -> AsyncIterator[PullEvent]:
        """Yields the steps to the end. Raises the error of the download."""
        at, last = 0, None
        while True:
            more, is_over = self._more, self.is_over
            for event in self._told[at:]:
                if event is not last:
                    yield event
                at, last = at + 1, event
            # Looks at the last step again, since a later one may have taken its place.
            at = max(at - 1, 0)
            if is_over:
                if self.error is not None:
                    raise self.error
                return
            await more.wait()

    def _take(self, event: PullEvent) -> None:
        last = self._told[-1] if self._told else None
        if isinstance(event, PullProgress) and isinstance(last, PullProgress) and last.file == event.file:
            self._told.pop()
        self._told.append(event)
        self.wake()
