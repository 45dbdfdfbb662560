"""Whole answers of the Responses API as they go over the wire, byte for byte but for times and random ids.

Run `python -m tests.server.api.responses.test_golden` to write the transcripts anew after a change that is meant, and
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
from server.engine.request import FinishReason, OutOfMemory
from tests.support.fake_engine import FakeEngine, Script, fake_model

FOLDER = Path(__file__).parent / "golden"
THINK = ReasoningFormat("<think>", "</think>", (5,))
TOOLS = [{"type": "function", "name": "get_weather"}, {"type": "custom", "name": "apply_patch"}]

PLAIN = Script(texts=("Hel", "lo “you”\n", "🙂"), hit_tokens=4)
CALLING = Script(
    texts=(
        "<think>\nThe weather, ",
        "then.\n</think>\n\nLet me look.\n<tool_",
        'call>{"name": "get_weather", "arguments": {"city": "Zü',
        'rich"}}</tool_call><tool_call>{"name": "apply_patch", "arguments": {"input": "a',
        '\\nb"}}</tool_call>',
    ),
    hit_tokens=4,
    reasoning_tokens=5,
)
FAILING = replace(
    CALLING, texts=('Look. <tool_call>{"name": "get_weather", "arguments": {"a": 1', "}</tool_call> So.")
)


def exchange(script: Script, engine: FakeEngine | None = None, **fields: Any) -> str:
    """One request's status, content type and body."""
    model = fake_model(reasoning_format=THINK)
    client = TestClient(create_app(engine or FakeEngine(script), model, ServerConfig(heartbeat_seconds=30)))
    answer = client.post("/v1/responses", json={"instructions": "Be terse.", "input": "Hi", **fields})
    return f"{answer.status_code} {answer.headers['content-type']}\n\n{answer.text}"


def normalised(text: str) -> str:
    text = re.sub(r"\b(resp|msg|rs|fc|ctc)_[0-9a-f]{32}", r"\1_ID", text)
    text = re.sub(r'"call_id":"call_[0-9a-f]{24}"', '"call_id":"call_ID"', text)
    return re.sub(r'"(created|completed)_at":\d+', r'"\1_at":0', text)


EXCHANGES: dict[str, Callable[[], str]] = {
    "response": lambda: exchange(PLAIN),
    "response_stream": lambda: exchange(PLAIN, stream=True),
    "response_length": lambda: exchange(replace(PLAIN, reason=FinishReason.LENGTH), stream=True, max_output_tokens=3),
    "response_tools": lambda: exchange(CALLING, tools=TOOLS),
    "response_tools_stream": lambda: exchange(CALLING, tools=TOOLS, stream=True),
    "response_summary_stream": lambda: exchange(
        CALLING, stream=True, reasoning={"summary": "auto"}, include=["reasoning.encrypted_content"]
    ),
    "response_failed_call": lambda: exchange(FAILING, tools=TOOLS, stream=True),
    "response_stream_error": lambda: exchange(replace(PLAIN, error=OutOfMemory("too long")), stream=True),
    "response_invalid": lambda: exchange(PLAIN, temperature="hot"),
    "response_unknown_field": lambda: exchange(PLAIN, temprature=1),
    "response_queue_full": lambda: exchange(PLAIN, FakeEngine(max_waiting=0)),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_an_answer_is_what_it_was(name: str) -> None:
    assert normalised(EXCHANGES[name]()) == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def test_every_transcript_belongs_to_an_exchange() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(EXCHANGES)


if __name__ == "__main__":
    for each, run in EXCHANGES.items():
        (FOLDER / f"{each}.txt").write_text(normalised(run()), encoding="utf-8")
