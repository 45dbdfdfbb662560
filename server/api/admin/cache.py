"""`/v1/cache`: lists, clears, pins and primes the state of a namespace.

A path reads and changes one namespace: the one of the request's key and of its `?cache_salt=`. The owner of the
server may name another with `?namespace=`, and sees the sums of all. `?model=` names one of several models. Edges
keep their numbers while they exist.

`POST /v1/cache/prime` evaluates a prefix for later requests, and generates nothing. A conversation is rendered
without a generation prompt, and only as far as no later message can change its tokens: an answer follows a user's or
tool's message, a user's message follows any other.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from cache.budget import PinLimit
from cache.disk.index import DiskWrites
from cache.snapshots import RestorePointKind
from cache.views import CacheView, DiskNodeView, EdgeDetail, EdgeView, NamespaceView, NodeView, StateBytes
from models.adapter import client_namespace
from server.api.answer import Answer, Exchange, Question
from server.api.call import generate
from server.api.context import ApiContext, context_of
from server.api.conversation import cut_at_last_point
from server.api.dialect import Payload, parse_body
from server.api.errors import ApiError, Code
from server.api.guard import is_owner, namespace_of, visible_namespace
from server.api.openai.chat import read_conversation
from server.api.openai.completions import CompletionBody, text_prompt
from server.api.openai.fields import IN_CHAT_PRIME, IN_TEXT_PRIME
from server.api.openai.params import read_params
from server.api.openai.types import ChatBody
from server.api.params import Incoming, build_request
from server.api.wire import JsonBody
from server.engine.commands import (
    ClearCache,
    DescribeCache,
    DescribeEdge,
    Freed,
    ListNamespaces,
    PinSession,
    UnpinSession,
)
from server.engine.request import Finished
from server.pool.errors import ModelNotLoaded
from server.pool.names import ModelSource
from server.pool.served import EnginePort, ServedModel

MAX_NODES = 256
MAX_NODES_LIMIT = 10_000
MAX_EDGE_TOKENS = 1024
"""Tokens of one edge shown as text, at most."""
MAX_DIGITS = 18


class CacheBytesBody(TypedDict):
    """Bytes by what they hold."""

    span: int
    window: int
    point: int
    live: int
    disk: int


class EdgeBody(TypedDict):
    """What an edge in memory and one on disk have in common."""

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


class DiskWritesBody(TypedDict):
    """What was written to disk in the current day."""

    today_bytes: int
    budget_bytes: int | None


class NamespaceBody(TypedDict):
    """What one namespace holds of a model, or of one of its adapters."""

    namespace: str
    adapter: str | None
    """The adapter's name; its digest if no adapter has this digest any more."""
    num_nodes: int
    num_tokens: int
    num_disk_nodes: int
    bytes: CacheBytesBody


class CacheStateBody(TypedDict):
    """What is held for one namespace; for the owner of the server, also the sums of all."""

    object: str
    model: str
    namespace: str
    namespaces: list[NamespaceBody] | None
    budget_bytes: int
    bytes: CacheBytesBody
    disk_writes: DiskWritesBody | None
    evictions: int
    pinned_sessions: list[str]
    num_nodes: int
    num_tokens: int
    num_disk_nodes: int
    truncated: bool
    nodes: list[NodeBody]
    disk_nodes: list[DiskNodeBody]


class CacheEdgeBody(TypedDict):
    """One edge in memory, looked at closely."""

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
    """Time to evaluate the edge's tokens again; None until a long prompt was evaluated."""


class ClearedBody(TypedDict):
    """What was freed."""

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
    """Describes what is held for the request's namespace; `?limit=` bounds the edges that are listed."""
    model, engine = _model_and_engine(request)
    namespace = _namespace(request)
    view: CacheView = await engine.execute(DescribeCache(model.state_namespace(namespace), _limit(request)))
    is_of_all = is_owner(request, context_of(request).config) and "cache_salt" not in request.query_params
    every: list[NamespaceView] | None = await engine.execute(ListNamespaces()) if is_of_all else None
    names = {one.adapter.digest: one.id for one in context_of(request).pool.served if one.adapter is not None}
    # Writing a large tree takes a while, which must not block the event loop.
    return await asyncio.to_thread(_state_response, model, namespace, view, _namespace_bodies(every, names))


