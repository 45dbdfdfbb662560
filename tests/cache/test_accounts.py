"""Who holds how much: shares where memory is short, live bytes never above what was counted, and what is shown."""

from collections.abc import Sequence
from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache import eviction, memory_tier, views
from cache.disk.tier import DiskTier
from cache.eviction import Candidate, FairQueue, over_share
from cache.lease import Lease
from cache.memory_tier import PinName
from cache.prefix_cache import PrefixCache
from cache.slots import CacheRequest, Lookup
from cache.types import LayerCache, TokenArray
from tests.cache.worlds import RealWorld
from tests.support import cache_driver, fake_model, tiny_models
from tests.support.cache_driver import prefill
from tests.support.fake_model import LAYOUTS

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


W = tiny_models.WINDOW
WINDOW_MODELS = ("llama_swa", "gemma3", "gpt_oss", "llama4", "gemma4", "gemma3n")
CHUNKS = (1, 7, W, 300)
"""A token, shorter than a window, as long, and longer than the steps in which buffers grow."""
ONE_OF_A_CLASS = ("llama_swa", "llama4")
"""One model for each class of windows: the steps differ by class alone. All models are tried with one more chunk."""


class CountedWorld(RealWorld):
    """After each call, compares what a sequence holds with what it is counted with."""

    lease: Lease

    def __init__(self, name: str, chunk_tokens: int) -> None:
        super().__init__(name)
        self.chunk_tokens = chunk_tokens
        self.prefix_cache = PrefixCache(
            self.make_caches, num_slots=1, budget_bytes=1 << 30, chunk_tokens=chunk_tokens
        )
        sample = self.make_caches()
        self.evaluate(sample, np.arange(3, dtype=np.int32))
        self.prefix_cache.layout.calibrate(sample)

    def evaluate(self, caches: Sequence[LayerCache], tokens: TokenArray) -> None:
        """Evaluates no logits: nothing here reads them, and they are most of the work."""
        self.model(mx.array(tokens)[None], cache=list(caches))
        mx.eval([cache.state for cache in caches])

    def evaluate_counted(self, caches: object, tokens: TokenArray) -> None:
        self.evaluate(self.lease.caches, tokens)
        slot = self.prefix_cache.pager.slots[0]
        counted = self.prefix_cache.layout.bytes_for(slot.reserved_tokens)
        held = self.prefix_cache.pager.layout.live_bytes(slot.caches)
        assert held <= counted, f"{held} bytes held at {self.lease.offset}, {counted} counted"

    def run(self, tokens: TokenArray, num_generated: int) -> int:
        """Runs a request to its end; returns how many tokens were restored."""
        lease = self.prefix_cache.begin(CacheRequest(Lookup(tokens), expected_tokens=num_generated))
        assert lease is not None
        self.lease = lease
        prefill(lease, tokens, self.evaluate_counted, chunk_tokens=self.chunk_tokens)
        for token in tokens[-1:].tolist() * num_generated:
            self.evaluate_counted(lease.caches, np.array([token], np.int32))
            lease.append(token)
        lease.close()
        return lease.hit_tokens


@pytest.mark.parametrize(
    ("name", "chunk_tokens"), [*product(WINDOW_MODELS, [W + 1]), *product(ONE_OF_A_CLASS, CHUNKS)]
)
def test_a_sequence_holds_no_more_bytes_than_are_counted(name: str, chunk_tokens: int) -> None:
    world = CountedWorld(name, chunk_tokens)
    assert world.prefix_cache.pager.layout.window == W
    tokens = np.random.default_rng(1).integers(1, tiny_models.VOCAB, 3 * W + 5).astype(np.int32)
    assert world.run(tokens, W + 3) == 0
    world.prefix_cache.pager.page_out(world.prefix_cache.pager.slots[0], 0)
    assert world.run(np.append(tokens[:-1], tokens[:40]).astype(np.int32), 3) > 0
    # Buffers grow in steps of 256 tokens.
    for length in (2, W - 1, W, W + 1, 400 if chunk_tokens > 1 else 260):
        other = np.random.default_rng(length).integers(1, tiny_models.VOCAB, length).astype(np.int32)
        world.run(other, 3)


