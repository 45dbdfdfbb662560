"""The `ollama` package against the server: chat and generate, streamed and not, tools, thoughts, errors."""

import asyncio
from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from models.output.pieces import ReasoningFormat
from server.app.config import ServerConfig
from server.engine.request import OutOfMemory
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, FakeRenderer, Script, fake_model
from tests.support.live_server import running

HI = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Says how the weather is.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALLING = Script(
    texts=("Let me look.\n<tool_", 'call>{"name": "get_weather", "arguments": {"city": "Zürich"}}</tool_call>')
)
THINK = ReasoningFormat("<think>", "</think>")
THINKING = Script(texts=("<think>\nLet me see.\n", "</think>\n\nYes", "."), reasoning_tokens=2)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(Script(hit_tokens=4))


@pytest.fixture
def address(engine: FakeEngine, renderer: FakeRenderer) -> Iterator[str]:
    model = fake_model(renderer=renderer, reasoning_format=THINK)
    with running(create_app(engine, model, ServerConfig(heartbeat_seconds=0.02))) as address:
        yield address


@pytest.fixture
def client(address: str) -> Iterator[ollama.Client]:
    with ollama.Client(address) as client:
        yield client


# -------------------------------------------------------------------------------------------------------------- chat


def test_the_asynchronous_client(address: str) -> None:
    async def said() -> str:
        parts = await ollama.AsyncClient(address).chat("tiny", HI, stream=True)
        return "".join([part.message.content or "" async for part in parts])

    assert asyncio.run(said()) == "Hello there."


def test_a_slow_stream_holds_nothing_but_answers(client: ollama.Client, engine: FakeEngine) -> None:
    engine.script = Script(prefill_seconds=0.2)
    assert len(list(client.chat("tiny", HI, stream=True))) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_tools_over_two_turns(
    client: ollama.Client, engine: FakeEngine, renderer: FakeRenderer, stream: bool
) -> None:
    engine.script = CALLING
    message = said_message(client, stream=stream, tools=[WEATHER])
    [call] = message.tool_calls or []
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Zürich"})
    assert message.content == "Let me look."
    engine.script = Script()
    result = {"role": "tool", "tool_name": "get_weather", "content": "11 °C"}
    client.chat("tiny", [*HI, message, result], tools=[WEATHER])
    # The server also renders what may come next, at a time of its own.
    shown = next(call for call in renderer.calls if [*call["messages"]][-1]["role"] == "tool")
    assert shown["tools"] == [WEATHER]
    function = {"name": "get_weather", "arguments": {"city": "Zürich"}}
    assert shown["messages"][1]["tool_calls"] == [{"type": "function", "function": function}]
    assert shown["messages"][2] == {"role": "tool", "content": [{"text": "11 °C"}], "name": "get_weather"}


def said_message(client: ollama.Client, *, stream: bool, **fields: Any) -> ollama.Message:
    """The message of an answer, put together where it is streamed."""
    if not stream:
        return ollama.Message.model_validate(client.chat("tiny", HI, **fields).message.model_dump())
    parts = [part.message for part in client.chat("tiny", HI, stream=True, **fields)]
    return ollama.Message(
        role="assistant",
        content="".join(part.content or "" for part in parts),
        thinking="".join(part.thinking or "" for part in parts) or None,
        tool_calls=[call for part in parts for call in part.tool_calls or ()] or None,
    )


