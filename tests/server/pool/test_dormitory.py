"""What stays of the conversations of unloaded models."""

from collections.abc import Sequence

import pytest

from cache.prefix_cache import PrefixCache
from server.engine.engine import DormantState
from server.engine.sequence_table import EngineSessions
from server.pool.members import Dormitory
from tests.support import cache_driver, fake_model


def state_of(prompts: Sequence[Sequence[int]]) -> DormantState:
    prefix_cache = PrefixCache(lambda: fake_model.make_caches("T"), num_slots=2, budget_bytes=1 << 30)
    for prompt in prompts:
        cache_driver.run(prefix_cache, prompt)
    prefix_cache.park()
    return DormantState(prefix_cache, EngineSessions(prefix_cache), "")


def conversations(count: int) -> list[list[int]]:
    return [[first, *range(1, 40)] for first in range(100, 100 + count)]


def test_state_is_given_back_to_its_own_model_once() -> None:
    dormitory, state = Dormitory(), state_of(conversations(2))
    dormitory.keep("a", state, 1 << 30)
    assert dormitory.num_bytes == state.num_bytes > 0
    assert dormitory.take("b") is None
    assert dormitory.take("a") is state
    assert dormitory.take("a") is None and dormitory.num_bytes == 0


def test_what_was_unloaded_first_gives_way(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    dormitory, first, second = Dormitory(), state_of(conversations(4)), state_of(conversations(4))
    given_up: list[str] = []
    dormitory.on_given_up = given_up.append
    dormitory.keep("first", first, 1 << 30)
    dormitory.keep("second", second, second.num_bytes + 1)
    assert given_up == ["first"]
    assert "first" not in dormitory and "second" in dormitory
    assert first.num_bytes == 0, "it was let go of, but not dropped"
    assert "conversations of first are given up" in caplog.text


def test_the_only_state_is_cut_down_to_what_may_stay() -> None:
    dormitory, state = Dormitory(), state_of(conversations(8))
    given_up: list[str] = []
    dormitory.on_given_up = given_up.append
    limit = state.num_bytes // 2
    dormitory.keep("a", state, limit)
    assert 0 < dormitory.num_bytes <= limit
    dormitory.keep("b", state_of(conversations(3)), 0)
    assert dormitory.num_bytes == 0 and "b" not in dormitory
    assert given_up[-1] == "b"
