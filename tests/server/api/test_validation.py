"""No request harms the server: what cannot be honoured is answered with 400, the field's name and a reason."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from starlette.testclient import TestClient

from server.api.generation import IN_TEXT
from server.api.openai.chat import IN_CHAT, ChatBody
from server.api.openai.generate import CompletionBody
from server.app.config import ServerConfig
from server.engine.request import Priority
from tests.support.apps import create_app
from tests.support.docs import fields
from tests.support.fake_engine import VOCAB_SIZE, FakeEngine, FakeRenderer, fake_model

JSON = {"Content-Type": "application/json"}

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
NAN, INFINITY = float("nan"), float("inf")
HUGE = 10**400
MISSING = object()


@pytest.fixture
def client(client: TestClient) -> Iterator[TestClient]:
    """One event loop for all requests: a loop for each would take most of the time."""
    with client:
        yield client


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt": "Hi"} if path == TEXT else {"messages": [user("Hi")]}
    return {name: value for name, value in (prompt | fields).items() if value is not MISSING}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def post(client: TestClient, path: str, **fields: Any) -> Any:
    # Python writes NaN and Infinity although they are not JSON; so do some clients.
    return client.post(path, content=json.dumps(body_of(path, **fields)), headers=JSON)


WRONG_IN_BOTH: dict[str, list[Any]] = {
    "model": [5, [], {}, True],
    "stream": ["yes", 1, 0, [], {}],
    "max_tokens": [0, -2, 1.5, -1.5, "7", True, [], NAN, INFINITY],
    "repeat_penalty": [0, -1, 11, "1", True, NAN, INFINITY, HUGE],
    "temperature": [-0.1, 2.1, "1", True, [], {}, NAN, INFINITY, -INFINITY, HUGE],
    "top_p": [-0.1, 1.1, "1", True, [], NAN, INFINITY, HUGE],
    "top_k": [-2, 1.5, "1", True, [], NAN],
    "typical_p": [0, -0.1, 1.1, "1", True, [], NAN, INFINITY, HUGE],
    "seed": [-2, 1.5, "1", True, [], NAN, 2**63, HUGE],
    "presence_penalty": [-2.1, 2.1, "1", True, [], NAN, INFINITY, HUGE],
    "repeat_last_n": [-2, 1.5, "1", True, [], NAN, INFINITY, 2**31, HUGE],
    "options": [5, "x", [], {"temperature": "1"}, {"num_predict": 1.5}, {"top_p": NAN}, {"stop": "x"}],
    "dry_multiplier": [-0.1, 101, "1", True, [], NAN, INFINITY, HUGE],
    "dry_base": [0.9, 101, "1", True, [], NAN, INFINITY, HUGE],
    "dry_allowed_length": [0, 257, 1.5, "1", True, [], NAN, HUGE],
    "dry_sequence_breakers": ["x", 5, [5], [None], {}, ["x"] * 65, ["x" * 65]],
    "allowed_token_ids": [5, [], [-1], [VOCAB_SIZE], ["5"], [True], [1.5], [None], {}, "5", [HUGE]],
    "bad_words": ["x", 5, [5], [None], {}, ["x"] * 257, ["x" * 129]],
    "logit_bias": [
        *(5, "x", [], [[1, 2]], {"-1": 1}, {"1.5": 1}, {"": 1}, {"a": 1}, {"01": 1}, {"١": 1}),
        *({"999999": 100}, {str(VOCAB_SIZE): 100}, {"9" * 400: 100}),
        *({"5": 101}, {"5": -101}, {"5": "1"}, {"5": True}, {"5": None}),
        *({"5": NAN}, {"5": INFINITY}, {"5": HUGE}),
    ],
    "stop": [5, [5], [None], {}, True, ["x"] * 17, "x" * 1025],
    "session_id": ["a\nb", "\x00", "x" * 257],
    "cache_salt": [1, [], "x" * 257],
    "prompt_cache_key": [1, "x" * 257, "a\tb"],
    "stream_options": [
        *("x", [], {"include_usage": 1}, {"include_obfuscation": "no"}, {"continuous_usage_stats": 1}),
        {"include_usage": True},
    ],
    "priority": ["high", 1, True, False],
    "n": [0, 73, -1, "1", 1.5, True, NAN, HUGE],
    "best_of": [2, "1"],
    "min_tokens": [-1, "0", 1.5, True, NAN, 2**63, HUGE],
    "stop_token_ids": [5, "5", ["5"], [None], [-1], [1.5], [True], [VOCAB_SIZE], [HUGE], [1] * 65],
    "response_format": [
        *("text", [], {}, {"type": "json_schema"}, {"type": "xml"}, {"type": "json_schema", "json_schema": {}}),
        {"type": "json_schema", "json_schema": {"name": "x", "schema": []}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": "yes"}},
    ],
    "structured_outputs": ["json", {"choice": []}, {"json": 5}, {"structural_tag": "{}"}],
    "structural_tag": ["x", {}],
    "repetition_detection": [5, "x", []],
    "format": ["xml", 5, []],
    "regex": [5, []],
    "guided_choice": ["yes", [], [""], [5]],
    "logprobs": ["x", 3, 1.5],
    "top_n_sigma": [-1.1, 101, "1", True, [], NAN, INFINITY, HUGE],
    "grammar": [{"type": "json"}],
    "guided_json": [5, "{", "[]", []],
    "json_schema": [True],
}

WRONG_IN_CHAT: dict[str, list[Any]] = {
    "messages": [MISSING, None, [], {}, "Hi", [5], ["Hi"], [[]], [None]],
    "tools": [
        *(5, {}, "x", [5], [{}], [{"type": "function"}]),
        [{"type": "custom", "function": {"name": "f"}}],
        [{"type": "function", "function": {}}],
        [{"type": "function", "function": {"name": 5}}],
        [{"type": "function", "function": {"name": ""}}],
        [{"type": "function", "function": {"name": "x" * 129}}],
        [{"type": "function", "function": {"name": "f", "parameters": []}}],
        [{"type": "function", "function": {"name": "f", "description": 5}}],
    ],
    "tool_choice": [
        *("any", "all", 5, [], True, {}, {"type": "function"}, {"type": "custom", "custom": {"name": "f"}}),
        *({"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": 5}}),
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": 5}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [5]}},
    ],
    "reasoning": ["high", True, {"effort": 5}, {"max_tokens": -2}, {"enabled": "yes"}, {"exclude": True}],
    "thinking": ["on", True, {"type": "much"}, {"budget_tokens": 1.5}, {"budget_tokens": -2}],
    "think": [5, {}],
    "prediction": [
        *("x", 5, True, [], {}, {"content": "a"}, {"type": "content"}, {"type": "diff", "content": "a"}),
        *(
            {"type": "content", "content": 5},
            {"type": "content", "content": None},
            {"type": "content", "content": [5]},
        ),
        {"type": "content", "content": [{"type": "text", "text": 5}]},
        {"type": "content", "content": [{"type": "image_url", "text": "a"}]},
    ],
    "max_thinking_tokens": ["x", -2, 1.5, True],
    "chat_template_kwargs": ["x", [], 5, True],
    "echo": [True, "x"],
    "top_logprobs": [1, 21, -1, "0", True],
    "functions": [[{"name": ""}], [{}], {}, 5],
    "function_call": ["auto", {"name": "f"}],
    "modalities": [["text", "audio"], ["audio"], "text"],
    "audio": [{"voice": "x"}],
    "web_search_options": [{}],
    "continue_final_message": [True],
    "add_generation_prompt": [False, "no"],
    "chat_template": ["{% for i in range(999999999) %}x{% endfor %}"],
}

WRONG_IN_TEXT: dict[str, list[Any]] = {
    "prompt": [
        *(MISSING, None, 5, {}, True, "", [], [""], [[]], ["a", ""], [[1], []]),
        *([1.5], [None], ["a", 1], [True], [1, "a"], [[["x"]]], [{}]),
        *([-1], [VOCAB_SIZE], [0, HUGE], [[1, 2**40]]),
    ],
    "suffix": ["end"],
    "max_completion_tokens": [0, -2, 1.5, "7", True, NAN],
    "metadata": ["x", [], 5],
    "logprobs": [True, -1, 21, 1.5, "x"],
    "echo": ["x"],
}


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (CHAT, WRONG_IN_BOTH | WRONG_IN_CHAT),
        (TEXT, {field: values[:1] for field, values in WRONG_IN_BOTH.items()} | WRONG_IN_TEXT),
    ],
    ids=[CHAT, TEXT],
)
def test_a_wrong_value_is_refused_with_the_fields_name(
    client: TestClient, engine: FakeEngine, path: str, wrong: dict[str, list[Any]]
) -> None:
    cases = [(field, value) for field, values in wrong.items() for value in values]
    assert [case for case in cases if not is_refused(post(client, path, **dict([case])), case[0])] == []
    assert engine.requests == []


def is_refused(answer: Any, field: str) -> bool:
    """Whether an answer says in OpenAI's form that the field is wrong."""
    error = answer.json().get("error", {})
    return (
        answer.status_code == 400
        and set(error) == {"message", "type", "param", "code"}
        and error["type"] == "invalid_request_error"
        and error["param"].split(".")[0].split("[")[0] == field
        and field in error["message"]
    )


