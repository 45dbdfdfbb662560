"""Forced tool calls of a tiny real model with random weights: it calls what it must, with arguments of the schema."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from server.app import create_app
from server.config import ServerConfig
from tests.server.api.test_live import Live, serving, user
from tests.support import tiny_models
from tests.support.fake_engine import FakeEngine, fake_model

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
THINK = tiny_models.tokenizer().convert_tokens_to_ids("<think>")
ASKED: dict[str, Any] = {
    "tools": TOOLS,
    "temperature": 1,
    "max_tokens": 400,
    "logit_bias": {str(THINK): -100},
    "extra_body": {},
}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tiny_models.write("qwen3", tmp_path_factory.mktemp("forced") / "tiny")
    with serving(folder) as server:
        yield server


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(*names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named(name) for name in names]}}


def fits(call: Any) -> bool:
    arguments = json.loads(call.function.arguments)
    if call.function.name == "now":
        return bool(arguments == {})
    return list(arguments) == ["city", "days"] and len(arguments["city"]) <= 4 and arguments["days"] in (1, 2)


@pytest.mark.parametrize(
    ("fields", "names", "is_single"),
    [
        ({"tool_choice": "required"}, {"weather", "now"}, False),
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"weather", "now"}, True),
        ({"tool_choice": named("weather")}, {"weather"}, True),
        ({"tool_choice": named("now")}, {"now"}, True),
        ({"tool_choice": allowed("now", "weather")}, {"weather", "now"}, False),
        ({"tool_choice": allowed("weather"), "parallel_tool_calls": False}, {"weather"}, True),
    ],
)
def test_a_random_model_calls_what_it_must(
    live: Live, fields: dict[str, Any], names: set[str], is_single: bool
) -> None:
    called = set()
    for seed in range(6):
        choice = live.ask(user("x"), **ASKED, **fields, seed=seed).choices[0]
        assert choice.finish_reason == ("tool_calls" if is_single else choice.finish_reason)
        assert choice.message.tool_calls
        assert not is_single or choice.message.content is None
        assert all(fits(call) for call in choice.message.tool_calls)
        called |= {call.function.name for call in choice.message.tool_calls}
        assert not is_single or len(choice.message.tool_calls) == 1
    assert called <= names


def test_a_stream_holds_the_same_call(live: Live) -> None:
    asked = {**ASKED, "tool_choice": named("weather"), "seed": 4}
    whole = live.ask(user("x"), **asked).choices[0].message.tool_calls[0].function
    deltas = [
        call.function
        for chunk in live.ask(user("x"), **asked, stream=True)
        for choice in chunk.choices
        for call in choice.delta.tool_calls or []
    ]
    assert deltas[0].name == whole.name
    assert "".join(delta.arguments or "" for delta in deltas) == whole.arguments


def test_an_answer_bound_to_json_may_be_a_call_where_tools_are_offered(live: Live) -> None:
    answer_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["said"]}}}
    start = tiny_models.tokenizer().convert_tokens_to_ids("<tool_call>")
    for bias in (-100, 100):
        asked = {**ASKED, "logit_bias": {str(THINK): -100, str(start): bias}, "parallel_tool_calls": False}
        message = live.ask(user("x"), **asked, response_format=answer_format, seed=1).choices[0].message
        if bias < 0:
            assert message.content == '"said"' and not message.tool_calls
        else:
            assert message.tool_calls and all(fits(call) for call in message.tool_calls)


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": named("nope")},
        {"tools": TOOLS, "tool_choice": allowed("now", "nope")},
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        {"tools": TOOLS, "tool_choice": {"type": "function"}},
        {"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "now"}}},
    ],
)
def test_calls_that_cannot_be_forced_are_refused_in_words(live: Live, fields: dict[str, Any]) -> None:
    answer = live.post(CHAT, messages=[user("x")], **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tool_choice"


def test_a_model_whose_calls_are_not_json_says_so() -> None:
    client = TestClient(create_app(FakeEngine(), fake_model(), ServerConfig()))
    body = {"messages": [user("x")], "tools": TOOLS, "tool_choice": "required"}
    answer = client.post(CHAT, content=json.dumps(body), headers=JSON)
    assert answer.status_code == 400
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == (
        "unsupported_parameter",
        "tool_choice",
    )
