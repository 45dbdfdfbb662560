"""What an output may be bound to, and how it is followed token by token. Pure: who compiles it stands elsewhere.

Takes a JSON schema as people mean it where it is to bind an answer. Pure.

By the specification, an object may have members besides those in `properties`, and a small model then invents members
until it has no tokens left. So a schema that says nothing about other members is read as forbidding them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

MaskWords = NDArray[np.int32]
"""One bit for each token, the lowest of the first word for token 0; 1 where it may come next."""


JSON_STYLE: Final = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""How JSON is written, as `x-guidance` in a schema says it."""


class GrammarKind(StrEnum):
    """The language that a grammar is written in."""

    JSON_SCHEMA = "json_schema"
    """A JSON schema; what of it is not known is an error."""
    LENIENT_JSON_SCHEMA = "lenient_json_schema"
    """A JSON schema; keywords that are not known bind nothing."""
    REGEX = "regex"
    CHOICE = "choice"
    """A JSON list of texts, one of which is the output."""
    GBNF_OR_LARK = "gbnf_or_lark"
    LARK = "lark"


@dataclass(frozen=True)
class Grammar:
    """A description of all allowed outputs, not checked yet."""

    kind: GrammarKind
    text: str


class TokenMatcher(Protocol):
    """Follows one output. One thread at a time."""

    @property
    def is_complete(self) -> bool:
        """Whether the output is allowed as it is and nothing may follow."""
        ...

    def accept(self, token: int) -> None:
        """Takes the next token. One that is not allowed is an error, which `mask` raises."""

    def accept_text(self, text: str) -> None:
        """Takes text that a token has put out beside other things, as `accept` takes a token."""

    def mask(self) -> MaskWords:
        """Returns which tokens may come next, at least one; the end of turn only where the output may end.

        Raises GrammarFailed where that cannot be said.
        """
        ...

    def mask_without_end(self) -> MaskWords:
        """Returns a mask of all tokens but the ends of turn."""
        ...


class CompiledGrammar(Protocol):
    """A grammar that is ready to be followed, any number of times. For any thread."""

    def begin(self) -> TokenMatcher:
        """Returns a matcher at the beginning of an output."""
        ...


@dataclass(frozen=True, eq=False)
class OutputGrammar:
    """What binds the answer of one request."""

    compiled: CompiledGrammar
    thought_start: int | None = None
    """The token that may begin a thought in place of the answer, which is then bound from its end on; None where the
    prompt has begun or closed the thought, or the model has none."""
    begun: str = ""
    """The beginning of the answer, where the prompt holds it already."""
    forces_calls: bool = False
    """Whether the answer can be nothing but tool calls."""


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
