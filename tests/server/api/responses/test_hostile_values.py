"""Half characters, NULs, huge numbers, NaN and deep nesting anywhere in a body: no answer is a 5xx, all are JSON."""

import copy
import json
import random
from typing import Any

import pytest
from starlette.testclient import TestClient

from models.prompt.chat_template import ChatRenderer
from server.api.app import create_app
from server.api.responses.output import enclose
from server.app.config import ServerConfig
from tests.server.api.test_hostile_values import HOSTILE, JSON, TELLS_ALL, places, with_value
from tests.support import tiny_models
from tests.support.fake_engine import FakeEngine, Script, fake_model

ITEMS: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be terse."},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}], "id": "msg_1"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": enclose("Hm")},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "content": None},
    {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}', "namespace": "n"},
    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "5"}]},
    {"type": "custom_tool_call", "call_id": "c2", "name": "p", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": "y"},
    {"type": "local_shell_call", "call_id": "c3", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "local_shell_call_output", "id": "c3", "output": "z"},
    {"type": "web_search_call", "id": "ws", "status": "completed"},
]
PROMPT: dict[str, Any] = {
    "model": "tiny",
    "instructions": "Be kind.",
    "input": ITEMS,
    "tools": [
        {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": False},
        {"type": "custom", "name": "p", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}},
        {"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "function", "name": "f"}]},
        {"type": "web_search"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "truncation": "disabled",
}
RESPONSE: dict[str, Any] = {
    **PROMPT,
    "stream": False,
    "max_output_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.5,
    "store": True,
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "prompt_cache_key": "k",
    "service_tier": "auto",
    "cache_salt": "salt",
    "priority": "interactive",
    "max_tool_calls": 1,
}
BODIES = {
    "/v1/responses": RESPONSE,
    "/v1/responses/input_tokens": PROMPT,
    "/v1/conversations": {"items": ITEMS, "metadata": {"a": "b"}},
}


@pytest.fixture(scope="module")
def client() -> TestClient:
    tokenizer = copy.copy(tiny_models.tokenizer())
    tokenizer.chat_template = TELLS_ALL
    model = fake_model(renderer=ChatRenderer(tokenizer), context_tokens=100_000)
    return TestClient(create_app(FakeEngine(Script(("Hi",))), model, ServerConfig()), raise_server_exceptions=False)


def assert_served(client: TestClient, path: str, raw: str) -> None:
    answer = client.post(path, content=raw.encode(), headers=JSON)
    assert answer.status_code < 500, (answer.text, raw[:3000])
    payloads = [answer.text]
    if answer.headers["content-type"].startswith("text/event-stream"):
        payloads = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
        assert json.loads(payloads[-1])["type"] == "response.completed", raw[:3000]
    for payload in payloads:
        assert json.dumps(json.loads(payload), ensure_ascii=False).encode()


@pytest.mark.parametrize("path", BODIES)
def test_the_bodies_are_taken_as_they_are(client: TestClient, path: str) -> None:
    answer = client.post(path, json=BODIES[path])
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("seed", range(4))
def test_no_value_in_any_place_fails_the_server(client: TestClient, path: str, seed: int) -> None:
    rng = random.Random(seed)
    body = {**BODIES[path], "stream": seed % 2 == 1} if path == "/v1/responses" else BODIES[path]
    for place in places(body):
        assert_served(client, path, with_value(body, place, rng.choice(HOSTILE)))
