"""Who owns a server sees all namespaces: on its own machine, by hand, where no key is asked for. Nobody else does."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from server.app.config import ServerConfig
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, fake_model

HERE, ELSEWHERE = "127.0.0.1", "192.168.1.9"


def serving(host: str = HERE, api_key: str | None = None) -> TestClient:
    """A client at an address, of a server on which `theirs` was asked under another salt."""
    app = create_app(FakeEngine(), fake_model(), ServerConfig(api_key=api_key))
    client = TestClient(app, base_url="http://127.0.0.1:8080", client=(host, 50_000))
    body = {"messages": [{"role": "user", "content": "Hi"}], "session_id": "theirs", "cache_salt": "x"}
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    assert client.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
    return client


def seen(client: TestClient, **headers: str) -> list[str]:
    return [one["id"] for one in client.get("/v1/sessions", headers=headers).json()["data"]]


@pytest.mark.parametrize("host", [HERE, "::1", "::ffff:127.0.0.1"])
def test_who_sits_at_the_machine_sees_all(host: str) -> None:
    client = serving(host)
    assert seen(client) == ["theirs"]
    assert client.get("/v1/sessions/theirs?namespace=/x").status_code == 200
    assert client.delete("/v1/sessions/theirs?namespace=/x").status_code == 200


@pytest.mark.parametrize(
    ("api_key", "headers", "said"),
    [
        (
            None,
            {"Via": "1.1 proxy"},
            "without a key on its own machine, or by an operator's key from a file for --api-keys",
        ),
        (
            "secret",
            {"Authorization": "Bearer secret"},
            "it has none; give one with operator = true in a file for --api-keys",
        ),
    ],
)
def test_who_may_not_is_told_what_to_set(api_key: str | None, headers: dict[str, str], said: str) -> None:
    answer = serving(HERE, api_key).get("/v1/cache/export", headers=headers)
    assert answer.status_code == 403 and said in answer.json()["error"]["message"].replace("of which ", "")


@pytest.mark.parametrize(
    ("host", "api_key", "headers"),
    [
        (ELSEWHERE, None, {}),
        (HERE, None, {"X-Forwarded-For": "10.0.0.1"}),
        (HERE, None, {"Forwarded": "for=10.0.0.1"}),
        (HERE, None, {"X-Real-IP": "10.0.0.1"}),
        (HERE, None, {"Via": "1.1 proxy"}),
        (HERE, None, {"Host": "mac.local:8080"}),
        (HERE, None, {"Host": "127.0.0.1.example.internal"}),
        (HERE, None, {"Host": "mac.local", "Origin": "http://mac.local"}),
        (HERE, None, {"Authorization": "Bearer mine"}),
        (HERE, "secret", {"Authorization": "Bearer secret"}),
    ],
)
def test_nobody_else_does(host: str, api_key: str | None, headers: dict[str, str]) -> None:
    client = serving(host, api_key)
    assert seen(client, **headers) == []
    path = "/v1/sessions/theirs?namespace=/x"
    answers: list[Any] = [client.get(path, headers=headers), client.delete(path, headers=headers)]
    assert [answer.status_code for answer in answers] == [404, 404]
    assert len(client.app.state.api.sessions.of(None)) == 1  # type: ignore[attr-defined]
