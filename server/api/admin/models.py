"""`POST /v1/models/load` and `/v1/models/unload`: brings a model into memory, or frees what it takes."""

import asyncio
from typing import TypedDict

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from server.api.auth import is_owner
from server.api.body import parse_object, read_body
from server.api.context import ApiContext, context_of
from server.api.errors import ApiError, Code, stopped
from server.api.json_body import JsonBody
from server.api.typed_body import BodyModel, parse_body
from server.pool.names import ModelSource


class ModelNameBody(BodyModel):
    """Names a model."""

    model: str = Field(min_length=1)


class ModelStateBody(TypedDict):
    """A model, and whether it is in memory now."""

    id: str
    object: str
    loaded: bool
    changed: bool
    """Whether this request made it so."""


async def load_model(request: Request) -> Response:
    """Answers once the model is loaded; raises ApiError (403, 404, 503)."""
    context, source = await _asked(request)
    was_loaded = source.id in context.models
    (await context.pool.load(source)).close()
    return _state(source, is_loaded=True, has_changed=not was_loaded)


async def unload_model(request: Request) -> Response:
    """Answers once the model is unloaded; raises ApiError (403, 404), and 409 while it answers requests."""
    context, source = await _asked(request)
    return _state(source, is_loaded=False, has_changed=await context.pool.unload(source))


async def _asked(request: Request) -> tuple[ApiContext, ModelSource]:
    """Returns the model that the body names, for the owner of the server."""
    context = context_of(request)
    if not is_owner(request, context.config):
        message = (
            "only who runs the server loads and unloads models by hand: on its own machine, or by an operator's key"
        )
        raise ApiError(Code.OPERATOR_ONLY, message)
    fields, _ = parse_object(await read_body(request, context.config.max_body_bytes))
    name = parse_body(ModelNameBody, dict(fields), {}).model
    if context.is_draining:
        raise stopped()
    return context, await asyncio.to_thread(context.pool.source_of, name)


def _state(source: ModelSource, *, is_loaded: bool, has_changed: bool) -> Response:
    body: ModelStateBody = {"id": source.id, "object": "model.state", "loaded": is_loaded, "changed": has_changed}
    return JsonBody(body)
