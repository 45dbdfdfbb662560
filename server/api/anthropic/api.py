"""The Messages API.

Clients send `x-api-key`, and read named events and `request-id`. `GET /v1/models` has Anthropic's form for requests
with `anthropic-version`.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Literal, NotRequired, TypeAlias

from typing_extensions import TypedDict

from cache.snapshots import RestorePointKind
from models.errors import ModelError
from models.prompt.shapes import Message
from server.api.answer import Answer, Exchange
from server.api.anthropic import conversation
from server.api.anthropic.content import AnswerContent
from server.api.anthropic.tool_search import SEARCH_TOOLS, SearchFailed, find_tools
from server.api.bodies import parse_body
from server.api.call import generate, inspect
from server.api.dialect import ApiContext, Dialect, Endpoint, Operation, describe_models, with_and_without_v1
from server.api.errors import ApiError, Code, ContextExceeded
from server.api.params import Incoming, ask
from server.api.planning import Result
from server.api.record import CacheBody, TimingsBody, cache_of, timings_of
from server.api.sessions import header_text
from server.api.wire import Payload, sse_comment, sse_event
from server.diagnosis.causes import MissReason
from server.engine.request import Finished, FinishReason, Progress, Started
from server.pool.served import ListedModel, ServedModel


class ModelInfoBody(TypedDict):
    """One model that requests may name."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    """RFC 3339."""
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int


class ModelPage(TypedDict):
    """All models, on one page."""

    data: list[ModelInfoBody]
    has_more: bool
    first_id: str | None
    last_id: str | None


def _body(model: ListedModel) -> ModelInfoBody:
    max_tokens = max((model.context_tokens or 0) - 1, 0)
    return {
        "type": "model",
        "id": model.id,
        "display_name": model.id,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": max_tokens,
        "max_tokens": max_tokens,
    }


def _page(models: list[ModelInfoBody]) -> ModelPage:
    first, last = (models[0]["id"], models[-1]["id"]) if models else (None, None)
    return {"data": models, "has_more": False, "first_id": first, "last_id": last}


_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


_NO_THREADS: Final = "thread_unsupported_request"
"""With this code Anthropic's packages send the whole conversation."""


class MessagesErrorObject(TypedDict):
    """The inner object of an error body."""

    type: str
    message: str
    details: dict[Literal["error_code"], str]
    """Tells errors of one type apart."""


class MessagesErrorBody(TypedDict):
    """An error's body, and the data of an `error` event."""

    type: str
    error: MessagesErrorObject


def error_type(status: int) -> str:
    """Anthropic's type for a status."""
    return _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


def _message(error: ApiError) -> str:
    # Agents look for these words and numbers, and then shorten the conversation by themselves.
    if isinstance(error, ContextExceeded):
        return f"prompt is too long: {error.num_tokens} tokens > {error.max_tokens} maximum"
    return f"prompt is too long: {error.message}" if error.code is Code.CONTEXT_EXCEEDED else error.message


VERSION_HEADER: Final = "anthropic-version"


class _AnthropicDialect(Dialect):
    own_header = VERSION_HEADER
    error_type = MessagesErrorBody

    def api_key(self, headers: Mapping[str, str]) -> str:
        return header_text(headers.get("x-api-key", "")) or super().api_key(headers)

    def wrong_key(self) -> ApiError:
        return ApiError(Code.INVALID_API_KEY, "the key is missing or wrong; send it as x-api-key or as bearer token")

    def answer_headers(self, request_id: str) -> Mapping[str, str]:
        return {"request-id": request_id}

    def error_body(self, error: ApiError) -> MessagesErrorBody:
        code = _NO_THREADS if error.param == "thread" else error.code.value
        kind, message = error_type(error.status), _message(error)
        return {"type": "error", "error": {"type": kind, "message": message, "details": {"error_code": code}}}

    def error_frame(self, error: ApiError) -> bytes:
        """An `error` event; no `message_stop` follows it."""
        return sse_event(self.error_body(error), "error")

    def heartbeat(self, progress: str, *, has_begun: bool = True) -> bytes:
        """No event may come before `message_start`."""
        return sse_event({"type": "ping"}, "ping") if has_begun else sse_comment(progress)


