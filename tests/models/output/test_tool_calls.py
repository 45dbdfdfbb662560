"""A tool call is found wherever the stream cuts the text, and what is no call stays text."""

import importlib
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.output.pieces import (
    OutputParser,
    Piece,
    Text,
    ToolArguments,
    ToolCallEnded,
    ToolCallFailed,
    ToolCallStarted,
)
from models.output.tool_calls import ToolCall, ToolCallParser, ToolFormat
from tests.support.fake_engine import JSON_TOOLS

CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
OPEN_ENDED = ToolFormat("[CALLS]", "", JSON_TOOLS.parse)


def run(texts: list[str], tool_format: ToolFormat = JSON_TOOLS, *, is_complete: bool = True) -> list[str | ToolCall]:
    """The whole output, texts that follow each other joined, and calls without their random names."""
    output = ToolCallParser(tool_format, [])
    pieces = [piece for text in texts for piece in output.feed(text)]
    pieces += output.finish(is_complete=is_complete)
    result: list[str | ToolCall] = []
    for part in together(pieces):
        if isinstance(part, ToolCall):
            result.append(ToolCall("id", part.name, part.arguments))
        elif result and isinstance(result[-1], str):
            result[-1] += part
        else:
            result.append(part)
    return result


def together(pieces: list[Piece]) -> list[str | ToolCall]:
    """Texts and calls; fails for pieces that no output may consist of."""
    result: list[str | ToolCall] = []
    is_open = False
    for piece in pieces:
        match piece:
            case Text(text):
                assert text and not is_open
                result.append(text)
            case ToolCallStarted(call_id, name):
                assert not is_open
                result.append(ToolCall(call_id, name, ""))
                is_open = True
            case ToolArguments(text):
                call = result[-1]
                assert is_open and isinstance(call, ToolCall)
                result[-1] = ToolCall(call.id, call.name, call.arguments + text)
            case ToolCallEnded():
                assert is_open
                is_open = False
            case ToolCallFailed(text):
                assert is_open and isinstance(result[-1], ToolCall)
                result[-1] = text
                is_open = False
    assert not is_open
    return result


HALVED = ToolCall("id", "f\ufffd", '{"a": "\ufffd"}')
WEATHER = ToolCall("id", "get_weather", '{"city": "Paris"}')

