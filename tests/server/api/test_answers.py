"""What a served request looks like, and what of it reaches the model and the engine."""

import json
import logging
from typing import Any

import pytest
from starlette.testclient import TestClient

from cache.snapshots import RestorePointKind
from models.output.call_formats import HERMES
from server.app.config import ServerConfig
from server.app.log_events import PrefillProgress, RequestEnded, RequestRefused
from server.diagnosis.causes import Miss, MissReason
from server.engine.request import FinishReason, Priority, PromptTooLarge
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, FakeRenderer, Script, fake_model

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("get_weather", "f", "g")]
CALL_TEXTS = ("Let me look.\n<tool", '_call>{"name": "get_weather", "arguments": {"city":', ' "Paris"}}</tool_call>')


def ask(client: TestClient, path: str = CHAT, *, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    prompt: dict[str, Any] = {"prompt": "Hi"} if path == TEXT else {"messages": HI}
    answer = client.post(path, json=prompt | fields, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json() if not fields.get("stream") else chunks_of(answer.text)


def chunks_of(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_rates_of_nothing_are_null(client: TestClient, engine: FakeEngine) -> None:
    engine.script = Script(texts=(), hit_tokens=8)
    timings = ask(client)["timings"]
    assert timings["predicted_per_token_ms"] is None
    assert timings["prompt_per_token_ms"] is None


def test_no_text_at_all_is_empty_content(client: TestClient, engine: FakeEngine) -> None:
    engine.script = Script(texts=())
    assert ask(client)["choices"][0]["message"]["content"] == ""


def test_streamed_calls_are_numbered_and_complete(client: TestClient, engine: FakeEngine) -> None:
    engine.script = Script(texts=('<tool_call>{"name": "f"}</tool_call>\n<tool_', 'call>{"name": "g"}</tool_call>'))
    chunks = ask(client, tools=TOOLS, stream=True)
    calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert [(call["index"], call.get("id") is None, call["function"]) for call in calls] == [
        (0, False, {"name": "f", "arguments": ""}),
        (0, True, {"arguments": "{}"}),
        (1, False, {"name": "g", "arguments": ""}),
        (1, True, {"arguments": "{}"}),
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert all(not chunk["choices"][0]["delta"].get("content") for chunk in chunks)


LATE_FAULT = (
    '<tool_call>{"name": "f", "arguments": {"a": 1',
    ", oops}}</tool_call>",
    '<tool_call>{"name": "g"}</tool_call>',
)


def test_a_call_that_fails_late_stays_in_part_and_the_answer_ends_as_if_cut_off(
    client: TestClient, engine: FakeEngine
) -> None:
    engine.script = Script(texts=LATE_FAULT)
    chunks = ask(client, tools=TOOLS, stream=True)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [(call["index"], call["function"]["arguments"]) for call in calls] == [
        (0, ""),
        (0, '{"a": 1'),
        (1, ""),
        (1, "{}"),
    ]
    choice = ask(client, tools=TOOLS)["choices"][0]
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == ['{"a": 1', "{}"]
    said = "".join(delta.get("content", "") for delta in deltas)
    assert said == choice["message"]["content"] == ", oops}}</tool_call>"
    assert choice["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_a_malformed_call_stays_text(client: TestClient, engine: FakeEngine) -> None:
    engine.script = Script(texts=("<tool_call>{oops</tool_call>",))
    choice = ask(client, tools=TOOLS)["choices"][0]
    assert choice["message"]["content"] == "<tool_call>{oops</tool_call>"
    assert choice["finish_reason"] == "stop"


def test_a_call_cut_off_by_the_limit_keeps_its_reason(client: TestClient, engine: FakeEngine) -> None:
    engine.script = Script(texts=CALL_TEXTS[:2], reason=FinishReason.LENGTH)
    choice = ask(client, tools=TOOLS)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == "".join(CALL_TEXTS[:2])


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}])
def test_tools_that_are_not_offered_are_neither_shown_nor_called(
    client: TestClient, engine: FakeEngine, renderer: FakeRenderer, fields: dict[str, Any]
) -> None:
    engine.script = Script(texts=CALL_TEXTS)
    choice = ask(client, **fields)["choices"][0]
    assert choice["message"]["content"] == "".join(CALL_TEXTS)
    assert choice["finish_reason"] == "stop"
    assert renderer.calls[0]["tools"] is None


def test_a_model_without_a_parser_answers_calls_as_text(engine: FakeEngine) -> None:
    engine.script = Script(texts=CALL_TEXTS)
    client = TestClient(create_app(engine, fake_model(call_format=None), ServerConfig()))
    assert ask(client, tools=TOOLS)["choices"][0]["message"]["content"] == "".join(CALL_TEXTS)


@pytest.mark.parametrize(
    ("changes", "says"),
    [({}, "parsed"), ({"call_format": None}, "text"), ({"renderer": FakeRenderer(reads_tools=False)}, "none")],
)
def test_the_model_says_what_becomes_of_its_calls(engine: FakeEngine, changes: dict[str, Any], says: str) -> None:
    client = TestClient(create_app(engine, fake_model(**changes), ServerConfig()))
    assert client.get("/v1/models/tiny").json()["tool_calls"] == says


def test_tools_reach_the_template_as_they_were_written(client: TestClient, renderer: FakeRenderer) -> None:
    tool = {"type": "function", "x-note": 1, "function": {"strict": True, "name": "f", "parameters": {}}}
    ask(client, tools=[tool])
    assert json.dumps(renderer.calls[0]["tools"]) == json.dumps([tool])


def test_messages_reach_the_template_in_its_own_terms(client: TestClient, renderer: FakeRenderer) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    odd = {"id": "d", "type": "function", "function": {"name": "f", "arguments": "{oops"}}
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be terse."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ada"},
        {"role": "assistant", "content": None, "tool_calls": [call, odd], "refusal": None, "audio": None},
        {"role": "tool", "content": "5", "tool_call_id": "c"},
        {"role": "assistant", "content": None, "refusal": "no"},
    ]
    ask(client, messages=messages)
    sent = renderer.calls[0]["messages"]
    assert [message["role"] for message in sent] == ["system", "user", "assistant", "tool", "assistant"]
    assert sent[1]["name"] == "Ada"
    assert [part["text"] for part in sent[1]["content"]] == ["a", "b"]
    assert [entry["function"]["arguments"] for entry in sent[2]["tool_calls"]] == [{"a": 1}, "{oops"]
    assert sent[3]["tool_call_id"] == "c"
    assert sent[4]["content"][0]["text"] == "no"


