"""The engine with a disk below its cache: what is written when, and who waits for what is read."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cache.disk.tier import DiskTier
from cache.lease import Tier
from cache.views import CacheView
from server.engine import engine as engine_module
from server.engine.commands import describe_cache
from server.engine.engine import Engine, EngineConfig
from server.engine.request import Event, Finished, GenerationRequest, Started
from tests.support.disk_driver import open_tier
from tests.support.engine_driver import Harness, make_worker
from tests.support.fake_runner import EOS, FakeRunner, reference

pytestmark = pytest.mark.usefixtures("overlaps", "short_prompts")
PROMPT = [*range(1, 48)]


def save_and_forget(harness: Harness) -> None:
    """Writes everything, then lets memory forget it."""
    for _ in harness.prefix_cache.save():
        pass
    assert harness.prefix_cache.memory.disk is not None
    assert harness.prefix_cache.memory.disk.tier.flush(120)
    harness.prefix_cache.pager.page_out(harness.prefix_cache.slots[0], 0)
    harness.prefix_cache.memory.evict(0, ())
    assert harness.prefix_cache.stats().num_nodes == 0


@pytest.mark.parametrize("layout", ["T", "WR"])
def test_a_request_goes_on_from_disk(layout: str, tier: DiskTier) -> None:
    harness = Harness(layout, num_slots=1, disk=tier)
    first = harness.submit(PROMPT)
    harness.run()
    save_and_forget(harness)
    longer = [*PROMPT, *first.tokens, 5]
    second = harness.submit(longer)
    harness.run()
    assert second.started.tier is Tier.DISK
    assert second.tokens == [token for token in reference(longer, 8) if token != EOS]


class SlowRead:
    """What is read ahead, until the test says that it is there."""

    is_done = False
    is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


def read_slowly(harness: Harness, monkeypatch: pytest.MonkeyPatch, read: SlowRead) -> None:
    """Makes the next prompts submitted wait for `read`."""
    monkeypatch.setattr(harness.prefix_cache, "prefetch", lambda lookup: read)


def test_others_go_on_while_state_is_being_read(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    harness, slow = Harness(num_slots=3, disk=tier), SlowRead()
    running = harness.submit([7, 7, 7], max_tokens=60, ignore_eos=True)
    harness.step(3)
    with monkeypatch.context() as patch:
        read_slowly(harness, patch, slow)
        waiting = harness.submit(PROMPT)
    other = harness.submit([8, 8, 8], max_tokens=4, ignore_eos=True)
    harness.run(other)
    assert not waiting.events
    slow.is_done = True
    harness.run(waiting)
    assert not running.is_over, "it did not wait for the device to be free"
    assert slow.is_cancelled, "what was read ahead is let go of once the request has begun"


def test_a_cancelled_request_lets_go_of_what_is_read_ahead(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    harness, slow = Harness(disk=tier), SlowRead()
    read_slowly(harness, monkeypatch, slow)
    harness.submit(PROMPT, request_id="gone")
    harness.worker.cancel("gone")
    assert slow.is_cancelled


def test_an_idle_engine_writes_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "QUIET_SECONDS", 0.02)
    engine = engine_on(tmp_path)
    answer(engine, 1)
    wait_for(lambda: engine.stats().cache.disk_bytes > 0)
    answer(engine, 2)
    engine.stop()


def test_who_looks_at_the_cache_all_the_time_does_not_keep_it_off_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "QUIET_SECONDS", 0.5)
    engine = engine_on(tmp_path)
    answer(engine, 1)

    async def look() -> int:
        view: CacheView = await engine.execute(describe_cache, "", 0)
        await asyncio.sleep(0.02)
        return view.state.disk

    wait_for(lambda: asyncio.run(look()) > 0)
    engine.stop()


def test_an_unloaded_model_keeps_no_state_in_memory_that_a_disk_has(tmp_path: Path) -> None:
    on_disk = engine_on(tmp_path)
    in_memory = Engine(lambda: make_worker(FakeRunner("WR")), EngineConfig(max_slots=2, context_tokens=200))
    in_memory.start()
    for engine in (on_disk, in_memory):
        answer(engine, 1)
    kept = in_memory.park()
    assert kept is not None and kept.num_bytes > 0
    assert on_disk.park() is None


def engine_on(folder: Path) -> Engine:
    """Returns a started engine that keeps state in a folder."""

    engine = Engine(
        lambda: make_worker(FakeRunner("WR"), disk=open_tier(folder)),
        EngineConfig(max_slots=2, context_tokens=200, disk_folder=folder),
    )
    engine.start()
    return engine


def answer(engine: Engine, number: int) -> Started:
    """Runs one request to its end and returns how it began."""

    async def collect() -> list[Event]:
        tokens = np.array([*PROMPT, number], np.int32)
        generation = engine.submit(GenerationRequest(f"r{number}", tokens, 4, ignore_eos=True))
        return [event async for event in generation]

    events = asyncio.run(asyncio.wait_for(collect(), 120))
    assert isinstance(events[-1], Finished)
    return next(event for event in events if isinstance(event, Started))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)
