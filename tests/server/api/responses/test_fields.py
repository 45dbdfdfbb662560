"""What becomes of each field is in the tables, in docs/responses.md, and true; no field of the package is missing."""

import re
from typing import Any, get_type_hints

import pytest
from openai.types.responses import input_token_count_params, response_create_params
from starlette.testclient import TestClient

from server.api.app import create_app
from server.api.dialect import Rules, Treatment
from server.api.responses.create import (
    AnswerTokensDetails,
    InputTokensDetails,
    ResponseBody,
    ResponseError,
    ResponseTokensBody,
    ResponseUsage,
)
from server.api.responses.fields import IN_COUNT, IN_INPUT, IN_RESPONSES
from server.api.responses.items import ITEM_TYPES, SKIPPED_ITEM_TYPES
from server.api.responses.store import FILE_NAME, MAX_RESPONSES
from server.api.responses.types import LEFT_OUT, InputBody, ResponsesBody
from server.app.config import ServerConfig
from tests.server.api.test_docs import reasons, rows, table
from tests.support.docs import Page
from tests.support.fake_engine import FakeEngine, fake_model

PAGE = Page("responses.md")
section = PAGE.section
ASKING = [{"an": "object that no field takes"}]
"""A value that is neutral nowhere."""
HI: dict[str, Any] = {"input": "Hi"}


FIELDS = section("Fields of `POST /v1/responses`")


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client(engine: FakeEngine) -> TestClient:
    return TestClient(create_app(engine, fake_model(), ServerConfig()))


def test_every_field_of_a_body_is_documented_and_exists() -> None:
    assert set(rows(FIELDS)) == set(ResponsesBody.model_fields)
    counted = FIELDS.partition("`POST /v1/responses/input_tokens` takes")[2]
    assert set(re.findall(r"`([a-z_]+)`", counted.partition(", and the others")[0])) == set(InputBody.model_fields)
    assert all(f"`{name}`" in counted for name in get_type_hints(ResponseTokensBody))


def test_every_refused_field_and_every_one_without_effect_is_documented() -> None:
    assert table(FIELDS, "refused, because") == reasons(IN_RESPONSES, Treatment.REFUSED)
    assert table(FIELDS, "without effect, because") == reasons(IN_RESPONSES, Treatment.NO_EFFECT)


def test_what_is_honoured_is_what_the_bodies_read() -> None:
    def read(rules: Rules) -> set[str]:
        return {name for name, rule in rules.items() if rule.is_read}

    assert read(IN_RESPONSES) == set(ResponsesBody.model_fields)
    assert read(IN_INPUT) == read(IN_COUNT) == set(InputBody.model_fields)


@pytest.mark.parametrize(
    ("params", "rules"),
    [
        (response_create_params.ResponseCreateParamsBase, IN_RESPONSES),
        (input_token_count_params.InputTokenCountParams, IN_COUNT),
    ],
)
def test_every_field_that_the_package_knows_is_in_the_table(params: Any, rules: Rules) -> None:
    assert set(params.__annotations__) - rules.keys() == set()


@pytest.mark.parametrize(
    ("path", "rules"), [("/v1/responses", IN_RESPONSES), ("/v1/responses/input_tokens", IN_COUNT)]
)
def test_every_refused_field_is_refused_and_its_neutral_values_are_taken(
    client: TestClient, path: str, rules: Rules
) -> None:
    for name, rule in rules.items():
        if rule.treatment is not Treatment.REFUSED:
            continue
        answer = client.post(path, json={**HI, name: ASKING})
        assert answer.status_code == 400 and rule.why in answer.json()["error"]["message"], name
        for value in (*rule.neutral, None):
            assert client.post(path, json={**HI, name: value}).status_code == 200, (name, value)


def test_every_field_without_effect_is_taken_and_has_none(client: TestClient, engine: FakeEngine) -> None:
    rules = IN_RESPONSES.items()
    names = [name for name, rule in rules if rule.treatment is Treatment.NO_EFFECT and not rule.is_read]
    typed = {"truncation": "auto", "parallel_tool_calls": False, "user": "me", "safety_identifier": "me"}
    assert client.post("/v1/responses", json=HI).status_code == 200
    answer = client.post("/v1/responses", json={**HI, **dict.fromkeys(names, ASKING), **typed, "max_tool_calls": 1})
    assert answer.status_code == 200
    plain, with_all = engine.requests
    for name in ("max_tokens", "sampling", "stop", "session_id", "namespace", "cache_prompt", "priority"):
        assert getattr(plain, name) == getattr(with_all, name)
    assert plain.tokens.tolist() == with_all.tokens.tolist()


def test_every_field_of_an_answer_is_documented() -> None:
    answer = section("The answer")
    echoed = answer.partition("These return what was asked:")[2].partition(".")[0]
    documented = [*rows(answer), *re.findall(r"`([a-z_]+)`", echoed)]
    assert sorted(documented) == sorted(get_type_hints(ResponseBody))
    for kind in (ResponseUsage, InputTokensDetails, AnswerTokensDetails, ResponseError):
        assert set(get_type_hints(kind)) <= set(re.findall(r"[a-z_]+", answer)), kind


def test_items_tools_and_limits_are_documented() -> None:
    items, tools, stored = section("Items"), section("Tools"), section("What is stored")
    assert rows(items) == list(ITEM_TYPES)
    assert all(f"`{name}`" in items for name in SKIPPED_ITEM_TYPES)
    assert all(f"`{name}`" in tools for name in LEFT_OUT)
    assert f"`{FILE_NAME}`" in stored and f"{MAX_RESPONSES} responses" in stored
