"""What stays of the conversations of unloaded models."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from cache.history import HistoryFollower
from cache.memory_tier import PinName
from cache.prefix_cache import PrefixCache
from server.engine.sequence import EngineState
from server.pool.members import Budgets
from server.pool.memory import ModelUse, PoolMemory, Pressure
from tests.support import cache_driver, fake_model

SAID = np.arange(20, dtype=np.int32)


def state_of(prompts: Sequence[Sequence[int]], pinned: Sequence[int] = ()) -> EngineState:
    prefix_cache = PrefixCache(lambda: fake_model.make_caches("T"), num_slots=2, budget_bytes=1 << 30)
    for prompt in prompts:
        cache_driver.run(prefix_cache, prompt)
    prefix_cache.park()
    if pinned:
        prefix_cache.pins.pin(PinName("", "s"), np.array(pinned, np.int32))
    return EngineState(prefix_cache)


def conversations(count: int) -> list[list[int]]:
    return [[first, *range(1, 40)] for first in range(100, 100 + count)]


def budgets_of(total_bytes: int, **states: EngineState) -> tuple[Budgets, list[str]]:
    """Returns budgets of no loaded model, and the list of those whose state is given up."""
    budgets = Budgets(PoolMemory(total_bytes), {}, lambda: 100.0)
    given_up: list[str] = []
    budgets.on_given_up = given_up.append
    for number, (model_id, state) in enumerate(states.items()):
        state.last_used = float(number)
        budgets.unloaded[model_id] = state
    return budgets, given_up


def test_all_is_kept_where_there_is_memory() -> None:
    first, second = state_of(conversations(4)), state_of(conversations(4))
    num_bytes = first.num_bytes + second.num_bytes
    budgets, given_up = budgets_of(num_bytes, first=first, second=second)
    asyncio.run(budgets.divide())
    assert budgets.taken_bytes == num_bytes == first.num_bytes + second.num_bytes > 0 and not given_up


def test_what_was_used_longest_ago_is_cut_down_first() -> None:
    first, second = state_of(conversations(8)), state_of(conversations(8))
    half, whole = first.num_bytes // 2, second.num_bytes
    budgets, given_up = budgets_of(half + whole, first=first, second=second)
    asyncio.run(budgets.divide())
    assert 0 < first.num_bytes <= half and second.num_bytes == whole and not given_up


def test_a_model_being_loaded_leaves_a_quarter_to_the_state_of_others(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    state = state_of(conversations(8))
    budgets, given_up = budgets_of(2 * state.num_bytes, a=state)
    budgets.joining = ModelUse("b", 100.0, is_in_use=True)
    whole = state.num_bytes
    asyncio.run(budgets.shrink(budgets.plan()))
    assert 0 < state.num_bytes <= whole // 2 and not given_up
    asyncio.run(budgets.shrink({"a": 0}))
    assert state.num_bytes == 0 and given_up == ["a"] and not budgets.unloaded
    assert "conversations of a are given up: other models or servers need the memory" in caplog.text


def test_state_given_up_for_other_programs_is_said_to_be(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    state = state_of(conversations(8))
    budgets, given_up = budgets_of(2 * state.num_bytes, a=state)
    budgets.relieve(Pressure.CRITICAL)
    assert state.num_bytes == 0 and given_up == ["a"]
    assert "conversations of a are given up: other programs need the memory" in caplog.text


def test_state_that_is_pinned_and_cannot_be_cut_down_goes_as_a_whole() -> None:
    prompts = conversations(8)
    state = state_of(prompts, pinned=prompts[0])
    state.shrink(state.num_bytes // 2)
    assert state.num_bytes > 0, "the pinned part fits"
    state.shrink(1)
    assert state.num_bytes == 0


def drafted(state: EngineState, namespace: str) -> list[int]:
    """What follows the beginning of `SAID`."""
    own = state.prefix_cache.history.begin(namespace)
    follower = HistoryFollower(state.prefix_cache.history, own)
    for token in SAID[:5].tolist():
        own.push(token)
        follower.push(token)
    return follower.next_tokens(2)


def test_a_session_is_forgotten_with_every_adapter_and_in_its_namespace_only() -> None:
    state = state_of([])
    for name in ("ours", "lora:1234:ours", "theirs"):
        state.prefix_cache.history.add(name, SAID, "s")
        state.record(name, "s", SAID)
    state.forget_client("ours", "another")
    assert drafted(state, "ours") == [5, 6]
    state.forget_client("ours", "s")
    assert [drafted(state, name) for name in ("ours", "lora:1234:ours", "theirs")] == [[], [], [5, 6]]
    assert [state.last(name, "s") is None for name in ("ours", "theirs")] == [True, False]
