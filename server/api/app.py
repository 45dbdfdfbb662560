"""Puts routes, layers and shared state together."""

import asyncio
import socket
from collections.abc import Sequence
from functools import lru_cache, partial
from importlib import metadata
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from server.api.admin import cache, models, state
from server.api.admin.console import PAGE_ROUTES
from server.api.anthropic.api import ANTHROPIC
from server.api.decisions.api import DECISIONS, SYSTEM_ONE
from server.api.dialect import ApiContext, Dialect, Endpoint, find_dialect, routes_of, with_and_without_v1
from server.api.guard import ErrorBoundary, cross_origin_layer, raise_http_error
from server.api.llama_cpp.api import LLAMA_CPP
from server.api.observe import Tracing
from server.api.ollama.api import OLLAMA
from server.api.openai.api import OPENAI
from server.api.openapi import describe
from server.api.responses.api import RESPONSES
from server.api.wire import JsonBody
from server.app.config import ServerConfig
from server.app.keys import KeyRing, read_keys
from server.pool.pool import ModelPool

APIS = (OPENAI, ANTHROPIC, OLLAMA, LLAMA_CPP, RESPONSES, SYSTEM_ONE, DECISIONS)
"""The first one also answers paths of none."""


async def openapi(request: Request) -> Response:
    """Describes all of these paths."""
    return JsonBody(await asyncio.to_thread(request.app.state.describe))


ADMIN_ROUTES = (
    *with_and_without_v1((*state.V1_ROUTES, *models.V1_ROUTES, *cache.ROUTES)),
    Endpoint("/openapi.json", openapi),
    *state.ROUTES,
)


def create_pool_app(
    pool: ModelPool, config: ServerConfig, apis: Sequence[Dialect] = APIS, keys: KeyRing | None = None
) -> Starlette:
    """The application that serves `pool`; `app.state.api` is its `ApiContext`."""
    name = config.name or socket.gethostname()
    layers = [Middleware(ErrorBoundary, find_dialect=partial(find_dialect, apis), server_name=name)]
    if config.cors:
        layers.insert(0, cross_origin_layer(config.cors))
    routes = [*(PAGE_ROUTES if config.console else ()), *routes_of(apis), *ADMIN_ROUTES]
    app = Starlette(routes=routes, middleware=layers, exception_handlers={HTTPException: raise_http_error})
    # Making the document takes a fifth of a second, and few clients ask for it.
    app.state.describe = lru_cache(maxsize=1)(partial(openapi_document, apis))
    context = app.state.api = ApiContext(config, pool, read_keys(config) if keys is None else keys)
    if config.console:
        context.subscribers.append(partial(cache.sample_tree, context))
    if config.otlp is not None:
        context.tracing = Tracing(config.otlp, name)
        context.subscribers.append(context.tracing.tell)
    pool.budgets.on_given_up = context.conversations.note_unloaded
    pool.on_change = context.activity.note_model
    return app


def openapi_document(apis: Sequence[Dialect]) -> dict[str, Any]:
    """The document of `/openapi.json`."""
    routes = (route for one in apis for route in one.routes)
    return describe([*routes, *ADMIN_ROUTES], metadata.version("mlx-serve"))


def start_draining(app: Starlette) -> None:
    """Refuses new requests from now on, on the event loop. Running answers go on."""
    app.state.api.is_draining = True
    app.state.api.activity.log.close()
