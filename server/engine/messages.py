"""What passes between event loop and worker thread.

Messages that wait are bounded in number, and each is handled in order or, once the inbox is closed, refused. A
`Generation` iterates over the events of one request. For a slow reader `MAX_PENDING` events wait, then one piece of
text that grows: no event is lost, and no other request waits.
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

from server.engine.embeddings import EmbeddingJob
from server.engine.request import (
    Delta,
    EngineStopped,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    Progress,
    QueueFull,
    StepFailed,
)
from server.engine.scheduler import QueuePace
from server.engine.worker import Worker

logger = logging.getLogger(__name__)


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


MAX_COMMANDS = 64
"""Commands that may wait for the end of a step."""
COMMAND_RETRY_SECONDS = 2
"""No command takes longer than a step."""

Result = TypeVar("Result")
Command: TypeAlias = Callable[[Worker], Result]
"""Called between two steps. It may take a fraction of a step's time: every live row waits."""


@dataclass(frozen=True, eq=False)
class WorkerMessage:
    """Both parts run on the worker thread."""

    handle: Callable[[Worker], None]
    refuse: Callable[[EngineStopped], object] = lambda _: None
    """Answers in place of a worker that has ended."""


class Inbox:
    """A queue that the worker thread reads and any thread writes."""

    def __init__(self, *, max_slots: int, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_waiting` requests may wait beyond `max_slots`. `clock` counts seconds."""
        self._max_slots = max_slots
        self._max_waiting = max_waiting
        self._clock = clock
        self._pace = QueuePace()
        self._messages: queue.SimpleQueue[WorkerMessage | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_open = False
        """A message put in under the lock while this is true is answered."""
        self.num_open = 0
        """Unfinished requests."""
        self._num_commands = 0
        self._idle = threading.Event()
        self._idle.set()

    # -- any thread

    def put_request(self, request: GenerationRequest, generation: Generation) -> None:
        """Queues a request. Raises EngineStopped, and QueueFull except for idle work, which is not counted."""
        message = WorkerMessage(partial(_submit, request, generation), lambda error: generation.post([Failed(error)]))
        with self._lock:
            if request.is_idle_work:
                self._require_open()
            else:
                self._count_one_more()
                generation.on_end = self._request_ended
            self._messages.put(message)

    def put_embedding(self, job: EmbeddingJob) -> None:
        """Raises EngineStopped and QueueFull."""
        with self._lock:
            self._count_one_more()
            self._messages.put(WorkerMessage(lambda worker: worker.embed(job), job.settle))
        job.vectors.add_done_callback(lambda _: self._request_ended())

    def put_cancel(self, request_id: str) -> None:
        """A cancel that comes too late has no effect."""
        self._messages.put(WorkerMessage(lambda worker: worker.cancel(request_id)))

    def put_command(self, command: Command[Result]) -> Future[Result]:
        """The future of a command's result. Raises QueueFull and EngineStopped."""
        future: Future[Result] = Future()

        def handle(worker: Worker) -> None:
            with self._lock:
                self._num_commands -= 1
            _run(command, future, worker)

        with self._lock:
            self._require_open()
            if self._num_commands >= MAX_COMMANDS:
                raise QueueFull(self._num_commands, COMMAND_RETRY_SECONDS)
            self._num_commands += 1
            self._messages.put(WorkerMessage(handle, partial(_refuse_command, future)))
        return future

    def put_end(self) -> None:
        """Stops the reader after the messages already queued."""
        self._messages.put(None)

    def wait_until_idle(self, timeout_seconds: float) -> bool:
        """Whether all requests ended in time."""
        return self._idle.wait(timeout_seconds)

    def _require_open(self) -> None:
        if not self._is_open:
            raise EngineStopped("the engine is not running")

    def _count_one_more(self) -> None:
        self._require_open()
        num_waiting = self.num_open - self._max_slots
        if num_waiting >= self._max_waiting:
            raise QueueFull(num_waiting, self._pace.retry_after_seconds(num_waiting, self._clock()))
        self.num_open += 1
        self._note_waiting()
        self._idle.clear()

    def _request_ended(self) -> None:
        with self._lock:
            self._pace.end(self._clock())
            self.num_open -= 1
            self._note_waiting()
            if self.num_open == 0:
                self._idle.set()

    def _note_waiting(self) -> None:
        self._pace.change(self._clock(), has_waiting=self.num_open > self._max_slots)

    # -- worker thread

    def open(self) -> None:
        """Begins to take messages."""
        self._is_open = True

    def get(self, timeout_seconds: float | None = None) -> WorkerMessage | None:
        """Returns None for the end. Raises queue.Empty after the time."""
        return self._messages.get(timeout=timeout_seconds)

    def close(self) -> None:
        """Refuses the messages left, and later ones."""
        with self._lock:
            self._is_open = False
        error = EngineStopped("the server is shutting down")
        with contextlib.suppress(queue.Empty):
            while True:
                message = self._messages.get_nowait()
                if message is not None:
                    message.refuse(error)


def _submit(request: GenerationRequest, generation: Generation, worker: Worker) -> None:
    """A bug of ours in `submit` fails this request."""
    try:
        worker.submit(request, generation)
    except Exception as error:  # the engine goes on with the next request
        logger.exception("the engine could not take request %s", request.request_id)
        reported = StepFailed(f"the server failed: {error}")
        worker.fail(request.request_id, reported)
        if not generation.is_over:
            generation.post([Failed(reported)])


def _run(command: Command[Result], future: Future[Result], worker: Worker) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = command(worker)
    except Exception as error:  # the caller gets it; it concerns nobody else
        future.set_exception(error)
    else:
        future.set_result(result)


def _refuse_command(future: Future[Result], error: EngineStopped) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
