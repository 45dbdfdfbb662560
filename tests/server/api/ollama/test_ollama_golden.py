"""Whole answers of Ollama's dialect as they go over the wire, byte for byte but for times and random ids.

Run `python -m tests.server.api.ollama.test_ollama_golden` to write the transcripts anew after a change that is meant;
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
from server.engine.request import OutOfMemory
from tests.support.fake_engine import FakeEngine, Script, fake_model

FOLDER = Path(__file__).parent / "golden"
CHAT, GENERATE = "/api/chat", "/api/generate"
MESSAGES = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "get_weather"}}]
CALLS = '<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich"}}</tool_call>'
CALLING = Script(texts=("<think>", "Hm.</think>Let me look.\n<tool_", CALLS.removeprefix("<tool_"), "\n" + CALLS))
PLAIN = Script(texts=("Hel", "lo “you”\n", "🙂"), hit_tokens=4)


def exchange(path: str, script: Script, **fields: Any) -> str:
    """One request's status, content type and body."""
    prompt: dict[str, Any] = {"prompt": "Once"} if path == GENERATE else {"messages": MESSAGES}
    model = fake_model(reasoning_format=ReasoningFormat("<think>", "</think>"))
    client = TestClient(create_app(FakeEngine(script), model, ServerConfig(heartbeat_seconds=30)))
    answer = client.post(path, json={"model": "tiny", **prompt, **fields})
    return f"{answer.status_code} {answer.headers['content-type']}\n\n{answer.text}\n"


def normalised(text: str) -> str:
    text = re.sub(r'"created_at":"[-0-9]{10}T[:0-9]{8}\.[0-9]+Z"', '"created_at":"TIME"', text)
    text = re.sub(r'"id":"call_[0-9a-f]{24}"', '"id":"call_ID"', text)
    return re.sub(r'"total_duration":[0-9]+', '"total_duration":0', text)


EXCHANGES: dict[str, Callable[[], str]] = {
    "chat": lambda: exchange(CHAT, PLAIN, stream=False),
    "chat_stream": lambda: exchange(CHAT, PLAIN),
    "chat_tools": lambda: exchange(CHAT, CALLING, tools=TOOLS, stream=False),
    "chat_tools_stream": lambda: exchange(CHAT, CALLING, tools=TOOLS),
    "chat_stream_error": lambda: exchange(CHAT, replace(PLAIN, error=OutOfMemory("too long"))),
    "chat_invalid": lambda: exchange(CHAT, PLAIN, options={"temperature": "hot"}),
    "chat_load": lambda: exchange(CHAT, PLAIN, messages=[]),
    "generate": lambda: exchange(GENERATE, CALLING, stream=False),
    "generate_stream": lambda: exchange(GENERATE, PLAIN),
    "generate_raw": lambda: exchange(GENERATE, PLAIN, raw=True, stream=False),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_an_answer_is_what_it_was(name: str) -> None:
    assert normalised(EXCHANGES[name]()) == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def test_every_transcript_belongs_to_an_exchange() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(EXCHANGES)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each, run in EXCHANGES.items():
        (FOLDER / f"{each}.txt").write_text(normalised(run()), encoding="utf-8")
