"""Idle models lend memory to one that is short: never more than there is, never below a floor, always given back."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.journal import CacheStats
from server.engine.request import EngineStats
from server.pool.loading import Around
from server.pool.members import OpenedModel
from server.pool.memory import FLOOR_PART, IDLE_SECONDS, PoolMemory, PoolSettings, StateUse, plan_loans
from server.pool.names import ModelSource
from server.pool.pool import ModelPool
from server.pool.served import ServedModel
from tests.server.pool.test_pool import run
from tests.support.fake_engine import FakeEngine
from tests.support.fake_opener import FakeOpener, catalog

SHARE = 1000
FLOOR = SHARE // FLOOR_PART
UNIT = 1 << 17
"""Bytes of which a simulated pool counts its memory: with less, its models would not be loaded together."""
TOTAL = 4 * SHARE * UNIT


def state_use(name: str, used: int, last_used: float, *, is_idle: bool, budget: int = SHARE) -> StateUse:
    return StateUse(name, budget, used, budget, last_used, is_idle)


def test_nobody_lends_while_nobody_is_short() -> None:
    assert plan_loans([state_use("a", 900, 2, is_idle=False), state_use("b", 0, 1, is_idle=True)], SHARE) == {}


def test_nobody_borrows_of_models_in_use() -> None:
    assert plan_loans([state_use("a", 990, 2, is_idle=False), state_use("b", 0, 1, is_idle=False)], SHARE) == {}


def test_what_is_not_used_is_lent_before_what_is_and_the_longest_idle_first() -> None:
    short = state_use("a", 990, 9, is_idle=False)
    full, free = state_use("old", 1000, 1, is_idle=True), state_use("new", 100, 5, is_idle=True)
    assert plan_loans([short, full, free], SHARE) == {"new": 750, "a": 1250}
    assert plan_loans([short, full], SHARE) == {"old": 750, "a": 1250}
    two = [short, state_use("old", 100, 1, is_idle=True), free]
    assert plan_loans(two, SHARE) == {"old": 750, "a": 1250}
    partly = [short, state_use("old", 900, 1, is_idle=True), state_use("new", 900, 5, is_idle=True)]
    assert plan_loans(partly, SHARE) == {"old": 850, "new": 900, "a": 1250}


def test_the_one_used_last_of_those_that_are_short_borrows() -> None:
    short = [state_use("a", 990, 2, is_idle=False), state_use("b", 990, 3, is_idle=False)]
    assert plan_loans([*short, state_use("c", 0, 1, is_idle=True)], SHARE) == {"c": 750, "b": 1250}


uses = st.lists(
    st.builds(
        state_use,
        st.just(""),
        st.integers(0, 2 * SHARE),
        st.integers(0, 9).map(float),
        is_idle=st.booleans(),
        budget=st.integers(FLOOR, 2 * SHARE),
    ),
    max_size=5,
).map(lambda found: [StateUse(**{**vars(one), "id": str(number)}) for number, one in enumerate(found)])


@given(uses)
def test_a_plan_takes_from_idle_models_only_and_makes_nothing_out_of_nothing(found: list[StateUse]) -> None:
    plan, by_id = plan_loans(found, SHARE), {one.id: one for one in found}
    gained = {name: budget - by_id[name].budget_bytes for name, budget in plan.items()}
    assert sum(gained.values()) == 0
    for name, gain in gained.items():
        assert gain != 0
        assert by_id[name].is_idle if gain < 0 else by_id[name].is_short
        assert plan[name] >= FLOOR
    assert list(gained.values()) == sorted(gained.values(), key=lambda gain: gain > 0), "lenders are told first"


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
    ledgers: Ledgers = field(default_factory=lambda: Ledgers(TOTAL))

    def open(self, source: ModelSource, around: Around, tell: Any) -> OpenedModel:
        opened = super().open(source, around, tell)
        engine = LedgerEngine()
        engine.name, engine.ledgers = source.id, self.ledgers
        self.ledgers.change(source.id, self.memory.share_bytes([*around.weights, opened.weights_bytes]))
        self.engines[source.id] = engine
        return OpenedModel(opened.model, engine, opened.weights_bytes, lambda: self.ledgers.budgets.pop(source.id))


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
        assert own_bytes >= self.opener.memory.share_bytes([1] * 3), "a model was used with less than its share"
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
        model: ServedModel | None = self.pool.models.get(name)
        hold = None if model is None else self.pool.try_hold(model)
        return hold or await self.pool.load(self.pool.source_of(name))

    async def settled(self) -> None:
        while self.pool._background:
            await asyncio.gather(*self.pool._background)


def test_a_model_that_is_short_grows_while_the_other_is_idle_and_gives_back_before_its_next_request() -> None:
    world = World()

    async def test() -> None:
        await world.use("a", 100)
        await world.use("b", 100)
        await world.settled()
        assert (world.budget("a"), world.budget("b")) == (2000, 2000)
        world.now += IDLE_SECONDS
        for _ in range(9):
            await world.use("b", 5000)
            await world.settled()
        assert (world.budget("a"), world.budget("b")) == (500, 3500), "the idle one keeps its floor"
        assert world.engine("a").stored_bytes == 100 * UNIT, "what it stores fits in that"
        await world.use("a", 0)
        await world.settled()
        assert (world.budget("a"), world.budget("b")) == (2000, 2000)
        assert world.engine("b").stored_bytes == 2000 * UNIT

    run(test)


@pytest.fixture(scope="module")
def quick_retries() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("server.pool.turnover.RETRY_SECONDS", 0.0001)
        yield


@pytest.mark.usefixtures("quick_retries")
def test_a_loan_is_waited_for_while_running_requests_hold_it() -> None:
    world = World()

    async def test() -> None:
        await world.use("a", 0)
        await world.use("b", 0)
        world.now += IDLE_SECONDS
        await world.use("b", 5000)
        await world.settled()
        borrowing = await world.hold("b")
        world.engine("b").running_bytes = world.budget("b") * UNIT
        waiting = asyncio.ensure_future(world.use("a", 0))
        while "waiting for memory that answers of b hold" not in world.pool.loading.get("a", ""):  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert world.budget("a") < 2000 and not waiting.done()
        world.engine("b").running_bytes = 0
        await waiting
        assert (world.budget("a"), world.budget("b")) == (2000, 2000)
        borrowing.close()

    run(test)


def test_sharing_out_ends_loans_as_far_as_running_requests_allow() -> None:
    world = World()

    async def test() -> None:
        for _ in range(2):
            await world.use("a", 0)
            await world.use("b", 0)
            world.now += IDLE_SECONDS
            await world.use("b", 5000)
            await world.settled()
            assert world.budget("b") > 2000
            await world.pool.shares.share_out()
            assert (world.budget("a"), world.budget("b")) == (2000, 2000)
        await world.use("b", 5000)
        await world.settled()
        world.engine("b").running_bytes = 2400 * UNIT
        await world.pool.shares.share_out()
        assert world.budget("b") > 2000, "what running requests hold is not taken from them"
        assert [one.is_lending for one in world.pool.members if one.source.id == "a"] == [True]
        world.engine("b").running_bytes = 0
        await world.use("a", 0)
        assert (world.budget("a"), world.budget("b")) == (2000, 2000)

    run(test)


def test_a_loan_ends_before_its_lender_gets_a_smaller_share_beside_a_new_model() -> None:
    world = World()

    async def test() -> None:
        await world.use("a", 0)
        await world.use("b", 0)
        world.now += IDLE_SECONDS
        for _ in range(3):
            await world.use("b", 5000)
            await world.settled()
        assert (world.budget("a"), world.budget("b")) == (500, 3500)
        await world.use("c", 0)
        assert [world.budget(name) for name in "abc"] == [4000 // 3] * 3

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
