"""How many tokens were restored since a prompt was shown otherwise than sent: by the engine, and by a recording."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from models.prompt.shapes import Outline
from server.api.conversation import MIN_TOKENS_AHEAD
from server.app.config import ServerConfig
from server.app.service import open_renderer, open_service
from server.diagnosis.account import EvaluatedTurn, Rendered, healed
from server.diagnosis.causes import Heal, Healed, HealKind
from server.diagnosis.prompt import prompt_of
from server.doctor.findings import findings_of
from server.doctor.model_reader import ModelReader
from server.doctor.recorded import checkups_of, read_requests
from tests.support.apps import create_app

MESSAGES = [{"role": role, "content": role} for role in ("system", "user", "assistant", "tool")]
PROMPT = prompt_of(MESSAGES)
# A message's text ends where the next one begins; the calls of message 2 are tokens 300 to 350.
REQUEST = Rendered(PROMPT, np.arange(400, dtype=np.int32), Outline((0, 100, 200, 300), ("s", "u", "a", "t")))
BEFORE = EvaluatedTurn(PROMPT, tokens=np.arange(350, dtype=np.int32), num_prompt_tokens=250)
LATER = EvaluatedTurn(PROMPT, tokens=np.arange(400, dtype=np.int32), num_prompt_tokens=400)


@pytest.mark.parametrize(
    ("heal", "before", "hit", "saved"),
    [
        (Heal(HealKind.CALLS, 2), BEFORE, 350, 50),
        (Heal(HealKind.CALLS, 2), BEFORE, 390, 50),
        (Heal(HealKind.CALLS, 2), BEFORE, 200, 0),
        (Heal(HealKind.CALLS, 2), LATER, 399, 0),
        (Heal(HealKind.CALLS, 2), None, 390, 90),
        (Heal(HealKind.GIT, 0, 80, is_new=True), BEFORE, 350, 270),
        (Heal(HealKind.GIT, 0, 80), BEFORE, 350, 0),
        (Heal(HealKind.SYSTEM, 1, 9999, is_new=True), None, 150, 150),
        (Heal(HealKind.COMPACTION, 0, is_new=True), BEFORE, 350, 350),
    ],
)
def test_what_was_restored_after_the_difference_is_saved(
    heal: Heal, before: EvaluatedTurn | None, hit: int, saved: int
) -> None:
    assert healed(before, replace(REQUEST, heals=[heal]), hit) == Healed((heal.kind,), saved)


def test_the_first_difference_counts_and_a_prompt_without_messages_has_none() -> None:
    both = [Heal(HealKind.CALLS, 2), Heal(HealKind.GIT, 0, 80, is_new=True)]
    assert healed(BEFORE, replace(REQUEST, heals=both), 350) == Healed((HealKind.CALLS, HealKind.GIT), 270)
    assert healed(BEFORE, Rendered(PROMPT, REQUEST.tokens, heals=both), 350).saved_tokens == 0


CONFIG = ServerConfig(cache_memory_bytes=1 << 28, heals=("*=git,compaction",))
SYSTEM = f"{'You help in a small shop. ' * 5}\nFiles: {{}}\n{'Answer in one line. ' * 5}"
WEIGH = {
    "name": "weigh",
    "description": "Weighs an item of the shop. " * 4,
    "parameters": {
        "type": "object",
        "properties": {"item": {"enum": ["pear"]}, "grams": {"enum": [5]}},
        "required": ["item", "grams"],
        "additionalProperties": False,
    },
}
FORCED = {"type": "function", "function": {"name": "weigh"}}


class Agent:
    """An agent that writes calls anew, names changed files in its system message, and sums up without tools."""

    def __init__(self, client: TestClient) -> None:
        self._client = client
        self._history = list[dict[str, Any]]()
        self.lines = list[str]()

    def ask(self, files: str, question: dict[str, Any], **fields: Any) -> dict[str, Any]:
        self._history.append(question)
        messages = [{"role": "system", "content": SYSTEM.format(files)}, *self._history]
        body = {
            "model": "demo", "session_id": "s", "temperature": 0, "max_tokens": 40, "messages": messages, **fields,
        }  # fmt: skip
        answer: dict[str, Any] = self._client.post("/v1/chat/completions", json=body).json()
        self.lines.append(json.dumps({"body": body, "response": answer}))
        reply = {name: value for name, value in answer["choices"][0]["message"].items() if value is not None}
        for call in reply.get("tool_calls", ()):
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())))
        self._history.append(reply)
        return answer


@pytest.fixture
def client() -> Iterator[TestClient]:
    service = open_service(CONFIG)
    service.engine.start()
    with TestClient(create_app(service.engine, service.model, CONFIG)) as client:
        yield client
    service.engine.stop()


def test_the_engine_restores_what_is_healed_and_a_recording_counts_the_same(
    client: TestClient, tmp_path: Path
) -> None:
    agent, tools = Agent(client), [{"type": "function", "function": WEIGH}]
    (mark,) = client.post("/tokenize", json={"content": "<tool_call>"}).json()["tokens"]
    wants_to_call = {"logit_bias": {str(mark): 100}, "max_tokens": 8}
    called = agent.ask("none", {"role": "user", "content": "How heavy?"}, tools=tools, tool_choice=FORCED)
    (call,) = called["choices"][0]["message"]["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "Five grams."}
    answers = [
        agent.ask("none", result, tools=tools, tool_choice="none"),
        agent.ask("till.py", {"role": "user", "content": "And now?"}, tools=tools, tool_choice="none"),
        agent.ask("till.py", {"role": "user", "content": "Sum up what was said."}, **wants_to_call),
    ]
    kinds = [answer["cache"]["healed"]["kinds"] for answer in answers]
    assert kinds == [["calls"], ["git", "calls"], ["compaction", "git", "calls"]]
    summary = answers[-1]
    assert summary["usage"]["prompt_tokens"] - summary["usage"]["prompt_tokens_details"]["cached_tokens"] < 24
    assert "tool_calls" not in summary["choices"][0]["message"]
    assert "<tool_call>" not in summary["choices"][0]["message"]["content"]
    live, path = client.get("/v1/sessions/s").json(), tmp_path / "requests.jsonl"
    path.write_text("\n".join(agent.lines))
    (recorded,) = checkups_of(read_requests(path), ModelReader(*open_renderer("demo"), CONFIG))
    # A recording counts as if the server always evaluated the next turn ahead, however few tokens that has.
    assert 0 < live["healed_tokens"] <= recorded.healed_tokens <= live["healed_tokens"] + 3 * MIN_TOKENS_AHEAD
    assert not findings_of(recorded.losses)
    as_sent = ModelReader(*open_renderer("demo"), ServerConfig(prompt_hygiene=False))
    (recorded,) = checkups_of(read_requests(path), as_sent)
    assert recorded.healed_tokens == 0 and len(findings_of(recorded.losses)) == 3
