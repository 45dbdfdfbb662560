"""Errors in Anthropic's shape: `{"type": "error", "error": {"type", "message", "details"}}`."""

from collections.abc import Mapping
from typing import Final, TypedDict

from starlette.responses import Response

from server.api.errors import ApiError, Code, ContextExceeded
from server.api.json_body import JsonBody

_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


_NO_THREADS: Final = "thread_unsupported_request"
"""At this code Anthropic's packages go on without a thread and send the whole conversation."""


class ErrorDetails(TypedDict):
    """What programs tell errors of one type apart by."""

    error_code: str


class MessagesErrorObject(TypedDict):
    """The inner object of an error body."""

    type: str
    message: str
    details: ErrorDetails


class MessagesErrorBody(TypedDict):
    """The body of every answer that is not a success, and the data of an `error` event."""

    type: str
    error: MessagesErrorObject


def error_body(error: ApiError) -> MessagesErrorBody:
    """Returns the JSON body that tells a client of an error."""
    code = _NO_THREADS if error.param == "thread" else error.code.value
    kind, details = error_type(error.status), ErrorDetails(error_code=code)
    return {"type": "error", "error": {"type": kind, "message": _message(error), "details": details}}


def error_response(error: ApiError) -> Response:
    """Returns the HTTP answer that tells a client of an error."""
    return JsonBody(error_body(error), status_code=error.status, headers=dict(error.headers))


def error_type(status: int) -> str:
    """Returns Anthropic's word for what went wrong."""
    return _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


def _message(error: ApiError) -> str:
    # Agents look for these words and numbers, and shorten the conversation by themselves then.
    match error:
        case ContextExceeded():
            return f"prompt is too long: {error.num_tokens} tokens > {error.max_tokens} maximum"
        case ApiError(Code.CONTEXT_EXCEEDED):
            return f"prompt is too long: {error.message}"
    return error.message
