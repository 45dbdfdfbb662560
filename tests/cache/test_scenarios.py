"""Eight conversations that a prefix cache must get right, for every kind of layer, on fakes and on real models.

T is attention only; W adds a sliding window of 32; R adds recurrent state; WR has both. Real models stand beside.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cache.layers.state import Segment
from cache.slots import CacheRequest, Lookup
from cache.snapshots import RestorePoint, RestorePointKind
from cache.trie import Node
from tests.cache.worlds import FakeWorld, RealWorld, World
from tests.support import cache_driver, fake_model, tiny_models

FAKES = [(partial(FakeWorld, layout, scale=scale), f"{layout}{scale}") for layout in fake_model.LAYOUTS
         for scale in (1, 10)]  # fmt: skip
REAL = [(partial(RealWorld, name, scale=12), name) for name in ("llama", "llama_swa", "gemma3", "qwen3_5")]
WORLDS = [pytest.param(make, id=name) for make, name in [*FAKES, *REAL]]
HYBRID_FAKES = [pytest.param(make, id=name) for make, name in FAKES if not name.startswith("T")]

INFLATED_BYTES = 2 << 30
PROMPT = (1, 2, 3, 4, 5)


@pytest.fixture(params=WORLDS)
def make_world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes a world; when the test is over, everything that was stored must be gone with `clear`.

    With `num_nodes`, every stored segment claims to be huge, and the budget holds so many nodes.
    """
    if isinstance(request.param.args, tuple) and request.param.func is RealWorld:
        tiny_models.build(request.param.args[0])
    mx.clear_cache()
    before, worlds = mx.get_active_memory(), list[World]()

    def make(num_nodes: int = 0, **options: Any) -> World:
        world: World = request.param(**options)
        if num_nodes:
            inflate(monkeypatch, world, num_nodes)
        worlds.append(world)
        return world

    yield make
    for world in worlds:
        assert_clean_end(world, before)


def inflate(monkeypatch: pytest.MonkeyPatch, world: World, num_nodes: int) -> None:
    """Makes every stored segment claim to be huge, and the budget large enough for so many nodes."""
    monkeypatch.setattr(Segment, "num_bytes", property(lambda _: INFLATED_BYTES, lambda *_: None), raising=False)
    segments_per_node = 2 if world.prefix_cache.layout.window else 1
    world.prefix_cache.ledger.budget_bytes = num_nodes * segments_per_node * INFLATED_BYTES
    world.is_inflated = True


def assert_clean_end(world: World, before_bytes: int) -> None:
    world.prefix_cache.clear()
    world.prefix_cache.check()
    stats = world.prefix_cache.stats()
    assert (stats.num_nodes, stats.stored_bytes) == (0, 0)
    assert mx.get_active_memory() - before_bytes <= world.prefix_cache.ledger.live_bytes + 1024


def node_at(world: World, units: int) -> Node | None:
    nodes = world.prefix_cache.pager.trie("").nodes()
    return next((node for node in nodes if node.stop == units * world.scale), None)


def test_1_branches_are_created_and_reused(make_world: Any) -> None:
    world = make_world()
    n = world.scale
    assert world.request((1, 2, 3, 4, 5, 6, 7, 8), (20, 21)) == 8 * n
    assert world.match(1, 2, 3, 4, 5, 6, 7, 8, 20, 21) == 10

    left = world.request((*PROMPT, 10, 11, 12), (30, 31))
    assert left == 3 * n if world.restores_anywhere else left <= 8 * n
    assert world.restorable(*PROMPT) == 5
    assert world.match(1, 2, 3, 4, 5, 6, 7, 8, 20, 21) >= 5
    assert world.match(*PROMPT, 10, 11, 12, 30, 31) >= 5

    assert world.request((1, 2, 3, 4, 5, 6, 7, 8, 40, 41)) < 10 * n


def test_2_the_same_prompt_again(make_world: Any) -> None:
    world = make_world()
    n = world.scale
    world.request(PROMPT, (10, 11))
    second = world.request(PROMPT, (20, 21))
    assert second == 1 if world.restores_anywhere else 1 <= second <= 5 * n
    assert 1 <= world.request(PROMPT, (22, 23)) <= 2
    assert 1 <= world.request(PROMPT, (20, 21)) <= 2


def test_3_a_conversation_goes_on(make_world: Any) -> None:
    world = make_world()
    n, turns = world.scale, [*PROMPT, 10, 11, 12, 20, 21]
    world.request(PROMPT, (10, 11, 12))
    second = world.request(turns, (30,))
    third = world.request([*turns, 30, 40, 41])
    assert max(second, third) <= 5 * n
    if world.restores_anywhere:
        assert max(second, third) <= 3 * n
    assert second == third == 2 * n


def test_4_eviction_keeps_what_is_in_use(make_world: Any) -> None:
    world = make_world(num_nodes=4, num_slots=1)
    ledger = world.prefix_cache.ledger
    for first in (10, 20, 30, 40, 50):
        explicit = () if world.restores_anywhere else (5,)
        world.request((*PROMPT, first, first + 1, first + 2), (first + 3,), explicit=explicit)
        assert ledger.charged_bytes <= ledger.budget_bytes
    assert world.match(*PROMPT, 50, 51, 52, 53) == 9
    assert world.restorable(*PROMPT) == 5
    assert world.prefix_cache.memory.num_evictions > 0
    assert world.request((*PROMPT, 60)) <= world.scale


