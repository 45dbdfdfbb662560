"""The conventions of OpenAI's clients: a bearer key, unnamed events, `[DONE]`, and errors.

An error is `{"error": {"message", "type", "param", "code"}}`.
"""

from collections.abc import Mapping

from starlette.responses import Response
from typing_extensions import TypedDict

from server.api.dialect import Dialect
from server.api.errors import ApiError
from server.api.wire import JsonBody, bearer_key, sse_comment, sse_event, sse_text, wrong_bearer_key


class ErrorObject(TypedDict):
    """The inner object of an error body."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(TypedDict):
    """The body of every answer that is not a success."""

    error: ErrorObject


def error_body(error: ApiError) -> ErrorBody:
    """Returns an error's JSON body."""
    kind = _type_of(error.status)
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code.value}}


def error_response(error: ApiError) -> Response:
    """Returns an error's HTTP answer."""
    return JsonBody(error_body(error), status_code=error.status, headers=dict(error.headers))


def _type_of(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


DONE = sse_text("[DONE]")
"""The end of a complete stream."""


class OpenAiDialect(Dialect):
    """OpenAI's endpoints and, in their shape, this server's own."""

    def api_key(self, headers: Mapping[str, str]) -> str:
        """Returns the bearer token."""
        return bearer_key(headers)

    def wrong_key(self) -> ApiError:
        """Returns the error that asks for a bearer token."""
        return wrong_bearer_key()

    def error_response(self, error: ApiError) -> Response:
        """Returns an answer with an error object."""
        return error_response(error)

    def error_frame(self, error: ApiError) -> bytes:
        """Returns an event with an error object; `[DONE]` does not follow it."""
        return sse_event(error_body(error))

    def heartbeat(self, progress: str) -> bytes:
        """Returns a comment."""
        return sse_comment(progress)