def _state_response(
    model: ServedModel, namespace: str, view: CacheView, every: list[NamespaceBody] | None
) -> Response:
    return JsonBody(_state_body(model, namespace, view, every))


async def get_edge(request: Request) -> Response:
    """Describes one edge in memory; raises ApiError (404) where it is there no more."""
    model, engine = _model_and_engine(request)
    given = request.path_params["edge_id"]
    number = int(given) if given.isascii() and given.isdecimal() and len(given) <= MAX_DIGITS else -1
    namespace = model.state_namespace(_namespace(request))
    edge: EdgeDetail | None = await engine.execute(DescribeEdge(namespace, number, MAX_EDGE_TOKENS))
    if edge is None:
        raise ApiError(Code.EDGE_NOT_FOUND, f"there is no edge {given[:32]!r}; it may have been joined or evicted")
    num_tokens = edge.stop - edge.start
    body: CacheEdgeBody = {
        "object": "cache.edge",
        "id": number,
        "model": model.id,
        "start": edge.start,
        "stop": edge.stop,
        "tokens": num_tokens,
        "text": await asyncio.to_thread(model.token_texts.text, edge.first_tokens.tolist()),
        "truncated": num_tokens > len(edge.first_tokens),
        "uses": edge.num_uses,
        "sessions": edge.sessions,
        "seconds": context_of(request).activity.pace.seconds(model.id, num_tokens),
    }
    return JsonBody(body)


async def clear_cache(request: Request) -> Response:
    """Forgets what is held for the request's namespace, but for what running requests use."""
    namespace = _namespace(request)
    try:
        model, engine = _model_and_engine(request)
    except ModelNotLoaded as error:
        return _clear_unloaded(request, error.source, namespace)
    freed: Freed = await engine.execute(ClearCache(model.state_namespace(namespace)))
    context_of(request).conversations.note_cleared(namespace)
    return _cleared(model.id, freed)


def _clear_unloaded(request: Request, source: ModelSource, namespace: str) -> Response:
    """Clears the memory state of a model that is not loaded; only a running engine reads and changes the disk."""
    context = context_of(request)
    if context.config.cache_disk_bytes is not None:
        raise ModelNotLoaded(source)
    if source.adapter is not None:
        # The states of an adapter are known only once the adapter is loaded.
        raise ModelNotLoaded(source)
    num_tokens, num_bytes = context.pool.forget_unloaded(source, namespace)
    context.conversations.note_cleared(namespace)
    return _cleared(source.id, Freed(num_tokens, num_bytes, 0))


def _cleared(model_id: str, freed: Freed) -> Response:
    body: ClearedBody = {
        "object": "cache.cleared",
        "model": model_id,
        "freed_tokens": freed.num_tokens,
        "freed_bytes": freed.memory_bytes,
        "freed_disk_bytes": freed.disk_bytes,
    }
    return JsonBody(body)


async def pin_session(request: Request) -> Response:
    """Keeps a session's state from being evicted; raises ApiError (404, 409)."""
    model, engine = _model_and_engine(request)
    session_id = request.path_params["session_id"]
    try:
        num_tokens: int = await engine.execute(PinSession(model.state_namespace(_namespace(request)), session_id))
    except PinLimit as error:
        raise ApiError(Code.PIN_LIMIT, str(error)) from error
    if not num_tokens:
        message = f"nothing is held of a session {session_id[:256]!r}"
        raise ApiError(Code.SESSION_NOT_FOUND, message, "session_id")
    return _pinned(session_id, num_tokens)