def test_the_prompts_restore_points_reach_the_engine(client: TestClient, engine: FakeEngine) -> None:
    ask(client)
    ask(client, TEXT, prompt=[5, 6, 7])
    assert [p.kind for p in engine.requests[0].restore_points] == [RestorePointKind.PROMPT_END]
    assert [p.offset for p in engine.requests[1].restore_points] == [3]
    assert engine.requests[1].tokens.tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    ("fields", "priority"),
    [
        ({}, Priority.INTERACTIVE),
        ({"service_tier": "auto"}, Priority.INTERACTIVE),
        ({"service_tier": "flex"}, Priority.BACKGROUND),
        ({"priority": "background"}, Priority.BACKGROUND),
        ({"priority": "interactive", "service_tier": "flex"}, Priority.INTERACTIVE),
    ],
)
def test_background_work_is_asked_for_in_two_ways(
    client: TestClient, engine: FakeEngine, fields: Any, priority: Priority
) -> None:
    ask(client, **fields)
    assert engine.requests[0].priority is priority


def test_what_ends_an_answer_and_when_reaches_the_engine(client: TestClient, engine: FakeEngine) -> None:
    ask(client, stop_token_ids=[5, 7], include_stop_str_in_output=True, min_tokens=3)
    ask(client, stop_token_ids=[], no_stop_trim=True, min_tokens=1, min_new_tokens=4.0)
    ask(client)
    assert [request.stop_token_ids for request in engine.requests] == [{5, 7}, set(), set()]
    assert [request.keeps_stop for request in engine.requests] == [True, True, False]
    assert [request.sampling.min_tokens for request in engine.requests] == [3, 4, 0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"min_new_tokens": 5, "max_completion_tokens": 4}, "min_new_tokens"),
        ({"min_tokens": 5, "regex": "a"}, "min_tokens"),
        ({"min_new_tokens": 5, "response_format": {"type": "json_object"}}, "min_new_tokens"),
    ],
)
def test_a_least_length_that_cannot_be_is_refused(client: TestClient, fields: dict[str, Any], param: str) -> None:
    answer = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}], **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("api_key", [None, "secret"])
def test_state_is_shared_only_with_the_same_salt_and_key(engine: FakeEngine, api_key: str | None) -> None:
    client = TestClient(create_app(engine, fake_model(), ServerConfig(api_key=api_key)))
    senders = ["Bearer secret", "bearer  secret "] if api_key else ["Bearer secret", "Bearer none", "Basic none", ""]
    for sender in senders:
        for salt in (None, "a", "b", "a", ""):
            ask(client, headers={"Authorization": sender}, cache_salt=salt)
    spaces = [request.namespace for request in engine.requests]
    keys = [spaces[start : start + 5] for start in range(0, len(spaces), 5)]
    assert all(key[1] == key[3] and key[0] == key[4] and len(set(key)) == 3 for key in keys)
    # What is no bearer key is no key at all; one sender writes its key in two ways.
    assert len(set(spaces)) == (3 if api_key else 9)
    assert not any("secret" in space or "none" in space for space in spaces)


def test_the_models_own_sampling_counts_where_the_request_is_silent(engine: FakeEngine) -> None:
    model = fake_model()
    defaults = type(model.sampling)(temperature=0.6, top_k=20)
    client = TestClient(create_app(engine, fake_model(sampling=defaults), ServerConfig()))
    ask(client)
    ask(client, temperature=1)
    assert [(r.sampling.temperature, r.sampling.top_k) for r in engine.requests] == [(0.6, 20), (1.0, 20)]


