"""The outermost layers: errors, web pages' access, keys.

Each key has a namespace that no other key sees, even where the server requires no key. Every page in a user's browser
can reach the loopback address, so pages may do nothing unless they come from this server or an origin of `--cors`.
`check_web_access` checks what a page cannot change:

* *Host*, against DNS rebinding: addresses and unregistrable names pass; others need `--allowed-host` or a key.
* *Origin*, sent with every request that may change something. Embedded scripts and images send none: `Sec-Fetch-Site`
  reveals them; only followed links are served.
* *Content type*: without a CORS preflight a page sends only text and forms, so a body must be JSON. Programs may send
  other types if the dialect allows: browsers send `Origin` or `Sec-Fetch-…` with every body.
"""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api import PRODUCT
from server.api.bodies import Body, Rules, parse_body
from server.api.dialect import ApiContext, Dialect, context_of, dialect_of, namespace_of
from server.api.errors import ApiError, Code, explain, stopped
from server.api.openapi import explain_unknown_path, find_other_api
from server.api.sessions import Refusal, ascii_text
from server.api.wire import parse_object
from server.app.config import ServerConfig
from server.app.log_events import MAX_PATH_LENGTH, MAX_REASON_LENGTH, RequestRefused, cut

logger = logging.getLogger(__name__)

ANY = "*"
CORS_METHODS = ("GET", "HEAD", "POST", "DELETE")
PREFLIGHT_SECONDS = 600

_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^\s:/@\[\]]+)(?::[0-9]{1,5})?", re.IGNORECASE)
_PRIVATE_ENDINGS = (".localhost", ".local", ".internal")
"""RFC 6761, RFC 6762, and ICANN's reservation of 2024."""
_READING = frozenset({"GET", "HEAD"})
_DEFAULT_PORTS = {"http": 80, "https": 443}
_JSON_TYPE = re.compile(r"\s*application/(?:(?:[^;]*\+)?json|x-tar)\s*(?:;|\Z)", re.IGNORECASE)
"""A bundle's type too: no page sends it without a preflight."""


def check_web_access(config: ServerConfig, method: str, headers: Headers, *, takes_any_type: bool = False) -> None:
    """Raises ApiError (403, 415) for a request of a foreign web page."""
    _check_host(config, headers.get("host"))
    _check_origin(config, method, headers)
    is_from_browser = "origin" in headers or any(name.startswith("sec-fetch-") for name in headers)
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    kind = headers.get("content-type", "")
    if has_body and (is_from_browser or not takes_any_type) and not _JSON_TYPE.match(kind):
        given = f"not {kind[:100]!r}" if kind else "but none was sent"
        cure = "with curl: -H 'Content-Type: application/json'"
        message = f"the content type of a body must be application/json, {given}; {cure}"
        raise ApiError(Code.UNSUPPORTED_MEDIA_TYPE, message)


def _check_host(config: ServerConfig, host: str | None) -> None:
    """Browsers always send a host; a required key allows any."""
    if config.needs_key or ANY in config.allowed_hosts or host is None:
        return
    match = _HOST.fullmatch(host)
    name = match["name"].lower().rstrip(".") if match is not None else ""
    last = name.rpartition(".")[2]
    is_address = name.startswith("[") or last.isdecimal()
    is_safe = is_address or last == name or name.endswith(_PRIVATE_ENDINGS)
    if not name or not (is_safe or name in (one.lower().rstrip(".") for one in config.allowed_hosts)):
        message = (
            f"this server is not known as {host[:100]!r}, and a web page could have led a browser here by that name; "
            "start it with --allowed-host NAME if the name is right"
        )
        raise ApiError(Code.HOST_NOT_ALLOWED, message)


def _check_origin(config: ServerConfig, method: str, headers: Headers) -> None:
    host, origin = headers.get("host"), headers.get("origin")
    if origin is None:
        is_cross_site = headers.get("sec-fetch-site", "none").lower() in ("cross-site", "same-site")
        # No other page can read the answer where a browser follows a link.
        is_link = method in _READING and headers.get("sec-fetch-mode", "").lower() == "navigate"
        is_allowed = is_link or not is_cross_site
    else:
        is_named = ANY in config.cors or origin.lower() in map(str.lower, config.cors)
        is_allowed = is_named or (host is not None and is_same_server(origin, host))
    if not is_allowed:
        message = (
            f"web pages of {(origin or 'another page')[:100]!r} may not use this server; start it with --cors ORIGIN "
            "to let those of an origin use it"
        )
        raise ApiError(Code.ORIGIN_NOT_ALLOWED, message)


