"""Pins: what must not be evicted, for how long, and how much of it there may be."""

import random

import numpy as np
import pytest

from cache.budget import PinLimit, PinnedFull
from cache.memory_tier import PinName
from cache.prefix_cache import PrefixCache
from cache.slots import CacheRequest, Lookup
from cache.types import TokenArray
from tests.cache.worlds import FakeWorld
from tests.support import cache_driver, fake_model
from tests.support.fake_model import WINDOW

pytestmark = pytest.mark.usefixtures("exact_buffers")

BYTES_PER_TOKEN = 128
"""Of the fake layout T."""
SESSION = PinName("", "s")
TURN = PinName("", "s", is_soft=True)


def story(number: int, length: int = 100) -> list[int]:
    """A conversation unlike all others."""
    return list(range(1000 * number, 1000 * number + length))


def array(tokens: list[int]) -> TokenArray:
    return np.array(tokens, np.int32)


def calibrated(num_tokens: int, *, num_slots: int = 1, layout: str = "T") -> PrefixCache:
    """A cache with a budget of so many tokens."""
    prefix_cache = PrefixCache(
        lambda: fake_model.make_caches(layout), num_slots=num_slots, budget_bytes=num_tokens * BYTES_PER_TOKEN
    )
    sample = fake_model.make_caches(layout)
    fake_model.evaluate(sample, fake_model.tokens_of(1, 2))
    prefix_cache.layout.calibrate(sample)
    return prefix_cache


def known(prefix_cache: PrefixCache, tokens: list[int]) -> int:
    """How many tokens of a conversation can be restored."""
    return prefix_cache.peek(Lookup(array([*tokens, 1])))


def fill(prefix_cache: PrefixCache, first: int = 50, count: int = 20) -> None:
    """Runs other conversations until everything that may go is gone."""
    for number in range(first, first + count):
        cache_driver.run(prefix_cache, story(number), session_id=f"filler {number}")


def test_at_most_half_of_the_budget_is_pinned_and_a_session_that_outgrows_it_keeps_its_head() -> None:
    prefix_cache = calibrated(460, num_slots=2)
    for number in (1, 2, 3):
        cache_driver.run(prefix_cache, story(number), session_id=str(number))
    for number in (1, 2):
        prefix_cache.pins.pin(PinName("", str(number)), array(story(number)))
    with pytest.raises(PinLimit) as refusal:
        prefix_cache.pins.pin(PinName("", "3"), array(story(3)))
    assert f"at most {230 * BYTES_PER_TOKEN / 1e6:.1f} MB may be" in str(refusal.value)
    prefix_cache.pins.pin(PinName("", "1"), array(story(1)))  # pinned again, it counts once
    cache_driver.run(prefix_cache, [*story(1), *story(4, 60)], session_id="1")
    fill(prefix_cache)
    assert known(prefix_cache, story(1)) == 100
    assert known(prefix_cache, [*story(1), *story(4, 60)]) == 100


def test_a_soft_pin_ends_with_its_time() -> None:
    prefix_cache = calibrated(500)
    cache_driver.run(prefix_cache, story(1))
    prefix_cache.pins.pin(TURN, array(story(1)), 120.0)
    prefix_cache.pins.release_expired(119.0)
    fill(prefix_cache)
    assert known(prefix_cache, story(1)) == 100
    prefix_cache.pins.release_expired(120.0)
    fill(prefix_cache, 100)
    assert known(prefix_cache, story(1)) == 0


def test_a_soft_pin_gives_way_to_a_request_that_would_have_to_wait() -> None:
    prefix_cache = calibrated(500)
    cache_driver.run(prefix_cache, story(1))
    prefix_cache.pins.pin(TURN, array(story(1)), 120.0)
    lease = prefix_cache.begin(CacheRequest(Lookup(array(story(2, 450)))))
    assert lease is not None
    assert prefix_cache.ledger.charged_bytes <= prefix_cache.ledger.budget_bytes
    lease.close()
    assert known(prefix_cache, story(1)) == 0


def test_an_explicit_pin_refuses_what_needs_its_memory_and_the_refusal_changes_nothing() -> None:
    prefix_cache = calibrated(500, num_slots=2)
    cache_driver.run(prefix_cache, story(1), session_id="s")
    prefix_cache.pins.pin(SESSION, array(story(1)))
    with pytest.raises(PinnedFull, match="unpin"):
        prefix_cache.begin(CacheRequest(Lookup(array(story(2, 450)))))
    prefix_cache.check()
    assert known(prefix_cache, story(1)) == 100
    assert not any(slot.is_leased for slot in prefix_cache.slots)
    cache_driver.run(prefix_cache, [*story(1), *story(2, 380)], session_id="s")  # its own end needs no other memory


def test_a_namespace_is_cleared_with_its_pins_and_others_are_not() -> None:
    prefix_cache = calibrated(2000, num_slots=2)
    ours, theirs = PinName("ours", "s"), PinName("theirs", "s")
    for name in (ours, theirs):
        cache_driver.run(prefix_cache, story(1), namespace=name.namespace, session_id="s")
        prefix_cache.pins.pin(name, array(story(1)))
    prefix_cache.clear("ours")
    prefix_cache.check()
    assert not prefix_cache.pins.release(ours) and prefix_cache.pins.release(theirs)
    assert prefix_cache.peek(Lookup(array([*story(1), 1]), namespace="ours")) == 0
    assert prefix_cache.peek(Lookup(array([*story(1), 1]), namespace="theirs")) == 100


@pytest.mark.parametrize("layout", ["W", "C", "WR"])
@pytest.mark.parametrize("seed", range(8))
def test_an_offset_inside_an_edge_that_is_pinned_stays_restorable(layout: str, seed: int) -> None:
    """The rows of the window before it lie on nodes above, more of them than a pin holds by itself."""
    draw = random.Random(seed)
    world = FakeWorld(layout, num_slots=1)
    points = sorted(draw.sample(range(2, WINDOW + 8), draw.randrange(1, 12)))
    edge_tokens = draw.randrange(3, WINDOW) if seed % 2 else WINDOW  # the latter needs no rows above for its end
    length = points[-1] + edge_tokens + 1
    world.request(story(1, length), explicit=points)
    branch = draw.randrange(1, length)
    world.request([*story(1, branch), *story(2, 5)])
    cut = draw.randrange(points[-1] + 1, length - 1)
    world.prefix_cache.pins.pin(SESSION, array(story(1, cut)))
    before = known(world.prefix_cache, story(1, cut))
    assert before >= points[-1]
    evict_all(world.prefix_cache)
    assert known(world.prefix_cache, story(1, cut)) == before
    assert known(world.prefix_cache, [*story(1, branch), *story(2, 5)]) <= branch


def evict_all(prefix_cache: PrefixCache) -> None:
    """Evicts everything that may go."""
    for slot in prefix_cache.slots:
        prefix_cache.pager.page_out(slot, 0)
    prefix_cache.memory.evict(0, ())
    prefix_cache.check()