def test_5_an_explicit_restore_point(make_world: Any) -> None:
    world = make_world(num_slots=1)
    n, first, other = world.scale, [*PROMPT, 10, 11], (*PROMPT, 30, 31)
    world.request((*PROMPT, 10), (11,), explicit=(5,))
    world.request([*first, 12], (13,))
    assert world.request(other, (40,)) == 2 * n
    assert world.restorable(*PROMPT) == 5
    assert world.request([*first, 12, 13, 14], (15,)) <= 2 * n
    point = node_at(world, 5)
    assert point is not None
    assert point.is_explicit
    assert world.restorable(*PROMPT) == 5


def test_6_an_explicit_restore_point_is_not_merged(make_world: Any) -> None:
    world = make_world(num_nodes=100, num_slots=1)
    world.request(PROMPT, (10,), explicit=(3,))
    world.request((1, 2, 3, 6, 7), (20,))
    world.prefix_cache.pager.page_out_idle(0, None)
    point = node_at(world, 3)
    assert point is not None
    tokens, trie = np.array(world.spell(PROMPT), np.int32), world.prefix_cache.pager.trie("")
    oldest = [node for node in trie.match(tokens).node.path()
              if node.start >= point.stop]  # fmt: skip
    excess = sum(node.num_bytes for node in oldest)
    world.prefix_cache.reclaimer.free(excess, protected=())
    world.prefix_cache.check()
    assert node_at(world, 3) is point
    assert point.is_explicit
    assert len(point.children) == 1
    assert world.match(*PROMPT) == 3
    assert world.match(1, 2, 3, 6, 7, 20) == 6
    assert world.restorable(1, 2, 3) == 3


def test_7_branches_are_switched(make_world: Any) -> None:
    world = make_world(num_slots=1)
    world.request(PROMPT, (10, 11))
    world.request((1, 2, 3, 6, 7), (12, 13))
    world.request((*PROMPT, 10, 11, 20))
    assert world.match(1, 2, 3, 6, 7, 12, 13) == 7


@pytest.mark.parametrize("make", HYBRID_FAKES)
@pytest.mark.parametrize("stop_at", [17, 33, 55])
def test_a_cancelled_prefill_keeps_its_restore_points(make: Any, stop_at: int) -> None:
    world = make(num_slots=1)
    prompt = [1, 2, 3, 4, 5, 6, 7] if world.scale > 1 else list(range(1, 71))
    explicit = (1, 3, 5) if world.scale > 1 else (10, 30, 50)
    world.request(prompt, explicit=explicit, stop_at=stop_at)
    world.request((90, 91), (92,))
    reached = max(offset * world.scale for offset in explicit if offset * world.scale <= stop_at)
    assert len(world.spell(prompt)) - world.request(prompt) >= reached


@pytest.mark.parametrize("layout", fake_model.LAYOUTS)
def test_a_cancelled_prefill_goes_on_in_place(layout: str) -> None:
    world = FakeWorld(layout)
    world.request(range(1, 71), stop_at=40)
    assert world.request(range(1, 71)) == 70 - 48, "a chunk boundary was passed at 48"


@pytest.mark.parametrize("layout", fake_model.LAYOUTS)
def test_nodes_with_a_restore_point_are_not_extended(layout: str) -> None:
    world = FakeWorld(layout)
    world.request(PROMPT, (10, 11), explicit=(3,))
    point = node_at(world, 3)
    assert point is not None
    before = (point.start, point.tokens.tolist(), point.snapshot)
    world.request((*PROMPT, 10, 11, 12), (13,))
    world.request((1, 2, 3, 7), (8,))
    assert (point.start, point.tokens.tolist(), point.snapshot) == before
    assert point.parent is not None


@pytest.mark.parametrize("layout", fake_model.LAYOUTS)
def test_only_what_was_used_is_refreshed(layout: str) -> None:
    world = FakeWorld(layout, num_slots=1)
    world.request((*PROMPT, 10, 11), explicit=(3,))
    world.request((*PROMPT, 20, 21), explicit=(5,))
    ages = {id(node): (node, node.last_used) for node in world.prefix_cache.pager.trie("").nodes()}
    world.request((1, 2, 3, 30))
    fresh = [node for node, age in ages.values() if node.last_used != age]
    assert [node.stop for node in fresh] == [3], "only the node that was restored from"


@pytest.mark.parametrize("layout", fake_model.LAYOUTS)
def test_nothing_is_captured_beyond_what_was_evaluated(layout: str) -> None:
    world = FakeWorld(layout)
    points = [RestorePoint(offset, RestorePointKind.EXPLICIT) for offset in (3, 9, 12, 40)]
    lease = world.prefix_cache.begin(CacheRequest(Lookup(np.arange(1, 13, dtype=np.int32)), restore_points=points))
    assert lease is not None
    assert 40 not in lease._points
    cache_driver.prefill(lease, np.arange(1, 13, dtype=np.int32), world.evaluate, stop_at=7, chunk_tokens=5)
    assert lease.offset == 9, "restore points at 3 and 9, a chunk's end at 5"
    lease.close()
    assert max(node.stop for node in world.prefix_cache.pager.trie("").nodes()) == 9
    world.prefix_cache.check()
    fake_model.assert_stored_right(world.prefix_cache)
