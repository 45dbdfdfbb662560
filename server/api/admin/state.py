"""Health, statistics, metrics, events, sessions.

Statistics answer at once, without waiting for a worker. A request sees its own namespace; the server's owner sees
all, or `?namespace=`. Everybody sees what models do.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from functools import partial
from importlib import metadata
from typing import Any, Literal, NotRequired

from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from cache.budget import MovedState
from server.api.activity import EventLog, Listener, Sums, Unplanned, known_fields
from server.api.admin.names import SessionName
from server.api.call import AnswerStream
from server.api.dialect import ApiContext, Endpoint, Operation, context_of
from server.api.errors import ApiError, Code
from server.api.guard import is_owner, listed_namespace, visible_namespace
from server.api.record import OpenRequest, counts_of
from server.api.sessions import Refusal, SessionDetail, SessionRecord, TokenCounts
from server.api.wire import JsonBody, body_of, number_asked, sse_comment
from server.app.keys import KeyRing
from server.engine.commands import forget_session
from server.engine.request import DraftStats, EngineStats, EngineStopped, RequestCounts
from server.pool.memory import cache_memory_for_all


class CacheCountsBody(TypedDict):
    """What one engine's cache holds."""

    nodes: int
    stored_bytes: int
    live_bytes: int
    budget_bytes: int
    evictions: int
    keeps_on_disk: bool
    disk_bytes: int
    disk_files_gone: int


class EngineCounts(TypedDict):
    """What all descriptions of an engine tell."""

    preemptions: int
    cache: CacheCountsBody
    open_requests: int


class EngineBody(EngineCounts):
    """What one engine does and holds."""

    requests: RequestCounts


class ReadyBody(TypedDict):
    """Whether a request would be taken."""

    status: str
    """"ok", "draining" (new requests are refused), "stuck" or "stopped"; of `/ready` also "full"."""
    stuck: NotRequired[dict[str, float]]
    """Seconds of the step of each engine that is stuck, by model."""


class HealthBody(ReadyBody):
    """The state of the server."""

    models: list[str]
    loading: list[str]
    engines: NotRequired[dict[str, EngineBody]]
    """By model; only for those who may send requests."""


async def version(request: Request) -> Response:
    """Names the release of this server."""
    return JsonBody({"version": metadata.version("mlx-serve")})


async def health(request: Request) -> Response:
    """Answers 200 while requests are taken, else 503. Needs no key."""
    context = context_of(request)
    status = status_of(context)
    body: HealthBody = {"status": status, "models": list(context.pool.engines), "loading": list(context.pool.loading)}
    if stuck := context.pool.stuck:
        body["stuck"] = stuck
    if not context.config.needs_key or request.state.key is not None:
        stats = {model_id: engine.stats() for model_id, engine in context.pool.engines.items()}
        body["engines"] = {name: {"requests": one.requests, **_counts(one)} for name, one in stats.items()}
    return JsonBody(body, status_code=200 if status == "ok" else 503)


async def ready(request: Request) -> Response:
    """Answers 200 if every model would take one more request, else 503 and why: `full`, or as in `health`."""
    context = context_of(request)
    status = status_of(context)
    max_open = context.config.slots + context.config.max_waiting
    if status == "ok" and any(engine.stats().num_open >= max_open for engine in context.pool.engines.values()):
        status = "full"
    body: ReadyBody = {"status": status}
    if stuck := context.pool.stuck:
        body["stuck"] = stuck
    return JsonBody(body, status_code=200 if status == "ok" else 503)


def status_of(context: ApiContext) -> str:
    """`ok`, `draining`, `stuck` or `stopped`."""
    if context.is_draining:
        return "draining"
    if context.pool.stuck:
        return "stuck"
    is_running = all(engine.is_running for engine in context.pool.engines.values())
    return "ok" if is_running else "stopped"


def _counts(stats: EngineStats) -> EngineCounts:
    cache = body_of(CacheCountsBody, stats.cache)
    return {"preemptions": stats.num_preempted, "cache": cache, "open_requests": stats.num_open}


