"""The pages of docs/ name every endpoint, field, limit and code that exists, and none that does not."""

import json
import re
from dataclasses import is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from pydantic import BaseModel
from typing_extensions import is_typeddict

from server.api.anthropic.api import ANTHROPIC, error_type
from server.api.anthropic.conversation import IN_MESSAGES, MessagesBody
from server.api.app import ADMIN_ROUTES, APIS
from server.api.bodies import Rules
from server.api.decisions.api import DECISIONS, SYSTEM_ONE
from server.api.dialect import Endpoint
from server.api.errors import Code
from server.api.generation import IGNORED_OPTIONS, IN_BOTH, IN_TEXT, Options, SamplingBody, SharedBody
from server.api.llama_cpp import api as llama_cpp
from server.api.ollama import generate as ollama
from server.api.ollama.api import OLLAMA
from server.api.openai.api import OPENAI
from server.api.openai.chat import IN_CHAT, IN_MESSAGE
from server.api.responses import conversation, create, store
from server.api.responses.api import RESPONSES
from server.api.sessions import (
    MAX_ALL_REFUSALS,
    MAX_REFUSALS,
    MAX_SESSIONS,
    MAX_TURNS,
    SESSION_HEADERS,
    SESSION_METADATA,
)
from server.diagnosis.causes import MissReason
from server.engine.request import DraftSource
from tests.support.docs import DOCS, Page

SHARED = "api.md"
PAGES = {OPENAI: SHARED, ANTHROPIC: "anthropic.md", OLLAMA: "ollama.md", RESPONSES: "responses.md"}
PAGES[llama_cpp.LLAMA_CPP] = "llama_cpp.md"
PAGES |= dict.fromkeys((SYSTEM_ONE, DECISIONS), "decisions.md")
AS_IN_ITS_API = {
    *("first_id", "last_id", "has_more", "data", "lifecycle", "display_name", "created_at", "max_input_tokens"),
    *("definition", "tool_name", "tool_references", "generate_summary"),
}
"""Fields of lists of models and of tools of which the API's own documentation says all."""


def names_of(kind: Any, seen: set[int]) -> set[str]:
    """The fields of a type, and of all types in it."""
    if id(kind) in seen:
        return set()
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        seen.add(id(kind))
        own = {field.alias or name: field.annotation for name, field in kind.model_fields.items()}
    elif is_typeddict(kind) or (isinstance(kind, type) and is_dataclass(kind)):
        seen.add(id(kind))
        own = get_type_hints(kind)
    else:
        keys, *_ = [*get_args(kind), None]
        own = dict.fromkeys(get_args(keys) if get_origin(kind) is dict and get_origin(keys) is Literal else ())
    inner = [*own.values(), *(one for one in get_args(kind) if not isinstance(one, str))]
    return {*own, *(name for one in inner for name in names_of(one, seen))}


def fields_of(*routes: Endpoint) -> set[str]:
    kinds = [kind for one in routes for kind in (one.operation.body, one.operation.answer, one.operation.stream)]
    return {name for kind in kinds for name in names_of(kind, set())}


def words(text: str) -> set[str]:
    """The words that stand as code."""
    return set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", text))))


def tables(text: str, head: str) -> list[str]:
    """The lines of all tables whose first column is headed so."""
    found = re.findall(rf"^\| {head}[^|\n]*\|.*\n\|[-|]+\|\n((?:\|.*\n)*)", text, re.MULTILINE)
    return [line for lines in found for line in lines.splitlines()]


def reasons(rules: Rules, known: Rules) -> set[str]:
    """The lines of the table of refused fields that `known` lacks: a reason, its fields with their neutral values."""
    named: dict[str, list[str]] = {}
    for name, rule in rules.items():
        if known.get(name) != rule:
            neutral = ", ".join(f"`{json.dumps(value)}`" for value in rule.neutral)
            named.setdefault(rule.why, []).append(f"`{name}`{f' ({neutral})' if neutral else ''}")
    return {f"| {why} | {', '.join(names)} |" for why, names in named.items()}


def test_every_endpoint_is_documented_and_exists() -> None:
    served = [*(route for api in APIS for route in api.routes), *ADMIN_ROUTES]
    routes = [(re.sub(r":[a-z]+", "", route.path), route.methods or ()) for route in served]
    methods = {f"{method} {path}" for path, taken in routes for method in taken if method != "HEAD"}
    pages = [path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))]
    documented = {name for page in pages for name in re.findall(r"^\| `([A-Z]+ /[^`]*)` \|", page, re.MULTILINE)}
    without_v1 = {name.replace(" /v1/", " /") for name in documented} - documented
    assert documented | without_v1 == methods


@pytest.mark.parametrize("api", APIS, ids=PAGES.get)
def test_every_field_is_documented_and_exists(api: Any) -> None:
    of_page = [route for other in APIS if PAGES[other] == PAGES[api] for route in other.routes]
    page, fields = Page(PAGES[api]).text, fields_of(*of_page)
    shared = "".join(Page(name).text for name in (SHARED, "embeddings.md"))
    named = {word for name in fields for word in name.split(".")}
    assert named - words(page) - words(shared) - AS_IN_ITS_API == set()
    documented = {name for line in tables(page, "field") for name in re.findall(r"^\| `([^`]+)`", line)}
    assert documented - fields - fields_of(*ADMIN_ROUTES) == set()


