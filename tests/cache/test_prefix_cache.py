"""Single facts about the prefix cache that histories and scenarios do not name."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cache import pager
from cache.budget import EvictionReason
from cache.layers import layout as layout_module
from cache.layers import state
from cache.lease import Lease
from cache.prefix_cache import PrefixCache
from cache.slots import CacheRequest, Lookup
from cache.snapshots import RestorePoint, RestorePointKind
from cache.trie import Snapshot
from cache.types import TokenArray
from tests.support import cache_driver, fake_model

pytestmark = pytest.mark.usefixtures("exact_buffers")


def make(layout: str = "T", *, num_slots: int = 2, budget_bytes: int = 1 << 30) -> PrefixCache:
    return PrefixCache(lambda: fake_model.make_caches(layout), num_slots=num_slots, budget_bytes=budget_bytes)


def begin(prefix_cache: PrefixCache, tokens: Sequence[int], namespace: str = "", **options: Any) -> Lease:
    lease = prefix_cache.begin(CacheRequest(Lookup(np.array(tokens, np.int32), namespace=namespace), **options))
    assert lease is not None
    return lease


def evaluate(lease: Lease, tokens: TokenArray | Sequence[int]) -> None:
    fake_model.evaluate(lease.caches, np.array(tokens, np.int32))
    lease.advance(np.array(tokens, np.int32))


def test_a_very_long_conversation_can_be_discarded() -> None:
    """More turns than the interpreter nests calls."""
    prefix_cache = make("R")
    points = [RestorePoint(offset, RestorePointKind.USER_START) for offset in range(1, 1500)]
    prompt = list(range(1, 1502))
    lease = begin(prefix_cache, prompt, restore_points=points)
    for offset in range(1500):
        lease._slot.log.append(np.array([prompt[offset]], np.int32))
        lease._commit()
        prefix_cache.pager.trie("").snap(lease._slot.tip, fake_snapshot(offset + 1))
    assert prefix_cache.stats().num_nodes == 1500
    lease.discard()
    prefix_cache.check()
    assert prefix_cache.stats().num_nodes == 0


def fake_snapshot(offset: int) -> Any:
    return Snapshot(offset, None, None)


def test_a_restore_point_without_memory_costs_no_other() -> None:
    """All that may be evicted is less than the point takes: the point is given up, and the earlier ones stay."""
    prefix_cache, other, own = make("R", num_slots=1), list(range(101, 141)), list(range(1, 41))
    cache_driver.run(prefix_cache, other)
    lease = begin(prefix_cache, [*own, *range(41, 61)])
    for offset in (10, 20, 30):
        evaluate(lease, own[lease.offset : offset])
        lease.keep(RestorePointKind.TURN_END)
    evaluate(lease, own[30:])
    ledger = prefix_cache.ledger
    ledger.budget_bytes = ledger.charged_bytes - ledger.stored_bytes
    before = [(node.stop, node.last_used, node.snapshot) for node in prefix_cache.memory.nodes() if node.snapshot]
    lease.keep(RestorePointKind.TURN_END)
    after = [(node.stop, node.last_used, node.snapshot) for node in prefix_cache.memory.nodes() if node.snapshot]
    assert len(before) >= 4 and after == before
    prefix_cache.check()


@pytest.mark.parametrize(("asked_for", "kept"), [(97, 97), (100, 99), (30, 99)])
def test_a_prompts_end_is_kept_once(asked_for: int, kept: int) -> None:
    """Clients' prompts end with a few tokens that ask for the answer, and the next prompt may not have them."""
    prefix_cache, tokens = make("R", num_slots=1), list(range(1, 101))
    lease = begin(prefix_cache, tokens, restore_points=[RestorePoint(asked_for, RestorePointKind.PROMPT_END)])
    cache_driver.prefill(lease, np.array(tokens, np.int32), fake_model.evaluate)
    offsets = [node.stop for node in prefix_cache.memory.nodes() if node.snapshot is not None]
    assert max(offsets) == kept
    assert sum(offset > 30 for offset in offsets) == 1


@pytest.mark.parametrize("is_short", [False, True])
def test_a_restore_point_never_exceeds_the_budget(is_short: bool) -> None:
    prefix_cache = make("TR", num_slots=1)
    lease = begin(prefix_cache, [1, 2, 3])
    evaluate(lease, [1])
    before = lease._slot.tip.kind, lease._slot.tip.is_explicit
    if is_short:
        prefix_cache.ledger.budget_bytes = prefix_cache.ledger.charged_bytes
    lease.keep(RestorePointKind.EXPLICIT)
    kept = before if is_short else (RestorePointKind.EXPLICIT, True)
    assert (lease._slot.tip.kind, lease._slot.tip.is_explicit) == kept, "a refused point leaves its node as it was"
    assert prefix_cache.ledger.excess_bytes() <= 0
    assert prefix_cache.peek(Lookup(fake_model.tokens_of(1, 9))) == (0 if is_short else 1)
    prefix_cache.check()


BYTES_PER_TOKEN = 128
"""Of the fake layout T."""


def calibrated(num_tokens: float, *, num_slots: int) -> PrefixCache:
    """Returns a cache of attention layers with a budget of so many tokens."""
    prefix_cache = make(num_slots=num_slots, budget_bytes=int(num_tokens * BYTES_PER_TOKEN))
    sample = fake_model.make_caches("T")
    fake_model.evaluate(sample, fake_model.tokens_of(1, 2))
    prefix_cache.layout.calibrate(sample)
    return prefix_cache


def test_a_prompt_that_fits_is_taken_however_long_its_answer_may_become() -> None:
    prefix_cache = calibrated(100, num_slots=1)
    lease = begin(prefix_cache, range(1, 60), expected_tokens=60)
    assert prefix_cache.ledger.charged_bytes <= prefix_cache.ledger.budget_bytes
    lease.close()


