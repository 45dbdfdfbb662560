"""What fits beside what, who is unloaded for whom, and how the rest is divided."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.pool.memory import (
    FLOOR_PART,
    QUIET_SECONDS,
    SMALLEST_PART_BYTES,
    IdleLimit,
    ModelUse,
    PoolMemory,
    Pressure,
    choose_to_unload,
    divide,
    due_bytes,
)
from server.pool.names import ModelTooLarge

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


def test_nothing_is_unloaded_while_all_fit() -> None:
    assert choose_to_unload([loaded("a", 100, 1)], "b", 100 * MIB, AMPLE, None) == []


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
