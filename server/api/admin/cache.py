"""`/v1/cache`: lists, clears and pins the state of the namespace of a request's key and `?cache_salt=`.

The server's owner may name another with `?namespace=`, sees the sums of all, and moves conversations.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from typing_extensions import TypedDict

from cache.budget import PinLimit
from cache.disk.bundle import BundleError, BundleTooLarge
from cache.disk.index import DiskWrites
from cache.moving import Departure, Intake, NoRoom
from cache.views import CacheView, EdgeDetail, EdgeView, NamespaceView, StateBytes, Traced
from models.adapter import client_namespace
from models.errors import InvalidParameter
from models.texts import grouped
from server.api.admin.names import EdgeName, KnownTurn, SessionName, find_text, name_edges, turns_known
from server.api.dialect import ApiContext, Endpoint, Operation, context_of
from server.api.errors import ApiError, Code
from server.api.guard import check_owner, is_owner, visible_namespace
from server.api.record import RequestRecord
from server.api.wire import JsonBody, body_of, number_asked
from server.engine import commands
from server.engine.engine import Engine
from server.engine.moving import calling, choose, into, take_in
from server.engine.request import EngineError
from server.pool.names import ModelNotLoaded, PoolError
from server.pool.served import ServedModel

logger = logging.getLogger(__name__)

BUNDLE_TYPE = "application/x-tar"
MAX_NODES = 256
MAX_NODES_LIMIT = 10_000
MAX_SAMPLED_NODES = 2000
MAX_TIME = 1 << 40
MAX_EDGE_TOKENS = 1024
MAX_SEARCHED_CHARACTERS = 200
MAX_DIGITS = 18

Edge = TypeVar("Edge")


class EdgeBody(TypedDict):
    """What edges in memory and on disk share."""

    name: EdgeName | None
    """None where the server knows no conversation with the edge."""
    id: int
    parent: int | None
    start: int
    stop: int
    tokens: int
    last_used: int
    bytes: int
    preview: str


class NodeBody(EdgeBody):
    """One edge of the tree."""

    tier: str
    restore_point: str | None
    explicit: bool
    pinned: bool
    uses: int
    disk_tokens: int


class DiskNodeBody(EdgeBody):
    """One edge of what is on disk."""

    snapshot: bool
    memory_tokens: int
    memory_id: int | None


class NamespaceBody(TypedDict):
    """What a namespace holds of a model or an adapter."""

    namespace: str
    adapter: str | None
    """The digest, if the adapter is no longer served."""
    num_nodes: int
    num_tokens: int
    num_disk_nodes: int
    bytes: StateBytes


class CacheStateBody(TypedDict):
    """What one namespace holds; for the owner the sums of all."""

    object: str
    model: str
    namespace: str
    namespaces: list[NamespaceBody] | None
    budget_bytes: int
    bytes: StateBytes
    disk_writes: DiskWrites | None
    evictions: int
    time: float
    """Seconds since 1970."""
    earlier: list[float]
    """The times of which `?at=` tells."""
    sessions: list[SessionName]
    pinned_sessions: list[str]
    num_nodes: int
    num_tokens: int
    num_disk_nodes: int
    truncated: bool
    nodes: list[NodeBody]
    disk_nodes: list[DiskNodeBody]


class FoundBody(TypedDict):
    """Edges in which a text begins."""

    object: str
    nodes: list[int]
    disk_nodes: list[int]
    truncated: bool


class CacheEdgeBody(TypedDict):
    """One edge in memory."""

    object: str
    id: int
    model: str
    start: int
    stop: int
    tokens: int
    text: str
    truncated: bool
    uses: int
    sessions: list[str]
    seconds: float | None
    """To evaluate the edge again; None until a long prompt was timed."""


class ClearedBody(TypedDict):
    """Tokens and bytes freed."""

    object: str
    model: str
    freed_tokens: int
    freed_bytes: int
    freed_disk_bytes: int


class ImportedBody(TypedDict):
    """The conversations, tokens and bytes of a bundle that are kept now."""

    object: str
    model: str
    conversations: int
    tokens: int
    bytes: int
    new_bytes: int
    """Of what was not kept before."""


class PinnedBody(TypedDict):
    """A session and whether it is pinned."""

    id: str
    object: str
    pinned: bool
    pinned_tokens: int


async def get_cache(request: Request) -> Response:
    """Describes a namespace's state; `?limit=` bounds the edges, `?at=` names a time of `earlier`."""
    context, namespace = context_of(request), visible_namespace(request)
    model, engine, _ = asked_model(request)
    if (at := number_asked(request, "at", MAX_TIME)) is not None:
        sample = context.trees.at(namespace, model.id, at + 1)
        if sample is None:
            raise InvalidParameter(
                "at", "the tree of that time is not kept; `earlier` of GET /v1/cache has the times"
            )
        return Response(sample, media_type=JsonBody.media_type)
    limit = number_asked(request, "limit", MAX_NODES_LIMIT)
    bodies = None
    if is_owner(request) and "cache_salt" not in request.query_params:
        names = {one.adapter.digest: one.id for one in context.pool.served if one.adapter is not None}
        bodies = [_namespace_body(one, names) for one in await engine.execute(commands.list_namespaces)]
    return await _described(context, namespace, model, MAX_NODES if limit is None else limit, bodies)


