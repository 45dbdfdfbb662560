"""Downloads that clients ask for: shared by all who wait, ended when nobody does."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from models.errors import PullFailed
from models.hub import PlannedFile, PullChecking, PullEvent, PullProgress
from server.app.pulls import Pulls

FILE = PlannedFile("model.safetensors", 100, "ab" * 32)
WAIT_SECONDS = 120.0


class Hub:
    """Fetches in pieces, each when it is let."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.may_go_on = threading.Semaphore(0)
        self.error: Exception | None = None
        self.ended = threading.Event()

    def __call__(self, name: str, tell: Callable[[PullEvent], None]) -> None:
        self.names.append(name)
        try:
            for done in range(0, 101, 10):
                tell(PullProgress(FILE, done, done, 100))
                assert self.may_go_on.acquire(timeout=WAIT_SECONDS)
            if self.error is not None:
                raise self.error
            tell(PullChecking(FILE))
        finally:
            self.ended.set()


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, WAIT_SECONDS))


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - what is waited for happens on another thread
        await asyncio.sleep(0.001)


async def all_of(pulls: Pulls, name: str, found: list[PullEvent] | None = None) -> list[PullEvent]:
    found = [] if found is None else found
    async for event in pulls.steps(name):
        found.append(event)
    return found


def test_two_who_wait_for_one_repository_see_one_download() -> None:
    hub = Hub()

    async def work() -> list[list[PullEvent]]:
        pulls = Pulls(hub)
        begun: list[PullEvent] = []
        first = asyncio.ensure_future(all_of(pulls, "qwen3:0.6b", begun))
        await until(lambda: bool(begun))
        second = asyncio.ensure_future(all_of(pulls, "mlx-community/Qwen3-0.6B-4bit"))
        await asyncio.sleep(0)
        hub.may_go_on.release(20)
        return [await first, await second]

    first, second = run(work())
    assert hub.names == ["qwen3:0.6b"]
    for events in (first, second):
        assert events[0] == PullProgress(FILE, 0, 0, 100)
        assert events[-2:] == [PullProgress(FILE, 100, 100, 100), PullChecking(FILE)]


def test_an_error_reaches_all_and_the_next_one_begins_anew() -> None:
    hub = Hub()
    hub.error = PullFailed("the disk is full")
    hub.may_go_on.release(100)

    async def work() -> None:
        pulls = Pulls(hub)
        waiting = [asyncio.ensure_future(all_of(pulls, "org/a")) for _ in range(2)]
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, PullFailed)
        hub.error = None
        await all_of(pulls, "org/a")

    run(work())
    assert hub.names == ["org/a", "org/a"]


async def begin_and_leave(pulls: Pulls, hub: Hub) -> None:
    task = asyncio.ensure_future(all_of(pulls, "org/a"))
    await until(lambda: bool(hub.names))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    hub.may_go_on.release()


def test_a_download_that_nobody_waits_for_ends() -> None:
    hub = Hub()

    async def work() -> None:
        pulls = Pulls(hub)
        await begin_and_leave(pulls, hub)
        assert await asyncio.to_thread(hub.ended.wait, WAIT_SECONDS)
        hub.may_go_on.release(100)
        hub.ended.clear()
        assert (await all_of(pulls, "org/a"))[-1] == PullChecking(FILE)

    run(work())
    assert hub.names == ["org/a", "org/a"]


def test_who_comes_while_a_download_is_given_up_has_it_begun_again() -> None:
    hub = Hub()

    async def work() -> None:
        pulls = Pulls(hub)
        await begin_and_leave(pulls, hub)
        # The loop stands still meanwhile, so it has not heard yet that the thread has ended.
        assert hub.ended.wait(WAIT_SECONDS)
        hub.may_go_on.release(100)
        assert (await all_of(pulls, "org/a"))[-1] == PullChecking(FILE)

    run(work())
    assert hub.names == ["org/a", "org/a"]


def test_only_two_run_together() -> None:
    hub = Hub()

    async def work() -> None:
        pulls = Pulls(hub)
        tasks = [asyncio.ensure_future(all_of(pulls, f"org/{name}")) for name in "abc"]
        await until(lambda: len(hub.names) == 2)
        await asyncio.sleep(0.02)
        assert len(hub.names) == 2
        hub.may_go_on.release(100)
        await asyncio.gather(*tasks)

    run(work())
    assert sorted(hub.names) == ["org/a", "org/b", "org/c"]


def test_a_slow_reader_gets_the_last_progress_only() -> None:
    hub = Hub()

    async def work() -> list[PullEvent]:
        steps = Pulls(hub).steps("org/a")
        found = [await anext(steps)]
        hub.may_go_on.release(100)
        assert await asyncio.to_thread(hub.ended.wait, WAIT_SECONDS)
        return [*found, *[step async for step in steps]]

    assert run(work()) == [PullProgress(FILE, 0, 0, 100), PullProgress(FILE, 100, 100, 100), PullChecking(FILE)]
