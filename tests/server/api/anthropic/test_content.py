"""The blocks of an answer, and the events that tell of them, agree however the pieces fall."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.output.pieces import Piece, Reasoning, Text, ToolArguments, ToolCallCut, ToolCallEnded, ToolCallStarted
from models.texts import enclose
from server.api.anthropic.content import AnswerContent, reasoning_of, sign

CALL: list[Piece] = [ToolCallStarted("call_1", "f"), ToolArguments('{"a": '), ToolArguments("1}"), ToolCallEnded()]
CUT: list[Piece] = [ToolCallStarted("call_2", "g"), ToolArguments('{"a": 1'), ToolCallCut("<tool_call>{")]


def told(pieces: list[Piece], **settings: Any) -> tuple[AnswerContent, list[dict[str, Any]]]:
    content = AnswerContent(**settings)
    events = [event for piece in pieces for event in content.add(piece)]
    return content, [*events, *content.close()]


def collected(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a client makes of the events; each is checked to be in its place."""
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                blocks.append({**event["content_block"], "parts": ""})
                is_open = True
            case "content_block_stop":
                assert is_open
                is_open = False
            case "content_block_delta":
                assert is_open
                grow(blocks[-1], event["delta"])
        assert event["index"] == len(blocks) - 1
    assert not is_open
    return blocks


def grow(block: dict[str, Any], delta: dict[str, Any]) -> None:
    kinds = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "parts"}
    if delta["type"] == "signature_delta":
        block["signature"] = delta["signature"]
    else:
        field = kinds[delta["type"]]
        block[field] += delta["partial_json" if field == "parts" else field]


def as_block(made: dict[str, Any]) -> dict[str, Any]:
    parts = made.pop("parts")
    return {**made, "input": json.loads(parts or "{}")} if made["type"] == "tool_use" else made


def test_each_kind_of_piece_has_its_block() -> None:
    content, events = told([Reasoning("H"), Reasoning("m"), Text("Let me "), Text("look."), *CALL])
    assert content.so_far == [
        {"type": "thinking", "thinking": "Hm", "signature": sign("Hm")},
        {"type": "text", "text": "Let me look.", "citations": None},
        {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}, "caller": {"type": "direct"}},
    ]
    assert [as_block(made) for made in collected(events)] == content.so_far


def test_a_call_that_breaks_stays_in_part_and_what_follows_is_text() -> None:
    content, events = told([Text("So: "), *CUT, Text(" and on")])
    assert content.so_far == [
        {"type": "text", "text": "So: ", "citations": None},
        {"type": "tool_use", "id": "toolu_2", "name": "g", "input": {}, "caller": {"type": "direct"}},
        {"type": "text", "text": " and on", "citations": None},
    ]
    assert [made["type"] for made in collected(events)] == ["text", "tool_use", "text"]


def test_what_was_said_so_far_is_there_before_the_end() -> None:
    content = AnswerContent()
    content.add(Text("Hel"))
    content.add(Text("lo"))
    assert content.so_far == [{"type": "text", "text": "Hello", "citations": None}]
    assert content.close() == [{"type": "content_block_stop", "index": 0}]
    assert content.close() == []


def test_a_thought_that_is_not_shown_is_in_its_signature() -> None:
    content, events = told([Reasoning("H"), Reasoning("m"), Text("Hi")], shows_thinking=False)
    [thought, _] = content.so_far
    assert thought == {"type": "thinking", "thinking": "", "signature": enclose("Hm")}
    assert [as_block(made) for made in collected(events)] == content.so_far
    assert "thinking_delta" not in str(events)


def test_an_id_that_the_model_wrote_itself_stays() -> None:
    content, _ = told([ToolCallStarted("functions.f:0", "f"), ToolArguments("{}"), ToolCallEnded()])
    assert [(one["id"], one["name"]) for one in content.so_far] == [("functions.f:0", "f")]


PIECES = st.one_of(
    st.builds(Text, st.text("ab ", min_size=1)).map(lambda piece: [piece]),
    st.builds(Reasoning, st.text("ab ", min_size=1)).map(lambda piece: [piece]),
    st.just(CALL),
)


@given(st.lists(PIECES))
def test_the_events_make_up_the_blocks(groups: list[list[Piece]]) -> None:
    content, events = told([piece for group in groups for piece in group])
    assert [as_block(made) for made in collected(events)] == content.so_far


@pytest.mark.parametrize("thought", ["", "Hm", "größer 🙂\n", "\ud83d"])
def test_a_thought_survives_its_signature(thought: str) -> None:
    assert reasoning_of("", enclose(thought)) == thought.encode(errors="replace").decode()
    assert reasoning_of(thought, sign(thought)) == thought


@pytest.mark.parametrize("signature", ["", "EqQBCgIY", "mlx-serve-text-1:%%%", "mlx-serve-text-1:/w==", sign("a")])
def test_a_signature_that_holds_no_thought_leaves_it_empty(signature: str) -> None:
    assert reasoning_of("", signature) == ""
    assert reasoning_of("shown", signature) == "shown"
