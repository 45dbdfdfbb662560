"""The OpenAPI document; names of other APIs' paths. Pure.

A field that takes more shapes than its type declares (`json_schema_input_type`) is left open.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

if TYPE_CHECKING:
    from server.api.dialect import Endpoint

JsonSchema: TypeAlias = dict[str, Any]


class _Schemas(GenerateJsonSchema):
    def function_before_schema(self, schema: core_schema.BeforeValidatorFunctionSchema) -> JsonSchemaValue:
        taken = schema.get("json_schema_input_schema")
        return {} if taken is None else self.generate_inner(taken)

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
        record = super().dataclass_schema(schema)
        return {**record, "required": list(record["properties"]), "additionalProperties": False}

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        """A dictionary of named keys has them all."""
        keys = schema.get("keys_schema", {})
        if keys.get("type") != "literal":
            return super().dict_schema(schema)
        names, value = keys["expected"], self.generate_inner(schema["values_schema"])
        properties = dict.fromkeys(names, value)
        return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}

    def typed_dict_schema(self, schema: core_schema.TypedDictSchema) -> JsonSchemaValue:
        return {**super().typed_dict_schema(schema), "additionalProperties": False}


def describe(routes: "Sequence[Endpoint]", version: str) -> JsonSchema:
    """The document. Two routes for one path and method give either answer."""
    taken = ((route.dialect.error_type, route.operation) for route in routes)
    used = ((one.body, one.answer, one.stream, error) for error, one in taken)
    kinds = dict.fromkeys(kind for group in used for kind in group if kind is not None)
    schemas, named = TypeAdapter.json_schemas(
        [(kind, "validation", TypeAdapter(kind)) for kind in kinds],
        ref_template="#/components/schemas/{model}",
        schema_generator=_Schemas,
    )
    schemas = {kind: schema for (kind, _), schema in schemas.items()}
    paths: dict[str, JsonSchema] = {}
    for route in routes:
        path = paths.setdefault(re.sub(r":[a-z]+}", "}", route.path), {})
        for method in sorted(name.lower() for name in (route.methods or set()) - {"HEAD"}):
            path[method] = _either(path.get(method), _described(route, method, schemas))
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlx-serve", "version": version},
        "paths": paths,
        "components": {"schemas": named["$defs"], "securitySchemes": _KEYS},
        "security": [{}, {"bearer": []}, {"header": []}],
    }


def _described(route: "Endpoint", method: str, schemas: Mapping[Any, Any]) -> JsonSchema:
    operation, dialect = route.operation, route.dialect
    content = {operation.answer_type: {"schema": schemas[operation.answer]}}
    if operation.stream is not None:
        content[dialect.stream_media_type] = {
            # Readers of the document differ on whether a stream's schema describes its text or each event.
            "schema": {"description": "Events, or lines, one after the other; each holds what x-event says."},
            "x-event": schemas[operation.stream],
        }
    names = re.findall(r"{(\w+)", route.path)
    described: JsonSchema = {
        "operationId": re.sub(r"\W+", "_", f"{method}{route.path}").strip("_"),
        "summary": (inspect.getdoc(route.endpoint) or "").partition("\n")[0],
        "parameters": [
            {"name": name, "in": "path" if name in names else "query", "required": name in names, "schema": _TEXT}
            for name in (*names, *operation.query)
        ],
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "default": {"description": "An error.", "content": _json(schemas[dialect.error_type])},
        },
    }
    if operation.body is not None:
        content = {operation.body_type: {"schema": schemas[operation.body]}}
        described["requestBody"] = {"required": True, "content": content}
    return described


_TEXT: JsonSchema = {"type": "string"}
_KEYS: JsonSchema = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def _either(first: JsonSchema | None, second: JsonSchema) -> JsonSchema:
    if first is None:
        return second
    for status, response in first["responses"].items():
        for kind, media in response["content"].items():
            other = second["responses"][status]["content"][kind]
            media["schema"] = {"anyOf": [media["schema"], other["schema"]]}
    return first


def _json(schema: JsonSchema) -> JsonSchema:
    return {"application/json": {"schema": schema}}


OTHER_APIS: Mapping[str, str] = {
    "another of OpenAI's APIs": """
        audio images videos moderations uploads vector_stores containers responses/compact batches fine_tuning
        assistants threads realtime live evals chatkit content_provenance_checks safety webhook_endpoints
        webhook_event_types
    """,
    "another of Anthropic's APIs": "complete messages/batches",
    "the files, agents and accounts of OpenAI and Anthropic": """
        files skills agents deployments deployment_runs dreams environments memory_stores tunnels vaults
        organization organizations projects user_profiles
    """,
    "Azure OpenAI": "openai/deployments",
    "the rest of LM Studio's own API": """
        api/v0 api/v1/chat api/v1/models/load api/v1/models/unload api/v1/models/download
    """,
    "the rest of Ollama's API": "api/push api/blobs api/me api/signout api/web_search api/web_fetch",
    "Google's Gemini API": "v1beta",
    "the rest of llama.cpp's API": "infill lora-adapters embedding",
    "text-generation-inference's own API": "generate generate_stream",
    "a scoring API": "reranking score",
}
"""APIs, and the first segments of their paths, without `/v1`. The first match counts."""


def find_other_api(path: str) -> str | None:
    """The API that has `path`, with or without `/v1`."""
    asked = path.strip("/").removeprefix("v1/")
    for name, paths in OTHER_APIS.items():
        if any(f"{asked}/".startswith(f"{one}/") for one in paths.split()):
            return name
    return None


def explain_unknown_path(method: str, path: str) -> str:
    """Whose an unknown path is, or how to correct it."""
    said = f"there is no {method} {path[:200]} here"
    api = find_other_api(path)
    if api is not None:
        return f"{said}: it belongs to {api}, which this server does not have"
    if path.startswith("/v1/v1/"):
        return f"{said}: the client adds /v1 itself, so leave it out of the address that it is given"
    return said
