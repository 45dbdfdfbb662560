"""The sums of a namespace are those of its requests, and all together those of all."""

import pytest

from server.api.live.activity import MAX_NAMESPACES, PACE_TOKENS, Pace, Totals
from server.api.record import AnswerFigures
from server.engine.diagnosis import Miss, MissReason, Reuse
from server.engine.request import Delta, Failed, Finished, FinishReason, Started, StepFailed, Timings

MISS = Miss(MissReason.EVICTED, lost_tokens=40)


def answered(num_prompt: int = 100, cached: int = 60, predicted: int = 5, tier: str = "memory") -> AnswerFigures:
    figures = AnswerFigures(num_prompt)
    figures.observe(Started(0, num_prompt, Reuse(cached, cached), tier=tier))
    figures.observe(Delta("x", tuple(range(predicted))))
    timings = Timings(cached, num_prompt - cached, 20.0, predicted, 50.0)
    figures.observe(Finished(FinishReason.STOP, num_prompt, timings))
    return figures


def test_sums_are_kept_by_namespace_and_of_all() -> None:
    totals = Totals()
    totals.add("ours", answered(), [MISS], 1.5)
    totals.add("ours", answered(tier="disk"), [], 0.5)
    totals.add("theirs", answered(), [], 1.0)
    ours, every = totals.of("ours"), totals.of(None)
    assert (ours.requests, ours.succeeded, ours.prompt_tokens, ours.cached_tokens) == (2, 2, 200, 120)
    assert ours.evaluated_tokens == 80 and ours.completion_tokens == 10 and ours.saved_seconds == 2.0
    assert ours.restored == {"live": 0, "memory": 60, "disk": 60}
    assert ours.lost["evicted"].count == 1 and ours.lost["evicted"].tokens == 40
    assert (every.requests, every.saved_seconds) == (3, 3.0)
    assert totals.of("nobody").requests == 0


def test_how_requests_ended_is_told_apart() -> None:
    totals = Totals()
    failed, left = AnswerFigures(10), answered()
    failed.observe(Failed(StepFailed("x")))
    left.outcome, left.timings = None, None
    for figures in (failed, left, answered()):
        totals.add("", figures, [], 0.0)
    sums = totals.of(None)
    assert (sums.requests, sums.succeeded, sums.failed, sums.cancelled) == (3, 1, 1, 1)
    assert sums.prompt_tokens == 200, "one that never held a slot has looked for nothing"


def test_only_so_many_namespaces_are_remembered() -> None:
    totals = Totals()
    for number in range(MAX_NAMESPACES + 5):
        totals.add(f"n{number}", answered(), [], 0.0)
        totals.add("n0", answered(), [], 0.0)
    assert totals.of("n1").requests == 0 and totals.of("n0").requests == MAX_NAMESPACES + 6
    assert totals.of(None).requests == 2 * (MAX_NAMESPACES + 5)


def test_the_pace_is_that_of_the_last_long_prompt() -> None:
    pace = Pace()
    assert pace.seconds("m", 10) is None
    pace.note("m", Timings(0, PACE_TOKENS, 640.0, 1, 1.0))
    pace.note("m", Timings(0, PACE_TOKENS - 1, 1.0, 1, 1.0))
    assert pace.seconds("m", 10) == pytest.approx(0.1)
    assert pace.seconds("other", 10) is None
