"""What is served, as Ollama's clients ask for it: `/api/tags`, `/api/show`, `/api/ps`, `/api/version` and `/`."""

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

from models.store.modelfile import modelfile_of, parameters_of
from server.api import PRODUCT
from server.api.call import inspect
from server.api.context import ApiContext, context_of
from server.api.dialect import BodyModel, Payload, parse_body
from server.api.errors import ApiError, Code
from server.api.ollama.dialect import find_model, thinks
from server.api.ollama.manage import messages_of, shown_name
from server.api.openapi import explain_unknown_path
from server.api.params import Incoming
from server.api.wire import JsonBody
from server.pool.errors import ModelNotLoaded
from server.pool.names import LATEST
from server.pool.served import ListedModel, Occupancy, ServedModel

OLLAMA_VERSION: Final = "0.12.6"
"""The release of Ollama that this API follows; some clients refuse older ones."""
RUNNING: Final = "Ollama is running"
"""The answer of `/`; some clients compare it."""
STAYS_LOADED: Final = timedelta(days=36_500)
"""The expiry reported for a model that is never unloaded, since clients need a date."""


class DetailsBody(TypedDict):
    """What kind of model it is."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class TagBody(TypedDict):
    """One model of the list."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: DetailsBody


class TagsBody(TypedDict):
    """All models that requests may name."""

    models: list[TagBody]


class RunningBody(TypedDict):
    """One loaded model."""

    name: str
    model: str
    size: int
    digest: str
    details: DetailsBody
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
    """The release of Ollama whose API this is."""

    version: str


class ShowBody(BodyModel):
    """Body of `POST /api/show`."""

    model: str | None = None
    name: str | None = None
    """Older name of `model`."""


async def root(request: Request) -> Response:
    """Says that the server is there, as clients probe it. Without the console, browsers are told of no page."""
    if "text/html" in request.headers.get("accept", ""):
        raise ApiError(Code.UNKNOWN_PATH, explain_unknown_path(request.method, request.url.path))
    return PlainTextResponse(RUNNING)


async def version(request: Request) -> Response:
    """Names the release of Ollama whose API this is, and as its build who answers."""
    # After `-0+`: some clients cut at a dash, others read the rest as a package version or as SemVer.
    body: VersionBody = {"version": f"{OLLAMA_VERSION}-0+{PRODUCT.replace('/', '.')}"}
    return JsonBody(body)


async def tags(request: Request) -> Response:
    """Lists the models that requests may name."""
    listed = await asyncio.to_thread(context_of(request).pool.listed)
    body: TagsBody = {"models": [_tag(model) for model in listed]}
    return JsonBody(body)


async def ps(request: Request) -> Response:
    """Lists the models that are loaded."""
    body: RunningList = {"models": [_running(one) for one in context_of(request).pool.occupancy]}
    return JsonBody(body)


async def show(request: Request) -> Response:
    """Describes one model."""
    return await inspect(request, describe)


def describe(context: ApiContext, incoming: Incoming) -> Payload:
    """Returns one model's description; raises ApiError."""
    body = parse_body(ShowBody, dict(incoming.fields), {})
    try:
        model = find_model(context, body.model or body.name)
        return _with_name(_shown(model), model.id, model.parent_id)
    except ModelNotLoaded as error:
        source = error.source
        return _with_name(_shown_unloaded(context.pool.describe(source.name)), source.name, source.id)


def _with_name(shown: ShownBody, name: str, base: str | None) -> ShownBody:
    """Returns a description, extended by the settings of a name made here."""
    stored = shown_name(name)
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
        more["messages"] = messages_of(stored)
    return more


def _tag(model: ListedModel) -> TagBody:
    return {
        "name": _tagged(model.id),
        "model": _tagged(model.id),
        "modified_at": _time(model.created),
        "size": model.facts.stored_bytes,
        "digest": _digest(model),
        "details": _details(model),
    }


def _running(occupancy: Occupancy) -> RunningBody:
    model, facts = occupancy.model, occupancy.model.facts
    left = STAYS_LOADED if math.isinf(occupancy.idle_seconds_left) else timedelta(seconds=occupancy.idle_seconds_left)
    return {
        "name": _tagged(model.id),
        "model": _tagged(model.id),
        "size": facts.memory_bytes,
        "digest": _digest(model),
        "details": _details(model),
        "expires_at": (datetime.now(UTC) + left).isoformat(),
        "size_vram": facts.memory_bytes if facts.is_on_gpu else 0,
        "context_length": model.context_tokens,
    }


def _shown(model: ServedModel) -> ShownBody:
    parameters = list(_parameters(model))
    return {
        "license": "",
        "modelfile": "\n".join([f"FROM {model.id}", *(f"PARAMETER {name} {value}" for name, value in parameters)]),
        "parameters": _parameter_lines(parameters),
        "template": model.facts.chat_template,
        "details": _details(model),
        "model_info": _model_info(model),
        "capabilities": _capabilities(model),
        "modified_at": _time(model.created),
    }


def _shown_unloaded(model: ListedModel) -> ShownBody:
    """Returns what a model's files tell; template and parameters are read only when it is loaded."""
    return {
        "license": "",
        "modelfile": f"FROM {model.id}",
        "parameters": "",
        "template": "",
        "details": _details(model),
        "model_info": _model_info(model),
        "capabilities": ["completion"],
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


def _capabilities(model: ServedModel) -> list[str]:
    """Returns the model's capabilities for clients; without "tools" if its calls would come as text."""
    found = {"completion": True, "tools": model.tool_calls == "parsed", "thinking": thinks(model)}
    return [name for name, is_there in found.items() if is_there]


def _parameters(model: ServedModel) -> Iterator[tuple[str, str]]:
    sampling = model.sampling
    yield "num_ctx", str(model.context_tokens)
    for name, value in (
        ("temperature", sampling.temperature),
        ("top_k", sampling.top_k),
        ("top_p", sampling.top_p),
        ("min_p", sampling.min_p),
        ("repeat_penalty", sampling.repetition_penalty),
    ):
        yield name, f"{value:g}"
    for text in model.defaults.stop:
        yield "stop", json.dumps(text, ensure_ascii=False)


def _parameter_lines(parameters: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"{name:<30} {value}" for name, value in parameters)


def _tagged(model_id: str) -> str:
    """Returns a name with a tag, as Ollama's clients expect."""
    return model_id if ":" in model_id else model_id + LATEST


def _digest(model: ServedModel | ListedModel) -> str:
    return hashlib.sha256((model.facts.fingerprint or model.id).encode()).hexdigest()


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _count_text(count: int) -> str:
    """Returns a number of parameters as Ollama writes it: 751.63M, 8.0B."""
    if count >= 10**9:
        return f"{count / 10**9:.1f}B"
    return f"{count / 10**6:.2f}M" if count >= 10**6 else f"{count / 10**3:.2f}K"
