"""A stream always ends as a stream: whatever fails, and whenever, the client is told."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from models.prompt.chat_template import ChatTemplateError
from server.api.answer import Run
from server.api.openai.generate import ChatExchange, CompletionExchange
from server.app.config import ServerConfig
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, FakeRenderer, Script, fake_model
from tests.support.live_server import running

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOOLS = [{"type": "function", "function": {"name": "f"}}]
TEXTS = ("Hello", " there", '<tool_call>{"name": "f"}</tool_call>', " you")
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS},
    TEXT: {"prompt": "Hi"},
}
DIALECTS: dict[str, tuple[Any, str]] = {CHAT: (ChatExchange, "chunk"), TEXT: (CompletionExchange, "chunk")}
MOST_EVENTS = 40


class Fault:
    """Makes the n-th call of a method fail, or return what cannot be written as JSON."""

    def __init__(self, function: Callable[..., Any], fails_at: int, outcome: Any) -> None:
        self.function, self.fails_at, self.outcome, self.calls = function, fails_at, outcome, 0

    def method(self) -> Callable[..., Any]:
        def call(instance: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls != self.fails_at:
                return self.function(instance, *args, **kwargs)
            if isinstance(self.outcome, Exception):
                raise self.outcome
            return self.outcome

        return call

    @property
    def fired(self) -> bool:
        return self.calls >= self.fails_at


def client_of(script: Script) -> TestClient:
    return TestClient(create_app(FakeEngine(script), fake_model(), ServerConfig()))


def events_of(answer: Any) -> list[Any]:
    """The stream's events as JSON; fails for a line that is none."""
    assert answer.status_code == 200
    assert answer.text.endswith("\n\n")
    lines = [line for line in answer.text.split("\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    payloads = [line.removeprefix("data: ") for line in lines]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


@pytest.mark.parametrize("outcome", [RuntimeError("secret"), {"x": object()}, {"x": float("nan")}])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_fault_at_any_chunk_is_told_in_the_stream(path: str, outcome: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dialect, method = DIALECTS[path]
    for fails_at in range(1, MOST_EVENTS):
        fault = Fault(getattr(dialect, method), fails_at, outcome)
        with monkeypatch.context() as patch:
            patch.setattr(dialect, method, fault.method())
            events = events_of(client_of(Script(TEXTS)).post(path, json={**BODIES[path], "stream": True}))
        if not fault.fired:
            assert events[-1] == "[DONE]"
            break
        assert events[-1]["error"]["code"] == "internal_error"
        assert "secret" not in json.dumps(events)
    assert 3 < fails_at < MOST_EVENTS - 1


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_fault_at_any_event_of_the_engine_is_told_in_the_stream(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for fails_at in range(1, MOST_EVENTS):
        fault = Fault(Run.observe, fails_at, RuntimeError("secret"))
        with monkeypatch.context() as patch:
            patch.setattr(Run, "observe", fault.method())
            events = events_of(client_of(Script(TEXTS)).post(path, json={**BODIES[path], "stream": True}))
        if not fault.fired:
            assert events[-1] == "[DONE]"
            break
        assert events[-1]["error"]["code"] == "internal_error"
    assert 3 < fails_at < MOST_EVENTS - 1


class QuotingRenderer(FakeRenderer):
    """Refuses a conversation in words that hold half a character."""

    def render(self, *_: Any, **__: Any) -> Any:
        raise ChatTemplateError("no such word: \ud800")


@pytest.mark.parametrize("stream", [False, True])
def test_half_a_character_in_a_call_does_not_fail_the_answer(stream: bool) -> None:
    text = r'<tool_call>{"name": "f", "id": "c\ud83d", "arguments": {"city\ud800": "\ud83d"}}</tool_call>'
    answer = client_of(Script((text,))).post(CHAT, json={**BODIES[CHAT], "stream": stream})
    assert answer.status_code == 200
    if stream:
        events = events_of(answer)
        assert events[-1] == "[DONE]"
        deltas = [c for e in events[:-1] for choice in e["choices"] for c in choice["delta"].get("tool_calls", ())]
        arguments = "".join(delta["function"]["arguments"] for delta in deltas)
        call = {**deltas[0], "function": {**deltas[0]["function"], "arguments": arguments}}
    else:
        [call] = answer.json()["choices"][0]["message"]["tool_calls"]
    assert (call["id"], call["function"]["name"]) == ("c\ufffd", "f")
    assert json.loads(call["function"]["arguments"]) == {"city\ufffd": "\ufffd"}


def test_an_error_that_quotes_half_a_character_is_an_error_all_the_same() -> None:
    model = fake_model(renderer=QuotingRenderer())
    answer = TestClient(create_app(FakeEngine(), model, ServerConfig())).post(CHAT, json=BODIES[CHAT])
    assert answer.status_code == 400
    assert "no such word: \ufffd" in answer.json()["error"]["message"]


def test_the_connection_serves_another_request_after_a_stream_that_failed() -> None:
    """The end is a proper one: the last chunk of the transfer encoding arrives."""
    app = create_app(FakeEngine(Script(TEXTS, error=RuntimeError("x"))), fake_model(), ServerConfig())
    with running(app) as base, httpx.Client(base_url=base) as client:
        for _ in range(2):
            answer = client.post(CHAT, json={**BODIES[CHAT], "stream": True})
            assert "internal_error" in answer.text
