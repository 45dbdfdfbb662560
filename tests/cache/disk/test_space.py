"""What `GET /v1/cache` asks the disk tier: bytes by namespace and a bounded listing, without a walk of everything."""

import random
from pathlib import Path

import numpy as np
import pytest

from cache.disk import tree as tree_module
from cache.types import TokenArray
from tests.support.disk_driver import conversation, open_tier, snap, stored_names, tokens_of, write


def test_the_bytes_of_each_namespace_are_those_of_its_files(tmp_path: Path) -> None:
    rng, numbers = random.Random(1), np.random.default_rng(1)
    tier, known = open_tier(tmp_path, budget_bytes=100_000), list[TokenArray]()
    for number in range(100):
        namespace, tokens = rng.choice("abc"), conversation(numbers, known)
        known.append(tokens)
        write(tier, tokens, namespace=namespace)
        snap(tier, tokens, namespace)
        if number % 30 == 29:
            tier.clear(rng.choice("abc"))
        tier.tree.check()
        assert sum(tier.tree.find_trie(name).num_bytes for name in "abc") == tier.tree.num_bytes
    assert tier.num_gone > 0 and tier.flush(10)
    sizes = [(tmp_path / name).stat().st_size for name in stored_names(tmp_path)]
    held = {name: tier.tree.find_trie(name).num_bytes for name in "abc"}
    assert sum(held.values()) == sum(sizes)
    tier.close()
    again = open_tier(tmp_path)
    assert {name: again.tree.find_trie(name).num_bytes for name in "abc"} == held and again.tree.find_trie(
        "d"
    ).num_bytes == 0
    again.close()


def test_a_listing_has_parents_first_and_no_more_than_asked_for(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    trunk = tokens_of(range(20))
    write(tier, trunk)
    for leaf in range(5):
        write(tier, np.concatenate([trunk, tokens_of([50 + leaf] * 4)]))
    assert tier.flush(10)
    edges, is_truncated = tier.tree.listing("", 6)
    assert (len(edges), tier.tree.find_trie("").num_nodes, is_truncated) == (6, 6, False)
    assert [edge.parent for edge in edges] == [tier.tree._tries[""].root, *[edges[0]] * 5]
    for max_edges in range(6):
        assert tier.tree.listing("", max_edges) == (edges[:max_edges], True)
    assert tier.tree.listing("other", 10) == ([], False)
    tier.close()


def test_a_listing_looks_at_a_bounded_number_of_edges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_module, "MAX_VISITED", 8)
    tier = open_tier(tmp_path)
    for value in range(20):
        write(tier, tokens_of([value, 1, 2]))
    assert tier.flush(10)
    edges, is_truncated = tier.tree.listing("", 100)
    assert (len(edges), tier.tree.find_trie("").num_nodes, is_truncated) == (8, 20, True)
    tier.close()


def test_edges_that_wait_to_be_written_are_counted_and_not_listed(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    write(tier, tokens_of(range(60)), 40)
    assert tier.flush(10)
    assert (tier.tree.listing("", 10), tier.tree.find_trie("").num_nodes) == (([], False), 2), "its rows have a gap"
    write(tier, tokens_of(range(40)))
    assert tier.flush(10)
    assert [(entry.start, entry.stop) for entry in tier.tree.listing("", 10)[0]] == [(0, 40), (40, 60)]
    tier.close()


def test_the_texts_of_a_namespace_are_those_used_last_each_token_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path)
    trunk = tokens_of(range(10))
    branches = [np.concatenate([trunk, tokens_of([50 + leaf] * 4)]) for leaf in range(3)]
    for branch in (*branches, branches[0]):
        write(tier, branch, namespace="ours")
    write(tier, tokens_of([9, 9, 9]), namespace="theirs")
    assert tier.flush(10)
    tier.close()
    tree = open_tier(tmp_path).tree
    found = [text.tolist() for text in tree.texts("ours", 1000)]
    assert found == [[51] * 4, [52] * 4, [*range(10), *[50] * 4]]
    assert [text.tolist() for text in tree.texts("ours", 16)] == [[52] * 2, [*range(10), *[50] * 4]]
    assert [text.tolist() for text in tree.texts("ours", 3)] == [[50] * 3]
    assert tree.texts("another", 1000) == []
    monkeypatch.setattr(tree_module, "MAX_READ_EDGES", 2)
    assert len(tree.texts("ours", 1000)) <= 1
