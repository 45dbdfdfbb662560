"""Whole answers of every dialect as they go over the wire, byte for byte but for names, times and random ids.

Run `python -m tests.server.api.conformance.test_golden` to write the transcripts anew after a change that is meant;
read the difference.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from models.output.pieces import ReasoningFormat
from server.app.config import ServerConfig
from server.diagnosis.causes import Cause, Miss, MissReason
from server.engine.request import FinishReason, OutOfMemory, QueueFull
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, Script, fake_model

FOLDER = Path(__file__).parents[1]
THINK = ReasoningFormat("<think>", "</think>")
MESSAGES = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "Hi"}]
WEATHER = {"type": "function", "function": {"name": "get_weather"}}

PLAIN = Script(texts=("Hel", "lo “you”\n", "🙂"), hit_tokens=4)
CUT = replace(PLAIN, reason=FinishReason.LENGTH)
FAILING = replace(PLAIN, error=OutOfMemory("too long"))
MISSING = replace(
    PLAIN, miss=Miss(MissReason.SYSTEM_CHANGED, 0, "system", 17, "It is 09:16", "It is 09:17", 12, cause=Cause.CLOCK)
)
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich"}}</tool_call>'
CALLING = Script(texts=("Let me look.\n<tool_", CALL.removeprefix("<tool_")))
THOUGHTFUL = Script(
    texts=(
        "<think>\nThe weather, ",
        "then.\n</think>\n\nLet me look.\n<tool_",
        'call>{"name": "get_weather", "arguments": {"city": "Zü',
        'rich"}}</tool_call>',
    ),
    hit_tokens=4,
    reasoning_tokens=5,
)
PATCHING = replace(
    THOUGHTFUL,
    texts=(
        *THOUGHTFUL.texts[:-1],
        'rich"}}</tool_call><tool_call>{"name": "apply_patch", "arguments": {"input": "a',
        '\\nb"}}</tool_call>',
    ),
)
CALLING_TWICE = Script(texts=("<think>", "Hm.</think>Let me look.\n<tool_", CALL.removeprefix("<tool_"), "\n" + CALL))
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
STREAM = {"stream": True}
WHOLE = {"stream": False}

CHAT = {"": "/v1/chat/completions", "messages": MESSAGES}
TEXT = {"": "/v1/completions", "prompt": "Once"}
MESSAGE = {"": "/v1/messages?beta=true", "max_tokens": 50, "system": "Be terse.", "messages": [MESSAGES[1]]}
RESPONSE = {"": "/v1/responses", "instructions": "Be terse.", "input": "Hi"}
OLLAMA = {"": "/api/chat", "model": "tiny", "messages": MESSAGES}
GENERATE = {"": "/api/generate", "model": "tiny", "prompt": "Once"}

CHAT_TOOLS = {"tools": [WEATHER]}
MESSAGE_TOOLS = {"tools": [{"name": "get_weather", "input_schema": {"type": "object"}}]}
RESPONSE_TOOLS = {"tools": [{"type": "function", "name": "get_weather"}, {"type": "custom", "name": "apply_patch"}]}
SUMMARY = {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}

EXCHANGES: dict[str, tuple[dict[str, Any], Script | None, dict[str, Any]]] = {
    "golden/chat": (CHAT, PLAIN, {}),
    "golden/chat_stream": (CHAT, PLAIN, STREAM),
    "golden/chat_stream_usage": (CHAT, PLAIN, USAGE),
    "golden/chat_length": (CHAT, CUT, STREAM),
    "golden/chat_tools": (CHAT, CALLING, CHAT_TOOLS),
    "golden/chat_tools_stream": (CHAT, CALLING, CHAT_TOOLS | STREAM),
    "golden/chat_stream_error": (CHAT, FAILING, STREAM),
    "golden/chat_miss": (CHAT, MISSING, {"session_id": "s-1"}),
    "golden/chat_invalid": (CHAT, PLAIN, {"temperature": "hot"}),
    "golden/chat_queue_full": (CHAT, None, {}),
    "golden/text": (TEXT, PLAIN, {}),
    "golden/text_stream": (TEXT, PLAIN, STREAM),
    "golden/text_stream_usage": (TEXT, PLAIN, USAGE),
    "anthropic/golden/message": (MESSAGE, PLAIN, {}),
    "anthropic/golden/message_stream": (MESSAGE, PLAIN, STREAM),
    "anthropic/golden/message_length": (MESSAGE, CUT, STREAM | {"max_tokens": 3}),
    "anthropic/golden/message_stop_sequence": (MESSAGE, replace(PLAIN, stop_text="END"), {"stop_sequences": ["END"]}),
    "anthropic/golden/message_tools": (MESSAGE, THOUGHTFUL, MESSAGE_TOOLS),
    "anthropic/golden/message_tools_stream": (MESSAGE, THOUGHTFUL, MESSAGE_TOOLS | STREAM),
    "anthropic/golden/message_failed_call": (
        MESSAGE,
        replace(THOUGHTFUL, texts=THOUGHTFUL.texts[:-1], reason=FinishReason.LENGTH),
        MESSAGE_TOOLS | STREAM | {"max_tokens": 3},
    ),
    "anthropic/golden/message_stream_error": (MESSAGE, FAILING, STREAM),
    "anthropic/golden/message_miss": (MESSAGE, MISSING, {"session_id": "s-1"}),
    "anthropic/golden/message_invalid": (MESSAGE, PLAIN, {"temperature": "hot"}),
    "anthropic/golden/message_queue_full": (MESSAGE, None, {}),
    "responses/golden/response": (RESPONSE, PLAIN, {}),
    "responses/golden/response_stream": (RESPONSE, PLAIN, STREAM),
    "responses/golden/response_length": (RESPONSE, CUT, STREAM | {"max_output_tokens": 3}),
    "responses/golden/response_tools": (RESPONSE, PATCHING, RESPONSE_TOOLS),
    "responses/golden/response_tools_stream": (RESPONSE, PATCHING, RESPONSE_TOOLS | STREAM),
    "responses/golden/response_summary_stream": (RESPONSE, PATCHING, SUMMARY | STREAM),
    "responses/golden/response_failed_call": (
        RESPONSE,
        replace(
            PATCHING,
            texts=('Look. <tool_call>{"name": "get_weather", "arguments": {"a": 1', ", oops}</tool_call> So."),
        ),
        RESPONSE_TOOLS | STREAM,
    ),
    "responses/golden/response_stream_error": (RESPONSE, FAILING, STREAM),
    "responses/golden/response_invalid": (RESPONSE, PLAIN, {"temperature": "hot"}),
    "responses/golden/response_unknown_field": (RESPONSE, PLAIN, {"temprature": 1}),
    "responses/golden/response_queue_full": (RESPONSE, None, {}),
    "ollama/golden/chat": (OLLAMA, PLAIN, WHOLE),
    "ollama/golden/chat_stream": (OLLAMA, PLAIN, {}),
    "ollama/golden/chat_tools": (OLLAMA, CALLING_TWICE, CHAT_TOOLS | WHOLE),
    "ollama/golden/chat_tools_stream": (OLLAMA, CALLING_TWICE, CHAT_TOOLS),
    "ollama/golden/chat_stream_error": (OLLAMA, FAILING, {}),
    "ollama/golden/chat_invalid": (OLLAMA, PLAIN, {"options": {"temperature": "hot"}}),
    "ollama/golden/chat_load": (OLLAMA, PLAIN, {"messages": []}),
    "ollama/golden/generate": (GENERATE, CALLING_TWICE, WHOLE),
    "ollama/golden/generate_stream": (GENERATE, PLAIN, {}),
    "ollama/golden/generate_raw": (GENERATE, PLAIN, WHOLE | {"raw": True}),
}
"""What is asked and answered by the transcript's name; without a script the queue is full."""