async def _described(
    context: ApiContext, namespace: str, model: ServedModel, limit: int, bodies: list[NamespaceBody] | None = None
) -> JsonBody:
    states = model.state_namespace(namespace)
    view: CacheView = await context.pool.engines[model.base_id].execute(commands.describe_cache, states, limit)
    turns, traced = await _traced(context, namespace, model)
    named = {turn.session.id: turn.session for turn in reversed(turns)}
    sessions, names_in = list(named.values())[::-1], partial(name_edges, turns, traced)
    further = {"namespaces": bodies, "earlier": context.trees.times(namespace, model.id), "sessions": sessions}
    # Writing a large tree takes a while, which must not block the event loop.
    return await asyncio.to_thread(lambda: JsonBody(_state_body(model, namespace, view, names_in, **further)))


def sample_tree(context: ApiContext, record: RequestRecord) -> None:
    """Keeps what the tree of an ended request is now, unless it was kept just before."""
    first = record.first
    if first.started is not None and context.trees.is_due(first.request.namespace, first.model_id):
        context.in_background(_sample(context, first.request.namespace, first.model_id))


async def _sample(context: ApiContext, namespace: str, model_id: str) -> None:
    with contextlib.suppress(PoolError, EngineError):
        body = await _described(context, namespace, context.pool.find(model_id), MAX_SAMPLED_NODES)
        context.trees.add(namespace, model_id, bytes(body.body))


async def search_cache(request: Request) -> Response:
    """Finds the edges in which `?text=` begins, of conversations that the server still knows."""
    text = request.query_params.get("text", "")[:MAX_SEARCHED_CHARACTERS]
    model = asked_model(request)[0]
    turns, traced = (
        await _traced(context_of(request), visible_namespace(request), model) if text.strip() else ([], [])
    )
    text_of = model.token_texts.text
    nodes, disk_nodes, is_truncated = await asyncio.to_thread(find_text, text, turns, traced, text_of)
    return JsonBody(FoundBody(object="cache.found", nodes=nodes, disk_nodes=disk_nodes, truncated=is_truncated))


async def get_edge(request: Request) -> Response:
    """Describes one edge in memory; raises ApiError (404)."""
    model, engine, states = asked_model(request)
    given = request.path_params["edge_id"]
    number = int(given) if given.isascii() and given.isdecimal() and len(given) <= MAX_DIGITS else -1
    edge: EdgeDetail | None = await engine.execute(commands.describe_edge, states, number, MAX_EDGE_TOKENS)
    if edge is None:
        raise ApiError(Code.EDGE_NOT_FOUND, f"there is no edge {given[:32]!r}; it may have been joined or evicted")
    num_tokens = edge.stop - edge.start
    body = body_of(
        CacheEdgeBody,
        edge,
        object="cache.edge",
        id=number,
        model=model.id,
        tokens=num_tokens,
        text=await asyncio.to_thread(model.token_texts.text, edge.first_tokens.tolist()),
        truncated=num_tokens > len(edge.first_tokens),
        seconds=context_of(request).activity.seconds_for(model.id, num_tokens),
    )
    return JsonBody(body)


