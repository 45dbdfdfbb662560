"""Messages to the worker thread: requests, cancels and commands, handled in the order of their arrival.

Waiting requests and commands are bounded in number. Every message is answered: handled by the worker, or refused when
the inbox is closed.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from server.engine.command import Command
from server.engine.embeddings import EmbeddingJob
from server.engine.generation import Generation
from server.engine.request import EngineStopped, Event, Failed, Finished, GenerationRequest, QueueFull, StepFailed
from server.engine.scheduler import QueuePace
from server.engine.worker import Worker

logger = logging.getLogger(__name__)

MAX_COMMANDS = 64
"""Commands that may wait for the end of a step."""
COMMAND_RETRY_SECONDS = 2
"""Seconds after which a refused command may be retried; no command takes longer than a step."""

Result = TypeVar("Result")


class WorkerMessage(Protocol):
    """Something for the worker."""

    def handle(self, worker: Worker) -> None:
        """Handles the message on the worker thread."""

    def refuse(self, error: EngineStopped) -> None:
        """Answers the message in place of a worker that has ended."""


class Inbox:
    """A queue with one reader, the worker thread, and writers on any thread."""

    def __init__(self, *, max_slots: int, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_waiting` requests may be unfinished beyond the `max_slots` that run. `clock` counts seconds."""
        self._max_slots = max_slots
        self._max_waiting = max_waiting
        self._clock = clock
        self._pace = QueuePace()
        self._messages: queue.SimpleQueue[WorkerMessage | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_open = False
        """Whether messages are read. A message put in under the lock while this is true gets an answer."""
        self.num_open = 0
        """Requests put in that have not ended."""
        self._num_commands = 0
        self._idle = threading.Event()
        self._idle.set()

    # -- any thread

    def put_request(self, request: GenerationRequest, generation: Generation) -> None:
        """Queues a request. Raises EngineStopped; also QueueFull, except for idle work, which is not counted."""
        if request.is_idle_work:
            self._put(SubmitMessage(request, CountingSink(generation, lambda: None)))
            return
        with self._lock:
            self._count_one_more()
            self._messages.put(SubmitMessage(request, CountingSink(generation, self._request_ended)))

    def put_embedding(self, job: EmbeddingJob) -> None:
        """Queues texts to embed. Raises QueueFull, as for a request, and EngineStopped."""
        with self._lock:
            self._count_one_more()
            self._messages.put(EmbeddingMessage(job))
        job.vectors.add_done_callback(lambda _: self._request_ended())

    def put_cancel(self, request_id: str) -> None:
        """Queues a cancel; one that comes too late has no effect."""
        self._messages.put(CancelMessage(request_id))

    def put_command(self, command: Command[Worker, Result]) -> Future[Result]:
        """Queues a command and returns the future of its result. Raises QueueFull and EngineStopped."""
        future: Future[Result] = Future()
        with self._lock:
            self._require_open()
            if self._num_commands >= MAX_COMMANDS:
                raise QueueFull(self._num_commands, COMMAND_RETRY_SECONDS)
            self._num_commands += 1
            self._messages.put(CommandMessage(command, future, self._command_taken))
        return future

    def put_end(self) -> None:
        """Tells the reader to stop after the messages already queued."""
        self._messages.put(None)

    def wait_until_idle(self, timeout_seconds: float) -> bool:
        """Waits until no request is unfinished; False if some still were after the time."""
        return self._idle.wait(timeout_seconds)

    def _put(self, message: WorkerMessage) -> None:
        with self._lock:
            self._require_open()
            self._messages.put(message)

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

    def _command_taken(self) -> None:
        with self._lock:
            self._num_commands -= 1

    # -- worker thread

    def open(self) -> None:
        """Begins to take messages."""
        self._is_open = True

    def get(self, timeout_seconds: float | None = None) -> WorkerMessage | None:
        """Returns the next message, None for the end. Raises queue.Empty after the time."""
        return self._messages.get(timeout=timeout_seconds)

    def get_nowait(self) -> WorkerMessage | None:
        """Like `get`, without waiting."""
        return self._messages.get_nowait()

    def close(self) -> None:
        """Takes no more messages and refuses those left, so no sender waits for ever."""
        with self._lock:
            self._is_open = False
        error = EngineStopped("the server is shutting down")
        with contextlib.suppress(queue.Empty):
            while True:
                message = self._messages.get_nowait()
                if message is not None:
                    message.refuse(error)


class CountingSink:
    """Passes events on and calls `on_end` with the last one."""

    def __init__(self, generation: Generation, on_end: Callable[[], None]) -> None:
        self._generation = generation
        self._on_end = on_end
        self.is_over = False

    @property
    def is_behind(self) -> bool:
        """Whether the reader has left much unread."""
        return self._generation.is_behind

    def post(self, events: list[Event]) -> None:
        """Hands events over, in order."""
        if any(isinstance(event, Finished | Failed) for event in events):
            self.is_over = True
            self._on_end()
        self._generation.post(events)


@dataclass(frozen=True, eq=False)
class SubmitMessage:
    """A request, and where its events go."""

    request: GenerationRequest
    sink: CountingSink

    def handle(self, worker: Worker) -> None:
        """Submits the request. A bug of ours there fails every request, this one included."""
        try:
            worker.submit(self.request, self.sink)
        except Exception as error:  # the engine goes on with the next request
            logger.exception("the engine could not take request %s", self.request.request_id)
            reported = StepFailed(f"the server failed: {error}")
            worker.fail_all(reported)
            if not self.sink.is_over:
                self.sink.post([Failed(reported)])

    def refuse(self, error: EngineStopped) -> None:
        """Fails the request."""
        self.sink.post([Failed(error)])


@dataclass(frozen=True, eq=False)
class EmbeddingMessage:
    """Texts to make vectors of."""

    job: EmbeddingJob

    def handle(self, worker: Worker) -> None:
        """Queues them."""
        worker.embed(self.job)

    def refuse(self, error: EngineStopped) -> None:
        """Fails the request."""
        self.job.settle(error)


@dataclass(frozen=True)
class CancelMessage:
    """The end of one request."""

    request_id: str

    def handle(self, worker: Worker) -> None:
        """Cancels it."""
        worker.cancel(self.request_id)

    def refuse(self, error: EngineStopped) -> None:
        """The request has ended with the worker."""


@dataclass(frozen=True, eq=False)
class CommandMessage(Generic[Result]):
    """A command, and where its outcome is awaited."""

    command: Command[Worker, Result]
    future: Future[Result]
    on_taken: Callable[[], None]

    def handle(self, worker: Worker) -> None:
        """Runs it, unless its caller has given up."""
        self.on_taken()
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.command.run(worker)
        except Exception as error:  # the caller gets it; it concerns nobody else
            self.future.set_exception(error)
        else:
            self.future.set_result(result)

    def refuse(self, error: EngineStopped) -> None:
        """Fails the command."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)
