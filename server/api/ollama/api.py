"""The paths of Ollama's dialect, and what its clients ask of models and server."""

import asyncio
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NotRequired

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from typing_extensions import TypedDict

from models.errors import StoreError
from models.names import find_stored
from models.store.modelfile import modelfile_of, parameters_of
from server.api import PRODUCT
from server.api.call import inspect
from server.api.context import ApiContext, context_of
from server.api.dialect import Api, BodyModel, Endpoint, Operation, Payload, parse_body
from server.api.errors import ApiError, Code
from server.api.ollama import generate, manage
from server.api.ollama.dialect import ErrorText, OllamaDialect, find_model, thinks
from server.api.openapi import explain_unknown_path
from server.api.params import Incoming
from server.api.wire import JsonBody
from server.pool.errors import ModelNotLoaded
from server.pool.names import LATEST
from server.pool.served import ListedModel, Occupancy, ServedModel

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


class TagsBody(TypedDict):
    """All models."""

    models: list[TagBody]


class RunningBody(NamedBody):
    """One loaded model."""

    size: int
    expires_at: str
    size_vram: int
    context_length: int


class RunningList(TypedDict):
    """All loaded models."""

    models: list[RunningBody]


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


class VersionBody(TypedDict):
    """Ollama's release."""

    version: str


class ShowBody(BodyModel):
    """Body of `POST /api/show`."""

    model: str | None = None
    name: str | None = None


async def root(request: Request) -> Response:
    """Says that the server is there; without the console, browsers are told of no page."""
    if "text/html" in request.headers.get("accept", ""):
        raise ApiError(Code.UNKNOWN_PATH, explain_unknown_path(request.method, request.url.path))
    return PlainTextResponse(RUNNING)


async def version(request: Request) -> Response:
    """Names Ollama's release, and as its build this server."""
    # After `-0+`: some clients cut at a dash, others read the rest as a package version or as SemVer.
    return JsonBody(VersionBody(version=f"{OLLAMA_VERSION}-0+{PRODUCT.replace('/', '.')}"))


async def tags(request: Request) -> Response:
    """Lists the models that requests may name."""
    listed = await asyncio.to_thread(context_of(request).pool.listed)
    models = [TagBody(**_head(one), modified_at=_time(one.created), size=one.facts.stored_bytes) for one in listed]
    return JsonBody(TagsBody(models=models))


async def ps(request: Request) -> Response:
    """Lists the models that are loaded."""
    return JsonBody(RunningList(models=[_running(one) for one in context_of(request).pool.occupancy]))


@inspect
def show(context: ApiContext, incoming: Incoming) -> Payload:
    """Describes one model."""
    body = parse_body(ShowBody, dict(incoming.fields), {})
    try:
        model = find_model(context, body.model or body.name)
        return _with_name(_shown(model), model.id, model.parent_id)
    except ModelNotLoaded as error:
        source = error.source
        return _with_name(_shown(context.pool.describe(source.name)), source.name, source.id)


def _with_name(shown: ShownBody, name: str, base: str | None) -> ShownBody:
    """Adds the settings of a name made here."""
    try:
        stored = find_stored(name)
    except StoreError:
        return shown
    if stored is None or base in (None, name):
        return shown
    more: ShownBody = {
        **shown,
        "license": stored.license,
        "modelfile": modelfile_of(stored, base),
        "modified_at": _time(int(stored.modified.timestamp())),
    }
    if not shown["parameters"]:
        more["parameters"] = _parameter_lines(list(parameters_of(stored.defaults)))
    if stored.defaults.system:
        more["system"] = stored.defaults.system
    if stored.defaults.messages:
        more["messages"] = [{"role": one.role, "content": one.content} for one in stored.defaults.messages]
    return more


