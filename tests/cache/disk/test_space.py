"""The disk's space: who goes when it is full, what is told of it, and how much is written in a day."""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cache.budget import DiskFault
from cache.disk import tree
from cache.disk import tree as tree_module
from cache.disk.index import DAY_SECONDS, WriteBudget, WriteDay
from cache.disk.tier import DiskTier
from cache.disk.tree import MIN_GARBAGE, START, DiskNode, DiskTree, LruOrder, StoredFile, Target
from cache.types import TokenArray
from tests.support.disk_driver import (
    conversation,
    entries,
    open_tier,
    segment_of,
    snap,
    tokens_of,
    touch,
    write,
)


def victims_by_looking(tree: DiskTree, excess_bytes: int, newest: int) -> list[StoredFile]:
    """The same by looking at every file: the least recently used of those on which no other one hangs."""
    needs = _needs(tree)
    num_hanging = Counter(needs.values())
    order = itertools.count()
    queue = [(file.last_used, -file.stop, next(order), file) for file in needs if not num_hanging[file]]
    heapq.heapify(queue)
    chosen: list[StoredFile] = []
    while excess_bytes > 0 and queue:
        file = heapq.heappop(queue)[-1]
        if file.last_used >= newest:
            break
        chosen.append(file)
        excess_bytes -= file.num_bytes
        above = needs[file]
        num_hanging[above] -= 1
        if above is not None and not num_hanging[above]:
            heapq.heappush(queue, (above.last_used, -above.stop, next(order), above))
    return chosen


def _needs(tree: DiskTree) -> dict[StoredFile, StoredFile | None]:
    """Returns for each file the one that holds the tokens right before it, as far as there is one."""
    needs: dict[StoredFile, StoredFile | None] = {}
    last: dict[DiskNode | None, StoredFile | None] = {}
    for node in (node for trie in tree._tries.values() for node in trie.nodes()):
        above, snapshot = last.get(node.parent), node.snapshot
        if node.rows is not None:
            needs.setdefault(node.rows, above)
            above = node.rows
        last[node] = above
        if snapshot is not None:
            needs[snapshot] = above
    return needs


def lose_a_file(tier: DiskTier, folder: Path, rng: random.Random) -> None:
    """Deletes a file behind the tier's back, and has the tier notice; what follows its tokens stays."""
    assert tier.flush(120)
    held = entries(tier)
    if held:
        lost = rng.choice(held).span
        (folder / lost.parts[0].file.name).unlink()
        with pytest.raises(DiskFault):
            tier.reader.load_rows(lost.parts)


