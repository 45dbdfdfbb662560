"""Bound answers of tiny real models with random weights: whatever they would say, it is what was asked for."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.names import DEMO_FOLDER
from server.api.responses.conversation import ResponsesBody
from tests.server.api.test_live import Live, serving, user
from tests.support import tiny_models

FREE: dict[str, Any] = {"extra_body": {}, "temperature": 1, "max_tokens": 600}
NO_THOUGHT = {"logit_bias": {str(tiny_models.tokenizer().convert_tokens_to_ids("<think>")): -100}}


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


VALUES = st.text(max_size=5) | st.integers(-(2**53), 2**53)
LEAVES = st.one_of(
    st.builds(lambda length: {"type": "string", "maxLength": length}, st.integers(0, 6)),
    st.builds(lambda low: {"type": "integer", "minimum": low, "maximum": low + 99}, st.integers(-50, 50)),
    st.builds(
        lambda values: {"enum": values},
        st.lists(VALUES, min_size=1, max_size=4),
    ),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
)


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    closing = {} if properties else {"additionalProperties": False}
    return {"type": "object", "properties": properties, "required": list(properties), **closing}


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: (
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 3}, inner)
        | st.builds(_object, st.dictionaries(st.text(min_size=1, max_size=6), inner, max_size=3))
        | st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3))
    ),
    max_leaves=5,
)


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is what a schema of the kinds above allows."""
    if "anyOf" in schema:
        return any(fits(value, option) for option in schema["anyOf"])
    if "enum" in schema:
        return any(value == each and isinstance(value, type(each)) for each in schema["enum"])
    match schema["type"]:
        case "string":
            return isinstance(value, str) and len(value) <= schema["maxLength"]
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "array":
            return isinstance(value, list) and len(value) <= 3 and all(fits(each, schema["items"]) for each in value)
    properties = schema["properties"]
    is_object = isinstance(value, dict) and list(value) == list(properties)
    return is_object and all(fits(value[name], properties[name]) for name in properties)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_a_random_model_writes_json_of_any_schema(live: Live, schema: dict[str, Any], seed: int) -> None:
    answer = live.ask(user("x"), response_format=schema_format(schema), seed=seed, **FREE, **NO_THOUGHT)
    assert answer.choices[0].finish_reason == "stop"
    assert fits(json.loads(answer.choices[0].message.content), schema)


def test_bound_and_free_rows_run_together(live: Live) -> None:
    schema = _object({"text": {"type": "string", "maxLength": 20}, "yes": {"type": "boolean"}})
    asked = [
        {"seed": n, **FREE, "max_tokens": 200, **({"response_format": schema_format(schema)} if n % 2 else {})}
        for n in range(8)
    ]
    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(lambda fields: live.text(user("x"), **fields, **NO_THOUGHT), asked))
    assert all(fits(json.loads(text), schema) for text in texts[1::2])
    assert len(texts[0]) > 0


def test_a_thought_is_free_and_the_answer_behind_it_bound(live: Live) -> None:
    start, end = (tiny_models.tokenizer().convert_tokens_to_ids(token) for token in ("<think>", "</think>"))
    schema, thoughts = _object({"yes": {"type": "boolean"}}), set()
    for seed in range(8):
        fields = {**FREE, "logit_bias": {str(start): 100, str(end): 98}, "seed": seed}
        message = live.ask(user("x"), response_format=schema_format(schema), **fields).choices[0].message
        assert fits(json.loads(message.content), schema)
        thoughts.add(getattr(message, "reasoning_content", ""))
    assert len(thoughts) > 1


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"guided_regex": "[a-c]{3}x"}, {a + b + c + "x" for a in "abc" for b in "abc" for c in "abc"}),
        ({"regex": "ab?"}, {"a", "ab"}),
        ({"guided_choice": ["yes", "no", "ä\n"]}, {"yes", "no", "ä\n"}),
        ({"grammar": 'root ::= "a" | "bc"'}, {"a", "bc"}),
        ({"ebnf": 'root ::= "a"'}, {"a"}),
        ({"guided_grammar": 'start: "a" | "bc"'}, {"a", "bc"}),
        ({"structured_outputs": {"choice": ["l", "r"]}}, {"l", "r"}),
        ({"structured_outputs": {"json": {"enum": [1, 2]}}}, {"1", "2"}),
        ({"json_schema": {"enum": [1, 2]}}, {"1", "2"}),
        ({"guided_json": '{"enum": [1, 2]}'}, {"1", "2"}),
        ({"format": {"enum": [1, 2]}}, {"1", "2"}),
        ({"response_format": {"type": "json_object", "schema": {"enum": [1, 2]}}}, {"1", "2"}),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_each_field_binds_the_answer(live: Live, path: str, fields: dict[str, Any], allowed: set[str]) -> None:
    prompt = {"messages": [user("x")]} if "chat" in path else {"prompt": "x"}
    answer = live.post(path, **prompt, **NO_THOUGHT, **fields, max_tokens=50, temperature=1)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert (choice["text"] if "text" in choice else choice["message"]["content"]) in allowed


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": schema_format({"type": "nonsense"})}, "response_format.json_schema.schema"),
        ({"response_format": schema_format({"type": "array", "contains": {}})}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"guided_regex": "(("}, "guided_regex"),
        ({"grammar": "root ::= missing"}, "grammar"),
        ({"structured_outputs": {"regex": "(("}}, "structured_outputs"),
        ({"regex": "a", "ebnf": 'root ::= "b"'}, "ebnf"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_cannot_bind_an_answer_is_refused_in_words(live: Live, fields: dict[str, Any], param: str) -> None:
    answer = live.post("/v1/chat/completions", messages=[user("x")], **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("fields", [{"response_format": {"type": "text"}}, {"grammar": ""}, {"guided_json": None}])
def test_values_that_bind_nothing_are_taken(live: Live, fields: dict[str, Any]) -> None:
    plain = live.text(user("x"))
    assert live.text(user("x"), extra_body={"ignore_eos": True, **fields}) == plain


@pytest.mark.parametrize(("asked", "thinks"), [(None, False), (True, True)])
def test_a_bound_answer_begins_no_thought_that_its_template_would_begin(asked: bool | None, thinks: bool) -> None:
    """Of all tokens the grammar leaves the demo model only `{`, and the marker of a thought would be likelier."""
    with serving(DEMO_FOLDER) as demo:
        fields = {"extra_body": {} if asked is None else {"enable_thinking": asked}}
        answer = demo.ask(user("Hello!"), response_format={"type": "json_object"}, max_tokens=30, **fields)
        assert bool(getattr(answer.choices[0].message, "reasoning_content", None)) is thinks


def test_a_response_of_any_object_is_bound_by_no_schema() -> None:
    """OpenAI's `text.format` has a schema only where its type is "json_schema"."""
    told = {"format": {"type": "json_object", "schema": {"type": "integer"}}}
    bound = ResponsesBody.model_validate({"model": "x", "input": "x", "text": told}).answer_grammar()
    plain = ResponsesBody.model_validate({"model": "x", "input": "x", "text": {"format": {"type": "json_object"}}})
    assert bound is not None and bound == plain.answer_grammar()
