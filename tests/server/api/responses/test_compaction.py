"""A compaction that leaves out the tools of its session is rendered with them, and may not call them."""

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from server.app.config import ServerConfig
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, FakeRenderer, fake_model
from tests.support.fake_grammar import FakeCompiler

TOOLS = [{"type": "function", "name": "read", "parameters": {"type": "object"}}]
METADATA = {"x-codex-turn-metadata": json.dumps({"request_kind": "compaction"})}
ASKED = {"role": "user", "content": "Mend the door."}
COMPACT = [ASKED, {"role": "assistant", "content": "Done."}, {"role": "user", "content": "Create a summary."}]


@pytest.mark.parametrize(
    ("fields", "headers", "shows"),
    [
        ({"client_metadata": METADATA}, {}, True),
        ({}, METADATA, True),
        ({"tools": None}, METADATA, True),
        ({}, {}, False),
        ({}, {"x-codex-turn-metadata": '{"request_kind": "turn"}'}, False),
        ({"instructions": "Be brief."}, METADATA, False),
        ({"input": [{"role": "user", "content": "Another door."}, *COMPACT[1:]]}, METADATA, False),
        ({}, {**METADATA, "session-id": "other"}, True),
        ({}, {**METADATA, "Authorization": "Bearer other"}, False),
    ],
)
def test_a_compaction_keeps_the_tools_of_its_session(
    fields: dict[str, Any], headers: dict[str, str], shows: bool
) -> None:
    renderer, engine = FakeRenderer(), FakeEngine()
    model = fake_model(renderer=renderer, grammars=FakeCompiler(), context_tokens=2000)
    client = TestClient(create_app(engine, model, ServerConfig()), headers={"session-id": "s"})
    first = client.post("/v1/responses", json={"input": [ASKED], "tools": TOOLS})
    body = {"input": COMPACT, "tools": [], **fields}
    answer = client.post("/v1/responses", json=body, headers=headers)
    assert (first.status_code, answer.status_code) == (200, 200), answer.text
    asked = [call for call in renderer.calls if call["messages"][-1]["role"] == "user"]
    assert bool(asked[-1]["tools"]) is shows and (not shows or asked[-1]["tools"] == asked[0]["tools"])
    assert (engine.requests[-1].grammar is not None) is shows
    assert answer.json()["tools"] == [], "the answer says what the request said"
