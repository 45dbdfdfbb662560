"""What is given up first when memory is short, seen from outside: conversations that come back or do not."""

import numpy as np
import pytest

from cache.prefix_cache import PrefixCache
from tests import cache_driver, fake_model

pytestmark = pytest.mark.usefixtures("exact_buffers")

BYTES_PER_TOKEN = 128
"""Of the fake layout T."""


def cache_of(num_tokens: int) -> PrefixCache:
    """A cache for a model of attention layers that holds so many tokens; buffers may be larger than their content."""
    prefix_cache = PrefixCache(
        lambda: fake_model.make_caches("T"), num_slots=1, budget_bytes=int(1.1 * num_tokens) * BYTES_PER_TOKEN
    )
    sample = fake_model.make_caches("T")
    fake_model.evaluate(sample, fake_model.tokens_of(1, 2))
    prefix_cache.calibrate(sample)
    return prefix_cache


def story(number: int) -> list[int]:
    """A conversation of 100 tokens unlike all others."""
    return list(range(1000 * number, 1000 * number + 100))


def known(prefix_cache: PrefixCache, number: int) -> int:
    return prefix_cache.peek(np.array([*story(number), 1], np.int32))


def test_prompts_without_a_session_do_not_drive_out_a_conversation() -> None:
    prefix_cache = cache_of(500)
    cache_driver.run(prefix_cache, story(1), session_id="a")
    for number in range(50, 60):
        cache_driver.run(prefix_cache, story(number))
    assert known(prefix_cache, 1) == 100
    assert known(prefix_cache, 50) == 0


def test_a_conversation_without_a_session_is_one_once_it_has_gone_on() -> None:
    prefix_cache = cache_of(600)
    cache_driver.run(prefix_cache, story(1))
    cache_driver.run(prefix_cache, [*story(1), *story(2)])
    for number in range(50, 60):
        cache_driver.run(prefix_cache, story(number))
    assert known(prefix_cache, 1) == 100
    assert known(prefix_cache, 50) == 0


def test_what_a_session_left_behind_goes_before_an_older_session() -> None:
    prefix_cache = cache_of(500)
    for number, session_id in enumerate(("old", "busy", "busy", "third", "fourth", "fifth"), 1):
        cache_driver.run(prefix_cache, story(number), session_id=session_id)
    assert [known(prefix_cache, number) for number in range(1, 7)] == [100, 0, 100, 100, 100, 100]


def test_among_equals_the_oldest_goes() -> None:
    prefix_cache = cache_of(300)
    for number in range(1, 5):
        cache_driver.run(prefix_cache, story(number), session_id=str(number))
    assert [known(prefix_cache, number) for number in range(1, 5)] == [0, 100, 100, 100]
