"""The engine as the rest of the server sees it: submit a request, iterate over its events.

`Engine` owns the worker thread, and only that thread touches the device, clean-up included. `stats` and `is_running`
never wait for it.
"""

import asyncio
import contextlib
import logging
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cache.budget import Journal, Tell
from cache.disk import model_folders
from cache.disk.folder import DiskStore
from cache.disk.tier import DiskTier
from cache.history import SALT_BYTES
from cache.layers.layout import CHUNK_TOKENS, Layout, StoredForm
from cache.layers.state import count_by_size
from cache.prefix_cache import PrefixCache
from models.adapter import NO_ADAPTER
from models.errors import InvalidParameter
from models.formats import Reading, Vector
from models.inference.drafters import drafter_of
from models.inference.embedding import Embedder
from models.inference.runner import Runner
from models.loader import LoadedModel
from models.output.detokenizer import StreamDecoder
from models.output.grammar import Grammar
from models.ranks import ONE_RANK, Ranks
from models.vision.features import Encoder
from server.engine.commands import give_back, resize
from server.engine.embeddings import EmbeddingJob
from server.engine.messages import Generation, Mailbox
from server.engine.ranks import FollowingRank, LeadingRank, message_of
from server.engine.request import (
    DeviceLost,
    DraftSource,
    EngineError,
    EngineStats,
    EngineStopped,
    EngineStuck,
    Failed,
    GenerationRequest,
    QueueFull,
    RankLost,
    TokenArray,
)
from server.engine.scheduler import QueuePace
from server.engine.sequence import EngineState
from server.engine.speculation import Speculation
from server.engine.worker import Worker

logger = logging.getLogger(__name__)


CALIBRATION_TOKENS = 8
EXPECTED_TOKENS = 512
"""Output that live buffers are sized for."""
MAX_IN_FLIGHT_BYTES = 1 << 30
QUIET_SECONDS = 30.0
"""Seconds without requests before idle state is written to disk."""
IDLE_PAUSE_SECONDS = 0.005

