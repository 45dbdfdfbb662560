"""What is shown of the cache is what is there, of one namespace only, and bounded."""

from pathlib import Path

import numpy as np
import pytest

from cache import views
from cache.memory_tier import PinName
from cache.prefix_cache import PrefixCache
from cache.snapshots import RestorePointKind
from cache.trie import PrefixTrie
from cache.views import NodeView
from tests.support import cache_driver, fake_model
from tests.support.disk_driver import open_tier
from tests.support.fake_model import LAYOUTS

pytestmark = pytest.mark.usefixtures("exact_buffers")

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


def test_the_tree_can_be_put_together_from_the_list() -> None:
    prefix_cache = make("R")
    for end in (100, 200, 300):
        cache_driver.run(prefix_cache, [*SYSTEM, end, end + 1], explicit=[len(SYSTEM)])
    nodes = views.view(prefix_cache, "", 100).nodes
    listed: dict[int, NodeView] = {}
    for node in nodes:
        assert node.id not in listed
        assert node.start == (listed[node.parent].stop if node.parent is not None else 0), "parents come first"
        listed[node.id] = node
    head = next(node for node in nodes if node.stop == len(SYSTEM))
    assert head.restore_point is RestorePointKind.EXPLICIT and head.is_explicit
    assert head.first_tokens.tolist() == SYSTEM[:24]
    newest = next(node for node in nodes if node.first_tokens[0] == 300)
    older = [nodes.index(node) for node in nodes if node.first_tokens[0] in (100, 200)]
    assert newest.tier == "live" and nodes.index(newest) < min(older)


def test_only_so_many_are_listed_and_the_rest_is_counted() -> None:
    prefix_cache = make("T")
    for start in range(1000, 1200, 10):
        cache_driver.run(prefix_cache, range(start, start + 5))
    view = views.view(prefix_cache, "", 7)
    assert len(view.nodes) == 7 and view.num_nodes == 20 and view.num_tokens == 100
    assert view.nodes[0].first_tokens[0] == 1190, "what was used last comes first"


def test_a_listing_looks_at_no_more_nodes_than_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    prefix_cache = make("T")
    for start in range(1000, 1200, 10):
        cache_driver.run(prefix_cache, range(start, start + 5))
    monkeypatch.setattr(PrefixTrie, "nodes", lambda trie: pytest.fail("the whole trie was walked"))
    assert len(views.view(prefix_cache, "", 7).nodes) == 7
    assert prefix_cache.stats().num_nodes == 20


@pytest.mark.parametrize("layout", ["T", "WR"])
def test_what_is_on_disk_is_listed_apart(layout: str, tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    prefix_cache = PrefixCache(lambda: fake_model.make_caches(layout), num_slots=1, budget_bytes=1 << 30, disk=tier)
    for end in (100, 200):
        cache_driver.run(prefix_cache, [*SYSTEM, end, end + 1], explicit=[len(SYSTEM)])
    assert views.view(prefix_cache, "", 100).disk_nodes == []
    for _ in prefix_cache.save():
        pass
    assert tier.flush(10)
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
    tier.close()


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
