"""Forms that real clients send: each is read as the plain form of the same API, whose prompt and limits it gets."""

import json
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from models.output.call_formats import HERMES
from models.output.grammar import Grammar
from server.api.conversation import read_arguments
from server.app.config import ServerConfig
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, FakeRenderer, Script, fake_model
from tests.support.fake_grammar import FakeCompiler
from tests.support.live_server import running

CHAT, RESPONSES, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
HI: Any = {"role": "user", "content": "Hi"}
SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION: Any = {"name": "weather", "parameters": SCHEMA}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
FLAT: Any = [{"type": "function", **FUNCTION}]
CALLED: Any = {"name": "weather", "arguments": '{"a": 1}'}
CALLING = Script(('Let me look.<tool_call>{"name": "weather", "argu', 'ments": {"a": 1}}</tool_call>'))
DIRS: Any = [{"type": "dir", "name": "src"}]
RESULTS: Any = [{"t": 20, "ü": [1]}, {"type": "weather", "t": 1}, DIRS, [1, "b"], 20, 0, True]


@pytest.fixture
def client(engine: FakeEngine, renderer: FakeRenderer) -> TestClient:
    model = fake_model(renderer=renderer, grammars=KindBinder(), call_format=HERMES, context_tokens=900)
    return TestClient(create_app(engine, model, ServerConfig()))


class KindBinder(FakeCompiler):
    """Tells strict schemas from lenient ones too."""

    def compile(self, grammar: Grammar) -> Any:
        return f"{grammar.kind} {grammar.text}"


class Asking:
    """Asks for answers, and gives what reached template and engine."""

    def __init__(self, client: TestClient, engine: FakeEngine, renderer: FakeRenderer) -> None:
        self.client, self.engine, self.renderer = client, engine, renderer

    def __call__(self, path: str, **fields: Any) -> Any:
        answer = self.client.post(path, json={"model": "tiny", "max_tokens": 50, **fields})
        assert answer.status_code == 200, answer.text
        request = self.engine.requests[-1]
        bound = request.grammar and request.grammar.compiled
        # Of the renders only the first is of this request: others foresee what may follow it.
        calls, self.renderer.calls = self.renderer.calls, []
        shown = {name: calls[0][name] for name in ("messages", "tools", "continues")}
        return shown, str(bound), request.max_tokens, request.single_call


@pytest.fixture
def ask(client: TestClient, engine: FakeEngine, renderer: FakeRenderer) -> Asking:
    return Asking(client, engine, renderer)


def history(path: str, result: Any) -> dict[str, Any]:
    """A conversation whose tool answered so."""
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    if path == RESPONSES:
        called = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
        return {"input": [HI, called, {"type": "function_call_output", "call_id": "c", "output": result}]}
    if path == MESSAGES:
        use = {"type": "tool_use", "id": "c", "name": "weather", "input": {}}
        answered = {"type": "tool_result", "tool_use_id": "c", "content": result}
        said = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [answered]}]
        return {"messages": [HI, *said]}
    if path == OLLAMA:
        call["function"] = {"name": "weather", "arguments": {}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    return {"messages": [HI, calling, {"role": "tool", "tool_call_id": "c", "content": result}]}


# In the Messages API a list of objects with types is one of blocks, and an unknown block is refused by its type.
@pytest.mark.parametrize(
    ("path", "result"),
    [
        (path, one)
        for path in (CHAT, RESPONSES, MESSAGES, OLLAMA)
        for one in RESULTS
        if (path, one) != (MESSAGES, DIRS)
    ],
    ids=json.dumps,
)
def test_a_result_that_is_no_text_is_its_json_text(ask: Asking, path: str, result: Any) -> None:
    plain = ask(path, **history(path, json.dumps(result, ensure_ascii=False)))
    assert ask(path, **history(path, result)) == plain


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, OLLAMA])
def test_a_result_of_parts_is_their_text(ask: Asking, path: str) -> None:
    plain = ask(path, **history(path, "20 degrees"))
    for kind in ("text", "output_text", "input_text"):
        assert ask(path, **history(path, [{"type": kind, "text": "20 degrees"}])) == plain


