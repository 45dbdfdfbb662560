"""`/v1/sessions` tells what each session's turns cost, to its own namespace only."""

import re
import time
from typing import Any
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

from server.diagnosis.causes import Cause, Miss, MissReason, advice
from server.engine.commands import forget_session
from server.engine.request import FinishReason, StepFailed
from tests.support.fake_engine import FakeEngine, Script

CHAT = "/v1/chat/completions"
CLOCKED = (MissReason.SYSTEM_CHANGED, 0, "system", 17, "It is 09:16", "It is 09:17")
MISS = Miss(*CLOCKED, cause=Cause.CLOCK, lost_tokens=3)
MISSED = Script(hit_tokens=2, miss=MISS)


def ask(client: TestClient, session_id: str | None, key: str | None = None, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "Hi"}], "session_id": session_id, **fields}
    return client.post(CHAT, json=body, headers=bearer(key))


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def sessions(client: TestClient, key: str | None = None, path: str = "/v1/sessions") -> list[str]:
    answer = client.get(path, headers=bearer(key))
    assert answer.status_code == 200
    assert answer.json()["object"] == "list"
    return [session["id"] for session in answer.json()["data"]]


def turns(client: TestClient, session_id: str = "s") -> list[dict[str, Any]]:
    return list(client.get(f"/v1/sessions/{session_id}").json()["turns"])


@pytest.mark.parametrize("stream", [True, False])
def test_a_turn_is_there_with_its_cost_and_its_miss(client: TestClient, engine: FakeEngine, stream: bool) -> None:
    before = time.time()
    ask(client, "s")
    engine.script = MISSED
    ask(client, "s", stream=stream)
    num_prompt = len(engine.requests[0].tokens)
    session = client.get("/v1/sessions/s").json()
    last_miss = {
        "reason": "system_changed", "cause": "date or time", "message_index": 0, "role": "system", "token": 17,
        "before": "It is 09:16", "after": "It is 09:17", "lost_tokens": 3, "missing_bytes": None,
        "cure": advice(Cause.CLOCK, "system"),
    }  # fmt: skip
    turn = session["turns"][-1]
    assert before <= session.pop("created") <= session["turns"][0].pop("ended") <= turn["ended"] <= time.time()
    assert session.pop("last_used") == turn.pop("ended")
    assert turn == {
        "id": engine.requests[1].request_id, "previous": engine.requests[0].request_id, "model": "tiny",
        "finish": "stop", "prompt_tokens": num_prompt, "cached_tokens": 2, "evaluated_tokens": num_prompt - 2,
        "completion_tokens": 3, "prompt_ms": 20.0, "tier": "memory", "rounded_tokens": 0, "kept": 0.5,
        "lost_tokens": 3, "lost_seconds": pytest.approx(0.02 * 3 / (num_prompt - 2)), "miss": last_miss,
        "misses": [last_miss], "healed": None,
    }  # fmt: skip
    assert session["turns"][0]["kept"] is None and session["turns"][0]["miss"]["reason"] == "cold"
    del session["turns"]
    assert session == {
        "id": "s", "object": "session", "named": True, "namespace": "", "key": None, "title": "Hi",
        "client": "testclient", "model": "tiny", "num_turns": 2, "prompt_tokens": 2 * num_prompt,
        "cached_tokens": 2, "evaluated_tokens": 2 * num_prompt - 2, "completion_tokens": 6, "lost_tokens": 3,
        "lost_seconds": turn["lost_seconds"], "healed_tokens": 0, "rounded_tokens": 0, "kept": 0.5,
        "last_miss": last_miss, "repeated_call": None,
    }  # fmt: skip


def test_the_list_holds_what_each_session_holds_but_its_turns(client: TestClient) -> None:
    ask(client, "s")
    listed = client.get("/v1/sessions").json()["data"]
    alone = client.get("/v1/sessions/s").json()
    del alone["turns"]
    assert listed == [alone]


def test_a_session_has_its_first_question_and_its_client(client: TestClient) -> None:
    body = {"messages": [{"role": "user", "content": "Where is the door?"}], "session_id": "door"}
    assert client.post("/v1/chat/completions", json=body, headers={"User-Agent": "agent/1.2 (linux)"}).is_success
    (listed,) = client.get("/v1/sessions").json()["data"]
    assert (listed["title"], listed["client"]) == ("Where is the door?", "agent/1.2")
    assert client.get("/v1/sessions/door").json()["title"] == "Where is the door?"


