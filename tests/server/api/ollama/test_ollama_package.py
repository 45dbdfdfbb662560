"""The `ollama` package against the server: chat and generate, streamed and not, tools, thoughts, errors."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest

from models.output.pieces import ReasoningFormat
from server.app.config import ServerConfig
from server.engine.request import FinishReason, OutOfMemory, QueueFull
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
def renderer() -> FakeRenderer:
    return FakeRenderer()


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


def test_a_whole_chat_has_counts_and_nanoseconds(client: ollama.Client, engine: FakeEngine) -> None:
    answer = client.chat("tiny", [{"role": "system", "content": "Be terse."}, *HI])
    assert (answer.message.role, answer.message.content) == ("assistant", "Hello there.")
    assert (answer.model, answer.done, answer.done_reason) == ("tiny", True, "stop")
    assert answer.prompt_eval_count == len(engine.requests[0].tokens) == len("<system>Be terse.<user>Hi")
    assert (answer.eval_count, answer.prompt_eval_duration, answer.eval_duration) == (3, 20_000_000, 40_000_000)
    assert answer.total_duration and answer.load_duration == 0
    assert answer.created_at and answer.created_at.endswith("Z")


def test_a_streamed_chat_says_the_same(client: ollama.Client) -> None:
    parts = list(client.chat("tiny", HI, stream=True))
    assert "".join(part.message.content or "" for part in parts) == "Hello there."
    assert [part.done for part in parts] == [False, False, False, True]
    assert [part.done_reason for part in parts] == [None, None, None, "stop"]
    assert (parts[-1].prompt_eval_count, parts[-1].eval_count) == (len("<user>Hi"), 3)


def test_the_asynchronous_client(address: str) -> None:
    async def said() -> str:
        parts = await ollama.AsyncClient(address).chat("tiny", HI, stream=True)
        return "".join([part.message.content or "" async for part in parts])

    assert asyncio.run(said()) == "Hello there."


def test_a_slow_stream_holds_nothing_but_answers(client: ollama.Client, engine: FakeEngine) -> None:
    engine.script = Script(prefill_seconds=0.2)
    assert len(list(client.chat("tiny", HI, stream=True))) == 4


def test_the_end_of_the_limit_is_told(client: ollama.Client, engine: FakeEngine) -> None:
    engine.script = Script(reason=FinishReason.LENGTH)
    assert client.chat("tiny", HI, options={"num_predict": 3}).done_reason == "length"
    assert engine.requests[0].max_tokens == 3


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


def test_a_whole_answer_to_a_prompt(client: ollama.Client, engine: FakeEngine) -> None:
    answer = client.generate("tiny", "Hi", system="Be terse.")
    assert (answer.response, answer.done, answer.done_reason) == ("Hello there.", True, "stop")
    assert "".join(map(chr, engine.requests[0].tokens)) == "<system>Be terse.<user>Hi"
    assert answer.context == [*engine.requests[0].tokens, 0, 1, 2]


def test_a_streamed_answer_to_a_prompt(client: ollama.Client) -> None:
    parts = list(client.generate("tiny", "Hi", stream=True))
    assert [part.response for part in parts] == ["Hello", " there", ".", ""]
    assert parts[-1].context and parts[0].context is None
    assert parts[-1].prompt_eval_count == len("<user>Hi")


def test_a_context_is_gone_on_from_token_by_token(client: ollama.Client, engine: FakeEngine) -> None:
    first = client.generate("tiny", "Hi")
    assert first.context is not None
    second = client.generate("tiny", "And?", context=first.context)
    asked = engine.requests[1].tokens.tolist()
    assert asked[: len(first.context)] == list(first.context)
    assert "".join(map(chr, asked[len(first.context) :])) == "<user>And?"
    assert second.context == [*asked, 0, 1, 2]


def test_a_raw_prompt_is_taken_as_it_is_and_has_no_context(client: ollama.Client, engine: FakeEngine) -> None:
    engine.script = THINKING
    answer = client.generate("tiny", "[INST] Hi", raw=True)
    assert "".join(map(chr, engine.requests[0].tokens)) == "[INST] Hi"
    assert answer.response == "".join(THINKING.texts) and answer.context is None


def test_a_thought_before_an_answer_to_a_prompt(client: ollama.Client, engine: FakeEngine) -> None:
    engine.script = THINKING
    whole, parts = client.generate("tiny", "Hi"), list(client.generate("tiny", "Hi", stream=True))
    assert (whole.thinking, whole.response) == ("Let me see.", "Yes.")
    assert "".join(part.thinking or "" for part in parts) == "Let me see."
    assert "".join(part.response or "" for part in parts) == "Yes."


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


def test_errors_become_the_packages_own(client: ollama.Client, engine: FakeEngine) -> None:
    with pytest.raises(ollama.ResponseError, match="model 'nope' not found: only tiny is served here") as missing:
        client.chat("nope", HI)
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="temperature: Input should be less than or equal to 2") as wrong:
        list(client.chat("tiny", HI, stream=True, options={"temperature": 3}))
    assert wrong.value.status_code == 400
    engine.max_waiting = 0
    with pytest.raises(ollama.ResponseError) as full:
        client.chat("tiny", HI)
    assert (full.value.status_code, full.value.error) == (429, str(QueueFull(0, 7)))


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
        with pytest.raises(ollama.ResponseError, match=r"messages\.0\.content\.0\.image: this model takes no images"):
            client.chat("tiny", [{**HI[0], "images": [b"x"]}])
    assert engine.requests == []


def test_a_key_is_sent_as_the_package_sends_it(engine: FakeEngine) -> None:
    with running(create_app(engine, fake_model(), ServerConfig(api_key="sesame"))) as address:
        with ollama.Client(address) as client, pytest.raises(ollama.ResponseError) as refused:
            client.chat("tiny", HI)
        assert refused.value.status_code == 401
        with ollama.Client(address, headers={"authorization": "Bearer sesame"}) as client:
            assert client.chat("tiny", HI).message.content == "Hello there."


# ----------------------------------------------------------------------------------------------------- without a type


def test_a_body_is_taken_without_a_type_as_in_ollamas_own_examples(address: str) -> None:
    body = b'{"model": "tiny", "prompt": "Hi", "stream": false}'
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert httpx.post(f"{address}/api/generate", content=body, headers=form).json()["response"] == "Hello there."


@pytest.mark.parametrize("name", ["latest", "other"])
def test_a_name_may_have_the_tag_latest(client: ollama.Client, name: str) -> None:
    if name == "latest":
        assert client.chat("tiny:latest", HI).model == "tiny:latest"
    else:
        with pytest.raises(ollama.ResponseError, match="not found"):
            client.chat("tiny:other", HI)