@pytest.mark.parametrize(
    ("body", "wrong"),
    [(ChatBody, WRONG_IN_BOTH | WRONG_IN_CHAT), (CompletionBody, WRONG_IN_BOTH | WRONG_IN_TEXT)],
)
def test_the_tables_above_cover_every_type_of_a_field(body: type[BaseModel], wrong: dict[str, list[Any]]) -> None:
    """Fields of one type are checked alike: one has all wrong values, the others those that only they refuse."""
    tried = {kind_of(info) for name, info in body.model_fields.items() if name in wrong}
    assert {name for name, info in body.model_fields.items() if kind_of(info) not in tried} == set()
    assert wrong.keys() <= IN_CHAT.keys() | IN_TEXT.keys() | fields(body)


def kind_of(field: FieldInfo) -> str:
    """What pydantic checks a field by."""
    return f"{field.annotation!r} {field.metadata!r}"


CALLING = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}


@pytest.mark.parametrize("result", [{"content": None}, {}, {"content": ""}, {"content": []}])
def test_a_tool_that_returned_nothing_has_an_empty_result(
    client: TestClient, engine: FakeEngine, result: dict[str, Any]
) -> None:
    tool = {"role": "tool", "tool_call_id": "c"}
    for content in (result, {"content": ""}):
        answer = post(client, CHAT, messages=[user("x"), CALLING, {**tool, **content}])
        assert answer.status_code == 200, answer.text
    empty, written = engine.requests
    assert empty.tokens.tolist() == written.tokens.tolist()