ALLOCATIONS = [
    (layout_module, "_with_spare_rows"),
    (layout_module, "owned"),
    (layout_module, "packed"),
    (state, "owned"),
    (state, "_joined"),
    (state, "_copied"),
]
"""Every place where rows or states are copied, by who calls it."""


@pytest.mark.parametrize("layout", fake_model.MORE_LAYOUTS)
@pytest.mark.parametrize(("module", "operation"), ALLOCATIONS)
def test_a_failing_allocation_fails_one_request(
    layout: str, module: ModuleType, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operation n fails, for every n until none fails any more; whatever happened, what is left is right."""
    real = getattr(module, operation)
    number = 0
    while True:
        number += 1
        countdown = number

        def failing(*args: Any, **options: Any) -> Any:
            nonlocal countdown
            countdown -= 1
            if countdown == 0:
                raise RuntimeError("out of memory")
            return real(*args, **options)

        prefix_cache = make(layout)
        with monkeypatch.context() as patch:
            patch.setattr(module, operation, failing)
            num_failed = sum(not try_to_run(prefix_cache, prompt) for prompt in SWITCHES)
        fake_model.assert_bytes_known(prefix_cache)
        fake_model.assert_stored_right(prefix_cache)
        for prompt in SWITCHES:
            cache_driver.run(prefix_cache, prompt, inspect=holds(prompt))
        prefix_cache.clear()
        assert prefix_cache.stats().num_nodes == 0
        if num_failed == 0:
            return


SWITCHES = ([1, 2, 3, 4], [1, 2, 5, 6, 7], [1, 2, 3, 4, 8, 9], [7, 7], [1, 2, 5, 6, 7, 8], [1, 2, 3, 4, 8], [1, 2, 9])


def holds(prompt: list[int]) -> Callable[[Lease], None]:
    return lambda lease: fake_model.assert_holds(lease.caches, prompt)


def try_to_run(prefix_cache: PrefixCache, prompt: list[int]) -> bool:
    """Runs a request as the engine does: whatever fails, a lease that was opened is discarded."""
    tokens = np.array(prompt, np.int32)
    try:
        lease = begin(prefix_cache, prompt)
    except RuntimeError:
        prefix_cache.check()
        return False
    try:
        cache_driver.prefill(lease, tokens, fake_model.evaluate)
        fake_model.evaluate(lease.caches, tokens[-1:])
        lease.append(prompt[-1])
        holds(prompt)(lease)
    except RuntimeError:
        lease.discard()
        prefix_cache.check()
        return False
    try:
        lease.close()
    except RuntimeError:
        return False
    finally:
        prefix_cache.check()
        assert not any(slot.is_leased for slot in prefix_cache.slots)
    return True


def test_what_a_request_is_about_to_restore_is_not_evicted_for_it() -> None:
    prefix_cache = calibrated(1300, num_slots=1)
    oldest, newer, newest = ([*range(first, first + 400)] for first in (1, 1000, 2000))
    for tokens in (oldest, newer, newest):
        cache_driver.run(prefix_cache, tokens)
    assert cache_driver.run(prefix_cache, [*oldest, *range(5000, 5200)]).hit == 400
    assert prefix_cache.peek(Lookup(np.array([*newer, 1], np.int32))) == 256, (
        "the end of the oldest but one had to go"
    )
    assert prefix_cache.peek(Lookup(np.array([*newest, 1], np.int32))) == 400


def test_window_rows_that_another_snapshot_leans_on_outlive_the_state_beside_them() -> None:
    prefix_cache = make("WR", num_slots=1)
    prompt = [*range(1, 31)]
    cache_driver.run(prefix_cache, prompt, explicit=(10, 20))
    cache_driver.run(prefix_cache, [500, 501])
    trie = prefix_cache.pager.trie("")
    first, second = trie.match(np.array(prompt, np.int32)).node.path()[:2]
    assert (first.stop, second.stop) == (10, 20)
    prefix_cache.memory._evict(first, (), EvictionReason.MEMORY)
    prefix_cache.check()
    assert isinstance(first.snapshot, Snapshot)
    assert first.snapshot.recurrent is None
    fake_model.assert_bytes_known(prefix_cache)
    assert prefix_cache.peek(Lookup(np.array([*prompt[:10], 99], np.int32))) == 0
    changed = [*prompt[:20], 99]
    assert cache_driver.run(prefix_cache, changed, inspect=holds(changed)).hit == 20


def test_a_large_page_out_leaves_nothing_in_the_pool_of_freed_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    prefix_cache, cleared = make(), list[int]()
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(prefix_cache.ledger.live_bytes))
    for limit, expected in ((pager.CLEAR_BYTES, []), (1, [0])):
        monkeypatch.setattr(pager, "CLEAR_BYTES", limit)
        cache_driver.run(prefix_cache, list(range(1, 90)))
        prefix_cache.pager.page_out_idle(0, None)
        assert cleared == expected, "the pool is emptied once the live buffers are freed, and for large ones only"


PROMPT = list(range(1, 60))


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


def test_a_budget_below_what_a_request_holds_is_refused_and_changes_nothing_for_it() -> None:
    prefix_cache = make("T")
    before = prefix_cache.stats().budget_bytes
    refused: list[int] = []
    cache_driver.run(prefix_cache, PROMPT, inspect=lambda lease: refused.append(prefix_cache.try_resize(1)))
    assert refused[0] > 0
    assert prefix_cache.stats().budget_bytes == before
    assert prefix_cache.try_resize(1) == 0, "nothing runs any more"
