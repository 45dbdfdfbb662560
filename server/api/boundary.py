"""The outermost ASGI layer: names each request, finds its dialect, and answers every exception in that dialect."""

import logging
import time
import uuid
from collections.abc import Callable, Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api import PRODUCT
from server.api.auth import key_name_of, namespace_of
from server.api.context import context_of
from server.api.dialect import Dialect
from server.api.errors import ApiError, Code, explain
from server.api.header_text import ascii_text
from server.api.other_apis import explain_unknown_path, find_other_api
from server.api.refusals import Origin, Refusal
from server.log_events import MAX_PATH_LENGTH, MAX_REASON_LENGTH, RequestRefused, cut

logger = logging.getLogger(__name__)

_OF_STRANGERS = frozenset({Code.INVALID_API_KEY, Code.HOST_NOT_ALLOWED, Code.ORIGIN_NOT_ALLOWED})


class ErrorBoundary:
    """Outermost ASGI layer. Behind it, `scope["state"]` holds `request_id`, `dialect` and `answer_headers`.

    The last are headers that the answer will have, an error too; an endpoint may add to them until it answers.

    It is the only place where an exception of any kind is caught: whatever went wrong in one request, the
    server goes on. Once an answer has begun, the connection is closed instead.
    """

    def __init__(self, app: ASGIApp, find_dialect: Callable[[Scope], Dialect], server_name: str) -> None:
        """`server_name` is what every answer says it was served by."""
        self._app = app
        self._find_dialect = find_dialect
        self._server_name = ascii_text(server_name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection's request; raises only once an answer has begun."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, dialect = f"req_{uuid.uuid4().hex}", self._find_dialect(scope)
        headers = {"x-request-id": request_id, "server": PRODUCT, "x-served-by": self._server_name}
        headers.update(dialect.answer_headers(request_id))
        scope.setdefault("state", {}).update(request_id=request_id, dialect=dialect, answer_headers=headers)
        tracked = _TrackedSend(send, headers)
        try:
            await self._app(scope, receive, tracked)
        except Exception as error:  # the border of the process: nothing may pass it
            answer = explain(error, request_id)
            _log_refusal(scope, request_id, answer)
            _keep_refusal(scope, request_id, answer)
            if tracked.has_started:
                raise
            await dialect.error_response(answer)(scope, receive, tracked)


def _log_refusal(scope: Scope, request_id: str, error: ApiError) -> None:
    """Logs what was refused: faults of the server as warnings, a client's mistakes as information."""
    level = logging.WARNING if error.status >= 500 else logging.INFO
    # What a template says may quote the conversation, which is the client's alone.
    message = error.message.partition(":")[0] if error.code is Code.TEMPLATE_ERROR else error.message
    reason = cut(message, MAX_REASON_LENGTH)
    refused = RequestRefused(
        request_id, scope["method"], scope["path"], error.status, error.code.value, reason, key_name_of(scope)
    )
    logger.log(level, refused)


def _keep_refusal(scope: Scope, request_id: str, error: ApiError) -> None:
    """Keeps what was refused of those who may ask at all, for them to be told of by `mlx-serve doctor`."""
    if scope["method"] != "POST" or error.code in _OF_STRANGERS:
        return
    request = Request(scope)
    origin = getattr(request.state, "origin", None) or Origin(namespace_of(request, None))
    context_of(request).refusals.record(
        Refusal(
            origin,
            request_id,
            time.time(),
            cut(scope["path"], MAX_PATH_LENGTH),
            error.status,
            error.code.value,
            error.param and cut(error.param, MAX_PATH_LENGTH),
            cut(error.message, MAX_REASON_LENGTH),
        )
    )


class _TrackedSend:
    """Adds to the answer's headers and knows whether the answer has begun."""

    def __init__(self, send: Send, headers: Mapping[str, str]) -> None:
        """`headers` may grow until the answer begins."""
        self._send = send
        self._headers = headers
        self.has_started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_started = True
            added = [(name.encode(), value.encode()) for name, value in self._headers.items()]
            message = {**message, "headers": [*message.get("headers", ()), *added]}
        await self._send(message)


def raise_http_error(request: Request, error: Exception) -> Response:
    """Raises the router's own errors as ours: an unknown path, a method that a path does not take.

    A path of another API is unknown, even where it fits a pattern of ours, as `/responses/compact` does.
    """
    assert isinstance(error, HTTPException)
    path, method = request.url.path, request.method
    code, message = Code.UNKNOWN_PATH, explain_unknown_path(method, path)
    if error.status_code == 405 and find_other_api(path) is None:
        code, message = Code.METHOD_NOT_ALLOWED, f"{path} does not take the method {method}"
    raise ApiError(code, message, headers=error.headers or {})
