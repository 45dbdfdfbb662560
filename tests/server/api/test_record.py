"""What is told of a request that has ended: each subscriber is one function of its record."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from models.inference.sampling_params import SamplingParams
from server.api import record as module
from server.api.activity import MAX_NAMESPACES, Activity, EventLog, LostTokens, ended_fields
from server.api.observe import span_attributes
from server.api.record import Arrival, OpenRequest, RequestRecord, ended_entry
from server.diagnosis.account import Name
from server.diagnosis.causes import Miss, MissReason, Reuse
from server.engine.request import (
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    OutOfMemory,
    Progress,
    Started,
    StepFailed,
    Timings,
)

ARRIVAL = Arrival("/v1/chat/completions", received=100.0, key_name="alice")
REQUEST = GenerationRequest(
    "r-1", np.zeros(50, np.int32), 9, sampling=SamplingParams(seed=7), session_id="s", namespace="ours"
)
MISS = Miss(MissReason.SYSTEM_CHANGED, 0, "system", 2, before="secret", after="words", lost_tokens=8)
STARTED = Started(3, 50, 30, 30, restore_ms=500.0, tier="disk", reuse=Reuse((MISS,), 0.5))
TEXT = Delta("x", (1, 2))
ENDED = Finished(FinishReason.STOP, 50, Timings(30, 20, 400.0, 5, 800.0))


def opened(events: Sequence[Event] = (), **changes: Any) -> OpenRequest:
    """A request that got its slot at 102 s, and its first text at 103 s."""
    one = OpenRequest(REQUEST, "tiny", ARRIVAL, **changes)
    for event in events:
        one.observe(event)
    if one.started is not None:
        one.started_at = 102.0
    if one.first_text_at is not None:
        one.first_text_at = 103.0
    return one


def recorded(*choices: OpenRequest, **fields: Any) -> RequestRecord:
    return RequestRecord(choices, ended=105.0, ended_at=2000.0, **fields)


WELL = recorded(opened([STARTED, Progress(50, 50), TEXT, ENDED], name=Name("ours", "s")), turn_number=2)
FAILED = recorded(opened([STARTED, TEXT, Failed(OutOfMemory("no memory"))]))
LEFT = recorded(opened([STARTED, Progress(44, 50)]))
QUEUED = recorded(opened())
STOPPED = recorded(opened([STARTED, TEXT, Finished(FinishReason.CANCELLED, 50, Timings(30, 20, 400.0, 2, 800.0))]))


def test_a_turn_has_the_costs_of_its_request() -> None:
    turn = WELL.turn
    assert (turn.id, turn.model, turn.ended, turn.finish) == ("r-1", "tiny", 2000.0, "stop")
    assert (turn.prompt_tokens, turn.cached_tokens, turn.evaluated_tokens, turn.completion_tokens) == (50, 30, 20, 5)
    assert (turn.prompt_ms, turn.tier, turn.kept, turn.lost_tokens) == (400.0, "disk", 0.5, 8)
    assert turn.lost_seconds == pytest.approx(0.4 * 8 / 20) and turn.miss == MISS
    assert (LEFT.turn.finish, LEFT.turn.prompt_ms) == ("cancelled", 3000.0)
    assert (QUEUED.turn.prompt_ms, QUEUED.turn.misses) == (0.0, []), "it never held a slot"


def test_nothing_evaluated_costs_no_time() -> None:
    started = recorded(opened([STARTED, Progress(30, 50)])).turn
    assert (started.evaluated_tokens, started.lost_tokens, started.lost_seconds) == (0, 0, 0.0)


@pytest.mark.parametrize(
    ("record", "finish", "error", "first_token_ms"),
    [
        (WELL, "stop", None, 3000.0),
        (FAILED, "failed (OutOfMemory)", "no memory", 3000.0),
        (LEFT, "cancelled", None, None),
        (STOPPED, "cancelled", None, 3000.0),
        (QUEUED, "cancelled", None, None),
    ],
)
def test_the_log_says_how_it_ended(
    record: RequestRecord, finish: str, error: str | None, first_token_ms: float | None
) -> None:
    entry = ended_entry(record)
    assert (entry.finish, entry.error, entry.first_token_ms, entry.total_ms) == (
        finish,
        error,
        first_token_ms,
        5000.0,
    )
    assert (entry.request_id, entry.session_id, entry.key, entry.turn) == ("r-1", "s", "alice", record.turn_number)
    assert entry.tokens_per_second == (5.0 if record is WELL else None)
    assert (record.failure is None) == (record is WELL)
    assert "secret" not in str(entry)


def test_an_event_tells_the_figures_of_its_own_choice() -> None:
    other = opened([STARTED, ENDED], is_first=False, repeats_prompt=True)
    record = recorded(WELL.first, other)
    first, second = ended_fields(record, WELL.first), ended_fields(record, other)
    assert (first["finish"], first["completion_tokens"], first["total_ms"], first["lost_tokens"]) == (
        "stop",
        5,
        5000.0,
        8,
    )
    assert (second["lost_tokens"], second["miss"]) == (0, None), "the first choice tells of the turn"
    assert (second["prompt_tokens"], second["cached_tokens"]) == (50, 30), "each choice tells of its prompt"
    assert (record.turn.prompt_tokens, record.turn.cached_tokens, record.turn.completion_tokens) == (50, 30, 10)


def test_a_trace_tells_why_a_request_ended() -> None:
    assert span_attributes(WELL)["gen_ai.response.finish_reasons"] == ("stop",)
    assert span_attributes(FAILED)["error.type"] == "OutOfMemory"
    told = span_attributes(LEFT)
    assert (told["error.type"], told["gen_ai.conversation.id"], told["gen_ai.request.seed"]) == ("cancelled", "s", 7)
    assert (told["mlx_serve.tier"], told["mlx_serve.lost_tokens"]) == ("disk", 8)
    of_text = replace(ARRIVAL, endpoint="/completion")
    assert span_attributes(recorded(OpenRequest(REQUEST, "m", of_text)))["gen_ai.operation.name"] == "text_completion"


def test_the_time_to_go_follows_from_the_speed_of_late(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "server.api.record")
    times = iter([100.0, 104.0, 110.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(times)))
    one = OpenRequest(REQUEST, "tiny", ARRIVAL)
    one.observe(Started(0, 50, 10, 10))
    for evaluated in (30, 36):
        one.observe(Progress(evaluated, 50))
    told: list[Any] = [entry.msg for entry in caplog.records]
    assert [one.tokens_per_second for one in told] == [20 / 4, 6 / 6]


# --------------------------------------------- sums: of a namespace, and of all together


def make() -> Activity:
    return Activity(EventLog("e", wall=lambda: 0.0, clock=lambda: 0.0), dict)


def of_namespace(namespace: str = "", events: Sequence[Event] = ()) -> OpenRequest:
    tokens = np.zeros(100, np.int32)
    one = OpenRequest(GenerationRequest("r", tokens, 9, namespace=namespace), "m", Arrival("/v1/completions", 0.0))
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
    return RequestRecord((of_namespace(namespace, events),), saved_seconds=saved)


def test_sums_are_kept_by_namespace_and_of_all() -> None:
    totals = make()
    totals.tell(answered("ours", (Miss(MissReason.EVICTED, lost_tokens=40),), 1.5))
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
    failed = RequestRecord((of_namespace(events=[Failed(StepFailed("x"))]),))
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
