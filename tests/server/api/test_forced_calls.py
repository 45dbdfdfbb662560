"""Forced tool calls of a tiny real model with random weights: it calls what it must, with arguments of the schema."""

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from models.inference.grammar import MAX_CHARACTERS, GrammarCompiler
from models.output.call_formats import CODER, HARMONY, HERMES, LLAMA, PYTHONIC
from models.output.grammar import OutputGrammar, allows
from models.output.pieces import ToolArguments, ToolCallStarted
from server.api.binding import AnswerGrammar, ForcedCalls, answer_grammar, bound_calls, forced_calls, json_grammar
from server.api.conversation import Conversation
from server.api.responses.output import AnswerOutput, ClientTool, ToolSet
from server.app.config import ServerConfig
from server.engine.output import CallConstraint
from server.engine.request import FinishReason
from tests.server.api.test_live import Live, serving, user
from tests.support import tiny_models
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, FakeRenderer, Script, fake_model
from tests.support.fake_grammar import FakeCompiler

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NAMED: dict[str, Any] = {"name": "weather", "parameters": WEATHER}
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
    for seed in range(4):
        choice = live.ask(user("x"), **ASKED, **fields, seed=seed).choices[0]
        assert choice.finish_reason == ("tool_calls" if is_single else choice.finish_reason)
        assert choice.message.tool_calls
        assert not is_single or choice.message.content is None
        assert all(fits(call) for call in choice.message.tool_calls)
        called |= {call.function.name for call in choice.message.tool_calls}
        assert not is_single or len(choice.message.tool_calls) == 1
    assert called <= names


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


def test_a_model_whose_calls_nothing_binds_says_so() -> None:
    client = TestClient(create_app(FakeEngine(), fake_model(call_format=CODER), ServerConfig()))
    body = {"messages": [user("x")], "tools": TOOLS, "tool_choice": "required"}
    answer = client.post(CHAT, content=json.dumps(body), headers=JSON)
    assert answer.status_code == 400
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == (
        "unsupported_parameter",
        "tool_choice",
    )


START = tiny_models.tokenizer().convert_tokens_to_ids("<tool_call>")
CALLS = {str(THINK): -100, str(START): 100}
"""Biases with which a random model calls."""


def test_the_calls_of_a_strict_tool_fit_its_schema_where_none_is_forced(live: Live) -> None:
    for seed in range(6):
        choice = live.ask(user("x"), **{**ASKED, "logit_bias": CALLS, "max_tokens": 150}, seed=seed).choices[0]
        calls = choice.message.tool_calls or []
        whole = calls[: -1 if choice.finish_reason == "length" else None]
        assert all(fits(call) for call in whole if call.function.name == "weather")
        assert choice.message.tool_calls, "a model that calls all the time has called"


def test_an_answer_without_a_call_is_free_text_where_tools_are_strict(live: Live) -> None:
    asked = {**ASKED, "logit_bias": {str(THINK): -100, str(START): -100}, "max_tokens": 30}
    for seed in range(4):
        choice = live.ask(user("x"), **asked, seed=seed).choices[0]
        assert choice.message.tool_calls is None
        assert choice.message.content and choice.finish_reason in ("stop", "length")


def test_one_call_at_most(live: Live) -> None:
    asked = {**ASKED, "logit_bias": CALLS, "parallel_tool_calls": False}
    for seed in range(4):
        choice = live.ask(user("x"), **asked, seed=seed).choices[0]
        assert (len(choice.message.tool_calls), choice.finish_reason) == (1, "tool_calls")


def counts(usage: dict[str, Any]) -> tuple[int, int]:
    """Prompt tokens, and those that were restored, as each API says it."""
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    if "input_tokens_details" in usage:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached, cached


@pytest.mark.parametrize(
    ("path", "asked", "tools", "none"),
    [
        ("/v1/chat/completions", {"messages": [user("Hi")], "max_tokens": 9}, TOOLS, "none"),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 9}, [{"type": "function", **NAMED}], "none"),
        (
            "/v1/messages",
            {"messages": [user("Hi")], "max_tokens": 9},
            [{"name": "weather", "input_schema": WEATHER}],
            {"type": "none"},
        ),
    ],
)
def test_where_no_call_is_wanted_the_prompt_stays_as_it_is(
    live: Live, path: str, asked: dict[str, Any], tools: Any, none: Any
) -> None:
    body = {**asked, "model": live.model, "tools": tools, "cache_salt": path}
    num_prompt, _ = counts(live.post(path, **body).json()["usage"])
    live.wait_until_idle()
    assert counts(live.post(path, **body, tool_choice=none).json()["usage"]) == (num_prompt, num_prompt - 1)