def test_a_python_function_is_a_tool(client: ollama.Client, renderer: FakeRenderer) -> None:
    def add(a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: The first number
            b: The second number
        """
        return a + b

    client.chat("tiny", HI, tools=[add])
    [tool] = renderer.calls[0]["tools"]
    assert tool["function"]["parameters"]["properties"]["a"]["type"] == "integer"


@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_comes_apart(client: ollama.Client, engine: FakeEngine, stream: bool) -> None:
    engine.script = THINKING
    message = said_message(client, stream=stream, think=True)
    assert (message.thinking, message.content) == ("Let me see.", "Yes.")


@pytest.mark.parametrize(
    ("think", "told"),
    [
        (None, {}),
        (True, {"enable_thinking": True}),
        (False, {"enable_thinking": False}),
        ("low", {"enable_thinking": True, "reasoning_effort": "low"}),
    ],
)
def test_think_reaches_the_template(client: ollama.Client, renderer: FakeRenderer, think: Any, told: Any) -> None:
    client.chat("tiny", HI, think=think)
    client.generate("tiny", "Hi", think=think)
    assert [call["template_kwargs"] for call in renderer.calls[:2]] == [told, told]


def test_a_thought_that_is_sent_back_reaches_the_template(client: ollama.Client, renderer: FakeRenderer) -> None:
    client.chat("tiny", [*HI, ollama.Message(role="assistant", content="Yes.", thinking="Hm."), *HI])
    assert renderer.calls[0]["messages"][1]["reasoning_content"] == "Hm."


def test_what_follows_an_answer_is_rendered_as_it_will_come_back(
    client: ollama.Client, engine: FakeEngine, renderer: FakeRenderer
) -> None:
    engine.script = CALLING
    message = client.chat("tiny", HI, tools=[WEATHER]).message
    until_rendered(renderer, 2)
    ahead = renderer.calls[1]["messages"][1]
    client.chat("tiny", [*HI, message], tools=[WEATHER])
    assert renderer.calls[-1]["messages"][1] == ahead


def until_rendered(renderer: FakeRenderer, count: int) -> None:
    from tests.server.api.test_live import until

    until(lambda: len(renderer.calls) >= count)


# ---------------------------------------------------------------------------------------------------------- generate


def test_a_context_is_gone_on_from_token_by_token(client: ollama.Client, engine: FakeEngine) -> None:
    first = client.generate("tiny", "Hi")
    assert first.context is not None
    second = client.generate("tiny", "And?", context=first.context)
    asked = engine.requests[1].tokens.tolist()
    assert asked[: len(first.context)] == list(first.context)
    assert "".join(map(chr, asked[len(first.context) :])) == "<user>And?"
    assert second.context == [*asked, 0, 1, 2]


@pytest.mark.parametrize("keep_alive", [None, 0, "10m", -1])
def test_a_request_without_a_prompt_is_how_clients_load_and_unload_a_model(
    client: ollama.Client, engine: FakeEngine, keep_alive: Any
) -> None:
    loaded = client.generate("tiny", keep_alive=keep_alive)
    done_reason = "unload" if keep_alive == 0 else "load"
    assert (loaded.response, loaded.done, loaded.done_reason) == ("", True, done_reason)
    assert client.chat("tiny", [], keep_alive=keep_alive).done_reason == done_reason
    assert [part.done_reason for part in client.generate("tiny", stream=True)] == ["load"]
    assert engine.requests == []


# ------------------------------------------------------------------------------------------------------------ errors


def test_an_error_in_mid_stream_is_raised(client: ollama.Client, engine: FakeEngine) -> None:
    engine.script = Script(error=OutOfMemory("too long"))
    with pytest.raises(ollama.ResponseError, match="too long"):
        list(client.chat("tiny", HI, stream=True))


def test_images_and_tools_are_refused_in_words_where_there_are_none(engine: FakeEngine) -> None:
    model = fake_model(renderer=FakeRenderer(reads_tools=False))
    with running(create_app(engine, model, ServerConfig())) as address, ollama.Client(address) as client:
        with pytest.raises(ollama.ResponseError, match="'tiny' does not support tools"):
            client.chat("tiny", HI, tools=[WEATHER])
        with pytest.raises(ollama.ResponseError, match="'tiny' does not support thinking"):
            client.chat("tiny", HI, think=True)
        with pytest.raises(ollama.ResponseError, match=r"messages\.0\.images\.0: this model takes no images"):
            client.chat("tiny", [{**HI[0], "images": [b"x"]}])
    assert engine.requests == []


# ----------------------------------------------------------------------------------------------------- without a type
