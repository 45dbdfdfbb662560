"""`GET /v1/models` and `GET /v1/models/{id}` as Anthropic lists them, for requests with `anthropic-version`."""

from datetime import UTC, datetime
from typing import Literal, TypedDict

from starlette.requests import Request
from starlette.responses import Response

from server.api.context import ServedModel, context_of
from server.api.json_body import JsonBody


class ModelInfoBody(TypedDict):
    """One served model."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    """RFC 3339."""
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int


class ModelPage(TypedDict):
    """All served models, on one page."""

    data: list[ModelInfoBody]
    has_more: bool
    first_id: str | None
    last_id: str | None


async def list_models(request: Request) -> Response:
    """Lists the models that requests may name. All are on one page, whatever `limit` says."""
    models = [_body(model) for model in context_of(request).models.values()]
    first, last = (models[0]["id"], models[-1]["id"]) if models else (None, None)
    page: ModelPage = {"data": models, "has_more": False, "first_id": first, "last_id": last}
    return JsonBody(page)


async def get_model(request: Request) -> Response:
    """Describes one model; its id may hold slashes. Without an id, only a slash, it is the list."""
    model_id = request.path_params["model_id"]
    return JsonBody(_body(context_of(request).find_model(model_id))) if model_id else await list_models(request)


def _body(model: ServedModel) -> ModelInfoBody:
    return {
        "type": "model",
        "id": model.id,
        "display_name": model.id,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": model.context_tokens - 1,
        "max_tokens": model.context_tokens - 1,
    }