class ModelStatsBody(EngineCounts):
    """What a loaded model does and holds."""

    id: str
    waiting: int
    slots: dict[Literal["total", "prefilling", "decoding", "idle"], int]
    moved: MovedState
    disk_budget_bytes: int | None
    drafts: DraftStats | None
    """None where no answer is drafted."""
    encoded_images: int
    """Images for which the vision tower was evaluated."""


class WaitBody(TypedDict):
    """Why a request waits."""

    reason: str
    session_id: str | None
    """The session of the request that is waited for."""
    evaluated: int
    total: int
    """Tokens in common with that request, which it evaluates."""


class OpenRequestBody(TypedDict):
    """A request that has not ended."""

    id: str
    model: str
    endpoint: str
    namespace: str
    key: str | None
    session_id: str | None
    phase: str
    slot: int | None
    received: float
    """Seconds since 1970."""
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    evaluated_tokens: int
    completion_tokens: int
    tier: str | None
    waits_for: WaitBody | None


class MemoryBody(TypedDict):
    """What the machine says of its memory."""

    pressure: str
    idle_limit_bytes: int | None
    all_models_bytes: NotRequired[int]
    """The least `--cache-memory` for all models at once, where there is less."""


class StatsBody(TypedDict):
    """What the server is doing."""

    object: str
    time: float
    """Seconds since 1970."""
    status: str
    version: str
    uptime_seconds: float
    scope: str
    """`namespace` if all is of one namespace, else `all`."""
    memory: MemoryBody
    models: list[ModelStatsBody]
    loading: list[dict[Literal["id", "step"], str]]
    requests: list[OpenRequestBody]
    totals: Sums
    sessions: int


async def get_stats(request: Request) -> Response:
    """Tells what the server is doing."""
    context = context_of(request)
    namespace = listed_namespace(request)
    now, limit, config = time.monotonic(), context.pool.budgets.idle_limit, context.config
    memory: MemoryBody = {"pressure": limit.level.name.lower(), "idle_limit_bytes": limit.max_bytes}
    if all_models_bytes := cache_memory_for_all(len(config.models), config.cache_memory_bytes):
        memory["all_models_bytes"] = all_models_bytes
    body: StatsBody = {
        "object": "stats",
        "time": round(time.time(), 3),
        "status": status_of(context),
        "version": metadata.version("mlx-serve"),
        "uptime_seconds": round(now - context.started, 1),
        "scope": "all" if namespace is None else "namespace",
        "memory": memory,
        "models": [_model_body(context, model_id, one.stats()) for model_id, one in context.pool.engines.items()],
        "loading": [{"id": model_id, "step": step} for model_id, step in context.pool.loading.items()],
        "requests": _open_bodies(context, namespace, now),
        "totals": context.activity.sums_of(namespace),
        "sessions": len(context.sessions.of(namespace)),
    }
    return JsonBody(body)


def _model_body(context: ApiContext, model_id: str, stats: EngineStats) -> ModelStatsBody:
    slots = context.config.slots
    return {
        "id": model_id,
        "waiting": stats.requests.waiting,
        "slots": {"total": slots, **stats.requests.slots(slots)},
        **_counts(stats),
        "moved": stats.cache.moved,
        "disk_budget_bytes": context.config.cache_disk_bytes if stats.cache.keeps_on_disk else None,
        "drafts": stats.drafts,
        "encoded_images": stats.num_encoded,
    }


def _open_bodies(context: ApiContext, namespace: str | None, now: float) -> list[OpenRequestBody]:
    waits = {name: wait for engine in context.pool.engines.values() for name, wait in engine.stats().waits.items()}
    running = context.activity.open_requests(namespace)
    sessions = {one.request.request_id: one.session_id for one in running}

    def wait_of(request: OpenRequest) -> WaitBody | None:
        wait = waits.get(request.request.request_id) if request.phase == "waiting" else None
        return None if wait is None else body_of(WaitBody, wait, session_id=sessions.get(wait.other or ""))

    unplanned = [one for one in context.activity.unplanned if namespace in (None, one.namespace)]
    return [
        *(_request_body(one, now, wait_of(one)) for one in running),
        *(_unplanned_body(one, now) for one in unplanned),
    ]