TokenCount: TypeAlias = dict[Literal["input_tokens"], int]


@inspect
def count_tokens(context: ApiContext, incoming: Incoming) -> Payload:
    """Counts a prompt's tokens; evaluates nothing."""
    body = parse_body(conversation.PromptBody, incoming.fields, conversation.IN_PROMPT)
    model = conversation.find_model(context, body.model)
    source = conversation.read_conversation(body, model, incoming.namespace(), incoming.healed)
    return {"input_tokens": len(source.render().tokens)}


_MESSAGES_CHANGED: Final = (
    *(MissReason.MESSAGES_CHANGED, MissReason.HISTORY_TRIMMED, MissReason.REPLY_CHANGED, MissReason.THOUGHTS_REMOVED),
    *(MissReason.BRANCHED, MissReason.NOTE_MOVED, MissReason.SIDE_REQUEST),
)
_MISS_TYPES: Final[Mapping[MissReason, str]] = {
    **{one: one.value for one in (MissReason.SYSTEM_CHANGED, MissReason.TOOLS_CHANGED, MissReason.MODEL_CHANGED)},
    **dict.fromkeys(_MESSAGES_CHANGED, "messages_changed"),
}
"""Other reasons are `unavailable`."""


class MessagesUsage(TypedDict):
    """Token counts of one request. The sum of the three input counts is the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: dict[Literal["ephemeral_5m_input_tokens", "ephemeral_1h_input_tokens"], int]
    """State has no time to live: all counts as the shorter one."""
    output_tokens: int
    output_tokens_details: dict[Literal["thinking_tokens"], int] | None
    """None if thinking is not told apart."""
    server_tool_use: dict[Literal["web_search_requests", "web_fetch_requests"], int]
    service_tier: Literal["standard"]
    inference_geo: None


class CacheMissReason(TypedDict):
    """Why the last turn was not reused, in Anthropic's words."""

    type: str
    cache_missed_input_tokens: NotRequired[int]


class DiagnosticsBody(TypedDict):
    """How much was reused, why not more, and the costs."""

    cache_miss_reason: CacheMissReason | None
    cache: CacheBody | None
    timings: NotRequired[TimingsBody]
    """Only in a complete answer."""


MAX_PARTS = 8
"""After so many parts the client must continue the answer."""