MAX_COMMANDS = 64
COMMAND_RETRY_SECONDS = 2
"""No command takes longer than a step."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class EngineConfig:
    """Limits of an engine."""

    max_slots: int = 8
    budget_bytes: int = 4 << 30
    """For the state of past tokens, live and stored."""
    context_tokens: int = 4096
    """Prompt and output together."""
    token_operations: float = 1.0
    """Floating-point operations of a prompt token, about."""
    chunk_tokens: int = CHUNK_TOKENS
    """Prompt tokens evaluated between two decode steps."""
    max_waiting: int = 64
    """Requests that may wait beyond those that run."""
    shares_heads: bool = True
    """Running sequences hold a beginning in common once."""
    rounds_stored: bool = False
    """Stored state in 8 bits, where the model allows it."""
    speculates: bool = True
    disk_folder: Path | None = None
    disk_bytes: int = 0
    disk_write_bytes_per_day: int | None = None


class _Message(NamedTuple):
    """Both parts run on the worker thread."""

    handle: Callable[[Worker], object]
    """Returns False where it did nothing."""
    refuse: Callable[[EngineStopped], object] = lambda _: None
    """Answers in place of a worker that has ended."""
    told: list[Any] | None = None
    """What other machines are to handle: see `message_of`."""


class Engine:
    """One model being served. `submit`, `embed`, `execute`, `watch` belong to the event loop, others to any thread.

    Messages to the worker are bounded in number, and each is handled in order or, once the worker has ended, refused.
    """

    pulse = 0
    """Counts up as the worker begins and ends a wait for messages: odd while it works. Any thread may read it."""
    start_seconds = 0.0
    """What no step takes, by the start: the trial, which may compile kernels, and two chunks."""
    stuck_seconds: float | None = None
    """How long one step has lasted, where that is a hang. Whoever sets it then calls `fail_waiting`."""
    num_stuck = 0
    _leader: LeadingRank | None = None
    lost: str | None = None
    """Why the process must end: another machine that holds the model is lost. For any thread, as `stuck_seconds`."""

    def __init__(
        self, make_worker: Callable[[], Worker], config: EngineConfig, leader: LeadingRank | None = None
    ) -> None:
        """`make_worker` runs on the worker thread, which owns all that is made on the device."""
        self._make_worker, self._config, self._leader = make_worker, config, leader
        self._parks = False
        self._kept: EngineState | None = None
        self._messages: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        """None ends the worker."""
        self._lock = threading.Condition()
        self._is_open = False
        """A message put in under the lock while this is true is answered."""
        self._pace = QueuePace()
        self._num_open = self._num_commands = 0
        """Unfinished requests; waiting commands."""
        self._generations, self._results = weakref.WeakSet[Generation](), set[asyncio.Future[Any]]()
        """What clients wait for. Event loop only."""
        self._mailbox: Mailbox | None = None
        self._thread = threading.Thread(target=self._run, name="mlx-serve-engine", daemon=True)
        self._is_accepting = False
        self._idle_work_at: float | None = None
        """None once idle work is done. Worker thread only."""
        self._started: Future[None] = Future()
        self._stats, self._journal = EngineStats(), Journal()

    @classmethod
    def for_model(
        cls,
        loaded: LoadedModel,
        config: EngineConfig,
        kept: EngineState | None = None,
        ranks: Ranks = ONE_RANK,
        leader: LeadingRank | None = None,
    ) -> "Engine":
        """An engine to be started.

        Consumes `kept`, what the last engine left; state of other weights, tokenizer or precision is dropped. With
        several `ranks` a `leader` leads those of the others, which `follow`.
        """
        if kept is not None and kept.fingerprint != _identity(loaded, kept.prefix_cache.layout.form):
            logger.warning("the files of %s have changed: its conversations begin anew", loaded.name)
            kept.prefix_cache.clear()
            kept = None

        return cls(partial(_make_worker, loaded, config, kept, ranks), config, leader)

    # ---------------------------------------------------------------------------------------------- lifecycle

    def follow(self, follower: FollowingRank, compile_grammar: Callable[[Grammar], Any]) -> None:
        """Does on this thread what another machine's engine leads, until that ends. Raises what a step raises."""
        worker = self._make_worker()
        follower.follow(worker, compile_grammar)
        worker.stop()

    @property
    def is_divided(self) -> bool:
        """Other machines hold parts of the model."""
        return self._leader is not None

    @property
    def is_running(self) -> bool:
        return self._is_accepting and self._thread.is_alive()

    def start(self) -> None:
        """Starts the worker and waits until it is ready. Raises any error of its start."""
        self._thread.start()
        self._started.result()
        self._is_accepting = True

    async def drain(self, timeout_seconds: float) -> bool:
        """Takes no more requests; returns whether the running ones ended in time."""
        self._is_accepting = False

        def wait_until_idle() -> bool:
            with self._lock:
                return self._lock.wait_for(lambda: self._num_open == 0, timeout_seconds)

        return await asyncio.to_thread(wait_until_idle)

    def stop(self) -> None:
        """Ends running requests with an error, and then the thread."""
        self.begin_stop()
        if self._thread.is_alive():
            self._thread.join()

    def begin_stop(self) -> None:
        """As `stop`, without waiting."""
        self._is_accepting = False
        self._messages.put(None)

    def park(self) -> EngineState | None:
        """Stops; returns state for the model's next engine, None where the disk has it."""
        self._parks = True
        self.stop()
        kept, self._kept = self._kept, None
        if kept is not None and self._config.disk_folder is not None:
            kept.prefix_cache.clear()
            return None
        return kept

    # ----------------------------------------------------------------------------------------------- requests

    def submit(self, request: GenerationRequest) -> Generation:
        """Queues a request. Raises EngineStopped, EngineStuck, QueueFull, and ValueError for a prompt's length."""
        if not self.is_running:
            raise EngineStopped("the engine is not running")
        left_tokens = self._config.context_tokens - len(request.tokens)
        if left_tokens < 1 or not len(request.tokens) or request.max_tokens < 0:
            raise ValueError(
                f"{len(request.tokens)} prompt tokens leave no room for an answer in {self._config.context_tokens}"
            )
        generation = Generation(partial(self._cancel, request.request_id), self._mailbox_here())
        self._generations.add(generation)
        fitted = replace(request.seeded, max_tokens=min(request.max_tokens, left_tokens))
        message = _Message(
            lambda worker: worker.submit(fitted, generation),
            lambda error: generation.post([Failed(error)]),
            self._told("submit", fitted),
        )
        if request.is_idle_work:  # not counted
            self._put(message)
        else:
            generation.on_end = self._request_ended
            self._put(message, self._count_request)
        return generation

    def _cancel(self, request_id: str) -> None:
        """A cancel that comes too late has no effect. For any thread."""
        self._messages.put(_Message(lambda worker: worker.cancel(request_id), told=self._told("cancel", request_id)))

    def _mailbox_here(self) -> Mailbox:
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = Mailbox(loop)
        return self._mailbox

    async def embed(self, texts: Sequence[TokenArray], reading: Reading, adapter: int = NO_ADAPTER) -> list[Vector]:
        """Vectors of texts that fit the context. A cancel ends the work.

        Raises EngineError, and EmbeddingUnsupported for a model that makes no vectors.
        """
        if not self.is_running:
            raise EngineStopped("the engine is not running")
        job = EmbeddingJob(texts, reading, adapter)
        told = self._told("embed", [*texts], reading, adapter)
        self._put(_Message(lambda worker: worker.embed(job), job.settle, told), self._count_request)
        job.vectors.add_done_callback(lambda _: self._request_ended())
        return await self._result_of(job.vectors)

    def stats(self) -> EngineStats:
        """The counts of the last step."""
        return replace(self._stats, num_open=self._num_open, num_stuck=self.num_stuck)

    def watch(self, tell: Tell | None) -> None:
        """Calls `tell` on the event loop for each event of cached state; None ends that."""
        mailbox = self._mailbox_here()
        self._journal.tell = None if tell is None else lambda event: mailbox.post(partial(tell, event))

    async def execute(self, command: Callable[..., Result], *given: object) -> Result:
        """The result of `command(worker, *given)`, called on the worker thread between two steps; raises its error.

        It may take a fraction of a step's time. Raises QueueFull when too much waits, EngineStopped where the engine
        does not run or ends before, and EngineStuck.
        """
        return await self._result_of(self._queue(command, *given))

    async def _result_of(self, future: "Future[Result]") -> Result:
        result = asyncio.wrap_future(future)
        self._results.add(result)
        try:
            # What other machines do too goes on without its client: here alone it would part them.
            return await (asyncio.shield(result) if self.is_divided else result)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise (self._hindrance or EngineStuck(0.0)) from None
        finally:
            self._results.discard(result)

    def fail_waiting(self) -> None:
        """Gives all who wait for a stuck or lost engine an error, and takes back what they asked for."""
        if (error := self._hindrance) is not None:
            for generation in list(self._generations):
                generation.fail(error)
            for result in list(self._results):
                result.cancel()

    @property
    def _hindrance(self) -> EngineError | None:
        """Why the engine answers nobody for now."""
        if self.lost is not None:
            return RankLost(self.lost)
        return None if self.stuck_seconds is None else EngineStuck(self.stuck_seconds)

    def _lose(self, why: str) -> None:
        self.lost = self.lost or why

    async def try_resize(self, budget_bytes: int) -> int:
        """Changes the budget for state, unless running requests exceed it: returns by how many bytes."""
        own_bytes = max(budget_bytes - _bytes_aside(self._config), budget_bytes // 2)
        return await self.execute(resize, own_bytes)

    def execute_later(self, command: Callable[..., object], *given: object) -> None:
        """As `execute`, without waiting; an error is logged. For any thread."""
        with contextlib.suppress(EngineError):
            self._queue(command, *given).add_done_callback(_log_failure)

    # ------------------------------------------------------------------------------------------ to the worker

    def _queue(self, command: Callable[..., Result], *given: object) -> Future[Result]:
        if self.is_divided and command.__module__ != resize.__module__:
            raise InvalidParameter("model", "it is divided among machines, whose conversations cannot move")
        future: Future[Result] = Future()

        def run(worker: Worker) -> bool:
            with self._lock:
                self._num_commands -= 1
            if is_wanted := future.set_running_or_notify_cancel():
                try:
                    worker.finish_step()
                    future.set_result(command(worker, *given))
                except Exception as error:  # the caller gets it; it concerns nobody else
                    future.set_exception(error)
            return is_wanted

        def refuse(error: EngineStopped) -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

        self._put(_Message(run, refuse, self._told(command.__name__, *given)), self._count_command)
        return future

    def _put(self, message: _Message, admit: Callable[[], None] = lambda: None) -> None:
        if (error := self._hindrance) is not None:
            raise error
        with self._lock:
            if not self._is_open:
                raise EngineStopped("the engine is not running")
            admit()
            self._messages.put(message)

    def _count_command(self) -> None:
        if self._num_commands >= MAX_COMMANDS:
            raise QueueFull(self._num_commands, COMMAND_RETRY_SECONDS)
        self._num_commands += 1

    def _count_request(self) -> None:
        num_waiting = self._num_open - self._config.max_slots
        if num_waiting >= self._config.max_waiting:
            raise QueueFull(num_waiting, self._pace.retry_after_seconds(num_waiting, time.monotonic()))
        self._num_open += 1
        self._note_waiting()

    def _request_ended(self) -> None:
        with self._lock:
            self._pace.end(time.monotonic())
            self._num_open -= 1
            self._note_waiting()
            self._lock.notify_all()

    def _note_waiting(self) -> None:
        self._pace.change(time.monotonic(), has_waiting=self._num_open > self._config.max_slots)

    # ----------------------------------------------------------------------------------------- worker thread

    def _run(self) -> None:
        try:
            begun = time.monotonic()
            worker = self._make_worker()
            self._stats, self._journal = worker.stats(), worker.prefix_cache.journal
            self.start_seconds = max(time.monotonic() - begun, 2 * worker.chunk_seconds)
        except BaseException as error:  # handed to `start`, which raises it where somebody can answer
            self._started.set_exception(error)
            return
        if self._leader is not None:
            self._leader.lose = self._lose  # until now the process ended: a start answers nobody
        self._is_open, self.pulse = True, 1
        self._started.set_result(None)
        try:
            while self._handle_messages(worker):
                self._guard(worker, worker.step if self._leader is None else partial(self._leader.step, worker))
                self._stats = worker.stats()
        except DeviceLost as error:
            # `/health` says so before anything else is tried on the device.
            self._is_accepting = False
            logger.critical("%s: %s", error, error.__cause__)
            if isinstance(error, RankLost):
                self._lose(str(error.__cause__))
        finally:
            try:
                self._end_worker(worker)
            finally:
                self.pulse += 1
                self._is_accepting = False
                self._journal.tell = None
                self._refuse_the_rest()

    def _end_worker(self, worker: Worker) -> None:
        if self.lost is not None:
            return  # other machines would be waited for; the process ends in a moment
        try:
            worker.stop(parks=self._parks)
            if self._parks:
                self._kept = worker.state
        finally:
            if self._leader is not None:
                self._leader.end()

    def _refuse_the_rest(self) -> None:
        with self._lock:
            self._is_open = False
        while not self._messages.empty():
            if (message := self._messages.get_nowait()) is not None:
                message.refuse(EngineStopped("the server is shutting down"))

    def _guard(self, worker: Worker, act: Callable[[], None]) -> None:
        try:
            act()
        except DeviceLost:
            raise
        except Exception as error:  # a bug of ours: every request begins anew, or fails the second time
            logger.exception("the engine failed between requests")
            worker.recover(error)

    def _handle_messages(self, worker: Worker) -> bool:
        """Waits for a message while nothing else is to do; False to stop."""
        while True:
            try:
                message = self._next_message(worker)
            except queue.Empty:
                return True
            if message is None:
                return False
            self._guard(worker, partial(self._handle, worker, message))

    def _handle(self, worker: Worker, message: _Message) -> None:
        is_handled = message.handle(worker) is not False
        if is_handled and self._leader is not None:
            self._leader.note(message.told)

    def _told(self, name: str, *given: object) -> list[Any] | None:
        """A message for other machines, if there are any. What cannot be told concerns its caller alone."""
        return None if self._leader is None else message_of(name, *given)

    def _next_message(self, worker: Worker) -> _Message | None:
        """Returns None for the end. Raises queue.Empty where no message waits and requests have work."""
        if worker.has_work:
            self._idle_work_at = time.monotonic() + QUIET_SECONDS
            return self._receive(0)
        # No step follows the cancel of the last request, nor a command.
        self._stats = worker.stats()
        if self._leader is not None:
            self._leader.pause()
        if self._idle_work_at is None:
            return self._receive()
        try:
            return self._receive(max(0.0, self._idle_work_at - time.monotonic()))
        except queue.Empty:
            return self._work_idly(worker)

    def _work_idly(self, worker: Worker) -> _Message | None:
        """Does idle work until a message comes.

        Commands end no idle work: a client that polls the cache must not keep state off the disk.
        """
        try:
            for _ in worker.prefix_cache.save():
                with contextlib.suppress(queue.Empty):
                    return self._receive(IDLE_PAUSE_SECONDS)
        except Exception:  # a bug of ours; nobody waits for this work
            logger.exception("the engine failed while it was idle")
        give_back()
        self._idle_work_at = None
        self._stats = worker.stats()
        return self._receive()

    def _receive(self, timeout_seconds: float | None = None) -> _Message | None:
        """The only place where the worker waits. Raises queue.Empty."""
        self.pulse += 1
        try:
            return self._messages.get(timeout=timeout_seconds)
        finally:
            self.pulse += 1


def _log_failure(future: "Future[object]") -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None and not isinstance(error, EngineStopped):
        logger.error("a command failed", exc_info=error)


def _in_flight_bytes(config: EngineConfig) -> int:
    return min(MAX_IN_FLIGHT_BYTES, config.budget_bytes // 16)


def _bytes_aside(config: EngineConfig) -> int:
    """Bytes of the budget that are kept for state on its way to or from disk."""
    return 2 * _in_flight_bytes(config) if config.disk_folder is not None else 0


def _identity(loaded: LoadedModel, form: StoredForm) -> str:
    """What state depends on."""
    return loaded.state_fingerprint if form.is_exact else f"{loaded.state_fingerprint} {form}"


def _open_disk(config: EngineConfig, loaded: LoadedModel, form: StoredForm) -> DiskTier | None:
    if config.disk_folder is None:
        return None
    for former in model_folders.find_former(config.disk_folder, loaded.name, loaded.fingerprint):
        text = (
            "%s holds conversations of other files of %s; they are not used, and mlx-serve cache rm %s deletes them"
        )
        logger.warning(text, former, loaded.name, former.name)
    # One folder for each model: state of older library versions is found there, and removed.
    folder = model_folders.place(config.disk_folder, loaded.name, loaded.fingerprint)
    return DiskTier(
        DiskStore(folder, _identity(loaded, form)),
        budget_bytes=config.disk_bytes,
        write_budget_bytes_per_day=config.disk_write_bytes_per_day,
        max_in_flight_bytes=_in_flight_bytes(config),
    )


def _make_worker(loaded: LoadedModel, config: EngineConfig, kept: EngineState | None, ranks: Ranks) -> Worker:
    runner = _make_runner(loaded, config, ranks)
    state = _state_of(runner, config, loaded, kept, ranks)
    token_seconds = _calibrate(runner, state.prefix_cache)
    give_back()  # buffers left by reading the weights and trying the model
    worker = Worker(
        runner,
        state,
        lambda: StreamDecoder(loaded.detokenizer),
        eos_token_ids=loaded.eos_token_ids,
        chunk_tokens=config.chunk_tokens,
        expected_tokens=EXPECTED_TOKENS,
        clock=time.monotonic,
        embedder=Embedder(loaded.model, loaded.adapters),
        speculation=_speculation(runner, state.prefix_cache, loaded),
    )
    if runner.overlaps:
        worker.use_long_chunks()
    worker.token_seconds = token_seconds
    return worker


def _make_runner(loaded: LoadedModel, config: EngineConfig, ranks: Ranks) -> Runner:
    vision = loaded.vision
    runner = Runner(
        loaded.model,
        vocab_size=loaded.vocab_size,
        adapters=loaded.adapters,
        drafter=drafter_of(loaded),
        encoder=None if vision is None else Encoder(vision.tower, config.token_operations),
        vision_inputs=None if vision is None else vision.inputs,
        shares_heads=config.shares_heads,
        rounds_stored=config.rounds_stored,
        drafts=config.speculates,
        ranks=ranks,
    )
    if loaded.no_draft:
        runner.abilities.drafts_form += f"; {loaded.no_draft}"
    return runner


def _state_of(
    runner: Runner, config: EngineConfig, loaded: LoadedModel, kept: EngineState | None, ranks: Ranks
) -> EngineState:
    budget_bytes = config.budget_bytes - _bytes_aside(config)
    if kept is not None and kept.prefix_cache.layout.form == runner.abilities.stored_form:
        kept.prefix_cache.resume(runner.make_caches, budget_bytes)
        return kept
    if kept is not None:
        kept.prefix_cache.clear()
    if ranks.size > 1:
        count_by_size()
    prefix_cache = PrefixCache(
        runner.make_caches,
        num_slots=config.max_slots,
        budget_bytes=budget_bytes,
        layout=Layout(runner.make_caches(), longest_chunk(loaded, config.chunk_tokens), runner.abilities.stored_form),
        disk=_open_disk(config, loaded, runner.abilities.stored_form),
        salt=bytes(ranks.share([*secrets.token_bytes(SALT_BYTES)])),
    )
    return EngineState(prefix_cache, _identity(loaded, runner.abilities.stored_form))


def longest_chunk(loaded: LoadedModel, chunk_tokens: int) -> int:
    """The most tokens of one call: some pictures are evaluated whole."""
    return chunk_tokens if loaded.vision is None else max(chunk_tokens, loaded.vision.whole_tokens)


def _speculation(runner: Runner, prefix_cache: PrefixCache, loaded: LoadedModel) -> Speculation | None:
    if (feeds := runner.abilities.feeds) is None:
        return None
    drafter = DraftSource.MTP if loaded.draft is None else DraftSource.DRAFT
    return Speculation(prefix_cache.history, feeds, feeds_again=prefix_cache.layout.has_recurrent, drafter=drafter)


def _calibrate(runner: Runner, prefix_cache: PrefixCache) -> float:
    """Evaluates a few tokens, to learn the size of their state, and to compile kernels.

    Returns the seconds of a token, evaluated again: one of a longer chunk takes less.
    """
    for _ in range(2):
        caches, begun = runner.make_caches(), time.monotonic()
        runner.prefill(caches, np.ones(CALIBRATION_TOKENS, np.int32))
    prefix_cache.layout.calibrate(caches)
    return (time.monotonic() - begun) / CALIBRATION_TOKENS
