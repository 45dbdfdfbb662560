"""Sequences that share their first tokens hold these once: who does, what that saves, and what is left of it."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache import reclaim
from cache.disk import connector
from cache.layers import kinds, layout
from cache.lease import Lease
from cache.prefix_cache import PrefixCache
from cache.slots import CacheRequest, Lookup, Slot
from cache.snapshots import RestorePoint, RestorePointKind
from tests.cache.worlds import RealWorld
from tests.support import cache_driver, fake_model
from tests.support.disk_driver import open_tier
from tests.support.fake_runner import SharesNothing

# isort: split

pytestmark = pytest.mark.usefixtures("exact_buffers")

STEP = 8
HEAD = [int(token) for token in np.random.default_rng(1).integers(1, 9, 400)]


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reclaim, "MIN_HEAD_TOKENS", 64)
    monkeypatch.setattr(layout, "GROWTH_TOKENS", STEP)


class Shares(SharesNothing):
    def __init__(self, head_tokens: float | None) -> None:
        self.head_tokens = head_tokens


def make(head_tokens: float | None = 64, *, kind: str = "T", num_slots: int = 8, **options: Any) -> PrefixCache:
    cache = PrefixCache(lambda: fake_model.make_caches(kind), num_slots=num_slots, budget_bytes=1 << 30, **options)
    sample = fake_model.make_caches(kind)
    fake_model.evaluate(sample, fake_model.tokens_of(1, 2, 3))
    cache.layout.calibrate(sample)
    cache.pager.shared = Shares(head_tokens)
    return cache


def readers(cache: PrefixCache, head: Slot) -> list[Slot]:
    return [slot for slot in cache.slots if slot.head is head]


def run(cache: PrefixCache, prompt: Sequence[int], *, reuse: bool = True, **options: Any) -> Lease:
    """Begins a request and evaluates its prompt."""
    tokens = np.array(prompt, np.int32)
    lease = cache.begin(CacheRequest(Lookup(tokens, reuse=reuse), **options))
    assert lease is not None
    cache_driver.prefill(lease, tokens, fake_model.evaluate)
    assert_right(cache, lease, prompt[:-1])
    return lease


def assert_right(cache: PrefixCache, lease: Lease, tokens: Sequence[int]) -> None:
    cache.check()
    fake_model.assert_holds(lease.caches, tokens)
    fake_model.assert_stored_right(cache)


def told_apart(number: int) -> list[int]:
    return [*HEAD, 10 + number, *range(20, 24), 1]


def slot_of(cache: PrefixCache, lease: Lease) -> Slot:
    return cache.slots[lease.slot_index]


def test_short_of_memory_copies_become_a_head_before_anything_is_given_up() -> None:
    cache = make(None)
    idle = run(cache, [9, *HEAD[:50]])
    idle.close()
    stored = run(cache, [8, *HEAD[:50]])
    stored.close()
    cache.pager.page_out(slot_of(cache, stored), 0)
    leases = [run(cache, told_apart(number)) for number in range(3)]
    before, cache.ledger.budget_bytes = cache.ledger.charged_bytes, cache.ledger.charged_bytes
    cache.pager.shared = Shares(math.inf)
    assert leases[2].try_grow(1000)
    (head,) = cache.pager.heads
    saved = 2 * head.offset * cache.layout.bytes_per_token
    assert cache.ledger.charged_bytes <= before - saved + 2 * STEP * cache.layout.bytes_per_token
    assert cache.memory.num_evictions == 0 and slot_of(cache, idle).offset == 50, "state was given up too early"
    for number, lease in enumerate(leases):
        assert_right(cache, lease, told_apart(number)[:-1])


def test_what_must_wait_evicts_nothing() -> None:
    cache = make(math.inf)
    stored = run(cache, [9, *HEAD[:50]])
    stored.close()
    cache.pager.page_out(slot_of(cache, stored), 0)
    for number in range(2):
        run(cache, told_apart(number))
    cache.reclaimer.gather(is_short=True)
    cache.ledger.budget_bytes = cache.ledger.charged_bytes
    assert cache.begin(CacheRequest(Lookup(np.array([8, *HEAD], np.int32)))) is None
    assert not cache.reclaimer.try_set_aside(len(HEAD))
    assert cache.memory.num_evictions == 0 and cache.peek(Lookup(np.array([9, *HEAD[:50], 1], np.int32))) == 50
    assert cache.begin(CacheRequest(Lookup(np.array([8, *HEAD[:40]], np.int32)))) is not None
    assert 0 < cache.peek(Lookup(np.array([9, *HEAD[:50], 1], np.int32))) < 50


def test_the_state_at_a_heads_end_stays_while_the_head_is_read() -> None:
    """Its rows stay anyway, and without that state nobody else could begin with them."""
    cache, point = make(kind="TR"), RestorePoint(len(HEAD), RestorePointKind.SYSTEM_END)
    leases = [run(cache, told_apart(number), restore_points=[point]) for number in range(2)]
    newcomer = np.array(told_apart(2), np.int32)
    cache.memory.evict(0, ())
    assert cache.peek(Lookup(newcomer)) == len(HEAD)
    for lease in leases:
        lease.close()
        cache.pager.page_out(slot_of(cache, lease), 0)
    cache.pager.page_out_heads()
    cache.memory.evict(0, ())
    assert cache.peek(Lookup(newcomer)) == 0
    cache.check()


def test_the_greatest_saving_is_chosen_and_short_heads_are_none() -> None:
    cache = make(None)
    for number, length in enumerate([390, 390, 100, 100, 100, reclaim.MIN_HEAD_TOKENS - 1]):
        run(cache, [*HEAD[:length], 10 + number, 20, 21])
    cache.pager.shared = Shares(math.inf)
    cache.reclaimer.gather(is_short=True, target_bytes=cache.ledger.charged_bytes - 1)
    cache.check()
    assert [(head.offset, len(readers(cache, head))) for head in cache.pager.heads] == [(100, 5)]
    cache.reclaimer.gather(is_short=True)
    assert len(cache.pager.heads) == 1


@pytest.mark.parametrize("cut", ["a row's tail", "the buffers that rows share"])
def test_an_error_in_a_cut_loses_that_sequence_alone(cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for at in range(1, 100):
        cache, fault = make(None), Fault(at)
        leases = [run(cache, told_apart(number)) for number in range(4)]
        cache.pager.shared = shared = Shares(64)
        if cut == "a row's tail":
            monkeypatch.setattr(kinds, "_rest", fault.before(HEADED_REST))
        else:
            monkeypatch.setattr(shared, "separate", fault.before(shared.separate))
        cache.reclaimer.gather(is_short=False)
        lost = [lease for lease in leases if lease.is_lost]
        if not lost:
            assert at > 4
            return
        assert len(lost) == 1
        fault.at = 0
        lost[0].append(1)
        assert lost[0].try_grow(1000) and lost[0].offset == 0
        cache.check()
        lost[0].discard()
        again = run(cache, told_apart(leases.index(lost[0])))
        for number, lease in enumerate(leases):
            lease = again if lease is lost[0] else lease
            assert_right(cache, lease, told_apart(number)[:-1])
            lease.close()
        cache.check()


def fail_when_short(cache: PrefixCache, leases: Sequence[Lease]) -> None:
    """The next to need memory has rows leave buffers, which fails: a row that is to share a head is then lost."""
    cache.pager.shared = shared = Shares(math.inf)
    shared.padding_bytes = 4096
    cache.pager.measure_running()

    def fail(*_: object) -> None:
        raise MemoryError

    shared.separate_all = shared.separate = fail  # type: ignore[assignment, method-assign]
    cache.ledger.budget_bytes = cache.ledger.charged_bytes + 64


def test_a_newcomer_survives_that_freeing_memory_loses_what_it_was_to_begin_with() -> None:
    cache = make(None)
    leases = [run(cache, [*HEAD[:300], 10 + number, 20, 21]) for number in range(2)]
    fail_when_short(cache, leases)
    newcomer = run(cache, [*HEAD[:50], 9, 8, 7])
    assert newcomer.hit_tokens == 0 and all(lease.is_lost for lease in leases)


def test_a_newcomer_survives_that_freeing_memory_loses_what_a_read_was_to_extend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector, "MIN_RESTORE_TOKENS", 8)
    tier = open_tier(tmp_path)
    cache, story = make(None, disk=tier), [*HEAD[:100], *([9] * 200)]
    run(cache, story).close()
    cache.pager.page_out(cache.slots[0], 0)
    cache.memory.evict(0, ())
    assert tier.flush(120)
    leases = [run(cache, [*HEAD[:90], 10 + number, *([20 + number] * 200)]) for number in range(2)]
    fail_when_short(cache, leases)
    newcomer = run(cache, [*story, 1])
    assert newcomer.hit_tokens == len(story) - 1 and any(lease.is_lost for lease in leases)
    cache.end(120)


HEADED_REST = kinds._rest


class Fault:
    def __init__(self, at: int) -> None:
        self.at = at

    def before(self, act: Callable[..., Any]) -> Callable[..., Any]:
        """As `act`, but fails when it is called for the n-th time."""

        def do(*arguments: object) -> Any:
            self.at -= 1
            if self.at == 0:
                raise MemoryError
            return act(*arguments)

        return do


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5", "falcon_h1"])
def test_real_models_restore_on_a_head_what_a_cold_run_has(name: str) -> None:
    world = RealWorld(name, num_slots=3)
    cache = world.prefix_cache
    tokens = [int(token) for token in np.random.default_rng(2).integers(1, 99, 90)]
    caches = world.make_caches()
    world.evaluate(caches, np.array(tokens[:5], np.int32))
    cache.layout.calibrate(caches)
    cache.pager.shared = Shares(16)
    world.request(tokens[:70], explicit=[60])
    first = np.array([*tokens[:60], 5, 6, 7], np.int32)
    lease = cache.begin(CacheRequest(Lookup(first)))
    assert lease is not None and lease.hit_tokens == 60
    cache_driver.prefill(lease, first, world.evaluate)
    for number in range(2):
        world.logits.clear()
        assert world.request([*tokens[:60], 8 + number, 8, *tokens[60:]], [3, 4]) == 32
    assert [head.offset for head in cache.pager.heads] == [60]
    world.evaluate(lease.caches, first[-1:])
    lease.append(7)
    world.assert_right(lease, first.tolist(), 0)
    lease.close()
    cache.check()
