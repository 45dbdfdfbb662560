"""The engine's thread and its doors: submit, cancel, drain, stop, over the fake model."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from cache.slots import Slot
from cache.snapshots import RestorePoint, RestorePointKind
from models.formats import Pooling
from models.inference.sampling_params import SamplingParams
from server.engine import sequence
from server.engine.engine import Engine, EngineConfig
from server.engine.messages import Generation
from server.engine.request import (
    EngineStopped,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    QueueFull,
    RequestCounts,
)
from server.engine.worker import Worker
from tests.support.awaited import awaited
from tests.support.engine_driver import Harness, make_worker
from tests.support.fake_runner import FakeRunner
from tests.support.oracle import Oracle


class GatedRunner(FakeRunner):
    """A fake runner whose steps wait while its gate is closed."""

    def __init__(self) -> None:
        super().__init__("T")
        self.gate = threading.Event()
        self.gate.set()
        self._is_at_gate = threading.Event()

    async def reaches_gate(self) -> None:
        """Returns once a step waits."""
        assert await asyncio.to_thread(self._is_at_gate.wait, 120)

    def prepare(self, rows, previous, **how):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN003, ANN201
        """Waits for the gate, then decodes."""
        if not self.gate.is_set():
            self._is_at_gate.set()
        assert self.gate.wait(120)
        return super().prepare(rows, previous, **how)


class Served:
    """A started engine over a gated fake model."""

    def __init__(self, speculation: Oracle | None = None, **options: Any) -> None:
        self.speculation = speculation
        self.runner = GatedRunner()
        self.threads: set[str] = set()
        self.config = EngineConfig(**{"max_slots": 2, "context_tokens": 200, "max_waiting": 1, **options})
        self.engine = Engine(self._make_worker, self.config)
        self.engine.start()

    def _make_worker(self) -> Worker:
        self.threads.add(threading.current_thread().name)
        return make_worker(self.runner, speculation=self.speculation)


@pytest.fixture
def served():  # type: ignore[no-untyped-def]  # noqa: ANN201
    """A running engine, stopped afterwards."""
    one = Served()
    yield one
    one.runner.gate.set()
    one.engine.stop()


def request(name: str = "r", length: int = 10, max_tokens: int = 5) -> GenerationRequest:
    """Returns a request that generates exactly `max_tokens`."""
    tokens = np.arange(1, length + 1, dtype=np.int32)
    return GenerationRequest(name, tokens, max_tokens, sampling=SamplingParams(temperature=0), ignore_eos=True)


async def collect(generation: Generation) -> list[Event]:
    """Returns all events of a request."""
    return [event async for event in generation]


def test_a_prompts_head_ends_with_the_last_of_its_system_messages() -> None:
    points = tuple(RestorePoint(offset, RestorePointKind.SYSTEM_END) for offset in (5, 9))
    assert replace(request(), restore_points=points).head_tokens == 9
    assert request().head_tokens == 0


@awaited
async def test_a_full_queue_says_so_at_once_and_takes_requests_again_later(served: Served) -> None:
    served.runner.gate.clear()
    running = [served.engine.submit(request(f"r{n}")) for n in range(3)]
    with pytest.raises(QueueFull) as refusal:
        served.engine.submit(request("one too many"))
    assert refusal.value.retry_after_seconds > 0
    served.runner.gate.set()
    await asyncio.gather(*map(collect, running))
    await collect(served.engine.submit(request("now")))


@awaited
async def test_what_nobody_waits_for_takes_no_place_in_the_queue_and_holds_up_no_shutdown(served: Served) -> None:
    served.runner.gate.clear()
    running = [asyncio.ensure_future(collect(served.engine.submit(request(f"r{n}")))) for n in range(2)]
    idle = [replace(request(f"i{n}", max_tokens=0), is_idle_work=True) for n in range(4)]
    ahead = [asyncio.ensure_future(collect(served.engine.submit(one))) for one in idle]
    running.append(asyncio.ensure_future(collect(served.engine.submit(request("r2")))))
    assert served.engine.stats().num_open == 3
    served.runner.gate.set()
    assert await served.engine.drain(120)
    assert all(isinstance(events[-1], Finished) for events in await asyncio.gather(*running, *ahead))


@awaited
async def test_stats_answer_while_the_device_is_busy(served: Served) -> None:
    served.runner.gate.clear()
    generation = served.engine.submit(request())
    await served.runner.reaches_gate()
    # Until the gate opens the device is busy, so an answer that waited for it would never come.
    stats = await asyncio.to_thread(served.engine.stats)
    assert stats.num_open == 1
    served.runner.gate.set()
    await collect(generation)


@awaited
async def test_a_cancelled_request_ends_and_counts_no_longer(served: Served) -> None:
    served.runner.gate.clear()
    generation = served.engine.submit(request(max_tokens=180))
    await served.runner.reaches_gate()
    generation.cancel()
    served.runner.gate.set()
    events = await collect(generation)
    while served.engine.stats().requests != RequestCounts():  # noqa: ASYNC110 - there is nothing to be told by
        await asyncio.sleep(0.005)
    last = events[-1]
    assert isinstance(last, Finished) and last.reason is FinishReason.CANCELLED
    assert last.timings.predicted_tokens < 180


@awaited
async def test_drain_waits_for_running_requests_and_takes_no_more(served: Served) -> None:
    served.runner.gate.clear()
    running = asyncio.ensure_future(collect(served.engine.submit(request())))
    assert not await served.engine.drain(0.05)
    with pytest.raises(EngineStopped):
        served.engine.submit(request("late"))
    served.runner.gate.set()
    assert await served.engine.drain(120)
    assert isinstance((await running)[-1], Finished)


async def begin_to_stop(served: Served) -> asyncio.Future[None]:
    """Returns once an engine whose step waits has been told to stop."""
    await served.runner.reaches_gate()
    stopping = asyncio.ensure_future(asyncio.to_thread(served.engine.stop))
    while served.engine._messages.empty():  # noqa: ASYNC110 - there is nothing to be told by
        await asyncio.sleep(0.001)
    return stopping


@awaited
async def test_stop_tells_running_requests_that_the_engine_is_gone() -> None:
    served = Served()
    served.runner.gate.clear()
    generation = served.engine.submit(request(max_tokens=150))
    stopping = await begin_to_stop(served)
    served.runner.gate.set()
    await stopping
    last = (await collect(generation))[-1]
    assert isinstance(last, Failed) and isinstance(last.error, EngineStopped)
    assert not served.engine.is_running


@awaited
async def test_a_prompt_without_room_is_the_callers_fault(served: Served) -> None:
    for bad in (request(length=200), request(length=0), request(max_tokens=-1)):
        with pytest.raises(ValueError, match="room"):
            served.engine.submit(bad)
    for length in (190, 199):
        events = await collect(served.engine.submit(request(length=length, max_tokens=99)))
        assert events[-1].timings.predicted_tokens == 200 - length  # type: ignore[union-attr]


def test_a_worker_that_cannot_be_made_is_reported_by_start() -> None:
    def broken() -> Worker:
        raise RuntimeError("no device")

    engine = Engine(broken, EngineConfig())
    with pytest.raises(RuntimeError, match="no device"):
        engine.start()
    assert not engine.is_running


@awaited
async def test_a_bug_between_requests_that_comes_again_fails_them_and_the_engine_goes_on(served: Served) -> None:
    def sabotage(worker: Worker) -> None:
        working, left = worker.step, ["first", "second"]

        def broken() -> None:
            if left.pop() == "first":
                worker.step = working  # type: ignore[method-assign]
            raise AssertionError("a bug")

        worker.step = broken  # type: ignore[method-assign, assignment]

    await served.engine.execute(sabotage)
    assert isinstance((await collect(served.engine.submit(request("a"))))[-1], Failed)
    assert isinstance((await collect(served.engine.submit(request("b"))))[-1], Finished)


async def stop_while_asking(served: Served) -> list[Any]:
    """Asks three commands of an engine whose device is busy, stops it, and returns what came of them."""
    served.runner.gate.clear()
    served.engine.submit(request(max_tokens=150))
    stopping = await begin_to_stop(served)
    asked = [asyncio.ensure_future(served.engine.execute(lambda worker: 1)) for _ in range(3)]
    await asyncio.sleep(0)
    served.runner.gate.set()
    await stopping
    return list(await asyncio.gather(*asked, return_exceptions=True))


@awaited
async def test_commands_and_requests_are_handled_in_the_order_of_their_arrival(served: Served) -> None:
    def waiting(worker: Worker) -> int:
        counts = worker.stats().requests
        return counts.waiting + counts.prefilling + counts.decoding

    served.runner.gate.clear()
    served.engine.submit(request("a"))
    before = asyncio.ensure_future(served.engine.execute(waiting))
    await asyncio.sleep(0)
    served.engine.submit(request("b"))
    after = asyncio.ensure_future(served.engine.execute(waiting))
    await asyncio.sleep(0)
    served.runner.gate.set()
    found = [await before, await after]
    assert found in ([1, 2], [0, 1]), "a command overtook a request, or fell behind one"


@awaited
async def test_a_command_that_nobody_waits_for_runs_and_its_error_is_logged(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(worker: Worker) -> None:
        raise LookupError("not there")

    served.engine.execute_later(fail)
    assert await served.engine.execute(lambda worker: 1) == 1
    assert "not there" in caplog.text
    served.engine.stop()
    served.engine.execute_later(fail)  # the engine has ended: nobody is to know


@awaited
async def test_commands_that_wait_are_bounded_and_given_up_ones_do_not_run(served: Served) -> None:
    ran: list[int] = []
    served.runner.gate.clear()
    generation = served.engine.submit(request())
    await served.runner.reaches_gate()
    for number in range(64):  # which count as no commands
        served.engine._cancel(f"nobody {number}")
    asked = [asyncio.ensure_future(served.engine.execute(lambda worker: ran.append(1))) for _ in range(64)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await served.engine.execute(lambda worker: ran.append(1))
    asked[0].cancel()
    await asyncio.sleep(0)
    served.runner.gate.set()
    await asyncio.gather(*asked[1:], collect(generation))
    await served.engine.execute(lambda worker: ran.append(1))
    assert len(ran) == 64, "63 of those that waited, and one more once the queue had a place again"


@awaited
async def test_a_command_that_finds_the_engine_ended_or_ending_is_answered() -> None:
    served = Served()
    assert all(isinstance(outcome, EngineStopped) for outcome in await stop_while_asking(served))
    with pytest.raises(EngineStopped):
        await served.engine.execute(lambda worker: 1)


async def last_events(served: Served, sabotage: Callable[[Any], None]) -> list[Event]:
    """Sabotages the worker and returns how three requests end."""
    await served.engine.execute(sabotage)
    served.runner.gate.clear()
    generations = [served.engine.submit(request(name)) for name in ("a", "b", "c")]
    served.runner.gate.set()
    return [events[-1] for events in await asyncio.gather(*map(collect, generations))]


@awaited
async def test_when_the_thread_dies_everybody_is_told() -> None:
    def sabotage(worker: Any) -> None:
        stats = worker.stats
        worker.stats = lambda: stats() if not worker.has_work else 1 / 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda arguments: None)
        served = Served()
        assert all(isinstance(last, Failed) for last in await last_events(served, sabotage))
        served.engine.stop()  # waits for the thread to be gone
    assert not served.engine.is_running


@awaited
async def test_a_bug_while_a_request_is_taken_costs_nobody_an_answer(served: Served) -> None:
    def sabotage(worker: Any) -> None:
        working = worker.submit

        def submit_once(taken: GenerationRequest, sink: Any) -> None:
            worker.submit = working
            working(taken, sink)
            raise AssertionError("a bug")

        worker.submit = submit_once

    kinds = [type(last) for last in await last_events(served, sabotage)]
    assert kinds == [Finished, Finished, Finished], "it begins anew"
    assert served.engine.stats().num_open == 0


async def ends_of(served: Served, sabotage: Callable[[Worker], object]) -> list[type]:
    """How a long request ends beside which the engine is sabotaged; then another request, and one after both."""
    reading = aiter(served.engine.submit(request("long", max_tokens=60)))
    await anext(reading)
    await served.engine.execute(sabotage)
    struck = await collect(served.engine.submit(request("struck")))
    after = await collect(served.engine.submit(request("after")))
    return [type(event) for event in ([event async for event in reading][-1], struck[-1], after[-1])]


@pytest.mark.parametrize("place", ["decoder", "prefetch", "pins", "begin", "started", "drafting", "shared"])
@awaited
async def test_a_bug_on_the_way_from_the_queue_into_a_slot_fails_one_request(place: str) -> None:
    """Whatever runs for one request only, up to its first chunk."""
    served, slots = Served(speculation=Oracle()), list[Slot]()

    def sabotage(worker: Any) -> None:
        cache = worker.prefix_cache
        slots.extend(cache.slots)
        owner, name = {
            "decoder": (worker, "_make_decoder"),
            "prefetch": (cache, "prefetch"),
            "pins": (cache.pins, "release_expired"),
            "begin": (cache, "begin"),
            "started": (worker, "_post_started"),
            "drafting": (worker._speculation, "begin"),
            "shared": (worker, "_share_prefixes"),
        }[place]
        working, left = (
            getattr(owner, name),
            [1] * (1 if name in ("_make_decoder", "prefetch", "_share_prefixes") else 2),
        )

        def fail(*_: Any, **__: Any) -> Any:
            left.pop()
            if not left:
                object.__setattr__(owner, name, working)
            raise AssertionError("a bug")

        object.__setattr__(owner, name, fail)

    assert await ends_of(served, sabotage) == [Finished, Failed, Finished]
    served.engine.stop()
    assert slots and not any(slot.is_leased for slot in slots)


@awaited
async def test_a_bug_while_a_request_is_cancelled_or_texts_are_taken_ends_nothing(
    served: Served,
) -> None:
    def broken(*_: object) -> None:
        raise AssertionError("a bug")

    def sabotage(worker: Any) -> None:
        worker.cancel = worker._end_idle_work = broken

    generation = served.engine.submit(request("a", max_tokens=100))
    await served.engine.execute(sabotage)
    generation.cancel()
    assert isinstance((await collect(generation))[-1], Finished)
    assert await served.engine.embed([np.array([1], np.int32)], Pooling.MEAN)
    await served.engine.execute(lambda worker: delattr(worker, "_end_idle_work"))
    assert isinstance((await collect(served.engine.submit(request("b"))))[-1], Finished)


@awaited
async def test_a_request_that_cannot_be_ended_keeps_no_other_from_its_end() -> None:
    served, worker = Served(speculation=Oracle()), cast(Any, None)

    left = ["a", "b"]

    def broken() -> None:
        left.pop()
        if not left:
            worker.__dict__.pop("step", None)
        raise AssertionError("a bug")

    def sabotage(given: Any) -> None:
        nonlocal worker
        worker = given
        next(iter(worker._table)).drafting.end = broken
        worker.step = broken

    served.runner.gate.clear()
    readings = [served.engine.submit(request(name, max_tokens=100)) for name in ("a", "b")]
    await served.runner.reaches_gate()  # else both may have ended before the sabotage
    sabotaged = asyncio.ensure_future(served.engine.execute(sabotage))
    await asyncio.sleep(0)
    served.runner.gate.set()
    await sabotaged
    ends = await asyncio.gather(*map(collect, readings))
    assert [type(events[-1]) for events in ends] == [Failed, Failed]
    assert isinstance((await collect(served.engine.submit(request("c"))))[-1], Finished)
    served.engine.stop()


LOST = (
    "[METAL] Command buffer execution failed: Ignored (00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)"
)


@pytest.mark.parametrize(
    ("operation", "num_requests"), [("prefill", 1), ("prepare", 1), ("prepare", 3), ("start", 1), ("start", 3)]
)
def test_a_device_that_takes_no_more_work_ends_the_engine(
    operation: str, num_requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    are_submitted = threading.Event()

    def refuse(*given: Any, **more: Any) -> Any:
        assert are_submitted.wait(120)
        raise RuntimeError(LOST)

    served = Served()
    monkeypatch.setattr(served.runner, operation, refuse)
    was_running_at_end: list[bool] = []
    stop = Worker.stop

    def noted_stop(worker: Worker, *, parks: bool = False) -> None:
        was_running_at_end.append(served.engine.is_running)
        stop(worker, parks=parks)

    monkeypatch.setattr(Worker, "stop", noted_stop)

    async def run() -> None:
        answers = [collect(served.engine.submit(request(f"r{number}"))) for number in range(num_requests)]
        are_submitted.set()
        for events in await asyncio.gather(*answers):
            assert isinstance(events[-1], Failed)

    asyncio.run(run())
    # By itself, and `/health` says so before the device is tried again.
    served.engine._thread.join(120)
    assert not served.engine._thread.is_alive()
    assert was_running_at_end == [False]


TOKENS = np.arange(100, dtype=np.int32)


def test_a_turn_that_is_the_beginning_of_another_does_not_take_its_place() -> None:
    """A prefix that was primed, or a request that was cancelled early, says nothing new of its session."""
    sessions = Harness().worker.state
    sessions.record("", "s", TOKENS)
    sessions.record("", "s", TOKENS[:25].copy())
    assert sessions.last("", "s") is TOKENS and sessions.last("", "another") is None
    longer = np.arange(200, dtype=np.int32)
    sessions.record("", "s", longer)
    assert sessions.last("", "s") is longer


def test_what_sessions_remember_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "MAX_BYTES", 10 * 4600)
    sessions = Harness().worker.state
    for number in range(30):
        sessions.record("", f"{number}", np.full(1000, number, np.int32))
        assert sessions.turn_bytes <= sequence.MAX_BYTES
    assert sessions.last("", "0") is None and sessions.last("", "29") is not None
    for number in range(30):
        sessions.forget("", f"{number}")
    assert sessions.turn_bytes == 0
    sessions.record("", "s", np.full(20_000, 7, np.int32))
    assert (sessions.last("", "s"), sessions.turn_bytes) == (None, 0)


def test_a_turn_that_was_cut_short_keeps_no_longer_array() -> None:
    sessions = Harness().worker.state
    sessions.record("", "s", np.arange(100_000, dtype=np.int32)[:10])
    tokens = sessions.last("", "s")
    assert tokens is not None
    assert tokens.base is None