def _running(occupancy: Occupancy) -> RunningBody:
    model, facts = occupancy.model, occupancy.model.facts
    left = STAYS_LOADED if math.isinf(occupancy.idle_seconds_left) else timedelta(seconds=occupancy.idle_seconds_left)
    return {
        **_head(model),
        "size": facts.memory_bytes,
        "expires_at": (datetime.now(UTC) + left).isoformat(),
        "size_vram": facts.memory_bytes if facts.is_on_gpu else 0,
        "context_length": model.context_tokens,
    }


def _shown(model: ServedModel | ListedModel) -> ShownBody:
    """Returns a description; of an unloaded model, what its files tell."""
    parameters: list[tuple[str, str]] = []
    template, can = "", {"completion": True}
    if isinstance(model, ServedModel):
        parameters, template = list(_parameters(model)), model.facts.chat_template
        # Without "tools" if calls would come as text.
        can |= {"tools": model.tool_calls == "parsed", "thinking": thinks(model)}
    return {
        "license": "",
        "modelfile": "\n".join([f"FROM {model.id}", *(f"PARAMETER {name} {value}" for name, value in parameters)]),
        "parameters": _parameter_lines(parameters),
        "template": template,
        "details": _details(model),
        "model_info": _model_info(model),
        "capabilities": [name for name, is_there in can.items() if is_there],
        "modified_at": _time(model.created),
    }


def _details(model: ServedModel | ListedModel) -> DetailsBody:
    facts = model.facts
    return {
        "parent_model": model.parent_id or "",
        "format": "safetensors",
        "family": facts.architecture,
        "families": [facts.architecture],
        "parameter_size": _count_text(facts.num_parameters),
        "quantization_level": facts.weight_format,
    }


def _model_info(model: ServedModel | ListedModel) -> Mapping[str, Any]:
    facts = model.facts
    return {
        "general.architecture": facts.architecture,
        "general.basename": model.id,
        "general.parameter_count": facts.num_parameters,
        f"{facts.architecture}.context_length": model.context_tokens,
        f"{facts.architecture}.embedding_length": facts.hidden_size,
        f"{facts.architecture}.block_count": facts.num_layers,
    }


def _parameters(model: ServedModel) -> Iterator[tuple[str, str]]:
    yield "num_ctx", str(model.context_tokens)
    for name in ("temperature", "top_k", "top_p", "min_p"):
        yield name, f"{getattr(model.sampling, name):g}"
    yield "repeat_penalty", f"{model.sampling.repetition_penalty:g}"
    for text in model.defaults.stop:
        yield "stop", json.dumps(text, ensure_ascii=False)


def _parameter_lines(parameters: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"{name:<30} {value}" for name, value in parameters)


def _head(model: ServedModel | ListedModel) -> NamedBody:
    # Ollama's clients expect a name with a tag.
    name = model.id if ":" in model.id else model.id + LATEST
    digest = hashlib.sha256((model.facts.fingerprint or model.id).encode()).hexdigest()
    return {"name": name, "model": name, "digest": digest, "details": _details(model)}


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _count_text(count: int) -> str:
    """Returns a number as Ollama writes it: 751.63M, 8.0B; nothing for 0, the count of a model that is not loaded."""
    if not count:
        return ""
    if count >= 10**9:
        return f"{count / 10**9:.1f}B"
    return f"{count / 10**6:.2f}M" if count >= 10**6 else f"{count / 10**3:.2f}K"


_ROUTES = (
    Endpoint("/api/tags", tags, Operation(answer=TagsBody)),
    Endpoint("/api/show", show, Operation(ShowBody, ShownBody)),
    Endpoint("/api/ps", ps, Operation(answer=RunningList)),
    Endpoint("/api/version", version, Operation(answer=VersionBody)),
    Endpoint("/", root, Operation(answer=str, answer_type="text/plain")),
    *manage.ROUTES,
    *generate.ROUTES,
)
OLLAMA = Api(OllamaDialect(), _ROUTES, ErrorText, own_paths=("/api",))
