"""Calls that clients send back changed are shown as the model wrote them."""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from models.prompt.chat_template import RenderedPrompt
from models.prompt.shapes import Outline
from server.api import own_calls
from server.api.own_calls import CALL_BYTES, FILE_NAME, OwnCalls, canonical
from server.app.config import ServerConfig
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, Script, fake_model

SCHEMA = {
    "type": "object",
    "$defs": {"range": {"properties": {"from": {"default": 1}}}},
    "properties": {
        "path": {"type": "string"},
        "all": {"type": "boolean", "default": False},
        "lines": {"$ref": "#/$defs/range"},
        "parts": {"items": {"properties": {"deep": {"default": {"a": 1, "b": 2}}}}},
    },
}
OWN = {"path": "a.py", "count": 3.0, "lines": {"to": 9}, "parts": [{"x": 1}]}
BACK = {"all": False, "count": 3, "lines": {"from": 1, "to": 9}, "parts": [{"x": 1}], "path": "a.py"}
ASKED = {"role": "user", "content": "Go on."}


@pytest.mark.parametrize(
    "other",
    [
        BACK,
        {**OWN, "count": 3},
        {**OWN, "lines": {"from": 1.0, "to": 9}},
        {**OWN, "parts": [{"deep": {"b": 2.0, "a": 1}, "x": 1}]},
        dict(sorted(OWN.items())),
    ],
)
def test_values_are_equal_but_for_order_numbers_and_defaults(other: dict[str, Any]) -> None:
    assert json.dumps(canonical(other, SCHEMA)) == json.dumps(canonical(OWN, SCHEMA))


@pytest.mark.parametrize(
    "other",
    [
        {**OWN, "all": True},
        {**OWN, "all": 0},
        {**OWN, "count": "3"},
        {**OWN, "count": 3.5},
        {**OWN, "lines": {"from": 2, "to": 9}},
        {**OWN, "parts": [{"x": True}]},
        {**OWN, "parts": [{"x": 1}, {"x": 1}]},
        {**OWN, "more": None},
        {**OWN, "path": "a.py "},
    ],
)
def test_any_other_value_is_another_call(other: dict[str, Any]) -> None:
    assert json.dumps(canonical(other, SCHEMA)) != json.dumps(canonical(OWN, SCHEMA))


def test_a_schema_that_names_itself_as_default_ends() -> None:
    schema = {"properties": {"a": {"$ref": "#", "default": {"a": {}}}}}
    assert canonical({"a": {"a": {}}}, schema) == {}


# -- over HTTP


def of_chat(messages: list[Any]) -> dict[str, Any]:
    function = {"name": "edit", "parameters": SCHEMA}
    return {"messages": messages, "tools": [{"type": "function", "function": function}]}


def of_messages(messages: list[Any]) -> dict[str, Any]:
    return {"messages": messages, "max_tokens": 4, "tools": [{"name": "edit", "input_schema": SCHEMA}]}


def of_responses(items: list[Any]) -> dict[str, Any]:
    return {"input": items, "tools": [{"type": "function", "name": "edit", "parameters": SCHEMA}]}


def chat_back(answer: Any, arguments: dict[str, Any]) -> list[Any]:
    message = answer["choices"][0]["message"]
    call = message["tool_calls"][0]
    call["function"]["arguments"] = json.dumps(arguments)
    return [message, {"role": "tool", "tool_call_id": call["id"], "content": "ok"}]


def messages_back(answer: Any, arguments: dict[str, Any]) -> list[Any]:
    (call,) = answer["content"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "ok"}
    return [{"role": "assistant", "content": [{**call, "input": arguments}]}, {"role": "user", "content": [result]}]


def responses_back(answer: Any, arguments: dict[str, Any]) -> list[Any]:
    (call,) = answer["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}
    return [{**call, "arguments": json.dumps(arguments)}, result]


def ollama_back(answer: Any, arguments: dict[str, Any]) -> list[Any]:
    call = {"function": {"name": "edit", "arguments": arguments}}
    return [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "ok"}]


