"""The conventions of OpenAI's clients."""

from typing_extensions import TypedDict

from server.api.dialect import Dialect, Payload
from server.api.errors import ApiError


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
    """An error's JSON body."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    if error.status == 429:
        kind = "rate_limit_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code.value}}


DONE = b"data: [DONE]\n\n"


class OpenAiDialect(Dialect):
    """OpenAI's endpoints, and this server's own."""

    def error_body(self, error: ApiError) -> Payload:
        """OpenAI's error object."""
        return error_body(error)
