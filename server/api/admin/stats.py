"""`GET /v1/stats`: what the server is doing and what it has saved, in one object, without waiting for any worker.

A request sees the requests and sums of its own namespace; who owns the server (see `server.api.auth.is_owner`) sees
those of all, or of the one that `?namespace=` names. What models do is the same for everybody.
"""

import time
from importlib import metadata
from typing import TypedDict

from starlette.requests import Request
from starlette.responses import Response

from server.api.admin.health import CacheCountsBody, cache_counts, status_of
from server.api.auth import listed_namespace
from server.api.context import ApiContext, context_of
from server.api.json_body import JsonBody
from server.api.live.activity import OpenRequest
from server.api.live.totals import Sums
from server.engine.request import EngineStats


class SlotCountsBody(TypedDict):
    """Slots of one model by what they do."""

    total: int
    prefilling: int
    decoding: int
    idle: int


class MovedBody(TypedDict):
    """What of a model's state was moved since it was loaded."""

    page_ins: int
    page_outs: int
    disk_written_bytes: int
    disk_read_bytes: int


class ModelStatsBody(TypedDict):
    """What one loaded model does and holds, for all namespaces together."""

    id: str
    waiting: int
    open_requests: int
    preemptions: int
    slots: SlotCountsBody
    cache: CacheCountsBody
    moved: MovedBody
    disk_budget_bytes: int | None


class LoadingBody(TypedDict):
    """A model on its way, and what is being done."""

    id: str
    step: str


class OpenRequestBody(TypedDict):
    """A request that has not ended."""

    id: str
    model: str
    endpoint: str
    namespace: str
    key: str | None
    session_id: str | None
    phase: str
    """`waiting`, `prefill` or `decode`."""
    slot: int | None
    received: float
    """Seconds since 1970."""
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    evaluated_tokens: int
    completion_tokens: int
    tier: str | None


class RestoredBody(TypedDict):
    """Prompt tokens that were restored, by the tier in which their state was."""

    live: int
    memory: int
    disk: int


class LostBody(TypedDict):
    """How often and how many tokens were evaluated again, for one reason."""

    reason: str
    count: int
    tokens: int


class TotalsBody(TypedDict):
    """Sums of the requests that have ended since the server's start."""

    requests: int
    succeeded: int
    failed: int
    cancelled: int
    prompt_tokens: int
    cached_tokens: int
    evaluated_tokens: int
    completion_tokens: int
    lost_tokens: int
    saved_seconds: float
    restored_tokens: RestoredBody
    misses: list[LostBody]


class StatsBody(TypedDict):
    """What the server is doing."""

    object: str
    time: float
    """Seconds since 1970."""
    status: str
    version: str
    uptime_seconds: float
    scope: str
    """`all`, or `namespace` where requests, totals and sessions are those of one."""
    models: list[ModelStatsBody]
    loading: list[LoadingBody]
    requests: list[OpenRequestBody]
    totals: TotalsBody
    sessions: int


async def get_stats(request: Request) -> Response:
    """Answers at once, whatever the engines are doing."""
    context = context_of(request)
    namespace = listed_namespace(request, context.config)
    now = time.monotonic()
    sessions = context.sessions.all_sessions() if namespace is None else context.sessions.sessions(namespace)
    body: StatsBody = {
        "object": "stats",
        "time": round(time.time(), 3),
        "status": status_of(context),
        "version": metadata.version("mlx-serve"),
        "uptime_seconds": round(now - context.started, 1),
        "scope": "all" if namespace is None else "namespace",
        "models": [_model_body(context, model_id, one.stats()) for model_id, one in context.engines.items()],
        "loading": [{"id": model_id, "step": step} for model_id, step in context.pool.loading.items()],
        "requests": [_request_body(one, now) for one in context.activity.open_requests(namespace)],
        "totals": _totals_body(context.activity.totals.of(namespace)),
        "sessions": sum(1 for _ in sessions),
    }
    return JsonBody(body)


def _model_body(context: ApiContext, model_id: str, stats: EngineStats) -> ModelStatsBody:
    requests, moved, total = stats.requests, stats.cache.moved, context.config.slots
    busy = requests.prefilling + requests.decoding
    return {
        "id": model_id,
        "waiting": requests.waiting,
        "open_requests": stats.num_open,
        "preemptions": stats.num_preempted,
        "slots": {
            "total": total,
            "prefilling": requests.prefilling,
            "decoding": requests.decoding,
            "idle": max(total - busy, 0),
        },
        "cache": cache_counts(stats.cache),
        "moved": {
            "page_ins": moved.num_page_ins,
            "page_outs": moved.num_page_outs,
            "disk_written_bytes": moved.disk_written_bytes,
            "disk_read_bytes": moved.disk_read_bytes,
        },
        "disk_budget_bytes": context.config.cache_disk_bytes if stats.cache.keeps_on_disk else None,
    }


def _request_body(one: OpenRequest, now: float) -> OpenRequestBody:
    figures = one.figures
    started = figures.started
    return {
        "id": one.request.request_id,
        "model": one.model_id,
        "endpoint": one.endpoint,
        "namespace": one.request.namespace,
        "key": one.key_name,
        "session_id": one.session_id,
        "phase": one.phase,
        "slot": None if started is None else started.slot,
        "received": round(one.received_at, 3),
        "seconds": round(now - one.received, 3),
        "prompt_tokens": len(one.request.tokens),
        "cached_tokens": 0 if started is None else started.hit_tokens,
        "evaluated_tokens": figures.num_evaluated,
        "completion_tokens": figures.num_predicted,
        "tier": None if started is None else started.tier,
    }


def _totals_body(sums: Sums) -> TotalsBody:
    restored = sums.restored
    lost: list[LostBody] = [
        {"reason": reason, "count": one.count, "tokens": one.tokens} for reason, one in sums.lost.items()
    ]
    return {
        "requests": sums.requests,
        "succeeded": sums.succeeded,
        "failed": sums.failed,
        "cancelled": sums.cancelled,
        "prompt_tokens": sums.prompt_tokens,
        "cached_tokens": sums.cached_tokens,
        "evaluated_tokens": sums.evaluated_tokens,
        "completion_tokens": sums.completion_tokens,
        "lost_tokens": sum(one["tokens"] for one in lost),
        "saved_seconds": round(sums.saved_seconds, 3),
        "restored_tokens": {"live": restored["live"], "memory": restored["memory"], "disk": restored["disk"]},
        "misses": sorted(lost, key=lambda one: -one["tokens"]),
    }
