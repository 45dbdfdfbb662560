"""When memory is short, those who hold more than their share give first."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache import eviction, memory_tier
from cache.eviction import Candidate, FairQueue, over_share
from cache.memory_tier import PinName
from cache.prefix_cache import PrefixCache
from cache.slots import Lookup
from tests.support import cache_driver, fake_model

pytestmark = pytest.mark.usefixtures("exact_buffers")

BYTES_PER_TOKEN = 128
"""Of the fake layout T."""


@pytest.mark.parametrize(
    ("held", "over"),
    [
        ({}, set()),
        ({"a": 500}, set()),
        ({"a": 500, "b": 0}, set()),
        ({"a": 70, "b": 20}, {"a"}),
        ({"a": 50, "b": 50}, set()),
        ({"a": 51, "b": 49}, {"a"}),
        ({"a": 40, "b": 50, "c": 5}, {"a", "b"}),
    ],
)
def test_a_share_is_the_budget_among_those_who_hold_something(held: dict[str, int], over: set[str]) -> None:
    assert over_share(held, 100) == over


def candidate(key: str, last_used: int, num_bytes: int = 1) -> Candidate:
    return Candidate(key, num_bytes, num_tokens=1, last_used=last_used)


def popped(queue: FairQueue) -> list[str]:
    """Everything in the order in which it goes."""
    keys = []
    while (victim := queue.pop(100)) is not None:
        keys.append(victim.key)
    return keys


def test_without_anyone_over_its_share_the_oldest_goes_whoever_holds_it() -> None:
    queue = FairQueue(set)
    for name, time in (("a", 3), ("b", 1), ("a", 2), ("b", 4)):
        queue.push(name, candidate(f"{name}{time}", time))
    assert len(queue) == 4
    assert popped(queue) == ["b1", "a2", "a3", "b4"]
    assert len(queue) == 0 and queue.pop(100) is None


def test_those_over_their_share_go_first_for_as_long_as_they_are() -> None:
    held = {"greedy": 3, "modest": 2}
    queue = FairQueue(lambda: over_share(held, 4))
    for time in (1, 2):
        queue.push("modest", candidate(f"modest{time}", time))
    for time in (7, 8, 9):
        queue.push("greedy", candidate(f"greedy{time}", time))
    order = []
    while (victim := queue.pop(100)) is not None:
        order.append(victim.key)
        held[victim.key[:6]] -= 1
    assert order == ["greedy7", "modest1", "modest2", "greedy8", "greedy9"]


def test_candidates_that_are_all_within_their_share_go_when_nobody_else_has_any() -> None:
    queue = FairQueue(lambda: {"greedy"})
    queue.push("modest", candidate("modest", 1))
    assert popped(queue) == ["modest"]


def test_what_came_while_a_namespace_was_alone_is_ranked_with_what_comes_later() -> None:
    queue = FairQueue(lambda: {"greedy"})
    assert queue.pop(100) is None
    queue.push("greedy", candidate("greedy", 9))
    queue.push("modest", candidate("modest", 1))
    assert popped(queue) == ["greedy", "modest"]


@given(data=st.data())
def test_the_order_is_that_of_all_candidates_compared_one_by_one(data: st.DataObject) -> None:
    """Whatever is pushed between, whoever comes over its share meanwhile, and however the clock moves on."""
    over, now, left = set[str](), 100, list[Candidate]()
    queue = FairQueue(lambda: over)
    for number in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["push", "push", "pop", "over", "later"])):
            case "push":
                name = data.draw(st.sampled_from("abcd"))
                # All of one age, for which the order is exact, and no two of the same value.
                new = Candidate(f"{name}{number}", 1, data.draw(st.integers(0, 9)) * 100 + number, last_used=1)
                queue.push(name, new)
                left.append(new)
            case "over":
                over ^= {data.draw(st.sampled_from("abcd"))}
            case "later":
                now += 1
            case "pop":
                first = [one for one in left if one.key[0] in over] or left
                expected = min(first, key=lambda one: one.rank(now), default=None)
                assert queue.pop(now) is expected
                left = [one for one in left if one is not expected]
        assert len(queue) == len(left)


@given(data=st.data())
def test_a_sweep_removes_what_is_outdated_and_nothing_else(data: st.DataObject) -> None:
    queue, current = FairQueue(set), set[str]()
    for number in range(data.draw(st.integers(0, 200))):
        name, last_used = data.draw(st.sampled_from("ab")), data.draw(st.integers(0, 50))
        queue.push(name, candidate(f"{name}{number}", last_used))
        if data.draw(st.booleans()):
            current.add(f"{name}{number}")
        if number % 20 == 19:
            queue.sweep(lambda one: one.key in current, data.draw(st.integers(1, 30)))
            assert len(queue) >= len(current)
    queue.sweep(lambda one: one.key in current, 0)
    queue.sweep(lambda one: one.key in current, 10_000)
    assert len(queue) == len(current)
    assert sorted(popped(queue)) == sorted(current)


def test_a_sweep_looks_at_no_more_than_it_has_to() -> None:
    queue = FairQueue(set)
    for time in range(10_000):
        queue.push("a", candidate(str(time), time))
    seen = list[Candidate]()

    def is_current(one: Candidate) -> bool:
        seen.append(one)
        return False

    queue.pop(10_000)  # joins what is of about one age
    queue.sweep(is_current, 100)
    assert 100 <= len(seen) <= 100 + eviction.MAX_JOINED
    assert len(queue) == 9999 - len(seen)


def test_sweeps_of_a_few_reach_all_in_turn() -> None:
    queue = FairQueue(set)
    for time in range(10):
        queue.push("a", candidate(str(time), time))
    for _ in range(10):
        queue.sweep(lambda one: one.key == "0", 1)
    assert popped(queue) == ["0"]


def test_one_who_fills_the_memory_does_not_drive_out_the_others() -> None:
    """Twenty conversations of one namespace take turns; another's only one, older than all, stays."""
    prefix_cache = PrefixCache(lambda: fake_model.make_caches("T"), num_slots=1, budget_bytes=1000 * BYTES_PER_TOKEN)
    quiet = list(range(1, 101))
    cache_driver.run(prefix_cache, quiet, namespace="quiet")
    for number in range(1, 40):
        cache_driver.run(prefix_cache, range(1000 * number, 1000 * number + 100), namespace="busy")
    assert prefix_cache.memory.evictions["busy"] > 0 == prefix_cache.memory.evictions["quiet"]
    assert prefix_cache.peek(Lookup(np.array([*quiet, 9], np.int32), namespace="quiet")) == 100


