"""What a live session's turns say about its client."""

from typing import Any

import pytest

from server.diagnosis.causes import UNBLAMED, UNTOLD, Cause
from server.doctor.findings import NEGLIGIBLE_TOKENS, checkup_of, findings_of, savings_of

CLOCK = {"cause": "date or time", "before": "It is 09:16.", "after": "It is 09:17."}


def miss(reason: str = "system_changed", **fields: Any) -> dict[str, Any]:
    role = fields.pop("role", "system")
    return {
        "reason": reason, "cause": "edited text", "message_index": 0 if role == "system" else 3, "role": role,
        "token": 8, "before": "You are kind.", "after": "You are a titler.", "lost_tokens": 800, **fields,
    }  # fmt: skip


def turn(*misses: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "prompt_tokens": 1000, "cached_tokens": 100, "evaluated_tokens": 900, "completion_tokens": 50,
        "prompt_ms": 1800.0, "kept": 0.1, "misses": list(misses), **fields,
    }  # fmt: skip


def session(*turns: dict[str, Any], num_turns: int | None = None) -> dict[str, Any]:
    return {"id": "s", "created": 0.0, "last_used": 60.0, "num_turns": num_turns or len(turns), "turns": list(turns)}


FIRST = turn(miss("cold", cause="first request", role=None, lost_tokens=0), kept=None)
FINE = turn(cached_tokens=990, kept=1.0)


def test_what_turns_lost_is_added_up_by_cause() -> None:
    checkup = checkup_of(session(FIRST, turn(miss(**CLOCK)), turn(miss(**CLOCK)), FINE))
    (finding,) = findings_of(checkup.losses)
    assert (finding.cause, finding.where, finding.turns) == (Cause.CLOCK, "system message", 2)
    assert finding.tokens == checkup.tokens == 1600
    assert finding.seconds == pytest.approx(3.2)
    assert checkup.kept == pytest.approx(1.2 / 3)


def test_what_would_be_saved_is_told_per_turn_and_of_no_day_that_nobody_saw() -> None:
    checkups = [checkup_of(session(FIRST, turn(miss(**CLOCK)))), checkup_of(session(FIRST, FINE))]
    savings = savings_of(checkups)
    assert (savings.tokens, savings.turns) == (800, 4)
    assert savings.seconds_per_turn == pytest.approx(1.6 / 4)
    assert savings.within_seconds == 60.0


def test_turns_are_numbered_past_those_that_are_kept_no_more() -> None:
    checkup = checkup_of(session(turn(miss(**CLOCK)), FINE, num_turns=40))
    assert [loss.turn for loss in checkup.losses] == [39]
    assert checkup.num_turns == 40


def test_what_changed_behind_another_change_is_told_and_costs_nothing() -> None:
    hidden = miss(cause="counter or percentage", lost_tokens=0)
    clock, counter = findings_of(checkup_of(session(FIRST, turn(miss(**CLOCK), hidden))).losses)
    assert (clock.tokens, counter.tokens) == (800, 0)


@pytest.mark.parametrize("cause", sorted(UNBLAMED))
def test_what_nobody_can_mend_counts_for_nothing(cause: Cause) -> None:
    checkup = checkup_of(session(FIRST, turn(miss("template", cause=cause.value))))
    assert (len(checkup.losses), checkup.mendable, checkup.tokens) == (cause not in UNTOLD, [], 0)


@pytest.mark.parametrize("cause", [Cause.NOT_RESTORABLE, Cause.EVICTED, Cause.SIDE_REQUEST, Cause.NOTE])
def test_what_costs_a_few_tokens_of_state_is_not_told(cause: Cause) -> None:
    for tokens, num_told in ((NEGLIGIBLE_TOKENS, 0), (NEGLIGIBLE_TOKENS + 1, 1)):
        told = checkup_of(session(FIRST, turn(miss("evicted", cause=cause.value, lost_tokens=tokens)))).losses
        assert len(told) == num_told


def test_the_tools_are_a_place_of_their_own_with_a_cure_of_its_own() -> None:
    (finding,) = findings_of(checkup_of(session(FIRST, turn(miss("tools_changed", role=None, **CLOCK)))).losses)
    assert finding.where == "tools" and "descriptions" in finding.cure
