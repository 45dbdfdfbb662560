"""What fits beside what, and who makes way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.pool.errors import ModelTooLarge
from server.pool.memory import SMALLEST_SHARE_BYTES, PoolMemory, Resident, choose_to_leave

MIB = 1 << 20
AMPLE = PoolMemory(1000 * MIB)


def resident(name: str, weights: int, last_used: float, *, is_busy: bool = False) -> Resident:
    return Resident(name, weights * MIB, last_used, is_busy)


def test_models_share_what_their_weights_leave() -> None:
    assert AMPLE.share_bytes([400 * MIB]) == 600 * MIB
    assert AMPLE.share_bytes([400 * MIB, 200 * MIB]) == 200 * MIB
    assert PoolMemory(1000 * MIB, 300 * MIB).share_bytes([1, 1, 1]) == 100 * MIB


def test_nothing_leaves_while_all_fit() -> None:
    assert choose_to_leave([resident("a", 100, 1)], "b", 100 * MIB, AMPLE, None) == []


def test_idle_models_go_first_and_of_these_the_one_used_longest_ago() -> None:
    residents = [resident("busy", 100, 1, is_busy=True), resident("new", 100, 3), resident("old", 100, 2)]
    assert choose_to_leave(residents, "x", 1, AMPLE, 3) == ["old"]
    assert choose_to_leave(residents, "x", 1, AMPLE, 2) == ["old", "new"]
    assert choose_to_leave(residents, "x", 1, AMPLE, 1) == ["old", "new", "busy"]


def test_a_small_model_stays_where_a_large_one_has_to_go_anyway() -> None:
    residents = [resident("small", 10, 1), resident("large", 800, 2)]
    assert choose_to_leave(residents, "x", 700 * MIB, AMPLE, None) == ["large"]


def test_a_model_that_does_not_fit_alone_is_refused_before_anything_leaves() -> None:
    with pytest.raises(ModelTooLarge, match=r"x take 1\.0 GB, and there is memory for"):
        choose_to_leave([resident("a", 1, 1)], "x", 990 * MIB, AMPLE, None)


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
    loaded: list[tuple[int, bool]], weights: int, max_models: int | None
) -> None:
    residents = [resident(str(i), size, i, is_busy=busy) for i, (size, busy) in enumerate(loaded)]
    leaving = choose_to_leave(residents, "x", weights * MIB, AMPLE, max_models)
    staying = [one for one in residents if one.id not in leaving]

    def fits(stay: list[Resident]) -> bool:
        sizes = [*(one.weights_bytes for one in stay), weights * MIB]
        return (max_models is None or len(sizes) <= max_models) and AMPLE.share_bytes(sizes) >= SMALLEST_SHARE_BYTES

    assert fits(staying)
    assert not any(fits([*staying, one]) for one in residents if one.id in leaving)
