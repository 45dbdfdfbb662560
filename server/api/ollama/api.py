"""The paths of Ollama's dialect.

Only the owner of the server changes models. A name is never taken for a path, creating and copying download nothing,
and weights are never deleted.
"""

import asyncio
import hashlib
import math
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final, Literal, NotRequired, TypeAlias

from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from typing_extensions import TypedDict

from models import names
from models.errors import ModelError, ModelfileError, ModelNotFound, RepositoryNotFound, StoreError
from models.hub import PlannedFile, PullChecking, PullEvent, PullProgress, pull
from models.store import library
from models.store.library import parse_free_name
from models.store.stored_model import ExampleMessage, ModelDefaults, Modelfile, StoredModel, WeightsPlace
from server.api import PRODUCT
from server.api.bodies import BodyModel, parse_body, refused
from server.api.call import AnswerStream, inspect
from server.api.dialect import ApiContext, Endpoint, Operation, context_of, describe_models
from server.api.errors import ApiError, Code, wrong
from server.api.guard import read_owners_body
from server.api.ollama import generate
from server.api.ollama.generate import OllamaDialect, find_named, line
from server.api.openapi import explain_unknown_path
from server.api.params import Incoming
from server.api.wire import JsonBody, Payload
from server.app.config import ServerConfig
from server.app.memory_budget import comfortable_weights_bytes, largest_weights_bytes, this_machine
from server.app.pulls import Pulls
from server.pool.names import LATEST, ModelSource
from server.pool.served import ListedModel, ServedModel

OLLAMA_VERSION: Final = "0.12.6"
"""The release that this API follows; some clients refuse older ones."""
RUNNING: Final = "Ollama is running"
"""The answer of `/`; some clients compare it."""
STAYS_LOADED: Final = timedelta(days=36_500)
"""Stands for "for ever", since clients need a date."""


class DetailsBody(TypedDict):
    """What kind of model it is."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class NamedBody(TypedDict):
    """What all lists tell of a model."""

    name: str
    model: str
    digest: str
    details: DetailsBody


class TagBody(NamedBody):
    """One model of the list."""

    modified_at: str
    size: int
    capabilities: list[str]


class RunningBody(NamedBody):
    """One loaded model."""

    size: int
    expires_at: str
    size_vram: int
    context_length: int


TagList: TypeAlias = dict[Literal["models"], list[TagBody]]
RunningList: TypeAlias = dict[Literal["models"], list[RunningBody]]


class ShownBody(TypedDict):
    """One model in detail."""

    license: str
    modelfile: str
    parameters: str
    template: str
    details: DetailsBody
    model_info: Mapping[str, Any]
    capabilities: list[str]
    modified_at: str
    system: NotRequired[str]
    messages: NotRequired[list[Mapping[str, str]]]


class OllamaNameBody(BodyModel):
    """Names a model."""

    model: str | None = None
    name: str | None = None

    @property
    def named(self) -> str:
        """Raises ApiError (400) if there is none."""
        if not (self.model or self.name):
            raise ApiError(Code.MISSING_PARAMETER, "model is required", "model")
        return self.model or self.name or ""


async def root(request: Request) -> Response:
    """Says that the server is there."""
    if "text/html" in request.headers.get("accept", ""):
        raise ApiError(Code.UNKNOWN_PATH, explain_unknown_path(request.method, request.url.path))
    return PlainTextResponse(RUNNING)


async def version(request: Request) -> Response:
    """Names Ollama's release, and as its build this server."""
    # After `-0+`: some clients cut at a dash, others read the rest as a package version or as SemVer.
    return JsonBody({"version": f"{OLLAMA_VERSION}-0+{PRODUCT.replace('/', '.')}"})


async def ps(request: Request) -> Response:
    """Lists the models that are loaded."""
    pool = context_of(request).pool
    running = [_running(one.model, pool.idle_seconds_left(one)) for one in pool.members]
    return JsonBody({"models": running})


