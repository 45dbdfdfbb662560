"""Another dialect is a folder of its own: two tiny ones run through the same endpoint code as OpenAI's.

One sends named events, takes its key from `x-api-key`, and shapes its errors otherwise; the other streams lines of
JSON. Neither knows `[DONE]`.
"""

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.testclient import TestClient

from models.output.pieces import (
    Piece,
    Reasoning,
    Text,
    ToolArguments,
    ToolCallCut,
    ToolCallEnded,
    ToolCallStarted,
)
from models.prompt.shapes import Message
from server.api.answer import Answer, Exchange
from server.api.app import APIS
from server.api.call import generate
from server.api.conversation import Conversation
from server.api.dialect import ApiContext, Dialect, Endpoint
from server.api.errors import ApiError, Code
from server.api.params import GenerationParams, Incoming, Limit, question_of
from server.api.wire import JsonBody, Payload, json_text, sse_comment, sse_event
from server.app.config import ServerConfig
from server.engine.commands import pin_turn
from server.engine.request import Finished, OutOfMemory, Progress, Started
from tests.server.api.test_live import until
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, FakeRenderer, Script, fake_model

JSON = {"Content-Type": "application/json"}

TOOLS = [{"name": "f"}]
CALLING = Script(texts=("Let me ", "look.\n<tool_call>", '{"name": "f", "arguments": {"a": 1}}', "</tool_call>"))


class EventDialect(Dialect):
    """Named events."""

    own_header: str | None = "x-events"

    def answer_headers(self, request_id: str) -> Mapping[str, str]:
        return {"x-event-id": request_id}

    def api_key(self, headers: Mapping[str, str]) -> str:
        return headers.get("x-api-key", "")

    def wrong_key(self) -> ApiError:
        return ApiError(Code.INVALID_API_KEY, "send the key as x-api-key")

    def error_response(self, error: ApiError) -> Response:
        return JsonBody(error_payload(error), status_code=error.status)

    def error_frame(self, error: ApiError) -> bytes:
        return sse_event(error_payload(error), "error")

    def heartbeat(self, progress: str, *, has_begun: bool = True) -> bytes:
        return sse_event({"waiting": progress}, "ping") if has_begun else sse_comment(progress)


class LineDialect(EventDialect):
    """One JSON object a line, and nothing that could be a heartbeat."""

    stream_media_type = "application/x-ndjson"
    own_header = None

    def error_frame(self, error: ApiError) -> bytes:
        return line(error_payload(error))

    def heartbeat(self, progress: str, *, has_begun: bool = True) -> bytes:
        return b""


def error_payload(error: ApiError) -> dict[str, Any]:
    return {"wrong": {"kind": error.code.value, "text": error.message}}


def line(payload: Mapping[str, Any]) -> bytes:
    return json_text(payload).encode() + b"\n"


class EventExchange(Exchange):
    """Writes each piece as an event of its own."""

    async def frames(self, answer: Answer) -> AsyncIterator[bytes]:
        async for event in answer.events():
            if not isinstance(event, Started | Progress):
                name, payload = written(event)
                yield sse_event(payload, name)

    async def body(self, answer: Answer) -> Payload:
        return {
            "events": [written(event) async for event in answer.events() if not isinstance(event, Started | Progress)]
        }

    def reply_messages(self) -> list[Message]:
        return [{"role": "assistant", "content": [{"text": "called f, as it is sent back"}]}]


class LineExchange(EventExchange):
    async def frames(self, answer: Answer) -> AsyncIterator[bytes]:
        async for event in answer.events():
            if not isinstance(event, Started | Progress):
                name, payload = written(event)
                yield line({name: payload})


def written(event: Piece | Finished) -> tuple[str, Any]:
    match event:
        case Text(text):
            return "text", text
        case Reasoning(text):
            return "thought", text
        case ToolCallStarted(_, name):
            return "call", name
        case ToolArguments(text):
            return "arguments", text
        case ToolCallEnded() | ToolCallCut():
            return "called", None
        case Finished():
            return "end", {"reason": event.reason.value, "tokens": event.prompt_tokens}


