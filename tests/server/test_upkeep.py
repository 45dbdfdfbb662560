"""What a server does every few seconds, in rounds that the test begins."""

import asyncio
import os
import platform
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cache.budget import CacheStats
from server.app import memory_budget
from server.app.memory_budget import Claim
from server.app.upkeep import Awake, Upkeep, exclude_from_backups
from server.engine.commands import limit_idle
from server.engine.request import EngineStats
from server.pool.catalog import Catalog
from server.pool.memory import PoolMemory, PoolSettings, Pressure
from server.pool.names import ModelSource
from server.pool.pool import ModelPool
from tests.support.apps import member
from tests.support.fake_engine import FakeEngine, fake_model


class Caffeinate:
    """Stands for the program."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self.status: int | None = None

    def __call__(self, command: Sequence[str]) -> "Caffeinate":
        self.events.append(tuple(command))
        self.status = None
        return self

    def terminate(self) -> None:
        self.events.append("ended")
        self.status = -15

    def poll(self) -> int | None:
        return self.status


def pool_of(*engines: FakeEngine) -> ModelPool:
    return ModelPool.of(*(member(fake_model(id=f"m{number}"), one) for number, one in enumerate(engines)))


def test_an_engine_that_ended_is_told_in_the_next_round() -> None:
    lost: list[int] = []
    first, second = FakeEngine(), FakeEngine()

    async def run() -> None:
        upkeep = Upkeep(pool_of(first, second), lambda: lost.append(1), awake=None)
        await upkeep.tick()
        assert not lost
        second.is_running = False
        await upkeep.tick()
        assert lost

    asyncio.run(run())


def test_a_round_that_fails_does_not_end_those_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.app.upkeep.SECONDS", 0)

    async def run() -> None:
        engine, lost, rounds = FakeEngine(), asyncio.Event(), list[int]()

        def read() -> Pressure:
            rounds.append(1)
            engine.is_running = len(rounds) < 2
            raise OSError("the file is gone")

        upkeep = asyncio.ensure_future(Upkeep(pool_of(engine), lost.set, read).run())
        await asyncio.wait_for(lost.wait(), 120)
        upkeep.cancel()

    asyncio.run(run())


def test_a_mac_stays_awake_while_requests_run_and_no_longer() -> None:
    program = Caffeinate()

    async def run() -> None:
        pool = pool_of(FakeEngine())
        upkeep = Upkeep(pool, lambda: None, awake=Awake(program))  # type: ignore[arg-type]
        await upkeep.tick()
        assert program.events == []
        hold = await pool.load(pool.source_of("m0"))
        await upkeep.tick()
        await upkeep.tick()
        started = ("/usr/bin/caffeinate", "-i", "-w", str(os.getpid()))
        assert program.events == [started]
        program.status = 1
        await upkeep.tick()
        assert program.events == [started, started], "one that ended by itself is started again"
        hold.close()
        await upkeep.tick()
        await upkeep.tick()
        assert program.events[2:] == ["ended"]

    asyncio.run(run())


@pytest.mark.parametrize(("system", "is_kept"), [("Darwin", True), ("Linux", False)])
def test_only_a_mac_is_kept_awake(system: str, is_kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    assert isinstance(Upkeep(pool_of(), lambda: None).awake, Awake) == is_kept


def test_a_mac_without_the_program_serves_nevertheless() -> None:
    def missing(command: Sequence[str]) -> Any:
        raise FileNotFoundError(2, "No such file or directory")

    awake = Awake(missing)
    awake.keep(True)
    awake.keep(False)


@pytest.mark.parametrize(("system", "is_told"), [("Darwin", True), ("Linux", False)])
def test_time_machine_leaves_the_cache_out(
    system: str, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(subprocess, "run", lambda command, **how: told.append(command))
    exclude_from_backups(tmp_path)
    assert told == ([("/usr/bin/tmutil", "addexclusion", str(tmp_path))] if is_told else [])


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (subprocess.CalledProcessError(80, "tmutil", stderr="tmutil: Operation not permitted\n"), "not permitted"),
        (subprocess.TimeoutExpired("tmutil", 10), "timed out after 10 seconds"),
        (FileNotFoundError(2, "No such file or directory"), "No such file"),
    ],
)
def test_a_folder_that_cannot_be_left_out_of_backups_is_told(
    error: Exception, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(command: Sequence[str], **how: object) -> None:
        raise error

    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(subprocess, "run", fail)
    exclude_from_backups(tmp_path)
    assert words in caplog.text


class Holding(FakeEngine):
    """Holds some state."""

    num_bytes = 0

    def stats(self) -> EngineStats:
        return EngineStats(cache=CacheStats(1, self.num_bytes, 0, 1 << 40))


def test_the_machines_lack_of_memory_reaches_every_model_by_its_share(caplog: pytest.LogCaptureFixture) -> None:
    first, second = Holding(), Holding()
    first.num_bytes, second.num_bytes = 300 << 20, 100 << 20
    level = Pressure.NORMAL

    async def run() -> None:
        nonlocal level
        upkeep = Upkeep(pool_of(first, second), lambda: None, lambda: level, awake=None)
        await upkeep.tick()
        assert not first.commands
        level = Pressure.WARN
        await upkeep.tick()
        assert (first.commands, second.commands) == ([(limit_idle, 150 << 20)], [(limit_idle, 50 << 20)])
        assert "short of memory (warn): idle state is cut to 209.7 MB" in caplog.text
        first.num_bytes, second.num_bytes = 150 << 20, 50 << 20
        await upkeep.tick()
        level = Pressure.CRITICAL
        await upkeep.tick()
        assert first.commands[1:] == second.commands[1:] == [(limit_idle, 0)]

    asyncio.run(run())


def test_a_server_makes_way_for_another_that_needs_memory_and_grows_once_that_ends(tmp_path: Path) -> None:
    usable = 16 << 30

    class Server:
        """One of two, in its own words: a pool, a claim and its rounds."""

        def __init__(self, pid: int, total_bytes: int) -> None:
            self.engine = Holding()
            opened = member(fake_model(id="m"), self.engine, weights_bytes=1 << 30)
            catalog = Catalog([ModelSource("m", Path("m"))], has_others=False)
            self.pool = ModelPool(catalog, [opened], None, PoolSettings(PoolMemory(total_bytes)))
            self.claim, _ = memory_budget.take(tmp_path / "run", Claim(pid, "", 0, ""))
            self.pid, self.pool.budgets.on_change = pid, self.tell
            self.tell()
            find_share = partial(self.claim.find_share, usable)
            self.upkeep = Upkeep(self.pool, lambda: None, None, find_share, awake=None)

        def tell(self) -> None:
            now = self.pool.budgets
            self.claim.tell(Claim(self.pid, "m", now.taken_bytes, "", now.weights_bytes, now.needed_bytes))

        async def round(self) -> int:
            await self.upkeep.tick()
            for _ in range(20):
                await asyncio.sleep(0)
            return self.pool.budgets.taken_bytes >> 30

    async def run() -> None:
        first = Server(1, usable)
        first.engine.num_bytes = 15 << 30
        assert await first.round() == 16
        second = Server(2, 1 << 30)
        second.engine.num_bytes = 0
        assert await second.round() == 1
        first.engine.excess_bytes = 1
        assert await first.round() == 16, "what running requests hold stays"
        first.engine.excess_bytes = 0
        # The other needs a part to grow, of which the claim of the first leaves nothing.
        assert [await first.round(), await second.round()] == [14, 1]
        second.engine.num_bytes = 12 << 30
        assert [await second.round(), await first.round(), await second.round()] == [1, 8, 8]
        first.claim.close()
        assert await second.round() == 16
        assert second.engine.budget_bytes == 15 << 30
        second.claim.close()

    asyncio.run(run())