async def clear_cache(request: Request) -> Response:
    """Forgets a namespace's state that no request uses."""
    context, namespace = context_of(request), visible_namespace(request)
    try:
        model, engine, states = asked_model(request)
        name, freed = model.id, await engine.execute(commands.clear_cache, states)
    except ModelNotLoaded as error:
        # Only a running engine changes the disk; the states of an adapter are known only once the adapter is loaded.
        if context.config.cache_disk_bytes is not None or error.source.adapter is not None:
            raise
        name, freed = error.source.id, context.pool.forget_unloaded(error.source, namespace)
    context.conversations.note_cleared(namespace)
    context.trees.forget(namespace)
    await context.forget_calls(namespace)
    num_tokens, memory_bytes, disk_bytes = freed
    amounts = {"freed_tokens": num_tokens, "freed_bytes": memory_bytes, "freed_disk_bytes": disk_bytes}
    return JsonBody({"object": "cache.cleared", "model": name, **amounts})


async def pin_session(request: Request) -> Response:
    """Pins a session's state; raises ApiError (404, 409)."""
    (_, engine, states), session_id = asked_model(request), request.path_params["session_id"]
    try:
        num_tokens: int = await engine.execute(commands.pin_session, states, session_id)
    except PinLimit as error:
        raise ApiError(Code.PIN_LIMIT, str(error)) from error
    if not num_tokens:
        message = f"no state is kept of the session {session_id[:256]!r}"
        raise ApiError(Code.SESSION_NOT_FOUND, message, "session_id")
    return _pinned(session_id, num_tokens)


async def unpin_session(request: Request) -> Response:
    """Ends a session's pin; raises ApiError (404)."""
    (_, engine, states), session_id = asked_model(request), request.path_params["session_id"]
    if not await engine.execute(commands.unpin_session, states, session_id):
        raise ApiError(Code.SESSION_NOT_FOUND, f"no session {session_id[:256]!r} is pinned", "session_id")
    return _pinned(session_id, 0)


def _cannot_leave(request: Request, session_id: str | None) -> str:
    """Says that there is nothing to export, and which namespaces have a session of that name: each key is one."""
    if session_id is None:
        return "nothing is kept here that may leave"
    own = visible_namespace(request)
    sessions = [one for one in context_of(request).sessions.of(None) if one.id == session_id]
    others = " or ".join(repr(one.namespace) for one in sessions if one.namespace != own)
    hint = f"; a session of this name has the namespace {others}: name it as namespace" if others else ""
    return f"no state of the session {session_id[:256]!r} is kept here that may leave{hint}"


async def export_conversations(request: Request) -> Response:
    """Streams a session, or all of a namespace; raises ApiError (403, 404)."""
    check_owner(request, "moves conversations")
    (model, engine, states), session_id = asked_model(request), request.query_params.get("session")
    namespace = visible_namespace(request) if session_id is None else states
    head, texts = await choose(engine, model.base_id, namespace, session_id)
    blocks = Departure(calling(engine)).blocks(head, texts)
    if (first := await asyncio.to_thread(next, blocks, None)) is None:
        raise ApiError(Code.SESSION_NOT_FOUND, _cannot_leave(request, session_id), "session")
    headers = {"Content-Disposition": 'attachment; filename="conversations.tar"'}
    headers["X-Left-Out-Tokens"] = str(head.left_out_tokens)
    return StreamingResponse(chain([first], blocks), media_type=BUNDLE_TYPE, headers=headers)


async def import_conversations(request: Request) -> Response:
    """Keeps what a bundle holds; raises ApiError (400, 403, 413, 507), which says what was kept before."""
    check_owner(request, "moves conversations")
    context, (model, engine, _) = context_of(request), asked_model(request)
    context.running_engine(model)
    max_bytes = context.config.cache_disk_bytes or engine.stats().cache.budget_bytes
    intake, error, code = Intake(calling(engine), into(visible_namespace(request))), "", Code.INVALID_VALUE
    kinds: dict[type[Exception], Code] = {BundleTooLarge: Code.BODY_TOO_LARGE, NoRoom: Code.INSUFFICIENT_STORAGE}
    try:
        if int(request.headers.get("content-length", "0")) > max_bytes:
            raise BundleTooLarge(f"the bundle has more than the {max_bytes} bytes that this server keeps")
        await take_in(engine, intake, request.stream(), max_bytes)
    except (BundleError, ClientDisconnect) as raised:
        error = str(raised) or "the client left"
        code = kinds.get(type(raised), code)
    kept, is_new = len(intake.kept), intake.new_bytes > 0 or not intake.kept
    counts = f"{kept} ({grouped(intake.num_tokens)} tokens{'' if is_new else ', all there before'})"
    logger.info("conversations of %s taken in: %s%s", model.id, counts, f"; then: {error}" if error else "")
    if error:
        raise ApiError(code, f"{error}; conversations kept before that: {counts}")
    return JsonBody(body_of(ImportedBody, intake, object="cache.imported", model=model.id, conversations=kept))


