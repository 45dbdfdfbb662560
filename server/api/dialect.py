"""The seam between the server and its dialects.

A dialect is a folder of `server/api/`, handed to the application as one `Dialect`. A dialect's endpoints get the
`ApiContext`, and make an `Exchange` of each checked body (`bodies.py`); `call.py` does the rest.
"""

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope
from typing_extensions import TypedDict

from server.api.activity import Activity, EventLog, TreeHistory
from server.api.errors import ApiError, Code, stopped
from server.api.healing import healing_of
from server.api.observe import Metrics, Tracing
from server.api.planning import FairThreads, Planning
from server.api.record import RequestRecord, log_end
from server.api.sessions import Refusals, SessionRecords, header_text
from server.api.wire import JsonBody, Payload, read_body, sse_comment, sse_event
from server.app.config import ServerConfig
from server.app.keys import KeyRing, RateLimits, namespace_of_key
from server.diagnosis.account import Conversations
from server.engine.engine import Engine
from server.pool.pool import ModelPool
from server.pool.served import ListedModel, ServedModel

logger = logging.getLogger(__name__)


class ErrorObject(TypedDict):
    """The inner object of an error body."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(TypedDict):
    """The body of every answer that is not a success."""

    error: ErrorObject


def error_object(error: ApiError) -> ErrorObject:
    """An error in OpenAI's form."""
    of_status = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = "rate_limit_error" if error.status == 429 else of_status
    return {"message": error.message, "type": kind, "param": error.param, "code": error.code.value}


class Dialect:
    """The paths of one family of clients, and what they share; OpenAI's conventions unless overridden. Stateless."""

    error_type: Any = ErrorBody
    """What `error_body` makes."""
    own_paths: tuple[str, ...] = ()
    """At and below these, errors are this dialect's, also for unknown paths."""
    stream_media_type = "text/event-stream"
    takes_any_content_type = False
    """Programs may send JSON under any content type, as `curl -d` does."""
    own_header: str | None = None
    """In lower case. Only this dialect's clients send it; their unknown paths are this dialect's."""

    def __init__(self, routes: "Sequence[Endpoint]" = ()) -> None:
        self.routes = routes
        for route in routes:
            route.dialect = self

    def api_key(self, headers: Mapping[str, str]) -> str:
        """The request's bearer token, or an empty text."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return header_text(given) if scheme.lower() == "bearer" else ""

    def wrong_key(self) -> ApiError:
        """The error for a missing or wrong key."""
        message = "the key is missing or wrong; send it as 'Authorization: Bearer <key>'"
        return ApiError(Code.INVALID_API_KEY, message, headers={"WWW-Authenticate": "Bearer"})

    def wants_stream(self, fields: Mapping[str, Any]) -> bool:
        """Whether an unchecked body asks for a stream."""
        return fields.get("stream") is True

    def answer_headers(self, request_id: str) -> Mapping[str, str]:
        """Headers for every answer."""
        return {}

    def error_body(self, error: ApiError) -> Payload:
        """An error's JSON object."""
        return ErrorBody(error=error_object(error))

    def error_status(self, error: ApiError) -> int:
        """The HTTP status of an error."""
        return error.status

    def error_response(self, error: ApiError) -> Response:
        """The answer to a refused request."""
        return JsonBody(self.error_body(error), status_code=self.error_status(error), headers=dict(error.headers))

    def error_frame(self, error: ApiError) -> bytes:
        """The last frame of a broken stream."""
        return sse_event(self.error_body(error))

    def heartbeat(self, progress: str, *, has_begun: bool = True) -> bytes:
        """A frame that keeps a silent stream open, also before its first event; empty if clients skip none."""
        return sse_comment(progress)


@dataclass(frozen=True, eq=False)
class ModelReady:
    """An answer without output; a model may be loaded first."""

    model: ServedModel | None
    payload: Payload
    keep_alive_seconds: float | None = None
    """As in `Exchange`."""


@dataclass(frozen=True)
class Operation:
    """What an endpoint takes and gives; None: it takes no body."""

    body: Any = None
    answer: Any = dict[str, Any]
    stream: Any = None
    answer_type: str = "application/json"
    body_type: str = "application/json"
    query: tuple[str, ...] = ()


