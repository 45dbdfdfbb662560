"""The reason for every miss, one story each."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from cache.tokens import TokenArray
from models.prompt.outline import NO_OUTLINE, Outline
from server.engine import session_history
from server.engine.diagnosis import MissReason, Reuse, diagnose
from server.engine.session_history import FinishedTurn, SessionHistory

HEAD = list(range(100, 120))
USER = list(range(200, 210))
REPLY = list(range(300, 305))


def tokens_of(*parts: Sequence[int]) -> TokenArray:
    """Returns the parts joined."""
    return np.array([token for part in parts for token in part], np.int32)


def detokenize(tokens: TokenArray) -> str:
    """Returns tokens as numbers in text."""
    return " ".join(map(str, tokens.tolist()))


def outline_of(*lengths: int, tools: str = "") -> Outline:
    """Returns the outline of a system message and user messages of these lengths; two tokens of header follow."""
    ends = np.cumsum(lengths).tolist()
    roles = ("system", *["user", "assistant"] * len(lengths))[: len(lengths)]
    return Outline((0, *ends[:-1]), roles, head_end=lengths[0], prompt_end=ends[-1], tools_digest=tools)


FIRST = FinishedTurn(tokens_of(HEAD, USER, [1, 2], REPLY), 32, outline_of(20, 10))


def story(
    tokens: TokenArray, outline: Outline, *, match: int, hit: int, previous: FinishedTurn | None = FIRST
) -> Reuse:
    """Diagnoses one request after `FIRST`."""
    return diagnose(previous, tokens, outline, match=match, hit=hit, detokenize=detokenize)


def test_a_pure_extension_has_nothing_to_explain() -> None:
    tokens = tokens_of(FIRST.tokens.tolist(), USER)
    reuse = story(tokens, outline_of(20, 10, 7, 10), match=37, hit=37)
    assert reuse.miss is None and reuse.kept == 1.0


def test_a_first_turn_is_cold_unless_something_was_restored() -> None:
    tokens = tokens_of(HEAD, USER)
    cold = story(tokens, outline_of(20, 10), match=0, hit=0, previous=None)
    assert cold.miss is not None and cold.miss.reason is MissReason.COLD and cold.kept is None
    assert story(tokens, outline_of(20, 10), match=20, hit=20, previous=None).miss is None


def test_a_changed_clock_in_the_system_prompt_is_named_with_its_words() -> None:
    changed = [*HEAD[:8], 916, *HEAD[9:]]
    reuse = story(tokens_of(changed, USER, [1, 2]), outline_of(20, 10), match=8, hit=8)
    assert reuse.miss is not None
    assert (reuse.miss.reason, reuse.miss.message_index, reuse.miss.role) == (MissReason.SYSTEM_CHANGED, 0, "system")
    assert reuse.miss.token == 8
    assert "108" in reuse.miss.before.split() and "916" in reuse.miss.after.split()
    assert reuse.kept == 8 / 32


def test_changed_tools_are_told_from_a_changed_system_prompt() -> None:
    changed = [*HEAD[:8], 916, *HEAD[9:]]
    reuse = story(tokens_of(changed, USER), outline_of(20, 10, tools="other"), match=8, hit=8)
    assert reuse.miss is not None and reuse.miss.reason is MissReason.TOOLS_CHANGED


def test_an_edited_message_is_named() -> None:
    edited = [*USER[:4], 999, *USER[5:]]
    reuse = story(tokens_of(HEAD, edited, [1, 2]), outline_of(20, 10), match=24, hit=24)
    assert reuse.miss is not None
    assert (reuse.miss.reason, reuse.miss.message_index, reuse.miss.role) == (MissReason.MESSAGES_CHANGED, 1, "user")


def test_what_was_known_but_not_restorable_is_no_restore_point() -> None:
    tokens = tokens_of(FIRST.tokens.tolist(), USER)
    reuse = story(tokens, outline_of(20, 10, 7, 10), match=37, hit=20)
    assert reuse.miss is not None and reuse.miss.reason is MissReason.NO_RESTORE_POINT and reuse.miss.token == 20


def test_what_is_no_longer_known_was_evicted() -> None:
    tokens = tokens_of(FIRST.tokens.tolist(), USER)
    reuse = story(tokens, outline_of(20, 10, 7, 10), match=20, hit=20)
    assert reuse.miss is not None and reuse.miss.reason is MissReason.EVICTED


def test_a_reply_that_is_rendered_otherwise_is_no_change_of_the_client() -> None:
    """Templates drop thinking: the next turn parts after the prompt's end, where the answer's header began."""
    tokens = tokens_of(HEAD, USER, [7, 8, 9], USER)
    assert story(tokens, outline_of(20, 10, 3, 10), match=30, hit=30).miss is None


def test_an_exact_repeat_keeps_all_but_the_last_token() -> None:
    tokens = FIRST.tokens[:32]
    assert story(tokens, FIRST.outline, match=31, hit=31).miss is None


def test_the_retry_of_a_cancelled_prompt_changed_nothing() -> None:
    cancelled = FinishedTurn(FIRST.tokens[:16], 32, FIRST.outline)
    assert story(FIRST.tokens[:32], FIRST.outline, match=16, hit=16, previous=cancelled).miss is None


class TestSessionHistory:
    def test_a_session_without_turns_has_no_previous_one(self) -> None:
        assert SessionHistory().previous("", "s", tokens_of(HEAD)) is None

    def test_a_turn_replaces_the_one_it_continues_and_not_a_sub_agents(self) -> None:
        sessions = SessionHistory()
        child = FinishedTurn(tokens_of(HEAD, [9, 9, 9, 9]), 24, outline_of(20, 4))
        later = FinishedTurn(tokens_of(FIRST.tokens.tolist(), USER), 47, outline_of(20, 10, 7, 10))
        for turn in (FIRST, child, later):
            sessions.record("", "s", turn)
        assert sessions.previous("", "s", tokens_of(HEAD, [9, 9, 9, 9, 5])) is child
        assert sessions.previous("", "s", later.tokens) is later
        assert len(sessions._turns["", "s"]) == 2

    def test_namespaces_do_not_see_each_other(self) -> None:
        sessions = SessionHistory()
        sessions.record("a", "s", FIRST)
        assert sessions.previous("b", "s", FIRST.tokens) is None


def test_of_a_change_and_missing_state_the_one_that_cost_more_is_told() -> None:
    early, late = [*HEAD[:8], 916, *HEAD[9:]], [*USER[:7], 917, *USER[8:]]
    changed_early = tokens_of(early, USER, [1, 2])
    for hit, match in ((0, 8), (0, 0)):
        miss = story(changed_early, outline_of(20, 10), match=match, hit=hit).miss
        assert miss is not None and miss.reason is MissReason.SYSTEM_CHANGED and miss.token == 8
    changed_late = tokens_of(HEAD, late, [1, 2])
    for match, reason in ((27, MissReason.NO_RESTORE_POINT), (5, MissReason.EVICTED)):
        miss = story(changed_late, outline_of(20, 10), match=match, hit=0).miss
        assert miss is not None and miss.reason is reason and miss.token == 0


def test_what_a_change_cost_is_counted_as_far_as_the_previous_prompt_reached() -> None:
    changed = [*HEAD[:8], 916, *HEAD[9:]]
    longer = story(tokens_of(changed, USER, [1, 2], REPLY, USER), outline_of(20, 10, 5, 10), match=8, hit=8)
    assert longer.lost_tokens == 32 - 8
    shorter = story(tokens_of(changed, USER[:5]), outline_of(20, 5), match=8, hit=8)
    assert shorter.lost_tokens == 25 - 8
    extended = story(tokens_of(FIRST.tokens.tolist(), USER), outline_of(20, 10, 7, 10), match=37, hit=37)
    assert extended.lost_tokens == 0


def test_messages_left_out_are_told_from_messages_changed() -> None:
    long = FinishedTurn(tokens_of(HEAD, USER, REPLY, range(400, 430), [1, 2]), 67, outline_of(20, 10, 5, 30))
    trimmed = story(tokens_of(HEAD, range(400, 430), [1, 2]), outline_of(20, 30), match=20, hit=20, previous=long)
    assert trimmed.miss is not None and trimmed.miss.dropped_tokens == 15
    edited = story(tokens_of(HEAD, range(500, 530)), outline_of(20, 30), match=20, hit=20, previous=long)
    assert edited.miss is not None and edited.miss.dropped_tokens == 0
    brief = story(tokens_of(HEAD, range(400, 407)), outline_of(20, 7), match=20, hit=20, previous=long)
    assert brief.miss is not None and brief.miss.dropped_tokens == 0


def test_the_same_tools_in_another_order_are_told_from_other_tools() -> None:
    def turn_with(digest: str, set_digest: str) -> Outline:
        return replace(outline_of(20, 10, tools=digest), tools_set_digest=set_digest)

    first = FinishedTurn(FIRST.tokens, 32, turn_with("a", "same"))
    changed = tokens_of(HEAD[:8], [916], HEAD[9:], USER)
    for outline, expected in ((turn_with("b", "same"), True), (turn_with("b", "other"), False)):
        miss = story(changed, outline, match=8, hit=8, previous=first).miss
        assert miss is not None and miss.is_reordered is expected
    same_tools = story(changed, turn_with("a", "same"), match=8, hit=8, previous=first).miss
    assert same_tools is not None and not same_tools.is_reordered


def test_a_forgotten_session_has_no_previous_turn() -> None:
    sessions = SessionHistory()
    for namespace in ("ours", "theirs"):
        sessions.record(namespace, "s", FIRST)
    sessions.forget("ours", "s")
    sessions.forget("ours", "never seen")
    assert sessions.previous("ours", "s", FIRST.tokens) is None
    assert sessions.previous("theirs", "s", FIRST.tokens) is FIRST


def test_a_turn_that_is_the_beginning_of_another_does_not_take_its_place() -> None:
    """A prefix that was primed, or a request that was cancelled early, says nothing new of its session."""
    sessions = SessionHistory()
    sessions.record("", "s", FIRST)
    sessions.record("", "s", FinishedTurn(FIRST.tokens[:25], 25, FIRST.outline))
    assert sessions.previous("", "s", FIRST.tokens) is FIRST
    assert sessions.last("", "s") is FIRST.tokens and sessions.last("", "another") is None


def test_what_sessions_remember_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [FinishedTurn(np.full(1000, number, np.int32), 1000, NO_OUTLINE) for number in range(30)]
    monkeypatch.setattr(session_history, "MAX_BYTES", 10 * turns[0].num_bytes)
    sessions = SessionHistory()
    for number, turn in enumerate(turns):
        sessions.record("", f"{number // 2}", turn)
        assert sessions.num_bytes <= session_history.MAX_BYTES
    assert sessions.previous("", "0", turns[0].tokens) is None
    kept = [sessions.previous("", f"{number // 2}", turn.tokens) for number, turn in enumerate(turns)][-8:]
    assert [one.tokens[0] for one in kept if one is not None] == list(range(22, 30))
    for number in range(15):
        sessions.forget("", f"{number}")
    assert sessions.num_bytes == 0


def test_one_session_loses_its_oldest_turns_and_keeps_none_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [FinishedTurn(np.full(1000, number, np.int32), 1000, NO_OUTLINE) for number in range(3)]
    monkeypatch.setattr(session_history, "MAX_BYTES", 2 * turns[0].num_bytes)
    sessions = SessionHistory()
    for turn in turns:
        sessions.record("", "s", turn)
    assert sessions.previous("", "s", turns[0].tokens) is not None
    assert sessions.num_bytes == 2 * turns[0].num_bytes
    sessions.record("", "s", FinishedTurn(np.full(10_000, 7, np.int32), 10_000, NO_OUTLINE))
    assert (sessions.last("", "s"), sessions.num_bytes) == (None, 0)


def test_a_turn_that_was_cut_short_keeps_no_longer_array() -> None:
    sessions = SessionHistory()
    sessions.record("", "s", FinishedTurn(np.arange(100_000, dtype=np.int32)[:10], 100_000, NO_OUTLINE))
    tokens = sessions.last("", "s")
    assert tokens is not None
    assert tokens.base is None