def _unplanned_body(request: Unplanned, now: float) -> OpenRequestBody:
    return body_of(
        OpenRequestBody,
        request,
        phase="waiting",
        slot=None,
        received=round(time.time() - now + request.received_at, 3),
        seconds=round(now - request.received_at, 3),
        tier=None,
        waits_for=WaitBody(reason="model", session_id=None, evaluated=0, total=0),
        **vars(TokenCounts()),
    )


def _request_body(request: OpenRequest, now: float, wait: WaitBody | None) -> OpenRequestBody:
    return body_of(
        OpenRequestBody,
        request,
        endpoint=request.arrival.endpoint,
        slot=None if request.started is None else request.started.slot,
        received=round(time.time() - now + request.arrival.received, 3),
        seconds=round(now - request.arrival.received, 3),
        waits_for=wait,
        **request.who,
        **vars(counts_of([request])),
    )


class RequestList(TypedDict):
    """Requests of the last minutes."""

    object: str
    data: list[dict[str, Any]]
    """With the fields of their events; open ones first."""
    levels: list[tuple[float, int, int, int]]
    """Seconds since 1970, and bytes of state live, stored and on disk."""


async def list_requests(request: Request) -> Response:
    """Lists the namespace's open requests and the last that have ended, the latest first; for the owner all."""
    context, now = context_of(request), time.monotonic()
    namespace = listed_namespace(request)
    running = reversed(context.activity.open_requests(namespace))
    data = [{**known_fields(one), **_request_body(one, now, None)} for one in running]
    data += context.activity.latest(namespace)
    titles = _titles(context, namespace)
    data = [{**one, "title": titles.get((one["namespace"], one["session_id"]), "")} for one in data]
    return JsonBody(RequestList(object="list", data=data, levels=list(context.activity.levels)))


async def metrics(request: Request) -> Response:
    """Tells Prometheus; raises ApiError (403) for a key that is no operator's."""
    context = context_of(request)
    # A key shared by all clients does not tell who asks.
    if context.config.api_keys_file is not None and not is_owner(request):
        raise ApiError(Code.OPERATOR_ONLY, "metrics are of all keys together; send the key of an operator")
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(context.metrics.registry), media_type=content_type)


MAX_LISTENERS = 64
MAX_SECONDS = 9999
RETRY_MS = 2000


async def get_events(request: Request) -> Response:
    """Streams what happens; raises ApiError (503) if too many listen."""
    context = context_of(request)
    log = context.activity.log
    if len(log.listeners) >= MAX_LISTENERS:
        message = f"{MAX_LISTENERS} clients listen to events already; close one of them, or read GET /v1/stats"
        raise ApiError(Code.TOO_MANY_LISTENERS, message)
    seconds = number_asked(request, "seconds", MAX_SECONDS)
    listener = log.listen(listed_namespace(request), request.headers.get("last-event-id"))
    frames, heartbeat = _frames(log, listener, seconds), partial(sse_comment, "listening")
    return AnswerStream(request, frames, heartbeat, partial(log.leave, listener))


async def _frames(log: EventLog, listener: Listener, seconds: int | None) -> AsyncIterator[bytes]:
    """Lasts `seconds`; None: for ever."""
    yield f"id: {listener.place_id}\nretry: {RETRY_MS}\n: listening\n\n".encode()
    end = time.monotonic() + (seconds or 0)
    while not log.is_closed:
        try:
            await asyncio.wait_for(listener.wake.wait(), end - time.monotonic() if seconds is not None else None)
        except TimeoutError:
            return
        if read := listener.take():
            yield b"".join(event.frame for event in read)