def exchange(name: str) -> str:
    """One request's status, content type and body."""
    asked, script, fields = EXCHANGES[name]
    engine = FakeEngine(max_waiting=0) if script is None else FakeEngine(script)
    thinks = name.partition("/")[0] != "golden"
    model = fake_model(reasoning_format=THINK) if thinks else fake_model()
    client = TestClient(create_app(engine, model, ServerConfig(heartbeat_seconds=30)))
    body = {field: value for field, value in (asked | fields).items() if field}
    answer = client.post(asked[""], json=body, headers={"anthropic-version": "2023-06-01"} if thinks else {})
    end = "\n" if name.startswith("ollama") else ""
    return f"{answer.status_code} {answer.headers['content-type']}\n\n{normalised(answer.text)}{end}"


def normalised(text: str) -> str:
    text = re.sub(r"\b(chatcmpl|cmpl)-[0-9a-f]{32}", r"\1-ID", text)
    text = re.sub(r"\b(resp|msg|rs|fc|ctc)_[0-9a-f]{32}|\b(call|toolu)_[0-9a-f]{24}", _unnamed, text)
    text = re.sub(r'"system_fingerprint":"mlx-serve/[^"]+"', '"system_fingerprint":"mlx-serve"', text)
    text = re.sub(r'"created_at":"[-0-9]{10}T[:0-9]{8}\.[0-9]+Z"', '"created_at":"TIME"', text)
    return re.sub(r'"(created|created_at|completed_at|total_duration)":\d+', r'"\1":0', text)


def _unnamed(found: re.Match[str]) -> str:
    return found[0].partition("_")[0] + "_ID"


@pytest.mark.parametrize("name", EXCHANGES)
def test_an_answer_is_what_it_was(name: str) -> None:
    assert exchange(name) == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def test_every_transcript_belongs_to_an_exchange() -> None:
    assert {str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.rglob("golden/*.txt")} == set(EXCHANGES)


def test_the_fake_counts_waiting_requests_like_the_engine() -> None:
    assert str(QueueFull(0, 7)) in exchange("golden/chat_queue_full")


if __name__ == "__main__":
    for each in EXCHANGES:
        (FOLDER / f"{each}.txt").write_text(exchange(each), encoding="utf-8")
