"""What a client is told when a request cannot be served: one table from exception to status and body.

Every error body has OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`. A message says what was
wrong and what would be accepted; it never holds a stack trace, a path or a key.
"""

import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from models.chat import ChatTemplateError
from models.errors import InvalidParameter
from server.engine.errors import EngineError, EngineStopped, OutOfMemory, QueueFull, StepFailed
from server.sessions import SessionIdError

logger = logging.getLogger(__name__)

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
RETRY_WHEN_STOPPED_SECONDS = 10


class ErrorObject(TypedDict):
    """The inner object of an error body."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """The body of every answer that is not a success."""

    error: ErrorObject


@dataclass(eq=False)
class ApiError(Exception):
    """A request that is answered with an error; everything the answer holds."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    type: str = INVALID_REQUEST
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> ErrorBody:
        """Returns the JSON body."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Returns the HTTP answer."""
        return JSONResponse(self.body(), status_code=self.status, headers=dict(self.headers))


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Returns the error for a request that no server in this state or any other could serve."""
    return ApiError(400, message, param, code)


def _unavailable(message: str, code: str, retry_after_seconds: int) -> ApiError:
    headers = {"Retry-After": str(retry_after_seconds)}
    return ApiError(503, message, code=code, type=SERVER_ERROR, headers=headers)


def stopped() -> ApiError:
    """Returns the error for a server that takes no more requests."""
    return _unavailable("the server is stopping", "server_stopping", RETRY_WHEN_STOPPED_SECONDS)


def as_api_error(error: Exception) -> ApiError | None:
    """Returns what a client is told about `error`, or None for one that is our own fault."""
    match error:
        case ApiError():
            return error
        case ChatTemplateError():
            return invalid(f"the model's chat template refuses these messages: {error}", "messages")
        case InvalidParameter():
            return invalid(str(error), error.param, "invalid_value")
        case SessionIdError():
            return invalid(str(error), error.param)
        case QueueFull():
            headers = {"Retry-After": str(error.retry_after_seconds)}
            return ApiError(429, str(error), code="queue_full", type="rate_limit_error", headers=headers)
        case EngineStopped():
            return stopped()
        case OutOfMemory():
            return _unavailable(str(error) or "not enough memory", "out_of_memory", error.retry_after_seconds)
        case StepFailed():
            return ApiError(500, "the model failed on this request", code="generation_failed", type=SERVER_ERROR)
        case EngineError():
            return ApiError(500, "the engine failed on this request", type=SERVER_ERROR)
    return None


def internal_error(error: Exception, request_id: str) -> ApiError:
    """Logs `error`, a fault of ours, and returns what the client is told: nothing but where to look."""
    logger.error("request %s failed", request_id, exc_info=error)
    message = f"internal error; the server's log has the details under request {request_id}"
    return ApiError(500, message, code="internal_error", type=SERVER_ERROR)


def explain(error: Exception, request_id: str) -> ApiError:
    """Returns what a client is told about `error`; logs those that a client cannot have caused."""
    known = as_api_error(error)
    if known is None:
        return internal_error(error, request_id)
    if known.status == 500:
        logger.error("request %s failed: %s", request_id, error, exc_info=error)
    return known


def http_error(request: Request, error: Exception) -> Response:
    """Answers the router's own errors: an unknown path, a method that a path does not take."""
    assert isinstance(error, HTTPException)
    path, method = request.url.path, request.method
    if error.status_code == 405:
        message, code = f"{path} does not take the method {method}", "method_not_allowed"
    elif error.status_code == 404:
        message, code = f"there is no {method} {path} here", "unknown_path"
    else:
        message, code = error.detail, "http_error"
    return ApiError(error.status_code, message, code=code, headers=error.headers or {}).response()


class ErrorBoundary:
    """Outermost ASGI layer: names each request, and turns every exception into an error body.

    It is the only place where an exception of any kind is caught: whatever went wrong in one request, the
    server goes on. Once an answer has begun, the connection is closed instead.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection's request; raises only once an answer has begun."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        tracked = _TrackedSend(send, request_id)
        try:
            await self._app(scope, receive, tracked)
        except Exception as error:  # the border of the process: nothing may pass it
            answer = explain(error, request_id)
            if tracked.has_started:
                raise
            await answer.response()(scope, receive, tracked)


class _TrackedSend:
    """Adds the request's name to the answer's headers and knows whether the answer has begun."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._header = (b"x-request-id", request_id.encode())
        self.has_started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_started = True
            headers: list[Any] = [*message.get("headers", ()), self._header]
            message = {**message, "headers": headers}
        await self._send(message)