class MessageAnswer(TypedDict):
    """The body of an answer, and in a stream how it begins."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[conversation.AnswerBlock]
    stop_reason: str | None
    stop_sequence: str | None
    stop_details: None
    container: None
    usage: MessagesUsage
    diagnostics: DiagnosticsBody
    context_management: NotRequired[dict[Literal["applied_edits"], list[Any]]]
    """No edits are made."""


@generate("msg_")
def create_message(context: ApiContext, incoming: Incoming) -> Exchange:
    """Answers the last message of a conversation."""
    body = parse_body(conversation.MessagesBody, incoming.fields, conversation.IN_MESSAGES)
    return _MessageExchange(context, incoming, body, conversation.find_model(context, body.model))


class _MessageExchange(Exchange):
    """Writes one message. After tool searches another exchange goes on."""

    def __init__(
        self, context: ApiContext, incoming: Incoming, body: conversation.MessagesBody, model: ServedModel
    ) -> None:
        namespace = incoming.namespace(body.cache_salt)
        source = conversation.read_conversation(body, model, namespace, incoming.healed)
        super().__init__(ask(incoming, model, source, conversation.read_params(body, model)))
        self._context, self._incoming, self._body = context, incoming, body
        self.tells_progress = body.stream is True
        searches = {tool.name for tool in body.tools or () if tool.type in SEARCH_TOOLS}
        shows = body.thinking is None or body.thinking.display != "omitted"
        self._content = AnswerContent(shows_thinking=shows, searches=searches)
        self._message: Payload = {}
        edits = {"context_management": {"applied_edits": list[Any]()}}
        self._edits: Payload = {} if body.context_management is None else edits
        self._finished: list[Finished] = []
        self._is_cut = False

    async def frames(self, answer: Answer) -> AsyncIterator[bytes]:
        async for event in self._events(answer):
            yield sse_event(event, event["type"])

    async def body(self, answer: Answer) -> Payload:
        async for _ in self._events(answer):
            pass
        return {**self._message, "content": self._content.so_far}

    def reply_messages(self) -> list[Message]:
        reply = conversation.InputMessage.model_validate({"role": "assistant", "content": self._content.so_far})
        if any(block.type == "tool_search_tool_result" for block in reply.content):
            # Only reading the next request tells how definitions are worded.
            return []
        return [conversation.assistant_message(reply.content)]

    async def _events(self, answer: Answer) -> AsyncIterator[Payload]:
        part = self
        async for event in answer.events():
            match event:
                case Started():
                    if part is self:
                        self._message = self._begun(event)
                        yield {"type": "message_start", "message": self._message}
                        yield {"type": "ping"}
                case Progress(evaluated, total):
                    if evaluated < total:
                        yield {"type": "ping"}
                case Finished():
                    self._finished.append(event)
                    self._is_cut = part.parser.is_cut
                    called = [block for block in part._content.so_far if block["type"] == "server_tool_use"]
                    results = [await self._on_thread(partial(self._run, search)) for search in called]
                    for body in self._content.add_results(results):
                        yield body
                    following = await self._next_part(part)
                    if following is not None and answer.go_on(following):
                        part = following
                        continue
                    for body in self._ended(event):
                        yield body
                case _:
                    if part is not self:
                        part._content.add(event)
                    for body in self._content.add(event):
                        yield body

    def _ended(self, last: Finished) -> Sequence[dict[str, Any]]:
        first = self._finished[0].started
        assert first is not None, "a request starts before it finishes"
        stop = {"stop_reason": self._stop_reason(last), "stop_sequence": last.stop_text}
        costs = self._costs(first, last)
        self._message = {**self._message, **stop, **costs}
        return {"type": "message_delta", "delta": stop, **costs, **self._edits}, {"type": "message_stop"}

    async def _next_part(self, part: "_MessageExchange") -> "_MessageExchange | None":
        finished, kinds = self._finished[-1], {block["type"] for block in part._content.so_far}
        is_over = finished.reason is not FinishReason.STOP or finished.stop_text is not None or self._num_left < 1
        is_for_client = "server_tool_use" not in kinds or "tool_use" in kinds
        if is_over or is_for_client or len(self._finished) >= MAX_PARTS:
            return None
        try:
            return await self._on_thread(self._open_next)
        except (ApiError, ModelError):  # no space is left: the client may continue the answer
            return None

    async def _on_thread(self, work: Callable[[], Result]) -> Result:
        return await self._context.in_turn(self._context.searching, self._incoming.http, work)

    @property
    def _num_left(self) -> int:
        return self._body.max_tokens - sum(part.timings.predicted_tokens for part in self._finished)

    def _run(self, search: dict[str, Any]) -> dict[str, Any]:
        deferred = [conversation.as_function(tool) for tool in self._body.tools or () if tool.defer_loading]
        content: dict[str, Any]
        try:
            names = find_tools(search["name"], search["input"], deferred)
            references = [{"type": "tool_reference", "tool_name": name} for name in names]
            content = {"type": "tool_search_tool_search_result", "tool_references": references}
        except SearchFailed as error:
            content = {"type": "tool_search_tool_result_error", "error_code": str(error)}
        return {"type": "tool_search_tool_result", "tool_use_id": search["id"], "content": content}

    def _open_next(self) -> "_MessageExchange":
        messages, said = self._body.messages, self._content.so_far
        if self.conversation is not None and self.conversation.continues:
            messages, said = messages[:-1], [*messages[-1].model_dump()["content"], *said]
        reply = conversation.InputMessage.model_validate({"role": "assistant", "content": said})
        longer: dict[str, Any] = {"messages": [*messages, reply], "max_tokens": self._num_left}
        choice = self._body.tool_choice
        if choice is not None and choice.is_forced:
            longer["tool_choice"] = choice.model_copy(update={"type": "auto"})
        part = replace(self._incoming, request_id=f"{self._incoming.request_id}-{len(self._finished) + 1}")
        # The model is held, but may take no other requests any more, so it is not looked up again.
        return _MessageExchange(self._context, part, self._body.model_copy(update=longer), self.model)

    def _begun(self, started: Started) -> Payload:
        return {
            "id": self.request.request_id,
            "type": "message",
            "role": "assistant",
            "model": self.model.id,
            "content": [],
            "stop_reason": None,
            **dict.fromkeys(("stop_sequence", "stop_details", "container")),
            **self._costs(started),
            **self._edits,
        }

    def _costs(self, started: Started, last: Finished | None = None) -> Payload:
        miss, cache = started.reuse.miss, cache_of(started, self.request.session_id)
        diagnostics: DiagnosticsBody = {"cache_miss_reason": None, "cache": cache}
        if miss is not None and (kind := _MISS_TYPES.get(miss.reason)) is not None:
            diagnostics["cache_miss_reason"] = {"type": kind, "cache_missed_input_tokens": miss.lost_tokens}
        elif miss is not None:
            diagnostics["cache_miss_reason"] = {"type": "unavailable"}
        if last is not None:
            diagnostics["timings"] = timings_of(last.timings)
        return {"usage": self._usage(started), "diagnostics": diagnostics}

    def _usage(self, started: Started) -> MessagesUsage:
        """The counts of the first part's prompt, and of all output."""
        num_prompt, num_read = started.prompt_tokens, started.hit_tokens
        explicit = (point.offset for point in self.request.restore_points if point.kind is RestorePointKind.EXPLICIT)
        # Blocks up to the last marked one are written to the cache; Anthropic counts the rest as plain input.
        marked = max(explicit, default=0) if self._body.cache_control is None else num_prompt
        num_created = max(0, min(marked, num_prompt) - num_read)
        counts = [part.reasoning_tokens for part in self._finished if part.reasoning_tokens is not None]
        return {
            "input_tokens": num_prompt - num_read - num_created,
            "cache_creation_input_tokens": num_created,
            "cache_read_input_tokens": num_read,
            "cache_creation": {"ephemeral_5m_input_tokens": num_created, "ephemeral_1h_input_tokens": 0},
            "output_tokens": sum(part.timings.predicted_tokens for part in self._finished),
            "output_tokens_details": {"thinking_tokens": sum(counts)} if counts else None,
            "server_tool_use": {"web_search_requests": 0, "web_fetch_requests": 0},
            "service_tier": "standard",
            "inference_geo": None,
        }

    def _stop_reason(self, finished: Finished) -> str:
        if finished.reason is FinishReason.LENGTH:
            is_full = self._num_left > 0 and not finished.is_loop and not self._is_cut
            return "model_context_window_exceeded" if is_full else "max_tokens"
        if finished.stop_text is not None:
            return "stop_sequence"
        kinds = [block["type"] for block in self._content.so_far]
        if "tool_use" in kinds:
            return "tool_use"
        is_paused = finished.reason is FinishReason.STOP and kinds and kinds[-1] == "tool_search_tool_result"
        return "pause_turn" if is_paused else "end_turn"


_MODELS = describe_models(_body, _page)
_ROUTES = (
    Endpoint("/messages", create_message, Operation(conversation.MessagesBody, MessageAnswer, dict[str, Any])),
    Endpoint("/messages/count_tokens", count_tokens, Operation(conversation.PromptBody, TokenCount)),
)
_SHARED_PATHS = (
    Endpoint("/v1/models", _MODELS, Operation(answer=ModelPage)).only_with(VERSION_HEADER),
    Endpoint("/v1/models/{model_id:path}", _MODELS, Operation(answer=ModelInfoBody)).only_with(VERSION_HEADER),
)
ANTHROPIC = _AnthropicDialect((*with_and_without_v1(_ROUTES), *_SHARED_PATHS))
