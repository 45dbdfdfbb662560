"""What was refused is told to whom it was refused, in `/v1/sessions` and by the doctor, within bounds."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from server.api.sessions import MAX_ALL_REFUSALS, MAX_REFUSALS, Refusal, Refusals
from server.app.config import ServerConfig
from server.engine.request import OutOfMemory
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, Script, fake_model

CHAT = "/v1/chat/completions"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def ask(client: TestClient, content: Any = "Hi", key: str = "k", **fields: Any) -> int:
    body = {"messages": [{"role": "user", "content": content}], **fields}
    return client.post(CHAT, json=body, headers={"Authorization": f"Bearer {key}"}).status_code


def refused(client: TestClient, key: str = "k", query: str = "") -> list[dict[str, Any]]:
    answer = client.get(f"/v1/sessions{query}", headers={"Authorization": f"Bearer {key}"})
    return list(answer.json()["refused"])


@pytest.mark.parametrize(
    ("content", "fields", "code", "words"),
    [
        ([IMAGE], {}, "invalid_value", "takes no images"),
        ("a" * 300, {}, "context_length_exceeded", "leaves room for at most"),
        ("Hi", {"temperature": -1}, "invalid_value", "temperature"),
        ("Hi", {"messages": 3}, "invalid_type", "messages"),
        ("Hi", {"best_of": 3}, "unsupported_parameter", "best_of"),
        ("Hi", {"model": "gpt-4o"}, "model_not_found", "gpt-4o"),
    ],
)
def test_what_is_refused_is_listed(
    client: TestClient, content: Any, fields: dict[str, Any], code: str, words: str
) -> None:
    for _ in range(2):
        assert ask(client, content, session_id="s", **fields) in (400, 404)
    (one,) = refused(client)
    assert (one["code"], one["path"], one["session_id"], one["count"]) == (code, CHAT, "s", 2)
    assert words in one["message"]


def test_every_key_and_every_salt_sees_its_own_and_the_owner_all() -> None:
    app = create_app(FakeEngine(), fake_model(), ServerConfig())
    client = TestClient(app, base_url="http://127.0.0.1", client=("127.0.0.1", 50000))
    ask(client, key="a", temperature=-1)
    ask(client, key="a", temperature=-2, cache_salt="x")
    assert len(refused(client, "a")) == len(refused(client, "a", "?cache_salt=x")) == 1
    assert refused(client, "b") == []
    assert len(client.get("/v1/sessions").json()["refused"]) == 2


def test_who_lacks_the_key_leaves_no_trace() -> None:
    client = TestClient(create_app(FakeEngine(), fake_model(), ServerConfig(api_key="k")))
    assert ask(client, key="other") == 401
    assert refused(client) == []
    client.post("/api/nothing", json={}, headers={"Authorization": "Bearer k"})
    client.get("/favicon.ico", headers={"Authorization": "Bearer k"})
    assert [one["code"] for one in refused(client)] == ["unknown_path"]


def test_what_there_is_no_memory_for_is_listed_and_no_body_is_needed(client: TestClient) -> None:
    engine = client.app.state.api.pool.engines["tiny"]  # type: ignore[attr-defined]
    engine.script = Script(error=OutOfMemory("no memory"))
    ask(client)
    client.post(CHAT, content=b"{", headers={"Authorization": "Bearer k", "Content-Type": "application/json"})
    assert [one["code"] for one in refused(client)] == ["invalid_json", "out_of_memory"]


def test_a_deleted_session_takes_its_refusals_along(client: TestClient) -> None:
    ask(client, session_id="s")
    ask(client, session_id="s", temperature=-1)
    ask(client, session_id="t", temperature=-2)
    client.delete("/v1/sessions/s", headers={"Authorization": "Bearer k"})
    assert [one["session_id"] for one in refused(client)] == ["t"]


def test_refusals_are_bounded() -> None:
    refusals = Refusals()
    for number in range(3 * MAX_REFUSALS):
        refusals.record(refusal("busy", f"the prompt has {number} tokens"))
    assert len(refusals.of("busy")) == MAX_REFUSALS
    for number in range(MAX_ALL_REFUSALS + 5):
        refusals.record(refusal(str(number), "no"))
    assert len(refusals.of(None)) == MAX_ALL_REFUSALS and not refusals.of("busy")


def refusal(namespace: str, message: str) -> Refusal:
    return Refusal("req_1", namespace, None, 1.0, CHAT, 400, "invalid_value", None, message)