def said(path: str, role: str, content: Any) -> dict[str, Any]:
    messages = [HI, {"role": "assistant", "content": "Yes."}, HI]
    messages[1 if role == "assistant" else 2] = {"role": role, "content": content}
    return {"input" if path == RESPONSES else "messages": messages}


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize(("role", "kind"), [("user", "input_text"), ("assistant", "output_text"), ("user", "text")])
def test_parts_of_other_apis_are_texts(ask: Asking, path: str, role: str, kind: str) -> None:
    plain = ask(path, **said(path, role, [{"type": "input_text" if path == RESPONSES else "text", "text": "So."}]))
    assert ask(path, **said(path, role, [{"type": kind, "text": "So."}])) == plain


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_refusal_is_what_the_assistant_said(ask: Asking, path: str) -> None:
    plain = ask(path, **said(path, "assistant", "No."))
    assert ask(path, **said(path, "assistant", [{"type": "refusal", "refusal": "No."}])) == plain


@pytest.mark.parametrize("thinking", ["hm", [{"type": "text", "text": "h"}, {"type": "text", "text": "m"}]])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_thought_among_parts_is_the_assistants_reasoning(ask: Asking, path: str, thinking: Any) -> None:
    parts = [{"type": "thinking", "thinking": thinking, "signature": "s"}, {"type": "text", "text": "Yes."}]
    shown, *_ = ask(path, **said(path, "assistant", parts))
    reply = shown["messages"][1]
    assert (reply["reasoning_content"], [part["text"] for part in reply["content"]]) == ("hm", ["Yes."])


