"""Answers that go on with the assistant's last message."""

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from models.output.call_formats import HARMONY
from models.output.pieces import ReasoningFormat
from server.api.conversation import Conversation
from server.app.config import ServerConfig
from tests.server.api.test_live import Live, until
from tests.support import tiny_models
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, FakeRenderer, Script, fake_model

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Who?"}
BEGUN = {"role": "assistant", "content": "It was "}
WAYS: list[dict[str, Any]] = [
    {"messages": [USER, BEGUN], "continue_final_message": True},
    {"messages": [USER, BEGUN], "continue_final_message": True, "add_generation_prompt": False},
    {"messages": [USER, {**BEGUN, "prefix": True}]},
    {"messages": [{**USER, "prefix": False}, {**BEGUN, "prefix": True}], "add_generation_prompt": False},
]


def client_of(engine: FakeEngine, **model: Any) -> TestClient:
    return TestClient(create_app(engine, fake_model(**model), ServerConfig()))


@pytest.mark.parametrize("asked", WAYS)
def test_the_prompt_ends_with_the_message_and_the_answer_is_what_follows(asked: dict[str, Any]) -> None:
    engine = FakeEngine(Script(("me", ".")))
    model = {"reasoning_format": ReasoningFormat("<think>", "</think>")}
    answer = client_of(engine, **model).post(CHAT, json=asked).json()
    assert answer["choices"][0]["message"]["content"] == "me."
    assert bytes(engine.requests[0].tokens.tolist()).decode() == "<user>Who?<assistant>It was "
    assert engine.requests[0].thinking is None


def test_without_that_wish_the_assistant_speaks_anew() -> None:
    engine, thinks = FakeEngine(), ReasoningFormat("<think>", "</think>")
    asked = {"messages": [USER, BEGUN], "continue_final_message": False, "add_generation_prompt": True}
    assert client_of(engine, reasoning_format=thinks).post(CHAT, json=asked).status_code == 200
    assert engine.requests[0].thinking is not None


def test_the_beginning_of_a_thought_is_gone_on_with() -> None:
    engine = FakeEngine(Script(("me", " now.</think>\n\n", "I.")))
    asked = {"messages": [USER, {**BEGUN, "content": "<think>Let ", "prefix": True}]}
    client = client_of(engine, reasoning_format=ReasoningFormat("<think>", "</think>"))
    message = client.post(CHAT, json=asked).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("me now.", "I.")
    thinking = engine.requests[0].thinking
    assert thinking is not None and thinking.is_open


