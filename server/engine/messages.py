"""What passes between event loop and worker thread.

Messages that wait are bounded in number, and each is handled in order or, once the inbox is closed, refused. A
`Generation` iterates over the events of one request. A reader with more than `MAX_PENDING` events unread gets text in
one piece: none of it is lost, and no other request waits.
"""

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, TypeVar

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
)
from server.engine.scheduler import QueuePace
from server.engine.worker import Worker


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
        for _ in range(len(self._posted)):
            self._posted.popleft()()


MAX_PENDING = 64
"""Events that a slow reader gets one by one."""


class Generation:
    """Events of one request. Used on the event loop; fed from the worker thread by `post`."""

    def __init__(self, request_id: str, cancel: Callable[[str], None], mailbox: Mailbox) -> None:
        """`mailbox` belongs to the reader's event loop."""
        self.request_id = request_id
        self.on_end: Callable[[], None] = lambda: None
        """Called on the worker thread before the last event is handed over."""
        self._cancel = cancel
        self._mailbox = mailbox
        self._pending: deque[Event] = deque()
        self._arrived = asyncio.Event()

    @property
    def is_behind(self) -> bool:
        """So much is unread that text is joined. For any thread."""
        return len(self._pending) > MAX_PENDING

    def post(self, events: list[Event]) -> None:
        """Worker thread only."""
        if any(isinstance(event, Finished | Failed) for event in events):
            self.on_end()
        if not self._mailbox.post(partial(self._put, events)):
            self.cancel()

    def cancel(self) -> None:
        """Ends the request at the next step; its progress stays cached. For any thread."""
        self._cancel(self.request_id)

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


MAX_COMMANDS = 64
"""Commands that may wait."""
COMMAND_RETRY_SECONDS = 2
"""No command takes longer than a step."""

Result = TypeVar("Result")


class WorkerMessage(NamedTuple):
    """Both parts run on the worker thread."""

    handle: Callable[[Worker], None]
    refuse: Callable[[EngineStopped], object] = lambda _: None
    """Answers in place of a worker that has ended."""


class Inbox:
    """A queue that the worker thread reads and any thread writes."""

    def __init__(self, *, max_slots: int, max_waiting: int) -> None:
        """`max_waiting` requests may wait beyond `max_slots`."""
        self._max_slots, self._max_waiting = max_slots, max_waiting
        self._pace = QueuePace()
        self._messages: queue.SimpleQueue[WorkerMessage | None] = queue.SimpleQueue()
        self._lock = threading.Condition()
        self.is_open = False
        """A message put in under the lock while this is true is answered."""
        self.num_open = 0
        """Unfinished requests."""
        self._num_commands = 0

    # -- any thread

    def put_request(self, request: GenerationRequest, generation: Generation) -> None:
        """Queues a request. Raises EngineStopped, and QueueFull except for idle work, which is not counted."""
        message = WorkerMessage(
            lambda worker: worker.submit(request, generation), lambda error: generation.post([Failed(error)])
        )
        if request.is_idle_work:
            self._put(message)
        else:
            generation.on_end = self._request_ended
            self._put(message, self._count_one_more)

    def put_embedding(self, job: EmbeddingJob) -> None:
        """Raises EngineStopped and QueueFull."""
        self._put(WorkerMessage(lambda worker: worker.embed(job), job.settle), self._count_one_more)
        job.vectors.add_done_callback(lambda _: self._request_ended())

    def put_cancel(self, request_id: str) -> None:
        """A cancel that comes too late has no effect."""
        self._messages.put(WorkerMessage(lambda worker: worker.cancel(request_id)))

    def put_command(self, command: Callable[[Worker], Result]) -> Future[Result]:
        """The future of a command's result. Raises QueueFull and EngineStopped."""
        future: Future[Result] = Future()

        def run(worker: Worker) -> None:
            with self._lock:
                self._num_commands -= 1
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(command(worker))
                except Exception as error:  # the caller gets it; it concerns nobody else
                    future.set_exception(error)

        def refuse(error: EngineStopped) -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

        self._put(WorkerMessage(run, refuse), self._count_one_more_command)
        return future

    def put_end(self) -> None:
        """Stops the reader after the messages already queued."""
        self._messages.put(None)

    def wait_until_idle(self, timeout_seconds: float) -> bool:
        """Whether all requests ended in time."""
        with self._lock:
            return self._lock.wait_for(lambda: self.num_open == 0, timeout_seconds)

    def _put(self, message: WorkerMessage, admit: Callable[[], None] = lambda: None) -> None:
        with self._lock:
            if not self.is_open:
                raise EngineStopped("the engine is not running")
            admit()
            self._messages.put(message)

    def _count_one_more_command(self) -> None:
        if self._num_commands >= MAX_COMMANDS:
            raise QueueFull(self._num_commands, COMMAND_RETRY_SECONDS)
        self._num_commands += 1

    def _count_one_more(self) -> None:
        num_waiting = self.num_open - self._max_slots
        if num_waiting >= self._max_waiting:
            raise QueueFull(num_waiting, self._pace.retry_after_seconds(num_waiting, time.monotonic()))
        self.num_open += 1
        self._note_waiting()

    def _request_ended(self) -> None:
        with self._lock:
            self._pace.end(time.monotonic())
            self.num_open -= 1
            self._note_waiting()
            self._lock.notify_all()

    def _note_waiting(self) -> None:
        self._pace.change(time.monotonic(), has_waiting=self.num_open > self._max_slots)

    # -- worker thread

    def get(self, timeout_seconds: float | None = None) -> WorkerMessage | None:
        """Returns None for the end. Raises queue.Empty after the time."""
        return self._messages.get(timeout=timeout_seconds)

    def close(self) -> None:
        """Refuses the messages left, and later ones."""
        with self._lock:
            self.is_open = False
        while not self._messages.empty():
            if (message := self._messages.get_nowait()) is not None:
                message.refuse(EngineStopped("the server is shutting down"))
