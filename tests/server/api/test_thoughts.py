"""What a model thinks comes apart from its answer, is limited where asked for, and costs the next turn nothing."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from models.output.pieces import ReasoningFormat
from server.app.config import ServerConfig
from tests.server.api.test_answers import CALL_TEXTS, TOOLS, ask
from tests.server.api.test_live import Live, assistant, until, user
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, FakeRenderer, Script, fake_model

THINK = ReasoningFormat("<think>", "</think>", (5,))
THOUGHT = ("<thi", "nk>\nHm", ", so.\n</think", ">\n\nHello", " there.")


def client_of(engine: FakeEngine, **renderer: Any) -> TestClient:
    model = fake_model(renderer=FakeRenderer(**renderer), reasoning_format=THINK)
    return TestClient(create_app(engine, model, ServerConfig()))


def test_a_thought_is_a_field_of_the_message_and_counted() -> None:
    body = ask(client_of(FakeEngine(Script(THOUGHT, reasoning_tokens=4))))
    message = body["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Hello there.", "Hm, so.")
    assert message["reasoning"] == message["reasoning_content"]
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


def test_a_thought_is_streamed_apart() -> None:
    chunks = ask(client_of(FakeEngine(Script(THOUGHT))), stream=True)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks][1:-1]
    assert deltas == [
        {"reasoning_content": "Hm", "reasoning": "Hm"},
        {"reasoning_content": ", so.", "reasoning": ", so."},
        {"content": "Hello"},
        {"content": " there."},
    ]


def test_the_prompt_may_have_begun_the_thought() -> None:
    engine = FakeEngine(Script(("Hm.", "</think>Hello")))
    message = ask(client_of(engine, opening="<think>\n"))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Hello")
    assert engine.requests[0].thinking is not None
    assert engine.requests[0].thinking.is_open


def test_calls_follow_a_thought() -> None:
    choice = ask(client_of(FakeEngine(Script(("<think>a</think>", *CALL_TEXTS)))), tools=TOOLS)["choices"][0]
    assert choice["message"]["reasoning_content"] == "a"
    assert choice["message"]["content"] == "Let me look."
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("fields", "arguments", "limit"),
    [
        ({}, {}, None),
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "reasoning_effort": "none"}, None),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}, None),
        ({"reasoning": {"effort": "low", "max_tokens": 9}}, {"reasoning_effort": "low"}, 9),
        ({"reasoning": {"enabled": True, "summary": "auto"}}, {"enable_thinking": True}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True}, 1024),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}, None),
        ({"thinking": {"type": "adaptive"}}, {}, None),
        ({"think": True}, {"enable_thinking": True}, None),
        ({"think": "low", "enable_thinking": False}, {"enable_thinking": False, "reasoning_effort": "low"}, None),
        ({"max_thinking_tokens": 0}, {"enable_thinking": False}, 0),
        ({"thinking_budget": 7, "reasoning_budget": -1, "thinking_token_budget": 8.0}, {}, 7),
        ({"reasoning_budget_tokens": 3, "thinking_budget_tokens": 4}, {}, 3),
        ({"chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}, None),
    ],
)
def test_thinking_is_asked_for_in_many_ways(
    fields: dict[str, Any], arguments: dict[str, Any], limit: int | None
) -> None:
    engine, renderer = FakeEngine(), FakeRenderer()
    model = fake_model(renderer=renderer, reasoning_format=THINK)
    ask(TestClient(create_app(engine, model, ServerConfig())), **fields)
    assert renderer.calls[0]["template_kwargs"] == arguments
    assert engine.requests[0].thinking is not None
    assert engine.requests[0].thinking.max_tokens == limit


def test_a_turn_is_evaluated_ahead_with_its_thought_and_without() -> None:
    engine = FakeEngine(Script(THOUGHT))
    with client_of(engine) as client:
        ask(client)
        until(lambda: bool(engine.idle_requests))
    assert ["".join(map(chr, ahead.tokens)) for ahead in engine.idle_requests] == [
        "<user>Hi<assistant>Hello there.<user>a"
    ]


THINKING: dict[str, Any] = {"enable_thinking": True}


NEW_TOKENS = 30
"""More than the message "What is my name?" with its frame, and far less than the thought or the answer before it."""
ASKED = user("Count from 1 to 20.")


def first_turn(demo: Live, session: str, **fields: Any) -> Any:
    system = {"role": "system", "content": f"You answer questions on the server ({session}). " * 8}
    extra = {**THINKING, "session_id": session, **fields}
    return system, demo.ask(system, ASKED, extra_body=extra, max_tokens=200)


@pytest.mark.parametrize("limit", [0, 5, 40])
def test_a_thought_is_closed_and_the_answer_goes_on(demo: Live, limit: int) -> None:
    _, answer = first_turn(demo, f"limit-{limit}", max_thinking_tokens=limit)
    details = answer.usage.completion_tokens_details
    assert details.reasoning_tokens <= limit
    assert answer.choices[0].message.content
    assert "</think>" not in answer.choices[0].message.content


def with_thought(message: Any) -> dict[str, str]:
    return {**assistant(message.content), "reasoning_content": message.reasoning_content}


def under_its_other_name(message: Any) -> dict[str, str]:
    return {**assistant(message.content), "reasoning": message.reasoning_content}


def inside_the_content(message: Any) -> dict[str, str]:
    return assistant(f"<think>\n{message.reasoning_content}\n</think>\n\n{message.content}")


def without_thought(message: Any) -> dict[str, str]:
    return assistant(message.content)


@pytest.mark.parametrize("limit", [-1, 5])
@pytest.mark.parametrize("sent_back", [with_thought, under_its_other_name, inside_the_content, without_thought])
def test_the_next_turn_evaluates_its_new_message_only(
    demo: Live, sent_back: Any, limit: int, num_ahead: list[None]
) -> None:
    session = f"{sent_back.__name__} {limit}"
    system, answer = first_turn(demo, session, max_thinking_tokens=limit)
    until(lambda: bool(num_ahead))
    message = answer.choices[0].message
    assert message.reasoning_content and message.content.endswith("20.")
    history = [system, ASKED, sent_back(message)]
    second = demo.ask(*history, user("What is my name?"), extra_body={**THINKING, "session_id": session})
    assert second.model_extra["timings"]["prompt_n"] <= NEW_TOKENS, second.model_extra
