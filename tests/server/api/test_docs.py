"""docs/api.md names every endpoint, field, header and code that exists, and none that does not."""

import json
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from cache.disk.index import DiskWrites
from cache.views import StateBytes
from server.api.admin.cache import (
    CacheEdgeBody,
    CacheStateBody,
    ClearedBody,
    DiskNodeBody,
    NamespaceBody,
    NodeBody,
    PinnedBody,
)
from server.api.admin.state import CacheCountsBody, DeletedBody, EngineBody, HealthBody, SessionList
from server.api.app import ADMIN_ROUTES, APIS
from server.api.bodies import Rule, Rules
from server.api.dialect import ErrorObject
from server.api.errors import Code
from server.api.generation import IN_BOTH, IN_TEXT, GenerationBody, StreamOptions
from server.api.openai.api import ModelBody, ModelList, PrimedBody
from server.api.openai.chat import IN_CHAT, IN_MESSAGE, ChatBody, ChatMessage
from server.api.openai.generate import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChunkChoice,
    CompletionBody,
    MessageBody,
    Spent,
    TextChoice,
    TextCompletion,
    Usage,
)
from server.api.record import CacheBody, TimingsBody
from server.api.sessions import (
    MAX_ALL_REFUSALS,
    MAX_REFUSALS,
    MAX_SESSIONS,
    MAX_TURNS,
    SESSION_HEADERS,
    SESSION_METADATA,
    Refusal,
    SessionDetail,
    TurnRecord,
)
from server.diagnosis.causes import Miss, MissReason
from server.engine.request import DraftSource, RequestCounts
from tests.support.docs import Page, table

ROOT = Path(__file__).parents[3]
PAGE = Page("api.md")
section = PAGE.section


def rows(text: str) -> list[str]:
    """The names in the first column of every table."""
    return [
        name for cell in re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE) for name in re.findall(r"`([^`]+)`", cell)
    ]


def reasons(rules: Rules) -> set[str]:
    """The lines of the table of refused fields: a reason, and its fields with their neutral values."""
    fields: dict[str, list[str]] = {}
    for name, rule in rules.items():
        fields.setdefault(rule.why, []).append(f"`{name}`{neutral_values(rule)}")
    return {f"| {why} | {', '.join(names)} |" for why, names in fields.items()}


def neutral_values(rule: Rule) -> str:
    values = ", ".join(f"`{json.dumps(value)}`" for value in rule.neutral)
    return f" ({values})" if values else ""


CHAT, TEXT = section("`POST /v1/chat/completions`"), section("`POST /v1/completions`")
BOTH = section("Fields of both completion endpoints")


def test_every_endpoint_is_documented_and_exists() -> None:
    served = [*(route for api in APIS for route in api.routes), *ADMIN_ROUTES]
    routes = [(re.sub(r":[a-z]+", "", route.path), route.methods or ()) for route in served]
    methods = {f"{method} {path}" for path, taken in routes for method in taken}
    pages = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    documented = {name for page in pages for name in re.findall(r"^\| `([A-Z]+ /[^`]*)` \|", page, re.MULTILINE)}
    without_v1 = {name.replace(" /v1/", " /") for name in documented} - documented
    assert documented | without_v1 == {name for name in methods if not name.startswith("HEAD")}
    assert "without the `/v1`" in PAGE.text


def test_every_field_of_a_body_is_documented_and_exists() -> None:
    chat_fields, message_fields = CHAT.split("A message holds:")
    assert set(rows(BOTH)) == {field.alias or name for name, field in GenerationBody.model_fields.items()}
    assert set(rows(chat_fields)) == set(ChatBody.model_fields) - set(GenerationBody.model_fields)
    assert set(rows(message_fields)) == set(ChatMessage.model_fields)
    assert set(rows(TEXT)) == set(CompletionBody.model_fields) - set(GenerationBody.model_fields)
    assert all(f"`{name}`" in BOTH for name in StreamOptions.model_fields)


