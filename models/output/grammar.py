"""What an output may be constrained to. Pure; compiled elsewhere.

A JSON schema allows members besides `properties`, and a small model invents them until it has no tokens left. A
schema silent about other members forbids them here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

MaskWords = NDArray[np.int32]
"""One bit per token, 1 if the token may come next; the lowest bit of the first word is for token 0."""


JSON_STYLE: Final = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


class GrammarKind(StrEnum):
    """A grammar's language."""

    JSON_SCHEMA = "json_schema"
    LENIENT_JSON_SCHEMA = "lenient_json_schema"
    """Unknown keywords are ignored."""
    REGEX = "regex"
    CHOICE = "choice"
    GBNF_OR_LARK = "gbnf_or_lark"
    LARK = "lark"


JSON_KINDS: Final = (GrammarKind.JSON_SCHEMA, GrammarKind.LENIENT_JSON_SCHEMA)


@dataclass(frozen=True)
class Grammar:
    """An unchecked description of all allowed outputs."""

    kind: GrammarKind
    text: str


class TokenMatcher(Protocol):
    """Follows one output. One thread at a time."""

    @property
    def is_complete(self) -> bool: ...

    def accept(self, token: int) -> None:
        """Accepts the next token; `mask` raises for a forbidden one."""

    def accept_text(self, text: str) -> None:
        """Accepts part of a token's text, like `accept`."""

    def mask(self) -> MaskWords:
        """The tokens that may come next, at least one; raises GrammarFailed."""
        ...

    def mask_without_end(self) -> MaskWords:
        """All tokens except the ends of turn."""
        ...

    def forced(self) -> list[int]:
        """The next tokens, as far as each mask will allow one alone."""
        ...

    def copy(self) -> "TokenMatcher":
        """Another matcher at the same place, to look ahead."""
        ...


class CompiledGrammar(Protocol):
    """A grammar that many outputs may follow. Any thread."""

    def begin(self) -> TokenMatcher:
        """A matcher at an output's beginning."""
        ...


@dataclass(frozen=True)
class CallOpener:
    """What opens calls in an answer that is free text elsewhere."""

    pattern: re.Pattern[str]
    """Ends with a group: what the grammar of a call has already of it."""
    token: int | None = None
    """The one token with which the pattern can be complete, if it is one."""


@dataclass(frozen=True, eq=False)
class OutputGrammar:
    """The constraint on one request's answer, or on each of its calls."""

    compiled: CompiledGrammar
    reasoning_start: int | None = None
    """Begins reasoning before the answer, if anything may."""
    begun: str = ""
    forces_calls: bool = False
    opener: CallOpener | None = None
    """Set if the grammar is that of a call, from after the opener to the call's end."""


_OPEN: Final = {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"}
"""Keywords by which a schema itself describes other members."""
_COMBINING: Final = {"allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "dependentSchemas"}
"""Keywords by which other schemas describe the same object."""
_DEMANDING: Final = ("properties", "required", "minProperties", "enum", "const")
"""Keywords by which a schema describes members, unless empty."""
_SCHEMAS_BY_NAME: Final = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
_LISTS_OF_SCHEMAS: Final = {"anyOf", "oneOf", "prefixItems"}
_SCHEMAS: Final = {"items", "additionalProperties", "contains"}
_VALUES: Final = {"const", "enum", "default", "examples"}
BOUNDS: Final = {f"{end}{what}" for end in ("min", "max") for what in ("Length", "Items", "Properties", "Contains")}
"""Keywords with whole numbers, which JSON Schema also allows as 2.0."""


def close_objects(schema: Any) -> Any:
    """A schema whose objects have only the members they name, unless they say otherwise.

    A schema in which several describe an object (`allOf` of more than one) stays open.
    """
    schema = _with_whole_bounds(schema)
    return schema if _joins_schemas(schema) else _closed(schema)


def describes_members(schema: Mapping[str, Any]) -> bool:
    """Whether an object's schema describes any members."""
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
    # Keywords beside `properties` describe the same object, and may name other members of it.
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


def allows(words: MaskWords, token: int) -> bool:
    """Whether a mask allows a token."""
    word, bit = divmod(token, 32)
    return word < len(words) and bool(int(words[word]) >> bit & 1)
