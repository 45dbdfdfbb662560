"""What is given up first when memory is short, seen from outside: conversations that come back or do not."""

import numpy as np
import pytest

from cache import eviction, snapshots
from cache.eviction import Candidate, Chance, EvictionOrder
from cache.layers import layout
from cache.lease import Lease
from cache.prefix_cache import PrefixCache
from cache.slots import Lookup
from cache.trie import Node, PrefixTrie
from tests.support import cache_driver, fake_model

pytestmark = pytest.mark.usefixtures("exact_buffers")

BYTES_PER_TOKEN = 128
"""Of the fake layout T."""


def cache_of(num_tokens: int) -> PrefixCache:
    """A cache for a model of attention layers that holds so many tokens; buffers may be larger than their content."""
    prefix_cache = PrefixCache(
        lambda: fake_model.make_caches("T"), num_slots=1, budget_bytes=int(1.1 * num_tokens) * BYTES_PER_TOKEN
    )
    sample = fake_model.make_caches("T")
    fake_model.evaluate(sample, fake_model.tokens_of(1, 2))
    prefix_cache.layout.calibrate(sample)
    return prefix_cache


def story(number: int) -> list[int]:
    """A conversation of 100 tokens unlike all others."""
    return list(range(1000 * number, 1000 * number + 100))


def known(prefix_cache: PrefixCache, number: int) -> int:
    return prefix_cache.peek(Lookup(np.array([*story(number), 1], np.int32)))


def test_prompts_without_a_session_do_not_drive_out_a_conversation() -> None:
    prefix_cache = cache_of(500)
    cache_driver.run(prefix_cache, story(1), session_id="a")
    for number in range(50, 60):
        cache_driver.run(prefix_cache, story(number))
    assert known(prefix_cache, 1) == 100
    assert known(prefix_cache, 50) == 0


def test_background_sessions_evict_each_other_and_not_one_that_somebody_waits_for() -> None:
    prefix_cache = cache_of(400)
    cache_driver.run(prefix_cache, story(1), session_id="chat")
    for number in range(2, 20):
        cache_driver.run(prefix_cache, story(number), session_id=f"job {number}", is_background=True)
    assert known(prefix_cache, 1) == 100
    assert known(prefix_cache, 2) == 0
    cache_driver.run(
        prefix_cache, story(30), story(31) + story(32) + story(33), session_id="long", is_background=True
    )
    assert known(prefix_cache, 1) == 100, "an answer that outgrew its estimate evicted the chat"
    cache_driver.run(prefix_cache, story(30) + story(31) + story(32) + story(33), is_background=True)
    assert known(prefix_cache, 1) == 0, "it must not wait for ever either"


def test_what_is_kept_stays_also_where_the_ends_of_sessions_go_last() -> None:
    prefix_cache = cache_of(10_000)
    for number in (1, 2):
        cache_driver.run(prefix_cache, story(number), session_id=str(number))
    prefix_cache.pager.page_out(prefix_cache.slots[0], 0)
    kept = {node for node in prefix_cache.memory.nodes() if node.tokens[0] == 1000}
    prefix_cache.memory.evict(0, kept, guards_sessions=True)
    assert [known(prefix_cache, number) for number in (1, 2)] == [100, 0]
    prefix_cache.check()


@pytest.mark.parametrize(("newest", "gone"), [("known", "short"), ("new", "long")])
def test_once_a_conversation_has_begun_the_longest_of_the_silent_goes_first(
    monkeypatch: pytest.MonkeyPatch, newest: str, gone: str
) -> None:
    monkeypatch.setattr(eviction, "LONG_TOKENS", 100)
    prefix_cache = cache_of(10_000)
    stories = {"known": story(1), "short": story(2), "long": list(range(3000, 3400)), "new": story(4)}
    for session_id in ("known", "short", "long", newest):
        cache_driver.run(prefix_cache, stories[session_id], session_id=session_id)
    prefix_cache.pager.page_out(prefix_cache.slots[0], 0)
    drop_one(prefix_cache)
    held = {
        name: prefix_cache.peek(Lookup(np.array([*stories[name], 1], np.int32)))
        for name in ("known", "short", "long")
    }
    assert [name for name, num_tokens in held.items() if num_tokens < len(stories[name])] == [gone]


