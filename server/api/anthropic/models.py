"""`GET /v1/models` and `GET /v1/models/{id}` as Anthropic lists them, for requests with `anthropic-version`."""

import asyncio
from datetime import UTC, datetime
from typing import Literal, TypedDict

from starlette.requests import Request
from starlette.responses import Response

from server.api.context import ListedModel, context_of
from server.api.json_body import JsonBody


class ModelInfoBody(TypedDict):
    """One model that requests may name."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    """RFC 3339."""
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int


class ModelPage(TypedDict):
    """All models that requests may name, on one page."""

    data: list[ModelInfoBody]
    has_more: bool
    first_id: str | None
    last_id: str | None


async def list_models(request: Request) -> Response:
    """Lists the models that requests may name. All are on one page, whatever `limit` says."""
    models = [_body(model) for model in await asyncio.to_thread(context_of(request).pool.listed)]
    first, last = (models[0]["id"], models[-1]["id"]) if models else (None, None)
    page: ModelPage = {"data": models, "has_more": False, "first_id": first, "last_id": last}
    return JsonBody(page)


async def get_model(request: Request) -> Response:
    """Describes one model; its id may hold slashes. Without an id, only a slash, it is the list."""
    model_id = request.path_params["model_id"]
    if not model_id:
        return await list_models(request)
    return JsonBody(_body(await asyncio.to_thread(context_of(request).pool.describe, model_id)))


def _body(model: ListedModel) -> ModelInfoBody:
    max_tokens = max((model.context_tokens or 0) - 1, 0)
    return {
        "type": "model",
        "id": model.id,
        "display_name": model.id,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": max_tokens,
        "max_tokens": max_tokens,
    }
