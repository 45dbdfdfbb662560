"""Half characters, NULs, huge numbers, NaN and deep nesting anywhere in a body: no answer is a 5xx, all are JSON."""

import copy
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from models.prompt.chat_template import ChatRenderer
from models.texts import enclose
from server.app.config import ServerConfig
from tests.support import tiny_models
from tests.support.apps import create_app
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
    "speculate": True,
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
MARK = {"type": "ephemeral", "ttl": "5m"}
MESSAGES_PROMPT: dict[str, Any] = {
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
    **MESSAGES_PROMPT,
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
RESPONSE_PROMPT: dict[str, Any] = {
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
    **RESPONSE_PROMPT, "stream": False, "max_output_tokens": 5, "temperature": 0.5, "top_p": 0.5, "store": True,
    "include": ["reasoning.encrypted_content"], "metadata": {"a": "b"}, "prompt_cache_key": "k",
    "service_tier": "auto", "cache_salt": "salt", "priority": "interactive", "max_tool_calls": 1,
}  # fmt: skip
OPTIONS: dict[str, Any] = {
    "num_predict": 5, "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.9, "seed": 7,
    "repeat_penalty": 1.1, "repeat_last_n": 64, "presence_penalty": 0.5, "frequency_penalty": 0.5, "stop": ["x"],
    "num_ctx": 64, "mirostat": 0,
}  # fmt: skip
OLLAMA: dict[str, Any] = {"model": "tiny", "stream": False, "keep_alive": "5m", "think": False, "options": OPTIONS}
OLLAMA_CALLS = [{"function": {"name": "f", "arguments": {"a": [1, "b"]}}}]
OLLAMA_MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be terse."},
    {"role": "user", "content": "Hi", "images": []},
    {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": OLLAMA_CALLS},
    {"role": "tool", "tool_name": "f", "content": "5"},
    {"role": "user", "content": "Well?"},
]
BODIES: dict[str, dict[str, Any]] = {
    "/api/chat": {**OLLAMA, "messages": OLLAMA_MESSAGES, "tools": CONVERSATION["tools"]},
    "/api/generate": {**OLLAMA, "prompt": "Hi", "system": "Be terse.", "context": [1, 2], "suffix": "", "images": []},
    "/api/show": {"model": "tiny", "name": "tiny", "verbose": True},
    "/tokenize": {"content": "Hi", "add_special": True, "parse_special": True, "with_pieces": True},
    "/detokenize": {"tokens": [1, 2]},
    "/completion": {"prompt": ["Hi", 2], "n_predict": 5, "return_tokens": True, "logit_bias": [[5, 1.5], [6, False]]},
    CHAT: CONVERSATION,
    TEXT: {**GENERATION, "prompt": "Hello", "echo": True},
    PRIME: CONVERSATION,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES_PROMPT,
    "/v1/responses": RESPONSE,
    "/v1/responses/input_tokens": RESPONSE_PROMPT,
    "/v1/conversations": {"items": ITEMS, "metadata": {"a": "b"}},
}
ENDS = {CHAT: "[DONE]", TEXT: "[DONE]", "/v1/messages": "message_stop", "/v1/responses": "response.completed"}
"""What a stream ends with, or the type of its last event."""

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
def client() -> Iterator[TestClient]:
    tokenizer = copy.copy(tiny_models.tokenizer())
    tokenizer.chat_template = TELLS_ALL
    model = fake_model(renderer=ChatRenderer(tokenizer), context_tokens=100_000)
    app = create_app(FakeEngine(Script(("Hi",))), model, ServerConfig())
    # One event loop for all requests: a loop for each would take a third of the time.
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


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


def assert_served(client: TestClient, path: str, *raws: str) -> None:
    for raw, answer in zip(raws, answers_to(client, path, raws), strict=True):
        shown = raw[:3000]
        assert answer.status_code < 500, (answer.text, shown)
        assert answer.status_code < 400 or answer.json()["error"], shown
        payloads = answer.text.splitlines() if "ndjson" in answer.headers["content-type"] else [answer.text]
        if answer.headers["content-type"].startswith("text/event-stream"):
            payloads = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
            last = payloads.pop()
            assert (last if last == "[DONE]" else json.loads(last)["type"]) == ENDS[path], shown
        for payload in payloads:
            assert json.dumps(json.loads(payload), ensure_ascii=False).encode()


def answers_to(client: TestClient, path: str, raws: Sequence[str]) -> list[httpx2.Response]:
    """In one visit to the thread of the client's loop, where a request of the client makes eight."""
    assert client.portal is not None

    async def ask() -> list[httpx2.Response]:
        transport = httpx2.ASGITransport(client.app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url=client.base_url) as asking:
            return [await asking.post(path, content=raw.encode(), headers=JSON) for raw in raws]

    return client.portal.call(ask)


def streamed(path: str) -> dict[str, Any]:
    return {**BODIES[path], **(STREAMED if path in (CHAT, TEXT) else {"stream": True})}


@pytest.mark.parametrize("path", BODIES)
def test_the_bodies_are_taken_as_they_are(client: TestClient, path: str) -> None:
    answer = client.post(path, json=BODIES[path])
    assert answer.status_code == 200, answer.text
    if path in ENDS:
        assert client.post(path, json=streamed(path)).status_code == 200


@pytest.mark.parametrize("text", HOSTILE)
def test_no_arguments_of_an_earlier_call_fail_the_server(client: TestClient, text: str) -> None:
    for path in (CHAT, PRIME):
        places_of = [("messages", 2, "tool_calls", call, "function", "arguments") for call in (0, 1)]
        assert_served(client, path, *(with_value(BODIES[path], place, text) for place in places_of))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("seed", range(2))
def test_no_value_in_any_place_fails_the_server(client: TestClient, path: str, seed: int) -> None:
    rng = random.Random(seed)
    body = streamed(path) if path in ENDS and seed % 2 == 1 else BODIES[path]
    assert_served(client, path, *(with_value(body, place, rng.choice(HOSTILE)) for place in places(body)))


@pytest.mark.parametrize("seed", range(2))
def test_several_at_once_do_not_either(client: TestClient, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        path = rng.choice([CHAT, TEXT, PRIME])
        raw = json.dumps(BODIES[path])
        for place in rng.sample(list(places(BODIES[path])), 2):
            raw = raw.replace(json.dumps(_at(BODIES[path], place)), rng.choice(HOSTILE), 1)
        assert_served(client, path, raw)


def _at(body: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        body = body[step]
    return body
