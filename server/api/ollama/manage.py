"""Makes, copies, deletes and pulls models by name, for the owner of the server.

`POST /api/create` and `/api/copy` add names, `DELETE /api/delete` removes one, and `POST /api/pull` downloads a model
and reports progress in lines. A name is never taken for a path, creating and copying download nothing, and weights
are never deleted.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NotRequired, TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from models.errors import ModelError, ModelfileError, ModelNotFound, RepositoryNotFound, StoreError
from models.hub import PullChecking, PullEvent, PullPlanned, PullProgress, pull
from models.names import BUILT_IN, find_stored, folder_of, installed_place, parse_repository, shorten, suggest
from models.short_names import find_family, largest
from models.store import library
from models.store.library import Making, parse_free_name
from models.store.modelfile import parse_modelfile
from models.store.stored_model import ExampleMessage, StoredModel, WeightsPlace
from server.api.call import AnswerStream
from server.api.context import ApiContext, context_of
from server.api.dialect import Body, BodyModel, Rules, parse_body
from server.api.errors import ApiError, Code
from server.api.guard import is_owner
from server.api.ollama.dialect import OllamaDialect, line
from server.api.ollama.fields import IN_COPY, IN_CREATE, IN_DELETE, IN_PULL
from server.api.wire import JsonBody, parse_object, read_body
from server.app.config import ServerConfig
from server.app.memory_budget import comfortable_weights_bytes, largest_weights_bytes, this_machine
from server.app.pulls import Pulls
from server.pool.errors import ModelNameNeeded, ModelUnknown, PoolError
from server.pool.names import LATEST, ModelSource

Result = TypeVar("Result")

STEPS = ("reading model metadata", "creating system layer", "writing manifest", "success")
"""The steps reported while a model is made; clients show them."""


class CopyBody(BodyModel):
    """Body of `POST /api/copy`."""

    source: str
    destination: str


class DeleteBody(BodyModel):
    """Body of `DELETE /api/delete`."""

    model: str | None = None
    name: str | None = None
    """Older name of `model`."""


class FirstMessage(BodyModel):
    """A message that stands before those of each conversation."""

    role: str = Field(pattern="^(system|user|assistant)$")
    content: str


class CreateBody(BodyModel):
    """Body of `POST /api/create`."""

    model: str | None = None
    name: str | None = None
    """Older name of `model`."""
    from_: str | None = Field(default=None, alias="from")
    """The base model."""
    modelfile: str | None = None
    """An older form of all following fields and of `from`."""
    system: str | None = None
    parameters: dict[str, Any] | None = None
    messages: list[FirstMessage] | None = None
    license: str | list[str] | None = None
    stream: bool | None = None
    """Steps are sent as lines unless this is false."""


class CreateStatus(TypedDict):
    """One line: what is being done."""

    status: str


async def create_model(request: Request) -> Response:
    """Makes a model from another, with defaults of its own; raises ApiError (400, 403, 404)."""
    context, body = await _read(request, CreateBody, IN_CREATE)
    await asyncio.to_thread(_create, context, body)
    if body.stream is False:
        return JsonBody(CreateStatus(status=STEPS[-1]))
    lines = b"".join(line(CreateStatus(status=step)) for step in STEPS)
    return Response(lines, media_type=OllamaDialect.stream_media_type)


async def copy_model(request: Request) -> Response:
    """Gives a model another name; one of that name makes way. Raises ApiError (400, 403, 404)."""
    context, body = await _read(request, CopyBody, IN_COPY)

    def copy() -> StoredModel:
        name = _free(context, body.destination, "destination")
        source = _source(context, body.source, "source")
        return _done(lambda: library.create(name, _place(source), source.name, Making()), "destination")

    await asyncio.to_thread(copy)
    return JsonBody({})


async def delete_model(request: Request) -> Response:
    """Removes a name, and no weights; raises ApiError (400, 403, 404)."""
    context, body = await _read(request, DeleteBody, IN_DELETE)
    await asyncio.to_thread(_delete, context, _required(body.model or body.name))
    return JsonBody({})


async def _read(request: Request, kind: type[Body], rules: Rules) -> tuple[ApiContext, Body]:
    """Returns the checked body; only the owner of the server may send it."""
    context = context_of(request)
    if not is_owner(request, context.config):
        message = "only who runs the server names models: on its own machine, or by an operator's key"
        raise ApiError(Code.OPERATOR_ONLY, message)
    fields, _ = parse_object(await read_body(request, context.config.max_body_bytes))
    return context, parse_body(kind, dict(fields), rules)


def _create(context: ApiContext, body: CreateBody) -> None:
    name = _free(context, _required(body.model or body.name), "model")
    base, making = _asked(body)
    source = _source(context, base, "from")
    _done(lambda: library.create(name, _place(source), source.name, making), "parameters")


def _asked(body: CreateBody) -> tuple[str, Making]:
    """Returns the base model and the new model's settings; raises ApiError."""
    if body.modelfile:
        try:
            told = parse_modelfile(body.modelfile)
        except ModelfileError as error:
            raise ApiError(Code.INVALID_VALUE, f"modelfile: {error}", "modelfile") from error
        return told.base, Making(told.parameters, told.system, told.messages, told.license)
    if not body.from_:
        raise ApiError(Code.MISSING_PARAMETER, "from: name the model that it is made from", "from")
    messages = [ExampleMessage(one.role, one.content) for one in body.messages or ()]
    text = "\n".join(body.license) if isinstance(body.license, list) else body.license
    return body.from_, Making(list((body.parameters or {}).items()), body.system, messages, text)


