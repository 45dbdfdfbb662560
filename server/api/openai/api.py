"""The paths of OpenAI's dialect, LM Studio's included."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from server.api import PRODUCT
from server.api.dialect import Dialect, Endpoint, Operation, context_of, with_and_without_v1
from server.api.openai.generate import (
    ChatChunk,
    ChatCompletion,
    CompletionBody,
    TextCompletion,
    create_chat_completion,
    create_completion,
)
from server.api.openai.types import ChatBody
from server.api.openai.vectors import ROUTES
from server.api.wire import JsonBody, body_of
from server.pool.served import ListedModel


class ModelBody(TypedDict):
    """One model that requests may name."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    """The model without an adapter."""
    parent: str | None
    loaded: bool
    """Otherwise the first request that names it loads it."""
    context_length: int | None
    tool_calls: str | None
    """None until loaded."""
    max_model_len: int | None
    """Other servers' name of the same number."""


class ModelList(TypedDict):
    """All models that requests may name."""

    object: str
    data: list[ModelBody]


class LmStudioModel(TypedDict):
    """One model in LM Studio's words."""

    type: str
    publisher: str
    key: str
    display_name: str
    architecture: str
    quantization: dict[str, Any] | None
    size_bytes: int
    params_string: str | None
    loaded_instances: list[dict[str, Any]]
    max_context_length: int | None
    format: str
    capabilities: dict[str, bool]
    description: str | None


class LmStudioModels(TypedDict):
    """All models in LM Studio's words."""

    models: list[LmStudioModel]


async def list_models_as_lm_studio(request: Request) -> Response:
    """Lists the models as LM Studio does."""
    listed = await asyncio.to_thread(context_of(request).pool.listed)
    return JsonBody(LmStudioModels(models=list(map(_lm_studio_model, listed))))


async def list_models(request: Request) -> Response:
    """Lists the models that requests may name."""
    listed = await asyncio.to_thread(context_of(request).pool.listed)
    return JsonBody(ModelList(object="list", data=list(map(_body, listed))))


async def get_model(request: Request) -> Response:
    """Describes one model, whose id may hold slashes; without an id, lists all."""
    model_id = request.path_params["model_id"]
    if not model_id:
        return await list_models(request)
    return JsonBody(_body(await asyncio.to_thread(context_of(request).pool.describe, model_id)))


def _body(model: ListedModel) -> ModelBody:
    return body_of(
        ModelBody,
        model,
        object="model",
        owned_by=PRODUCT,
        root=model.parent_id or model.id,
        parent=model.parent_id,
        loaded=model.served is not None,
        context_length=model.context_tokens,
        tool_calls=None if model.served is None else model.served.tool_calls,
        max_model_len=model.context_tokens,
    )


def _lm_studio_model(model: ListedModel) -> LmStudioModel:
    facts, publisher, name = model.facts, *model.id.rpartition("/")[::2]
    bits = facts.weight_format.removesuffix("-bit")
    config = {"context_length": model.context_tokens}
    return {
        "type": "llm",
        "publisher": publisher,
        "key": model.id,
        "display_name": name,
        "architecture": facts.architecture,
        "quantization": {"name": f"{bits}bit", "bits_per_weight": int(bits)} if bits.isdecimal() else None,
        "size_bytes": facts.stored_bytes,
        "params_string": f"{facts.num_parameters / 10**9:.2g}B" if facts.num_parameters else None,
        "loaded_instances": [] if model.served is None else [{"id": model.id, "config": config}],
        "max_context_length": model.context_tokens,
        "format": "mlx",
        "capabilities": {
            "vision": False,
            "trained_for_tool_use": model.served is not None and model.served.tool_calls == "parsed",
        },
        "description": None,
    }


_ROUTES = (
    *ROUTES,
    Endpoint("/chat/completions", create_chat_completion, Operation(ChatBody, ChatCompletion, ChatChunk)),
    Endpoint("/completions", create_completion, Operation(CompletionBody, TextCompletion, TextCompletion)),
    Endpoint("/models", list_models, Operation(answer=ModelList)),
    Endpoint("/models/{model_id:path}", get_model, Operation(answer=ModelBody)),
)
_LM_STUDIO = Endpoint("/api/v1/models", list_models_as_lm_studio, Operation(answer=LmStudioModels))
OPENAI = Dialect((*with_and_without_v1(_ROUTES), _LM_STUDIO))
