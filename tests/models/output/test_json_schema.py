"""Schemas are read as closed where they name their members and say nothing of others."""

import json
from typing import Any

import pytest

from models.inference.grammar import GrammarCompiler
from models.output.grammar import BOUNDS, close_objects
from server.api.binding import json_grammar
from tests.support import tiny_models

CITY = {"properties": {"city": {"type": "string"}}}
CLOSED_CITY = {**CITY, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (CITY, CLOSED_CITY),
        ({"type": "array", "items": CITY}, {"type": "array", "items": CLOSED_CITY}),
        ({"prefixItems": [CITY]}, {"prefixItems": [CLOSED_CITY]}),
        ({"$defs": {"a": CITY}, "$ref": "#/$defs/a"}, {"$defs": {"a": CLOSED_CITY}, "$ref": "#/$defs/a"}),
        ({"anyOf": [CITY, {"type": "null"}]}, {"anyOf": [CLOSED_CITY, {"type": "null"}]}),
        ({"additionalProperties": CITY}, {"additionalProperties": CLOSED_CITY}),
        (
            {"properties": {"properties": CITY}},
            {"properties": {"properties": CLOSED_CITY}, "additionalProperties": False},
        ),
    ],
)
def test_named_members_are_all(schema: Any, closed: Any) -> None:
    assert close_objects(schema) == closed


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object"},
        {"properties": {}},
        {**CITY, "additionalProperties": True},
        {**CITY, "patternProperties": {"^x": True}},
        {**CITY, "anyOf": [{"properties": {"other": {"type": "string"}}}, {"required": ["city"]}]},
        {**CITY, "$ref": "#/$defs/more"},
        {"$defs": {"a": CITY}, "allOf": [{"$ref": "#/$defs/a"}, {"properties": {"b": True}}]},
        {"enum": [CITY]},
        {"const": CITY, "default": CITY, "examples": [CITY]},
    ],
)
def test_what_speaks_of_others_or_describes_none_stays(schema: Any) -> None:
    assert close_objects(schema) == schema


TWO = {"minLength": 2.0}
VALUES = {"const": {"maxItems": 3.0}, "enum": [TWO], "default": TWO, "minimum": 2.0}


@pytest.mark.parametrize(
    ("written", "whole"),
    [
        *((f'{{"{word}": 2.0}}', f'{{"{word}": 2}}') for word in sorted(BOUNDS)),
        ('{"maxItems": 2.5, "minItems": "2.0"}', '{"maxItems": 2.5, "minItems": "2.0"}'),
        ('{"properties": {"default": {"minLength": 2.0}}, "allOf": [{"items": {"minItems": 1.0}}]}', None),
        ('{"properties": {"minLength": {"minLength": 2.0}}, "patternProperties": {"x": {"maxItems": 1e2}}}', None),
        (json.dumps(VALUES), json.dumps(VALUES)),
    ],
)
def test_bounds_are_integers_however_they_are_written(written: str, whole: str | None) -> None:
    expected = whole or written.replace("2.0", "2").replace("1.0", "1").replace("1e2", "100")
    assert json.dumps(close_objects(json.loads(written))) == expected


@pytest.mark.parametrize("bounds", [{"type": "string", "minLength": 2.0}, {"type": "array", "maxItems": 2.0}])
def test_a_grammar_is_made_of_a_schema_with_bounds_in_the_other_spelling(bounds: Any) -> None:
    tokenizer: Any = tiny_models.tokenizer()
    GrammarCompiler(tokenizer.backend_tokenizer.to_str, [0]).compile(json_grammar({"properties": {"a": bounds}}))
