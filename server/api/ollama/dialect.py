"""What Ollama's clients do in their own way: a bearer key, lines of JSON, and errors that are one text."""

from collections.abc import Mapping
from typing import Any, TypedDict

from starlette.responses import Response

from server.api.bearer import bearer_key, wrong_bearer_key
from server.api.dialect import Dialect
from server.api.errors import ApiError
from server.api.json_body import JsonBody, json_text


class ErrorText(TypedDict):
    """The body of every answer that is not a success, and the last line of a stream that broke off."""

    error: str


class OllamaDialect(Dialect):
    """Ollama's endpoints."""

    stream_media_type = "application/x-ndjson"
    takes_any_content_type = True  # Ollama's own examples are `curl -d` without a type.

    def api_key(self, headers: Mapping[str, str]) -> str:
        """Returns the bearer token."""
        return bearer_key(headers)

    def wrong_key(self) -> ApiError:
        """Returns the error that asks for a bearer token."""
        return wrong_bearer_key()

    def wants_stream(self, fields: Mapping[str, Any]) -> bool:
        """Returns whether a body does not ask for a whole answer."""
        return fields.get("stream") is not False

    def error_response(self, error: ApiError) -> Response:
        """Returns an answer with the error's text."""
        return JsonBody(_error_text(error), status_code=error.status, headers=dict(error.headers))

    def error_frame(self, error: ApiError) -> bytes:
        """Returns a line with the error's text."""
        return line(_error_text(error))

    def heartbeat(self, progress: str) -> bytes:
        """Returns nothing: clients read every line as an answer."""
        return b""


def line(payload: Mapping[str, Any]) -> bytes:
    """Returns a line of a stream."""
    return json_text(payload).encode() + b"\n"


def _error_text(error: ApiError) -> ErrorText:
    return {"error": error.message}
