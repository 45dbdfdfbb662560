"""Half characters, NULs, huge numbers, NaN and deep nesting anywhere in a body: no answer is a 5xx, all are JSON."""

import copy
import json
import random
from typing import Any

import pytest
from starlette.testclient import TestClient

from models.prompt.chat_template import ChatRenderer
from server.api.anthropic.content import enclose
from server.api.app import create_app
from server.app.config import ServerConfig
from tests.server.api.test_hostile_values import HOSTILE, JSON, TELLS_ALL, places, with_value
from tests.support import tiny_models
from tests.support.fake_engine import FakeEngine, Script, fake_model

MARK = {"type": "ephemeral", "ttl": "5m"}
PROMPT: dict[str, Any] = {
    "model": "tiny",
    "system": [{"type": "text", "text": "x-anthropic-billing-header: cch=abc;", "cache_control": MARK}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": MARK}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "", "signature": enclose("Hm")},
                {"type": "redacted_thinking", "data": "EmwK"},
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": ["b", 1]}, "cache_control": MARK},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "5"}]},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no", "is_error": True},
                {"type": "text", "text": "Well?"},
            ],
        },
        {"role": "system", "content": "Go on."},
    ],
    "tools": [
        {
            "type": "custom",
            "name": "f",
            "description": "d",
            "input_schema": {"type": "object", "properties": {"a": {"type": "integer", "maximum": 5}}},
            "strict": False,
            "cache_control": MARK,
        }
    ],
    "tool_choice": {"type": "auto", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
    "output_config": {"effort": "low"},
    "unknown field": 1,
}
MESSAGES: dict[str, Any] = {
    **PROMPT,
    "max_tokens": 5,
    "stream": False,
    "stop_sequences": ["x", "y"],
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "metadata": {"user_id": '{"session_id": "s"}'},
    "session_id": "s",
    "cache_salt": "salt",
    "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
    "service_tier": "auto",
}
BODIES = {"/v1/messages": MESSAGES, "/v1/messages/count_tokens": PROMPT}


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
        assert json.loads(payloads[-1]) == {"type": "message_stop"}, raw[:3000]
    for payload in payloads:
        assert json.dumps(json.loads(payload), ensure_ascii=False).encode()


@pytest.mark.parametrize("path", BODIES)
def test_the_bodies_are_taken_as_they_are(client: TestClient, path: str) -> None:
    assert client.post(path, json=BODIES[path]).status_code == 200


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("seed", range(4))
def test_no_value_in_any_place_fails_the_server(client: TestClient, path: str, seed: int) -> None:
    rng = random.Random(seed)
    body = {**BODIES[path], "stream": seed % 2 == 1}
    for place in places(body):
        assert_served(client, path, with_value(body, place, rng.choice(HOSTILE)))
