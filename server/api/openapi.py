"""The OpenAPI document of a server, made of its routes and the types of bodies and answers. Pure.

pydantic describes bodies, TypedDicts describe answers. If a field accepts more shapes than its type and does not
declare them (`json_schema_input_type`), the document leaves its shape open. `OTHER_APIS` names the API of paths that
are not served, so users learn why their client fails; a path that becomes served leaves that table.
"""

import inspect
import re
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints, is_typeddict

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

Schema: TypeAlias = dict[str, Any]

_REFERENCE = "#/components/schemas/"
_PLAIN: Mapping[Any, Schema] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    Any: {},
}


@dataclass(frozen=True)
class Operation:
    """Body and answer of an endpoint. Without a body type it takes no body; without an answer type it gives any
    object.
    """

    body: type[BaseModel] | Sequence[type[BaseModel]] | None = None
    answer: Any = None
    stream: Any = None
    """The type of a stream's events or lines; None if the endpoint never streams."""
    stream_type: str = "text/event-stream"
    answer_type: str = "application/json"
    query: tuple[str, ...] = ()


Operations: TypeAlias = Mapping[Callable[..., Any], Operation]
"""Keyed by the endpoint's function."""


@dataclass(frozen=True)
class DescribedPath:
    """A path with its methods, its endpoint, and the shape of its errors."""

    path: str
    methods: Collection[str]
    endpoint: Callable[..., Any]
    operation: Operation
    error: Any = None


class _BodySchema(GenerateJsonSchema):
    """Describes the values that a body may hold before validation converts them."""

    def function_before_schema(self, schema: core_schema.BeforeValidatorFunctionSchema) -> JsonSchemaValue:
        """Returns the schema that a field declares for its input; without one, any value."""
        taken = schema.get("json_schema_input_schema")
        return {} if taken is None else self.generate_inner(taken)


class Document:
    """Collects schemas by name while paths are described."""

    def __init__(self, version: str) -> None:
        self._version = version
        self._schemas: dict[str, Schema] = {}

    def describe(self, entries: Iterable[DescribedPath]) -> Schema:
        """Returns the document. Two entries for one path and method give either answer."""
        paths: dict[str, Schema] = {}
        for entry in entries:
            path = paths.setdefault(re.sub(r":[a-z]+}", "}", entry.path), {})
            for method in sorted(set(entry.methods) - {"HEAD"}):
                described = self._operation(entry, method.lower())
                path[method.lower()] = _either(path.get(method.lower()), described)
        return {
            "openapi": "3.1.0",
            "info": {"title": "mlx-serve", "version": self._version},
            "paths": paths,
            "components": {"schemas": dict(sorted(self._schemas.items())), "securitySchemes": _KEYS},
            "security": [{}, {"bearer": []}, {"header": []}],
        }

    def _operation(self, entry: DescribedPath, method: str) -> Schema:
        operation = entry.operation
        content = {operation.answer_type: {"schema": self.schema_of(operation.answer)}}
        if operation.stream is not None:
            content[operation.stream_type] = {
                # Readers of the document differ on whether a stream's schema describes its text or each event.
                "schema": {"description": "Events, or lines, one after the other; each holds what x-event says."},
                "x-event": self.schema_of(operation.stream),
            }
        described: Schema = {
            "operationId": re.sub(r"\W+", "_", f"{method}{entry.path}").strip("_"),
            "summary": (inspect.getdoc(entry.endpoint) or "").partition("\n")[0],
            "parameters": [*_path_parameters(entry.path), *map(_query_parameter, operation.query)],
            "responses": {
                "200": {"description": "The answer.", "content": content},
                "default": {"description": "An error.", "content": _json(self.schema_of(entry.error))},
            },
        }
        if operation.body is not None:
            described["requestBody"] = {"required": True, "content": _json(self._body(operation.body))}
        return described

    def _body(self, kinds: type[BaseModel] | Sequence[type[BaseModel]]) -> Schema:
        if isinstance(kinds, Sequence):
            return {"anyOf": [self._body(kind) for kind in kinds]}
        schema = kinds.model_json_schema(ref_template=_REFERENCE + "{model}", schema_generator=_BodySchema)
        self._schemas |= schema.pop("$defs", {})
        self._schemas[kinds.__name__] = schema
        return {"$ref": _REFERENCE + kinds.__name__}

    def schema_of(self, kind: Any) -> Schema:
        """Returns the schema of an answer's type; any object for None."""
        if kind is None:
            return {"type": "object"}
        if kind in _PLAIN:
            return dict(_PLAIN[kind])
        if is_typeddict(kind):
            return self._typed_dict(kind)
        origin, arguments = get_origin(kind), get_args(kind)
        if origin in (Union, types.UnionType):
            return {"anyOf": [self.schema_of(type(None) if each is None else each) for each in arguments]}
        if origin is Literal:
            return {"enum": list(arguments)}
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return {"type": "object", "additionalProperties": self.schema_of(arguments[1])}
        if isinstance(origin, type) and issubclass(origin, Collection):
            return {"type": "array", "items": self.schema_of(arguments[0])}
        raise TypeError(f"{kind!r} has no schema")

    def _typed_dict(self, kind: Any) -> Schema:
        name = kind.__name__
        if name not in self._schemas:
            self._schemas[name] = {}
            hints = get_type_hints(kind)
            self._schemas[name] = {
                "type": "object",
                "description": (inspect.getdoc(kind) or "").partition("\n")[0],
                "properties": {field: self.schema_of(hint) for field, hint in hints.items()},
                "required": sorted(kind.__required_keys__),
                "additionalProperties": False,
            }
        return {"$ref": _REFERENCE + name}