def opened(kind: type[Exchange], context: ApiContext, incoming: Incoming) -> Exchange:
    if "ask" not in incoming.fields:
        raise ApiError(Code.MISSING_PARAMETER, "ask: say something", "ask")
    model = context.pool.find(None)
    namespace = incoming.namespace()
    messages: list[Message] = [{"role": "user", "content": [{"text": incoming.fields["ask"]}]}]
    conversation = Conversation(model.renderer, messages, TOOLS, {}, namespace)
    prompt = conversation.render()
    params = GenerationParams(limit=Limit(incoming.fields.get("limit"), "limit"), prompt_param="ask")
    question = question_of(incoming, model, prompt, params, namespace)
    return kind(replace(question, conversation=conversation))


@generate("ask-")
def ask(context: ApiContext, incoming: Incoming) -> Exchange:
    return opened(EventExchange, context, incoming)


@generate("ask-")
def ask_in_lines(context: ApiContext, incoming: Incoming) -> Exchange:
    return opened(LineExchange, context, incoming)


async def list_models(request: Request) -> Response:
    return JsonBody(["tiny"])


SHARED = Endpoint("/v1/models", list_models).only_with("x-events")
EVENTS = EventDialect([Endpoint("/ask", ask, methods=["POST"]), SHARED])
LINES = LineDialect([Endpoint("/lines", ask_in_lines, methods=["POST"])])


def client_of(engine: FakeEngine, renderer: FakeRenderer | None = None, **settings: Any) -> TestClient:
    model = fake_model(renderer=renderer or FakeRenderer())
    return TestClient(create_app(engine, model, ServerConfig(**settings), (*APIS, EVENTS, LINES)))


def test_a_whole_answer_is_made_of_pieces() -> None:
    engine = FakeEngine(CALLING)
    answer = client_of(engine).post("/ask", json={"ask": "Hi", "limit": 9}, headers={"x-session-id": "t-1"})
    assert answer.json()["events"] == [
        ["text", "Let me"],
        ["text", " look."],
        ["call", "f"],
        ["arguments", '{"a": 1'],
        ["arguments", "}"],
        ["called", None],
        ["end", {"reason": "stop", "tokens": len("<user>Hi")}],
    ]
    [request] = engine.requests
    assert (request.max_tokens, request.session_id) == (9, "t-1")
    assert request.request_id.startswith("ask-")


