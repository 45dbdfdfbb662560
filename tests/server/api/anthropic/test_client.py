"""The real `anthropic` package, sync and async, against a real uvicorn; the engine is a fake."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pydantic
import pytest

from models.output.pieces import ReasoningFormat
from server.api.anthropic.content import sign
from server.app.config import ServerConfig
from server.engine.request import OutOfMemory
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, FakeRenderer, Script, fake_model
from tests.support.live_server import running

HI: Any = {"role": "user", "content": "Hi"}
ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 100, "messages": [HI]}
TOOLS: Any = [{"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}]
CALLING = Script(('Let me look.<tool_call>{"name": "get_weather", "argu', 'ments": {"city": "Paris"}}</tool_call>'))
THINK = ReasoningFormat("<think>", "</think>", (5,))
THINKING = Script(("<think>\nHm", ", so.\n</think>\n\nHello"), reasoning_tokens=4)


@pytest.fixture
def address(engine: FakeEngine, renderer: FakeRenderer) -> Iterator[str]:
    config = ServerConfig(heartbeat_seconds=0.05, max_body_bytes=100_000, api_key="secret")
    with running(create_app(engine, fake_model(renderer=renderer, reasoning_format=THINK), config)) as base:
        yield base


@pytest.fixture
def client(address: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=address, api_key="secret", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_tools_over_two_turns(
    client: anthropic.Anthropic, engine: FakeEngine, renderer: FakeRenderer, stream: bool
) -> None:
    engine.script = CALLING
    message = answer_of(client, stream, **ASK, tools=TOOLS)
    assert message.stop_reason == "tool_use"
    call = message.content[-1]
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    history: Any = [HI, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    engine.script = Script(("Sunny.",))
    second = answer_of(client, stream, **{**ASK, "messages": history}, tools=TOOLS)
    assert second.content[0].text == "Sunny."
    [asked] = [call["messages"] for call in renderer.calls if call["messages"][-1]["role"] == "tool"][:1]
    _, answered, resulted = asked
    assert answered["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": {"city": "Paris"}}
    assert answered["tool_calls"][0]["id"] == resulted["tool_call_id"] == call.id


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_thoughts_over_two_turns(
    client: anthropic.Anthropic, engine: FakeEngine, renderer: FakeRenderer, stream: bool, display: Any
) -> None:
    engine.script = THINKING
    message = answer_of(client, stream, **ASK, thinking={"type": "adaptive", "display": display})
    thought, text = message.content
    assert (thought.type, text.text) == ("thinking", "Hello")
    assert (thought.thinking, thought.signature == sign("Hm, so.")) == (
        ("Hm, so.", True) if display == "summarized" else ("", False)
    )
    assert message.usage.output_tokens_details.thinking_tokens == 4
    history: Any = [HI, {"role": "assistant", "content": message.content}, HI]
    answer_of(client, stream, **{**ASK, "messages": history})
    [asked] = [call["messages"] for call in renderer.calls if call["messages"][2:] == [shown("Hi")]]
    assert asked[1]["reasoning_content"] == "Hm, so."


def shown(text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"text": text}]}


def answer_of(client: anthropic.Anthropic, stream: bool, **fields: Any) -> Any:
    if not stream:
        return client.messages.create(**fields)
    with client.messages.stream(**fields) as answer:
        return answer.get_final_message()


def test_the_packages_tool_runner(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Returns the weather."""
        asked.append(city)
        return "sunny"

    asked: list[str] = []
    engine.script = lambda request: CALLING if not asked else Script(("Sunny.",))
    runner = client.beta.messages.tool_runner(**ASK, tools=[get_weather])
    assert runner.until_done().content[0].to_dict() == {"type": "text", "text": "Sunny.", "citations": None}
    assert asked == ["Paris"]


def test_a_schema_that_the_model_cannot_be_bound_to_is_told(client: anthropic.Anthropic) -> None:
    class Answer(pydantic.BaseModel):
        city: str

    with pytest.raises(anthropic.BadRequestError, match="cannot be bound"):
        client.messages.parse(**ASK, output_format=Answer)


@pytest.mark.parametrize("helper", [False, True])
def test_an_error_in_mid_stream_is_raised_by_the_client(
    client: anthropic.Anthropic, engine: FakeEngine, helper: bool
) -> None:
    engine.script = Script(error=OutOfMemory("too long"))
    with pytest.raises(anthropic.APIStatusError, match="too long"):
        answer_of(client, stream=True, **ASK) if helper else list(client.messages.create(**ASK, stream=True))


def test_a_stream_that_waits_is_kept_open_by_comments_then_by_pings(address: str, engine: FakeEngine) -> None:
    engine.script, engine.max_texts = Script(queue_seconds=0.3), 0
    headers, lines = {"x-api-key": "secret"}, list[str]()
    with (
        httpx.Client() as client,
        client.stream("POST", f"{address}/v1/messages", json={**ASK, "stream": True}, headers=headers) as answer,
    ):
        for line in filter(None, answer.iter_lines()):
            lines.append(line)
            if lines.count("event: ping") == 3:
                engine.max_texts = None
    start = lines.index("event: message_start")
    first_block = lines.index("event: content_block_start")
    assert len(lines[:start]) >= 2 and all(line.startswith(":") for line in lines[:start])
    assert lines[start:first_block].count("event: ping") >= 3
    assert not any(line.startswith(":") for line in lines[start:])
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert data[-1] == {"type": "message_stop"}


def test_each_part_of_a_long_prompt_is_told_by_a_ping(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    engine.script = Script(progress=(2, 4, 7))
    kinds = [event.type for event in client.messages.create(**ASK, stream=True)]
    assert kinds[:5] == ["message_start", "content_block_start", *["content_block_delta"] * 3]
    raw = httpx.post(f"{client.base_url}/v1/messages", json={**ASK, "stream": True}, headers={"x-api-key": "secret"})
    events = [line for line in raw.text.splitlines() if line.startswith("event: ")]
    assert events[:5] == ["event: message_start", *["event: ping"] * 3, "event: content_block_start"]
