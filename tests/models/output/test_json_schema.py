"""Schemas are read as closed where they name their members and say nothing of others."""

from typing import Any

import pytest

from models.output.json_schema import close_objects

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
