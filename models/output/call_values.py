"""Values of calls as their schemas want them: a text between tags becomes JSON. Pure."""

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from models.errors import FOREIGN_FAULTS
from models.texts import well_formed, well_formed_json

_MAX_REFERENCES: Final = 8
_KINDS: Final = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list | tuple, "array"))
_TYPES: Final = {"null", *(name for _, name in _KINDS), "object"}
_WORDS: Final = {"true": True, "false": False, "null": None, "none": None}


def json_text(value: Any) -> str:
    """Raises ValueError or TypeError for what JSON cannot say."""
    return well_formed(json.dumps(value, ensure_ascii=False, allow_nan=False))


def escaped(text: str) -> str:
    """`text` within a JSON string."""
    return json_text(text)[1:-1]


def properties_of(schema: Any) -> Mapping[str, Any]:
    """The schemas of an object's declared members."""
    declared = schema.get("properties") if isinstance(schema, Mapping) else None
    return declared if isinstance(declared, Mapping) else {}


def types_of(schema: Any, root: Any = None, depth: int = 0) -> frozenset[str]:
    """The JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
        return frozenset()
    root = schema if root is None else root
    given = schema.get("type")
    named = {given} if isinstance(given, str) else {*map(str, given)} if isinstance(given, list) else set()
    types = {one.lower() for one in named} & _TYPES
    if not types:
        values = (*_listed(schema.get("enum")), *([schema["const"]] if "const" in schema else ()))
        types = {_kind_of(value) for value in values}
    for key in ("anyOf", "oneOf", "allOf"):
        parts = [types_of(one, root, depth + 1) for one in _listed(schema.get(key))]
        types |= frozenset().union(*parts) if all(parts) else frozenset()
    return frozenset(types) | types_of(referred(schema.get("$ref"), root), root, depth + 1)


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def referred(reference: Any, root: Any) -> Any:
    """What a `$ref` within a schema names; None for nothing."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    for part in reference[2:].split("/"):
        root = root.get(part) if isinstance(root, Mapping) else None
    return root


def _kind_of(value: Any) -> str:
    return next((name for kind, name in _KINDS if isinstance(value, kind)), "null" if value is None else "object")


def _fits(value: Any, types: frozenset[str]) -> bool:
    kind = _kind_of(value)
    is_whole = kind == "number" and "integer" in types and value.is_integer()
    return not types or kind in types or (kind == "integer" and "number" in types) or is_whole


_READERS: Final[tuple[Callable[[str], Any], ...]] = (
    json.loads,
    ast.literal_eval,
    lambda text: _WORDS[text.lower()],
)


def value_text(text: str, types: frozenset[str]) -> str:
    """The JSON text of a value that was written without quotes: as its types say, else as the text that it is."""
    bare = text.strip()
    for read in _READERS:
        try:
            value = read(bare)
            if not isinstance(value, str) and _fits(value, types):
                written = json_text(value)
                return well_formed_json(bare) if read is json.loads else written
        except FOREIGN_FAULTS:
            continue
    return json_text(text)
