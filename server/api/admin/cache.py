"""`/v1/cache`: lists, clears and pins the state of the namespace of a request's key and `?cache_salt=`.

The server's owner may name another with `?namespace=`, and sees the sums of all.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from cache.budget import PinLimit
from cache.disk.index import DiskWrites
from cache.views import CacheView, EdgeDetail, EdgeView, NamespaceView, StateBytes
from models.adapter import client_namespace
from server.api.dialect import Endpoint, Operation, context_of
from server.api.errors import ApiError, Code
from server.api.guard import is_owner, visible_namespace
from server.api.wire import JsonBody, body_of, number_asked
from server.engine import commands
from server.engine.engine import Engine
from server.pool.names import ModelNotLoaded
from server.pool.served import ServedModel

MAX_NODES = 256
MAX_NODES_LIMIT = 10_000
MAX_EDGE_TOKENS = 1024
MAX_DIGITS = 18

Edge = TypeVar("Edge")


class EdgeBody(TypedDict):
    """What edges in memory and on disk share."""

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
    pinned_sessions: list[str]
    num_nodes: int
    num_tokens: int
    num_disk_nodes: int
    truncated: bool
    nodes: list[NodeBody]
    disk_nodes: list[DiskNodeBody]


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


class PinnedBody(TypedDict):
    """A session and whether it is pinned."""

    id: str
    object: str
    pinned: bool
    pinned_tokens: int


async def get_cache(request: Request) -> Response:
    """Describes a namespace's state; `?limit=` bounds the edges."""
    model, engine, states = _asked(request)
    namespace = visible_namespace(request)
    limit = number_asked(request, "limit", MAX_NODES_LIMIT)
    view: CacheView = await engine.execute(commands.describe_cache, states, MAX_NODES if limit is None else limit)
    bodies = None
    if is_owner(request) and "cache_salt" not in request.query_params:
        names = {one.adapter.digest: one.id for one in context_of(request).pool.served if one.adapter is not None}
        bodies = [_namespace_body(one, names) for one in await engine.execute(commands.list_namespaces)]
    # Writing a large tree takes a while, which must not block the event loop.
    return await asyncio.to_thread(lambda: JsonBody(_state_body(model, namespace, view, bodies)))


async def get_edge(request: Request) -> Response:
    """Describes one edge in memory; raises ApiError (404)."""
    model, engine, states = _asked(request)
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
        model, engine, states = _asked(request)
        name, freed = model.id, await engine.execute(commands.clear_cache, states)
    except ModelNotLoaded as error:
        # Only a running engine changes the disk; the states of an adapter are known only once the adapter is loaded.
        if context.config.cache_disk_bytes is not None or error.source.adapter is not None:
            raise
        name, freed = error.source.id, context.pool.forget_unloaded(error.source, namespace)
    context.conversations.note_cleared(namespace)
    await context.forget_calls(namespace)
    num_tokens, memory_bytes, disk_bytes = freed
    amounts = {"freed_tokens": num_tokens, "freed_bytes": memory_bytes, "freed_disk_bytes": disk_bytes}
    return JsonBody({"object": "cache.cleared", "model": name, **amounts})


async def pin_session(request: Request) -> Response:
    """Pins a session's state; raises ApiError (404, 409)."""
    (_, engine, states), session_id = _asked(request), request.path_params["session_id"]
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
    (_, engine, states), session_id = _asked(request), request.path_params["session_id"]
    if not await engine.execute(commands.unpin_session, states, session_id):
        raise ApiError(Code.SESSION_NOT_FOUND, f"no session {session_id[:256]!r} is pinned", "session_id")
    return _pinned(session_id, 0)


def _asked(request: Request) -> tuple[ServedModel, Engine, str]:
    """Model, engine, and the name of the namespace's states there."""
    context = context_of(request)
    model = context.pool.find(request.query_params.get("model"))
    return model, context.pool.engines[model.base_id], model.state_namespace(visible_namespace(request))


def _state_body(
    model: ServedModel, namespace: str, view: CacheView, every: list[NamespaceBody] | None
) -> CacheStateBody:
    return body_of(
        CacheStateBody,
        view,
        object="cache",
        model=model.id,
        namespace=namespace,
        namespaces=every,
        bytes=view.state,
        pinned_sessions=list(view.pinned),
        truncated=len(view.nodes) < view.num_nodes or view.is_disk_truncated,
        nodes=_edges(NodeBody, model, view.nodes),
        disk_nodes=_edges(DiskNodeBody, model, view.disk_nodes),
    )


def _namespace_body(view: NamespaceView, names: Mapping[str, str]) -> NamespaceBody:
    namespace, digest = client_namespace(view.namespace)
    # An adapter that was changed or is no longer served has only its digest.
    adapter = names.get(digest, digest) if digest is not None else None
    return body_of(NamespaceBody, view, namespace=namespace, adapter=adapter, bytes=view.state)


def _edges(kind: type[Edge], model: ServedModel, edges: Sequence[EdgeView]) -> list[Edge]:
    # Readings of the clock would reveal how many requests other clients made.
    ranks = {time: rank for rank, time in enumerate(sorted({edge.last_used for edge in edges}), 1)}
    return [
        body_of(kind, edge, last_used=ranks[edge.last_used], preview=model.preview(edge.first_tokens.tobytes()))
        for edge in edges
    ]


def _pinned(session_id: str, num_tokens: int) -> Response:
    return JsonBody(PinnedBody(id=session_id, object="session.pin", pinned=num_tokens > 0, pinned_tokens=num_tokens))


_QUERY = ("cache_salt", "namespace", "model")
ROUTES = (
    Endpoint("/sessions/{session_id:path}/pin", pin_session, Operation(answer=PinnedBody, query=_QUERY), ["POST"]),
    Endpoint(
        "/sessions/{session_id:path}/unpin", unpin_session, Operation(answer=PinnedBody, query=_QUERY), ["POST"]
    ),
    Endpoint("/cache", get_cache, Operation(answer=CacheStateBody, query=(*_QUERY, "limit"))),
    Endpoint("/cache/edges/{edge_id}", get_edge, Operation(answer=CacheEdgeBody, query=_QUERY)),
    Endpoint("/cache/clear", clear_cache, Operation(answer=ClearedBody, query=_QUERY), ["POST"]),
)