MESSAGES: list[tuple[str, list[Any]]] = [
    ("messages[0].role", [{"content": "x"}]),
    ("messages[0].role", [{"role": "wizard", "content": "x"}]),
    ("messages[0].content", [{"role": "user"}]),
    ("messages[0].content", [user(5)]),
    ("messages[0].content", [user({"type": "text", "text": "x"})]),
    ("messages[0].content[0]", [user(["x"])]),
    ("messages[0].content[0].text", [user([{"type": "text"}])]),
    ("messages[0].content[1].type", [user([{"type": "text", "text": "x"}, {"type": "image_url"}])]),
    ("messages[0].content[0].type", [user([{"text": "x"}])]),
    ("messages[0].content[0].type", [user([{"type": "refusal", "refusal": "No."}])]),
    ("messages[1].content[0].type", [user("x"), {"role": "assistant", "content": [{"type": "refusal"}]}]),
    ("messages[0].content[0].cache_control", [user([{"type": "text", "text": "x", "cache_control": 5}])]),
    ("messages[0].cache_control", [user("x") | {"cache_control": "ephemeral"}]),
    ("messages[1].tool_calls[0].function", [user("x"), {"role": "assistant", "tool_calls": [{}]}]),
    (
        "messages[1].tool_calls[0].function.arguments",
        [user("x"), {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}],
    ),
    ("messages[1].function_call", [user("x"), {"role": "assistant", "content": "", "function_call": {}}]),
    ("messages[1].audio", [user("x"), {"role": "assistant", "content": "", "audio": {"id": "a"}}]),
    ("messages[0].images", [user("x") | {"images": ["aGk="]}]),
    ("messages[0].prefix", [{**user("x"), "prefix": True}]),
    ("messages[1].thinking", [user("x"), {"role": "assistant", "content": "y", "thinking": "z"}]),
    ("messages[0].tools", [user("x") | {"tools": [{"type": "function"}]}]),
    ("messages", [{"role": "assistant", "content": "x"}]),
    ("messages", [user([{"type": "text", "text": "x", "cache_control": {}}])] * 17),
]


