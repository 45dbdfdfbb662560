"""What becomes of each field is in the tables, in docs/responses.md, and true; no field of the package is missing."""

import re
from typing import Any, get_type_hints

from server.api.responses.conversation import (
    IN_RESPONSES,
    ITEM_TYPES,
    LEFT_OUT,
    SKIPPED_ITEM_TYPES,
    WITHOUT_EFFECT,
    InputBody,
    ResponsesBody,
)
from server.api.responses.create import (
    KEPT_SECONDS,
    MAX_EVENT_BYTES,
    MAX_RUNNING,
    MAX_RUNS,
    MAX_SECONDS,
    ResponseBody,
    ResponseUsage,
)
from server.api.responses.store import FILE_NAME, MAX_RESPONSES
from tests.server.api.test_docs import reasons, rows
from tests.support.docs import Page, table

PAGE = Page("responses.md")
section = PAGE.section
ASKING = [{"an": "object that no field takes"}]
"""A value that is neutral nowhere."""
HI: dict[str, Any] = {"input": "Hi"}


FIELDS = section("Fields of `POST /v1/responses`")


def test_every_field_of_a_body_is_documented_and_exists() -> None:
    assert set(rows(FIELDS)) == set(ResponsesBody.model_fields)
    counted = FIELDS.partition("`POST /v1/responses/input_tokens` takes")[2]
    assert set(re.findall(r"`([a-z_]+)`", counted.partition(", and the others")[0])) == set(InputBody.model_fields)
    assert "`object` and `input_tokens`" in counted


def test_every_refused_field_and_every_one_without_effect_is_documented() -> None:
    assert table(FIELDS, "refused, because") == reasons(IN_RESPONSES)
    assert PAGE.without_effect("Fields of `POST /v1/responses`") == set(WITHOUT_EFFECT)


def test_every_field_of_an_answer_is_documented() -> None:
    answer = section("The answer")
    echoed = answer.partition("These fields repeat the request:")[2].partition(".")[0]
    documented = [*rows(answer), *re.findall(r"`([a-z_]+)`", echoed)]
    assert sorted(documented) == sorted(get_type_hints(ResponseBody))
    assert set(get_type_hints(ResponseUsage)) <= set(re.findall(r"[a-z_]+", answer))


def test_items_tools_and_limits_are_documented() -> None:
    items, tools, stored = section("Items"), section("Tools"), section("What is stored")
    assert rows(items) == list(ITEM_TYPES)
    assert all(f"`{name}`" in items for name in SKIPPED_ITEM_TYPES)
    assert all(f"`{name}`" in tools for name in LEFT_OUT)
    assert f"`{FILE_NAME}`" in stored and f"{MAX_RESPONSES} responses" in stored


def test_the_limits_of_responses_in_the_background_are_documented() -> None:
    text = section("In the background")
    assert f"{MAX_RUNNING} for a key, {MAX_RUNS} in all" in text and f"{MAX_EVENT_BYTES / 1e6:.1f} MB" in text
    assert "two hours" in text and MAX_SECONDS == 2 * 3600 and "ten minutes after" in text and KEPT_SECONDS == 600
