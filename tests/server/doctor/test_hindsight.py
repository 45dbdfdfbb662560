"""Later turns show which version of a conversation went on; over HTTP and from a recording."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from server.app.config import ServerConfig
from server.diagnosis.causes import Cause
from server.doctor.findings import Checkup, LinkedTurn, checkup_from, checkup_of
from server.doctor.recorded import checkups_of, read_requests
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, fake_model

Body = dict[str, Any]
STORY = "A long story of a garden with many trees and a small house at its very end. "


def message(role: str, text: str) -> Body:
    return {"role": role, "content": text}


def opening() -> list[Body]:
    return [message("system", STORY * 4), message("user", STORY * 6 + "What grows there?")]


def edited(messages: list[Body]) -> list[Body]:
    """Another system prompt over the same messages, and a question of its own."""
    other = [message("system", "Write a title of five words. " * 12), *messages[1:]]
    return [*other, message("user", "A title for this conversation, please.")]


def renewed(messages: list[Body]) -> list[Body]:
    """A conversation that shares no message with the one before."""
    return [message("system", messages[0]["content"][: len(STORY)]), message("user", "Tell me of the sea. " * 40)]


CHANGES: dict[str, Callable[[list[Body]], list[Body]]] = {"t": list, "e": edited, "E": edited, "N": renewed}


def checkups(tmp_path: Path, kind: str, steps: str, session_id: str | None = "s") -> list[Checkup]:
    """Holds a conversation: `t` a turn, `e` an edited copy beside it, `E` one that it goes on from, `N` a new one."""
    app = create_app(FakeEngine(), fake_model(context_tokens=20_000), ServerConfig())
    client, lines, messages = TestClient(app, client=("127.0.0.1", 1)), list[Body](), opening()
    for number, step in enumerate(steps):
        sent = CHANGES[step](copy.deepcopy(messages))
        body = {"messages": sent, "session_id": session_id}
        answer = client.post("/v1/chat/completions", json=body).json()
        lines.append({"body": body, "response": answer})
        if step != "e":
            messages = [*sent, answer["choices"][0]["message"], message("user", f"Question {number}: and then?")]
    if kind == "live":
        listed = client.get("/v1/sessions").json()["data"]
        return [checkup_of(client.get(f"/v1/sessions/{one['id']}").json()) for one in listed]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, lines)), "utf-8")
    return checkups_of(read_requests(tmp_path / "r.jsonl"))


def causes(found: list[Checkup]) -> set[Cause]:
    """What changed. The fake engine restores nothing, so that every turn misses state too."""
    return {loss.miss.cause for one in found for loss in one.losses} - {Cause.EVICTED}


@pytest.mark.parametrize("kind", ["live", "file"])
@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("ttt", set()),
        ("tte", {Cause.EDITED}),
        ("tet", {Cause.SIDE_REQUEST}),
        ("ttett", {Cause.SIDE_REQUEST}),
        ("tEt", {Cause.EDITED}),
        ("tN", {Cause.SIDE_REQUEST}),
        ("tNt", set()),
    ],
)
def test_what_went_on_says_what_a_change_was(tmp_path: Path, kind: str, steps: str, expected: set[Cause]) -> None:
    assert causes(checkups(tmp_path, kind, steps)) == expected


def test_an_edited_copy_without_a_name_is_told_alike(tmp_path: Path) -> None:
    assert causes(checkups(tmp_path, "file", "tet", None)) == {Cause.SIDE_REQUEST}


def test_turns_that_nobody_linked_stay_as_they_are() -> None:
    assert checkup_from("s", [LinkedTurn("a", None, ()), LinkedTurn("b", None, ())]).losses == ()


def test_a_sub_agents_turns_are_not_added_to_those_of_its_session() -> None:
    app = create_app(FakeEngine(), fake_model(context_tokens=20_000), ServerConfig())
    client, messages = TestClient(app, client=("127.0.0.1", 1)), opening()
    agent = [message("system", "You search files. " * 40), message("user", "Look for the price of pears. " * 9)]
    for sent, line in ((messages, {}), (agent, {"x-claude-code-agent-id": "a1"}), (messages, {})):
        headers = {"x-claude-code-session-id": "s", **line}
        answer = client.post("/v1/chat/completions", json={"messages": sent}, headers=headers)
        assert answer.headers["x-session-id"] == "s", "gateways keep a session's lines together"
        messages = [*messages, answer.json()["choices"][0]["message"], message("user", "And then?")]
    listed = {one["id"]: one["num_turns"] for one in client.get("/v1/sessions").json()["data"]}
    assert listed == {"s": 2, "s/a1": 1}
    found = checkup_of(client.get("/v1/sessions/s%2Fa1").json())
    assert causes([found]) == set()
