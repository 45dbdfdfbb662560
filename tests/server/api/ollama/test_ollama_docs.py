"""docs/ollama.md names every field, option and path of Ollama's dialect, and what becomes of it."""

import re
from typing import Any, get_type_hints

import pytest

from server.api.bodies import Rules
from server.api.generation import IGNORED_OPTIONS, Options
from server.api.ollama.api import DetailsBody, RunningBody, ShownBody, TagBody
from server.api.ollama.generate import (
    IN_BOTH,
    IN_GENERATE,
    IN_MESSAGE,
    OllamaBody,
    OllamaChatAnswer,
    OllamaChatBody,
    OllamaGenerateAnswer,
    OllamaGenerateBody,
    OllamaMessage,
)
from server.api.openapi import OTHER_APIS, find_other_api
from tests.server.api.test_docs import reasons, rows
from tests.support.docs import Page, table

PAGE = Page("ollama.md")
section = PAGE.section


BOTH, CHAT, GENERATE = (
    section(title) for title in ("Fields of both endpoints", "`POST /api/chat`", "`POST /api/generate`")
)


def added(rules: Rules) -> Rules:
    return {name: rule for name, rule in rules.items() if name not in IN_BOTH}


def test_every_field_of_a_body_is_documented_and_exists() -> None:
    own = set(OllamaBody.model_fields)
    of_chat, of_messages = CHAT.split("A message holds:")
    assert set(rows(BOTH)) == own
    assert set(rows(of_chat)) == set(OllamaChatBody.model_fields) - own
    assert set(rows(of_messages)) == set(OllamaMessage.model_fields)
    assert set(rows(GENERATE)) == set(OllamaGenerateBody.model_fields) - own
    assert set(rows(section("Options"))) == set(Options.model_fields)


def test_every_refused_field_is_documented() -> None:
    of_messages = CHAT.split("A message holds:")[1]
    assert table(BOTH, "refused, because") == reasons(IN_BOTH)
    assert table(of_messages, "refused, because") == reasons(IN_MESSAGE)
    assert table(GENERATE, "refused, because") == reasons(added(IN_GENERATE))


def test_every_option_without_effect_is_documented() -> None:
    assert PAGE.without_effect("Options") == IGNORED_OPTIONS


def test_every_field_of_an_answer_is_documented() -> None:
    answer = section("The answer")
    documented = {name for kind in (OllamaChatAnswer, OllamaGenerateAnswer) for name in get_type_hints(kind)}
    assert set(rows(answer)) == documented
    said = ("role", "content", "thinking", "tool_calls", "id", "function", "index", "name", "arguments")
    assert all(f"`{name}`" in answer for name in said)


@pytest.mark.parametrize(
    ("head", "kind"),
    [("field of `models` in `/api/tags`", TagBody), ("field of `models` in `/api/ps`", RunningBody),
     ("field of `/api/show`", ShownBody)],
)  # fmt: skip
def test_every_field_of_a_model_is_documented(head: str, kind: Any) -> None:
    assert set(rows("\n".join(sorted(table(section("Models"), head))))) == set(get_type_hints(kind))
    assert all(f"`{name}`" in section("Models") for name in (*get_type_hints(DetailsBody), "model", "name"))


def test_what_is_missing_is_what_the_table_of_other_apis_names() -> None:
    assert {path for name, paths in OTHER_APIS.items() if "Ollama" in name for path in paths.split()} >= {
        "api/me",
        "api/push",
    }
    assert all(find_other_api(path) for path in re.findall(r"`(/api/[a-z]+)`", section("What is missing")))
