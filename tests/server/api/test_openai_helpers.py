"""What the `openai` package offers beyond plain calls: parsed answers, events of streams, raw answers, retries."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel

from server.app.config import ServerConfig
from server.engine.request import FinishReason
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, Script, fake_model
from tests.support.fake_grammar import FakeCompiler
from tests.support.live_server import running

HI: Any = [{"role": "user", "content": "Hi"}]
CALLING = Script(texts=('<tool_call>{"name": "Weather", ', '"arguments": {"city": "Paris"}}</tool_call>'))
ANSWERING = Script(texts=('{"city"', ': "Paris"}'))


class Weather(BaseModel):
    """A type that answers and arguments are parsed into."""

    city: str


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def grammars() -> FakeCompiler:
    return FakeCompiler()


@pytest.fixture
def address(engine: FakeEngine, grammars: FakeCompiler) -> Iterator[str]:
    with running(create_app(engine, fake_model(grammars=grammars), ServerConfig())) as base:
        yield f"{base}/v1"


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        yield client


def test_an_answer_is_parsed_into_a_type(client: openai.OpenAI, engine: FakeEngine, grammars: FakeCompiler) -> None:
    engine.script = ANSWERING
    answer = client.chat.completions.parse(model="tiny", messages=HI, response_format=Weather)
    assert answer.choices[0].message.parsed == Weather(city="Paris")
    assert '"city"' in grammars.asked[0].text


def test_an_answer_that_was_cut_is_told_apart(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = Script(texts=('{"ci',), reason=FinishReason.LENGTH)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="tiny", messages=HI, response_format=Weather)


def test_arguments_are_parsed_into_a_type(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = CALLING
    tools = [pydantic_function_tool(Weather)]
    answer = client.chat.completions.parse(model="tiny", messages=HI, tools=tools)
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].function.parsed_arguments == Weather(city="Paris")


@pytest.mark.usual
def test_the_beta_client_does_the_same(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = ANSWERING
    answer = client.beta.chat.completions.parse(model="tiny", messages=HI, response_format=Weather)
    assert answer.choices[0].message.parsed == Weather(city="Paris")


def test_the_events_of_a_text(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="tiny", messages=HI) as stream:
        events: list[Any] = [event for event in stream if event.type != "chunk"]
        final = stream.get_final_completion()
    # The first delta is the empty text that comes with the role.
    assert [event.type for event in events] == ["content.delta"] * 4 + ["content.done"]
    assert events[-1].content == final.choices[0].message.content == "Hello there."


def test_the_events_of_an_answer_of_a_type(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = ANSWERING
    with client.chat.completions.stream(model="tiny", messages=HI, response_format=Weather) as stream:
        events: list[Any] = [event for event in stream if event.type != "chunk"]
    assert [event.parsed for event in events[:-1]] == [None, {}, {"city": "Paris"}]
    assert events[-1].type == "content.done"
    assert events[-1].parsed == Weather(city="Paris")


def test_the_events_of_a_call(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = CALLING
    tools = [pydantic_function_tool(Weather)]
    with client.chat.completions.stream(model="tiny", messages=HI, tools=tools) as stream:
        events: list[Any] = [event for event in stream if event.type.startswith("tool_calls")]
    assert {event.type for event in events[:-1]} == {"tool_calls.function.arguments.delta"}
    assert events[-1].type == "tool_calls.function.arguments.done"
    assert (events[-1].name, events[-1].parsed_arguments) == ("Weather", Weather(city="Paris"))


def test_a_stream_that_counts_as_it_goes(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.chat.completions.create(model="tiny", messages=HI, stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage is not None]
    assert counts == [0, 1, 2, 3, 3, 3]


def test_a_raw_answer_has_headers_and_the_parsed_one(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model="tiny", messages=HI)
    assert raw.headers["x-request-id"] == raw.request_id
    assert raw.parse().choices[0].message.content == "Hello there."
    assert client.chat.completions.create(model="tiny", messages=HI)._request_id


def test_a_streamed_answer_may_be_read_line_by_line(client: openai.OpenAI) -> None:
    with client.chat.completions.with_streaming_response.create(model="tiny", messages=HI, stream=True) as raw:
        lines = [line for line in raw.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


def test_models_are_listed_by_both_clients(client: openai.OpenAI, address: str) -> None:
    async def names() -> list[str]:
        async with openai.AsyncOpenAI(base_url=address, api_key="none") as asynchronous:
            return [model.id async for model in asynchronous.models.list()]

    assert [model.id for model in client.models.list()] == asyncio.run(names()) == ["tiny"]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("non-existent-model")


def test_the_asynchronous_helper_collects_a_stream(address: str) -> None:
    async def collect() -> str | None:
        async with (
            openai.AsyncOpenAI(base_url=address, api_key="none") as client,
            client.chat.completions.stream(model="tiny", messages=HI) as stream,
        ):
            return (await stream.get_final_completion()).choices[0].message.content

    assert asyncio.run(collect()) == "Hello there."


@pytest.fixture
def waits(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The queue is full until the client has waited; keeps for how long it was told to."""
    told: list[float] = []
    engine.max_waiting = 0

    def wait(self: Any, *, retries_taken: int, max_retries: int, options: Any, response: Any) -> None:
        headers = None if response is None else response.headers
        told.append(self._calculate_retry_timeout(max_retries - retries_taken, options, headers))
        engine.max_waiting = None

    monkeypatch.setattr(openai._base_client.SyncAPIClient, "_sleep_for_retry", wait)
    return told


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_tried_again_when_it_says(address: str, waits: list[float], stream: bool) -> None:
    with openai.OpenAI(base_url=address, api_key="none", max_retries=2) as client:
        answer: Any = client.chat.completions.create(model="tiny", messages=HI, stream=stream)
        assert list(answer) if stream else answer.choices
    assert waits == [7]


def test_what_will_not_get_better_is_not_tried_again(address: str, engine: FakeEngine, waits: list[float]) -> None:
    client = openai.OpenAI(base_url=address, api_key="none", max_retries=2)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=HI, temperature=5)
    assert (refused.value.param, refused.value.type) == ("temperature", "invalid_request_error")
    assert waits == []