@pytest.mark.parametrize("seed", range(6))
def test_victims_are_those_that_looking_at_everything_gives(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "MAX_SPARE_FILES", 1 << 30)
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    tier, known = open_tier(tmp_path, budget_bytes=200_000), list[TokenArray]()
    for _ in range(120):
        tokens = conversation(numbers, known)
        start = rng.choice((0, 0, len(tokens) // 2))
        write(tier, tokens, start, namespace=rng.choice(("", "other")))
        if rng.random() < 0.5:
            snap(tier, tokens)
        known.append(tokens)
        if rng.random() < 0.3:
            touch(tier, rng.choice(known))
        if rng.random() < 0.05:
            lose_a_file(tier, tmp_path, rng)
        if rng.random() < 0.02:
            tier.clear("other")
        excess, newest = rng.randrange(40_000), tier.ticks(1)[0] - rng.choice((0, 20))
        expected = victims_by_looking(tier.tree, excess, newest)
        for _ in range(2):
            assert tier.tree.victims(excess, 0, newest) == expected
        tier.tree.check()
    tier.close()


def test_a_trunk_goes_after_what_was_hung_on_it_later_for_an_earlier_use(tier: DiskTier) -> None:
    """Idle saving writes what was used last first, so that a file may be older than what hangs on it."""
    tokens = tokens_of(range(300))
    new, old = tier.ticks(2)
    for start, stop, used_at in ((200, 300, new), (0, 200, old)):
        tier.write_span(Target("", tokens[:stop], used_at=used_at), segment_of(tokens[:stop], start))
    chosen = tier.tree.victims(1 << 30, 0, new + 1)
    assert [file.start for file in chosen] == [200, 0]
    assert tier.tree.victims(1, 0, new) == [], "the only one that could go was used at that time"


def test_what_a_new_file_depends_on_is_used_no_earlier() -> None:
    tree, tokens = DiskTree(), tokens_of(range(600))

    def add(start: int, stop: int, used_at: int, edge: TokenArray = tokens) -> StoredFile:
        file = StoredFile("", start, stop, 10, last_used=used_at)
        tree.add(np.concatenate([tokens[:start], edge[start:stop]]), file, START)
        return file

    first, last = add(0, 40, 1), add(200, 300, 2)  # behind a gap
    assert first.last_used == 2
    trunk, filling = add(40, 100, 1), add(100, 200, 9)
    assert [file.last_used for file in (first, trunk, filling, last)] == [9, 9, 9, 2]
    add(50, 60, 1, tokens + 1000)  # cuts the trunk's edge
    add(300, 400, 5)
    assert [file.last_used for file in (first, trunk, filling, last)] == [9, 9, 9, 5]
    add(400, 500, 20)
    assert [file.last_used for file in (first, trunk, filling, last)] == [20, 20, 20, 20]
    tree.check()


@pytest.fixture
def small_files(tmp_path: Path) -> Iterator[DiskTier]:
    tier = open_tier(tmp_path)
    for number in range(200):
        write(tier, tokens_of([number % 7, number, 5]))
    yield tier
    tier.close()


def test_of_small_files_no_more_go_at_once_than_a_few(small_files: DiskTier) -> None:
    used = small_files.tree.num_bytes
    chosen = small_files.tree.victims(1, used, 1 << 30)
    assert len(chosen) == tree.MAX_SPARE_FILES
    many = small_files.tree.victims(used // 2, 0, 1 << 30)
    assert sum(file.num_bytes for file in many) >= used // 2


def test_entries_of_files_that_are_gone_do_not_pile_up() -> None:
    order = LruOrder()
    for number in range(5 * MIN_GARBAGE):
        file = StoredFile("", 0, 1, 1, last_used=number)
        order.push(file)
        file.is_gone = True
        order.compact(0)
    assert len(order._heap) <= MIN_GARBAGE + 1


def test_a_listing_has_parents_first_and_no_more_than_asked_for(tier: DiskTier) -> None:
    trunk = tokens_of(range(20))
    write(tier, trunk)
    for leaf in range(5):
        write(tier, np.concatenate([trunk, tokens_of([50 + leaf] * 4)]))
    assert tier.flush(120)
    edges, is_truncated = tier.tree.listing("", 6)
    assert (len(edges), tier.tree.find_trie("").num_nodes, is_truncated) == (6, 6, False)
    assert [edge.parent for edge in edges] == [tier.tree._tries[""].root, *[edges[0]] * 5]
    for max_edges in range(6):
        assert tier.tree.listing("", max_edges) == (edges[:max_edges], True)
    assert tier.tree.listing("other", 10) == ([], False)


def test_a_listing_looks_at_a_bounded_number_of_edges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_module, "MAX_VISITED", 8)
    tier = open_tier(tmp_path)
    for value in range(20):
        write(tier, tokens_of([value, 1, 2]))
    assert tier.flush(120)
    edges, is_truncated = tier.tree.listing("", 100)
    assert (len(edges), tier.tree.find_trie("").num_nodes, is_truncated) == (8, 20, True)
    tier.close()


def test_the_texts_of_a_namespace_are_those_used_last_each_token_once(
    tier: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trunk = tokens_of(range(10))
    branches = [np.concatenate([trunk, tokens_of([50 + leaf] * 4)]) for leaf in range(3)]
    for branch in (*branches, branches[0]):
        write(tier, branch, namespace="ours")
    write(tier, tokens_of([9, 9, 9]), namespace="theirs")
    assert tier.flush(120)
    tier.close()
    tree = open_tier(tmp_path).tree
    found = [text.tolist() for text in tree.texts("ours", 1000)]
    assert found == [[51] * 4, [52] * 4, [*range(10), *[50] * 4]]
    assert [text.tolist() for text in tree.texts("ours", 16)] == [[52] * 2, [*range(10), *[50] * 4]]
    assert [text.tolist() for text in tree.texts("ours", 3)] == [[50] * 3]
    assert tree.texts("another", 1000) == []
    monkeypatch.setattr(tree_module, "MAX_READ_EDGES", 2)
    assert len(tree.texts("ours", 1000)) <= 1


class Clocks:
    """A wall clock that can be set, and one that only goes forward."""

    def __init__(self) -> None:
        self.wall, self.elapsed = 1e9, 50.0

    def budget(self, bytes_per_day: int | None = 100, saved: WriteDay | None = None) -> WriteBudget:
        return WriteBudget(bytes_per_day, lambda: self.wall, lambda: self.elapsed, saved)

    def pass_seconds(self, seconds: float) -> None:
        self.wall += seconds
        self.elapsed += seconds


def test_a_day_begins_with_its_first_write_and_ends_after_24_hours() -> None:
    clocks = Clocks()
    budget = clocks.budget()
    clocks.pass_seconds(DAY_SECONDS / 2)
    budget.count(100)
    clocks.pass_seconds(DAY_SECONDS - 1)
    assert (budget.written_bytes, budget.allows(0), budget.allows(1)) == (100, True, False)
    clocks.pass_seconds(1)
    assert (budget.written_bytes, budget.allows(100), budget.allows(101)) == (0, True, False)


def test_setting_the_wall_clock_changes_nothing() -> None:
    for step in (-10 * DAY_SECONDS, -1.0, 10 * DAY_SECONDS):
        clocks = Clocks()
        budget = clocks.budget()
        budget.count(60)
        clocks.wall += step
        assert budget.written_bytes == 60
        budget.count(40)
        clocks.pass_seconds(DAY_SECONDS - 1)
        assert not budget.allows(1)
        clocks.pass_seconds(1)
        assert budget.allows(100)


def resumed(clocks: Clocks, saved: WriteDay) -> WriteBudget:
    """Returns the budget of another process, whose clock that only goes forward starts elsewhere."""
    clocks.elapsed = 7.0
    return clocks.budget(saved=saved)


def test_a_restart_goes_on_with_the_day() -> None:
    clocks = Clocks()
    budget = clocks.budget()
    budget.count(40)
    clocks.pass_seconds(1000)
    saved = budget.count(30)
    assert (saved.age_seconds, saved.num_bytes) == (1000, 70)
    clocks.pass_seconds(2000)
    again = resumed(clocks, saved)
    assert again.written_bytes == 70
    clocks.pass_seconds(DAY_SECONDS - 3001)
    assert not again.allows(31)
    clocks.pass_seconds(1)
    assert again.allows(100)
    clocks.pass_seconds(DAY_SECONDS)
    assert resumed(clocks, saved).written_bytes == 0, "the day ended while no process ran"


def test_a_wall_clock_that_went_back_before_a_restart_ends_the_day_later_but_not_never() -> None:
    clocks = Clocks()
    budget = clocks.budget()
    budget.count(50)
    clocks.pass_seconds(1000)
    saved = budget.count(50)
    clocks.wall -= 365 * DAY_SECONDS
    again = resumed(clocks, saved)
    assert not again.allows(1)
    clocks.pass_seconds(DAY_SECONDS - 1000)
    assert again.allows(100)