def test_every_finished_request_is_one_line_in_the_log(
    client: TestClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "server")
    engine.script = Script(hit_tokens=2)
    body = ask(client, session_id="chat-7")
    chunks = ask(client, stream=True)
    named, unnamed = (record.msg for record in caplog.records)
    assert isinstance(named, RequestEnded)
    assert isinstance(unnamed, RequestEnded)
    assert named.figures() | {"first_token_ms": 0, "total_ms": 0, "tokens_per_second": 0} == {
        "event": "request", "request_id": body["id"], "session_id": "chat-7", "model": "tiny", "turn": 1,
        "prompt_tokens": 8, "cached_tokens": 2, "evaluated_tokens": 6, "predicted_tokens": 3, "first_token_ms": 0,
        "total_ms": 0, "tokens_per_second": 0, "finish": "stop", "error": None, "kept": body["cache"]["kept"],
        "tier": "memory", "miss": None, "key": None, "drafted_tokens": 0, "accepted_tokens": 0,
    }  # fmt: skip
    assert (unnamed.request_id, unnamed.turn) == (chunks[0]["id"], 1)
    assert (unnamed.session_id or "").startswith("unnamed-")


@pytest.mark.parametrize("fields", [{}, {"n": 2}])
def test_a_request_that_the_engine_refuses_is_one_line_too(
    client: TestClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture, fields: dict[str, Any]
) -> None:
    caplog.set_level(logging.INFO, "server")
    engine.script = Script((), error=PromptTooLarge("the prompt's state is larger than the cache"))
    answer = client.post(CHAT, json={"messages": [{"role": "user", "content": "Hi"}], **fields})
    assert answer.status_code == 400
    told = [record.msg for record in caplog.records if isinstance(record.msg, RequestEnded | RequestRefused)]
    assert [type(one) for one in told] == [RequestRefused]
    caplog.clear()
    client.post(CHAT, json={"messages": [{"role": "user", "content": "Hi"}], "stream": True, **fields})
    told = [record.msg for record in caplog.records if isinstance(record.msg, RequestEnded | RequestRefused)]
    assert [type(one) for one in told] == [RequestEnded], "a stream that has begun is refused by its last event"


def test_the_log_counts_turns_and_says_what_a_miss_cost_without_its_words(
    client: TestClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "server")
    miss = Miss(MissReason.SYSTEM_CHANGED, 0, "system", 2, before="secret", after="words", lost_tokens=5)
    engine.script = Script(hit_tokens=2, miss=miss)
    ask(client, session_id="chat-7")
    ask(client, session_id="chat-7")
    text = caplog.messages[1]
    assert "turn 2" in text
    assert "edited text in message 0 (system): 5 tokens evaluated again" in text
    assert "secret" not in text


def test_a_long_prefill_shows_how_far_it_is(
    client: TestClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "server")
    monkeypatch.setattr("server.api.record.LONG_PREFILL_SECONDS", 0.0)
    engine.script = Script(hit_tokens=2, progress=(4, 5, 6))
    ask(client)
    [first] = [record.msg for record in caplog.records if isinstance(record.msg, PrefillProgress)]
    assert (first.evaluated_tokens, first.prompt_tokens, first.number) == (4, 8, 0), "the others came too soon"


def test_a_finished_reply_is_told_to_the_renderer_with_its_tokens(engine: FakeEngine) -> None:
    model = fake_model()
    renderer = model.renderer
    assert isinstance(renderer, FakeRenderer)
    client = TestClient(create_app(engine, model, ServerConfig()))
    for script in (Script(), Script(reason=FinishReason.LENGTH), Script(stop_text="x")):
        engine.script = script
        client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
    assert renderer.replies == [("Hello there.", (0, 1, 2))], "only an answer that the model ended is whole"


@pytest.mark.parametrize("as_part", [True, False])
def test_a_nonce_at_the_head_reaches_the_engine_as_a_constant_unless_told_otherwise(
    engine: FakeEngine, as_part: bool
) -> None:
    def ask_with(client: TestClient, nonce: str) -> None:
        line = f"x-anthropic-billing-header: cc_version=2.1.100.7b4; cch={nonce};\nBe terse."
        content = [{"type": "text", "text": line}] if as_part else line
        ask(client, messages=[{"role": "developer", "content": content}, *HI])

    cleaned = TestClient(create_app(engine, fake_model(), ServerConfig()))
    verbatim = TestClient(create_app(engine, fake_model(), ServerConfig(prompt_hygiene=False)))
    for client in (cleaned, verbatim):
        ask_with(client, "eb6c6")
        ask_with(client, "0aaa9")
    first, second, third, fourth = (request.tokens.tolist() for request in engine.requests)
    assert first == second
    assert third != fourth


def test_one_call_at_most_is_asked_of_the_engine_where_there_are_tools(
    client: TestClient, engine: FakeEngine
) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    ask(client, tools=tools, parallel_tool_calls=False)
    ask(client, tools=tools, parallel_tool_calls=True)
    ask(client, parallel_tool_calls=False)
    assert [request.single_call for request in engine.requests] == [(HERMES, tools), None, None]
