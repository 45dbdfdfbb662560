"""The decisions of the cache that know no arrays: placement, eviction, ledger, choice of a slot, token log."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cache import eviction as policy
from cache import slots, snapshots
from cache.slots import NEW_SESSION_COUNT, LookupResult, RequestClock, Slot, choose_slot
from cache.snapshots import KeptPoint, RestorePoint, RestorePointKind
from cache.trie import Node, Place
from cache.types import TokenLog

# ----------------------------------------------------------------------------------------------------- placement

points = st.builds(RestorePoint, st.integers(-2, 12), st.sampled_from(RestorePointKind))


@given(wanted=st.lists(points), start=st.integers(0, 10), stop=st.integers(0, 12))
def test_a_plan_is_ascending_within_what_is_evaluated_and_one_per_offset(
    wanted: list[RestorePoint], start: int, stop: int
) -> None:
    offsets = [point.offset for point in snapshots.plan(wanted, start=start, stop=stop)]
    assert offsets == sorted({point.offset for point in wanted if start < point.offset <= stop})


@given(kinds=st.lists(st.sampled_from(RestorePointKind), min_size=1))
def test_an_explicit_point_wins_an_offset_and_else_the_first(kinds: list[RestorePointKind]) -> None:
    (chosen,) = snapshots.plan([RestorePoint(3, kind) for kind in kinds], start=0, stop=3)
    explicit = RestorePointKind.EXPLICIT
    assert chosen.kind is (explicit if explicit in kinds else kinds[0])


@given(offset=st.integers(0, 99), limit=st.integers(1, 100), chunk_tokens=st.integers(1, 20))
def test_a_prompt_is_cut_at_multiples_of_a_chunk_from_wherever_it_starts_and_its_end_is_one_chunk(
    offset: int, limit: int, chunk_tokens: int
) -> None:
    assume(offset < limit)
    ends = [offset]
    while ends[-1] < limit:
        ends.append(snapshots.chunk_end(ends[-1], limit, chunk_tokens))
    assert ends[-1] == limit
    assert all(0 < stop - start <= chunk_tokens for start, stop in pairwise(ends))
    assert not any(end % chunk_tokens for end in ends[1:-1])
    assert len(ends) < 3 or limit - ends[-3] > chunk_tokens, "what is left would have fitted one"


# ------------------------------------------------------------------------------------------------------ eviction


NOW = 1000


def candidate(
    key: str, age: int, *, num_tokens: int = 10, num_bytes: int = 1, chance: float = 1.0, is_explicit: bool = False
) -> policy.Candidate:
    return policy.Candidate(key, num_bytes, num_tokens, NOW - age, chance, is_explicit)


def queue_of(candidates: Sequence[policy.Candidate]) -> policy.Queue:
    queue = policy.Queue()
    for one in candidates:
        queue.push(one)
    return queue


def order(candidates: Sequence[policy.Candidate]) -> str:
    queue, found = queue_of(candidates), ""
    while (victim := queue.pop(NOW)) is not None:
        found += victim.key
    return found


EVICTIONS: dict[str, tuple[list[policy.Candidate], str]] = {
    "none": ([], ""),
    "oldest first": ([candidate("b", 2), candidate("a", 3), candidate("c", 1)], "abc"),
    "cheapest to evaluate first": ([candidate("b", 1, num_tokens=90), candidate("a", 1, num_tokens=10)], "ab"),
    "largest first": ([candidate("a", 1, num_bytes=20), candidate("b", 1, num_bytes=10)], "ab"),
    "least likely first": ([candidate("b", 1), candidate("a", 1, chance=policy.Chance.LEFT)], "ab"),
    "of no use first": ([candidate("a", 1, chance=policy.Chance.UNUSABLE), candidate("b", 999)], "ab"),
    "nothing freed": ([candidate("x", 1, num_bytes=0), candidate("a", 2)], "a"),
    "asked for last": ([candidate("b", 99, is_explicit=True), candidate("a", 1)], "ab"),
    "stable": ([candidate("a", 1), candidate("b", 1), candidate("c", 1)], "abc"),
}


@pytest.mark.parametrize("name", EVICTIONS)
def test_eviction_order(name: str) -> None:
    candidates, expected = EVICTIONS[name]
    assert order(candidates) == expected


def test_what_has_more_value_when_young_goes_first_once_age_matters_less() -> None:
    few, many = candidate("few", 100, num_tokens=10), candidate("many", 400, num_tokens=30)
    assert queue_of([few, many]).pop(NOW) == many
    assert queue_of([few, many]).pop(NOW + 100) == few


@given(
    uses=st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 50), st.booleans()), min_size=1, max_size=60),
    pauses=st.lists(st.integers(0, 400), max_size=60),
)
def test_nobody_goes_whose_value_is_much_higher_than_anothers(
    uses: list[tuple[int, int, bool]], pauses: list[int]
) -> None:
    queue, now, left = policy.Queue(), 3001, dict[int, policy.Candidate]()
    for key, (last_used, num_tokens, is_explicit) in enumerate(uses):
        left[key] = policy.Candidate(key, 1, num_tokens, last_used, is_explicit=is_explicit)
        queue.push(left[key])
    for pause in [*pauses, *[0] * len(uses)][: len(uses)]:
        now += pause
        victim = queue.pop(now)
        assert victim is not None and left.pop(victim.key) is victim
        is_explicit, value = victim.rank(now)
        # What counts as of one age differs by two parts of it at most: two neighbours of a heap that has just grown.
        assert all((is_explicit, value / (1 + 2 / policy.AGE_PART)) <= other.rank(now) for other in left.values())
        assert len(queue) == len(left)
    assert queue.pop(now) is None


def test_what_was_used_at_many_times_is_kept_in_few_heaps() -> None:
    queue = queue_of([policy.Candidate(time, 1, 1, time) for time in range(20_000)])
    assert len(queue._heaps) <= policy.MAX_HEAPS
    found = [queue.pop(20_000) for _ in range(3)]
    assert [one.key for one in found if one is not None] == [0, 1, 2]
    assert len(queue._heaps) < 100


# --------------------------------------------------------------------------------------------------------- slots


NOWHERE = Node(None, np.empty(0, np.int32), 0)


def view(
    index: int,
    offset: int = 0,
    common: int = 0,
    *,
    is_leased: bool = False,
    is_same_session: bool = False,
    turn_start: int = 0,
    last_used: int = 0,
) -> tuple[Slot, int]:
    """A slot, and how many tokens it shares with the prompt."""
    log = TokenLog()
    log.append(np.zeros(offset, np.int32))
    session_id = "ours" if is_same_session else "another"
    slot = Slot(index, [], log, NOWHERE, is_leased=is_leased, session_id=session_id)
    slot.turn_start, slot.last_used = turn_start, last_used
    return slot, common


CHOICES: dict[str, tuple[list[tuple[Slot, int]], int, int]] = {
    "an empty one before another's": ([view(0, 9, 0), view(1)], 0, 1),
    "the one unused for longest": ([view(0, 9, 0, last_used=2), view(1, 9, 0, last_used=1)], 0, 1),
    "the one that it continues": ([view(0), view(1, 9, 9)], 0, 1),
    "not a leased one": ([view(0), view(1, 9, 9, is_leased=True)], 0, 0),
    "the longest that it continues": ([view(0, 5, 5), view(1, 9, 9)], 0, 1),
    "of equals the same session's": ([view(0, 9, 9), view(1, 9, 9, is_same_session=True)], 0, 1),
    "elsewhere if more is stored": ([view(0, 9, 9), view(1)], 20, 1),
    "in place if as much is stored": ([view(0, 9, 9), view(1)], 9, 0),
    "a shared system prompt is no reason": ([view(0, 9, 4), view(1)], 0, 1),
    "rewinds its own session": ([view(0, 9, 5, is_same_session=True), view(1)], 0, 0),
    "not if less than half stays": ([view(0, 9, 4, is_same_session=True), view(1)], 0, 1),
    "re-renders a last turn without a session": ([view(0, 9, 7, turn_start=7), view(1)], 0, 0),
    "not if more than the last turn changed": ([view(0, 9, 6, turn_start=7), view(1)], 0, 1),
    "a session with nothing in common is no reason": ([view(0, 9, 0, is_same_session=True), view(1)], 0, 1),
    "its own session before another's turn": (
        [view(0, 9, 8, turn_start=8), view(1, 9, 6, is_same_session=True)],
        0,
        1,
    ),
    "going on before rewinding": ([view(0, 9, 9), view(1, 20, 15, is_same_session=True)], 0, 0),
}
"""Views of slots, tokens that are stored elsewhere, and the slot to choose."""


@pytest.mark.parametrize("name", CHOICES)
def test_choice_of_a_slot(name: str) -> None:
    views, stored_offset, expected = CHOICES[name]
    slots, shared = [slot for slot, _ in views], [common for _, common in views]
    found = choose_slot(slots, LookupResult(Place(NOWHERE, 0), [], stored_offset, shared, 0), "", "ours")
    assert found.index == expected


# ----------------------------------------------------------------------------------------------------- token log


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=700) | st.integers(0, 2000), max_size=8))
def test_a_token_log_is_a_list(steps: list[list[int] | int]) -> None:
    log, model = TokenLog(), list[int]()
    for step in steps:
        if isinstance(step, list):
            log.append(np.array(step, np.int32))
            model += step
        else:
            log.truncate(step)
            del model[step:]
        assert len(log) == len(model)
        assert log.view().tolist() == model
        assert log.view(3, 5).tolist() == model[3:5] or len(model) < 5


class TestSuperseded:
    @staticmethod
    def turns(*offsets: int) -> list[snapshots.KeptPoint]:
        return [snapshots.KeptPoint(offset, RestorePointKind.TURN_END, is_branch=False) for offset in offsets]

    def test_a_lone_end_supersedes_nothing(self) -> None:
        assert snapshots.superseded([], 0) == []
        assert snapshots.superseded(self.turns(5), 0) == []
        assert snapshots.superseded(self.turns(5, 400), 5) == []

    def test_behind_the_last_turn_points_are_sparser_the_further_back(self) -> None:
        stop = 100_000
        path = self.turns(*range(500, stop + 1, 500))
        gone = set(snapshots.superseded(path, stop - 500))
        distances = [stop - point.offset for point in path if point.offset not in gone]
        assert distances[-2:] == [500, 0]
        assert len(distances) < 8
        assert all(after <= 9 * max(before, 512) for after, before in pairwise(distances))

    @pytest.mark.parametrize("landing", [9000, 9400])
    def test_where_the_newest_turn_went_on_from_stays(self, landing: int) -> None:
        path = self.turns(100, 8600, 9000, 9400, 9900, 10_000)
        assert {9000, 9400} <= set(snapshots.superseded(path, 100))
        assert {9000, 9400} - set(snapshots.superseded(path, landing)) == {landing}

    def test_of_two_points_that_are_almost_one_the_later_goes(self) -> None:
        assert snapshots.superseded(self.turns(1000, 5000, 5003, 5400), 1000) == [5003]

    def test_but_not_if_the_newest_turn_went_on_from_it(self) -> None:
        assert snapshots.superseded(self.turns(1000, 5000, 5003, 5400), 5003) == [5000]

    def test_the_system_prompt_branches_and_what_was_asked_for_stay(self) -> None:
        path = self.turns(10, 20, 30, 40, 50, 60)
        path[0] = snapshots.KeptPoint(10, RestorePointKind.SYSTEM_END, is_branch=False)
        path[1] = snapshots.KeptPoint(20, RestorePointKind.EXPLICIT, is_branch=False)
        path[2] = snapshots.KeptPoint(30, None, is_branch=True)
        assert snapshots.superseded(path, 35) == [50]


def test_of_each_turn_one_point_goes_to_disk_and_shared_ones_once() -> None:
    system = KeptPoint(500, RestorePointKind.SYSTEM_END, is_branch=False)
    branch = KeptPoint(700, None, is_branch=True)
    turns = [
        KeptPoint(4000, RestorePointKind.USER_START, is_branch=False),
        KeptPoint(4100, RestorePointKind.PROMPT_END, is_branch=False),
        KeptPoint(4300, RestorePointKind.TURN_END, is_branch=False),
    ]
    path = [system, branch, *turns]
    assert snapshots.choose_for_disk(path, [], min_gain=1000) == [500, 700, 4100]
    assert snapshots.choose_for_disk(path, [500], min_gain=200) == [700, 4100, 4300]
    assert snapshots.choose_for_disk(path, [500, 700, 3301], min_gain=1000) == []
    assert snapshots.choose_for_disk(path, [500, 700, 3100], min_gain=1000) == [4100]
    assert snapshots.choose_for_disk(path, [500, 700, 4100], min_gain=1000) == []
    assert snapshots.choose_for_disk([turns[0]], [], min_gain=1000) == [4000]


def passed(requests: RequestClock, session_id: str | None, namespace: str = "", **fields: bool) -> int:
    """Returns what one more beginning counts."""
    before = requests.now
    requests.begin(namespace, session_id, **fields)
    return requests.now - before


def test_a_conversation_counts_more_as_it_begins_once_and_in_each_namespace() -> None:
    requests = RequestClock()
    assert [passed(requests, "a"), passed(requests, "a"), passed(requests, "b")] == [
        1 + NEW_SESSION_COUNT,
        1,
        1 + NEW_SESSION_COUNT,
    ]
    assert passed(requests, "a", "other") == 1 + NEW_SESSION_COUNT
    assert passed(requests, "title", is_background=True) == 1


def test_the_names_heard_of_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "MAX_SESSIONS", 2)
    requests = RequestClock()
    for name in ("a", "b", "a", "c"):
        requests.begin("", name)
    assert passed(requests, "a") == 1
    assert passed(requests, "b") == 1 + NEW_SESSION_COUNT
