"""The real `openai` package, sync and async, and raw sockets, against a real uvicorn; the engine is a fake."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from server.app.config import ServerConfig
from server.engine.request import OutOfMemory
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, Script, fake_model
from tests.support.live_server import running

JSON = {"Content-Type": "application/json"}

HI: Any = [{"role": "user", "content": "Hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
WAIT_SECONDS = 120.0

SLOW = Script(texts=("word ",) * 2000, step_seconds=0.01)
LONG_PREFILL = Script(prefill_seconds=0.5)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def address(engine: FakeEngine) -> Iterator[str]:
    config = ServerConfig(heartbeat_seconds=0.05, max_body_bytes=100_000, api_key="secret")
    with running(create_app(engine, fake_model(), config)) as base:
        yield base


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0) as client:
        yield client


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.002)


def test_a_whole_answer(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = Script(hit_tokens=3)
    answer = client.chat.completions.create(model="tiny", messages=HI, extra_body={"session_id": "s"})
    assert answer.choices[0].message.content == "Hello there."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert answer.model_extra is not None
    assert answer.model_extra["timings"]["cache_n"] == 3
    assert engine.requests[0].session_id == "s"


def test_a_streamed_answer(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "Hello there."
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3


def test_the_asynchronous_client(address: str, engine: FakeEngine) -> None:
    engine.script = Script(step_seconds=0.005)

    async def converse() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0) as client:
            return list(await asyncio.gather(*(ask(client, stream=n % 2 == 0) for n in range(8))))

    async def ask(client: openai.AsyncOpenAI, stream: bool) -> str:
        if not stream:
            whole = await client.chat.completions.create(model="tiny", messages=HI)
            return whole.choices[0].message.content or ""
        text = ""
        async for chunk in await client.chat.completions.create(model="tiny", messages=HI, stream=True):
            text += chunk.choices[0].delta.content or ""
        return text

    assert asyncio.run(converse()) == ["Hello there."] * 8


def test_the_clients_own_helper_collects_a_stream(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = Script(
        texts=('<tool_call>{"name": "get_weather", ', '"arguments": {"city": "Paris"}}</tool_call>')
    )
    with client.chat.completions.stream(model="tiny", messages=HI, tools=TOOLS) as stream:
        stream.until_done()
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    function = choice.message.tool_calls[0].function
    assert (function.name, json.loads(function.arguments)) == ("get_weather", {"city": "Paris"})


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


def test_plain_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="Once")
    assert whole.choices[0].text == "Hello there."
    stream = client.completions.create(model="tiny", prompt=[1, 2, 3], stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "Hello there."


def test_the_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by.startswith("mlx-serve/")


def test_errors_become_the_clients_own(client: openai.OpenAI, engine: FakeEngine, address: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=HI)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="tiny", messages=HI, n=0)
    assert wrong.value.param == "n"
    stranger = openai.OpenAI(base_url=f"{address}/v1", api_key="guess", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    engine.max_waiting = 0
    with pytest.raises(openai.RateLimitError) as full:
        client.chat.completions.create(model="tiny", messages=HI)
    assert full.value.response.headers["retry-after"] == "7"
    engine.is_running = False
    with pytest.raises(openai.InternalServerError) as down:
        client.chat.completions.create(model="tiny", messages=HI)
    assert down.value.status_code == 503


def test_an_error_in_mid_stream_is_raised_by_the_client(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = Script(error=OutOfMemory("too long"))
    with pytest.raises(openai.APIError, match="too long"):
        list(client.chat.completions.create(model="tiny", messages=HI, stream=True))


def test_a_large_body_of_unknown_length_is_413(address: str) -> None:
    parts = (b"x" * 1000 for _ in range(5000))
    with httpx.Client() as client:
        headers = {"Authorization": "Bearer secret", **JSON}
        answer = client.post(f"{address}/v1/completions", content=parts, headers=headers)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"


def post_raw(address: str, fields: dict[str, Any]) -> socket.socket:
    """Sends a chat request on a socket of its own and returns it, open."""
    host, port = address.removeprefix("http://").split(":")
    body = json.dumps({"messages": HI, **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer secret\r\n"
    connection = socket.create_connection((host, int(port)), timeout=WAIT_SECONDS)
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def test_a_client_that_vanishes_disturbs_nobody(address: str, client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = lambda request: SLOW if request.session_id == "gone" else Script(step_seconds=0.02)
    connections = [post_raw(address, {"session_id": "gone", "stream": n % 2 == 0}) for n in range(4)]
    until(lambda: len(engine.requests) == 4)
    stream = client.chat.completions.create(model="tiny", messages=HI, stream=True)
    for connection in connections:
        connection.close()
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Hello there."
    until(lambda: len(engine.cancelled) == 4)
    assert engine.requests[-1].request_id not in engine.cancelled


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