class SessionList(TypedDict):
    """Sessions, the last used first, and refusals."""

    object: str
    data: list[SessionRecord]
    refused: list[Refusal]


class DeletedBody(TypedDict):
    """A session that was forgotten."""

    id: str
    object: str
    deleted: bool


async def list_sessions(request: Request) -> Response:
    """Lists the namespace's sessions, for the owner all."""
    context = context_of(request)
    namespace = listed_namespace(request)
    titles = _titles(context, namespace)
    sessions = [_shown(session, context.keys, titles) for session in context.sessions.of(namespace)]
    data = [{name: value for name, value in shown.items() if name != "turns"} for shown in sessions]
    return JsonBody({"object": "list", "data": data, "refused": context.refusals.of(namespace)})


async def get_session(request: Request) -> Response:
    """Describes one session with its last turns; raises ApiError (404)."""
    context, session = context_of(request), _found(request)
    return JsonBody(_shown(session, context.keys, _titles(context, session.namespace)))


async def delete_session(request: Request) -> Response:
    """Forgets one session; raises ApiError (404)."""
    context, session = context_of(request), _found(request)
    namespace, session_id = session.namespace, session.id
    for model in context.pool.served:
        engine = context.pool.engines.get(model.base_id)
        if engine is None:
            continue
        # A stopped engine holds no state.
        with contextlib.suppress(EngineStopped):
            await engine.execute(forget_session, model.state_namespace(namespace), session_id)
    context.pool.forget_session_of_unloaded(namespace, session_id)
    context.sessions.forget(namespace, session_id)
    context.conversations.forget(namespace, session_id)
    context.trees.forget(namespace)
    context.activity.forget_session(namespace, session_id)
    context.refusals.forget_session(namespace, session_id)
    await context.forget_calls(namespace, session_id)
    return JsonBody(DeletedBody(id=session_id, object="session.deleted", deleted=True))


def _found(request: Request) -> SessionDetail:
    session_id = request.path_params["session_id"]
    session = context_of(request).sessions.find(visible_namespace(request), session_id)
    if session is None:
        message = f"there is no session {session_id[:256]!r}; GET /v1/sessions lists them"
        raise ApiError(Code.SESSION_NOT_FOUND, message, "session_id")
    return session


def _titles(context: ApiContext, namespace: str | None) -> dict[tuple[str, str], str]:
    """Beginnings of first questions, by namespace and id, of sessions whose texts are kept."""
    turns = {(name.namespace, name.id): turn for name, turn in context.conversations.turns_of(namespace)}
    return {key: SessionName.of(key[1], turn.prompt).title for key, turn in turns.items()}


def _shown(session: SessionDetail, keys: KeyRing, titles: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    title = titles.get((session.namespace, session.id), "")
    return {**vars(session), "key": keys.name_of(session.namespace), "title": title}


_QUERY = ("cache_salt", "namespace")
V1_ROUTES = (
    Endpoint("/stats", get_stats, Operation(answer=StatsBody, query=_QUERY)),
    Endpoint(
        "/events", get_events, Operation(answer=str, answer_type="text/event-stream", query=(*_QUERY, "seconds"))
    ),
    Endpoint("/requests", list_requests, Operation(answer=RequestList, query=_QUERY)),
    Endpoint("/sessions", list_sessions, Operation(answer=SessionList, query=_QUERY)),
    Endpoint("/sessions/{session_id:path}", get_session, Operation(answer=SessionDetail, query=_QUERY)),
    Endpoint("/sessions/{session_id:path}", delete_session, Operation(answer=DeletedBody, query=_QUERY), ["DELETE"]),
)
ROUTES = (
    Endpoint("/metrics", metrics, Operation(answer=str, answer_type="text/plain")),
    Endpoint("/health", health, Operation(answer=HealthBody)),
    Endpoint("/ready", ready, Operation(answer=ReadyBody)),
    Endpoint("/ping", health, Operation(answer=HealthBody), ["GET", "POST"]),
    Endpoint("/version", version, Operation(answer=dict[Literal["version"], str])),
)