def _delete(context: ApiContext, name: str) -> None:
    if _done(lambda: find_stored(name), "model") is not None:
        _done(lambda: library.remove(name), "model")
        return
    source = _source(context, name, "model")
    why = "its weights may be other programs', too; mlx-serve rm removes them, at the server's own machine"
    raise ApiError(Code.INVALID_VALUE, f"{source.name} is no name that was given here: {why}", "model")


def _required(name: str | None) -> str:
    if not name:
        raise ApiError(Code.MISSING_PARAMETER, "model is required", "model")
    return name


def _free(context: ApiContext, name: str, param: str) -> str:
    try:
        free = parse_free_name(name)
    except StoreError as error:
        raise ApiError(Code.INVALID_VALUE, f"{param}: {error}", param) from error
    short = free.removesuffix(LATEST)
    if any(model.adapter_name == short for model in context.pool.served):
        # Requests for this name would still mean the adapter.
        message = f"{param}: {short} is an adapter that this server was started with; choose another name"
        raise ApiError(Code.INVALID_VALUE, message, param)
    return free


def _source(context: ApiContext, name: str, param: str) -> ModelSource:
    """Returns the model that a request names and may use; raises ApiError (404)."""
    try:
        source = context.pool.source_of(name or None)
    except (ModelUnknown, ModelNameNeeded) as error:
        instead = error.instead if isinstance(error, ModelUnknown) else str(error)
        raise ApiError(Code.MODEL_NOT_FOUND, f"model {name[:200]!r} not found: {instead}", param) from error
    except PoolError as error:
        raise ApiError(Code.MODEL_UNUSABLE, str(error), param) from error
    if source.adapter is not None:
        message = f"{param}: {source.adapter} is an adapter, which has no name but the one of --adapter"
        raise ApiError(Code.INVALID_VALUE, message, param)
    return source


def _place(source: ModelSource) -> WeightsPlace:
    """Returns the place of a served model's weights: its name if the name leads to its folder, else the folder."""
    place = installed_place(source.name) or installed_place(source.id)
    folder = os.path.realpath(source.path)
    if place is not None and os.path.realpath(folder_of(place)) == folder:
        return place
    return WeightsPlace("folder", folder)


def _done(work: Callable[[], Result], param: str) -> Result:
    """Returns the result of work with the manifest; raises ApiError (400, 503)."""
    try:
        return work()
    except ModelfileError as error:
        raise ApiError(Code.INVALID_VALUE, f"{param}: {error}", param) from error
    except ModelError as error:
        raise ApiError(Code.MODEL_UNUSABLE, str(error), "model") from error