def test_of_a_long_conversation_only_the_end_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "GROWTH_TOKENS", 16)
    prefix_cache = cache_of(10_000)
    for number in (1, 2):
        cache_driver.run(prefix_cache, [*story(number), *story(50 + number)], session_id=f"{number}")
    end = prefix_cache.slots[0].tip
    assert len(end.path()) > 2, "the last one is in pieces"
    prefix_cache.pager.page_out(prefix_cache.slots[0], 0)
    drop_one(prefix_cache)
    left = prefix_cache.peek(Lookup(np.array([*story(1), *story(51), 1], np.int32)))
    assert 100 - 2 * 16 <= left <= 100
    assert prefix_cache.peek(Lookup(np.array([*story(2), *story(52), 1], np.int32))) == 200
    assert [node.session_id for node in prefix_cache.pager.trie("").nodes() if not node.children] == ["2", "1"]


def test_pieces_of_a_conversation_keep_their_borders_as_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "GROWTH_TOKENS", 16)
    prefix_cache, tokens, before = cache_of(10_000), story(1), set[int]()
    for number in range(2, 9):
        cache_driver.run(prefix_cache, tokens, session_id="chat")
        *pieces, _ = prefix_cache.slots[0].tip.path()
        borders, length = {piece.stop for piece in pieces}, pieces[0].stop
        assert {border for border in before if border % length == 0} <= borders and len(borders) <= 16
        assert all(border % length == 0 for border in borders) and length in (16, 32, 64)
        before, tokens = borders, [*tokens, *story(number)]


def test_what_waiting_requests_will_restore_is_evicted_last() -> None:
    for is_background in (False, True):
        prefix_cache = cache_of(10_000)
        for number in (1, 2, 3):
            cache_driver.run(prefix_cache, story(number), session_id=f"{number}")
        prefix_cache.pager.page_out(prefix_cache.slots[0], 0)
        prefix_cache.use_awaited(lambda: [Lookup(np.array([*story(1), 1], np.int32))])
        for expected in ([100, 0, 100], [100, 0, 0], [0, 0, 0]):
            drop_one(prefix_cache, is_background=is_background)
            assert [known(prefix_cache, number) for number in (1, 2, 3)] == expected


def talk(prefix_cache: PrefixCache, num_turns: int, session_id: str) -> list[int]:
    """A conversation whose turns go on from each other, 1000 tokens each; returns all its tokens."""
    tokens: list[int] = []
    for turn in range(num_turns):
        tokens += [int(session_id) * 10_000 + 1000 * turn + number for number in range(1000)]
        cache_driver.run(prefix_cache, tokens, [turn, turn + 1], session_id=session_id)
        tokens += [turn, turn + 1]
    return tokens


def recurrent() -> PrefixCache:
    return PrefixCache(lambda: fake_model.make_caches("R"), num_slots=1, budget_bytes=1 << 40)


def chances(prefix_cache: PrefixCache) -> dict[int, Chance]:
    """How likely each restore point that can be given up is wanted, by its offset."""
    queue, now, found = prefix_cache.memory.order, prefix_cache.memory.clock.now, list[Candidate]()
    while (candidate := queue.pop(now)) is not None:
        found.append(candidate)
    for candidate in found:
        queue.push(candidate)
    return {candidate.key.stop: Chance(candidate.chance) for candidate in found}


def after_first_eviction(num_turns: int) -> PrefixCache:
    """A cache with one stored conversation, after a round of giving up that had to free next to nothing."""
    prefix_cache = recurrent()
    talk(prefix_cache, num_turns, "1")
    prefix_cache.pager.page_out(prefix_cache.slots[0], 0)
    prefix_cache.reclaimer.free(1, protected=())
    return prefix_cache


def test_a_conversation_has_most_value_at_its_end_and_where_its_last_turn_went_on_from() -> None:
    by_offset = chances(after_first_eviction(5))
    assert by_offset == {
        1002: Chance.FIRST, 4008: Chance.LANDING, 5007: Chance.PROMPT, 5010: Chance.CURRENT
    }  # fmt: skip


def test_points_along_a_new_prompt_are_thinned_while_it_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    """They took the memory of other conversations until the answer was over."""
    monkeypatch.setattr(snapshots, "INTERVAL_TOKENS", 500)
    prefix_cache = recurrent()
    wanted: list[int] = []

    def inspect(lease: Lease) -> None:
        wanted.extend(node.stop for node in prefix_cache.memory.nodes() if node.snapshot and node.last_used)

    cache_driver.run(prefix_cache, list(range(10_001)), inspect=inspect)
    assert len(known_points(prefix_cache)) > 15
    assert len(wanted) < 8