@pytest.mark.parametrize(("param", "messages"), MESSAGES)
def test_a_wrong_message_is_refused_with_its_place(
    client: TestClient, engine: FakeEngine, param: str, messages: list[Any]
) -> None:
    answer = post(client, CHAT, messages=messages)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert engine.requests == []


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff\xfe",
        b"null",
        b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1' + b"0" * 9000 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "metadata": {"a": NaN}}',
        b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", '
        b'"function": {"name": "f", "parameters": {"a": Infinity}}}]}',
        b'{"messages": [{"role": "user", "content": "x"}]} trailing',
    ],
    ids=lambda raw: repr(raw[:20]),
)
def test_a_body_that_is_no_json_object_is_refused(client: TestClient, engine: FakeEngine, raw: bytes) -> None:
    answer = client.post(CHAT, content=raw, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"
    assert engine.requests == []


@pytest.mark.parametrize("name", ["chat_template", "messages", "tools", "tokenize", "bos_token"])
def test_a_request_cannot_replace_the_template_or_its_input(client: TestClient, name: str) -> None:
    answer = post(client, CHAT, chat_template_kwargs={name: "x"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"top_k": VOCAB_SIZE}, "top_k", 0),
        ({"top_k": 10**30}, "top_k", 0),
        ({"top_k": VOCAB_SIZE - 1}, "top_k", VOCAB_SIZE - 1),
        ({"seed": 2**63 - 1}, "seed", 2**63 - 1),
        ({"logit_bias": {"0": -100, str(VOCAB_SIZE - 1): 100}}, "logit_bias", ((0, -100.0), (VOCAB_SIZE - 1, 100.0))),
        ({"top_k": -1}, "top_k", 0),
        ({"top_p": 0}, "top_k", 1),
        ({"seed": -1}, "seed", None),
        ({"seed": 7.0}, "seed", 7),
        ({"seed": -1.0}, "seed", None),
        ({"top_k": 5.0}, "top_k", 5),
        ({}, "temperature", 1.0),
        ({"top_n_sigma": 1.5}, "top_n_sigma", 1.5),
        ({"top_n_sigma": -1}, "top_n_sigma", 0.0),
        ({"xtc_probability": 1}, "xtc_probability", 1.0),
        ({"xtc_threshold": 0.2}, "xtc_threshold", 0.2),
        ({"repeat_last_n": 64.0}, "repeat_last_n", 64),
        ({"repeat_last_n": 0}, "repeat_last_n", 0),
        ({"dry_multiplier": 0.8}, "dry_multiplier", 0.8),
        ({"dry_multiplier": 0.8}, "dry_breakers", tuple(map(ord, '\n"*:'))),
        ({"dry_multiplier": 0.8, "dry_sequence_breakers": ["b", "", "xya"]}, "dry_breakers", (ord("a"), ord("b"))),
        ({"dry_multiplier": 0.8, "dry_sequence_breakers": []}, "dry_breakers", ()),
        ({"dry_sequence_breakers": ["b"]}, "dry_breakers", ()),
        ({"dry_base": 2}, "dry_base", 2.0),
        ({"allowed_token_ids": [7, 0]}, "allowed_token_ids", (7, 0)),
        ({"bad_words": [" ab", "", "c", "ab"]}, "bad_words", ((97, 98), (32, 97, 98), (99,), (32, 99))),
        ({"bad_words": []}, "bad_words", ()),
        ({"dry_allowed_length": 3.0}, "dry_allowed_length", 3),
        ({"dry_penalty_last_n": 90}, "dry_penalty_last_n", 90),
        ({"repeat_last_n": -1}, "repeat_last_n", -1),
        ({"repeat_penalty": 1.1}, "repetition_penalty", 1.1),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.1}, "repetition_penalty", 1.1),
    ],
)
def test_sampling_reaches_the_engine(
    client: TestClient, engine: FakeEngine, fields: dict[str, Any], name: str, value: Any
) -> None:
    post(client, CHAT, **fields)
    assert getattr(engine.requests[0].sampling, name) == value


def test_two_names_of_one_penalty_may_not_contradict_each_other(client: TestClient) -> None:
    answer = post(client, CHAT, repeat_penalty=1.1, repetition_penalty=1.2)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "repeat_penalty")


