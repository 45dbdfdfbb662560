"""What a load balancer goes by: who served an answer, whose session it was, and whether more would be taken."""

import socket
from dataclasses import replace
from importlib.metadata import version
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from starlette.testclient import TestClient

from server.api.app import start_draining
from server.app.config import ServerConfig
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, fake_model
from tests.support.live_server import running

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}]}


def client_of(engine: FakeEngine | None = None, **settings: Any) -> TestClient:
    return TestClient(create_app(engine or FakeEngine(), fake_model(), ServerConfig(**settings)))


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/models"), ("GET", "/nowhere"), ("POST", CHAT), ("GET", "/")]
)
def test_every_answer_names_the_program_and_its_version(method: str, path: str) -> None:
    assert client_of().request(method, path).headers.get_list("server") == [f"mlx-serve/{version('mlx-serve')}"]


def test_programs_can_tell_who_answers() -> None:
    """Another program says `owned_by: mlx-serve` too, which tools compare; with the version it is another text."""
    client, product = client_of(), f"mlx-serve/{version('mlx-serve')}"
    assert [model["owned_by"] for model in client.get("/v1/models").json()["data"]] == [product]
    answer = client.post(CHAT, json={"messages": [{"role": "user", "content": "Hi"}]}).json()
    assert answer["system_fingerprint"] == product
    assert client.get("/api/version").json()["version"].endswith(f"+mlx-serve.{version('mlx-serve')}")


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("GET", "/nowhere"), ("POST", CHAT)])
def test_every_answer_says_who_served_it(method: str, path: str) -> None:
    assert client_of(name="attic").request(method, path).headers["x-served-by"] == "attic"
    assert client_of().request(method, path).headers["x-served-by"] == socket.gethostname()
    assert unquote(client_of(name="küche 猫").request(method, path).headers["x-served-by"]) == "küche 猫"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "headers"),
    [({"session_id": "chat-7"}, {}), ({"prompt_cache_key": "chat-7"}, {}), ({}, {"x-smg-routing-key": "chat-7"})],
)
def test_an_answer_names_the_session_wherever_it_stood(
    fields: dict[str, str], headers: dict[str, str], stream: bool
) -> None:
    answer = client_of().post(CHAT, json={**HI, **fields, "stream": stream}, headers=headers)
    assert answer.headers["x-session-id"] == "chat-7"
    assert answer.headers["x-request-id"]


def test_a_session_of_any_letters_is_named_and_none_is_not() -> None:
    answer = client_of().post(CHAT, json={**HI, "session_id": "Gespräch 猫"})
    assert unquote(answer.headers["x-session-id"]) == "Gespräch 猫"
    assert "x-session-id" not in client_of().post(CHAT, json=HI).headers


@pytest.mark.parametrize("session", [" ", " a", "a "])
def test_a_session_that_no_header_can_hold_as_it_is_is_named_in_percent_signs(session: str) -> None:
    with running(create_app(FakeEngine(), fake_model(), ServerConfig())) as address:
        answer = httpx.post(f"{address}{CHAT}", json={**HI, "session_id": session})
    assert answer.status_code == 200
    named = answer.headers["x-session-id"]
    assert unquote(named) == session and " " not in named


def test_ready_as_long_as_one_more_request_would_be_taken() -> None:
    engine = FakeEngine()
    client = client_of(engine, slots=2, max_waiting=1, api_key="secret")
    assert (client.get("/ready").status_code, client.get("/ready").json()) == (200, {"status": "ok"})
    engine.stats = lambda: replace(FakeEngine().stats(), num_open=2)  # type: ignore[method-assign]
    assert client.get("/ready").status_code == 200
    engine.stats = lambda: replace(FakeEngine().stats(), num_open=3)  # type: ignore[method-assign]
    assert (client.get("/ready").status_code, client.get("/ready").json()) == (503, {"status": "full"})
    assert client.get("/health").status_code == 200


def test_a_server_that_stops_is_not_ready() -> None:
    app = create_app(FakeEngine(), fake_model(), ServerConfig())
    start_draining(app)
    answer = TestClient(app).get("/ready")
    assert (answer.status_code, answer.json()) == (503, {"status": "draining"})


def test_health_and_release_have_the_names_that_vllm_has_for_them() -> None:
    client = client_of(api_key="secret")
    for answer in (client.get("/ping"), client.post("/ping")):
        assert (answer.status_code, answer.json()["status"]) == (200, "ok")
    assert client.get("/version").status_code == 401
    told = client.get("/version", headers={"Authorization": "Bearer secret"}).json()
    assert told == {"version": version("mlx-serve")}
