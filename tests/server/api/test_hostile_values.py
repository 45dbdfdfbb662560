"""Half characters, NULs, huge numbers, NaN and deep nesting anywhere in a body: no answer is a 5xx, all are JSON."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from models.prompt.chat_template import ChatRenderer
from server.api.app import create_app
from server.app.config import ServerConfig
from tests.support import tiny_models
from tests.support.fake_engine import FakeEngine, Script, fake_model

JSON = {"Content-Type": "application/json"}

CHAT, TEXT, PRIME = "/v1/chat/completions", "/v1/completions", "/v1/cache/prime"

TELLS_ALL = """\
{{ x }}{% for tool in tools or [] %}{{ tool.function.name }}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }} {{ message.name }} {{ message.tool_call_id }}
{{ message.reasoning_content }}{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ call.id }} {{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant {{ enable_thinking }} {{ reasoning_effort }}
{% endif %}"""
"""Shows whatever a conversation holds."""

STREAMED: dict[str, Any] = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
GENERATION: dict[str, Any] = {
    "model": "tiny",
    "stream": False,
    "max_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "typical_p": 0.9,
    "top_n_sigma": 2,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.1,
    "repeat_last_n": 64,
    "repetition_context_size": 64,
    "presence_context_size": 64,
    "frequency_context_size": 64,
    "options": {"num_ctx": 4096, "num_predict": 5, "stop": ["x"], "seed": 7, "repeat_penalty": 1.1},
    "dry_multiplier": 0.8,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "dry_sequence_breakers": ["\n", "x"],
    "allowed_token_ids": [5, 6],
    "bad_words": ["x", "yz"],
    "seed": 7,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {"5": 1},
    "stop": ["x", "y"],
    "ignore_eos": False,
    "session_id": "s",
    "cache_prompt": True,
    "cache_salt": "salt",
    "prompt_cache_key": "key",
    "prompt_cache_retention": "24h",
    "priority": "interactive",
    "service_tier": "auto",
    "metadata": {"user_id": '{"session_id": "s"}', "session_id": "s"},
    "user": "u",
    "safety_identifier": "u",
    "store": True,
    "unknown field": 1,
}
CALLS = [
    {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": ["b", 1]}'}},
    {"id": "c2", "type": "function", "function": {"name": "g", "arguments": {"a": 1}}},
]
CONVERSATION: dict[str, Any] = {
    **GENERATION,
    "messages": [
        {"role": "system", "content": "Be terse.", "cache_control": {"type": "ephemeral"}},
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"ttl": 5}}], "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": CALLS, "reasoning_content": "Hm.", "refusal": "No."},
        {"role": "tool", "content": "5", "tool_call_id": "c1", "name": "f"},
        {"role": "developer", "content": "Go on."},
        {"role": "user", "content": "Well?"},
    ],
    "max_completion_tokens": 9,
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "f",
                "description": "d",
                "parameters": {"type": "object", "properties": {"a": {"type": "integer", "maximum": 5}}},
                "strict": False,
            },
        }
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "enable_thinking": False,
    "reasoning_effort": "low",
    "verbosity": "low",
    "chat_template_kwargs": {"x": "y"},
    "prediction": {"type": "content", "content": "x"},
}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: CONVERSATION,
    TEXT: {**GENERATION, "prompt": "Hello", "echo": True},
    PRIME: CONVERSATION,
}

# JSON texts, as Python would not write all of them.
TEXTS = [r'"\ud800"', r'"a\udfffb"', r'"\ud83d\ude00"', r'"\u0000"', '"\u2028\u200b"', '""', '"' + "ab " * 3000 + '"']
NUMBERS = ["NaN", "-Infinity", "1e999", "-1e-999", "9" * 400, "9" * 5000, "-1", "0", "-0.0", "1e400", "2.5", "16.0"]
SHAPES = ["null", "true", "[]", "{}", "[" * 150 + "]" * 150, '{"a":' * 150 + "1" + "}" * 150, "[" * 2000 + "]" * 2000]
# What stands in a JSON text of its own: the arguments of a call, the name of a user.
INNER = [
    *(r'{"a": "\ud800"}', r'{"\udfff": 1}', r'{"a": "\\ud800"}', r'{"a": "\ud83d\ude00"}', r'{"a": "\u0000"}'),
    *('{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', '{"a": ' + "9" * 5000 + "}", '{"a": ' + "9" * 400 + "}"),
    *("{oops", "[1, 2]", "5", "null", " ", '{"a":' * 150 + "1" + "}" * 150, '{"a":' * 5000 + "1" + "}" * 5000),
    *(r'{"session_id": "\ud800"}', '{"session_id": 5}', "{" * 5000),
]
HOSTILE = [*TEXTS, *NUMBERS, *SHAPES, *(json.dumps(text) for text in INNER)]
HOLE = "@hole@"


@pytest.fixture(scope="module")
def client() -> TestClient:
    tokenizer = copy.copy(tiny_models.tokenizer())
    tokenizer.chat_template = TELLS_ALL
    model = fake_model(renderer=ChatRenderer(tokenizer), context_tokens=100_000)
    return TestClient(create_app(FakeEngine(Script(("Hi",))), model, ServerConfig()), raise_server_exceptions=False)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a body: its leaves and what holds them."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def with_value(body: dict[str, Any], path: tuple[Any, ...], text: str) -> str:
    """The body's JSON with `text` at a place."""
    changed = copy.deepcopy(body)
    owner: Any = changed
    for step in path[:-1]:
        owner = owner[step]
    owner[path[-1]] = HOLE
    return json.dumps(changed).replace(json.dumps(HOLE), text)


def assert_served(client: TestClient, path: str, raw: str) -> None:
    answer = client.post(path, content=raw.encode(), headers=JSON)
    shown = raw if len(raw) < 3000 else raw[:3000]
    assert answer.status_code < 500, (answer.text, shown)
    payloads = [answer.text]
    if answer.headers["content-type"].startswith("text/event-stream"):
        payloads = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
        assert payloads.pop() == "[DONE]", shown
    for payload in payloads:
        assert json.dumps(json.loads(payload), ensure_ascii=False).encode()


@pytest.mark.parametrize("path", BODIES)
def test_the_bodies_are_taken_as_they_are(client: TestClient, path: str) -> None:
    assert client.post(path, json=BODIES[path]).status_code == 200
    if path != PRIME:
        assert client.post(path, json={**BODIES[path], **STREAMED}).status_code == 200


@pytest.mark.parametrize("text", HOSTILE)
def test_no_arguments_of_an_earlier_call_fail_the_server(client: TestClient, text: str) -> None:
    for path in (CHAT, PRIME):
        for call in (0, 1):
            place = ("messages", 2, "tool_calls", call, "function", "arguments")
            assert_served(client, path, with_value(BODIES[path], place, text))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("seed", range(4))
def test_no_value_in_any_place_fails_the_server(client: TestClient, path: str, seed: int) -> None:
    rng = random.Random(seed)
    body = {**BODIES[path], **(STREAMED if path != PRIME and seed % 2 == 1 else {})}
    for place in places(body):
        assert_served(client, path, with_value(body, place, rng.choice(HOSTILE)))


@pytest.mark.parametrize("seed", range(2))
def test_several_at_once_do_not_either(client: TestClient, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        path = rng.choice(list(BODIES))
        raw = json.dumps(BODIES[path])
        for place in rng.sample(list(places(BODIES[path])), 2):
            raw = raw.replace(json.dumps(_at(BODIES[path], place)), rng.choice(HOSTILE), 1)
        assert_served(client, path, raw)


def _at(body: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        body = body[step]
    return body