def cross_origin_layer(origins: Iterable[str]) -> Middleware:
    """The outermost layer, which tells browsers which pages may read answers."""
    return Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=CORS_METHODS,
        allow_headers=[ANY],
        expose_headers=[ANY],
        max_age=PREFLIGHT_SECONDS,
        allow_private_network=True,
    )


def is_same_server(origin: str, host: str) -> bool:
    """Whether a page's origin is the server called `host`; a proxy may end TLS."""
    try:
        page, server = urlsplit(origin), urlsplit(f"//{host}")
        default = _DEFAULT_PORTS.get(page.scheme)
        if default is None or page.hostname is None:
            return False
        return (page.hostname, page.port or default) == (server.hostname, server.port or default)
    except ValueError:
        return False


LOOPBACK = frozenset({"127.0.0.1", "::1", "::ffff:127.0.0.1"})
OWN_NAMES = LOOPBACK | {"localhost"}
OF_OTHERS = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
CONSOLE = "/console/"


def key_name_of(request: Request) -> str | None:
    """The name of the server's key that the request holds, if any."""
    return request.state.key.name or None if request.state.key is not None else None


def namespace_of_query(request: Request) -> str:
    """The namespace of a request without a body."""
    return namespace_of(request, request.query_params.get("cache_salt"))


def is_owner(request: Request) -> bool:
    """Whether a request may see all data: by an operator's key, or from this machine.

    The latter counts only if the server requires no key and the request has none.
    """
    if context_of(request).config.needs_key:
        return request.state.key is not None and request.state.key.is_operator
    return not dialect_of(request).api_key(request.headers) and is_from_this_machine(request)


def check_owner(request: Request, what: str) -> None:
    """Raises ApiError (403) unless the server's owner asks."""
    if not is_owner(request):
        raise ApiError(Code.OPERATOR_ONLY, f"only who runs the server {what}: {_way_to_own(context_of(request))}")


def _way_to_own(context: ApiContext) -> str:
    """How whoever runs the server shows it."""
    if not context.config.needs_key:
        return "without a key on its own machine, or by an operator's key from a file for --api-keys"
    if any(key.is_operator for key in context.keys.keys):
        return "by an operator's key"
    return "by an operator's key, of which it has none; give one with operator = true in a file for --api-keys"


async def read_owners_body(request: Request, kind: type[Body], rules: Rules, what: str) -> Body:
    """The body of a request that only the server's owner may send; raises ApiError."""
    check_owner(request, what)
    fields, _ = parse_object(await context_of(request).read_body(request))
    return parse_body(kind, fields, rules)


def is_from_this_machine(request: Request) -> bool:
    """Whether a person on the server's machine asks, by a program or by the console.

    False for pages of another origin, with a proxy's headers, and for any host that is not the loopback address: a
    proxy may add no header, and a page's name may point here.
    """
    origin, host = request.headers.get("origin"), request.headers.get("host", "127.0.0.1")
    is_forwarded = any(name in request.headers for name in OF_OTHERS)
    is_own_page = origin is None or is_same_server(origin, host)
    is_near = request.client is not None and request.client.host in LOOPBACK
    named = _HOST.fullmatch(host)
    is_own_name = named is not None and named["name"].strip("[]").lower() in OWN_NAMES
    return is_near and is_own_name and is_own_page and not is_forwarded


def visible_namespace(request: Request) -> str:
    """A bodiless request's namespace, or the one that the owner names."""
    named = request.query_params.get("namespace")
    return named if named is not None and is_owner(request) else namespace_of_query(request)


def listed_namespace(request: Request) -> str | None:
    """The namespace of a list; None for all."""
    if "cache_salt" in request.query_params or not is_owner(request):
        return namespace_of_query(request)
    return request.query_params.get("namespace")


def wants_page(scope: Scope) -> bool:
    """Whether a browser asks for a page."""
    return scope["type"] == "http" and "text/html" in Headers(scope=scope).get("accept", "")


