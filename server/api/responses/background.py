"""Responses made in the background, whose events are kept for clients that come back.

A run takes over the permit, the model and the slot of its request, and gives them back when the response ends. Runs
are bounded in number by namespace, in bytes together, and in time. Event loop only.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from typing import Any, Final, Protocol

from server.api.answer import Answer
from server.api.errors import ApiError, Code, retry_later, wrong
from server.app.config import ServerConfig

MAX_RUNNING: Final = 16
MAX_RUNS: Final = 256
"""The most runs of all namespaces, ended ones included."""
MAX_EVENT_BYTES: Final = 1 << 26
"""The most bytes of all runs' events; beyond that, the first events of the oldest run are dropped."""
MAX_SECONDS: Final = 7200
KEPT_SECONDS: Final = 600
"""How long the events of a run that has ended are kept."""
RETRY_SECONDS: Final = 5


class Written(Protocol):
    """A response that is being written."""

    def written(self, answer: Answer) -> AsyncIterator[bytes]:
        """Yields all events, the last one that of any failure."""

    async def broken_off(self, error: ApiError | None) -> bytes:
        """The last event of a response that took too long, or, without an error, was cancelled."""

    def now(self) -> Mapping[str, Any]:
        """The response so far."""


class BackgroundRun:
    """One response, unfinished or ended."""

    def __init__(self, runs: "BackgroundRuns", place: tuple[str, str], written: Written, answer: Answer) -> None:
        self._runs = runs
        self._place = place
        self._written: Written | None = written
        self._answer: Answer | None = answer
        """Both are None at the end, which frees the prompt."""
        self._response: Mapping[str, Any] = {}
        self._events: list[bytes] = []
        self._num_forgotten = 0
        self.num_bytes = 0
        self._grown = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_cancelled = False
        self.has_ended = False

    @property
    def response(self) -> Mapping[str, Any]:
        return self._response if self._written is None else self._written.now()

    @property
    def progress(self) -> str:
        return "ended" if self._answer is None else self._answer.progress

    async def wait(self) -> None:
        """Returns at the next event, or at the end."""
        await self._grown.wait()

    async def cancel(self) -> None:
        """Ends the run; returns when it has ended."""
        assert self._task is not None, "a run is found once it is made"
        if not self.has_ended:
            self._is_cancelled = True
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def events(self, number: int = 0) -> AsyncIterator[bytes]:
        """Yields the events from `number` on, future ones included; raises ApiError (400) for dropped ones."""
        while True:
            while number < self._num_forgotten + len(self._events):
                if number < self._num_forgotten:
                    why = f"the first {self._num_forgotten} events are not kept any more"
                    raise wrong("starting_after", f"{why}; leave stream out to get the response")
                yield self._events[number - self._num_forgotten]
                number += 1
            if self.has_ended:
                return
            await self.wait()

    def forget(self) -> None:
        """Keeps the response and its events no longer."""
        self._runs.forget(*self._place)

    def forget_half(self) -> int:
        """Forgets the earlier half of the events; returns how many bytes these had."""
        num_gone = (len(self._events) + 1) // 2
        num_bytes = sum(map(len, self._events[:num_gone]))
        del self._events[:num_gone]
        self._num_forgotten += num_gone
        self.num_bytes -= num_bytes
        return num_bytes

    async def make(self, held: ExitStack) -> None:
        """Writes the response to its end, and closes `held`."""
        assert self._written is not None and self._answer is not None, "a run is made once"
        self._task = asyncio.current_task()
        try:
            with held:
                error = await self._write(self._written, self._answer)
            if error is not None or self._is_cancelled:
                self._add(await self._written.broken_off(error))
        finally:
            self._response, self._written, self._answer = self._written.now(), None, None
            self.has_ended = True
            self._wake()
            asyncio.get_running_loop().call_later(KEPT_SECONDS, self.forget)

    async def _write(self, written: Written, answer: Answer) -> ApiError | None:
        """Why a response was broken off, unless by a cancel."""
        try:
            async with asyncio.timeout(MAX_SECONDS):
                async for event in written.written(answer):
                    self._add(event)
        except TimeoutError:
            return ApiError(Code.REQUEST_TIMEOUT, f"a response in the background may take {MAX_SECONDS} s")
        except asyncio.CancelledError:
            if not self._is_cancelled:
                raise
        return None

    def _add(self, event: bytes) -> None:
        self._events.append(event)
        self.num_bytes += len(event)
        self._runs.note_bytes(len(event))
        self._wake()

    def _wake(self) -> None:
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()


class BackgroundRuns:
    """All runs, the oldest first, by namespace and id of the response."""

    def __init__(self, config: ServerConfig) -> None:
        self._runs: dict[tuple[str, str], BackgroundRun] = {}
        self._num_bytes = 0

    def find(self, namespace: str, name: str) -> BackgroundRun | None:
        """A run that is kept."""
        return self._runs.get((namespace, name))

    def add(self, written: Written, answer: Answer) -> BackgroundRun:
        """A new run, to be made; raises ApiError (429), which refuses the answer."""
        request = answer.runs[0].request
        running = [space for (space, _), run in self._runs.items() if not run.has_ended]
        if running.count(request.namespace) >= MAX_RUNNING or len(running) >= MAX_RUNS:
            answer.is_refused = True
            why = f"{len(running)} responses are made in the background; wait for one, or cancel one"
            raise retry_later(Code.QUEUE_FULL, why, RETRY_SECONDS)
        if len(self._runs) >= MAX_RUNS:
            self.forget(*next(place for place, run in self._runs.items() if run.has_ended))
        place = request.namespace, request.request_id
        run = self._runs[place] = BackgroundRun(self, place, written, answer)
        return run

    def forget(self, namespace: str, name: str) -> None:
        """Forgets a run and its events."""
        run = self._runs.pop((namespace, name), None)
        self._num_bytes -= 0 if run is None else run.num_bytes

    def note_bytes(self, num_bytes: int) -> None:
        """Counts a new event, and forgets old ones."""
        self._num_bytes += num_bytes
        for run in list(self._runs.values()) if self._num_bytes > MAX_EVENT_BYTES else ():
            while self._num_bytes > MAX_EVENT_BYTES and run.num_bytes:
                self._num_bytes -= run.forget_half()
