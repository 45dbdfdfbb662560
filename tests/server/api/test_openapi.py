"""`/openapi.json` is true: it has the paths that are served, and real bodies and answers are as it says."""

import re
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from starlette.testclient import TestClient

from server.api.app import ADMIN_ROUTES, APIS, openapi_document
from server.api.dialect import Endpoint
from server.app.config import ServerConfig
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, Script, fake_model

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
CHAT: dict[str, Any] = {"messages": MESSAGES, "stop": "x", "max_tokens": 5, "session_id": "s", "tool_choice": "none"}
MESSAGE: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "model": "tiny"}
OLLAMA: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": False}
DOCUMENT = openapi_document(APIS)


def client() -> TestClient:
    return TestClient(create_app(FakeEngine(Script(texts=("Hello",))), fake_model(), ServerConfig()))


def check(schema: Any, value: Any) -> None:
    """Raises jsonschema.ValidationError where a value is not as the document says."""
    jsonschema.validate(value, {**schema, "components": DOCUMENT["components"]}, jsonschema.Draft202012Validator)


def operation(method: str, path: str) -> Any:
    return DOCUMENT["paths"][path][method.lower()]


def test_it_has_every_path_and_method_that_is_served_and_no_other() -> None:
    routes = [route for api in APIS for route in api.routes] + list(ADMIN_ROUTES)
    served = {(route.path.replace(":path", ""), name) for route in routes for name in route.methods or ()}
    assert {(path, name) for path, name in served if name != "HEAD"} == {
        (path, name.upper()) for path, methods in DOCUMENT["paths"].items() for name in methods
    }
    assert client().get("/openapi.json").json() == DOCUMENT


def test_every_endpoint_says_what_it_takes_and_gives() -> None:
    assert all(isinstance(route, Endpoint) for api in APIS for route in api.routes)
    names = [method["operationId"] for path in DOCUMENT["paths"].values() for method in path.values()]
    assert len(set(names)) == len(names)
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "Hi", "stop": ["x"], "top_k": 3}),
        ("/v1/completions", {"prompt": [1, 2, 3]}),
        ("/v1/messages", MESSAGE),
        ("/v1/messages/count_tokens", {"messages": MESSAGE["messages"], "model": "tiny"}),
        ("/api/chat", OLLAMA),
        ("/api/generate", {"model": "tiny", "prompt": "Hi", "stream": False}),
        ("/api/show", {"model": "tiny"}),
        ("/apply-template", {"messages": MESSAGES}),
        ("/v1/cache/prime", {"messages": MESSAGES}),
        ("/v1/responses", {"input": "Hi", "text": {"format": {"type": "text"}}, "metadata": {"a": "b"}}),
        ("/v1/responses", {"input": MESSAGES[:1], "tool_choice": "none", "store": False}),
        ("/v1/responses/input_tokens", {"input": "Hi"}),
        ("/v1/conversations", {"items": [{"role": "user", "content": "Hi"}]}),
    ],
)
def test_bodies_and_answers_are_as_it_says(path: str, body: dict[str, Any]) -> None:
    described = operation("post", path)
    check(described["requestBody"]["content"]["application/json"]["schema"], body)
    answer = client().post(path, json=body)
    assert answer.status_code == 200, answer.text
    check(described["responses"]["200"]["content"]["application/json"]["schema"], answer.json())
    refused = client().post(path, json={**body, "messages": 3, "prompt": 3, "model": 3})
    assert refused.status_code == 400
    check(described["responses"]["default"]["content"]["application/json"]["schema"], refused.json())


READ = "/v1/models /v1/models/tiny /v1/sessions /v1/sessions/s /health /ready /api/tags /api/ps /api/version /props"


@pytest.mark.parametrize("path", READ.split())
def test_what_is_read_is_as_it_says(path: str) -> None:
    asked = client()
    asked.post("/v1/chat/completions", json=CHAT)
    keys = (path, path.rpartition("/")[0] + "/{model_id}", "/v1/sessions/{session_id}")
    described = next(key for key in keys if key in DOCUMENT["paths"])
    content = operation("get", described)["responses"]["200"]["content"]["application/json"]
    answer = asked.get(path)
    assert answer.status_code == 200, answer.text
    check(content["schema"], answer.json())


def test_what_is_kept_is_as_it_says() -> None:
    asked = client()
    response = asked.post("/v1/responses", json={"input": "Hi"}).json()["id"]
    conversation = asked.post("/v1/conversations", json={"items": [{"role": "user", "content": "Hi"}]}).json()["id"]
    names = {"/v1/responses/{response_id}": response, "/v1/conversations/{conversation_id}": conversation}
    for described, name in names.items():
        items = "/input_items" if "response" in described else "/items"
        for path in (described, described + items):
            answer = asked.get(re.sub(r"{\w+}", name, path))
            assert answer.status_code == 200, answer.text
            check(operation("get", path)["responses"]["200"]["content"]["application/json"]["schema"], answer.json())


@pytest.mark.parametrize(
    ("method", "path", "wrongs"),
    [
        ("get", "/ready", [{}, {"status": 3}, {"status": "ok", "more": 1}]),
        ("post", "/v1/messages/count_tokens", [{}, {"input_tokens": "3"}, {"input_tokens": 3, "more": 1}]),
    ],
)
def test_an_answer_that_is_not_as_it_says_is_found_out(method: str, path: str, wrongs: list[Any]) -> None:
    schema = operation(method, path)["responses"]["200"]["content"]["application/json"]["schema"]
    for wrong in wrongs:
        with pytest.raises(jsonschema.ValidationError):
            check(schema, wrong)
