"""Calls in five families' formats arrive alike through the packages of three APIs, whole and streamed."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import ollama
import openai
import pytest

from models.output.call_formats import CODER, GEMMA4, GLM, KIMI_K2, MISTRAL, CallFormat
from server.app.config import ServerConfig
from tests.support.apps import create_app
from tests.support.call_writer import written
from tests.support.fake_engine import FakeEngine, Script, fake_model
from tests.support.live_server import running

ARGUMENTS = {"path": "a.py", "content": "x = '</parameter>'\n" * 20, "n": 3}
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "content": {"type": "string"}, "n": {"type": "integer"}},
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "write_file", "parameters": SCHEMA}}
HI: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture(params=[CODER, GLM, GEMMA4, KIMI_K2, MISTRAL], ids=lambda one: one.name, scope="module")
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    call_format: CallFormat = request.param
    text = written(call_format, [("write_file", ARGUMENTS)])
    script = Script(texts=tuple(text[place : place + 6] for place in range(0, len(text), 6)))
    with running(create_app(FakeEngine(script), fake_model(call_format=call_format), ServerConfig())) as address:
        yield address


def test_openais_package_gets_the_call(address: str) -> None:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0)
    asked: dict[str, Any] = {"model": "tiny", "messages": HI, "tools": [TOOL]}
    choice = client.chat.completions.create(**asked).choices[0]
    [call] = choice.message.tool_calls
    assert (choice.finish_reason, json.loads(call.function.arguments)) == ("tool_calls", ARGUMENTS)
    with client.chat.completions.stream(**asked) as stream:
        events = [event.type for event in stream]
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls or []
    assert streamed.function.arguments == call.function.arguments
    assert events.count("tool_calls.function.arguments.delta") >= 1
    tools: Any = [{"type": "function", "name": "write_file", "parameters": SCHEMA}]
    with client.responses.stream(model="tiny", input="Hi", tools=tools) as responses:
        kinds = [event.type for event in responses]
        [item] = responses.get_final_response().output
    assert item.type == "function_call" and json.loads(item.arguments) == ARGUMENTS
    assert kinds.count("response.function_call_arguments.delta") >= 1


def test_anthropics_package_gets_the_call(address: str) -> None:
    client = anthropic.Anthropic(base_url=address, api_key="x", max_retries=0)
    tools: Any = [{"name": "write_file", "input_schema": SCHEMA}]
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 90, "messages": HI, "tools": tools}
    message = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    for one in (message, streamed):
        block: Any = one.content[0]
        assert (one.stop_reason, block.type) == ("tool_use", "tool_use")
        assert block.input == ARGUMENTS and len(one.content) == 1
    assert kinds.count("input_json") >= 1


def test_ollamas_package_gets_the_call(address: str) -> None:
    client = ollama.Client(address)
    whole = client.chat("tiny", messages=HI, tools=[TOOL])
    streamed = [
        part for part in client.chat("tiny", messages=HI, tools=[TOOL], stream=True) if part.message.tool_calls
    ]
    for answer in (whole, *streamed):
        [call] = answer.message.tool_calls or []
        assert (call.function.name, call.function.arguments) == ("write_file", ARGUMENTS)
    assert len(streamed) == 1