def known_points(prefix_cache: PrefixCache) -> list[int]:
    """The offsets of all snapshots."""
    return sorted(node.stop for node in prefix_cache.memory.nodes() if node.snapshot is not None)


def test_to_give_up_one_of_many_few_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Node] = []
    look = EvictionOrder.value

    def counted(order: EvictionOrder, node: Node) -> Candidate:
        looks.append(node)
        return look(order, node)

    monkeypatch.setattr(EvictionOrder, "value", counted)
    prefix_cache = cache_of(10_000)
    for number in range(1, 61):
        cache_driver.run(prefix_cache, story(number), session_id=str(number))
    prefix_cache.pager.page_out(prefix_cache.slots[0], 0)
    oldest = next(node for node in prefix_cache.memory.nodes() if node.tokens[0] == 1000)
    drop_one(prefix_cache, oldest)
    assert [known(prefix_cache, number) for number in (1, 2, 3)] == [100, 0, 100]
    looks.clear()
    for _ in range(2):
        drop_one(prefix_cache)
    assert [known(prefix_cache, number) for number in range(1, 6)] == [0, 0, 0, 100, 100]
    cache_driver.run(prefix_cache, story(4), session_id="4")
    cache_driver.run(prefix_cache, story(70), session_id="4")
    looks.clear()
    target = prefix_cache.ledger.charged_bytes - 100 * BYTES_PER_TOKEN
    prefix_cache.memory.evict(target, ())
    assert [known(prefix_cache, number) for number in (4, 5, 6)] == [100, 0, 100], "what was used since stays"
    assert len(looks) <= 6
    prefix_cache.pager.page_out(prefix_cache.slots[0], 0)
    prefix_cache.memory.evict(0, ())
    assert prefix_cache.stats().num_nodes == 0, "what was made since is found as well"
    prefix_cache.check()


def test_a_failure_half_way_loses_nothing_from_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    prefix_cache = cache_of(10_000)
    for number in range(1, 6):
        cache_driver.run(prefix_cache, story(number), session_id=str(number))
    prefix_cache.pager.page_out(prefix_cache.slots[0], 0)
    oldest = next(node for node in prefix_cache.memory.nodes() if node.tokens[0] == 1000)

    def fail(trie: PrefixTrie, node: Node) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(PrefixTrie, "remove", fail)
        with pytest.raises(ZeroDivisionError):
            drop_one(prefix_cache, oldest)
    prefix_cache.check()
    for _ in range(5):
        drop_one(prefix_cache)
    assert prefix_cache.stats().num_nodes == 0


def test_what_a_session_leaves_behind_is_worth_less_from_then_on() -> None:
    prefix_cache = cache_of(10_000)
    for number, session_id in ((1, "a"), (2, "b"), (3, "c")):
        cache_driver.run(prefix_cache, story(number), session_id=session_id)
    prefix_cache.pager.page_out(prefix_cache.slots[0], 0)
    drop_one(prefix_cache)
    for number, session_id in ((2, "b"), (3, "c")):
        cache_driver.run(prefix_cache, story(number), session_id=session_id)
    prefix_cache.pager.page_out(prefix_cache.slots[0], 0)
    chances(prefix_cache)  # both have been looked at
    cache_driver.run(prefix_cache, story(4), session_id="c")
    drop_one(prefix_cache)
    assert [known(prefix_cache, number) for number in (1, 2, 3, 4)] == [0, 100, 0, 100]


def test_nothing_is_kept_of_what_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "MIN_GARBAGE", 10)
    prefix_cache = cache_of(500)
    for number in range(1, 101):
        cache_driver.run(prefix_cache, story(number), session_id=str(number))
    assert len(prefix_cache.memory.order._ends) < 40


def test_nothing_is_kept_of_what_is_outdated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "MIN_GARBAGE", 10)
    monkeypatch.setattr(eviction, "MANY_CHANGED", 0)
    prefix_cache = cache_of(10_000)
    for number in range(100):
        cache_driver.run(prefix_cache, story(number % 3), session_id=str(number % 3))
    assert len(prefix_cache.memory.order._queue) < 40


def drop_one(prefix_cache: PrefixCache, *kept: Node, is_background: bool = False) -> None:
    """Gives up the bytes of a story, of none that is `kept`."""
    target = prefix_cache.ledger.charged_bytes - 100 * BYTES_PER_TOKEN
    prefix_cache.memory.evict(target, kept, guards_sessions=is_background)
    prefix_cache.check()