def test_a_stream_consists_of_named_events_and_ends_without_done() -> None:
    answer = client_of(FakeEngine(CALLING)).post("/ask", json={"ask": "Hi", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [event.split("\n") for event in answer.text.strip().split("\n\n")]
    names = [name.removeprefix("event: ") for name, _ in events]
    assert names == ["text", "text", "call", "arguments", "arguments", "called", "end"]
    assert [json.loads(data.removeprefix("data: ")) for _, data in events][3:5] == ['{"a": 1', "}"]


def test_a_stream_of_lines_holds_nothing_but_lines() -> None:
    engine = FakeEngine(Script(("Hello",), prefill_seconds=0.1))
    answer = client_of(engine, heartbeat_seconds=0.01).post("/lines", json={"ask": "Hi", "stream": True})
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert [next(iter(json.loads(text))) for text in answer.text.splitlines()] == ["text", "end"]


def test_a_silent_stream_is_kept_open_in_the_dialects_own_way() -> None:
    engine = FakeEngine(Script(("Hello",), prefill_seconds=0.1))
    answer = client_of(engine, heartbeat_seconds=0.01).post("/ask", json={"ask": "Hi", "stream": True})
    assert 'event: ping\ndata: {"waiting":"prefill 0 of' in answer.text
    assert not any(text.startswith(":") for text in answer.text.splitlines())


def test_a_stream_that_has_not_begun_is_kept_open_in_another_way() -> None:
    engine = FakeEngine(Script(("Hello",), queue_seconds=0.1))
    answer = client_of(engine, heartbeat_seconds=0.01).post("/ask", json={"ask": "Hi", "stream": True})
    waiting, _, begun = answer.text.partition("event: text")
    assert ": waiting" in waiting and "event: ping" not in waiting
    assert not any(text.startswith(":") for text in begun.splitlines())


@pytest.mark.parametrize(("path", "expected"), [("/ask", "event: error\ndata: "), ("/lines", "")])
def test_an_error_after_the_start_of_a_stream_ends_it_in_its_own_shape(path: str, expected: str) -> None:
    engine = FakeEngine(Script(("Hello",), error=OutOfMemory("too long")))
    answer = client_of(engine).post(path, json={"ask": "Hi", "stream": True})
    assert answer.text.rstrip().endswith(expected + '{"wrong":{"kind":"out_of_memory","text":"too long"}}')


@pytest.mark.parametrize(
    ("method", "content", "code"),
    [
        ("POST", "{", "invalid_json"),
        ("POST", "{}", "missing_required_parameter"),
        ("POST", '{"ask": ""}', None),
        ("POST", '{"ask": "' + "x" * 300 + '"}', "context_length_exceeded"),
        ("GET", "", "method_not_allowed"),
    ],
)
def test_errors_have_the_shape_of_the_path_that_was_asked(method: str, content: str, code: str | None) -> None:
    answer = client_of(FakeEngine()).request(method, "/ask", content=content, headers=JSON)
    assert answer.json().get("wrong", {}).get("kind") == code
    assert answer.headers["x-request-id"].startswith("req_")
    assert answer.is_error == (code is not None)


def test_what_is_no_dialects_path_is_answered_like_before() -> None:
    assert client_of(FakeEngine()).get("/nowhere").json()["error"]["code"] == "unknown_path"


def test_a_path_of_two_dialects_is_that_ones_whose_header_is_sent() -> None:
    client = client_of(FakeEngine())
    own = client.get("/v1/models", headers={"x-events": "1"})
    assert own.json() == ["tiny"]
    assert own.headers["x-event-id"] == own.headers["x-request-id"]
    other = client.get("/v1/models")
    assert other.json()["object"] == "list"
    assert "x-event-id" not in other.headers


def test_an_unknown_path_is_answered_in_the_dialect_of_the_header() -> None:
    client = client_of(FakeEngine())
    assert client.get("/nowhere", headers={"x-events": "1"}).json()["wrong"]["kind"] == "unknown_path"
    wrong_method = client.put("/v1/models", headers={"x-events": "1"})
    assert wrong_method.json()["wrong"]["kind"] == "method_not_allowed"


def test_each_dialect_has_its_key_where_its_clients_put_it() -> None:
    engine = FakeEngine()
    client = client_of(engine, api_key="secret")
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    own, bearer = {"x-api-key": "secret"}, {"authorization": "Bearer secret"}
    refused = client.post("/ask", json={"ask": "Hi"}, headers=bearer)
    assert (refused.status_code, refused.json()["wrong"]["text"]) == (401, "send the key as x-api-key")
    assert "www-authenticate" not in refused.headers
    assert client.post("/v1/chat/completions", json=chat, headers=own).json()["error"]["code"] == "invalid_api_key"
    assert client.post("/ask", json={"ask": "Hi"}, headers=own).status_code == 200
    assert client.post("/v1/chat/completions", json=chat, headers=bearer).status_code == 200
    first, second = engine.requests
    assert first.namespace == second.namespace != ""


def test_what_follows_an_answer_is_done_for_every_dialect() -> None:
    renderer, engine = FakeRenderer(), FakeEngine(CALLING)
    with client_of(engine, renderer) as client:
        client.post("/ask", json={"ask": "Hi"}, headers={"x-session-id": "t-1"})
        assert [reply for reply, _ in renderer.replies] == ["".join(CALLING.texts)]
        [(command, *_)] = engine.commands
        assert command is pin_turn
        assert client.get("/v1/sessions").json()["data"][0]["id"] == "t-1"
        until(lambda: bool(engine.idle_requests))
    [ahead] = engine.idle_requests
    assert "".join(map(chr, ahead.tokens)).startswith("<user>Hi<assistant>called f, as it is sent back<user>")