def test_namespaces_are_bounded_in_number_and_the_idle_ones_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_tier, "MAX_NAMESPACES", 8)
    cache = PrefixCache(lambda: fake_model.make_caches("T"), num_slots=2, budget_bytes=1 << 30)
    prompt = [1, 2, 3, 4, 5]
    cache_driver.run(cache, prompt, namespace="pinned")
    cache.pins.pin(PinName("pinned", "s"), np.array(prompt, np.int32))
    for number in range(50):
        cache_driver.run(cache, prompt, namespace=f"key {number}")
        cache_driver.run(cache, prompt, namespace="busy")
        if number % 3 == 0:  # between two of these other sequences have its slot
            assert cache.peek(Lookup(np.array([*prompt, 9], np.int32), namespace="regular")) == (
                len(prompt) if number else 0
            )
            cache_driver.run(cache, prompt, namespace="regular")
        assert len(cache.memory.tries) <= 8 + 1
    assert len(cache.memory.evictions) <= 8 + 1
    assert cache.peek(Lookup(np.array([*prompt, 9], np.int32), namespace="busy")) == len(prompt)
    assert cache.peek(Lookup(np.array([*prompt, 9], np.int32), namespace="pinned")) == len(prompt)
    assert cache.peek(Lookup(np.array([*prompt, 9], np.int32), namespace="key 1")) == 0
    cache.check()
