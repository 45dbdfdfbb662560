"""Eviction from a full disk: the order that is kept up to date gives the victims that a full search would."""

import heapq
import itertools
import random
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cache.budget import DiskFault
from cache.disk import tree
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
    assert tier.flush(10)
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


def test_a_trunk_goes_after_what_was_hung_on_it_later_for_an_earlier_use(tmp_path: Path) -> None:
    """Idle saving writes what was used last first, so that a file may be older than what hangs on it."""
    tier = open_tier(tmp_path)
    tokens = tokens_of(range(300))
    new, old = tier.ticks(2)
    for start, stop, used_at in ((200, 300, new), (0, 200, old)):
        tier.write_span(Target("", tokens[:stop], used_at=used_at), segment_of(tokens[:stop], start))
    chosen = tier.tree.victims(1 << 30, 0, new + 1)
    assert [file.start for file in chosen] == [200, 0]
    assert tier.tree.victims(1, 0, new) == [], "the only one that could go was used at that time"
    tier.close()


def test_a_trunk_whose_use_was_not_saved_goes_after_what_depends_on_it(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tokens = tokens_of(range(300))
    for start, stop in ((0, 200), (200, 300)):
        write(tier, tokens[:stop], start)
    snap(tier, tokens)
    assert tier.flush(10)
    tier.close()
    with sqlite3.connect(tmp_path / "index.sqlite3") as database:
        database.execute("UPDATE files SET last_used = 0 WHERE start < 200")
    database.close()
    again = open_tier(tmp_path)
    assert [file.start for file in again.tree.victims(1 << 30, 0, 1 << 30)] == [292, 200, 0]
    again.close()


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
