"""What becomes of each field is in the tables, in docs/anthropic.md, and true; no field of the package is missing."""

import re
from typing import Any, get_type_hints

from server.api.anthropic.api import (
    CacheMissReason,
    DiagnosticsBody,
    MessageAnswer,
    MessagesUsage,
    error_type,
)
from server.api.anthropic.conversation import IN_MESSAGES, MessagesBody, PromptBody
from server.api.errors import Code
from tests.server.api.test_docs import reasons, rows
from tests.support.docs import Page, table

PAGE = Page("anthropic.md")
section = PAGE.section
ASKING = [{"an": "object that no field takes"}]
"""A value that is neutral nowhere."""
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}


FIELDS = section("Fields of `POST /v1/messages`")


def test_every_field_of_a_body_is_documented_and_exists() -> None:
    assert set(rows(FIELDS)) == set(MessagesBody.model_fields)
    counted = section("Fields of `POST /v1/messages/count_tokens`")
    assert set(re.findall(r"`([a-z_]+)`", counted.partition("as above")[0])) == set(PromptBody.model_fields)
    assert "`input_tokens`" in counted


def test_every_refused_field_is_documented() -> None:
    assert table(FIELDS, "refused, because") == reasons(IN_MESSAGES)


def test_every_field_of_an_answer_is_documented() -> None:
    answer = section("The answer")
    heads = r"^\| (?:field.*|`stop_reason`) \| \|$"
    tables = [rows(part) for part in re.split(heads, answer, flags=re.MULTILINE)[1:]]
    of_answer, _, of_usage, of_diagnostics = map(set, tables)
    assert of_answer == set(get_type_hints(MessageAnswer))
    assert of_usage == set(get_type_hints(MessagesUsage))
    assert of_diagnostics == set(get_type_hints(DiagnosticsBody))
    for name in (*get_type_hints(CacheMissReason), "applied_edits", "thinking_tokens"):
        assert f"`{name}`" in answer


def test_every_status_of_an_error_is_documented_with_its_type() -> None:
    found = re.findall(r"^\| ([0-9, ]+) \| `([a-z_]+)` \|$", section("Errors"), re.MULTILINE)
    documented = {int(status): kind for statuses, kind in found for status in statuses.split(",")}
    assert documented == {code.status: error_type(code.status) for code in Code}
