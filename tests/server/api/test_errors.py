"""Every error has OpenAI's shape, the right status, and nothing in it that is nobody's business."""

import asyncio
import logging
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import anthropic
import httpx
import openai
import pytest
from starlette.testclient import TestClient

from models.errors import InvalidParameter
from models.prompt.chat_template import ChatTemplateError
from server.api.admin.state import CacheCountsBody
from server.api.app import ADMIN_ROUTES, APIS, start_draining
from server.api.errors import as_api_error
from server.api.openapi import find_other_api
from server.app.config import ServerConfig
from server.app.log_events import RequestRefused
from server.engine.request import (
    EngineError,
    EngineStopped,
    OutOfMemory,
    PromptTooLarge,
    QueueFull,
    StepFailed,
)
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, Script, fake_model

JSON = {"Content-Type": "application/json"}

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}]}


def client_of(engine: FakeEngine | None = None, **settings: Any) -> TestClient:
    return TestClient(create_app(engine or FakeEngine(), fake_model(), ServerConfig(**settings)))


def served_paths() -> list[str]:
    return [route.path for api in APIS for route in api.routes] + [route.path for route in ADMIN_ROUTES]


def error_of(answer: Any, status: int) -> dict[str, Any]:
    """The error object, after a look at what all error answers have in common."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"].startswith("req_")
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in answer.text
    return error


TABLE: list[tuple[Exception, int, str | None, str | None]] = [
    (ChatTemplateError("no such role"), 400, "messages", "template_error"),
    (InvalidParameter("top_p", "top_p is odd"), 400, "top_p", "invalid_value"),
    (QueueFull(3, 7), 429, None, "queue_full"),
    (EngineStopped("x"), 503, None, "server_stopping"),
    (OutOfMemory("too long"), 503, None, "out_of_memory"),
    (PromptTooLarge("too long"), 400, None, "context_length_exceeded"),
    (StepFailed("inner detail"), 500, None, "generation_failed"),
    (EngineError("inner detail"), 500, None, "generation_failed"),
]


@pytest.mark.parametrize(("error", "status", "param", "code"), TABLE)
def test_the_table_of_errors(error: Exception, status: int, param: str | None, code: str | None) -> None:
    known = as_api_error(error)
    assert known is not None
    assert (known.status, known.param, known.code) == (status, param, code)
    assert ("Retry-After" in known.headers) == (status in (429, 503))
    assert "inner detail" not in known.message


def test_what_is_not_in_the_table_is_our_own_fault() -> None:
    assert as_api_error(KeyError("x")) is None


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/v1/responses/a/b", 404, "unknown_path"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("PUT", "/v1/models/tiny", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/v1/models/org/other", 404, "model_not_found"),
        ("GET", "/models/other", 404, "model_not_found"),
        ("GET", "/chat/completions", 405, "method_not_allowed"),
        ("GET", "/v1/v1/models", 404, "unknown_path"),
        ("GET", "/v1/health", 404, "unknown_path"),
    ],
)
def test_unknown_places_and_methods(method: str, path: str, status: int, code: str) -> None:
    answer = client_of().request(method, path)
    assert error_of(answer, status)["code"] == code
    assert ("allow" in answer.headers) == (status == 405)


def test_a_base_url_without_the_v1_reaches_the_same() -> None:
    client = client_of()
    assert client.get("/models").json() == client.get("/v1/models").json()
    assert client.get("/v1/models/").json() == client.get("/v1/models").json()
    assert client.get("/models/tiny").json() == client.get("/v1/models/tiny").json()
    assert client.post("/chat/completions", json=HI).json()["object"] == "chat.completion"
    assert client.post("/completions", json={"prompt": "Hi"}).json()["object"] == "text_completion"


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Bearer secret2", "Basic secret", "secret", "Bearer ü"]
)
@pytest.mark.parametrize(("method", "path"), [("GET", "/models"), ("GET", "/nowhere")])
def test_without_the_key_nothing_is_served(header: str | None, method: str, path: str) -> None:
    headers = {} if header is None else {b"authorization": header.encode()}
    answer = client_of(api_key="secret").request(method, path, headers=headers, json=HI)
    assert error_of(answer, 401)["code"] == "invalid_api_key"
    assert "secret" not in answer.text
    assert answer.headers["www-authenticate"] == "Bearer"


def test_health_needs_no_key_but_shows_numbers_only_with_it() -> None:
    client = client_of(api_key="secret")
    assert client.get("/health").json() == {"status": "ok", "models": ["tiny"], "loading": []}
    with_key = client.get("/health", headers={"Authorization": "Bearer secret"})
    engines = with_key.json()["engines"]
    assert engines.keys() == {"tiny"} and engines["tiny"]["open_requests"] == 0
    assert engines["tiny"]["requests"] == {"waiting": 0, "prefilling": 0, "decoding": 0}
    assert engines["tiny"]["cache"].keys() == CacheCountsBody.__annotations__.keys()


def test_a_key_of_other_letters_is_taken_in_utf_8() -> None:
    client = client_of(api_key="schlüssel à")
    for sent, status in (("schlüssel à", 200), ("schlüssel", 401)):
        headers = {b"Authorization": b"Bearer " + sent.encode()}
        assert client.post(CHAT, json=HI, headers=headers).status_code == status


def test_a_body_announced_as_too_large_is_refused_unread() -> None:
    answer = client_of(max_body_bytes=2000).post(CHAT, content=b"x", headers={**JSON, "Content-Length": "2001"})
    assert error_of(answer, 413)["code"] == "body_too_large"


def test_a_body_without_a_length_is_refused_once_it_is_too_large() -> None:
    def parts() -> Any:
        for _ in range(30):
            yield b"x" * 100

    engine = FakeEngine()
    error = error_of(client_of(engine, max_body_bytes=2000).post(CHAT, content=parts(), headers=JSON), 413)
    assert "2000" in error["message"]


@pytest.mark.parametrize("length", ["abc", "-1", "1e9"])
def test_a_length_that_is_no_number_is_not_believed(length: str) -> None:
    answer = client_of(max_body_bytes=2000).post(CHAT, content=b"{}", headers={**JSON, "Content-Length": length})
    assert answer.status_code == 400


def test_a_stopped_engine_is_503_and_so_is_health() -> None:
    client = client_of(FakeEngine(is_running=False))
    assert error_of(client.post(CHAT, json=HI), 503)["code"] == "server_stopping"
    health = client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "stopped")


def test_a_draining_server_takes_nothing_new() -> None:
    app = create_app(FakeEngine(), fake_model(), ServerConfig())
    client = TestClient(app)
    start_draining(app)
    assert error_of(client.post(CHAT, json=HI), 503)["code"] == "server_stopping"
    health = client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "draining")
    assert client.get("/v1/models").status_code == 200


def test_health_does_not_wait_for_a_running_request() -> None:
    engine = FakeEngine(max_texts=0)
    app = create_app(engine, fake_model(), ServerConfig())

    async def scenario() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            running = asyncio.create_task(client.post(CHAT, json=HI))
            async with asyncio.timeout(120):
                while not engine.requests:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            health = await asyncio.wait_for(client.get("/health"), 120)
            assert health.json()["engines"]["tiny"]["open_requests"] == 1
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            assert engine.cancelled

    asyncio.run(scenario())


def refusals(caplog: pytest.LogCaptureFixture) -> list[RequestRefused]:
    return [record.msg for record in caplog.records if isinstance(record.msg, RequestRefused)]


def test_every_refused_request_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "server")
    client = client_of(FakeEngine(max_waiting=0), api_key="sesame")
    key = {"Authorization": "Bearer sesame"}
    answers = [
        client.post(CHAT, json=HI),
        client.post(CHAT, json={**HI, "temperature": 9}, headers=key),
        client.post(CHAT, json=HI, headers=key),
        client.delete("/v1/models", headers=key),
        client.get("/nothing?key=sesame", headers=key),
    ]
    lines = refusals(caplog)
    assert [line.request_id for line in lines] == [answer.headers["x-request-id"] for answer in answers]
    assert [(line.method, line.path, line.status, line.code) for line in lines] == [
        ("POST", CHAT, 401, "invalid_api_key"),
        ("POST", CHAT, 400, "invalid_value"),
        ("POST", CHAT, 429, "queue_full"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/nothing", 404, "unknown_path"),
    ]
    assert [line.reason for line in lines] == [answer.json()["error"]["message"] for answer in answers]
    assert "sesame" not in caplog.text


def test_what_a_template_says_of_a_conversation_stays_out_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "server")
    engine = FakeEngine(Script(texts=(), error=ChatTemplateError("cannot follow 'my secret'")))
    assert "my secret" in client_of(engine).post(CHAT, json=HI).text
    [line] = refusals(caplog)
    assert line.reason == "the model's chat template refuses these messages"


@pytest.mark.parametrize(
    ("method", "path", "name"),
    [
        ("POST", "/v1/complete", "another of Anthropic's APIs"),
        ("POST", "/v1/moderations", "another of OpenAI's APIs"),
        ("POST", "/v1/files", "the files, agents and accounts of OpenAI and Anthropic"),
        ("POST", "/v1/responses/compact", "another of OpenAI's APIs"),
        ("POST", "/v1/v1/chat/completions", "leave it out of the address"),
    ],
)
def test_an_unknown_path_of_a_known_api_says_which_one(
    method: str, path: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "server")
    assert name in error_of(client_of().request(method, path), 404)["message"]
    assert name in refusals(caplog)[0].reason


@pytest.mark.parametrize("path", ["/index.html", "/apis", "/v1/message", "/favicon.ico"])
def test_a_path_of_no_api_is_only_unknown(path: str) -> None:
    assert error_of(client_of().get(path), 404)["message"] == f"there is no GET {path} here"


@pytest.mark.parametrize("package", [anthropic, openai], ids=lambda package: package.__name__)
def test_every_path_that_a_package_asks_for_is_served_or_named(package: ModuleType) -> None:
    served = {path.removeprefix("/v1").split("/")[1] for path in served_paths()}
    sources = [path.read_text() for path in Path(package.__path__[0], "resources").rglob("*.py")]
    asked = {segment for text in sources for segment in re.findall(r"\"(?:/v1)?/([a-z_]+)[/?\"]", text)}
    assert asked > {"messages"} or asked > {"responses"}
    assert [segment for segment in sorted(asked - served) if find_other_api(f"/v1/{segment}") is None] == []


def test_no_path_that_is_served_is_called_missing() -> None:
    assert not [path for path in served_paths() if find_other_api(path)]
