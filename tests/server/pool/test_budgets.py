"""Memory of models: what each needs, and budgets that follow use, never more than there is."""

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
from server.pool.memory import (
    FLOOR_PART,
    IDLE_SECONDS,
    QUIET_SECONDS,
    SMALLEST_PART_BYTES,
    IdleLimit,
    ModelUse,
    PoolMemory,
    PoolSettings,
    Pressure,
    choose_to_unload,
    divide,
    due_bytes,
)
from server.pool.names import ModelSource, ModelTooLarge, PoolBusy
from server.pool.pool import ModelPool
from tests.server.pool.test_pool import raised, until
from tests.support.awaited import awaited
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


@awaited
async def test_a_model_that_is_short_grows_while_the_other_is_idle_which_gets_its_due_for_its_next_request() -> None:
    world = World()
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


@awaited
async def test_a_model_that_can_use_little_leaves_the_rest_to_others_and_is_asked_without_a_wait() -> None:
    world = World(LedgerOpener(useful={"a": 500 * UNIT}))
    (await world.hold("a")).close()
    (await world.hold("b")).close()
    await world.settled()
    assert (world.budget("a"), world.budget("b")) == (500, 3500)
    hold = world.pool.try_hold(world.pool.loaded["a"].model)
    assert hold is not None, "its due is more than it can use"
    hold.close()


@awaited
async def test_state_of_an_idle_model_gives_way_to_one_that_is_short_step_by_step_down_to_a_floor() -> None:
    world = World()
    await world.use("b", 0)
    await world.use("a", 5000)
    world.now += IDLE_SECONDS
    found = []
    for _ in range(5):
        await world.use("b", 5000)
        await world.settled()
        found.append((world.budget("a"), world.budget("b")))
    assert found == [(1500, 2500), (1000, 3000), (500, 3500), (500, 3500), (500, 3500)]


@pytest.fixture(scope="module")
def quick_retries() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("server.pool.members.RETRY_SECONDS", 0.0001)
        yield


@pytest.mark.usefixtures("quick_retries")
@awaited
async def test_running_requests_that_hold_what_another_is_due_are_waited_for() -> None:
    world = World()
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


@pytest.mark.usefixtures("quick_retries")
@awaited
async def test_running_requests_that_go_on_for_too_long_leave_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.pool.pool.MAX_WAIT_SECONDS", 0.01)
    world = World()
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


@awaited
async def test_a_new_model_gets_its_part_of_what_another_had_grown_to() -> None:
    world = World()
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


@awaited
async def test_a_model_goes_on_while_another_is_loaded() -> None:
    world = World()
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
@awaited
async def test_the_total_is_kept_in_every_interleaving(found: list[tuple[str, int, int, int, float, str]]) -> None:
    """Requests overlap, models come and go: `Ledgers` checks the total at each change, `use` each model's share."""
    world = World()
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


@awaited
async def test_who_leaves_while_a_budget_is_cut_leaves_it_as_it_was() -> None:
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


MIB = 1 << 20
AMPLE = PoolMemory(1000 * MIB)


def loaded(name: str, weights: int, last_used: float, *, is_busy: bool = False) -> ModelUse:
    return ModelUse(name, last_used, weights * MIB, is_busy=is_busy)


def test_the_weights_leave_memory_for_state() -> None:
    assert AMPLE.for_state([400 * MIB]) == 600 * MIB
    assert AMPLE.for_state([400 * MIB, 200 * MIB]) == 400 * MIB
    assert PoolMemory(1000 * MIB, 300 * MIB).for_state([1, 1, 1]) == 300 * MIB
    assert PoolMemory(1000 * MIB, largest_state_bytes=250 * MIB).for_state([400 * MIB]) == 250 * MIB
    alone = PoolMemory(1000 * MIB, largest_alone_bytes=1200 * MIB, smallest_alone_bytes=256 * MIB)
    assert alone.for_state([1100 * MIB]) == alone.for_state([900 * MIB]) == 256 * MIB


def test_idle_models_go_first_and_of_these_the_one_used_longest_ago() -> None:
    models = [loaded("busy", 100, 1, is_busy=True), loaded("new", 100, 3), loaded("old", 100, 2)]
    assert choose_to_unload(models, "x", 1, AMPLE, 3) == ["old"]
    assert choose_to_unload(models, "x", 1, AMPLE, 2) == ["old", "new"]
    assert choose_to_unload(models, "x", 1, AMPLE, 1) == ["old", "new", "busy"]


def test_a_small_model_stays_where_a_large_one_has_to_go_anyway() -> None:
    models = [loaded("small", 10, 1), loaded("large", 800, 2)]
    assert choose_to_unload(models, "x", 700 * MIB, AMPLE, None) == ["large"]


