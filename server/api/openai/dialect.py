"""What OpenAI's clients do in their own way: a bearer key, unnamed events, `[DONE]`, and the shape of errors."""

from collections.abc import Mapping

from starlette.responses import Response

from server.api.bearer import bearer_key, wrong_bearer_key
from server.api.dialect import Dialect
from server.api.errors import ApiError
from server.api.openai.errors import error_body, error_response
from server.api.sse import sse_comment, sse_event, sse_text

DONE = sse_text("[DONE]")
"""The end of a stream that was completed."""


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