def test_a_model_that_wants_to_call_writes_text_where_it_must_not(live: Live) -> None:
    for seed in range(4):
        asked = {**ASKED, "logit_bias": CALLS, "max_tokens": 40, "seed": seed}
        choice = live.ask(user("x"), **asked, tool_choice="none").choices[0]
        assert not choice.message.tool_calls and "<tool_call>" not in choice.message.content


@pytest.mark.parametrize(
    ("syntax", "text", "is_allowed"),
    [
        (HERMES, "a < b, <tool_cal", True),
        (HERMES, "so <tool_call>", False),
        (replace(HERMES, open="[CALL]"), "so [CALL", True),
        (replace(HERMES, open="[CALL]"), "so [CALL]", False),
        (LLAMA, '{"name": "Bob", "age": 7}', True),
        (LLAMA, ' {"name": "weather", "parameters"', False),
        (PYTHONIC, "[1, 2] is a list", True),
        (PYTHONIC, "[weather(", False),
    ],
)
def test_what_begins_a_call_is_no_text(syntax: Any, text: str, is_allowed: bool) -> None:
    tokenizer: Any = tiny_models.tokenizer()
    grammars = GrammarCompiler(tokenizer.backend_tokenizer.to_str, [tokenizer.eos_token_id])
    model = fake_model(call_format=syntax, grammars=grammars)
    conversation = Conversation(model.renderer, [user("Hi")], TOOLS, forbids_calls=True).prepared_for(model)
    wanted = answer_grammar(model, conversation, None)
    assert wanted is not None
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert follows(grammars.compile(wanted.grammar).begin(), tokens) == is_allowed
    asked = AnswerGrammar("response_format", json_grammar({"type": "object"}))
    assert answer_grammar(model, conversation, asked) == asked, "it has no place for calls"


def test_tools_that_cannot_be_forbidden_are_not_shown() -> None:
    renderer = FakeRenderer()
    model = fake_model(renderer=renderer, call_format=HARMONY, grammars=FakeCompiler())
    client = TestClient(create_app(FakeEngine(), model, ServerConfig()))
    body = {"messages": [user("x")], "tools": TOOLS, "tool_choice": "none"}
    assert client.post(CHAT, content=json.dumps(body), headers=JSON).status_code == 200
    assert renderer.calls[0]["tools"] is None


CALL = '\n{"name": "weather", "arguments": {"city": "Rome", "days": 1}}\n'
NOW = '\n{"name": "now", "arguments": {"a": [1]}}\n'


@pytest.mark.parametrize("name", ["tool_call", "call"])
@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ("", True),
        ("a < b, <cal", True),
        (f"a<C>{CALL}</C>", True),
        (f"<C>{CALL}</C>\n<C>{NOW}</C> and so", True),
        (f"<C>{CALL.replace('Rome', 'Paris')}</C>", False),
        (f"a<C>{CALL}</C> then <C>{CALL.replace('1', '3')}</C>", False),
        (f"<C>{NOW.replace('now', 'later')}</C>", False),
    ],
)
def test_calls_are_bound_and_text_is_not(name: str, text: str, is_allowed: bool) -> None:
    """The markers of calls are tokens with one name, and several with the other."""
    tokenizer: Any = tiny_models.tokenizer()
    syntax = replace(HERMES, open=f"<{name}>\n", close=f"</{name}>")
    grammars = GrammarCompiler(tokenizer.backend_tokenizer.to_str, [tokenizer.eos_token_id])
    model = fake_model(call_format=syntax, grammars=grammars)
    tokens = tokenizer.encode(text.replace("C>", f"{name}>"), add_special_tokens=False)
    assert follows_calls(model, [*tokens, tokenizer.eos_token_id]) == is_allowed