def test_no_thought_begins_behind_a_text() -> None:
    engine = FakeEngine(Script(("<think>", " is a tag.")))
    client = client_of(engine, reasoning_format=ReasoningFormat("<think>", "</think>"))
    message = client.post(CHAT, json=WAYS[0]).json()["choices"][0]["message"]
    assert message["content"] == "<think> is a tag." and "reasoning_content" not in message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [USER], "continue_final_message": True}, "continue_final_message"),
        ({"messages": [USER, BEGUN, USER], "continue_final_message": True}, "continue_final_message"),
        ({**WAYS[0], "add_generation_prompt": True}, "add_generation_prompt"),
        ({**WAYS[2], "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": [USER], "add_generation_prompt": False}, "add_generation_prompt"),
        ({"messages": [{**USER, "prefix": True}]}, "messages[0].prefix"),
        ({"messages": [USER, {**BEGUN, "prefix": True}, USER]}, "messages[1].prefix"),
        ({"messages": [USER, {**BEGUN, "prefix": 1}]}, "messages[1].prefix"),
        (
            {"messages": [USER, {**BEGUN, "tool_calls": [{"function": {"name": "f"}}], "prefix": True}]},
            "messages",
        ),
    ],
)
def test_a_contradiction_is_refused_in_words(fields: dict[str, Any], param: str) -> None:
    answer = client_of(FakeEngine()).post(CHAT, json=fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_model_that_writes_in_channels_refuses_it() -> None:
    answer = client_of(FakeEngine(), call_format=HARMONY).post(CHAT, json=WAYS[0])
    assert (answer.status_code, "cannot be continued" in answer.text) == (400, True)


def test_the_prompt_can_be_looked_at_and_counted() -> None:
    shown = client_of(FakeEngine()).post("/apply-template", json=WAYS[0]).json()
    assert shown == {"prompt": "<user>Who?<assistant>It was "}


NO_THOUGHT = {"logit_bias": {str(tiny_models.tokenizer().convert_tokens_to_ids("<think>")): -100}}
SCHEMA = {"type": "object", "properties": {"who": {"enum": ["me", "you"]}}, "required": ["who"]}


@pytest.mark.parametrize("begun", ['{"', '{"who": "', '{"who": "me"', '{"who":'])
def test_a_bound_answer_is_bound_together_with_its_beginning(live: Live, begun: str) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
    options = {"response_format": wanted, "extra_body": {"continue_final_message": True}, **NO_THOUGHT}
    said = live.text(USER, {"role": "assistant", "content": begun}, **options)
    assert json.loads(begun + said)["who"] in ("me", "you")


def test_a_beginning_that_no_allowed_answer_has_is_refused(live: Live) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
    with pytest.raises(Exception, match="begins no answer that is allowed"):
        live.text(USER, BEGUN, response_format=wanted, extra_body={"continue_final_message": True})


def test_the_next_turn_holds_one_message_made_of_both() -> None:
    renderer: Any = FakeRenderer()
    thought = {"role": "assistant", "content": [{"text": "It"}, {"text": "was "}], "reasoning_content": "Hm."}
    conversation = Conversation(renderer, [USER, thought], [], {}, "", continues=True)
    whole = conversation.whole({"role": "assistant", "content": [{"text": "me."}]})
    assert whole == {"role": "assistant", "content": [{"text": "It\nwas me."}], "reasoning_content": "Hm."}
    following = conversation.followed_by([whole])
    assert (following.messages, following.continues, conversation.asked) == ([USER, whole], False, [USER])
    assert (conversation.begun, following.begun) == ("It\nwas ", "")


# ------------------------------------------------------------------------------------------------ other dialects

COUNT: Any = {"role": "user", "content": "Count from 1 to 9."}
COUNTED: Any = {"role": "assistant", "content": "1, 2, 3,"}
MORE: Any = {"role": "user", "content": "hello"}


def test_channels_are_not_gone_on_with() -> None:
    renderer = FakeRenderer()
    model = fake_model(renderer=renderer, call_format=HARMONY)
    client = TestClient(create_app(FakeEngine(), model, ServerConfig()))
    asked = {"model": "tiny", "messages": [COUNT, COUNTED], "stream": False}
    refused = client.post("/v1/messages", json={**asked, "max_tokens": 9})
    assert (refused.status_code, "cannot be continued" in refused.text) == (400, True)
    assert client.post("/api/chat", json=asked).status_code == 200
    assert renderer.calls and not any(call["continues"] for call in renderer.calls)


@pytest.mark.parametrize(
    ("last", "continues"),
    [
        (COUNTED, True),
        ({**COUNTED, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, False),
        ({**COUNTED, "content": ""}, False),
        (MORE, False),
    ],
)
def test_which_messages_ollamas_chat_goes_on_with(
    client: TestClient, renderer: FakeRenderer, last: dict[str, Any], continues: bool
) -> None:
    asked = {"model": "tiny", "messages": [COUNT, last], "stream": False}
    assert client.post("/api/chat", json=asked).status_code == 200
    assert renderer.calls[0]["continues"] is continues


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": [COUNT, COUNTED], "continue_final_message": True}),
        ("/v1/messages", {"messages": [COUNT, COUNTED], "max_tokens": 50}),
        ("/v1/responses", {"input": [COUNT, {**COUNTED, "type": "message", "status": "incomplete"}]}),
        ("/api/chat", {"messages": [COUNT, COUNTED], "stream": False}),
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
