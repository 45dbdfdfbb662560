"""The paths, models and conventions of Anthropic's dialect.

Clients send `x-api-key`, and read named events and `request-id`. `GET /v1/models` has Anthropic's form for
requests with `anthropic-version`.
"""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, Literal

from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from server.api.anthropic.conversation import find_model, read_conversation
from server.api.anthropic.messages import MessageAnswer, create_message
from server.api.anthropic.types import IN_COUNT, MessagesBody, PromptBody
from server.api.call import inspect
from server.api.context import ApiContext, context_of
from server.api.dialect import (
    Api,
    Dialect,
    Endpoint,
    HeaderRoute,
    Operation,
    Payload,
    parse_body,
    with_and_without_v1,
)
from server.api.errors import ApiError, Code, ContextExceeded
from server.api.guard import namespace_of
from server.api.params import Incoming
from server.api.sessions import header_text
from server.api.wire import JsonBody, bearer_key, sse_comment, sse_event
from server.pool.served import ListedModel


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


async def list_models(request: Request) -> Response:
    """Lists all models on one page, whatever `limit` says."""
    models = [_body(model) for model in await asyncio.to_thread(context_of(request).pool.listed)]
    first, last = (models[0]["id"], models[-1]["id"]) if models else (None, None)
    page: ModelPage = {"data": models, "has_more": False, "first_id": first, "last_id": last}
    return JsonBody(page)


async def get_model(request: Request) -> Response:
    """Describes one model, whose id may hold slashes; without an id, lists all."""
    model_id = request.path_params["model_id"]
    if not model_id:
        return await list_models(request)
    return JsonBody(_body(await asyncio.to_thread(context_of(request).pool.describe, model_id)))


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


class ErrorDetails(TypedDict):
    """Tells errors of one type apart."""

    error_code: str


class MessagesErrorObject(TypedDict):
    """The inner object of an error body."""

    type: str
    message: str
    details: ErrorDetails


class MessagesErrorBody(TypedDict):
    """An error's body, and the data of an `error` event."""

    type: str
    error: MessagesErrorObject


def error_type(status: int) -> str:
    """Returns Anthropic's type for a status."""
    return _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


def _message(error: ApiError) -> str:
    # Agents look for these words and numbers, and then shorten the conversation by themselves.
    match error:
        case ContextExceeded():
            return f"prompt is too long: {error.num_tokens} tokens > {error.max_tokens} maximum"
        case ApiError(Code.CONTEXT_EXCEEDED):
            return f"prompt is too long: {error.message}"
    return error.message


VERSION_HEADER: Final = "anthropic-version"


class AnthropicDialect(Dialect):
    """The Messages API."""

    own_header = VERSION_HEADER

    def api_key(self, headers: Mapping[str, str]) -> str:
        """Returns `x-api-key`, else the bearer token."""
        return header_text(headers.get("x-api-key", "")) or bearer_key(headers)

    def wrong_key(self) -> ApiError:
        """Returns the error that asks for a key."""
        return ApiError(Code.INVALID_API_KEY, "the key is missing or wrong; send it as x-api-key or as bearer token")

    def answer_headers(self, request_id: str) -> Mapping[str, str]:
        """Returns the request's id in Anthropic's header."""
        return {"request-id": request_id}

    def error_body(self, error: ApiError) -> MessagesErrorBody:
        """Returns Anthropic's error object, with this server's code."""
        code = _NO_THREADS if error.param == "thread" else error.code.value
        kind, details = error_type(error.status), ErrorDetails(error_code=code)
        return {"type": "error", "error": {"type": kind, "message": _message(error), "details": details}}

    def error_frame(self, error: ApiError) -> bytes:
        """Returns an `error` event; no `message_stop` follows it."""
        return sse_event(self.error_body(error), "error")

    def heartbeat(self, progress: str) -> bytes:
        """Returns a `ping`."""
        return sse_event({"type": "ping"}, "ping")

    def early_heartbeat(self, progress: str) -> bytes:
        """Returns a comment: no event may come before `message_start`."""
        return sse_comment(progress)


class TokenCountBody(TypedDict):
    """The length of a prompt."""

    input_tokens: int


@inspect
def count_tokens(context: ApiContext, incoming: Incoming) -> Payload:
    """Counts a prompt's tokens; evaluates nothing."""
    body = parse_body(PromptBody, dict(incoming.fields), IN_COUNT)
    model = find_model(context, body.model)
    conversation = read_conversation(body, model, context.config, namespace_of(incoming.http, None))
    count: TokenCountBody = {"input_tokens": len(conversation.render().tokens)}
    return count


_ROUTES = (
    Endpoint("/messages", create_message, Operation(MessagesBody, MessageAnswer, dict[str, Any])),
    Endpoint("/messages/count_tokens", count_tokens, Operation(PromptBody, TokenCountBody)),
)
_SHARED_PATHS = (
    HeaderRoute("/v1/models", list_models, Operation(answer=ModelPage), header=VERSION_HEADER),
    HeaderRoute("/v1/models/{model_id:path}", get_model, Operation(answer=ModelInfoBody), header=VERSION_HEADER),
)
ANTHROPIC = Api(AnthropicDialect(), (*with_and_without_v1(_ROUTES), *_SHARED_PATHS), MessagesErrorBody)
