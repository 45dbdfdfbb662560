"""Answers of the other dialects that go on with the assistant's last message, through their own packages."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import ollama
import pytest
from starlette.testclient import TestClient

from models.names import DEMO
from models.output.call_formats import HARMONY
from server.app.config import ServerConfig
from tests.server.api.test_live import Live, serving, until
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, FakeRenderer, Script, fake_model

COUNT: Any = {"role": "user", "content": "Count from 1 to 9."}
BEGUN: Any = {"role": "assistant", "content": "1, 2, 3,"}
GREEDY = {"temperature": 0}
MORE: Any = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object", "properties": {"who": {"enum": ["me", "you"]}}, "required": ["who"]}
OPEN_OBJECT: Any = {"role": "assistant", "content": '{"who": "'}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(DEMO) as server:
        yield server


@pytest.fixture
def claude(live: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=live.address, api_key="messages", max_retries=0) as client:
        yield client


@pytest.fixture
def llama(live: Live) -> ollama.Client:
    return ollama.Client(live.address, headers={"x-session-id": "of-ollama"})


def test_messages_goes_on_and_the_whole_is_reused(live: Live, claude: anthropic.Anthropic) -> None:
    ask: dict[str, Any] = {"model": live.model, "max_tokens": 100, "extra_body": GREEDY}
    first = claude.messages.create(messages=[COUNT, BEGUN], **ask)
    assert isinstance(first.content[0], anthropic.types.TextBlock) and first.stop_reason == "end_turn"
    whole = BEGUN["content"] + first.content[0].text
    assert whole == "1, 2, 3, 4, 5, 6, 7, 8, 9."
    again: list[Any] = [COUNT, {**BEGUN, "content": whole}, MORE]
    second = claude.messages.create(messages=again, **ask)
    read = first.usage.cache_read_input_tokens or 0
    held = (
        read + first.usage.input_tokens + (first.usage.cache_creation_input_tokens or 0) + first.usage.output_tokens
    )
    assert (second.usage.cache_read_input_tokens or 0) >= held - 1


def test_messages_streams_and_counts_what_is_gone_on_with(live: Live, claude: anthropic.Anthropic) -> None:
    counted = claude.messages.count_tokens(model=live.model, messages=[COUNT, BEGUN])
    with claude.messages.stream(
        model=live.model, max_tokens=50, messages=[COUNT, BEGUN], extra_body=GREEDY
    ) as stream:
        assert stream.get_final_text() == " 4, 5, 6, 7, 8, 9."
        usage = stream.get_final_message().usage
    shown = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert counted.input_tokens == shown


def test_messages_binds_an_answer_together_with_its_beginning(live: Live, claude: anthropic.Anthropic) -> None:
    answer = claude.messages.create(
        model=live.model,
        max_tokens=40,
        messages=[COUNT, OPEN_OBJECT],
        extra_body={"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    )
    assert isinstance(answer.content[0], anthropic.types.TextBlock)
    assert json.loads(OPEN_OBJECT["content"] + answer.content[0].text)["who"] in ("me", "you")


def test_ollamas_chat_goes_on_and_the_whole_is_reused(live: Live, llama: ollama.Client) -> None:
    options = {"temperature": 0, "num_predict": 100}
    first = llama.chat(live.model, [COUNT, BEGUN], options=options)
    whole = BEGUN["content"] + (first.message.content or "")
    assert whole == "1, 2, 3, 4, 5, 6, 7, 8, 9."
    llama.chat(live.model, [COUNT, {**BEGUN, "content": whole}, MORE], options=options)
    told, following = live.http.get("/v1/sessions/of-ollama").json()["turns"]
    assert following["cached_tokens"] >= told["prompt_tokens"] + (first.eval_count or 0) - 1


def test_ollamas_chat_binds_an_answer_together_with_its_beginning(live: Live, llama: ollama.Client) -> None:
    answer = llama.chat(live.model, [COUNT, OPEN_OBJECT], format=SCHEMA, options={"num_predict": 40})
    assert json.loads(OPEN_OBJECT["content"] + (answer.message.content or ""))["who"] in ("me", "you")


def test_channels_are_not_gone_on_with() -> None:
    renderer = FakeRenderer()
    model = fake_model(renderer=renderer, call_format=HARMONY)
    client = TestClient(create_app(FakeEngine(), model, ServerConfig()))
    asked = {"model": "tiny", "messages": [COUNT, BEGUN], "stream": False}
    refused = client.post("/v1/messages", json={**asked, "max_tokens": 9})
    assert (refused.status_code, "cannot be continued" in refused.text) == (400, True)
    assert client.post("/api/chat", json=asked).status_code == 200
    assert renderer.calls and not any(call["continues"] for call in renderer.calls)


@pytest.mark.parametrize(
    ("last", "continues"),
    [
        (BEGUN, True),
        ({**BEGUN, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, False),
        ({**BEGUN, "content": ""}, False),
        (MORE, False),
    ],
)
def test_which_messages_ollamas_chat_goes_on_with(last: dict[str, Any], continues: bool) -> None:
    renderer = FakeRenderer()
    client = TestClient(create_app(FakeEngine(), fake_model(renderer=renderer), ServerConfig()))
    asked = {"model": "tiny", "messages": [COUNT, last], "stream": False}
    assert client.post("/api/chat", json=asked).status_code == 200
    assert renderer.calls[0]["continues"] is continues


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": [COUNT, BEGUN], "continue_final_message": True}),
        ("/v1/messages", {"messages": [COUNT, BEGUN], "max_tokens": 50}),
        ("/v1/responses", {"input": [COUNT, {**BEGUN, "type": "message", "status": "incomplete"}]}),
        ("/api/chat", {"messages": [COUNT, BEGUN], "stream": False}),
    ],
)
def test_a_turn_is_evaluated_ahead_with_what_its_reply_continues(path: str, asked: dict[str, Any]) -> None:
    engine = FakeEngine(Script((" 4, 5, 6,", " 7, 8, 9")))
    with TestClient(create_app(engine, fake_model(renderer=FakeRenderer()), ServerConfig())) as client:
        assert client.post(path, json={"model": "tiny", **asked}).status_code == 200
        until(lambda: bool(engine.idle_requests))
    [ahead] = engine.idle_requests
    whole = f"<user>{COUNT['content']}<assistant>1, 2, 3, 4, 5, 6, 7, 8, 9<user>"
    assert "".join(map(chr, ahead.tokens)).startswith(whole)