@inspect
def show(context: ApiContext, incoming: Incoming) -> Payload:
    """Describes one model; of an unloaded one, what its files tell."""
    model = find_named(context.pool.describe, parse_body(OllamaNameBody, incoming.fields).named)
    served, stored = model if isinstance(model, ServedModel) else None, _stored(model)
    defaults = ModelDefaults() if stored is None else stored.defaults
    parameters = list((defaults if served is None else _defaults(served)).parameters())
    plain = "\n".join([f"FROM {model.id}", *(f"PARAMETER {name} {value}" for name, value in parameters)])
    shown: ShownBody = {
        "license": "" if stored is None else stored.license,
        "modelfile": plain if stored is None else stored.modelfile(model.parent_id),
        "parameters": "\n".join(f"{name:<30} {value}" for name, value in parameters),
        "template": model.facts.chat_template,
        "details": _details(model),
        "model_info": _model_info(model),
        "capabilities": list(model.capabilities),
        "modified_at": _time(model.created if stored is None else int(stored.modified.timestamp())),
    }
    if defaults.system:
        shown["system"] = defaults.system
    if defaults.messages:
        shown["messages"] = [{"role": one.role, "content": one.content} for one in defaults.messages]
    return shown


def _stored(model: ListedModel) -> StoredModel | None:
    with suppress(StoreError):
        return None if model.parent_id in (None, model.id) else names.find_stored(model.id)
    return None


def _tag(model: ListedModel) -> TagBody:
    size, can = model.facts.stored_bytes, model.capabilities
    return {**_head(model), "modified_at": _time(model.created), "size": size, "capabilities": list(can)}


def _running(model: ServedModel, idle_seconds_left: float) -> RunningBody:
    facts = model.facts
    left = STAYS_LOADED if math.isinf(idle_seconds_left) else timedelta(seconds=idle_seconds_left)
    return {
        **_head(model),
        "size": facts.memory_bytes,
        "expires_at": (datetime.now(UTC) + left).isoformat(),
        "size_vram": facts.memory_bytes if facts.is_on_gpu else 0,
        "context_length": model.context_tokens,
    }


def _details(model: ListedModel) -> DetailsBody:
    facts = model.facts
    return {
        "parent_model": model.parent_id or "",
        "format": "safetensors",
        "family": facts.architecture,
        "families": [facts.architecture],
        "parameter_size": _count_text(facts.num_parameters),
        "quantization_level": facts.weight_format,
    }


def _model_info(model: ListedModel) -> Mapping[str, Any]:
    facts = model.facts
    return {
        "general.architecture": facts.architecture,
        "general.basename": model.id,
        "general.parameter_count": facts.num_parameters,
        f"{facts.architecture}.context_length": model.context_tokens,
        f"{facts.architecture}.embedding_length": facts.hidden_size,
        f"{facts.architecture}.block_count": facts.num_layers,
    }


def _defaults(model: ServedModel) -> ModelDefaults:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    sampling = {name: getattr(model.sampling, name) for name in names}
    return ModelDefaults(sampling=sampling, stop=model.defaults.stop, context_tokens=model.context_tokens)


def _head(model: ListedModel) -> NamedBody:
    # Ollama's clients expect a name with a tag.
    name = model.id if ":" in model.id else model.id + LATEST
    digest = hashlib.sha256((model.facts.fingerprint or model.id).encode()).hexdigest()
    return {"name": name, "model": name, "digest": digest, "details": _details(model)}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _count_text(count: int) -> str:
    """A number as Ollama writes it: 751.63M, 8.0B; nothing for 0."""
    if not count:
        return ""
    if count >= 10**9:
        return f"{count / 10**9:.1f}B"
    return f"{count / 10**6:.2f}M" if count >= 10**6 else f"{count / 10**3:.2f}K"


STEPS = ("reading model metadata", "creating system layer", "writing manifest", "success")
"""Clients show these while a model is made."""


class CopyBody(BodyModel):
    """Body of `POST /api/copy`."""

    source: str
    destination: str


class FirstMessage(BodyModel):
    """A message at the head of each conversation."""

    role: str = Field(pattern="^(system|user|assistant)$")
    content: str