MESSAGE = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
THOUGHT = "<|channel|>analysis<|message|>Let me look.<|end|><|start|>assistant"
FRAMES = ("start", "channel", "constrain", "message", "call", "end", "return")
ROME = '{"city": "Rome", "days": 1}'


@pytest.mark.parametrize("with_tokens", [False, True])
@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        (MESSAGE.format("weather", ROME), True),
        (THOUGHT + MESSAGE.format("weather", ROME), True),
        (f"{MESSAGE.format('weather', ROME)}<|start|>assistant{MESSAGE.format('now', '{}')}", True),
        ("<|channel|>final<|message|>Hello, functions.later", True),
        (MESSAGE.format("weather", '{"city": "Rome", "days": 3}'), False),
        (MESSAGE.format("later", "{}"), False),
        (MESSAGE.format("weather", ROME).replace("<|call|>", "]<|call|>"), False),
    ],
)
def test_calls_of_gpt_oss_are_bound_from_their_channel_on(with_tokens: bool, text: str, is_allowed: bool) -> None:
    tokenizer: Any = copy.deepcopy(tiny_models.tokenizer())
    ends = [tokenizer.eos_token_id]
    if with_tokens:
        tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{name}|>" for name in FRAMES]})
        ends = tokenizer.convert_tokens_to_ids(["<|return|>", "<|call|>"])
    grammars = GrammarCompiler(tokenizer.backend_tokenizer.to_str, ends)
    model = fake_model(call_format=HARMONY, grammars=grammars)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert follows_calls(model, tokens, "on", tokenizer) == is_allowed


class CountingCompiler(GrammarCompiler):
    """Counts the schemas that it is asked about."""

    num_asked = 0

    def accepts(self, name: str, grammar: Any) -> bool:
        self.num_asked += 1
        return super().accepts(name, grammar)


def test_the_rules_of_a_set_of_tools_are_written_once() -> None:
    tokenizer: Any = tiny_models.tokenizer()
    grammars = CountingCompiler(tokenizer.backend_tokenizer.to_str, [tokenizer.eos_token_id])
    model, functions = fake_model(grammars=grammars), [tool["function"] for tool in TOOLS]
    first, again = (bound_calls(model, json.loads(json.dumps(functions)), "on") for _ in range(2))
    forced_calls(model, functions, ForcedCalls())
    assert first == again and grammars.num_asked == len(TOOLS)
    assert bound_calls(model, [{**functions[0], "description": "x" * MAX_CHARACTERS}], "on") is not None
    assert bound_calls(model, functions[::-1], "on") != first and grammars.num_asked == 2 * len(TOOLS) + 1


def follows_calls(model: Any, tokens: list[int], binds: str = "strict", tokenizer: Any = None) -> bool:
    """Whether each token of a call is allowed after those before it."""
    wanted = bound_calls(model, [tool["function"] for tool in TOOLS], binds)
    assert wanted is not None and wanted.opener is not None
    constraint = CallConstraint(OutputGrammar(model.grammars.compile(wanted.grammar)), wanted.opener)
    for token in tokens:
        if constraint.is_binding and not allows(constraint.mask(), token):
            return False
        constraint.accept(token, (tokenizer or tiny_models.tokenizer()).decode([token]))
    return not constraint.is_binding


