"""What llama.cpp's clients do in their own way: an error has the status as its `code`, and a type."""

from collections.abc import Mapping
from typing import Final, TypedDict

from starlette.responses import Response

from server.api.bearer import bearer_key, wrong_bearer_key
from server.api.dialect import Dialect
from server.api.errors import ApiError
from server.api.json_body import JsonBody
from server.api.sse import sse_comment, sse_event

ERROR_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    503: "unavailable_error",
}


class LlamaCppError(TypedDict):
    """The inner object of an error body."""

    code: int
    message: str
    type: str


class LlamaCppErrorBody(TypedDict):
    """The body of every answer that is not a success."""

    error: LlamaCppError


class LlamaCppDialect(Dialect):
    """llama.cpp's endpoints beside those of OpenAI."""

    def api_key(self, headers: Mapping[str, str]) -> str:
        """Returns the bearer token."""
        return bearer_key(headers)

    def wrong_key(self) -> ApiError:
        """Returns the error that asks for a bearer token."""
        return wrong_bearer_key()

    def error_response(self, error: ApiError) -> Response:
        """Returns an answer with an error object."""
        return JsonBody(_error_body(error), status_code=error.status, headers=dict(error.headers))

    def error_frame(self, error: ApiError) -> bytes:
        """Returns an event with an error object."""
        return sse_event(_error_body(error))

    def heartbeat(self, progress: str) -> bytes:
        """Returns a comment."""
        return sse_comment(progress)


def _error_body(error: ApiError) -> LlamaCppErrorBody:
    kind = ERROR_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"code": error.status, "message": error.message, "type": kind}}
