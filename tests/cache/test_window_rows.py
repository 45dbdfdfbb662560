"""Window rows under pressure: what is about to be restored outlives whatever is evicted for it.

A prompt that parts inside an edge needs rows of the edge above as well, on which nothing else leans. Each history is
played against many budgets, so that eviction drops now this and now that.
"""

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cache import snapshots
from cache.budget import BudgetExceeded
from cache.disk.tier import DiskTier
from cache.layers.layout import Layout
from cache.layers.state import Segment
from cache.reclaim import Reclaimer
from cache.slots import Slot
from cache.trie import Node, PrefixTrie, Snapshot
from tests.cache.worlds import FakeWorld, RealWorld, World
from tests.support import fake_model, tiny_models
from tests.support.disk_driver import open_tier

W = tiny_models.WINDOW
HEAD_TOKENS = W
"""The edge above, which holds the rows that are in danger."""
NUM_BUDGETS = 8

FAKES = [pytest.param(partial(FakeWorld, layout, num_slots=1), id=layout) for layout in ("W", "C", "WR")]
REAL = [
    pytest.param(partial(RealWorld, name, num_slots=1), id=name)
    for name in ("llama_swa", "gpt_oss", "gemma3", "llama4")
]

MakeWorld = Callable[..., World]


pytestmark = pytest.mark.usefixtures("short_prompts", "exact_buffers")


def tokens_of(seed: int, num_tokens: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(1, tiny_models.VOCAB, num_tokens)]


def ready(make_world: MakeWorld, **options: Any) -> World:
    """Returns a world whose cache knows how large a token is."""
    world = make_world(**options)
    sample = world.make_caches()
    world.evaluate(sample, np.array([1, 2, 3], np.int32))
    world.prefix_cache.layout.calibrate(sample)
    return world


def press(make: Callable[[], World], prompt: Sequence[int]) -> list[int]:
    """Runs a prompt after the same history, once within each budget; returns how many tokens each time restored.

    The smallest budget just holds the prompt, the largest needs nothing to go.
    """
    ledger, hits = make().prefix_cache.ledger, list[int]()
    needed = int(make().prefix_cache.layout.bytes_for(len(prompt))) + 1
    for step in range(NUM_BUDGETS + 1):
        world = make()
        world.prefix_cache.ledger.budget_bytes = needed + (ledger.charged_bytes + needed) * step // NUM_BUDGETS
        try:
            hits.append(len(prompt) - world.request(prompt, [5, 6]))
        except BudgetExceeded:
            hits.append(0)
    return hits


def press_inside_edge(make_world: MakeWorld, edge_tokens: int, inside: int) -> tuple[list[int], bool]:
    """Presses a prompt that parts so many tokens inside an edge; returns the hits, and whether points are whole."""
    story = tokens_of(1, HEAD_TOKENS + edge_tokens + 1)

    def make() -> World:
        world = ready(make_world)
        world.request(story, explicit=(HEAD_TOKENS,))
        return world

    hits = press(make, [*story[: HEAD_TOKENS + inside], *tokens_of(2, 9)])
    return hits, make().prefix_cache.layout.has_recurrent