def follows(matcher: Any, tokens: list[int]) -> bool:
    """Whether each token is allowed after those before it."""
    for token in tokens:
        if not matcher.mask().view(np.uint32)[token // 32] >> token % 32 & 1:
            return False
        matcher.accept(token)
    return True


@pytest.mark.parametrize(
    ("changes", "strict", "is_bound"),
    [
        ({"grammars": FakeCompiler(), "call_format": HERMES}, True, True),
        ({"grammars": FakeCompiler(), "call_format": HERMES}, False, False),
        ({"grammars": FakeCompiler(), "call_format": CODER}, True, True),
        ({"grammars": FakeCompiler(), "call_format": LLAMA}, True, False),
        ({"call_format": HERMES}, True, False),
    ],
)
def test_strict_tools_bind_where_the_model_can_be_bound(
    changes: dict[str, Any], strict: bool, is_bound: bool
) -> None:
    engine = FakeEngine()
    client = TestClient(create_app(engine, fake_model(**changes), ServerConfig()))
    tools = [{"type": "function", "function": {"name": "f", "strict": strict}}]
    body = {"messages": [user("x")], "tools": tools}
    assert client.post(CHAT, content=json.dumps(body), headers=JSON).status_code == 200
    assert (engine.requests[0].grammar is not None) == is_bound


WRITTEN = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 1}}'


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
@pytest.mark.parametrize("length", range(2, len(WRITTEN), 4))
def test_a_forced_call_that_is_cut_is_unfinished_and_no_dialect_tells_its_markup(
    length: int, reason: FinishReason
) -> None:
    """OpenAI's holds what it has, Anthropic's is an unfinished block, that of Responses an incomplete item."""
    script = Script((WRITTEN[: length // 2], WRITTEN[length // 2 : length]), reason, stop_text="x")
    model = fake_model(grammars=FakeCompiler(), call_format=HERMES, context_tokens=2000)
    client = TestClient(create_app(FakeEngine(script), model, ServerConfig()))
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [user("x")],
        "tools": TOOLS,
        "tool_choice": named("weather"),
    }
    whole = client.post(CHAT, json=asked).json()["choices"][0]
    calls = whole["message"].get("tool_calls", [])
    assert not whole["message"]["content"] and whole["finish_reason"] == reason.value
    assert len(calls) == (length > WRITTEN.index("Rome"))
    assert not any(call["function"]["arguments"].endswith("}}") for call in calls)
    lines = client.post(CHAT, json={**asked, "stream": True}).text.splitlines()
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
    told = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert not any(delta.get("content") for delta in deltas)
    assert "".join(told) == "".join(call["function"]["arguments"] for call in calls)

    weather = {"name": "weather", "input_schema": WEATHER}
    asked = {"max_tokens": 50, "messages": [user("x")], "tools": [weather]}
    blocks = client.post("/v1/messages", json={**asked, "tool_choice": {"type": "tool", "name": "weather"}}).json()
    assert [block["type"] for block in blocks["content"]] == ["tool_use"] * len(calls)
    function = {"type": "function", **NAMED}
    choice = {"type": "function", "name": "weather"}
    items = client.post("/v1/responses", json={"input": "x", "tools": [function], "tool_choice": choice}).json()
    assert [item["type"] for item in items["output"]] == ["function_call"] * len(calls)
    if reason is FinishReason.LENGTH:
        assert items["status"] == "incomplete" and {item["status"] for item in items["output"]} <= {"incomplete"}
        again = {"input": "y", "previous_response_id": items["id"]}
        assert client.post("/v1/responses", json=again).status_code == 200


def is_forced_to(schema: Any, arguments: str) -> bool:
    """Whether a forced call of a tool with such `parameters` may have these arguments."""
    tokenizer: Any = tiny_models.tokenizer()
    grammars = GrammarCompiler(tokenizer.backend_tokenizer.to_str, [tokenizer.eos_token_id])
    model = fake_model(call_format=HERMES, grammars=grammars)
    wanted = forced_calls(model, [{"name": "f", **schema}], ForcedCalls())
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    return follows(grammars.compile(wanted.grammar).begin(), tokenizer.encode(text, add_special_tokens=False))


NESTED = {"type": "object", "properties": {"where": {"type": "object"}}, "required": ["where"]}


@pytest.mark.parametrize(
    ("schema", "is_open"),
    [
        ({}, False),
        ({"parameters": None}, False),
        ({"parameters": {}}, False),
        ({"parameters": {"type": "object"}}, False),
        ({"parameters": {"type": "object", "properties": {}}}, False),
        ({"parameters": {"type": "object", "properties": {}}, "strict": True}, False),
        ({"parameters": {"title": "Nothing", "properties": {}, "required": []}}, False),
        ({"parameters": {"type": "object", "additionalProperties": False}}, False),
        ({"parameters": {"type": "object", "additionalProperties": True}}, True),
        ({"parameters": {"type": "object", "additionalProperties": {"type": "integer"}}}, True),
        ({"parameters": {"type": "object", "patternProperties": {"a": {"type": "integer"}}}}, True),
        ({"parameters": {"type": "object", "required": ["a"]}}, True),
        ({"parameters": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}}}, True),
    ],
)
def test_a_forced_call_of_a_tool_without_properties_has_no_arguments(schema: Any, is_open: bool) -> None:
    needs_one = (schema.get("parameters") or {}).get("required") == ["a"]
    assert is_forced_to(schema, "{}") != needs_one
    assert is_forced_to(schema, '{"a": 1}') == is_open