def test_the_last_used_comes_first_and_a_request_without_a_session_has_a_made_up_name(client: TestClient) -> None:
    for session_id in ("a", None, "b", "a"):
        ask(client, session_id)
    listed = client.get("/v1/sessions").json()["data"]
    assert [(one["id"] if one["named"] else None) for one in listed] == ["a", "b", None]
    assert re.fullmatch(r"unnamed-[0-9a-f]{8}", listed[2]["id"])


@pytest.mark.parametrize("session_id", ["a/b", "a b?c=d", "…", "pin/"])
def test_any_name_of_a_session_can_be_asked_for(client: TestClient, session_id: str) -> None:
    ask(client, session_id)
    path = f"/v1/sessions/{quote(session_id, safe='')}"
    assert client.get(path).json()["id"] == session_id
    assert client.delete(path).status_code == 200
    assert sessions(client) == []


def test_an_answer_cut_off_by_the_limit_and_one_that_failed_are_turns_too(
    client: TestClient, engine: FakeEngine
) -> None:
    engine.script = Script(reason=FinishReason.LENGTH)
    ask(client, "s")
    engine.script = Script(hit_tokens=2, error=StepFailed("broken"))
    ask(client, "s")
    assert [turn["finish"] for turn in turns(client)] == ["length", "failed (StepFailed)"]
    failed = turns(client)[1]
    assert failed["evaluated_tokens"] == failed["prompt_tokens"] - 2
    assert failed["prompt_ms"] >= 0


def test_what_never_got_a_slot_is_no_turn(client: TestClient, engine: FakeEngine) -> None:
    engine.max_waiting = 0
    assert ask(client, "s").status_code == 429
    assert sessions(client) == []


def test_every_key_and_every_salt_sees_its_own_sessions_only(client: TestClient) -> None:
    for key in (None, "one", "two"):
        ask(client, f"of-{key}", key)
        ask(client, "shared-name", key)
    ask(client, "salted", "one", cache_salt="a&b")
    for key in (None, "one", "two"):
        assert sessions(client, key) == ["shared-name", f"of-{key}"]
    assert sessions(client, "three") == []
    assert sessions(client, "one", "/v1/sessions?cache_salt=a%26b") == ["salted"]
    assert sessions(client, "two", "/v1/sessions?cache_salt=a%26b") == []


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_anothers_session_is_answered_like_one_that_never_was(
    client: TestClient, engine: FakeEngine, method: str
) -> None:
    ask(client, "theirs", "one")
    answers = [
        client.request(method, f"/v1/sessions/{name}", headers=bearer("two")) for name in ("theirs", "unknown")
    ]
    assert [answer.status_code for answer in answers] == [404, 404]
    assert [answer.text.replace("unknown", "theirs") for answer in answers] == [answers[0].text] * 2
    assert answers[0].json()["error"]["code"] == "session_not_found"
    assert engine.commands == []
    assert sessions(client, "one") == ["theirs"]


def test_a_deleted_session_is_forgotten_here_and_in_the_engine(client: TestClient, engine: FakeEngine) -> None:
    ask(client, "s")
    deleted = client.delete("/v1/sessions/s")
    assert deleted.json() == {"id": "s", "object": "session.deleted", "deleted": True}
    assert engine.commands == [(forget_session, "", "s")]
    assert client.delete("/v1/sessions/s").status_code == 404
    ask(client, "s")
    assert len(turns(client)) == 1


def test_a_session_can_be_deleted_when_the_engine_has_stopped(client: TestClient, engine: FakeEngine) -> None:
    ask(client, "s")
    engine.is_running = False
    assert client.delete("/v1/sessions/s").status_code == 200


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_a_path_that_ends_before_the_name_says_where_sessions_are_listed(client: TestClient, method: str) -> None:
    answer = client.request(method, "/v1/sessions/")
    assert answer.status_code == 404
    assert "GET /v1/sessions lists them" in answer.json()["error"]["message"]