@pytest.mark.parametrize(
    "memory", [AMPLE, PoolMemory(1000 * MIB, largest_alone_bytes=950 * MIB, smallest_alone_bytes=256 * MIB)]
)
def test_a_model_that_does_not_fit_alone_is_refused_before_anything_is_unloaded(memory: PoolMemory) -> None:
    with pytest.raises(ModelTooLarge, match=r"x take 1\.0 GB, and there is memory for"):
        choose_to_unload([loaded("a", 1, 1)], "x", 990 * MIB, memory, None)


def test_a_budget_for_state_that_was_asked_for_is_kept_beside_the_weights() -> None:
    memory = PoolMemory(1000 * MIB, 128 * MIB)
    assert memory.fits([400 * MIB, 400 * MIB])
    assert not memory.fits([400 * MIB, 480 * MIB])
    assert not memory.fits([1, 1, 1]), "a third of it would be too little"
    assert PoolMemory(1000 * MIB, 16 * MIB).fits([1]), "who asks for little gets it, for one model"
    assert not PoolMemory(1000 * MIB, 16 * MIB).fits([1, 1])


WEIGHTS = st.integers(1, 900)


@given(st.lists(st.tuples(WEIGHTS, st.booleans()), max_size=5), WEIGHTS, st.none() | st.integers(1, 4))
def test_what_stays_fits_and_no_one_leaves_in_vain(
    found: list[tuple[int, bool]], weights: int, max_models: int | None
) -> None:
    models = [loaded(str(i), size, i, is_busy=busy) for i, (size, busy) in enumerate(found)]
    leaving = choose_to_unload(models, "x", weights * MIB, AMPLE, max_models)
    staying = [one for one in models if one.id not in leaving]

    def fits(stay: list[ModelUse]) -> bool:
        sizes = [*(one.weights_bytes for one in stay), weights * MIB]
        is_within = max_models is None or len(sizes) <= max_models
        return is_within and AMPLE.for_state(sizes) >= SMALLEST_PART_BYTES * len(sizes)

    assert fits(staying)
    assert not any(fits([*staying, one]) for one in models if one.id in leaving)


def in_use(name: str, used: int, last_used: float = 9) -> ModelUse:
    return ModelUse(name, last_used, used_bytes=used, is_in_use=True)


def idle(name: str, used: int, last_used: float = 1) -> ModelUse:
    return ModelUse(name, last_used, used_bytes=used)


def unloaded(name: str, used: int, last_used: float = 1) -> ModelUse:
    return ModelUse(name, last_used, used_bytes=used, is_loaded=False)


def test_models_in_use_get_equal_parts() -> None:
    assert divide(1000, [in_use("a", 0)]) == {"a": 1000}
    assert divide(1000, [in_use("a", 900), in_use("b", 0)]) == {"a": 500, "b": 500}
    assert divide(1000, [idle("a", 0), idle("b", 0)]) == {"a": 500, "b": 500}, "none is in use"


def test_a_model_in_use_gets_what_idle_ones_do_not_use() -> None:
    assert divide(1000, [in_use("a", 400), idle("b", 100)]) == {"a": 525, "b": 475}
    assert divide(1000, [in_use("a", 525), idle("b", 100)]) == {"a": 650, "b": 350}
    assert divide(1000, [in_use("a", 900), idle("b", 100)]) == {"a": 900, "b": 100}


def test_no_model_gets_more_than_it_can_use_and_others_get_the_rest() -> None:
    small = replace(in_use("a", 0), useful_bytes=100)
    assert divide(1000, [small]) == {"a": 100}
    assert divide(1000, [small, in_use("b", 0)]) == {"a": 100, "b": 900}
    assert divide(1000, [in_use("b", 0), replace(small, useful_bytes=600), in_use("c", 0)]) == {
        "a": 333,
        "b": 333,
        "c": 334,
    }
    assert divide(1000, [replace(idle("a", 300), useful_bytes=300)]) == {"a": 300}


def test_an_idle_model_is_cut_for_one_in_use_that_grows_down_to_a_floor_the_longest_idle_first() -> None:
    assert divide(1200, [in_use("a", 400), idle("b", 800)]) == {"a": 600, "b": 600}
    assert divide(1200, [in_use("a", 600), idle("b", 800)]) == {"a": 750, "b": 450}
    assert divide(1200, [in_use("a", 1100), idle("b", 800)]) == {"a": 1050, "b": 150}
    three = [in_use("a", 600), idle("old", 300, 1), idle("new", 300, 2)]
    assert divide(1200, three) == {"a": 700, "old": 200, "new": 300}