class CreateBody(OllamaNameBody):
    """Body of `POST /api/create`."""

    from_: str | None = Field(default=None, alias="from")
    modelfile: str | None = None
    """Older form of `from` and the following fields."""
    system: str | None = None
    parameters: dict[str, Any] | None = None
    messages: list[FirstMessage] | None = None
    license: str | list[str] | None = None
    stream: bool | None = None
    """Streamed unless false."""


_IN_CREATE = refused("""
    a model's template comes with its files, and is written in Jinja, not in Go: template=""
    start the server with --adapter NAME=FOLDER to serve a LoRA adapter beside a model: adapters={}
    weights stay as they are; pull a quantized model instead: quantize="" quantization=""
    a model is pulled, or made from one that is here: files={} path=""
""")


CreateStatus: TypeAlias = dict[Literal["status"], str]


async def create_model(request: Request) -> Response:
    """Makes a model from another; raises ApiError (400, 403, 404)."""
    body = await read_owners_body(request, CreateBody, _IN_CREATE, "names models")
    await asyncio.to_thread(_create, context_of(request), body.named, partial(_asked, body), "model")
    if body.stream is False:
        return JsonBody({"status": STEPS[-1]})
    lines = b"".join(line({"status": step}) for step in STEPS)
    return Response(lines, media_type=OllamaDialect.stream_media_type)


async def copy_model(request: Request) -> Response:
    """Gives a model another name, whatever had it. Raises ApiError (400, 403, 404)."""
    body = await read_owners_body(request, CopyBody, {}, "names models")
    ask = partial(Modelfile, body.source)
    await asyncio.to_thread(_create, context_of(request), body.destination, ask, "destination")
    return JsonBody({})


async def delete_model(request: Request) -> Response:
    """Removes a name, and no weights; raises ApiError (400, 403, 404)."""
    body = await read_owners_body(request, OllamaNameBody, {}, "names models")
    await asyncio.to_thread(_delete, context_of(request), body.named)
    return JsonBody({})


def _create(context: ApiContext, named: str, ask: Callable[[], Modelfile], param: str) -> None:
    name, modelfile = _free(context, named, param), ask()
    source = _source(context, modelfile.base, "from" if param == "model" else "source")
    with _refusing("parameters"):
        library.create(name, _place(source), replace(modelfile, base=source.name))


def _asked(body: CreateBody) -> Modelfile:
    """Raises ApiError."""
    if body.modelfile:
        with _refusing("modelfile"):
            return Modelfile.parse(body.modelfile)
    if not body.from_:
        raise wrong("from", "name the model that it is made from", Code.MISSING_PARAMETER)
    messages = [ExampleMessage(one.role, one.content) for one in body.messages or ()]
    text = "\n".join(body.license) if isinstance(body.license, list) else body.license
    return Modelfile(body.from_, list((body.parameters or {}).items()), body.system, messages, text)


def _delete(context: ApiContext, name: str) -> None:
    with _refusing("model"):
        if names.find_stored(name) is not None:
            library.remove(name)
            return
    source = _source(context, name, "model")
    why = "its weights may be other programs', too; mlx-serve rm removes them, at the server's own machine"
    raise ApiError(Code.INVALID_VALUE, f"{source.name} is no name that was given here: {why}", "model")


def _free(context: ApiContext, name: str, param: str) -> str:
    try:
        free = parse_free_name(name)
    except StoreError as error:
        raise wrong(param, str(error)) from error
    short = free.removesuffix(LATEST)
    if any(model.adapter and model.adapter.name == short for model in context.pool.served):
        # Requests for this name would still mean the adapter.
        raise wrong(param, f"{short} is an adapter that this server was started with; choose another name")
    return free


def _source(context: ApiContext, name: str, param: str) -> ModelSource:
    """Raises ApiError and PoolError."""
    source = find_named(context.pool.source_of, name)
    if source.adapter is not None:
        raise wrong(param, f"{source.adapter} is an adapter, which has no name but the one of --adapter")
    return source