def is_of_console(scope: Scope) -> bool:
    """Whether a request is for a file of the console, which needs no key."""
    path: str = scope["path"]
    return path.startswith(CONSOLE) or (path == "/" and wants_page(scope))


_OF_STRANGERS = frozenset({Code.INVALID_API_KEY, Code.HOST_NOT_ALLOWED, Code.ORIGIN_NOT_ALLOWED})


class ErrorBoundary:
    """Outermost layer. Below it, `scope["state"]` holds `request_id`, `dialect`, `key` and `answer_headers`, which
    may grow. `key` is None where no key is required, or a path that needs none was asked without.

    All exceptions are caught only here; one after an answer's begin closes the connection.
    """

    def __init__(self, app: ASGIApp, find_dialect: Callable[[Scope], Dialect], server_name: str) -> None:
        self._app = app
        self._find_dialect = find_dialect
        self._server_name = ascii_text(server_name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises only after an answer has begun."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, dialect = f"req_{uuid.uuid4().hex}", self._find_dialect(scope)
        headers = {"x-request-id": request_id, "server": PRODUCT, "x-served-by": self._server_name}
        headers.update(dialect.answer_headers(request_id))
        scope.setdefault("state", {}).update(request_id=request_id, dialect=dialect, answer_headers=headers, key=None)
        has_started = False

        async def tracked(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                MutableHeaders(scope=message).update(headers)
            await send(message)

        try:
            self._check(Request(scope))
            await self._app(scope, receive, tracked)
        except Exception as error:  # the border of the process: no exception may pass
            answer = explain(error, request_id)
            _note_refusal(Request(scope), answer)
            if has_started:
                raise
            await dialect.error_response(answer)(scope, receive, tracked)
        except asyncio.CancelledError:  # by uvicorn, which would log a traceback and answer in plain text
            if not context_of(Request(scope)).is_draining:
                raise
            if not has_started:
                await dialect.error_response(stopped())(scope, receive, tracked)

    def _check(self, request: Request) -> None:
        """Raises ApiError before a body is read."""
        config, takes_any_type = context_of(request).config, dialect_of(request).takes_any_content_type
        check_web_access(config, request.method, request.headers, takes_any_type=takes_any_type)
        is_open = request.scope["path"] in OPEN_PATHS or (config.console and is_of_console(request.scope))
        if config.needs_key:
            request.state.key = context_of(request).keys.find(dialect_of(request).api_key(request.headers))
            if request.state.key is None and not is_open:
                raise dialect_of(request).wrong_key()


def _note_refusal(request: Request, error: ApiError) -> None:
    """Logs a refusal. A `POST` whose key is right is also kept, for its namespace."""
    state, path, code = request.state, request.scope["path"], error.code.value
    status = dialect_of(request).error_status(error)
    # A template's message may quote the conversation, which only the client may see.
    loggable = error.message.partition(":")[0] if error.code is Code.TEMPLATE_ERROR else error.message
    reason = cut(loggable, MAX_REASON_LENGTH)
    fields = (request.method, path, status, code, reason, key_name_of(request))
    logger.log(logging.WARNING if status >= 500 else logging.INFO, RequestRefused(state.request_id, *fields))
    if request.method == "POST" and error.code not in _OF_STRANGERS:
        namespace, session_id = getattr(state, "asked_as", None) or (namespace_of(request, None), None)
        param, message = error.param and cut(error.param, MAX_PATH_LENGTH), cut(error.message, MAX_REASON_LENGTH)
        kept = (time.time(), cut(path, MAX_PATH_LENGTH), status, code, param, message)
        context_of(request).refusals.record(Refusal(state.request_id, namespace, session_id, *kept))


def raise_http_error(request: Request, error: Exception) -> Response:
    """Raises the router's errors as ApiError; another API's path is unknown, whatever pattern it fits."""
    assert isinstance(error, HTTPException)
    path, method = request.url.path, request.method
    code, message = Code.UNKNOWN_PATH, explain_unknown_path(method, path)
    if error.status_code == 405 and find_other_api(path) is None:
        code, message = Code.METHOD_NOT_ALLOWED, f"{path} does not take the method {method}"
    raise ApiError(code, message, headers=error.headers or {})
