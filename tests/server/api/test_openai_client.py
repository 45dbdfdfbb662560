"""The real `openai` package with its helpers, and raw sockets, against a real uvicorn; the engine is a fake."""

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel

from server.app.config import ServerConfig
from server.engine.request import OutOfMemory
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, Script, fake_model
from tests.support.fake_grammar import FakeCompiler
from tests.support.live_server import running

HI: Any = [{"role": "user", "content": "Hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
WAIT_SECONDS = 120.0

SLOW = Script(texts=("word ",) * 2000, step_seconds=0.01)
LONG_PREFILL = Script(prefill_seconds=0.5)
CALLING = Script(texts=('<tool_call>{"name": "Weather", ', '"arguments": {"city": "Paris"}}</tool_call>'))
ANSWERING = Script(texts=('{"city"', ': "Paris"}'))


class Weather(BaseModel):
    """A type that answers and arguments are parsed into."""

    city: str


@pytest.fixture
def grammars() -> FakeCompiler:
    return FakeCompiler()


@pytest.fixture
def address(engine: FakeEngine, grammars: FakeCompiler) -> Iterator[str]:
    config = ServerConfig(heartbeat_seconds=0.05, max_body_bytes=100_000, api_key="secret")
    with running(create_app(engine, fake_model(grammars=grammars), config)) as base:
        yield base


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0) as client:
        yield client


def test_tools_over_two_turns(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = Script(texts=('<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>',))
    first = client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS)
    message = first.choices[0].message
    assert message.tool_calls is not None
    engine.script = Script(texts=("Sunny.",))
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    messages: Any = [*HI, message.model_dump(), result]
    second = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
    assert second.choices[0].message.content == "Sunny."


def test_an_error_in_mid_stream_is_raised_by_the_client(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = Script(error=OutOfMemory("too long"))
    with pytest.raises(openai.APIError, match="too long"):
        list(client.chat.completions.create(model="tiny", messages=HI, stream=True))


def post_raw(address: str, fields: dict[str, Any]) -> socket.socket:
    """Sends a chat request on a socket of its own and returns it, open."""
    host, port = address.removeprefix("http://").split(":")
    body = json.dumps({"messages": HI, **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer secret\r\n"
    connection = socket.create_connection((host, int(port)), timeout=WAIT_SECONDS)
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def test_a_client_that_leaves_before_its_body_is_complete_is_no_failure(
    address: str, client: openai.OpenAI, engine: FakeEngine
) -> None:
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer secret\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{{".encode())
    assert client.completions.create(model="tiny", prompt="x").choices
    assert len(engine.requests) == 1


def test_a_long_prefill_is_bridged_by_comments(address: str, engine: FakeEngine) -> None:
    engine.script = LONG_PREFILL
    headers = {"Authorization": "Bearer secret"}
    body = {"messages": HI, "stream": True}
    seen: list[str] = []
    with (
        httpx.Client() as client,
        client.stream("POST", f"{address}/v1/chat/completions", json=body, headers=headers) as answer,
    ):
        seen = [line for line in answer.iter_lines() if line]
    first_text = next(index for index, line in enumerate(seen) if "Hello" in line)
    comments = [line for line in seen[:first_text] if line.startswith(":")]
    assert '"role":"assistant"' in seen[0]
    assert len(comments) >= 3
    assert ": prefill 0 of 8" in comments


def test_each_piece_of_text_leaves_at_once(address: str, engine: FakeEngine) -> None:
    engine.script, engine.max_texts = Script(texts=("a", "b", "c")), 1
    connection = post_raw(address, {"stream": True})
    received = b""
    with contextlib.closing(connection):
        while b'"content":"a"' not in received:
            received += (part := connection.recv(65536))
            assert part, received
        assert b'"content":"b"' not in received
        engine.max_texts = None
        while b"[DONE]" not in received:
            received += (part := connection.recv(65536))
            assert part, received


# -------------------------------------------------------------------- what the package offers beyond plain calls


def test_an_answer_is_parsed_into_a_type(client: openai.OpenAI, engine: FakeEngine, grammars: FakeCompiler) -> None:
    engine.script = ANSWERING
    answer = client.chat.completions.parse(model="tiny", messages=HI, response_format=Weather)
    assert answer.choices[0].message.parsed == Weather(city="Paris")
    assert '"city"' in grammars.asked[0].text


def test_the_events_of_a_call(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = CALLING
    tools = [pydantic_function_tool(Weather)]
    with client.chat.completions.stream(model="tiny", messages=HI, tools=tools) as stream:
        events: list[Any] = [event for event in stream if event.type.startswith("tool_calls")]
    assert {event.type for event in events[:-1]} == {"tool_calls.function.arguments.delta"}
    assert events[-1].type == "tool_calls.function.arguments.done"
    assert (events[-1].name, events[-1].parsed_arguments) == ("Weather", Weather(city="Paris"))
