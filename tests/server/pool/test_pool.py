"""The pool by itself: who is loaded for whom, who waits, and what is left as it was."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from server.engine.request import EngineStopped, EngineStuck
from server.pool.members import ModelHold
from server.pool.memory import PoolMemory, PoolSettings
from server.pool.names import FOREVER, Alias, LoadFailed, ModelInUse, ModelNotLoaded, ModelTooLarge, PoolBusy
from server.pool.pool import ModelPool
from tests.support.awaited import awaited
from tests.support.fake_opener import FakeOpener, catalog

MIB = 1 << 20


def make_pool(opener: FakeOpener, **settings: Any) -> ModelPool:
    return ModelPool(catalog("a", "b", "c"), opener=opener, settings=PoolSettings(**settings))


async def held(pool: ModelPool, name: str) -> ModelHold:
    """Holds a model as an endpoint does: looks it up, or has it loaded."""
    try:
        hold = pool.try_hold(pool.find(name))
    except ModelNotLoaded as error:
        return await pool.load(error.source)
    return hold or await pool.load(pool.source_of(name))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for happens on other threads
        await asyncio.sleep(0.001)


async def raised(work: Awaitable[Any], kind: type[Exception]) -> Exception:
    with pytest.raises(kind) as info:
        await work
    return info.value


@awaited
async def test_a_model_is_loaded_when_it_is_asked_for_and_once_for_all_who_wait() -> None:
    opener = FakeOpener()
    pool = make_pool(opener, aliases=(Alias("gpt-*", "b"),))
    holds = await asyncio.gather(*(held(pool, name) for name in ("b", "gpt-4", "b:latest", "a")))
    assert [hold.member.model.id for hold in holds] == ["b", "b", "b", "a"]
    assert sorted(opener.opened) == ["a", "b"]
    assert [member.num_holds for member in pool.members if member.source.id == "b"] == [3]
    for hold in holds:
        hold.close()
        hold.close()
    assert not any(member.is_busy for member in pool.members)


@awaited
async def test_an_idle_model_makes_way_and_a_busy_one_is_waited_for() -> None:
    opener = FakeOpener()
    pool = make_pool(opener, max_models=1)
    first = await held(pool, "a")
    waiting = asyncio.ensure_future(held(pool, "b"))
    await until(lambda: "waiting for a" in pool.loading.get("b", ""))
    assert opener.opened == ["a"] and list(pool.engines) == ["a"], "a busy model was unloaded"
    # Whoever asks for it now waits behind the one that waits for its memory.
    later = asyncio.ensure_future(held(pool, "a"))
    await asyncio.sleep(0)
    first.close()
    second = await waiting
    assert list(pool.engines) == ["b"] and not opener.engines["a"].is_running
    second.close()
    third = await later
    assert third.member.model.id == "a" and opener.opened == ["a", "b", "a"]


@awaited
async def test_a_model_that_does_not_come_in_time_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.pool.pool.MAX_WAIT_SECONDS", 0.01)
    opener = FakeOpener()
    pool = make_pool(opener, max_models=1)
    hold = await held(pool, "a")
    error = await raised(held(pool, "b"), PoolBusy)
    assert "b fits only once a have finished" in str(error) or "a" in str(error)
    again = pool.try_hold(pool.find("a"))
    assert again is not None and again.member.model is hold.member.model


@awaited
async def test_who_gives_up_before_anything_was_read_takes_nothing_with_it() -> None:
    opener = FakeOpener()
    pool = make_pool(opener, max_models=1)
    hold = await held(pool, "a")
    waiting = asyncio.ensure_future(held(pool, "b"))
    await until(lambda: "waiting for a" in pool.loading.get("b", ""))
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert not pool.loading
    await until(lambda: pool.try_hold(hold.member.model) is not None)
    hold.close()
    assert opener.opened == ["a"]


@awaited
async def test_a_model_whose_only_client_left_is_loaded_nevertheless_and_idle() -> None:
    opener = FakeOpener()
    opener.may_finish.clear()
    pool = make_pool(opener)
    waiting = asyncio.ensure_future(held(pool, "a"))
    await until(opener.has_begun.is_set)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    opener.may_finish.set()
    await until(lambda: "a" in pool.engines)
    assert not pool.members[0].is_busy


@awaited
async def test_who_leaves_at_the_moment_of_loading_holds_nothing() -> None:
    opener = FakeOpener()
    pool = make_pool(opener)
    waiting = asyncio.ensure_future(pool.load(pool.source_of("a")))

    def cancel_soon() -> None:
        asyncio.get_running_loop().call_soon(waiting.cancel)

    # Called in the very step that lets go of who waits: the cancel comes in between.
    pool.budgets.on_change = cancel_soon
    await asyncio.gather(waiting, return_exceptions=True)
    assert waiting.cancelled() and "a" in pool.engines
    assert not pool.members[0].is_busy


@pytest.mark.parametrize("fault", ["missing", "broken", "large"])
@awaited
async def test_a_model_that_cannot_be_loaded_costs_nobody_anything(fault: str) -> None:
    opener = FakeOpener(sizes={"b": 2000 * MIB} if fault == "large" else {})
    if fault != "large":
        getattr(opener, fault).add("b")
    pool = make_pool(opener, max_models=1, memory=PoolMemory(1000 * MIB))
    (await held(pool, "a")).close()
    kind: type[Exception] = ModelTooLarge if fault == "large" else LoadFailed
    errors = await asyncio.gather(*(held(pool, "b") for _ in range(3)), return_exceptions=True)
    assert [type(error) for error in errors] == [kind] * 3
    assert all("b" in str(error) for error in errors)
    if fault == "broken":
        # Its files looked well, so the other one had made way: it comes back.
        await until(lambda: "a" in pool.engines)
    else:
        assert opener.opened == ["a"] and opener.engines["a"].is_running, "it made way in vain"
    assert (await held(pool, "a")).member.model.id == "a"


@awaited
async def test_each_model_gets_its_share_of_the_memory_for_state() -> None:
    opener = FakeOpener(sizes={"a": 100 * MIB, "b": 300 * MIB})
    pool = make_pool(opener, memory=PoolMemory(1000 * MIB))
    (await held(pool, "a")).close()
    (await held(pool, "b")).close()
    assert opener.engines["a"].budget_bytes == opener.engines["b"].budget_bytes == 300 * MIB
    gone: list[str] = []
    pool.budgets.on_given_up = gone.append
    assert await pool.unload(pool.source_of("b"))
    assert gone == ["b"], "memory holds nothing of it any more"
    assert opener.engines["a"].budget_bytes == 900 * MIB
    assert not await pool.unload(pool.source_of("b"))


@awaited
async def test_a_busy_model_is_not_unloaded_on_request() -> None:
    pool = make_pool(FakeOpener())
    hold = await held(pool, "a")
    await raised(pool.unload(pool.source_of("a")), ModelInUse)
    hold.close()
    assert await pool.unload(pool.source_of("a")) and not pool.engines


@awaited
async def test_a_model_whose_engine_is_stuck_keeps_the_pool_from_nothing_but_its_memory() -> None:
    """To end such an engine would take for ever, and hold up all other changes."""
    opener, clock = FakeOpener(), [0.0]
    settings = PoolSettings(max_models=1, keep_alive_seconds=10)
    pool = ModelPool(catalog("a", "b"), opener=opener, settings=settings, clock=lambda: clock[0])
    (await held(pool, "a")).close()
    opener.engines["a"].stuck_seconds = 70.04
    clock[0] = 1000
    pool.watch()
    await asyncio.sleep(0)
    assert pool.stuck == {"a": 70.0} and list(pool.engines) == ["a"]
    await raised(pool.unload(pool.source_of("a")), EngineStuck)
    await raised(held(pool, "b"), PoolBusy)
    opener.engines["a"].stuck_seconds = None
    (await held(pool, "b")).close()
    assert list(pool.engines) == ["b"] and not pool.stuck


@awaited
async def test_a_hold_on_a_model_that_was_loaded_again_is_refused() -> None:
    pool = make_pool(FakeOpener())
    hold = await held(pool, "a")
    hold.close()
    await pool.unload(pool.source_of("a"))
    (await held(pool, "a")).close()
    assert pool.try_hold(hold.member.model) is None


@awaited
async def test_idle_models_are_unloaded_when_their_time_is_over() -> None:
    opener = FakeOpener()
    pool = make_pool(opener, keep_alive_seconds=FOREVER)
    first, second = await held(pool, "a"), await held(pool, "b")
    first.member.keep_alive_seconds = 0
    await asyncio.sleep(0)
    assert set(pool.engines) == {"a", "b"}, "a model was unloaded while it was held"
    first.close()
    second.close()
    await until(lambda: "a" not in pool.engines)
    assert list(pool.engines) == ["b"]


@awaited
async def test_idle_models_stay_half_an_hour_only_where_memory_is_short() -> None:
    for weights, seconds in ((100 * MIB, FOREVER), (600 * MIB, 1800.0)):
        pool = make_pool(FakeOpener(sizes={"a": weights}), memory=PoolMemory(1000 * MIB))
        (await held(pool, "a")).close()
        (member,) = pool.members
        assert pool.expires(member) == member.last_used + seconds


@awaited
async def test_who_leaves_as_the_loading_ends_is_not_looked_for_among_those_who_wait() -> None:
    opener = FakeOpener()
    pool = make_pool(opener)
    opener.may_finish.clear()
    waiting = asyncio.ensure_future(pool.load(pool.source_of("a")))
    await until(opener.has_begun.is_set)
    waiting.cancel()
    # Before the one who leaves gets a turn.
    pool.close()
    (left,) = await asyncio.gather(waiting, return_exceptions=True)
    assert isinstance(left, asyncio.CancelledError)
    opener.may_finish.set()


@pytest.mark.parametrize("is_reading", [True, False], ids=["reading", "waiting"])
@awaited
async def test_a_server_that_stops_waits_for_no_loading(is_reading: bool) -> None:
    opener = FakeOpener()
    pool = make_pool(opener, max_models=1)
    hold = await held(pool, "a")
    if is_reading:
        hold.close()
        opener.may_finish.clear()
        opener.has_begun.clear()
    waiting = asyncio.ensure_future(held(pool, "b"))
    await until(lambda: opener.has_begun.is_set() if is_reading else "waiting for a" in pool.loading.get("b", ""))
    assert await pool.drain(1.0)
    await raised(waiting, EngineStopped)
    pool.stop()
    opener.may_finish.set()
    assert "b" not in pool.engines
    await raised(pool.load(pool.source_of("c")), EngineStopped)


@pytest.mark.parametrize("max_models", [1, 2, None])
@awaited
async def test_twenty_clients_that_name_models_at_random_are_all_served(max_models: int | None) -> None:
    opener = FakeOpener(sizes={"a": 300 * MIB, "b": 500 * MIB, "c": 400 * MIB})
    pool = make_pool(opener, max_models=max_models, memory=PoolMemory(1000 * MIB))
    chance = random.Random(7)

    async def client() -> int:
        for turn in range(10):
            name = chance.choice("abc")
            hold = await held(pool, name)
            assert hold.member.model.id == name and opener.engines[name].is_running
            assert sum(opener.sizes[one] for one in pool.engines) <= 1000 * MIB
            assert max_models is None or len(pool.engines) <= max_models
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            assert opener.engines[name].is_running, "it was unloaded while it was held"
            hold.close()
            if chance.random() < 0.1 and turn:
                waiting = asyncio.ensure_future(held(pool, chance.choice("abc")))
                await asyncio.sleep(0)
                waiting.cancel()
                for result in await asyncio.gather(waiting, return_exceptions=True):
                    if isinstance(result, ModelHold):
                        result.close()
        return 10

    assert await asyncio.gather(*(client() for _ in range(20))) == [10] * 20
    await until(lambda: not pool.loading)
    assert not any(member.is_busy for member in pool.members)


@awaited
async def test_the_weights_of_all_models_are_told_when_one_came_or_went() -> None:
    told: list[tuple[int, bool]] = []
    opener = FakeOpener(sizes={"a": 5, "b": 7})
    pool = make_pool(opener, wire=lambda *given: told.append(given))
    (await held(pool, "a")).close()
    hold = await held(pool, "a")
    (await held(pool, "b")).close()
    hold.close()
    assert await pool.unload(pool.source_of("a"))
    assert told == [(5, True), (12, False), (7, True)]