@pytest.mark.parametrize("page", ["events.md", "metrics.md"])
def test_every_source_of_drafts_is_documented(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert ", ".join(f"`{source}`" for source in DraftSource) in text


def test_every_refused_field_is_documented_and_refused() -> None:
    assert table(BOTH, "refused, because") == reasons(IN_BOTH)
    of_chat, of_messages = CHAT.split("A message holds:")
    for text, rules in ((of_chat, IN_CHAT), (TEXT, IN_TEXT)):
        added = {name: rule for name, rule in rules.items() if IN_BOTH.get(name) != rule}
        assert table(text, "refused, because") == reasons(added)
    assert table(of_messages, "refused, because") == reasons(IN_MESSAGE)


def test_every_field_of_an_answer_is_documented() -> None:
    answer = section("The answer")
    tables = rows(answer)
    bodies = (ChatCompletion, TimingsBody, CacheBody, Miss)
    reasons = {reason.value for reason in MissReason}
    assert set(tables) - reasons == {name for body in bodies for name in get_type_hints(body)}
    assert reasons <= set(tables)
    for kind in (ChatChunk, ChatChoice, ChunkChoice, MessageBody, TextCompletion, TextChoice, Usage):
        assert set(get_type_hints(kind)) <= set(re.findall(r"`([a-z_]+)[.`]", answer)), kind
    assert "prompt_tokens_details.cached_tokens`" in answer and all(
        f"{name}`" in PAGE.text for name in get_args(Spent)
    )


@pytest.mark.parametrize("kind", [ModelBody, ModelList, HealthBody, EngineBody, RequestCounts, CacheCountsBody])
def test_every_field_of_models_and_health_is_documented(kind: Any) -> None:
    assert all(f"`{name}`" in section("Models and health") for name in get_type_hints(kind))


def test_every_field_of_sessions_is_documented() -> None:
    text = section("Sessions and their costs")
    of_session, of_turn = text.split("| field of a turn |")
    of_turn, of_refusal = of_turn.split("| field of a refusal |")
    assert set(rows(of_refusal)) == set(get_type_hints(Refusal))
    assert f"last {MAX_REFUSALS} refusals" in text and f"{MAX_ALL_REFUSALS} in all" in text
    assert set(rows(of_session)) == set(get_type_hints(SessionDetail))
    assert set(rows(of_turn)) == set(get_type_hints(TurnRecord))
    others = {name for body in (SessionList, DeletedBody) for name in get_type_hints(body)}
    assert all(f"`{name}`" in text for name in others)
    assert f"last {MAX_TURNS} turns" in text and f"{MAX_SESSIONS} sessions" in text


@pytest.mark.parametrize(
    "kind",
    [
        CacheStateBody,
        NamespaceBody,
        NodeBody,
        DiskNodeBody,
        CacheEdgeBody,
        StateBytes,
        DiskWrites,
        ClearedBody,
        PrimedBody,
        PinnedBody,
    ],
)
def test_every_field_of_the_cache_is_documented(kind: Any) -> None:
    assert all(f"`{name}`" in section("The cache") for name in get_type_hints(kind))


def test_every_source_of_a_session_is_documented_in_its_order() -> None:
    text = section("Sessions").lower()
    places = [text.index(f"`{name}`") for name in ("session_id", *SESSION_HEADERS[:3])]
    places += [text.index(f"`{name}`", places[-1]) for name in SESSION_HEADERS[3:]]
    places += [text.index(name, places[-1]) for name in ("prompt_cache_key", "metadata.user_id")]
    places += [text.index(f"metadata.{name}") for name in SESSION_METADATA]
    places += [text.index(name) for name in ("previous_response_id", "conversation`, a text")]
    assert places == sorted(places)


def test_every_code_of_an_error_is_documented_with_its_status() -> None:
    errors = section("Errors")
    documented = re.findall(r"^\| (\d{3}) \| `([a-z_]+)` \|", errors, re.MULTILINE)
    assert set(documented) == {(str(code.status), code.value) for code in Code}
    assert all(f'"{name}"' in errors for name in get_type_hints(ErrorObject))
