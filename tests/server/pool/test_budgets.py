"""Budgets follow use: never more than there is, what idle models leave for others, and each its due when used."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.budget import CacheStats
from server.engine.request import EngineStats
from server.pool.members import Around, Member
from server.pool.memory import IDLE_SECONDS, PoolMemory, PoolSettings
from server.pool.names import ModelSource, PoolBusy
from server.pool.pool import ModelPool
from tests.server.pool.test_pool import raised, run, until
from tests.support.fake_engine import FakeEngine
from tests.support.fake_opener import FakeOpener, catalog

SHARE = 1000
UNIT = 1 << 17
"""Bytes of which a simulated pool counts its memory: with less, its models would not be loaded together."""
TOTAL = 4 * SHARE * UNIT


@dataclass
class Ledgers:
    """What all engines of a simulation may take together; checked at each change."""

    total_bytes: int
    budgets: dict[str, int] = field(default_factory=dict)

    def change(self, name: str, budget_bytes: int) -> None:
        self.budgets[name] = budget_bytes
        assert sum(self.budgets.values()) <= self.total_bytes, f"more was shared out than there is: {self.budgets}"


class LedgerEngine(FakeEngine):
    """An engine whose state takes memory: some of it may go, some is held by running requests."""

    name: str
    ledgers: Ledgers
    stored_bytes: int = 0
    running_bytes: int = 0

    async def try_resize(self, budget_bytes: int) -> int:
        await asyncio.sleep(0)
        if self.running_bytes > budget_bytes:
            return self.running_bytes - budget_bytes
        self.stored_bytes = min(self.stored_bytes, budget_bytes - self.running_bytes)
        self.ledgers.change(self.name, budget_bytes)
        return 0

    def stats(self) -> EngineStats:
        budget = self.ledgers.budgets.get(self.name, 0)
        return EngineStats(cache=CacheStats(self.stored_bytes, self.stored_bytes, self.running_bytes, budget))


@dataclass
class LedgerOpener(FakeOpener):
    """Opens models whose engines keep to one account."""

    memory: PoolMemory = field(default_factory=lambda: PoolMemory(1 << 40, TOTAL))
    useful: dict[str, int] = field(default_factory=dict)
    """In bytes by id; what is not there can use everything."""
    ledgers: Ledgers = field(default_factory=lambda: Ledgers(TOTAL))

    def open(self, source: ModelSource, around: Around, tell: Any) -> Member:
        opened = super().open(source, around, tell)
        engine = LedgerEngine()
        engine.name, engine.ledgers = source.id, self.ledgers
        self.ledgers.change(source.id, around.budget_bytes)
        self.engines[source.id] = engine
        opened = replace(opened, engine=engine, release=lambda: self.ledgers.budgets.pop(source.id))
        return replace(opened, useful_bytes=self.useful.get(source.id, opened.useful_bytes))


@dataclass
class World:
    """A pool with a clock of its own, used as endpoints use it."""

    opener: LedgerOpener = field(default_factory=LedgerOpener)
    now: float = 1000.0

    def __post_init__(self) -> None:
        settings = PoolSettings(memory=self.opener.memory)
        self.pool = ModelPool(catalog("a", "b", "c"), opener=self.opener, settings=settings, clock=lambda: self.now)

    def budget(self, name: str) -> int:
        """In units."""
        return self.opener.ledgers.budgets[name] // UNIT

    def engine(self, name: str) -> LedgerEngine:
        engine = self.opener.engines[name]
        assert isinstance(engine, LedgerEngine)
        return engine

    async def use(self, name: str, stored: int, running: int = 0, pauses: int = 0) -> None:
        """Runs a request: while it runs it holds memory, then it leaves state behind. Both in units."""
        hold = await self.hold(name)
        engine, own_bytes = self.engine(name), self.opener.ledgers.budgets[name]
        assert own_bytes >= TOTAL // 3, "a model was used with less than its due"
        engine.running_bytes = min(running * UNIT, own_bytes)
        try:
            for _ in range(pauses):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            engine.running_bytes = 0
            hold.close()
            raise
        left_bytes = self.opener.ledgers.budgets[name] - engine.running_bytes
        engine.stored_bytes = max(min(engine.stored_bytes + stored * UNIT, left_bytes), 0)
        engine.running_bytes = 0
        hold.close()

    async def hold(self, name: str) -> Any:
        member = self.pool.loaded.get(name)
        hold = None if member is None else self.pool.try_hold(member.model)
        return hold or await self.pool.load(self.pool.source_of(name))

    async def settled(self) -> None:
        while self.pool._background:
            await asyncio.gather(*self.pool._background)


def test_a_model_that_is_short_grows_while_the_other_is_idle_which_gets_its_due_for_its_next_request() -> None:
    world = World()

    async def test() -> None:
        await world.use("a", 100)
        await world.use("b", 100)
        await world.settled()
        assert (world.budget("a"), world.budget("b")) == (2000, 2000)
        world.now += IDLE_SECONDS
        for _ in range(5):
            await world.use("b", 5000)
            await world.settled()
        assert (world.budget("a"), world.budget("b")) == (100, 3900), "the idle one keeps what it uses"
        assert world.engine("a").stored_bytes == 100 * UNIT
        await world.use("a", 0)
        await world.settled()
        assert (world.budget("a"), world.budget("b")) == (2000, 2000)
        assert world.engine("b").stored_bytes == 2000 * UNIT
        assert world.engine("a").stored_bytes == 100 * UNIT

    run(test)


def test_a_model_that_can_use_little_leaves_the_rest_to_others_and_is_asked_without_a_wait() -> None:
    world = World(LedgerOpener(useful={"a": 500 * UNIT}))

    async def test() -> None:
        (await world.hold("a")).close()
        (await world.hold("b")).close()
        await world.settled()
        assert (world.budget("a"), world.budget("b")) == (500, 3500)
        hold = world.pool.try_hold(world.pool.loaded["a"].model)
        assert hold is not None, "its due is more than it can use"
        hold.close()

    run(test)


def test_state_of_an_idle_model_gives_way_to_one_that_is_short_step_by_step_down_to_a_floor() -> None:
    world = World()

    async def test() -> None:
        await world.use("b", 0)
        await world.use("a", 5000)
        world.now += IDLE_SECONDS
        found = []
        for _ in range(5):
            await world.use("b", 5000)
            await world.settled()
            found.append((world.budget("a"), world.budget("b")))
        assert found == [(1500, 2500), (1000, 3000), (500, 3500), (500, 3500), (500, 3500)]

    run(test)


def test_models_in_use_take_nothing_from_each_other() -> None:
    world = World()

    async def test() -> None:
        for _ in range(3):
            await world.use("a", 5000)
            await world.use("b", 5000)
            await world.settled()
        assert (world.budget("a"), world.budget("b")) == (2000, 2000)

    run(test)


@pytest.fixture(scope="module")
def quick_retries() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("server.pool.members.RETRY_SECONDS", 0.0001)
        yield


@pytest.mark.usefixtures("quick_retries")
def test_running_requests_that_hold_what_another_is_due_are_waited_for() -> None:
    world = World()

    async def test() -> None:
        await world.use("a", 0)
        await world.use("b", 0)
        world.now += IDLE_SECONDS
        await world.use("b", 5000)
        await world.settled()
        running = await world.hold("b")
        world.engine("b").running_bytes = world.budget("b") * UNIT
        waiting = asyncio.ensure_future(world.use("a", 0))
        while "waiting for memory that answers of b hold" not in world.pool.loading.get("a", ""):  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert world.budget("a") < 2000 and not waiting.done()
        world.engine("b").running_bytes = 0
        await waiting
        assert (world.budget("a"), world.budget("b")) == (2000, 2000)
        running.close()

    run(test)


@pytest.mark.usefixtures("quick_retries")
def test_running_requests_that_go_on_for_too_long_leave_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.pool.pool.MAX_WAIT_SECONDS", 0.01)
    world = World()

    async def test() -> None:
        await world.use("a", 0)
        await world.use("b", 0)
        world.now += IDLE_SECONDS
        await world.use("b", 5000)
        await world.settled()
        running = await world.hold("b")
        world.engine("b").running_bytes = 2400 * UNIT
        await raised(world.hold("a"), PoolBusy)
        assert world.budget("a") + world.budget("b") <= 4000 and world.budget("b") >= 2400
        world.engine("b").running_bytes = 0
        running.close()
        await world.use("a", 0)
        assert (world.budget("a"), world.budget("b")) == (2000, 2000)

    run(test)


def test_a_new_model_gets_its_part_of_what_another_had_grown_to() -> None:
    world = World()

    async def test() -> None:
        await world.use("a", 0)
        await world.use("b", 0)
        world.now += IDLE_SECONDS
        for _ in range(5):
            await world.use("b", 5000)
            await world.settled()
        assert world.budget("a") == 0 and world.budget("b") >= 3999
        await world.use("c", 0)
        assert world.budget("c") >= 4000 // 3
        await world.use("a", 0)
        assert [world.budget(name) for name in "abc"] == [4000 // 3] * 3

    run(test)


def test_a_model_goes_on_while_another_is_loaded() -> None:
    world = World()

    async def test() -> None:
        await world.use("a", 0)
        world.opener.may_finish.clear()
        waiting = asyncio.ensure_future(world.use("b", 0))
        await until(lambda: world.pool.loading.get("b") == "reading weights")
        assert world.budget("a") == 2000, "the memory of the other is set aside"
        model = world.pool.loaded["a"].model
        hold = world.pool.try_hold(model)
        assert hold is not None, "it would wait for a loading that does not concern it"
        hold.close()
        world.opener.may_finish.set()
        await waiting

    run(test)


steps = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c"]),
        st.integers(0, 5000),
        st.integers(0, 5000),
        st.integers(0, 8),
        st.sampled_from([0.0, 1.0, IDLE_SECONDS]),
        st.sampled_from(["wait", "go on", "go on", "leave", "unload", "settle"]),
    ),
    max_size=14,
)
"""Of each request: its model, what it stores and holds, how long it runs, the time that passes, and what is next."""


@pytest.mark.usefixtures("quick_retries")
@settings(max_examples=150)
@given(steps)
def test_the_total_is_kept_in_every_interleaving(found: list[tuple[str, int, int, int, float, str]]) -> None:
    """Requests overlap, models come and go: `Ledgers` checks the total at each change, `use` each model's share."""
    world = World()

    async def test() -> None:
        running: list[asyncio.Task[None]] = []
        for name in ("a", "b", "c"):
            await world.use(name, 0)
        world.now += IDLE_SECONDS
        await world.use("b", 5000)
        await world.settled()
        assert world.budget("b") > 4 * SHARE // 3
        for name, stored, held, pauses, passed, then in found:
            running.append(asyncio.ensure_future(world.use(name, stored, held, pauses)))
            world.now += passed
            if then == "wait":
                await asyncio.wait(running[-1:])
            elif then == "leave":
                await asyncio.sleep(0)
                running[-1].cancel()
            elif then == "settle":
                await asyncio.gather(*running, return_exceptions=True)
                await world.settled()
            elif then == "unload":
                await asyncio.gather(*running, return_exceptions=True)
                await world.pool.unload(world.pool.source_of(name))
        for ended in await asyncio.gather(*running, return_exceptions=True):
            assert ended is None or isinstance(ended, asyncio.CancelledError), ended
        await world.settled()

    run(test)


def test_who_leaves_while_a_budget_is_cut_leaves_it_as_it_was() -> None:
    """A command that an engine has begun is run to its end, whoever waits for it."""
    opener = LedgerOpener()
    pool = ModelPool(catalog("a", "b"), opener=opener, settings=PoolSettings(opener.memory))

    class Slow(LedgerEngine):
        async def try_resize(self, budget_bytes: int) -> int:
            excess_bytes = await super().try_resize(budget_bytes)
            is_cut.set()
            await asyncio.sleep(0.02)
            return excess_bytes

    is_cut = asyncio.Event()

    async def test() -> None:
        (await pool.load(pool.source_of("a"))).close()
        opener.engines["a"].__class__ = Slow
        waiting = asyncio.create_task(pool.load(pool.source_of("b")))
        await is_cut.wait()
        assert opener.ledgers.budgets["a"] < TOTAL
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await until(lambda: not pool._changing.locked())
        assert list(pool.engines) == ["a"]
        assert opener.ledgers.budgets["a"] == pool.members[0].budget_bytes == TOTAL

    run(test)