def asked_model(request: Request) -> tuple[ServedModel, Engine, str]:
    """Model, engine, and the name of the namespace's states there."""
    context = context_of(request)
    model = context.pool.find(request.query_params.get("model"))
    return model, context.pool.engines[model.base_id], model.state_namespace(visible_namespace(request))


async def _traced(
    context: ApiContext, namespace: str, model: ServedModel
) -> tuple[list[KnownTurn], list[tuple[Traced, Traced]]]:
    """The known turns of a namespace and model, and their edges."""
    turns = turns_known(context.conversations, context.activity, namespace, model.id)
    prompts, engine = [turn.tokens for turn in turns], context.pool.engines[model.base_id]
    return turns, await engine.execute(commands.trace_prompts, model.state_namespace(namespace), prompts)


def _state_body(
    model: ServedModel,
    namespace: str,
    view: CacheView,
    names_in: Callable[[int], Mapping[int, EdgeName]],
    **further: Any,
) -> CacheStateBody:
    return body_of(
        CacheStateBody,
        view,
        object="cache",
        model=model.id,
        namespace=namespace,
        bytes=view.state,
        time=round(time.time(), 3),
        **further,
        pinned_sessions=list(view.pinned),
        truncated=len(view.nodes) < view.num_nodes or view.is_disk_truncated,
        nodes=_edges(NodeBody, model, view.nodes, names_in(0)),
        disk_nodes=_edges(DiskNodeBody, model, view.disk_nodes, names_in(1)),
    )


def _namespace_body(view: NamespaceView, names: Mapping[str, str]) -> NamespaceBody:
    namespace, digest = client_namespace(view.namespace)
    # An adapter that was changed or is no longer served has only its digest.
    adapter = names.get(digest, digest) if digest is not None else None
    return body_of(NamespaceBody, view, namespace=namespace, adapter=adapter, bytes=view.state)


def _edges(
    kind: type[Edge], model: ServedModel, edges: Sequence[EdgeView], names: Mapping[int, EdgeName]
) -> list[Edge]:
    # Readings of the clock would reveal how many requests other clients made.
    ranks = {time: rank for rank, time in enumerate(sorted({edge.last_used for edge in edges}), 1)}
    previews = {edge.id: model.preview(edge.first_tokens.tobytes()) for edge in edges}
    return [
        body_of(kind, edge, last_used=ranks[edge.last_used], preview=previews[edge.id], name=names.get(edge.id))
        for edge in edges
    ]


def _pinned(session_id: str, num_tokens: int) -> Response:
    return JsonBody(PinnedBody(id=session_id, object="session.pin", pinned=num_tokens > 0, pinned_tokens=num_tokens))


_QUERY = ("cache_salt", "namespace", "model")
_EXPORT = Operation(answer=bytes, answer_type=BUNDLE_TYPE, query=(*_QUERY, "session"))
_IMPORT = Operation(bytes, ImportedBody, query=_QUERY, body_type=BUNDLE_TYPE)
ROUTES = (
    Endpoint("/sessions/{session_id:path}/pin", pin_session, Operation(answer=PinnedBody, query=_QUERY), ["POST"]),
    Endpoint(
        "/sessions/{session_id:path}/unpin", unpin_session, Operation(answer=PinnedBody, query=_QUERY), ["POST"]
    ),
    Endpoint("/cache", get_cache, Operation(answer=CacheStateBody, query=(*_QUERY, "limit", "at"))),
    Endpoint("/cache/search", search_cache, Operation(answer=FoundBody, query=(*_QUERY, "text"))),
    Endpoint("/cache/edges/{edge_id}", get_edge, Operation(answer=CacheEdgeBody, query=_QUERY)),
    Endpoint("/cache/export", export_conversations, _EXPORT),
    Endpoint("/cache/import", import_conversations, _IMPORT),
    Endpoint("/cache/clear", clear_cache, Operation(answer=ClearedBody, query=_QUERY), ["POST"]),
)