class Endpoint(Route):
    """A path with its function, and what it takes and gives. One with a body takes POST, another GET, unless said."""

    operation = Operation()
    dialect = Dialect()
    header: str | None = None
    """Set where two dialects share a path: this one serves requests with its own header."""

    def __init__(
        self, path: str, endpoint: Callable[..., Any], operation: Operation = operation, methods: Collection[str] = ()
    ) -> None:
        super().__init__(path, endpoint, methods=methods or ["GET" if operation.body is None else "POST"])
        self.operation = operation

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Matches if the path does, and the header is there."""
        is_here = self.header is None or self.header in Headers(scope=scope)
        return super().matches(scope) if is_here else (Match.NONE, {})

    def only_with(self, header: str) -> "Endpoint":
        """This endpoint, for requests with a header."""
        self.header = header
        return self


def with_and_without_v1(endpoints: Sequence[Endpoint]) -> tuple[Endpoint, ...]:
    """Each endpoint below `/v1`, then each unchanged."""
    below = (Endpoint(f"/v1{one.path}", one.endpoint, one.operation, one.methods or ()) for one in endpoints)
    return (*below, *endpoints)


def routes_of(dialects: Sequence[Dialect]) -> list[Endpoint]:
    """All routes in matching order: those for a header first."""
    return sorted((route for one in dialects for route in one.routes), key=lambda route: route.header is None)


def find_dialect(dialects: Sequence[Dialect], scope: Scope) -> Dialect:
    """A path's dialect; for an unknown path its owner, the header's, or the first."""
    headers, path = Headers(scope=scope), f"{scope['path']}/"
    served = (route.dialect for route in routes_of(dialects) if route.matches(scope)[0] is not Match.NONE)
    asked = (one for one in dialects if path.startswith(tuple(f"{own}/" for own in one.own_paths)))
    spoken = (one for one in dialects if one.own_header is not None and one.own_header in headers)
    return next(chain(served, asked, spoken), dialects[0])


def dialect_of(request: Request) -> Dialect:
    """The dialect that `ErrorBoundary` found."""
    dialect: Dialect = request.state.dialect
    return dialect


def namespace_of(request: Request, cache_salt: str | None) -> str:
    """The name under which requests share state; empty without key and salt."""
    key = dialect_of(request).api_key(request.headers)
    of_key = namespace_of_key(key) if key else ""
    # The slash keeps a salt from looking like the digest of a key.
    return f"{of_key}/{cache_salt}" if cache_salt else of_key


Kept = TypeVar("Kept")


class ApiContext:
    """What all endpoints share. Event loop only, unless a member says otherwise."""

    def __init__(self, config: ServerConfig, pool: ModelPool, keys: KeyRing) -> None:
        self.config, self.pool = config, pool
        self.keys = keys
        """Replaced while the server runs; running answers go on."""
        self.rate_limits, self.planning = RateLimits(time.monotonic), Planning()
        self.expanding, self.searching = FairThreads(2, "expand"), FairThreads(2, "search")
        self.reading, self.storing = FairThreads(2, "read"), FairThreads(1, "store")
        """Threads for what dialects keep."""
        self.sessions, self.refusals, self.conversations = SessionRecords(), Refusals(), Conversations()
        self.conversations.is_whole = config.cache_disk_bytes is None
        self.started, self.is_draining = time.monotonic(), False
        log = EventLog(secrets.token_hex(4), wall=time.time, clock=time.monotonic)
        self.activity = Activity(log, lambda: pool.engines)
        self.trees = TreeHistory(time.time)
        self.metrics = Metrics(lambda: pool.engines, config.slots)
        self.tracing: Tracing | None = None
        self.subscribers = [self._keep_turn, self.activity.tell, log_end, self.metrics.tell]
        """Told of ended requests."""
        self.background = set["asyncio.Task[None]"]()
        self._kept = dict[Callable[[ServerConfig], Any], Any]()
        self._lock = threading.Lock()

    def _keep_turn(self, record: RequestRecord) -> None:
        first = record.first
        if first.name is not None and first.started is not None:
            self.sessions.record(first.name, record.turn, first.repeated_call, first.arrival.client)

    def kept(self, make: Callable[[ServerConfig], Kept]) -> Kept:
        """What a dialect keeps, made by the first call. For any thread."""
        if make not in self._kept:
            with self._lock:
                if make not in self._kept:
                    self._kept[make] = make(self.config)
        kept: Kept = self._kept[make]
        return kept

    def close(self) -> None:
        """Closes what dialects keep, once nothing uses it any more."""
        for one in self._kept.values():
            getattr(one, "close", lambda: None)()

    async def forget_calls(self, namespace: str, session_id: str | None = None) -> None:
        """Forgets how calls were written in a namespace, or in one of its sessions."""
        if (healing := self.kept(healing_of)) is not None:
            await asyncio.to_thread(healing.forget, namespace, session_id)

    async def read_body(self, request: Request) -> bytes:
        """As `read_body`, within the server's limit."""
        return await read_body(request, self.config.max_body_bytes, partial(self.in_turn, self.expanding, request))

    async def in_turn(self, threads: FairThreads, request: Request, work: Callable[[], Kept]) -> Kept:
        """What `work` returns or raises, on one of `threads`, when it is the client's turn."""
        return await threads.run(client_of(request), work)

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs work that handles its own errors."""
        task = asyncio.get_running_loop().create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    def running_engine(self, model: ServedModel) -> Engine:
        """A model's engine; raises ApiError (503) if it accepts no requests."""
        engine = self.pool.engines.get(model.base_id)
        if self.is_draining or engine is None or not engine.is_running:
            raise stopped()
        return engine


def context_of(request: Request) -> ApiContext:
    """What the endpoints of the app share."""
    context: ApiContext = request.app.state.api
    return context


def client_of(request: Request) -> str:
    """Who takes turns with others: a key on a machine."""
    return f"{request.client.host if request.client else ''} {dialect_of(request).api_key(request.headers)}"


def describe_models(
    body: Callable[[ListedModel], Any], page: Callable[[list[Any]], Payload]
) -> Callable[[Request], Awaitable[Response]]:
    """Makes an endpoint for all models and for each: `body` writes one, and `page` all of these."""

    async def describe(request: Request) -> Response:
        """Describes a model, whose id may hold slashes, or all that requests may name."""
        pool, model_id = context_of(request).pool, request.path_params.get("model_id")
        if model_id:
            return JsonBody(body(await asyncio.to_thread(pool.describe, model_id)))
        return JsonBody(page(list(map(body, await asyncio.to_thread(pool.listed)))))

    return describe
