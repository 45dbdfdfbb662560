"""A cache whose model comes and goes, and one whose budget changes."""

import numpy as np
import pytest

from cache.prefix_cache import PrefixCache
from cache.slots import CacheRequest, Lookup
from tests.support import cache_driver, fake_model

PROMPT = list(range(1, 60))


def make(layout: str, budget_bytes: int = 1 << 30) -> PrefixCache:
    return PrefixCache(lambda: fake_model.make_caches(layout), num_slots=2, budget_bytes=budget_bytes)


@pytest.mark.parametrize("layout", ["T", "TR", "TW"])
def test_a_parked_cache_refers_to_no_live_state_and_restores_all_of_it_later(layout: str) -> None:
    prefix_cache = make(layout)
    cache_driver.run(prefix_cache, PROMPT, [7, 8, 9], session_id="a")
    held = prefix_cache.stats()
    prefix_cache.park()
    prefix_cache.check()
    assert prefix_cache.stats().live_bytes == 0 and not any(slot.caches for slot in prefix_cache.slots)
    with pytest.raises(AssertionError, match="parked"):
        prefix_cache.begin(CacheRequest(Lookup(np.array(PROMPT, np.int32))))
    prefix_cache.resume(lambda: fake_model.make_caches(layout), held.budget_bytes)
    outcome = cache_driver.run(prefix_cache, [*PROMPT, 7, 8, 9, 70, 71], inspect=_holds_what_it_says)
    assert outcome.hit == len(PROMPT) + 3


def _holds_what_it_says(lease: object) -> None:
    slot = lease._slot  # type: ignore[attr-defined]
    fake_model.assert_holds(slot.caches, slot.log.view(0, slot.offset).tolist())


def test_a_smaller_budget_evicts_what_is_stored_and_a_larger_one_takes_more() -> None:
    prefix_cache = make("T")
    for first in range(100, 108):
        cache_driver.run(prefix_cache, [first, *PROMPT])
    charged = prefix_cache.ledger.charged_bytes
    assert prefix_cache.try_resize(charged // 2) == 0
    prefix_cache.check()
    assert prefix_cache.ledger.charged_bytes <= charged // 2 == prefix_cache.stats().budget_bytes
    assert prefix_cache.try_resize(charged) == 0
    assert prefix_cache.stats().budget_bytes == charged


def test_a_budget_below_what_a_request_holds_is_refused_and_changes_nothing_for_it() -> None:
    prefix_cache = make("T")
    before = prefix_cache.stats().budget_bytes
    refused: list[int] = []
    cache_driver.run(prefix_cache, PROMPT, inspect=lambda lease: refused.append(prefix_cache.try_resize(1)))
    assert refused[0] > 0
    assert prefix_cache.stats().budget_bytes == before
    assert prefix_cache.try_resize(1) == 0, "nothing runs any more"
