"""The prefix cache with a disk below it: what memory loses comes back, also in the next process, and never wrong."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from cache.disk.tier import DiskTier
from cache.lease import Lease, Tier
from cache.memory_tier import PinName
from cache.prefix_cache import PrefixCache
from cache.slots import Lookup
from cache.trie import Node, Snapshot
from tests.support import cache_driver, fake_model
from tests.support.disk_driver import CountingFiles, open_tier, wait_until_read

SYSTEM = [*range(1, 41)]


pytestmark = pytest.mark.usefixtures("short_prompts")


def make(layout: str, tier: DiskTier, *, num_slots: int = 1, budget_bytes: int = 1 << 30) -> PrefixCache:
    return PrefixCache(
        lambda: fake_model.make_caches(layout), num_slots=num_slots, budget_bytes=budget_bytes, disk=tier
    )


def converse(
    prefix_cache: PrefixCache, prompt: Sequence[int], generated: Sequence[int] = (), namespace: str = ""
) -> tuple[int, Tier | None]:
    """Runs a request, asserts that every layer stood for its tokens, and returns the hit and where it came from."""
    tiers: list[Tier | None] = []

    def inspect(lease: Lease) -> None:
        fake_model.assert_holds(lease.caches, [*prompt, *generated])
        tiers.append(lease.tier)

    outcome = cache_driver.run(
        prefix_cache, prompt, generated, explicit=(len(SYSTEM),), namespace=namespace, inspect=inspect
    )
    return outcome.hit, tiers[0]


def evict_all(prefix_cache: PrefixCache) -> None:
    """Makes memory forget everything, the way a full budget does."""
    prefix_cache.pager.page_out(prefix_cache.slots[0], 0)
    prefix_cache.memory.evict(0, ())
    assert prefix_cache.stats().num_nodes == 0
    assert prefix_cache.memory.disk is not None
    assert prefix_cache.memory.disk.tier.flush(120)


def hollowed(prefix_cache: PrefixCache, prompt: list[int]) -> Node:
    """Returns the node of a prompt that is on disk, without state in memory and with a conversation behind it."""
    converse(prefix_cache, prompt)
    for _ in prefix_cache.save():
        pass
    converse(prefix_cache, [*prompt, *range(700, 2700)])
    assert prefix_cache.memory.disk is not None
    assert prefix_cache.memory.disk.tier.flush(120)
    prefix_cache.pager.page_out(prefix_cache.slots[0], 0)
    trie = prefix_cache.pager.trie("")
    above = [node for node in trie.nodes() if node.children]
    for node in above:
        trie.snap(node, None)
    assert not any(node.num_bytes for node in above)
    return trie.match(np.array(prompt, np.int32)).node.path()[-1]


def test_recurrent_layers_alone_are_restored_from_disk_while_memory_is_short(
    tmp_path: Path, tiers: list[DiskTier]
) -> None:
    """Edges without bytes went with the leaf behind them, though a request was about to go on from there."""
    tiers.append(open_tier(tmp_path))
    prefix_cache, prompt = make(fake_model.POINTS_ONLY, tiers[-1]), [*SYSTEM, *range(100, 160)]
    hollowed(prefix_cache, prompt)
    prefix_cache.ledger.budget_bytes = prefix_cache.ledger.charged_bytes + 100
    assert converse(prefix_cache, [*prompt, 8])[1] is Tier.DISK
    assert prefix_cache.memory.num_evictions, "something had to be evicted"
    assert converse(prefix_cache, [*prompt, 8, 9])[1] is Tier.LIVE


@pytest.mark.parametrize("is_pinned", [True, False])
def test_edges_without_bytes_stay_while_somebody_needs_them(
    is_pinned: bool, tmp_path: Path, tiers: list[DiskTier]
) -> None:
    tiers.append(open_tier(tmp_path))
    prefix_cache, prompt = make(fake_model.POINTS_ONLY, tiers[-1]), [*SYSTEM, *range(100, 160)]
    node = hollowed(prefix_cache, prompt)
    if is_pinned:
        prefix_cache.pins.pin(PinName("", "held"), np.array(prompt, np.int32))
    prefix_cache.memory.evict(0, () if is_pinned else {node})
    assert prefix_cache.memory.find_trie("").match(np.array(prompt, np.int32)).length == len(prompt)
    prefix_cache.check()
    prefix_cache.pins.release(PinName("", "held"))
    prefix_cache.memory.refresh_if_many_changed()
    assert prefix_cache.stats().num_nodes == 0, "then they go"


@pytest.mark.parametrize("layout", fake_model.LAYOUTS)
def test_damaged_files_cost_their_state_and_nothing_else(layout: str, tmp_path: Path, tiers: list[DiskTier]) -> None:
    first = make(layout, open_tier(tmp_path))
    prompt = [*SYSTEM, *range(100, 160)]
    converse(first, prompt, [7])
    first.end(120)
    for number, path in enumerate(sorted(tmp_path.glob("**/*.safetensors"))):
        data = bytearray(path.read_bytes())
        data[len(data) // 2 if number % 2 else -1] ^= 1
        path.write_bytes(data)
    tiers.append(open_tier(tmp_path))
    second = make(layout, tiers[-1])
    hit, _ = converse(second, [*prompt, 7, 500])
    assert hit == 0
    assert converse(second, [*prompt, 7, 500, 501])[0] == len(prompt) + 2


def test_reading_ahead_is_what_begin_then_takes(tmp_path: Path, tiers: list[DiskTier]) -> None:
    files = CountingFiles()
    tiers.append(open_tier(tmp_path, files=files))
    prefix_cache = make("R", tiers[-1])
    prompt = [*SYSTEM, *range(100, 160)]
    converse(prefix_cache, prompt)
    assert prefix_cache.prefetch(Lookup(np.array([*prompt, 9], np.int32))) is None, "memory has it all"
    evict_all(prefix_cache)
    ahead = prefix_cache.prefetch(Lookup(np.array([*prompt, 9], np.int32)))
    assert ahead is not None
    wait_until_read(ahead)
    num_read = files.counts["read"]
    promised = prefix_cache.peek(Lookup(np.array([*prompt, 9], np.int32)))
    assert promised >= len(prompt) - 1
    assert converse(prefix_cache, [*prompt, 9]) == (promised, Tier.DISK)
    assert files.counts["read"] == num_read, "what was read ahead is read no second time"


@pytest.mark.parametrize("layout", [*fake_model.LAYOUTS, fake_model.POINTS_ONLY])
@pytest.mark.parametrize("seed", range(4))
def test_any_history_with_restarts_restores_what_was_evaluated(layout: str, seed: int, tmp_path: Path) -> None:
    """Requests, branches, evictions, idle saving, restarts and sudden ends; every layer is right each time."""
    rng = random.Random(f"{layout}/{seed}")
    known: list[list[int]] = [SYSTEM]
    disk_bytes = rng.choice((400_000, 1 << 30))
    tier = open_tier(tmp_path, budget_bytes=disk_bytes)
    prefix_cache = make(layout, tier, num_slots=2, budget_bytes=rng.choice((60_000, 1 << 30)))
    for _ in range(80):
        act = rng.random()
        if act < 0.1:
            if rng.random() < 0.5:
                prefix_cache.end(120)
            else:
                tier.close()  # what was not written yet is lost
            tier = open_tier(tmp_path, budget_bytes=disk_bytes)
            prefix_cache = make(layout, tier, num_slots=2, budget_bytes=prefix_cache.ledger.budget_bytes)
        elif act < 0.3:
            for _ in prefix_cache.save():
                prefix_cache.check()
                if rng.random() < 0.2:
                    break
        elif act < 0.33:
            prefix_cache.clear()
        else:
            base = rng.choice(known)
            new = [rng.randrange(1000) for _ in range(rng.randrange(1, 44))]
            prompt, reply = base[: rng.randrange(1, len(base) + 1)] + new[:40], new[40:]
            converse(prefix_cache, prompt, reply)
            known.append([*prompt, *reply])
        prefix_cache.check()
        tier.tree.check()
    last = [*range(2000, 2100)]
    converse(prefix_cache, last)
    prefix_cache.end(120)
    tier = open_tier(tmp_path, budget_bytes=disk_bytes)
    assert converse(make(layout, tier), [*last, 7]) == (len(last), Tier.DISK)
    tier.close()


@pytest.mark.parametrize("has_window", [False, True])
def test_what_saving_captured_at_a_live_end_stays_only_within_the_budget(
    has_window: bool, tmp_path: Path, tiers: list[DiskTier]
) -> None:
    tiers.append(open_tier(tmp_path))
    prefix_cache = make("WR", tiers[-1])
    converse(prefix_cache, [*SYSTEM, *range(100, 160)], [7, 8])
    (slot,) = prefix_cache.slots
    window = prefix_cache.pager.snapshot(slot).window
    before = Snapshot(slot.offset, window, None) if has_window else None
    prefix_cache.pager.trie("").snap(slot.tip, before)
    for is_full in (True, False):
        prefix_cache.ledger.budget_bytes = prefix_cache.ledger.charged_bytes if is_full else 1 << 30
        for _ in prefix_cache.save():
            assert slot.tip.snapshot is not None and slot.tip.snapshot.recurrent is not None
        assert (slot.tip.snapshot is before) == is_full
        assert prefix_cache.ledger.excess_bytes() <= 0
    prefix_cache.check()


def test_where_disk_has_too_little_space_it_holds_what_was_used_last(tmp_path: Path, tiers: list[DiskTier]) -> None:
    """What was saved first, the newest, used to be replaced by what was saved after it."""
    tiers.append(open_tier(tmp_path, budget_bytes=200_000))
    prefix_cache = make("T", tiers[-1], num_slots=3)
    stories = [[*range(start, start + 1000)] for start in (1000, 3000, 5000)]
    for story in stories:
        converse(prefix_cache, story)
    converse(prefix_cache, [*stories[1], 8, 7])
    for _ in prefix_cache.save():
        assert tiers[-1].flush(120)
    tiers[-1].close()
    tiers.append(open_tier(tmp_path, budget_bytes=200_000))
    again = make("T", tiers[-1])
    assert [again.peek(Lookup(np.array([*story, 8], np.int32))) == 1000 for story in stories] == [False, True, False]