def test_state_of_unloaded_models_is_kept_where_there_is_memory_and_a_quarter_of_it_for_sure() -> None:
    assert divide(1000, [unloaded("u", 900)]) == {"u": 900}
    assert divide(1000, [in_use("a", 0), unloaded("u", 900)]) == {"a": 750, "u": 250}
    assert divide(1000, [in_use("a", 0), unloaded("u", 100)]) == {"a": 900, "u": 100}
    assert divide(1000, [in_use("a", 0), idle("b", 0), unloaded("u", 600)]) == {"a": 375, "b": 25, "u": 600}
    assert divide(1000, [in_use("a", 0), unloaded("u", 900), unloaded("v", 0)]) == {"a": 750, "u": 250, "v": 0}
    assert divide(1000, [in_use("a", 0), unloaded("u", 900), unloaded("v", 900)]) == {"a": 750, "u": 125, "v": 125}


KINDS = st.sampled_from([in_use, idle, unloaded])
MODELS = st.lists(st.tuples(KINDS, st.integers(0, 1500), st.integers(0, 9).map(float)), max_size=6).map(
    lambda found: [kind(str(number), used, last_used) for number, (kind, used, last_used) in enumerate(found)]
)


@given(st.integers(0, 2000), MODELS)
def test_a_division_promises_no_more_than_there_is_and_everybody_the_least(
    total: int, models: list[ModelUse]
) -> None:
    budgets, due = divide(total, models), due_bytes(total, models)
    assert sum(budgets.values()) <= total
    num_loaded = sum(one.is_loaded for one in models)
    num_unloaded = sum(not one.is_loaded and one.used_bytes > 0 for one in models)
    assert due >= (total - total // FLOOR_PART) // max(num_loaded, 1)
    for one in models:
        if one.is_in_use:
            assert budgets[one.id] >= due
            continue
        floor = due // FLOOR_PART if one.is_loaded else total // FLOOR_PART // max(num_unloaded, 1)
        assert budgets[one.id] >= min(one.used_bytes, floor)
        if not one.is_loaded:
            assert budgets[one.id] <= one.used_bytes


@given(st.integers(0, 2000), MODELS)
def test_nothing_is_cut_where_all_fits_and_what_is_cut_first_was_used_longest_ago(
    total: int, models: list[ModelUse]
) -> None:
    budgets, due = divide(total, models), due_bytes(total, models)
    wanted = {
        one.id: max(one.used_bytes + due // FLOOR_PART, due) if one.is_in_use else one.used_bytes for one in models
    }
    if sum(wanted.values()) <= total:
        assert all(budgets[one.id] >= wanted[one.id] for one in models)
    cut = [one for one in models if budgets[one.id] < one.used_bytes]
    if any(not one.is_in_use for one in cut) and num_in_use(models):
        assert sum(budgets.values()) == total, "memory lies idle while state is dropped"
    floor = {one.id: min(one.used_bytes, due // FLOOR_PART if one.is_loaded else total) for one in models}
    for one in cut:
        older = [two for two in models if two.last_used < one.last_used and two.is_loaded and not two.is_in_use]
        if not one.is_in_use:
            assert all(budgets[two.id] <= floor[two.id] for two in older)


def num_in_use(models: list[ModelUse]) -> int:
    return sum(one.is_in_use for one in models)


def test_idle_state_makes_way_and_comes_back_by_and_by() -> None:
    limit, budget = IdleLimit(), 1000 * MIB
    # A warning that lasts halves nothing again.
    history = [
        (Pressure.NORMAL, 0.0, 800, False, None),
        (Pressure.WARN, 1.0, 800, True, 400 * MIB),
        (Pressure.WARN, 90.0, 400, False, 400 * MIB),
        (Pressure.CRITICAL, 91.0, 400, True, 0),
        (Pressure.WARN, 92.0, 100, True, 0),
        (Pressure.NORMAL, 100.0, 0, True, 0),
    ]
    for level, now, held, has_changed, max_bytes in history:
        assert limit.update(level, now, held * MIB, budget) == has_changed
        assert limit.max_bytes == max_bytes
    found: list[int | None] = []
    for tick in range(1, 100):
        limit.update(Pressure.NORMAL, 100.0 + 2 * tick, 0, budget)
        found.append(limit.max_bytes)
    grown = [0, 64 * MIB, 128 * MIB, 256 * MIB, 512 * MIB, None]
    assert list(dict.fromkeys(found)) == grown and found.count(64 * MIB) == QUIET_SECONDS / 2