Back = Callable[[Any, dict[str, Any]], list[Any]]
DIALECTS: dict[str, tuple[Callable[[list[Any]], dict[str, Any]], Back]] = {
    "/v1/chat/completions": (of_chat, chat_back),
    "/v1/messages": (of_messages, messages_back),
    "/v1/responses": (of_responses, responses_back),
    "/api/chat": (lambda messages: {**of_chat(messages), "model": "tiny", "stream": False}, ollama_back),
}


class Served:
    """A server whose model calls the tool as in `OWN`, with an id of its own."""

    def __init__(self, path: str = "/v1/chat/completions", **settings: Any) -> None:
        call = {"name": "edit", "arguments": OWN}
        self.engine = FakeEngine(Script(tuple(f"<tool_call>\n{json.dumps(call)}\n</tool_call>")))
        self.model = fake_model()
        self.client = TestClient(create_app(self.engine, self.model, ServerConfig(**settings)))
        self.path, (self.body, self.back) = path, DIALECTS[path]

    def ask(self, messages: list[Any], key: str = "ours", **fields: Any) -> Any:
        headers = {"Authorization": f"Bearer {key}", "x-session-id": "s"}
        answer = self.client.post(self.path, json={**self.body(messages), **fields}, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def shown(self, messages: list[Any], key: str = "ours") -> list[str]:
        """The arguments of the calls in a prompt."""
        self.engine.script = Script()
        self.model.renderer.calls.clear()  # type: ignore[attr-defined]
        self.ask(messages, key)
        prompt = self.model.renderer.calls[0]["messages"]  # type: ignore[attr-defined]
        calls = [call for message in prompt for call in message.get("tool_calls") or ()]
        return [json.dumps(call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize("path", DIALECTS)
def test_a_call_that_comes_back_changed_is_shown_as_the_model_wrote_it(path: str) -> None:
    served = Served(path)
    answer = served.ask([ASKED])
    changed, other = served.back(deepcopy(answer), BACK), served.back(answer, {**BACK, "all": True})
    assert served.shown([ASKED, *changed]) == [json.dumps(OWN)]
    assert served.shown([ASKED, *other]) == [json.dumps({**BACK, "all": True})]
    assert served.shown([ASKED, *changed], key="theirs") == [json.dumps(BACK)]


def test_a_call_with_another_id_stays_as_sent() -> None:
    served = Served()
    message, _ = served.back(served.ask([ASKED]), BACK)
    message["tool_calls"][0]["id"] = "call_of_another_server"
    assert served.shown([ASKED, message]) == [json.dumps(BACK)]


def test_without_hygiene_calls_stay_as_sent() -> None:
    served = Served(prompt_hygiene=False)
    assert served.shown([ASKED, *served.back(served.ask([ASKED]), BACK)]) == [json.dumps(BACK)]


def outlined(render: Callable[..., RenderedPrompt], messages: Any, *given: Any, **options: Any) -> RenderedPrompt:
    """The prompt, in which each message is 30 tokens long."""
    starts = tuple(range(0, 30 * len(messages), 30))
    tokens = np.resize(np.arange(997, dtype=np.int32), 30 * len(messages))
    outline = Outline(starts, tuple(message["role"] for message in messages))
    return replace(render(messages, *given, **options), tokens=tokens, outline=outline)


def test_what_was_healed_is_told_once() -> None:
    served = Served()
    served.model.renderer.render = partial(outlined, served.model.renderer.render)  # type: ignore[method-assign]
    history = [ASKED, *served.back(served.ask([ASKED]), BACK)]
    served.engine.script = lambda request: Script(hit_tokens=len(request.tokens) - 4)
    first = served.ask(history)["cache"]
    again = served.ask([*history, {"role": "assistant", "content": "Done."}, ASKED])["cache"]
    assert first["healed"]["kinds"] == again["healed"]["kinds"] == ["calls"]
    assert first["healed"]["saved_tokens"] > 0 == again["healed"]["saved_tokens"]
    headers = {"Authorization": "Bearer ours"}
    session = served.client.get("/v1/sessions/s", headers=headers).json()
    saved = first["healed"]["saved_tokens"]
    assert session["healed_tokens"] == session["turns"][1]["healed"]["saved_tokens"] == saved
    metrics = served.client.get("/metrics").text
    assert f"}} {saved}.0" in metrics.partition("mlx_serve_healed_tokens_total{")[2]


# -- the file


def disk(folder: Path) -> dict[str, Any]:
    return {"cache_disk_bytes": 1 << 20, "cache_dir": str(folder)}


def test_another_process_shows_them_too_unless_the_state_was_not_to_be_written(tmp_path: Path) -> None:
    cases: tuple[tuple[dict[str, Any], Any], ...] = ({"store": False}, BACK), ({}, OWN)
    for fields, expected in cases:
        first = Served(**disk(tmp_path))
        history = [ASKED, *first.back(first.ask([ASKED], **fields), BACK)]
        assert first.shown(history) == [json.dumps(OWN)]
        assert Served(**disk(tmp_path)).shown(history) == [json.dumps(expected)]
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("is_deletion", [True, False])
def test_they_go_with_their_session_and_with_the_cache(tmp_path: Path, is_deletion: bool) -> None:
    first = Served(**disk(tmp_path))
    history = [ASKED, *first.back(first.ask([ASKED]), BACK)]
    headers = {"Authorization": "Bearer ours"}
    if is_deletion:
        assert first.client.delete("/v1/sessions/s", headers=headers).status_code == 200
        assert first.shown(history) == [json.dumps(BACK)]
    else:
        own = OwnCalls(tmp_path / FILE_NAME)
        own.forget(next(iter(own._calls.values())).namespace)
    assert (tmp_path / FILE_NAME).read_bytes() == b""
    assert Served(**disk(tmp_path)).shown(history) == [json.dumps(BACK)]


def replied(call_id: str | None, arguments: dict[str, Any]) -> list[Any]:
    return [{"role": "assistant", "tool_calls": [{"id": call_id, "function": {"name": "f", "arguments": arguments}}]}]


def test_both_memory_and_file_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_calls, "MAX_BYTES", 10 * CALL_BYTES)
    calls = OwnCalls(tmp_path / FILE_NAME)
    for number in range(100):
        calls.write(calls.remember("", None, replied(str(number), {"b": 1, "a": number}), None, is_kept=True))
    for known in (calls, OwnCalls(tmp_path / FILE_NAME)):
        assert known.num_bytes <= own_calls.MAX_BYTES
        assert len(known.healed("", replied("99", {"a": 99, "b": 1}), None)[1]) == 1
        assert not known.healed("", replied("0", {"a": 0, "b": 1}), None)[1]
    assert len((tmp_path / FILE_NAME).read_text().splitlines()) <= 21


def test_lines_that_are_no_calls_are_skipped_and_a_file_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    calls = OwnCalls(path)
    calls.write(calls.remember("", "s", replied("1", {"b": 1, "a": 2}), None, is_kept=True))
    path.write_bytes(path.read_bytes() + b'["cut off\n{}\n[1]\n\xff')
    assert len(OwnCalls(path).healed("", replied("1", {"a": 2, "b": 1}), None)[1]) == 1
    folder = tmp_path / "file" / FILE_NAME
    folder.parent.touch()
    blocked = OwnCalls(folder)
    blocked.write(blocked.remember("", "s", replied("1", {"b": 1, "a": 2}), None, is_kept=True))
    assert len(blocked.healed("", replied("1", {"a": 2, "b": 1}), None)[1]) == 1


def test_equal_calls_that_the_model_wrote_in_two_ways_stay_as_sent_without_ids() -> None:
    calls = OwnCalls()
    for arguments in ({"b": 1, "a": 2}, {"a": 2, "b": 1}):
        calls.remember("", None, replied(None, arguments), None, is_kept=False)
    assert not calls.healed("", replied(None, {"b": 1, "a": 2.0}), None)[1]
