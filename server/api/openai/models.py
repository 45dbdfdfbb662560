"""`GET /v1/models` and `GET /v1/models/{id}`: which models requests may name."""

import asyncio
from typing import TypedDict

from starlette.requests import Request
from starlette.responses import Response

from server.api import PRODUCT
from server.api.context import ListedModel, context_of
from server.api.json_body import JsonBody


class ModelBody(TypedDict):
    """One model that requests may name."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    """The model whose weights it has: itself, unless it is one with an adapter."""
    parent: str | None
    """That model, for one with an adapter."""
    loaded: bool
    """Whether it is in memory; if not, the first request that names it has it loaded."""
    context_length: int | None
    tool_calls: str | None
    """None while it is not loaded."""
    max_model_len: int | None
    """The same number under the name that other servers have for it."""


class ModelList(TypedDict):
    """All models that requests may name."""

    object: str
    data: list[ModelBody]


async def list_models(request: Request) -> Response:
    """Lists the models that requests may name."""
    listed = await asyncio.to_thread(context_of(request).pool.listed)
    body: ModelList = {"object": "list", "data": [_body(model) for model in listed]}
    return JsonBody(body)


async def get_model(request: Request) -> Response:
    """Describes one model; its id may hold slashes. Without an id, only a slash, it is the list."""
    model_id = request.path_params["model_id"]
    if not model_id:
        return await list_models(request)
    return JsonBody(_body(await asyncio.to_thread(context_of(request).pool.describe, model_id)))


def _body(model: ListedModel) -> ModelBody:
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": PRODUCT,
        "root": model.parent_id or model.id,
        "parent": model.parent_id,
        "loaded": model.served is not None,
        "context_length": model.context_tokens,
        "tool_calls": None if model.served is None else model.served.tool_calls,
        "max_model_len": model.context_tokens,
    }