async def unpin_session(request: Request) -> Response:
    """Ends a session's pin; raises ApiError (404) where there is none."""
    model, engine = _model_and_engine(request)
    session_id = request.path_params["session_id"]
    if not await engine.execute(UnpinSession(model.state_namespace(_namespace(request)), session_id)):
        raise ApiError(Code.SESSION_NOT_FOUND, f"no session {session_id[:256]!r} is pinned", "session_id")
    return _pinned(session_id, 0)


def _model_and_engine(request: Request) -> tuple[ServedModel, EnginePort]:
    context = context_of(request)
    model = context.find_model(request.query_params.get("model"))
    return model, context.engines[model.base_id]


def _namespace(request: Request) -> str:
    return visible_namespace(request, context_of(request).config)


def _limit(request: Request) -> int:
    given = request.query_params.get("limit", str(MAX_NODES))
    if not given.isascii() or not given.isdecimal() or len(given) > 9 or int(given) > MAX_NODES_LIMIT:
        raise ApiError(Code.INVALID_VALUE, f"limit: must be a number from 0 to {MAX_NODES_LIMIT}", "limit")
    return int(given)


def _state_body(
    model: ServedModel, namespace: str, view: CacheView, every: list[NamespaceBody] | None
) -> CacheStateBody:
    previews, disk_previews = (
        model.previews.texts(edge.first_tokens for edge in edges) for edges in (view.nodes, view.disk_nodes)
    )
    order, disk_order = _ranks(view.nodes), _ranks(view.disk_nodes)
    return {
        "object": "cache",
        "model": model.id,
        "namespace": namespace,
        "namespaces": every,
        "budget_bytes": view.budget_bytes,
        "bytes": _bytes_body(view.state),
        "disk_writes": _writes_body(view.disk_writes),
        "evictions": view.num_evictions,
        "pinned_sessions": list(view.pinned),
        "num_nodes": view.num_nodes,
        "num_tokens": view.num_tokens,
        "num_disk_nodes": view.num_disk_nodes,
        "truncated": len(view.nodes) < view.num_nodes or view.is_disk_truncated,
        "nodes": [
            _node_body(node, order[node.last_used], text) for node, text in zip(view.nodes, previews, strict=True)
        ],
        "disk_nodes": [
            _disk_node_body(node, disk_order[node.last_used], text)
            for node, text in zip(view.disk_nodes, disk_previews, strict=True)
        ],
    }


def _namespace_bodies(every: Sequence[NamespaceView] | None, names: Mapping[str, str]) -> list[NamespaceBody] | None:
    """Returns what each namespace holds; `names` maps digests of adapters to their names."""
    return None if every is None else [_namespace_body(one, names) for one in every]


def _namespace_body(view: NamespaceView, names: Mapping[str, str]) -> NamespaceBody:
    namespace, digest = client_namespace(view.namespace)
    return {
        "namespace": namespace,
        # An adapter that was changed or is no longer served has only its digest.
        "adapter": names.get(digest, digest) if digest is not None else None,
        "num_nodes": view.num_nodes,
        "num_tokens": view.num_tokens,
        "num_disk_nodes": view.num_disk_nodes,
        "bytes": _bytes_body(view.state),
    }


def _ranks(nodes: Iterable[EdgeView]) -> dict[int, int]:
    """Returns the rank of each clock reading. The readings would reveal how many requests other clients made."""
    return {time: rank for rank, time in enumerate(sorted({node.last_used for node in nodes}), 1)}


def _bytes_body(state: StateBytes) -> CacheBytesBody:
    return {
        "span": state.span,
        "window": state.window,
        "point": state.recurrent,
        "live": state.live,
        "disk": state.disk,
    }


def _writes_body(writes: DiskWrites | None) -> DiskWritesBody | None:
    if writes is None:
        return None
    return {"today_bytes": writes.today_bytes, "budget_bytes": writes.budget_bytes}