@pytest.mark.parametrize(
    ("given", "stop"), [("", ()), ([""], ()), (["a", ""], ("a",)), ("a", ("a",)), ([""] * 20 + ["b"], ("b",))]
)
def test_an_empty_stop_string_stands_for_none(
    client: TestClient, engine: FakeEngine, given: Any, stop: tuple[str, ...]
) -> None:
    post(client, CHAT, stop=given)
    assert engine.requests[0].stop == stop


def test_a_misspelt_field_is_told_to_the_log_with_what_was_meant(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    many = {f"seed{'_' * num}": 1 for num in range(1, 100)}
    sent = {"topk": 3, "maxTokens": 5, "top_k": 4, "unknown": 1, "Speculative_n_max": 2, **many}
    assert post(client, CHAT, **sent).status_code == 200
    told = [record.getMessage() for record in caplog.records if record.name == "server.api.bodies"]
    meant = {"Speculative_n_max": "speculative.n_max", "maxTokens": "max_tokens", "seed_": "seed"}
    begin = ", ".join(f"{name} (did you mean {one}?)" for name, one in meant.items())
    assert [text.startswith(f"fields without effect: {begin}") for text in told] == [True]
    assert len(told[0]) < 600


def test_the_priority_0_of_other_servers_is_none(client: TestClient, engine: FakeEngine) -> None:
    assert post(client, CHAT, priority=0, service_tier="flex").status_code == 200
    assert engine.requests[0].priority is Priority.BACKGROUND


def test_a_prompt_of_token_ids_as_long_as_the_context_is_refused(client: TestClient) -> None:
    assert post(client, TEXT, prompt=[1] * 200).json()["error"]["code"] == "context_length_exceeded"
    assert post(client, TEXT, prompt=[1] * 199).status_code == 200


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (TEXT, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        ("/v1/messages", "max_tokens"),
        ("/v1/responses", "max_output_tokens"),
        ("/completion", "n_predict"),
        ("/api/chat", "options.num_predict"),
    ],
)
def test_max_tokens_far_beyond_the_context_are_refused(
    client: TestClient, engine: FakeEngine, path: str, field: str
) -> None:
    prompt = {"prompt": "a"} if path in (TEXT, "/completion") else {"messages": [{"role": "user", "content": "a"}]}
    prompt = {"input": "a"} if field == "max_output_tokens" else prompt

    def told(limit: int) -> str:
        limits: dict[str, Any] = {"options": {"num_predict": limit}} if "." in field else {field: limit}
        answer = client.post(path, json={"model": "tiny", **prompt, **limits})
        assert answer.status_code == (200 if limit == 1_000_000 else 400)
        return answer.text

    told(1_000_000)
    for limit in (10**12, 10**400):
        assert f"{field}: 10000" in told(limit) and "this model's context of 200 tokens" in told(limit)
    assert len(engine.requests) == 1


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_completion_tokens": 5}, 5),
        ({"max_completion_tokens": 5, "max_tokens": 3}, 3),
        ({"max_completion_tokens": 3, "max_tokens": 5}, 3),
        ({"max_new_tokens": 3}, 3),
        ({"n_predict": 3, "max_tokens": 5}, 3),
        ({"max_tokens": 5.0}, 5),
        ({"max_tokens": -1}, None),
        ({"max_tokens": -1.0, "n_predict": -1}, None),
        ({"max_tokens": -1, "max_completion_tokens": 5}, 5),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_every_name_of_max_tokens_counts(
    client: TestClient, engine: FakeEngine, path: str, fields: dict[str, Any], expected: int | None
) -> None:
    assert post(client, path).status_code == post(client, path, **fields).status_code == 200
    without, limited = (request.max_tokens for request in engine.requests)
    assert limited == (expected or without)


def test_a_configured_limit_counts_where_the_request_has_none() -> None:
    engine = FakeEngine()
    client = TestClient(create_app(engine, fake_model(), ServerConfig(default_max_tokens=9)))
    post(client, TEXT)
    post(client, TEXT, max_tokens=50)
    assert [request.max_tokens for request in engine.requests] == [9, 50]


def test_tools_for_a_model_that_takes_none_are_refused() -> None:
    model = fake_model(renderer=FakeRenderer(reads_tools=False))
    client = TestClient(create_app(FakeEngine(), model, ServerConfig()))
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert post(client, CHAT, tools=tools).json()["error"]["param"] == "tools"
    assert post(client, CHAT, tools=tools, tool_choice="none").status_code == 200
    assert post(client, CHAT, tools=[]).status_code == 200
