"""The seam between the server and its dialects.

A dialect is a folder of `server/api/`, handed to the application as one `Dialect`. A dialect's endpoints get the
`ApiContext`, and make an `Exchange` of each checked body; `call.py` does the rest. A field is honoured; has no
effect, since it could not change the answer; or is refused with a reason, except for values that ask for nothing.
Unknown fields are ignored.
"""

import asyncio
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope
from typing_extensions import TypedDict

from server.api.activity import Activity, EventLog
from server.api.errors import ApiError, Code, stopped, wrong
from server.api.observe import Metrics, Tracing
from server.api.planning import Planning
from server.api.record import RequestLog, RequestRecord, Subscriber, Told
from server.api.sessions import Refusals, SessionRecords, resolve_session_id
from server.api.wire import JsonBody, bearer_key, sse_comment, sse_event
from server.app.config import ServerConfig
from server.app.keys import KeyRing, RateLimits, namespace_of_key
from server.diagnosis.account import Conversations
from server.pool.pool import ModelPool
from server.pool.served import EnginePort, ServedModel

logger = logging.getLogger(__name__)

Payload: TypeAlias = Mapping[str, Any]


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
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    if error.status == 429:
        kind = "rate_limit_error"
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

    def owns(self, path: str) -> bool:
        """Whether an unknown path belongs to this dialect."""
        return any(path == own or path.startswith(f"{own}/") for own in self.own_paths)

    def api_key(self, headers: Mapping[str, str]) -> str:
        """The request's bearer token, or an empty text."""
        return bearer_key(headers)

    def wrong_key(self) -> ApiError:
        """The error for a missing or wrong key."""
        message = "the key is missing or wrong; send it as 'Authorization: Bearer <key>'"
        return ApiError(Code.INVALID_API_KEY, message, headers={"WWW-Authenticate": "Bearer"})

    def session_id(self, fields: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
        """The named session, if any; raises SessionIdError."""
        return resolve_session_id(fields, headers)

    def wants_stream(self, fields: Mapping[str, Any]) -> bool:
        """Whether an unchecked body asks for a stream."""
        return fields.get("stream") is True

    def answer_headers(self, request_id: str) -> Mapping[str, str]:
        """Headers for every answer."""
        return {}

    def error_body(self, error: ApiError) -> Payload:
        """An error's JSON object."""
        return ErrorBody(error=error_object(error))

    def error_response(self, error: ApiError) -> Response:
        """The answer to a refused request."""
        return JsonBody(self.error_body(error), status_code=error.status, headers=dict(error.headers))

    def error_frame(self, error: ApiError) -> bytes:
        """The last frame of a broken stream."""
        return sse_event(self.error_body(error))

    def heartbeat(self, progress: str) -> bytes:
        """A frame that keeps a silent stream open; empty if clients skip none."""
        return sse_comment(progress)

    def early_heartbeat(self, progress: str) -> bytes:
        """A heartbeat before the first event."""
        return self.heartbeat(progress)


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
    query: tuple[str, ...] = ()


class Endpoint(Route):
    """A path with its function, and what it takes and gives. One with a body takes POST, another GET, unless said."""

    operation = Operation()

    def __init__(
        self, path: str, endpoint: Callable[..., Any], operation: Operation = operation, methods: Collection[str] = ()
    ) -> None:
        super().__init__(path, endpoint, methods=methods or ["GET" if operation.body is None else "POST"])
        self.operation = operation


def with_and_without_v1(endpoints: Sequence[Endpoint]) -> tuple[Endpoint, ...]:
    """Each endpoint below `/v1`, then each unchanged."""
    below = (Endpoint(f"/v1{one.path}", one.endpoint, one.operation, one.methods or ()) for one in endpoints)
    return (*below, *endpoints)


class HeaderRoute(Endpoint):
    """A path shared by two dialects: this one serves requests with its own header."""

    def __init__(self, *given: Any, header: str, **named: Any) -> None:
        super().__init__(*given, **named)
        self._header = header

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Matches if the header is present and the path matches."""
        return super().matches(scope) if self._header in Headers(scope=scope) else (Match.NONE, {})


def routes_of(dialects: Sequence[Dialect]) -> list[tuple[Dialect, Endpoint]]:
    """All routes in matching order: header routes first."""
    routes = [(dialect, route) for dialect in dialects for route in dialect.routes]
    return sorted(routes, key=lambda pair: not isinstance(pair[1], HeaderRoute))


def find_dialect(dialects: Sequence[Dialect], scope: Scope) -> Dialect:
    """A path's dialect; for an unknown path its owner, the header's, or the first."""
    for dialect, route in routes_of(dialects):
        if route.matches(scope)[0] is not Match.NONE:
            return dialect
    headers = Headers(scope=scope)
    asked = (one for one in dialects if one.owns(scope["path"]))
    spoken = (one for one in dialects if one.own_header is not None and one.own_header in headers)
    return next(chain(asked, spoken), dialects[0])


def dialect_of(request: Request) -> Dialect:
    """The dialect that `ErrorBoundary` found."""
    dialect = request.state.dialect
    assert isinstance(dialect, Dialect)
    return dialect


def namespace_of(request: Request, cache_salt: str | None) -> str:
    """The name under which requests share state; empty without key and salt."""
    key = dialect_of(request).api_key(request.headers)
    of_key = namespace_of_key(key) if key else ""
    # The slash keeps a salt from looking like the digest of a key.
    return f"{of_key}/{cache_salt}" if cache_salt else of_key


class Treatment(Enum):
    """How a field is treated."""

    HONOURED = "honoured"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


@dataclass(frozen=True)
class Rule:
    """How one field is treated, and why."""

    treatment: Treatment
    why: str = ""
    """Why the field is not honoured, as a clause."""
    neutral: tuple[Any, ...] = ()
    """Values, besides null, with which a refused field asks for nothing."""
    is_read: bool = False

    def allows(self, value: Any) -> bool:
        """Whether a request may hold this value."""
        if self.treatment is not Treatment.REFUSED or value is None:
            return True
        # True equals 1 in Python, but clients may not send it for a number.
        return any(value == other and (value is other or not isinstance(value, bool)) for other in self.neutral)


Rules: TypeAlias = Mapping[str, Rule]


def honoured(names: str) -> dict[str, Rule]:
    """Rules for fields that take effect, separated by white space."""
    return dict.fromkeys(names.split(), Rule(Treatment.HONOURED, is_read=True))


def read_by(kind: type[BaseModel]) -> dict[str, Rule]:
    """Rules for a body's fields, all of which take effect."""
    return honoured(" ".join(field.alias or name for name, field in kind.model_fields.items()))


def no_effect(why: str, names: str, *, is_read: bool = False) -> dict[str, Rule]:
    """Rules for fields that cannot change the answer."""
    return dict.fromkeys(names.split(), Rule(Treatment.NO_EFFECT, why, is_read=is_read))


def refused(why: str, fields: str) -> dict[str, Rule]:
    """Rules for fields refused for one reason, separated by white space.

    Behind a field's `=` stand, as JSON and with `|` between them, the values that ask for nothing.
    """
    named = (one.partition("=") for one in fields.split())
    return {
        name: Rule(Treatment.REFUSED, why, tuple(map(json.loads, values.split("|"))) if values else ())
        for name, _, values in named
    }


def refuse_fields(fields: Mapping[str, Any], rules: Rules, place: str = "") -> None:
    """Raises ApiError (400) for the first refused field; `place` is prefixed to its name."""
    for name, value in fields.items():
        rule = rules.get(name)
        if rule is not None and not rule.allows(value):
            taken = " or ".join(json.dumps(value) for value in rule.neutral)
            message = f"{place}{name} is not supported: {rule.why}{f'; only {taken} is taken' if taken else ''}"
            raise ApiError(Code.UNSUPPORTED_PARAMETER, message, place + name)


Body = TypeVar("Body", bound=BaseModel)


class BodyModel(BaseModel):
    """Base of all bodies: JSON's own types without conversion, unknown fields kept apart."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")


def as_whole(value: Any) -> Any:
    """16 for 16.0: some languages have only one number type."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(as_whole)]


def parse_body(kind: type[Body], raw: Mapping[str, Any], rules: Rules = MappingProxyType({})) -> Body:
    """The checked body; raises ApiError (400) that names the first wrong field."""
    refuse_fields(raw, rules)
    body = validated(kind, raw)
    unknown = sorted((body.model_extra or {}).keys() - rules.keys())
    if unknown:
        logger.debug("fields without meaning here: %s", ", ".join(unknown)[:500])
    return body


def validated(kind: type[Body], raw: Any, *place: int | str) -> Body:
    """The checked value at `place` of a body; raises ApiError (400)."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        code = Code.INVALID_TYPE if problem["type"].endswith("_type") else Code.INVALID_VALUE
        if problem["type"] == "missing":
            code = Code.MISSING_PARAMETER
        raise wrong(param_name((*place, *problem["loc"])), problem["msg"], code) from error


def param_name(location: tuple[int | str, ...]) -> str:
    """A place in a body as clients write it, bounded: `messages[0].content`."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in location if step != "[key]")
    return "".join(steps).lstrip(".")[:200]


# ------------------------------------------------------------------------------------------- what endpoints share

Kept = TypeVar("Kept")


@dataclass(eq=False)
class ApiContext:
    """What all endpoints share. Event loop only, unless a member says otherwise."""

    config: ServerConfig
    pool: ModelPool
    keys: KeyRing = field(default_factory=KeyRing)
    """Replaced while the server runs."""
    rate_limits: RateLimits = field(default_factory=lambda: RateLimits(time.monotonic))
    sessions: SessionRecords = field(default_factory=SessionRecords)
    refusals: Refusals = field(default_factory=Refusals)
    conversations: Conversations = field(default_factory=Conversations)
    planning: Planning = field(default_factory=Planning)
    is_draining: bool = False

    background: set["asyncio.Task[None]"] = field(default_factory=set)
    metrics: Metrics = field(init=False)
    activity: Activity = field(init=False)
    started: float = field(default_factory=time.monotonic)
    """`time.monotonic()`."""
    subscribers: list[Subscriber] = field(init=False)
    tracing: Tracing | None = None
    _kept: dict[Callable[[ServerConfig], Any], Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.conversations.is_whole = self.config.cache_disk_bytes is None
        self.metrics = Metrics(lambda: self.pool.engines, self.config.slots)
        log = EventLog(secrets.token_hex(4), wall=time.time, clock=time.monotonic)
        self.activity = Activity(log, lambda: self.pool.engines)
        self.subscribers = [self._keep_turn, self.activity.tell, RequestLog().tell, self.metrics.tell]

    def tell(self, told: Told) -> None:
        """Tells every subscriber."""
        for subscriber in self.subscribers:
            subscriber(told)

    def _keep_turn(self, told: Told) -> None:
        if isinstance(told, RequestRecord) and told.name is not None and told.turn is not None:
            self.sessions.record(told.name, told.turn)

    def kept(self, make: Callable[[ServerConfig], Kept]) -> Kept:
        """What a dialect keeps, made by the first call. For any thread."""
        with self._lock:
            if make not in self._kept:
                self._kept[make] = make(self.config)
            found: Kept = self._kept[make]
        return found

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs work that handles its own errors."""
        task = asyncio.get_running_loop().create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    def find_model(self, name: str | None) -> ServedModel:
        """The loaded model, without a name the default. Any thread; raises PoolError."""
        return self.pool.find(name)

    def running_engine(self, model: ServedModel) -> EnginePort:
        """A model's engine; raises ApiError (503) if it accepts no requests."""
        engine = self.pool.engines.get(model.base_id)
        if self.is_draining or engine is None or not engine.is_running:
            raise stopped()
        return engine


def context_of(request: Request) -> ApiContext:
    """What the endpoints of the app share."""
    context = request.app.state.api
    assert isinstance(context, ApiContext)
    return context
