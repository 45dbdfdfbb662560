"""Whole answers of the Messages API as they go over the wire, byte for byte but for random ids.

Run `python -m tests.server.api.anthropic.test_golden` to write the transcripts anew after a change that is meant, and
read the difference.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from models.output.reasoning import ReasoningFormat
from server.api.app import create_app
from server.app.config import ServerConfig
from server.engine.diagnosis import Cause, Miss, MissReason
from server.engine.request import FinishReason, OutOfMemory
from tests.support.fake_engine import FakeEngine, Script, fake_model

FOLDER = Path(__file__).parent / "golden"
THINK = ReasoningFormat("<think>", "</think>", (5,))
VERSION = {"anthropic-version": "2023-06-01"}
TOOLS = [{"name": "get_weather", "input_schema": {"type": "object"}}]

PLAIN = Script(texts=("Hel", "lo “you”\n", "🙂"), hit_tokens=4)
CALLING = Script(
    texts=(
        "<think>\nThe weather, ",
        "then.\n</think>\n\nLet me look.\n<tool_",
        'call>{"name": "get_weather", "arguments": {"city": "Zü',
        'rich"}}</tool_call>',
    ),
    hit_tokens=4,
    reasoning_tokens=5,
)
CHANGED = Miss(MissReason.SYSTEM_CHANGED, 0, "system", 17, "It is 09:16", "It is 09:17", Cause.CLOCK, 12)


def exchange(script: Script, engine: FakeEngine | None = None, **fields: Any) -> str:
    """One request's status, content type and body."""
    model = fake_model(reasoning_format=THINK)
    client = TestClient(create_app(engine or FakeEngine(script), model, ServerConfig(heartbeat_seconds=30)))
    body = {"max_tokens": 50, "system": "Be terse.", "messages": [{"role": "user", "content": "Hi"}], **fields}
    answer = client.post("/v1/messages?beta=true", json=body, headers=VERSION)
    return f"{answer.status_code} {answer.headers['content-type']}\n\n{answer.text}"


def normalised(text: str) -> str:
    text = re.sub(r'"id":"msg_[0-9a-f]{32}"', '"id":"msg_ID"', text)
    return re.sub(r'"id":"toolu_[0-9a-f]{24}"', '"id":"toolu_ID"', text)


EXCHANGES: dict[str, Callable[[], str]] = {
    "message": lambda: exchange(PLAIN),
    "message_stream": lambda: exchange(PLAIN, stream=True),
    "message_length": lambda: exchange(replace(PLAIN, reason=FinishReason.LENGTH), stream=True, max_tokens=3),
    "message_stop_sequence": lambda: exchange(replace(PLAIN, stop_text="END"), stop_sequences=["END"]),
    "message_tools": lambda: exchange(CALLING, tools=TOOLS),
    "message_tools_stream": lambda: exchange(CALLING, tools=TOOLS, stream=True),
    "message_failed_call": lambda: exchange(
        replace(CALLING, texts=CALLING.texts[:-1], reason=FinishReason.LENGTH), tools=TOOLS, stream=True, max_tokens=3
    ),
    "message_stream_error": lambda: exchange(replace(PLAIN, error=OutOfMemory("too long")), stream=True),
    "message_miss": lambda: exchange(replace(PLAIN, miss=CHANGED), session_id="s-1"),
    "message_invalid": lambda: exchange(PLAIN, temperature="hot"),
    "message_queue_full": lambda: exchange(PLAIN, FakeEngine(max_waiting=0)),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_an_answer_is_what_it_was(name: str) -> None:
    assert normalised(EXCHANGES[name]()) == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def test_every_transcript_belongs_to_an_exchange() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(EXCHANGES)


if __name__ == "__main__":
    for each, run in EXCHANGES.items():
        (FOLDER / f"{each}.txt").write_text(normalised(run()), encoding="utf-8")