@pytest.mark.parametrize("make_world", FAKES)
@pytest.mark.parametrize("edge_tokens", [W - 1, W, W + 1])
@pytest.mark.parametrize("inside", [1, W // 2, W - 2])
def test_a_prompt_that_parts_inside_an_edge(make_world: MakeWorld, edge_tokens: int, inside: int) -> None:
    hits, has_recurrent = press_inside_edge(make_world, edge_tokens, inside)
    # A longer edge lacks its first rows.
    assert max(hits) == HEAD_TOKENS + (0 if has_recurrent or edge_tokens > W else inside)


@pytest.mark.parametrize("make_world", FAKES)
def test_rows_that_are_about_to_be_restored_live_through_both_evictions(make_world: MakeWorld) -> None:
    """One is for the request; the other comes once the conversation that its slot held is stored, too."""
    story, other = tokens_of(1, HEAD_TOKENS + W + 1), tokens_of(4, HEAD_TOKENS + W + 1)

    def make() -> World:
        world = ready(make_world)
        world.request(story, explicit=(HEAD_TOKENS,))
        world.request(other)
        return world

    hits = press(make, [*story[: HEAD_TOKENS + W // 2], *tokens_of(2, 9)])
    has_recurrent = make().prefix_cache.layout.has_recurrent
    # The smallest budget holds no rows beside the live ones. In all others it is the other conversation that goes.
    assert hits[1:] == [HEAD_TOKENS + (0 if has_recurrent else W // 2)] * NUM_BUDGETS


@pytest.mark.parametrize("make_world", REAL)
def test_a_prompt_that_parts_inside_an_edge_of_a_window(make_world: MakeWorld) -> None:
    hits, _ = press_inside_edge(make_world, W, W // 2)
    assert max(hits) == HEAD_TOKENS + W // 2


Press = Callable[[MakeWorld, int], list[int]]


@pytest.fixture
def press_beside_disk(tmp_path: Path, tiers: list[DiskTier]) -> Press:
    """Presses a prompt that parts so many tokens inside an edge whose rows were read, and overlap those above."""
    head, story = tokens_of(1, HEAD_TOKENS), [*tokens_of(1, HEAD_TOKENS), *tokens_of(3, 20)]

    def make(make_world: MakeWorld) -> World:
        tiers.append(open_tier(shutil.copytree(tmp_path / "written", tmp_path / str(len(tiers)))))
        world = ready(make_world, disk=tiers[-1])
        world.request([*head, 7, 8, 9], explicit=(HEAD_TOKENS,))
        world.request([*story, 1, 2, 3])
        return world

    def press_prompt(make_world: MakeWorld, inside: int) -> list[int]:
        tiers.append(open_tier(tmp_path / "written"))
        writer = ready(make_world, disk=tiers[-1])
        writer.request([*story, 1])
        writer.prefix_cache.end(120)
        return press(partial(make, make_world), [*story[: HEAD_TOKENS + inside], *tokens_of(2, 9)])

    return press_prompt


@pytest.mark.parametrize("make_world", FAKES)
@pytest.mark.parametrize("inside", [1, 9, 17])
def test_a_prompt_that_parts_where_rows_from_disk_overlap_those_above(
    make_world: MakeWorld, inside: int, press_beside_disk: Press
) -> None:
    hits = press_beside_disk(make_world, inside)
    assert max(hits) == HEAD_TOKENS + (0 if make_world().prefix_cache.layout.has_recurrent else inside)


@pytest.mark.parametrize("make_world", [*FAKES[:2], *REAL])
@pytest.mark.parametrize(("which", "hit"), [(0, 0), (-1, HEAD_TOKENS)])
@pytest.mark.parametrize("is_shared", [True, False], ids=["rewound", "paged_in"])
def test_where_state_has_gone_after_all_less_is_restored(
    make_world: MakeWorld, which: int, hit: int, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = ready(make_world)
    story = tokens_of(1, HEAD_TOKENS + W + 1)
    world.request(story, explicit=(HEAD_TOKENS,))
    if not is_shared:
        world.request(tokens_of(3, 20))
    paths = list[Sequence[Node]]()

    def lose(held: Reclaimer, slot: Slot, path: Sequence[Node], *_: int, or_nothing: bool | None = None) -> int:
        if or_nothing is None:  # the request has been admitted
            if not paths:
                held.pager.trie("").snap(path[which], None)
            paths.append(path)
        return 0

    monkeypatch.setattr(Reclaimer, "free_for", lose)
    prompt = [*story[: HEAD_TOKENS + W // 2], *tokens_of(2, 9)]
    assert len(prompt) - world.request(prompt, [5, 6]) == hit
    assert len(paths) == 2


def rows_of(start: int, stop: int) -> Segment:
    rows = mx.zeros((2, 2, stop - start, 4))
    mx.eval(rows)
    return Segment(start, stop, [((0, 1), rows)])


rows_held = st.sampled_from([0] * 20 + [None, *range(1, 2 * W)])
"""On an edge; 0 for those of just its tokens."""


@given(
    edges=st.lists(st.tuples(st.integers(1, W // 4), rows_held), min_size=1, max_size=40), tail=st.integers(0, W - 1)
)
@example(edges=[(1, None), *[(1, 0)] * (W - 2)], tail=0)
@example(edges=[(2, None), (W - 1, 0)], tail=0)
def test_a_path_is_restored_where_its_rows_are_and_each_row_is_looked_for_once(
    edges: list[tuple[int, int | None]], tail: int
) -> None:
    trie, expected = PrefixTrie(), 0
    tip = trie.root
    for num_tokens, num_rows in edges:
        tip = trie.extend(tip, np.zeros(num_tokens, np.int32))
        if num_rows is not None:
            first = max(0, tip.stop - (num_rows or num_tokens))
            tip.snapshot = Snapshot(tip.stop, Segment(first, tip.stop, []), None)
    length = max(tip.start + 1, tip.stop - tail)
    for node in tip.path():
        stop, held = min(node.stop, length), set[int]()
        for above in node.path():
            if above.snapshot is not None and above.snapshot.window is not None:
                held |= set(range(above.snapshot.window.start, above.stop))
        if node.snapshot is not None and set(range(max(0, stop - W), stop)) <= held:
            expected = stop
    looked_at, find = list[Node](), snapshots._window

    def look(node: Node) -> Segment | None:
        looked_at.append(node)
        return find(node)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshots, "_window", look)
        assert snapshots.deepest(Layout(fake_model.make_caches("W")), tip.path(), length) == expected
    if not any(num_rows for _, num_rows in edges):
        assert len(looked_at) <= 2 * len(edges)


@pytest.mark.parametrize("layout", ["W", "C"])
@pytest.mark.parametrize("held", [[], [(10, 40)], [(0, 20), (21, 40)], [(0, 20), (10, 40)], [(0, 39)]], ids=str)
def test_windows_are_never_restored_while_rows_are_missing(layout: str, held: list[tuple[int, int]]) -> None:
    caches = fake_model.make_caches(layout)
    with pytest.raises(AssertionError, match="some are missing"):
        Layout(caches).load_windows(caches, [rows_of(start, stop) for start, stop in held], 40)
