"""Whole answers as they go over the wire, byte for byte but for names, times and random ids.

Run `python -m tests.server.api.test_golden` to write the transcripts anew after a change that is meant; read the
difference.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from server.api.app import create_app
from server.app.config import ServerConfig
from server.engine.diagnosis import Cause, Miss, MissReason
from server.engine.request import FinishReason, OutOfMemory, QueueFull
from tests.support.fake_engine import FakeEngine, Script, fake_model

FOLDER = Path(__file__).parent / "golden"
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "get_weather"}}]
CALLING = Script(
    texts=("Let me look.\n<tool_", 'call>{"name": "get_weather", "arguments": {"city": "Zürich"}}</tool_call>')
)


def exchange(path: str, script: Script, engine: FakeEngine | None = None, **fields: Any) -> str:
    """One request's status, content type and body."""
    engine = engine or FakeEngine(script)
    prompt: dict[str, Any] = {"prompt": "Once"} if path == TEXT else {"messages": MESSAGES}
    client = TestClient(create_app(engine, fake_model(), ServerConfig(heartbeat_seconds=30)))
    answer = client.post(path, json=prompt | fields)
    return f"{answer.status_code} {answer.headers['content-type']}\n\n{answer.text}"


def normalised(text: str) -> str:
    text = re.sub(r'"id":"(chatcmpl|cmpl)-[0-9a-f]{32}"', r'"id":"\1-ID"', text)
    text = re.sub(r'"id":"call_[0-9a-f]{24}"', '"id":"call_ID"', text)
    text = re.sub(r'"system_fingerprint":"mlx-serve/[^"]+"', '"system_fingerprint":"mlx-serve"', text)
    return re.sub(r'"created":\d+', '"created":0', text)


PLAIN = Script(texts=("Hel", "lo “you”\n", "🙂"), hit_tokens=4)
USAGE = {"include_usage": True}
CHANGED = Miss(MissReason.SYSTEM_CHANGED, 0, "system", 17, "It is 09:16", "It is 09:17", Cause.CLOCK, 12)

EXCHANGES: dict[str, Callable[[], str]] = {
    "chat": lambda: exchange(CHAT, PLAIN),
    "chat_stream": lambda: exchange(CHAT, PLAIN, stream=True),
    "chat_stream_usage": lambda: exchange(CHAT, PLAIN, stream=True, stream_options=USAGE),
    "chat_length": lambda: exchange(CHAT, replace(PLAIN, reason=FinishReason.LENGTH), stream=True),
    "chat_tools": lambda: exchange(CHAT, CALLING, tools=TOOLS),
    "chat_tools_stream": lambda: exchange(CHAT, CALLING, tools=TOOLS, stream=True),
    "chat_stream_error": lambda: exchange(CHAT, replace(PLAIN, error=OutOfMemory("too long")), stream=True),
    "chat_miss": lambda: exchange(CHAT, replace(PLAIN, miss=CHANGED), session_id="s-1"),
    "chat_invalid": lambda: exchange(CHAT, PLAIN, temperature="hot"),
    "chat_queue_full": lambda: exchange(CHAT, PLAIN, FakeEngine(max_waiting=0)),
    "text": lambda: exchange(TEXT, PLAIN),
    "text_stream": lambda: exchange(TEXT, PLAIN, stream=True),
    "text_stream_usage": lambda: exchange(TEXT, PLAIN, stream=True, stream_options=USAGE),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_an_answer_is_what_it_was(name: str) -> None:
    assert normalised(EXCHANGES[name]()) == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def test_every_transcript_belongs_to_an_exchange() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(EXCHANGES)


def test_the_fake_counts_waiting_requests_like_the_engine() -> None:
    assert str(QueueFull(0, 7)) in EXCHANGES["chat_queue_full"]()


if __name__ == "__main__":
    for each, run in EXCHANGES.items():
        (FOLDER / f"{each}.txt").write_text(normalised(run()), encoding="utf-8")