def _place(source: ModelSource) -> WeightsPlace:
    """The place that the model's id names if it is the source's, else the source's folder."""
    folder = os.path.realpath(source.path)
    with suppress(ModelNotFound):
        place = names.installed_place(source.id)
        if os.path.realpath(names.folder_of(place)) == folder:
            return place
    return WeightsPlace("folder", folder)


@contextmanager
def _refusing(param: str) -> Iterator[None]:
    """Raises ApiError: 400 for a Modelfile's or parameter's fault, in the field `param`, 503 for the machine's."""
    try:
        yield
    except ModelfileError as error:
        raise wrong(param, str(error)) from error
    except ModelError as error:
        raise ApiError(Code.MODEL_UNUSABLE, str(error), "model") from error


class PullBody(OllamaNameBody):
    """Body of `POST /api/pull`."""

    stream: bool | None = None


class PullStatus(TypedDict):
    """One line of progress."""

    status: str
    digest: NotRequired[str]
    """`sha256:` and the file's digest."""
    total: NotRequired[int]
    completed: NotRequired[int]


async def pull_model(request: Request) -> Response:
    """Downloads a model; raises ApiError (400, 403, 404)."""
    body = await read_owners_body(request, PullBody, {}, "downloads models")
    lines = _lines(context_of(request).kept(pulls_of).steps(_wanted(body.named)))
    if body.stream is False:
        async for _ in lines:
            pass
        return JsonBody(PullStatus(status="success"))
    return AnswerStream(request, lines, lambda: b"")


def pulls_of(config: ServerConfig) -> Pulls:
    """The server's downloads."""
    return Pulls(lambda name, tell: pull(name, tell, max_weights_bytes=largest_weights_bytes(this_machine())))


def _wanted(name: str) -> str:
    """The name to download, of a family the largest that fits; raises ApiError (404)."""
    family, plain = names.find_family(name), name.removesuffix(LATEST)
    if family:
        return (names.largest(family, comfortable_weights_bytes(this_machine())) or family[0]).name
    if plain not in names.BUILT_IN and names.parse_repository(plain) is None:
        reason = f"pull model manifest: {names.shorten(plain)[:200]!r}: {names.suggest(plain, here='')}"
        raise ApiError(Code.MODEL_NOT_FOUND, reason, "model")
    return plain


async def _lines(steps: AsyncIterator[PullEvent]) -> AsyncIterator[bytes]:
    """Yields progress; raises ApiError for wrong names, and failures of machine or hub."""
    yield line(PullStatus(status="pulling manifest"))
    with _refusing("model"):
        try:
            async for event in steps:
                match event:
                    case PullProgress(file=PlannedFile(digest=digest, num_bytes=total), file_bytes=here):
                        status, whole = f"pulling {digest[:12]}", f"sha256:{digest}"
                        yield line(PullStatus(status=status, digest=whole, total=total, completed=here))
                    case PullChecking():
                        yield line(PullStatus(status="verifying sha256 digest"))
        except (ModelNotFound, RepositoryNotFound) as error:
            raise ApiError(Code.MODEL_NOT_FOUND, f"pull model manifest: {error}", "model") from error
    yield line(PullStatus(status="writing manifest"))
    yield line(PullStatus(status="success"))


_ROUTES = (
    Endpoint("/api/tags", describe_models(_tag, lambda models: {"models": models}), Operation(answer=TagList)),
    Endpoint("/api/show", show, Operation(OllamaNameBody, ShownBody)),
    Endpoint("/api/ps", ps, Operation(answer=RunningList)),
    Endpoint("/api/version", version, Operation(answer=dict[Literal["version"], str])),
    Endpoint("/", root, Operation(answer=str, answer_type="text/plain")),
    Endpoint("/api/pull", pull_model, Operation(PullBody, PullStatus, PullStatus)),
    Endpoint("/api/create", create_model, Operation(CreateBody, CreateStatus, CreateStatus)),
    Endpoint("/api/copy", copy_model, Operation(CopyBody)),
    Endpoint("/api/delete", delete_model, Operation(OllamaNameBody), ["DELETE"]),
    *generate.ROUTES,
)
OLLAMA = OllamaDialect(_ROUTES)