SYSTEM = list(range(1, 41))


def make(layout: str, budget_bytes: int = 1 << 30) -> PrefixCache:
    return PrefixCache(lambda: fake_model.make_caches(layout), num_slots=1, budget_bytes=budget_bytes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bytes_by_kind_are_the_ledgers_in_all(layout: str) -> None:
    prefix_cache = make(layout)
    for end in (100, 200, 300):
        cache_driver.run(prefix_cache, [*SYSTEM, end, end + 1], explicit=[len(SYSTEM)])
    view = views.view(prefix_cache, "", 100)
    ledger = prefix_cache.ledger
    assert view.state.span + view.state.window + view.state.point == ledger.stored_bytes
    assert view.state.live == ledger.live_bytes > 0
    assert (view.state.window > 0) == ("W" in layout) and (view.state.point > 0) == ("R" in layout)
    assert sum(node.num_bytes for node in view.nodes) == ledger.stored_bytes
    assert view.num_nodes == len(view.nodes) and view.num_tokens == sum(n.stop - n.start for n in view.nodes)


def test_only_so_many_are_listed_and_the_rest_is_counted() -> None:
    prefix_cache = make("T")
    for start in range(1000, 1200, 10):
        cache_driver.run(prefix_cache, range(start, start + 5))
    view = views.view(prefix_cache, "", 7)
    assert len(view.nodes) == 7 and view.num_nodes == 20 and view.num_tokens == 100
    assert view.nodes[0].first_tokens[0] == 1190, "what was used last comes first"


@pytest.mark.parametrize("layout", ["T", "WR"])
def test_what_is_on_disk_is_listed_apart(layout: str, tier: DiskTier) -> None:
    prefix_cache = PrefixCache(lambda: fake_model.make_caches(layout), num_slots=1, budget_bytes=1 << 30, disk=tier)
    for end in (100, 200):
        cache_driver.run(prefix_cache, [*SYSTEM, end, end + 1], explicit=[len(SYSTEM)])
    assert views.view(prefix_cache, "", 100).disk_nodes == []
    for _ in prefix_cache.save():
        pass
    assert tier.flush(120)
    view = views.view(prefix_cache, "", 100)
    head, *tails = view.disk_nodes
    assert (head.start, head.stop, head.parent) == (0, len(SYSTEM), None)
    assert head.first_tokens.tolist() == SYSTEM[:24]
    assert {int(tail.first_tokens[0]) for tail in tails if tail.parent == head.id} == {100, 200}
    stops = {node.id: node.stop for node in view.disk_nodes}
    assert all(stops[tail.parent] == tail.start for tail in tails if tail.parent is not None)
    assert head.has_snapshot == (layout != "T")
    assert sum(node.num_bytes for node in view.disk_nodes) == pytest.approx(view.state.disk, abs=len(view.disk_nodes))
    bounded = views.view(prefix_cache, "", 1)
    assert len(bounded.disk_nodes) == 1 and bounded.num_disk_nodes == len(view.disk_nodes) >= 3
    assert views.view(prefix_cache, "other", 100).disk_nodes == []


def test_another_namespace_shows_nothing_of_it() -> None:
    prefix_cache = make("T", budget_bytes=60_000)
    for number in range(20):
        cache_driver.run(prefix_cache, range(1000 * number + 1, 1000 * number + 101), namespace="theirs")
    prefix_cache.pins.pin(PinName("theirs", "s"), np.arange(19_001, 19_101, dtype=np.int32))
    view = views.view(prefix_cache, "ours", 100)
    assert not view.nodes and not view.pinned and view.num_evictions == 0
    assert view.state.in_memory == view.state.disk == 0
    theirs = views.view(prefix_cache, "theirs", 100)
    assert theirs.pinned == ("s",) and theirs.num_evictions == prefix_cache.memory.num_evictions > 0
    assert "ours" not in [node.trie.namespace for node in prefix_cache.memory.nodes()], "looking made a namespace"
