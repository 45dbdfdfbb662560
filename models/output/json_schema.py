"""Takes a JSON schema as people mean it where it is to bind an answer. Pure.

By the specification, an object may have members besides those in `properties`, and a small model then invents members
until it has no tokens left. So a schema that says nothing about other members is read as forbidding them.
"""

from collections.abc import Mapping
from typing import Any, Final

_OPEN: Final = {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"}
"""Keywords by which a schema speaks of other members itself."""
_COMBINING: Final = {"allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "dependentSchemas"}
"""Keywords by which other schemas say what the same object may hold."""
_DEMANDING: Final = ("properties", "required", "minProperties", "enum", "const")
"""Keywords by which a schema, unless they are empty, says which members there are."""
_SCHEMAS_BY_NAME: Final = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
_LISTS_OF_SCHEMAS: Final = {"anyOf", "oneOf", "prefixItems"}
_SCHEMAS: Final = {"items", "additionalProperties", "contains"}
_VALUES: Final = {"const", "enum", "default", "examples"}
BOUNDS: Final = {f"{end}{what}" for end in ("min", "max") for what in ("Length", "Items", "Properties", "Contains")}
"""Keywords whose values are whole numbers, which JSON Schema lets anybody write as 2.0."""


def close_objects(schema: Any) -> Any:
    """Returns a schema whose objects have no members but those they name, unless they say otherwise.

    A schema in which several describe one object together (`allOf` of more than one) stays open. Bounds are integers.
    """
    schema = _with_whole_bounds(schema)
    return schema if _joins_schemas(schema) else _closed(schema)


def describes_members(schema: Mapping[str, Any]) -> bool:
    """Returns whether the schema of an object says anything of its members."""
    return any(schema.get(key) for key in _DEMANDING) or not schema.keys().isdisjoint(_OPEN | _COMBINING | {"allOf"})


def _with_whole_bounds(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_with_whole_bounds(one) for one in schema]
    return {key: _bound(key, value) for key, value in schema.items()} if isinstance(schema, Mapping) else schema


def _bound(key: str, value: Any) -> Any:
    if key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
        return {name: _with_whole_bounds(schema) for name, schema in value.items()}
    if key in BOUNDS and isinstance(value, float) and value.is_integer():
        return int(value)
    return value if key in _VALUES else _with_whole_bounds(value)


def _joins_schemas(value: Any) -> bool:
    if isinstance(value, Mapping):
        joined = value.get("allOf")
        if isinstance(joined, list) and len(joined) > 1:
            return True
        return any(map(_joins_schemas, value.values()))
    return isinstance(value, list) and any(map(_joins_schemas, value))


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    names = schema.get("properties")
    # What stands beside `properties` describes the same object, of which it may name other members.
    parts = _LISTS_OF_SCHEMAS - {"prefixItems"} if "properties" in schema else frozenset()
    closed = {key: value if key in parts else _closed_below(key, value) for key, value in schema.items()}
    if not isinstance(names, Mapping) or not names or not schema.keys().isdisjoint(_OPEN | _COMBINING):
        return closed
    return {**closed, "additionalProperties": False}


def _closed_below(key: str, value: Any) -> Any:
    if key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
        return {name: _closed(schema) for name, schema in value.items()}
    if key in _LISTS_OF_SCHEMAS and isinstance(value, list):
        return [_closed(schema) for schema in value]
    return _closed(value) if key in _SCHEMAS else value
