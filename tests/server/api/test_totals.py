"""The sums of a namespace are those of its requests, and all together those of all."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from server.api.activity import MAX_NAMESPACES, PACE_TOKENS, Activity, EventLog, LostTokens
from server.api.record import Arrival, OpenRequest, RequestRecord
from server.diagnosis.causes import Miss, MissReason, Reuse
from server.engine.request import (
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    Started,
    StepFailed,
    Timings,
)

MISS = Miss(MissReason.EVICTED, lost_tokens=40)


REQUEST = GenerationRequest("r", np.zeros(100, np.int32), 9)


def make() -> Activity:
    return Activity(EventLog("e", wall=lambda: 0.0, clock=lambda: 0.0), dict)


def opened(namespace: str = "", events: Sequence[Event] = ()) -> OpenRequest:
    one = OpenRequest(replace(REQUEST, namespace=namespace), "m", Arrival("/v1/completions", 0.0))
    for event in events:
        one.observe(event)
    return one


def answered(
    namespace: str = "",
    misses: tuple[Miss, ...] = (),
    saved: float = 0.0,
    tier: str = "memory",
    *,
    has_left: bool = False,
) -> RequestRecord:
    started = Started(0, 100, 60, 60, tier=tier, reuse=Reuse(misses))
    end = Finished(FinishReason.STOP, 100, Timings(60, 40, 20.0, 5, 50.0))
    events: list[Event] = [started, Delta("x", tuple(range(5))), *([] if has_left else [end])]
    return RequestRecord((opened(namespace, events),), saved_seconds=saved)


def test_sums_are_kept_by_namespace_and_of_all() -> None:
    totals = make()
    totals.tell(answered("ours", (MISS,), 1.5))
    totals.tell(answered("ours", saved=0.5, tier="disk"))
    totals.tell(answered("theirs", saved=1.0))
    ours, every = totals.sums_of("ours"), totals.sums_of(None)
    assert (ours.requests, ours.succeeded, ours.prompt_tokens, ours.cached_tokens) == (2, 2, 200, 120)
    assert ours.evaluated_tokens == 80 and ours.completion_tokens == 10 and ours.saved_seconds == 2.0
    assert ours.restored_tokens == {"live": 0, "memory": 60, "disk": 60}
    assert ours.misses == [LostTokens("evicted", count=1, tokens=40)]
    assert (every.requests, every.saved_seconds) == (3, 3.0)
    assert totals.sums_of("nobody").requests == 0


def test_how_requests_ended_is_told_apart() -> None:
    totals = make()
    failed = RequestRecord((opened(events=[Failed(StepFailed("x"))]),))
    for record in (failed, answered(has_left=True), answered()):
        totals.tell(record)
    sums = totals.sums_of(None)
    assert (sums.requests, sums.succeeded, sums.failed, sums.cancelled) == (3, 1, 1, 1)
    assert sums.prompt_tokens == 200, "one that never held a slot has looked for nothing"


def test_only_so_many_namespaces_are_remembered() -> None:
    totals = make()
    for number in range(MAX_NAMESPACES + 5):
        totals.tell(answered(f"n{number}"))
        totals.tell(answered("n0"))
    assert totals.sums_of("n1").requests == 0 and totals.sums_of("n0").requests == MAX_NAMESPACES + 6
    assert totals.sums_of(None).requests == 2 * (MAX_NAMESPACES + 5)


def test_the_pace_is_that_of_the_last_long_prompt() -> None:
    pace = make()
    assert pace.seconds_for("m", 10) is None
    pace.note_pace("m", Timings(0, PACE_TOKENS, 640.0, 1, 1.0))
    pace.note_pace("m", Timings(0, PACE_TOKENS - 1, 1.0, 1, 1.0))
    assert pace.seconds_for("m", 10) == pytest.approx(0.1)
    assert pace.seconds_for("other", 10) is None