CASES: list[tuple[str, list[str | ToolCall]]] = [
    ("Hello there.", ["Hello there."]),
    ("", []),
    (CALL, [WEATHER]),
    (f"Let me look.\n{CALL}", ["Let me look.", WEATHER]),
    (f"{CALL}\n{CALL}\n", [WEATHER, WEATHER]),
    (f"{CALL}{CALL}", [WEATHER, WEATHER]),
    (f"{CALL} Done.", [WEATHER, " Done."]),
    ("a < b <tool", ["a < b <tool"]),
    ("<tool_call", ["<tool_call"]),
    ("trailing \n ", ["trailing \n "]),
    ("<tool_call>nonsense</tool_call>", ["<tool_call>nonsense</tool_call>"]),
    ("Hm.\n<tool_call>{</tool_call> so.", ["Hm.\n<tool_call>{</tool_call> so."]),
    ("<tool_call>[]</tool_call>", ["<tool_call>[]</tool_call>"]),
    ('<tool_call>{"name": 5}</tool_call>', ['<tool_call>{"name": 5}</tool_call>']),
    ('<tool_call>{"arguments": {}}</tool_call>', ['<tool_call>{"arguments": {}}</tool_call>']),
    (f"<tool_call>{{</tool_call>{CALL}", ["<tool_call>{</tool_call>", WEATHER]),
    ('<tool_call>{"name": "f"}</tool_call>', [ToolCall("id", "f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', [ToolCall("id", "f", "{}")]),
    (
        '<tool_call>[{"name": "f"}, {"name": "g", "arguments": {"ü": 1}}]</tool_call>',
        [ToolCall("id", "f", "{}"), ToolCall("id", "g", '{"ü": 1}')],
    ),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call>', [ToolCall("id", "f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": " "}</tool_call>', [ToolCall("id", "f", "{}")]),
    ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', [ToolCall("id", "f", '{"a": 1}')]),
    ('<tool_call>{"name": "f", "arguments": "{ \\"a\\":1}"}</tool_call>', [ToolCall("id", "f", '{ "a":1}')]),
    (
        r'<tool_call>{"name": "f", "arguments": {"a": "\ud83d\ude00"}}</tool_call>',
        [ToolCall("id", "f", '{"a": "😀"}')],
    ),
    (r'<tool_call>{"name": "f\ud83d", "arguments": {"a": "\ud83d"}}</tool_call>', [HALVED]),
]

NO_CALLS = [
    '{"name": "f", "arguments": "{oops"}',
    '{"name": "f", "arguments": "[1, 2]"}',
    '{"name": "f", "arguments": [1, 2]}',
    '{"name": "f", "arguments": 5}',
    '{"name": "f", "arguments": true}',
    '{"name": "f", "arguments": {"a": NaN}}',
    '{"name": "f", "arguments": {"a": -Infinity}}',
    '{"name": "f", "arguments": "{\\"a\\": NaN}"}',
    '{"name": "f", "arguments": "null"}',
    '{"name": "f", "parameters": [1]}',
    '[{"name": "f"}, {"name": "g", "arguments": "{"}]',
    '{"name": "f", "arguments": ' + '{"a":' * 300 + "1" + "}" * 301,
    '{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}",
    "5",
    "null",
    '"f"',
]


@pytest.mark.parametrize("text", NO_CALLS)
def test_what_only_looks_like_a_call_stays_text(text: str) -> None:
    written = f"<tool_call>{text}</tool_call>"
    assert run([written]) == run(list(written)) == [written]


def test_arguments_are_passed_on_as_they_come() -> None:
    output = ToolCallParser(JSON_TOOLS, [])
    assert output.feed('Hm.\n<tool_call>{"name": "f", "argum') == [Text("Hm.")]
    started, arguments = output.feed('ents": {"a": "x y')
    assert isinstance(started, ToolCallStarted) and started.name == "f"
    assert arguments == ToolArguments('{"a": "x y')
    assert output.feed(" z\\") == [ToolArguments(" z")]
    assert output.feed('n", "b": 12') == [ToolArguments('\\n", "b": ')]
    assert output.feed("3}") == [ToolArguments("123}")]
    assert not output.made_calls
    assert output.feed("}</tool_call>") == [ToolCallEnded()]
    assert output.made_calls


@pytest.mark.parametrize("rest", ["oops}}</tool_call>", '1}, "name": "g"}</tool_call>', "1}}}</tool_call>", "1"])
def test_a_call_that_fails_after_all_is_text_and_nothing_of_it_is_lost(rest: str) -> None:
    written = '<tool_call>{"name": "f", "arguments": {"a": '
    output = ToolCallParser(JSON_TOOLS, [])
    started, arguments = output.feed(written)
    assert isinstance(started, ToolCallStarted) and arguments == ToolArguments('{"a": ')
    pieces = [*output.feed(rest), *output.finish(is_complete=False)]
    assert pieces[-1] == ToolCallFailed(written + rest)
    assert not output.made_calls


def test_a_change_of_mind_within_a_call_does_not_change_what_was_said() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}, "arguments": {"a": 2}}</tool_call>'
    assert run(list(text)) == [text]


@pytest.mark.parametrize("parser", ["json_tools", "mistral", "glm47", "longcat"])
def test_arguments_by_another_name_are_arguments_whatever_the_parser(parser: str) -> None:
    parse = importlib.import_module(f"mlx_lm.tool_parsers.{parser}").parse_tool_call
    text = '<a>{"name": "f", "parameters": {"b": "c"}}</a>'
    assert run([text], ToolFormat("<a>", "</a>", parse)) == [ToolCall("id", "f", '{"b": "c"}')]


def test_what_a_parser_returns_is_checked_as_well() -> None:
    for arguments in ("{oops", [1], float("nan"), {"a": float("inf")}, {"a": {1, 2}}, {"a": b"x"}, {("a",): 1}, 0):
        broken = ToolFormat("<a>", "</a>", lambda *_, value=arguments: {"name": "f", "arguments": value})
        assert run(["<a>x</a>"], broken) == ["<a>x</a>"], arguments


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_text_and_calls_are_told_apart(text: str, expected: list[str | ToolCall]) -> None:
    assert run([text]) == expected