_KEYS: Schema = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def _either(first: Schema | None, second: Schema) -> Schema:
    if first is None:
        return second
    for status, response in first["responses"].items():
        for kind, media in response["content"].items():
            other = second["responses"][status]["content"][kind]
            media["schema"] = {"anyOf": [media["schema"], other["schema"]]}
    return first


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _path_parameters(path: str) -> list[Schema]:
    names = re.findall(r"{(\w+)", path)
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _query_parameter(name: str) -> Schema:
    return {"name": name, "in": "query", "required": False, "schema": {"type": "string"}}


@dataclass(frozen=True)
class OtherApi:
    """An API and the first segments of its paths, without `/v1`."""

    name: str
    paths: tuple[str, ...]


_OF_AGENTS = (
    "agents",
    "deployments",
    "deployment_runs",
    "dreams",
    "environments",
    "memory_stores",
    "tunnels",
    "vaults",
)

OTHER_APIS = (
    OtherApi("Anthropic's Text Completions API", ("complete",)),
    OtherApi("Anthropic's Message Batches API", ("messages/batches",)),
    OtherApi("OpenAI's audio API", ("audio",)),
    OtherApi("OpenAI's images API", ("images",)),
    OtherApi("OpenAI's videos API", ("videos",)),
    OtherApi("OpenAI's moderations", ("moderations",)),
    OtherApi("the files of OpenAI's and Anthropic's APIs", ("files",)),
    OtherApi("the skills of OpenAI's and Anthropic's APIs", ("skills",)),
    OtherApi("OpenAI's uploads and stores of files", ("uploads", "vector_stores", "containers")),
    OtherApi("the compaction of OpenAI's Responses API", ("responses/compact",)),
    OtherApi("OpenAI's batches", ("batches",)),
    OtherApi("OpenAI's fine-tuning", ("fine_tuning",)),
    OtherApi("OpenAI's Assistants API", ("assistants", "threads")),
    OtherApi("OpenAI's Realtime API", ("realtime", "live")),
    OtherApi("OpenAI's evals", ("evals",)),
    OtherApi("OpenAI's ChatKit", ("chatkit",)),
    OtherApi(
        "the part of OpenAI's API that is about its own platform",
        ("content_provenance_checks", "decisions", "safety", "webhook_endpoints", "webhook_event_types"),
    ),
    OtherApi("the agents that OpenAI and Anthropic run themselves", _OF_AGENTS),
    OtherApi("the accounts at OpenAI and Anthropic", ("organization", "organizations", "projects", "user_profiles")),
    OtherApi("Azure OpenAI", ("openai/deployments",)),
    OtherApi(
        "the rest of LM Studio's own API",
        ("api/v0", "api/v1/chat", "api/v1/models/load", "api/v1/models/unload", "api/v1/models/download"),
    ),
    OtherApi(
        "the part of Ollama's API that gives models to others, or takes files",
        ("api/push", "api/blobs"),
    ),
    OtherApi("Ollama's accounts and web search", ("api/me", "api/signout", "api/web_search", "api/web_fetch")),
    OtherApi("Google's Gemini API", ("v1beta",)),
    OtherApi("llama.cpp's infilling", ("infill",)),
    OtherApi("llama.cpp's adapters and embeddings", ("lora-adapters", "embedding")),
    OtherApi("text-generation-inference's own API", ("generate", "generate_stream")),
    OtherApi("a scoring API", ("reranking", "score")),
)
"""The first match counts, so narrower paths must precede wider ones."""


def find_other_api(path: str) -> OtherApi | None:
    """Returns the API that has `path`, with or without `/v1`; None if no API has it."""
    asked = path.strip("/").removeprefix("v1/")
    for api in OTHER_APIS:
        if any(asked == known or asked.startswith(f"{known}/") for known in api.paths):
            return api
    return None


def explain_unknown_path(method: str, path: str) -> str:
    """Returns a sentence for an unknown path: the API that it belongs to, or how to correct the address."""
    said = f"there is no {method} {path[:200]} here"
    api = find_other_api(path)
    if api is not None:
        return f"{said}: it belongs to {api.name}, which this server does not have"
    if path.startswith("/v1/v1/"):
        return f"{said}: the client adds /v1 itself, so leave it out of the address that it is given"
    return said
