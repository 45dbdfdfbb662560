"""Models by hand: which can be pulled and fit this machine; loading, unloading and deleting them."""

import asyncio
import os

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from models import names
from models.errors import ModelError
from models.store import library
from server.api.admin.state import DeletedBody
from server.api.bodies import BodyModel
from server.api.dialect import ApiContext, Endpoint, Operation, context_of
from server.api.errors import ApiError, Code, stopped
from server.api.guard import check_owner, read_owners_body
from server.api.wire import JsonBody
from server.app.memory_budget import comfortable_weights_bytes, find_user, largest_weights_bytes, this_machine
from server.pool.names import ModelInUse, ModelSource


class LibraryModel(TypedDict):
    """A model that can be pulled."""

    id: str
    repository: str
    size_bytes: int
    """Estimated, of the weights."""


class LibraryBody(TypedDict):
    """Models with short names, and what weights may take on this machine."""

    object: str
    data: list[LibraryModel]
    comfortable_bytes: int
    """Larger weights leave little memory for conversations."""
    largest_bytes: int
    """Larger weights cannot be loaded."""


async def list_library(request: Request) -> Response:
    """Lists the models that can be pulled by a short name."""
    machine, once = await asyncio.to_thread(this_machine), dict[str, LibraryModel]()
    for one in names.SHORT_NAMES.values():
        entry = LibraryModel(id=one.name, repository=one.repository, size_bytes=one.num_bytes)
        once.setdefault(one.repository, entry)
    largest, comfortable = largest_weights_bytes(machine), comfortable_weights_bytes(machine)
    body = LibraryBody(object="list", data=[*once.values()], comfortable_bytes=comfortable, largest_bytes=largest)
    return JsonBody(body)


class ModelNameBody(BodyModel):
    """Names a model."""

    model: str = Field(min_length=1)


class ModelStateBody(TypedDict):
    """A model's state."""

    id: str
    object: str
    loaded: bool
    changed: bool


async def load_model(request: Request) -> Response:
    """Loads a model; raises ApiError (403, 404, 503)."""
    context, source = await _asked(request)
    was_loaded = source.id in context.pool.engines
    (await context.pool.load(source)).close()
    return _state(source, is_loaded=True, has_changed=not was_loaded)


async def unload_model(request: Request) -> Response:
    """Unloads a model; raises ApiError (403, 404), and 409 while it answers requests."""
    context, source = await _asked(request)
    return _state(source, is_loaded=False, has_changed=await context.pool.unload(source))


async def _asked(request: Request) -> tuple[ApiContext, ModelSource]:
    context = context_of(request)
    name = (await read_owners_body(request, ModelNameBody, {}, "loads and unloads models by hand")).model
    if context.is_draining:
        raise stopped()
    return context, await asyncio.to_thread(context.pool.source_of, name)


def _state(source: ModelSource, *, is_loaded: bool, has_changed: bool) -> Response:
    return JsonBody(ModelStateBody(id=source.id, object="model.state", loaded=is_loaded, changed=has_changed))


async def delete_model(request: Request) -> Response:
    """Removes a name of the user's, or deletes a download; raises ApiError (400, 403, 404, 409)."""
    check_owner(request, "deletes models")
    context, name = context_of(request), request.path_params["model_id"]
    source = await asyncio.to_thread(context.pool.source_of, name)
    try:
        await asyncio.to_thread(_delete, context, name, source)
    except ModelError as error:
        raise ApiError(Code.INVALID_VALUE, str(error), "model_id") from error
    return JsonBody(DeletedBody(id=source.name, object="model", deleted=True))


def _delete(context: ApiContext, name: str, source: ModelSource) -> None:
    """Raises ModelError, ApiError and ModelInUse."""
    stored = names.find_stored(name)
    # The command line's folder, or an alias, of the same name stands before it.
    if stored is not None and source.label == stored.short_name:
        library.remove(name)
        return
    place = names.installed_place(name)
    # An alias, or the id of a folder, may read as the name of a download that nobody means.
    is_meant = source.name == name and os.path.realpath(names.files_of(place)) == os.path.realpath(source.path)
    if place.kind != "repository" or not is_meant:
        raise ApiError(
            Code.INVALID_VALUE, f"{name} is neither a name of your own nor a download, and stays", "model_id"
        )
    if source.id in context.pool.loaded or source.id in context.pool.loading:
        raise ModelInUse(f"{source.name} is loaded; unload it first")
    if (draft := context.config.draft_model) is not None and names.stands_for(draft, place):
        raise ModelInUse(f"{source.name} drafts for others here (--speculate), and stays")
    if user := find_user(place):
        raise ModelInUse(f"{source.name} is in use by the server at {user.url}, and stays")
    library.delete(library.find_removal(place))


V1_ROUTES = (
    Endpoint("/library", list_library, Operation(answer=LibraryBody)),
    Endpoint("/models/load", load_model, Operation(ModelNameBody, ModelStateBody)),
    Endpoint("/models/unload", unload_model, Operation(ModelNameBody, ModelStateBody)),
    Endpoint("/models/{model_id:path}", delete_model, Operation(answer=DeletedBody), ["DELETE"]),
)
