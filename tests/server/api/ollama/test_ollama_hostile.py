"""Whatever stands in a field, the answer is the dialect's own: 200, or an error that a client can have caused."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from server.api.app import create_app
from server.api.llama_cpp.api import DetokenizeBody, TokenizeBody
from server.api.ollama.fields import IN_CHAT, IN_GENERATE, IN_MESSAGE, IN_OPTIONS
from server.app.config import ServerConfig
from tests.server.api.test_live import Live, serving
from tests.support import tiny_models
from tests.support.fake_engine import FakeEngine, fake_model

NESTED: Any = [[[[[[{}]]]]]]
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**400, 0.5, -0.5, 1e308, "", " ", "json", "x" * 3000,
    "\u0000", [], [""], [0], [-1], [None], [{}], {}, {"": None}, {"role": "user"}, {"type": "object"}, NESTED,
]  # fmt: skip
MESSAGE = {"role": "user", "content": "Hi"}
OTHER_MESSAGES: list[Any] = [
    [{"role": "tool", "content": "x"}],
    [MESSAGE, {"role": "tool", "tool_name": "f", "content": "x"}],
    [MESSAGE, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
    [MESSAGE, {"role": "assistant", "thinking": "x"}, MESSAGE],
    [MESSAGE, MESSAGE, {"role": "system", "content": "x"}],
    [{"role": "developer", "content": "x"}, MESSAGE],
    [{"role": "nobody"}],
    [{"role": "system"}],
    [MESSAGE] * 300,
]


def bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    for value in VALUES:
        yield from (("/api/chat", {"messages": [MESSAGE], name: value}) for name in IN_CHAT)
        yield from (("/api/generate", {"prompt": "Hi", name: value}) for name in IN_GENERATE)
        yield from (("/api/chat", {"messages": [{**MESSAGE, name: value}]}) for name in IN_MESSAGE)
        yield from (("/api/chat", {"messages": [MESSAGE], "options": {name: value}}) for name in IN_OPTIONS)
        yield from (("/api/show", {name: value}) for name in ("model", "name", "verbose"))
        yield from (("/tokenize", {"content": "Hi", name: value}) for name in TokenizeBody.model_fields)
        yield from (("/detokenize", {name: value}) for name in DetokenizeBody.model_fields)
        yield "/apply-template", {"messages": value}
    yield from (("/api/chat", {"messages": messages}) for messages in OTHER_MESSAGES)


def check(path: str, body: Any, answer: Any) -> None:
    assert answer.status_code in (200, 400, 404), (path, str(body)[:300], answer.text[:300])
    assert "internal error" not in answer.text
    if answer.status_code != 200:
        said = answer.json()["error"]
        assert said and isinstance(said, str if path.startswith("/api/") else dict), answer.text


def test_no_value_of_any_field_is_our_fault() -> None:
    client = TestClient(create_app(FakeEngine(), fake_model(), ServerConfig()), raise_server_exceptions=False)
    for path, fields in itertools.islice(bodies(), 0, None, 3):
        body = {"model": "tiny", "stream": False, **fields}
        check(path, body, client.post(path, content=json.dumps(body), headers={"content-type": "application/json"}))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tiny_models.write("llama", tmp_path_factory.mktemp("hostile") / "tiny")
    with serving(folder) as server:
        yield server


def test_a_real_model_survives_them(live: Live) -> None:
    some = itertools.islice(bodies(), 0, None, 13)
    for path, fields in (*some, *(("/api/chat", {"messages": messages}) for messages in OTHER_MESSAGES)):
        options = {"num_predict": 2, **options_of(fields)}
        body = {"model": "tiny", "stream": False, **fields}
        if path.startswith("/api/") and isinstance(options, dict):
            body["options"] = options
        check(path, body, live.post(path, **body))
    assert live.http.get("/health").json()["status"] == "ok"


def options_of(fields: dict[str, Any]) -> dict[str, Any]:
    options = fields.get("options")
    return options if isinstance(options, dict) else {}