@pytest.mark.parametrize(
    ("path", "plain", "form"),
    [
        (CHAT, {"tools": TOOLS, "tool_choice": "required"}, {"tools": TOOLS, "tool_choice": "any"}),
        (RESPONSES, {"tools": FLAT, "tool_choice": "required"}, {"tools": FLAT, "tool_choice": "any"}),
        (
            CHAT,
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
            {"tools": TOOLS, "tool_choice": {"type": "function", "name": "weather"}},
        ),
        (
            RESPONSES,
            {"tools": FLAT, "tool_choice": {"type": "function", "name": "weather"}},
            {"tools": FLAT, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
        ),
        (RESPONSES, {"max_tokens": None, "max_output_tokens": 7}, {"max_tokens": 7}),
        (
            RESPONSES,
            {"max_tokens": None, "max_output_tokens": 7},
            {"max_completion_tokens": 7, "max_output_tokens": 9},
        ),
        *(
            (
                CHAT,
                {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
                {"response_format": {"type": "json_schema", **form}},
            )
            for form in ({"schema": SCHEMA}, {"json_schema": SCHEMA}, {"json_schema": {"schema": SCHEMA}})
        ),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}},
            {"response_format": {"type": "json_schema", "schema": SCHEMA, "strict": True}},
        ),
        *(
            (
                RESPONSES,
                {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
                {"text": {"format": {"type": "json_schema", **form}}},
            )
            for form in ({"json_schema": {"name": "a", "schema": SCHEMA}}, {"json_schema": SCHEMA})
        ),
        (
            MESSAGES,
            {"output_format": {"type": "json_schema", "schema": SCHEMA}},
            {"output_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        ),
    ],
)
def test_a_wish_in_another_apis_form_is_the_same_wish(ask: Asking, path: str, plain: Any, form: Any) -> None:
    asked = {"input": "Hi"} if path == RESPONSES else {"messages": [HI]}
    wanted = ask(path, **asked, **plain)
    assert wanted[1] != "None" or wanted[2] == 7
    assert ask(path, **asked, **form) == wanted


# ------------------------------------------------------------------------------------------------- older functions


def older(**fields: Any) -> dict[str, Any]:
    return {"messages": [HI], "functions": [FUNCTION], **fields}


@pytest.mark.parametrize(
    ("choice", "newer"),
    [(None, "auto"), ("auto", "auto"), ("none", "none"), ({"name": "weather"}, TOOLS[0])],
)
def test_functions_are_tools_of_which_one_is_called(ask: Asking, choice: Any, newer: Any) -> None:
    tools = {"tools": TOOLS, "tool_choice": newer, "parallel_tool_calls": False}
    assert ask(CHAT, **older(function_call=choice)) == ask(CHAT, messages=[HI], **tools)


@pytest.mark.parametrize(("text", "shown"), [("", {}), (" ", {}), ('{"a": 1}', {"a": 1}), ("[1]", "[1]"), ("{", "{")])
def test_arguments_are_objects_for_templates_where_they_can_be(text: str, shown: Any) -> None:
    assert read_arguments(text) == shown


def test_earlier_calls_and_results_are_those_of_tools(ask: Asking) -> None:
    answered = [{"role": "assistant", "content": None, "function_call": CALLED}]
    answered += [{"role": "function", "name": "weather", "content": {"t": 20}}]
    calls = [{"type": "function", "function": CALLED}]
    newer: list[Any] = [{"role": "assistant", "content": None, "tool_calls": calls}]
    newer += [{"role": "tool", "name": "weather", "content": '{"t": 20}'}]
    asked = ask(CHAT, **older(messages=[HI, *answered]))
    assert asked == ask(CHAT, messages=[HI, *newer], tools=TOOLS, parallel_tool_calls=False)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS}, "functions"),
        ({"functions": None, "function_call": {"name": "weather"}}, "function_call"),
        ({"functions": [], "tools": TOOLS, "function_call": "auto"}, "function_call"),
        ({"function_call": {"name": 5}}, "function_call"),
        ({"function_call": {"name": "nonsuch"}}, "tool_choice"),
        ({"functions": [{"name": ""}]}, "functions[0].name"),
        ({"messages": [HI, {"role": "assistant", "function_call": {"name": 5}}]}, "messages[1].function_call"),
    ],
)
def test_what_is_wrong_with_functions_is_said_by_name(client: TestClient, fields: Any, param: str) -> None:
    answer = client.post(CHAT, json=older(**fields))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "asked"), [(RESPONSES, {"input": "Hi"}), (MESSAGES, {"messages": [HI]}), (OLLAMA, {})]
)
def test_other_apis_say_what_to_send_for_functions(client: TestClient, path: str, asked: Any) -> None:
    body = {"model": "tiny", "max_tokens": 9, "messages": [HI], **asked, "functions": [FUNCTION]}
    answer = client.post(path, json={**body, **({"messages": []} if path == RESPONSES else {})})
    assert answer.status_code == 400 and "tools" in answer.text


def test_the_openai_package_with_functions_whole_and_streamed(engine: FakeEngine) -> None:
    engine.script = CALLING
    asked: Any = {"model": "tiny", **older(function_call="auto")}
    with (
        running(create_app(engine, fake_model(), ServerConfig())) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as package,
    ):
        [choice] = package.chat.completions.create(**asked).choices
        assert (choice.finish_reason, choice.message.content) == ("function_call", "Let me look.")
        assert choice.message.function_call is not None and choice.message.tool_calls is None
        assert choice.message.function_call.model_dump() == {"name": "weather", "arguments": '{"a": 1}'}
        chunks = [chunk.choices[0] for chunk in package.chat.completions.create(**asked, stream=True)]
        parts = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call is not None]
        assert [part.name for part in parts] == ["weather", *[None] * (len(parts) - 1)]
        assert "".join(part.arguments or "" for part in parts) == '{"a": 1}'
        assert chunks[-1].finish_reason == "function_call"
        assert not any(chunk.delta.tool_calls for chunk in chunks)
        engine.script = Script()
        back: list[Any] = [HI, choice.message.model_dump(exclude_none=True)]
        result: Any = {"role": "function", "name": "weather", "content": "20"}
        [last] = package.chat.completions.create(**{**asked, "messages": [*back, result]}).choices
        assert (last.finish_reason, last.message.content) == ("stop", "Hello there.")