@given(case=st.sampled_from(CASES), cuts=st.lists(st.integers(0, 100)))
def test_it_does_not_matter_where_the_text_is_cut(case: tuple[str, list[str | ToolCall]], cuts: list[int]) -> None:
    text, expected = case
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = run([text[start:stop] for start, stop in itertools.pairwise(edges)])
    assert meanings(parts) == meanings(expected)


def meanings(parts: list[str | ToolCall]) -> list[Any]:
    """The parts with arguments as values: what is passed on early keeps the spelling of the model."""
    return [(part.name, json.loads(part.arguments)) if isinstance(part, ToolCall) else part for part in parts]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_every_cut_gives_the_same(text: str, expected: list[str | ToolCall]) -> None:
    assert meanings(run(list(text))) == meanings(expected)
    for cut in range(len(text)):
        assert meanings(run([text[:cut], text[cut:]])) == meanings(expected)


@given(st.text(alphabet="<tol_ca>/{} \n", max_size=60), st.booleans())
def test_nothing_is_lost_where_no_call_is_made(text: str, is_complete: bool) -> None:
    assert "".join(str(piece) for piece in run(list(text), is_complete=is_complete)) == text


@pytest.mark.parametrize("text", ["Hello", "Hello ", "a <", "x </tool_call>"])
def test_text_that_is_no_marker_is_released_at_once(text: str) -> None:
    released = together(ToolCallParser(JSON_TOOLS, []).feed(text))
    assert "".join(map(str, released)) == text.removesuffix("<").rstrip()


def test_an_open_call_counts_when_the_model_ended_by_itself() -> None:
    text = CALL.removesuffix("</tool_call>")
    assert run([text]) == [WEATHER]
    assert run([text], is_complete=False) == [text]


def test_a_format_without_an_end_marker_ends_with_the_answer() -> None:
    text = '[CALLS]{"name": "f", "arguments": {"a": "</tool_call>"}}'
    assert run(list(text), OPEN_ENDED) == [ToolCall("id", "f", '{"a": "</tool_call>"}')]
    assert run(list(text), OPEN_ENDED, is_complete=False) == [text]


def test_whether_calls_were_made_is_known_afterwards() -> None:
    output = ToolCallParser(JSON_TOOLS, [])
    output.feed("<tool_call>{</tool_call>")
    assert not output.made_calls
    output.feed(CALL)
    assert output.made_calls


def test_the_parser_is_given_the_tools_and_its_own_id_is_kept() -> None:
    seen: list[Any] = []

    def parse(text: str, tools: Any) -> Any:
        seen.append(tools)
        return {"name": "f", "arguments": {}, "id": "functions.f:0"}

    output = ToolCallParser(ToolFormat("<a>", "</a>", parse), [{"type": "function"}])
    assert together(output.feed("<a></a>")) == [ToolCall("functions.f:0", "f", "{}")]
    assert seen == [[{"type": "function"}]]


def test_two_calls_never_share_a_name() -> None:
    output = ToolCallParser(JSON_TOOLS, [])
    first, second = together(output.feed(CALL + CALL))
    assert isinstance(first, ToolCall)
    assert isinstance(second, ToolCall)
    assert first.id != second.id
    assert json.loads(first.arguments) == {"city": "Paris"}


def test_without_tools_a_call_is_text() -> None:
    output = OutputParser()
    assert output.feed(CALL) == [Text(CALL)]
    assert output.finish(is_complete=True) == []


INTEGER = {
    "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}, "b": {"type": "array"}}}}
}


@pytest.mark.parametrize("value", ["<parameter=a>inf</parameter>", "<parameter=b>" + "-" * 100_000 + "1</parameter>"])
def test_whatever_a_parser_raises_leaves_text(value: str) -> None:
    parse = importlib.import_module("mlx_lm.tool_parsers.qwen3_coder").parse_tool_call
    text = f"<tool_call><function=f>{value}</function></tool_call>"
    output = ToolCallParser(ToolFormat("<tool_call>", "</tool_call>", parse), [INTEGER])
    assert output.feed(text) == [Text(text)]