def test_an_object_without_properties_among_the_arguments_is_any_object() -> None:
    assert is_forced_to({"parameters": NESTED}, '{"where": {"a": [1]}}')
    assert not is_forced_to({"parameters": NESTED}, '{"where": {}, "a": 1}')


def test_the_input_of_a_custom_call_that_was_cut_is_what_was_told() -> None:
    for arguments, told in (('{"input": "a\\nb', "a\nb"), ("", "")):
        output = AnswerOutput("x", ToolSet(by_name={"run": ClientTool("run", kind="custom_tool_call")}))
        output.add(ToolCallStarted("call_1", "run"))
        output.add(ToolArguments(arguments))
        *_, done, _ = output.close("incomplete")
        assert done["type"] == "response.custom_tool_call_input.done"
        assert done["input"] == output.ended[0]["input"] == told


@pytest.mark.parametrize("binds", ["strict", "on"])
def test_strict_tools_are_only_shown_where_the_tokenizer_cannot_be_bound(binds: str) -> None:
    engine, model = FakeEngine(), fake_model(call_format=HERMES, grammars=GrammarCompiler(lambda: "{}", [0]))
    client = TestClient(create_app(engine, model, ServerConfig(bind_calls=binds)))
    body = {"messages": [user("x")], "tools": TOOLS}
    assert client.post(CHAT, content=json.dumps(body), headers=JSON).status_code == 200
    assert engine.requests[0].grammar is None
    answer = client.post(CHAT, content=json.dumps({**body, "tool_choice": "required"}), headers=JSON)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")


@pytest.fixture(scope="module", params=["qwen3_coder", "glm47", "gemma4", "kimi_k2"])
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A random model of a family whose calls are not JSON between `<tool_call>`, with all calls bound."""
    folder = tiny_models.write("qwen3", tmp_path_factory.mktemp("other") / "tiny")
    described = folder / "tokenizer_config.json"
    described.write_text(json.dumps({**json.loads(described.read_text()), "tool_parser_type": request.param}))
    with serving(folder, bind_calls="on") as server:
        yield server


LOOSE = {
    **NAMED,
    "parameters": {**WEATHER, "properties": {"city": {"enum": ["Rome", "Ulm"]}, "days": {"enum": [1, 2]}}},
}
UNKNOWN = {"name": "odd", "parameters": {"type": "object", "properties": {"a": {"type": "any"}}, "required": ["b"]}}


def test_calls_are_forced_in_other_formats_beside_a_tool_that_cannot_be_bound(other: Live) -> None:
    functions = [{"type": "function", "function": one} for one in (LOOSE, UNKNOWN)]
    for seed, choice in enumerate(["required", named("weather"), named("weather")]):
        asked = {**ASKED, "tools": functions, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 900}
        answer = other.ask(user("x"), **asked, seed=seed).choices[0]
        if choice == "required" and answer.finish_reason == "length":
            continue  # any arguments may be long
        (call,) = answer.message.tool_calls
        assert answer.finish_reason == "tool_calls" and call.function.name in ("weather", "odd")
        if call.function.name == "weather":
            arguments = json.loads(call.function.arguments)
            assert {*arguments} == {"city", "days"} and arguments["city"] in ("Rome", "Ulm")
            assert arguments["days"] in (1, 2)


@pytest.mark.parametrize("other", ["qwen3_coder", "glm47"], indirect=True)
def test_a_call_that_a_model_begins_by_itself_is_bound_where_all_are(other: Live) -> None:
    asked = {**ASKED, "tools": [{"type": "function", "function": LOOSE}], "logit_bias": CALLS, "max_tokens": 200}
    calls = other.ask(user("x"), **asked, seed=1).choices[0].message.tool_calls
    assert len(calls) > 1, "a random model that opens calls all the time has called"
    for call in calls[:-1]:
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments) in [
            {"city": c, "days": d} for c in ("Rome", "Ulm") for d in (1, 2)
        ]
