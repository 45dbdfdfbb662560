"""The first source that names a session wins, and no name can do harm."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.errors import InvalidParameter
from server.api.sessions import SESSION_HEADERS, resolve_line, resolve_session_id

UUID = "0b7d3f6e-5a0c-4d0e-9f5a-2f8f1c1d2e3f"

# Every source in the order of precedence: (part of the body, header, the name it gives).
SOURCES: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({"session_id": "body"}, {}, "body"),
    ({}, {"X-Session-Id": "h0"}, "h0"),
    ({}, {"X-Claude-Code-Session-Id": "h1"}, "h1"),
    ({}, {"session-id": "h2"}, "h2"),
    ({}, {"session_id": "h3"}, "h3"),
    ({}, {"Thread-Id": "h4"}, "h4"),
    ({}, {"x-session-affinity": "h5"}, "h5"),
    ({}, {"X-OpenWebUI-Chat-Id": "h6"}, "h6"),
    ({}, {"X-Conversation-Id": "h7"}, "h7"),
    ({}, {"x-litellm-session-id": "h8"}, "h8"),
    ({}, {"x-smg-routing-key": "h9"}, "h9"),
    ({"prompt_cache_key": "key"}, {}, "key"),
    ({"metadata": {"user_id": json.dumps({"session_id": "in user"})}}, {}, "in user"),
    ({"metadata": {"session_id": "m0"}}, {}, "m0"),
    ({"metadata": {"chat_id": "m1"}}, {}, "m1"),
    ({"metadata": {"conversation_id": "m2"}}, {}, "m2"),
    ({"previous_response_id": "resp_1"}, {}, "resp_1"),
    ({"conversation": {"id": "conv_1"}}, {}, "conv_1"),
]


def merge(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """Both bodies in one; where both hold metadata, all of it."""
    both = {**left, **right}
    if "metadata" in left and "metadata" in right:
        both["metadata"] = {**left["metadata"], **right["metadata"]}
    return both


@pytest.mark.parametrize(("body", "headers", "name"), SOURCES)
def test_each_source_alone_names_the_session(body: Any, headers: Any, name: str) -> None:
    assert resolve_session_id(body, headers) == name


@pytest.mark.parametrize("index", range(len(SOURCES)))
def test_an_earlier_source_wins_over_every_later_one(index: int) -> None:
    body: dict[str, Any] = {}
    headers: dict[str, str] = {}
    for later_body, later_headers, _ in SOURCES[index:]:
        body, headers = merge(body, later_body), {**headers, **later_headers}
    assert resolve_session_id(body, headers) == SOURCES[index][2]


def test_all_headers_are_covered_above() -> None:
    assert [next(iter(headers)).lower() for _, headers, _ in SOURCES if headers] == list(SESSION_HEADERS)


def test_nothing_names_no_session() -> None:
    assert resolve_session_id({}, {}) is None


@pytest.mark.parametrize("empty", [None, ""])
def test_an_empty_name_is_as_good_as_none(empty: str | None) -> None:
    body = {"session_id": empty, "prompt_cache_key": empty, "metadata": {"chat_id": "m"}}
    assert resolve_session_id(body, {"x-session-id": "  "}) == "m"


@pytest.mark.parametrize(
    ("user_id", "name"),
    [
        (f"user_abc_account__session_{UUID}", UUID),
        (f"user_abc_session_{UUID.upper()}", UUID.upper()),
        (f"user_abc_session_{UUID}x", None),
        ("user_abc_session_1", None),
        (json.dumps({"device_id": "d", "session_id": UUID}), UUID),
        (json.dumps({"device_id": "d"}), None),
        ("{not json", None),
        ("{" * 100_000, None),
        ("[1]", None),
        ("ada@example.org", None),
        (17, None),
    ],
)
def test_agents_put_the_session_into_the_name_of_the_user(user_id: Any, name: str | None) -> None:
    assert resolve_session_id({"metadata": {"user_id": user_id}}, {}) == name


@pytest.mark.parametrize(
    ("body", "headers", "param"),
    [
        ({"session_id": "x" * 257}, {}, "session_id"),
        ({"session_id": "a\nb"}, {}, "session_id"),
        ({"session_id": "a\x00"}, {}, "session_id"),
        ({"session_id": "\x1b[2J"}, {}, "session_id"),
        ({"session_id": 7}, {}, "session_id"),
        ({"session_id": ["a"]}, {}, "session_id"),
        ({}, {"X-Session-Id": "x" * 257}, "x-session-id"),
        ({}, {"X-Session-Id": "a\x07"}, "x-session-id"),
        ({"prompt_cache_key": "x" * 1000}, {}, "prompt_cache_key"),
        ({"metadata": {"chat_id": {"a": 1}}}, {}, "metadata.chat_id"),
        ({"metadata": {"user_id": '{"session_id": 5}'}}, {}, "metadata.user_id"),
        ({"conversation": {"id": 3}}, {}, "conversation"),
    ],
)
def test_a_hostile_name_is_refused_with_its_place(body: Any, headers: Any, param: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        resolve_session_id(body, headers)
    assert caught.value.param == param
    assert param in str(caught.value)


def test_the_longest_name_allowed_is_256_characters() -> None:
    assert resolve_session_id({"session_id": "x" * 256}, {}) == "x" * 256


AGENT = {"X-Claude-Code-Session-Id": "s", "x-claude-code-agent-id": "a1", "x-claude-code-parent-agent-id": "a0"}
CODEX = {"session-id": "s", "thread-id": "s"}


def turn_metadata(**fields: str) -> dict[str, str]:
    return {"x-codex-turn-metadata": json.dumps(fields)}


@pytest.mark.parametrize(
    ("body", "headers", "name"),
    [
        ({}, AGENT, "s/a1"),
        ({"session_id": "s"}, {"x-claude-code-agent-id": "a1"}, "s/a1"),
        ({}, CODEX, "s"),
        ({}, {**CODEX, **turn_metadata(request_kind="turn", thread_id="s")}, "s"),
        ({}, {**CODEX, "thread-id": "child", "x-openai-subagent": "collab_spawn"}, "s/child"),
        ({}, {**CODEX, "x-openai-subagent": "review"}, "s/review"),
        ({}, {**CODEX, **turn_metadata(request_kind="compaction")}, "s/compaction"),
        ({"client_metadata": turn_metadata(request_kind="title")}, CODEX, "s/title"),
        (
            {"client_metadata": {"thread_id": "child", **turn_metadata(request_kind="compaction")}},
            CODEX,
            "s/compaction",
        ),
        ({"client_metadata": {"thread_id": "child"}, "prompt_cache_key": "s"}, {}, "s/child"),
        ({"client_metadata": {"x-codex-turn-metadata": "{"}}, {"thread-id": "t"}, "t"),
        ({"client_metadata": {"request_kind": "a\x00"}}, CODEX, "s"),
        ({"session_id": "x" * 250}, {"x-claude-code-agent-id": "y" * 250}, "x" * 250 + "/yyyyy"),
    ],
)
def test_agents_requests_beside_the_session_are_lines_of_their_own(body: Any, headers: Any, name: str) -> None:
    assert resolve_line(body, headers) == name


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
FIELDS = ("session_id", "prompt_cache_key", "metadata", "previous_response_id", "conversation", "client_metadata")
HEADERS = (*SESSION_HEADERS, "x-codex-turn-metadata", "x-claude-code-agent-id", "x-openai-subagent")


@given(
    body=st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=3),
    headers=st.dictionaries(st.sampled_from(HEADERS), st.text(), max_size=3),
)
def test_whatever_is_sent_the_answer_is_a_usable_name_none_or_the_error(body: Any, headers: Any) -> None:
    try:
        names = resolve_session_id(body, headers), resolve_line(body, headers)
    except InvalidParameter:
        return
    assert all(name is None or (0 < len(name) <= 256 and name.isprintable()) for name in names)


@pytest.mark.parametrize("name", ["wörk", "voilà", "日本", "🙂", "plain"])
def test_a_header_is_read_as_utf_8(name: str) -> None:
    assert resolve_session_id({}, {"X-Session-Id": name.encode().decode("latin-1")}) == name


def test_a_header_that_is_no_utf_8_is_read_as_latin_1() -> None:
    assert resolve_session_id({}, {"X-Session-Id": "w\xf6rk"}) == "wörk"