def test_every_field_of_our_own_endpoints_is_documented() -> None:
    pages = (SHARED, "embeddings.md", "models.md", "events.md", "console.md")
    assert fields_of(*ADMIN_ROUTES) - words("".join(Page(name).text for name in pages)) == set()


REFUSED: dict[str, list[tuple[Rules, Rules]]] = {
    SHARED: [(IN_BOTH, {}), (IN_CHAT, IN_BOTH), (IN_TEXT, IN_BOTH), (IN_MESSAGE, {})],
    "anthropic.md": [(IN_MESSAGES, {})],
    "ollama.md": [(ollama.IN_BOTH, {}), (ollama.IN_GENERATE, ollama.IN_BOTH)],
    "llama_cpp.md": [(llama_cpp.IN_COMPLETION, IN_TEXT)],
    "responses.md": [(conversation.IN_RESPONSES, {})],
}


@pytest.mark.parametrize("page", REFUSED)
def test_every_refused_field_is_documented_with_its_reason(page: str) -> None:
    wanted = {line for rules, known in REFUSED[page] for line in reasons(rules, known)}
    assert set(tables(Page(page).text, "refused, because")) == wanted


REFUSALS = (f"last {MAX_REFUSALS} refusals", f"{MAX_ALL_REFUSALS} in all")
TURNS = (f"last {MAX_TURNS} turns", f"{MAX_SESSIONS} sessions")
RUNS = (f"{create.MAX_RUNNING} for a key, {create.MAX_RUNS} in all", f"{create.MAX_EVENT_BYTES / 1e6:.1f} MB")


@pytest.mark.parametrize(
    ("page", "names"),
    [
        (SHARED, [*REFUSALS, *TURNS, *map(str, MissReason)]),
        ("events.md", [", ".join(f"`{source}`" for source in DraftSource)]),
        ("metrics.md", [", ".join(f"`{source}`" for source in DraftSource)]),
        ("ollama.md", [f"`{name}`" for name in (*Options.model_fields, *IGNORED_OPTIONS)]),
        ("llama_cpp.md", [f"`{kind}_error`" for kind in (*llama_cpp.ERRORS.values(), "server", "invalid_request")]),
        ("responses.md", [f"`{name}`" for name in (*conversation.ITEM_TYPES, *conversation.SKIPPED_ITEM_TYPES)]),
        ("responses.md", [f"`{name}`" for name in (*conversation.LEFT_OUT, *conversation.WITHOUT_EFFECT)]),
        ("responses.md", [*RUNS, "two hours", "ten minutes after"]),
        ("responses.md", [f"{store.MAX_RESPONSES} responses", f"`{store.FILE_NAME}`"]),
    ],
)
def test_limits_and_names_are_documented(page: str, names: list[str]) -> None:
    assert [name for name in names if name not in Page(page).text] == []
    assert (create.MAX_SECONDS, create.KEPT_SECONDS) == (2 * 3600, 600)


def test_every_source_of_a_session_is_documented_in_its_order() -> None:
    text = Page(SHARED).section("Sessions").lower()
    places = [text.index(f"`{name}`") for name in ("session_id", *SESSION_HEADERS[:3])]
    places += [text.index(f"`{name}`", places[-1]) for name in SESSION_HEADERS[3:]]
    places += [text.index(name, places[-1]) for name in ("prompt_cache_key", "metadata.user_id")]
    places += [text.index(f"metadata.{name}") for name in SESSION_METADATA]
    places += [text.index(name) for name in ("previous_response_id", "conversation`, a text")]
    assert places == sorted(places)


def test_every_code_of_an_error_is_documented_with_its_status_and_type() -> None:
    documented = re.findall(r"^\| (\d{3}) \| `([a-z_]+)` \|", Page(SHARED).section("Errors"), re.MULTILINE)
    assert set(documented) == {(str(code.status), code.value) for code in Code}
    found = re.findall(r"^\| ([0-9, ]+) \| `([a-z_]+)` \|$", Page("anthropic.md").section("Errors"), re.MULTILINE)
    types = {int(status): kind for statuses, kind in found for status in statuses.split(",")}
    assert types == {code.status: error_type(code.status) for code in Code}


def test_no_setting_of_sampling_is_ignored_where_it_would_change_the_answer() -> None:
    changes_nothing_alone = {name for name in SamplingBody.model_fields if name.endswith(("_size", "_last_n"))}
    changes_nothing_alone |= {"xtc_threshold", "dry_base", "dry_allowed_length", "dry_sequence_breakers"}
    samples = SamplingBody.model_fields.keys() - SharedBody.model_fields.keys() - changes_nothing_alone
    assert samples <= {*MessagesBody.model_fields, *IN_MESSAGES}
