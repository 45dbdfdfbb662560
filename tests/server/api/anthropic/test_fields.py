"""What becomes of each field is in the tables, in docs/anthropic.md, and true; no field of the package is missing."""

import re
from typing import Any, get_type_hints

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_params
from starlette.testclient import TestClient

from server.api.anthropic.api import TokenCountBody, error_type
from server.api.anthropic.fields import IN_COUNT, IN_MESSAGES, IN_PROMPT
from server.api.anthropic.messages import (
    CacheMissReason,
    ContextManagementBody,
    DiagnosticsBody,
    MessageAnswer,
    MessagesUsage,
    OutputTokensDetails,
)
from server.api.anthropic.types import MessagesBody, PromptBody
from server.api.app import create_app
from server.api.dialect import Rule, Rules, Treatment
from server.api.errors import STATUS
from server.app.config import ServerConfig
from tests.server.api.test_docs import reasons, rows, table
from tests.support.docs import Page
from tests.support.fake_engine import FakeEngine, fake_model

PAGE = Page("anthropic.md")
section = PAGE.section
ASKING = [{"an": "object that no field takes"}]
"""A value that is neutral nowhere."""
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}


FIELDS = section("Fields of `POST /v1/messages`")


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client(engine: FakeEngine) -> TestClient:
    return TestClient(create_app(engine, fake_model(), ServerConfig()))


def test_every_field_of_a_body_is_documented_and_exists() -> None:
    assert set(rows(FIELDS)) == set(MessagesBody.model_fields)
    counted = section("Fields of `POST /v1/messages/count_tokens`")
    assert set(re.findall(r"`([a-z_]+)`", counted.partition("as above")[0])) == set(PromptBody.model_fields)
    assert all(f"`{name}`" in counted for name in get_type_hints(TokenCountBody))


def test_every_refused_field_and_every_one_without_effect_is_documented() -> None:
    assert table(FIELDS, "refused, because") == reasons(IN_MESSAGES, Treatment.REFUSED)
    assert table(FIELDS, "without effect, because") == reasons(IN_MESSAGES, Treatment.NO_EFFECT)


def test_what_is_honoured_is_what_the_bodies_read() -> None:
    def read(rules: Rules) -> set[str]:
        return {name for name, rule in rules.items() if rule.is_read}

    assert read(IN_MESSAGES) == set(MessagesBody.model_fields)
    assert read(IN_PROMPT) == read(IN_COUNT) == set(PromptBody.model_fields)


@pytest.mark.parametrize(
    ("params", "rules"),
    [
        (message_create_params.MessageCreateParamsBase, IN_MESSAGES),
        (beta_params.MessageCreateParamsBase, IN_MESSAGES),
        (message_count_tokens_params.MessageCountTokensParams, IN_COUNT),
    ],
)
def test_every_field_that_the_package_knows_is_in_the_table(params: Any, rules: Rules) -> None:
    assert set(params.__annotations__) - rules.keys() == set()


def refused(rules: Rules) -> dict[str, Rule]:
    return {name: rule for name, rule in rules.items() if rule.treatment is Treatment.REFUSED}


@pytest.mark.parametrize(("path", "rules"), [("/v1/messages", IN_MESSAGES), ("/v1/messages/count_tokens", IN_COUNT)])
def test_every_refused_field_is_refused_and_its_neutral_values_are_taken(
    client: TestClient, path: str, rules: Rules
) -> None:
    for name, rule in refused(rules).items():
        answer = client.post(path, json={**HI, name: ASKING})
        assert answer.status_code == 400 and rule.why in answer.json()["error"]["message"], name
        for value in (*rule.neutral, None):
            assert client.post(path, json={**HI, name: value}).status_code == 200, (name, value)


def test_every_field_without_effect_is_taken_and_has_none(client: TestClient, engine: FakeEngine) -> None:
    names = [name for name, rule in IN_MESSAGES.items() if rule.treatment is Treatment.NO_EFFECT]
    unknown = {"a_field_of_the_next_beta": {"enabled": True}}
    assert client.post("/v1/messages", json=HI).status_code == 200
    assert client.post("/v1/messages", json={**HI, **dict.fromkeys(names, ASKING), **unknown}).status_code == 200
    plain, with_all = engine.requests
    for name in ("max_tokens", "sampling", "stop", "session_id", "namespace", "cache_prompt", "priority"):
        assert getattr(plain, name) == getattr(with_all, name)
    assert plain.tokens.tolist() == with_all.tokens.tolist()


def test_every_field_of_an_answer_is_documented() -> None:
    answer = section("The answer")
    heads = r"^\| (?:field.*|`stop_reason`) \| \|$"
    tables = [rows(part) for part in re.split(heads, answer, flags=re.MULTILINE)[1:]]
    of_answer, _, of_usage, of_diagnostics = map(set, tables)
    assert of_answer == set(get_type_hints(MessageAnswer))
    assert of_usage == set(get_type_hints(MessagesUsage))
    assert of_diagnostics == set(get_type_hints(DiagnosticsBody))
    for kind in (ContextManagementBody, OutputTokensDetails, CacheMissReason):
        assert all(f"`{name}`" in answer for name in get_type_hints(kind)), kind


def test_every_status_of_an_error_is_documented_with_its_type() -> None:
    found = re.findall(r"^\| ([0-9, ]+) \| `([a-z_]+)` \|$", section("Errors"), re.MULTILINE)
    documented = {int(status): kind for statuses, kind in found for status in statuses.split(",")}
    assert documented == {status: error_type(status) for status in STATUS.values()}
