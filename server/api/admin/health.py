"""`GET /health` and `GET /ready`: whether requests are taken, answered at once, whatever the engine is doing.

`/ping` is another name of `/health`, and `GET /version` names the release, as vLLM has them.
"""

from importlib import metadata
from typing import NotRequired, TypedDict

from starlette.requests import Request
from starlette.responses import Response

from cache.journal import CacheStats
from server.api.auth import is_authorised
from server.api.context import ApiContext, context_of
from server.api.json_body import JsonBody
from server.engine.request import EngineStats


class RequestCountsBody(TypedDict):
    """Unfinished requests by phase."""

    waiting: int
    prefilling: int
    decoding: int


class CacheCountsBody(TypedDict):
    """What one engine's cache holds, of all namespaces together."""

    nodes: int
    stored_bytes: int
    live_bytes: int
    budget_bytes: int
    evictions: int
    keeps_on_disk: bool
    disk_bytes: int
    disk_files_gone: int


class EngineBody(TypedDict):
    """What one engine does and holds."""

    requests: RequestCountsBody
    preemptions: int
    cache: CacheCountsBody
    open_requests: int


class HealthBody(TypedDict):
    """The state of the server."""

    status: str
    """"ok", "draining" (running answers finish, new requests are refused) or "stopped"."""
    models: list[str]
    """Those that are loaded."""
    loading: list[str]
    """Those on their way."""
    engines: NotRequired[dict[str, EngineBody]]
    """Counters and gauges by model; shown to those who may send requests."""


class ReadyBody(TypedDict):
    """Whether one more request would be taken."""

    status: str
    """"ok", "full" (as many wait as may), "draining" or "stopped"."""


class ServerVersionBody(TypedDict):
    """The release of this server."""

    version: str


async def version(request: Request) -> Response:
    """Names the release of this server."""
    body: ServerVersionBody = {"version": metadata.version("mlx-serve")}
    return JsonBody(body)


async def health(request: Request) -> Response:
    """Answers with status 200 while requests are taken, else 503. Needs no key."""
    context = context_of(request)
    status = status_of(context)
    body: HealthBody = {"status": status, "models": list(context.models), "loading": list(context.pool.loading)}
    if is_authorised(request):
        body["engines"] = {model_id: _engine_body(engine.stats()) for model_id, engine in context.engines.items()}
    return JsonBody(body, status_code=200 if status == "ok" else 503)


async def ready(request: Request) -> Response:
    """Answers with status 200 if one more request would be taken now, by every model, else 503. Needs no key."""
    context = context_of(request)
    status = status_of(context)
    max_open = context.config.slots + context.config.max_waiting
    if status == "ok" and any(engine.stats().num_open >= max_open for engine in context.engines.values()):
        status = "full"
    body: ReadyBody = {"status": status}
    return JsonBody(body, status_code=200 if status == "ok" else 503)


def status_of(context: ApiContext) -> str:
    """Returns `ok`, `draining` or `stopped`."""
    if context.is_draining:
        return "draining"
    is_running = all(engine.is_running for engine in context.engines.values())
    return "ok" if is_running else "stopped"


def _engine_body(stats: EngineStats) -> EngineBody:
    requests = stats.requests
    return {
        "requests": {
            "waiting": requests.waiting,
            "prefilling": requests.prefilling,
            "decoding": requests.decoding,
        },
        "preemptions": stats.num_preempted,
        "cache": cache_counts(stats.cache),
        "open_requests": stats.num_open,
    }


def cache_counts(cache: CacheStats) -> CacheCountsBody:
    """Returns what a cache holds, as reports have it."""
    return {
        "nodes": cache.num_nodes,
        "stored_bytes": cache.stored_bytes,
        "live_bytes": cache.live_bytes,
        "budget_bytes": cache.budget_bytes,
        "evictions": cache.num_evictions,
        "keeps_on_disk": cache.keeps_on_disk,
        "disk_bytes": cache.disk_bytes,
        "disk_files_gone": cache.num_disk_files_gone,
    }