def _edge_body(edge: EdgeView, last_used: int, preview: str) -> EdgeBody:
    return {
        "id": edge.number,
        "parent": edge.parent,
        "start": edge.start,
        "stop": edge.stop,
        "tokens": edge.stop - edge.start,
        "last_used": last_used,
        "bytes": edge.num_bytes,
        "preview": preview,
    }


def _node_body(node: NodeView, last_used: int, preview: str) -> NodeBody:
    return {
        **_edge_body(node, last_used, preview),
        "tier": "live" if node.is_live else "memory",
        "restore_point": node.kind.value if node.kind is not None else None,
        "explicit": node.is_explicit,
        "pinned": node.is_pinned,
        "uses": node.num_uses,
        "disk_tokens": node.disk_tokens,
    }


def _disk_node_body(node: DiskNodeView, last_used: int, preview: str) -> DiskNodeBody:
    return {
        **_edge_body(node, last_used, preview),
        "snapshot": node.has_snapshot,
        "memory_tokens": node.memory_tokens,
        "memory_id": node.memory_number,
    }


def _pinned(session_id: str, num_tokens: int) -> Response:
    body: PinnedBody = {
        "id": session_id,
        "object": "session.pin",
        "pinned": num_tokens > 0,
        "pinned_tokens": num_tokens,
    }
    return JsonBody(body)


class PrimedBody(TypedDict):
    """What priming cost."""

    id: str
    object: str
    model: str
    session_id: str | None
    tokens: int
    cached_tokens: int
    evaluated_tokens: int
    ms: float


async def prime_cache(request: Request) -> Response:
    """Evaluates a prefix. A client that leaves ends it; what was computed until then stays."""
    return await generate(request, "prime-", open_prime, may_stream=False)


def open_prime(context: ApiContext, incoming: Incoming) -> Exchange:
    """Returns the checked request; raises ApiError and the renderer's errors."""
    is_chat = "messages" in incoming.fields
    if is_chat == ("prompt" in incoming.fields):
        raise ApiError(Code.MISSING_PARAMETER, "messages: send either messages or a prompt to prime", "messages")
    rules = IN_CHAT_PRIME if is_chat else IN_TEXT_PRIME
    kind: type[ChatBody | CompletionBody] = ChatBody if is_chat else CompletionBody
    body = parse_body(kind, dict(incoming.fields), rules)
    model = context.find_model(body.model)
    namespace = namespace_of(incoming.http, body.cache_salt)
    if isinstance(body, ChatBody):
        prefix = read_conversation(body, incoming, model, context.config, namespace).stable_prefix()
    else:
        if len(body.prompt) != 1:
            raise ApiError(Code.INVALID_VALUE, "prompt: one prompt is primed at a time", "prompt")
        prefix = cut_at_last_point(text_prompt(body.prompt[0], model), (RestorePointKind.PROMPT_END,))
    place = "messages" if is_chat else "prompt"
    params = replace(read_params(body, model), max_tokens=0, prompt_param=place)
    return PrimeExchange(Question(model, build_request(incoming, model, prefix, params, namespace), prefix))


class PrimeExchange(Exchange):
    """Writes what priming cost."""

    def frames(self, answer: Answer) -> AsyncIterator[bytes]:
        """Never called: a prime is not streamed."""
        raise NotImplementedError

    async def body(self, answer: Answer) -> Payload:
        """Returns the body of the answer."""
        async for event in answer.events():
            if isinstance(event, Finished):
                return self._body(event)
        raise AssertionError("the events of a request end with Finished")

    def _body(self, finished: Finished) -> PrimedBody:
        return {
            "id": self.request.request_id,
            "object": "cache.prime",
            "model": self.model.id,
            "session_id": self.request.session_id,
            "tokens": finished.prompt_tokens,
            "cached_tokens": finished.timings.cache_tokens,
            "evaluated_tokens": finished.timings.evaluated_tokens,
            "ms": finished.timings.prompt_ms,
        }
