"""What Anthropic's clients do in their own way: `x-api-key`, named events, `request-id`, and the shape of errors."""

from collections.abc import Mapping
from typing import Final

from starlette.responses import Response

from server.api.anthropic.errors import error_body, error_response
from server.api.bearer import bearer_key
from server.api.dialect import Dialect
from server.api.errors import ApiError, Code
from server.api.header_text import header_text
from server.api.sse import sse_comment, sse_event

VERSION_HEADER: Final = "anthropic-version"


class AnthropicDialect(Dialect):
    """The Messages API."""

    own_header = VERSION_HEADER

    def api_key(self, headers: Mapping[str, str]) -> str:
        """Returns `x-api-key`, or without one the bearer token."""
        return header_text(headers.get("x-api-key", "")) or bearer_key(headers)

    def wrong_key(self) -> ApiError:
        """Returns the error that asks for a key."""
        return ApiError(Code.INVALID_API_KEY, "the key is missing or wrong; send it as x-api-key or as bearer token")

    def answer_headers(self, request_id: str) -> Mapping[str, str]:
        """Returns the request's name where its clients look for it."""
        return {"request-id": request_id}

    def error_response(self, error: ApiError) -> Response:
        """Returns an answer with an error object."""
        return error_response(error)

    def error_frame(self, error: ApiError) -> bytes:
        """Returns an `error` event; no `message_stop` follows it."""
        return sse_event(error_body(error), "error")

    def heartbeat(self, progress: str) -> bytes:
        """Returns a `ping`."""
        return sse_event({"type": "ping"}, "ping")

    def early_heartbeat(self, progress: str) -> bytes:
        """Returns a comment: no event may come before `message_start`."""
        return sse_comment(progress)