def shown_name(name: str) -> StoredModel | None:
    """Returns the manifest's entry for a name; None if there is none or it cannot be read."""
    try:
        return find_stored(name)
    except StoreError:
        return None


def messages_of(stored: StoredModel) -> list[Mapping[str, str]]:
    """Returns the first messages of a model, as clients write them."""
    return [{"role": one.role, "content": one.content} for one in stored.defaults.messages]


class PullBody(BodyModel):
    """Body of `POST /api/pull`."""

    model: str | None = None
    name: str | None = None
    """Older name of `model`."""
    stream: bool | None = None
    """Streamed unless false."""


class PullStatus(TypedDict):
    """One line: what is being done, and how far it is."""

    status: str
    digest: NotRequired[str]
    """`sha256:` and the digest of the file being downloaded."""
    total: NotRequired[int]
    """Bytes of the file."""
    completed: NotRequired[int]
    """Bytes already downloaded."""


async def pull_model(request: Request) -> Response:
    """Answers while a model is downloaded; raises ApiError (400, 403, 404)."""
    context = context_of(request)
    if not is_owner(request, context.config):
        message = "only who runs the server downloads models: on its own machine, or by an operator's key"
        raise ApiError(Code.OPERATOR_ONLY, message)
    fields, _ = parse_object(await read_body(request, context.config.max_body_bytes))
    body = parse_body(PullBody, dict(fields), IN_PULL)
    name = _wanted(body.model or body.name)
    steps = context.kept(pulls_of).steps(name)
    if body.stream is False:
        return JsonBody(await _last(steps))
    return AnswerStream(request, _lines(steps), lambda: b"")


def pulls_of(config: ServerConfig) -> Pulls:
    """Returns the server's downloads."""
    return Pulls(pull, lambda: largest_weights_bytes(this_machine()))


def _wanted(name: str | None) -> str:
    """Returns the name to download, for a family the largest model that fits; raises ApiError (400, 404)."""
    if not name:
        raise ApiError(Code.MISSING_PARAMETER, "model is required", "model")
    plain = name.removesuffix(":latest")
    family = find_family(name)
    if family:
        found = largest(family, comfortable_weights_bytes(this_machine())) or family[0]
        return found.name
    if plain not in BUILT_IN and parse_repository(plain) is None:
        reason = f"pull model manifest: {shorten(plain)[:200]!r}: {suggest(plain)}"
        raise ApiError(Code.MODEL_NOT_FOUND, reason, "model")
    return plain


async def _lines(steps: AsyncIterator[PullEvent]) -> AsyncIterator[bytes]:
    yield line(PullStatus(status="pulling manifest"))
    try:
        async for event in steps:
            for status in _told(event):
                yield line(status)
    except ModelError as error:
        raise _as_api_error(error) from error
    yield line(PullStatus(status="writing manifest"))
    yield line(PullStatus(status="success"))


async def _last(steps: AsyncIterator[PullEvent]) -> PullStatus:
    try:
        async for _ in steps:
            pass
    except ModelError as error:
        raise _as_api_error(error) from error
    return {"status": "success"}


def _told(event: PullEvent) -> list[PullStatus]:
    match event:
        case PullProgress(file=file, file_bytes=here) if file is not None:
            digest = f"sha256:{file.digest}"
            status = f"pulling {file.digest[:12]}"
            return [{"status": status, "digest": digest, "total": file.num_bytes, "completed": here}]
        case PullChecking():
            return [{"status": "verifying sha256 digest"}]
        case PullPlanned() | PullProgress():
            return []


def _as_api_error(error: ModelError) -> ApiError:
    """Returns the client's error: a wrong name, or a failure of this machine or the hub."""
    if isinstance(error, ModelNotFound | RepositoryNotFound):
        return ApiError(Code.MODEL_NOT_FOUND, f"pull model manifest: {error}", "model")
    return ApiError(Code.MODEL_UNUSABLE, str(error), "model")
