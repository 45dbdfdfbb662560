"""New tool results reach the engine as calls quote them, in JSON strings: texts for drafts."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from server.api import conversation
from server.app.config import ServerConfig
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, fake_model

ASK: dict[str, Any] = {"role": "user", "content": 'What is in "a.py"?\n'}
CALLS: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "read", "arguments": "{}"}}],
}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "1", "content": text}


def quoted(messages: list[dict[str, Any]], **fields: Any) -> list[str]:
    engine = FakeEngine()
    body = {"messages": messages, **fields}
    answer = TestClient(create_app(engine, fake_model(), ServerConfig())).post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return ["".join(map(chr, text)) for text in engine.requests[0].quotable]


def test_new_results_are_quoted_as_json_has_them_where_it_changes_them() -> None:
    told = [ASK, CALLS, result('old "one"'), CALLS, result('say("hi")\n\tpass # é'), result("plain"), ASK]
    assert quoted(told) == [r"say(\"hi\")\n\tpass # é"]


@pytest.mark.parametrize("messages", [[ASK], [ASK, CALLS, result("plain")], [ASK, CALLS, result('"'), CALLS, ASK]])
def test_what_was_said_otherwise_is_not_quoted(messages: list[dict[str, Any]]) -> None:
    assert quoted(messages) == []


@pytest.mark.parametrize("fields", [{"cache_prompt": False}, {"store": False}])
def test_nothing_is_quoted_of_a_request_that_leaves_nothing(fields: dict[str, Any]) -> None:
    assert quoted([ASK, CALLS, result('"')], **fields) == []


def test_what_is_quoted_is_bounded_the_newest_results_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "MAX_QUOTABLE_CHARACTERS", 11)
    told = [ASK, CALLS, result('"1"'), result('"2"2"'), result("\n" * 3)]
    assert quoted(told) == [r"\"2\"", r"\n\n\n"]
