"""Records of sessions: sums that go on, turns that are bounded, namespaces that cannot push each other out."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.api.sessions import MAX_TURNS, SessionRecords, TurnRecord
from server.diagnosis.account import Name
from server.diagnosis.causes import Miss, MissReason

MISS = Miss(MissReason.SYSTEM_CHANGED, 0, "system", 8, "09:16", "09:17")
TURN = TurnRecord(
    id="r",
    previous=None,
    model="tiny",
    ended=100.0,
    finish="stop",
    prompt_tokens=100,
    cached_tokens=20,
    evaluated_tokens=80,
    completion_tokens=5,
    prompt_ms=2000.0,
    tier="live",
    kept=0.25,
    lost_tokens=60,
    lost_seconds=1.5,
    miss=MISS,
    misses=[MISS],
)


def test_sums_count_every_turn_and_the_last_turns_are_kept() -> None:
    records = SessionRecords()
    for number in range(MAX_TURNS + 3):
        records.record(Name("", "s"), replace(TURN, ended=float(number), id=str(number)))
    session = records.find("", "s")
    assert session is not None
    assert (session.num_turns, session.prompt_tokens) == (MAX_TURNS + 3, 100 * (MAX_TURNS + 3))
    assert (session.cached_tokens, session.evaluated_tokens) == (
        20 * (MAX_TURNS + 3),
        80 * (MAX_TURNS + 3),
    )
    assert (session.lost_tokens, session.completion_tokens) == (
        60 * (MAX_TURNS + 3),
        5 * (MAX_TURNS + 3),
    )
    assert session.lost_seconds == pytest.approx(1.5 * (MAX_TURNS + 3))
    assert session.created == 0.0
    assert [turn.id for turn in session.turns] == [str(number) for number in range(3, MAX_TURNS + 3)]


def test_the_last_miss_is_remembered_past_turns_without_one() -> None:
    records = SessionRecords()
    for miss in (MISS, None):
        records.record(Name("", "s"), replace(TURN, miss=miss))
    session = records.find("", "s")
    assert session is not None and session.last_miss is MISS


def test_a_flood_of_sessions_pushes_out_its_own() -> None:
    records = SessionRecords(max_sessions=5)
    for session_id in ("a", "b"):
        records.record(Name("ours", session_id), TURN)
    for number in range(20):
        records.record(Name("theirs", str(number)), TURN)
    assert {session.id for session in records.of("ours")} == {"a", "b"}
    assert [session.id for session in records.of("theirs")] == ["19", "18", "17"]


def test_an_unnamed_session_of_one_request_goes_before_older_ones() -> None:
    records = SessionRecords(max_sessions=3)
    for name in (Name("", "old"), Name("", "passing", is_named=False), Name("", "c"), Name("", "d")):
        records.record(name, TURN)
    assert [session.id for session in records.of("")] == ["d", "c", "old"]


def test_with_a_namespace_for_each_session_the_one_unused_for_longest_goes() -> None:
    records = SessionRecords(max_sessions=2)
    for namespace in ("a", "b", "a", "c"):
        records.record(Name(namespace, "s"), TURN)
    assert [name for name in "abc" if records.find(name, "s")] == ["a", "c"]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("stuv"), st.booleans()), max_size=40))
def test_never_more_than_allowed_and_the_newest_is_always_there(steps: list[tuple[str, str, bool]]) -> None:
    records = SessionRecords(max_sessions=3)
    for namespace, session_id, is_forgotten in steps:
        records.record(Name(namespace, session_id), TURN)
        assert records.find(namespace, session_id) is not None
        if is_forgotten:
            assert records.forget(namespace, session_id)
        assert sum(len(records.of(name)) for name in "ab") <= 3
