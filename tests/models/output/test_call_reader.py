"""Calls in every format are read whole or not at all, and alike wherever a stream cuts their text."""

import importlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.output.call_formats import (
    CODER,
    DEEPSEEK_V3,
    DEEPSEEK_V3_1,
    DSML,
    FORMATS,
    FUNCTION_GEMMA,
    GEMMA4,
    GLM,
    HARMONY,
    HERMES,
    JSON,
    KIMI_K2,
    KIMI_K3,
    LFM2,
    LLAMA,
    LONGCAT,
    MINICPM,
    MINIMAX,
    MISTRAL,
    MUSE_SPARK,
    PYTHONIC,
    CallFormat,
    Literal,
    Tags,
)
from models.output.call_reader import CallReader, DeclaredTools, HarmonyReader
from models.output.pieces import (
    OutputParser,
    Piece,
    Reasoning,
    ReasoningFormat,
    ReasoningParser,
    Text,
    ToolArguments,
    ToolCallCut,
    ToolCallEnded,
    ToolCallStarted,
)
from tests.support.call_writer import Calls, written

STRING, INTEGER, OBJECT, ARRAY = ({"type": kind} for kind in ("string", "integer", "object", "array"))
BOOLEAN, NUMBER = {"type": "boolean"}, {"type": "number"}
SCHEMAS: Final[Mapping[str, Any]] = {
    "get_weather": {"city": STRING, "days": INTEGER},
    "log_event": {"text": STRING, "day": INTEGER, "n": INTEGER, "data": OBJECT},
    "web_search": {"query": STRING, "limit": INTEGER},
    "create": {"content": STRING},
    "move": {"command": STRING, "angle": INTEGER},
    "py": {"code": STRING, "n": ARRAY},
    "read": {"path": STRING},
    "search": {"query": STRING, "max_results": INTEGER, "exclude": ARRAY, "safe": BOOLEAN, "note": STRING},
    "opt": {
        "n": {"anyOf": [INTEGER, {"type": "null"}]},
        "name": {"anyOf": [STRING, {"type": "null"}]},
        "flag": {"type": ["boolean", "null"]},
    },
    "ping": {},
}


def tools_of(schemas: Mapping[str, Any], **keywords: Any) -> list[dict[str, Any]]:
    described = ((name, {"type": "object", "properties": one, **keywords}) for name, one in schemas.items())
    return [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in described]


TOOLS: Final = tools_of(SCHEMAS)
CLOSED: Final = tools_of(SCHEMAS, additionalProperties=False)
THINK: Final = ReasoningFormat("<think>", "</think>")
NAMES: Final = {
    "coder": CODER,
    "ds": DEEPSEEK_V3_1,
    "kimi": KIMI_K2,
    "lfm": LFM2,
    **{one.name: one for one in FORMATS},
}
RECORDED: Final = [json.loads(line) for line in (Path(__file__).parent / "data/calls.jsonl").read_text().splitlines()]


def thinking_parser(call_format: CallFormat, *, is_open: bool = True) -> OutputParser:
    answer, thought = CallReader(call_format, TOOLS), CallReader(call_format, TOOLS, in_thought=True)
    return ReasoningParser(THINK, answer, thought, is_open=is_open)


def read(call_format: CallFormat, text: str, *, is_complete: bool = True) -> list[Any]:
    """What an answer means, whole, letter by letter and in two."""
    pieces = pieces_of(parser_of(call_format, TOOLS), [text], is_complete=is_complete)
    for texts in (list(text), *(cuts_of(text, [place]) for place in range(3, len(text), max(17, len(text) // 50)))):
        assert pieces_of(parser_of(call_format, TOOLS), texts, is_complete=is_complete) == pieces, texts
    return meaning(pieces)


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: case["name"])
def test_texts_of_public_reports_are_read_at_every_cut(case: Mapping[str, Any]) -> None:
    call_format, text = NAMES[case["format"]], case["text"]

    def parser() -> OutputParser:
        return thinking_parser(call_format) if case["in_thought"] else parser_of(call_format, TOOLS)

    pieces = pieces_of(parser(), [text])
    for texts in every_cut(text):
        assert pieces_of(parser(), texts) == pieces
    calls = [part for part in meaning(pieces) if isinstance(part, tuple) and part[0] in SCHEMAS]
    assert calls == [(call["name"], call["arguments"]) for call in case["calls"]]
    assert not any(isinstance(piece, ToolCallCut) for piece in pieces)


PARIS: Final[tuple[str, Any]] = ("get_weather", {"city": "Paris", "days": 3})
ROME: Final[tuple[str, Any]] = ("get_weather", {"city": "Rome"})
DATA: Final[tuple[str, Any]] = (
    "log_event",
    {"text": "a\n<b> & 'c'\n", "n": 1, "data": {"k": [True, None, 1.5, "x"]}},
)
MARKED: Final = [one for one in FORMATS if one.open and one.close]
Mend: Final = Callable[[CallFormat], str]


def body_of(call_format: CallFormat, calls: Calls) -> str:
    """The calls without what stands around all of them."""
    return written(replace(call_format, open="", close=""), calls)


def replaced(text: str, old: str, new: str, count: int = -1) -> str:
    assert old in text
    return text.replace(old, new, count)


def is_json(call_format: CallFormat) -> bool:
    return isinstance(call_format.body, Literal) and call_format.body == JSON


def without_last(text: str, part: str) -> str:
    before, found, behind = text.rpartition(part)
    assert found
    return before + behind


REPAIRS: dict[str, tuple[Callable[[CallFormat], bool], Callable[[CallFormat, str], str]]] = {
    "as written": (lambda one: True, lambda one, text: text),
    "text before": (lambda one: one not in (PYTHONIC, LLAMA), lambda one, text: f"Let me look.\n{text}"),
    "white space": (lambda one: True, lambda one, text: f"\n{text}\n\n"),
    "closer left out": (lambda one: bool(one.close), lambda one, text: without_last(text, one.close)),
    "end and closer left out": (
        lambda one: bool(one.close and one.end.strip()) and not one.is_envelope,
        lambda one, text: without_last(without_last(text, one.close), one.end),
    ),
    "opener left out": (
        lambda one: bool(one.open) and (one.tag[:1] == "<" or one.is_bare),
        lambda one, text: replaced(text, one.open if one is not PYTHONIC else "<|python_start|>", "", 1),
    ),
    "one brace too few": (is_json, lambda one, text: without_last(text, "}")),
    "one brace too many": (is_json, lambda one, text: replaced(text, "3}", "3}}")),
    "one of Gemma's braces too few": (
        lambda one: one in (GEMMA4, FUNCTION_GEMMA),
        lambda one, text: without_last(text, "}"),
    ),
    "bracket behind the arguments": (
        lambda one: is_json(one) and not one.is_envelope,
        lambda one, text: replaced(text, "3}", "3}]"),
    ),
    "fence behind": (
        lambda one: is_json(one) and not one.is_envelope,
        lambda one, text: replaced(text, "3}", "3}\n```\n"),
    ),
    "last value's end left out": (
        lambda one: isinstance(one.body, Tags) and bool(one.close),
        lambda one, text: without_last(text, one.body.end.strip()),  # type: ignore[union-attr]
    ),
    "prefix of functions": (
        lambda one: "functions." not in one.head,
        lambda one, text: replaced(text, "get_weather", "functions.get_weather"),
    ),
    "name space": (lambda one: True, lambda one, text: replaced(text, "get_weather", "ns:get_weather")),
    "module": (lambda one: True, lambda one, text: replaced(text, "get_weather", "default_api.get_weather")),
    "function for name": (lambda one: one.is_envelope, lambda one, text: replaced(text, '{"name"', '{"function"')),
    "parameters": (lambda one: one is HERMES, lambda one, text: replaced(text, "arguments", "parameters")),
    "arguments for parameters": (
        lambda one: one is LLAMA,
        lambda one, text: replaced(text, "parameters", "arguments"),
    ),
    "nested function": (
        lambda one: one is HERMES,
        lambda one, text: replaced(
            replaced(text, '{"name"', '{"type": "function", "function": {"name"'), "}}", "}}}"
        ),
    ),
    "arguments as a text": (
        lambda one: one.is_envelope,
        lambda one, text: replaced(text, '{"city": "Paris", "days": 3}', json.dumps('{"city": "Paris", "days": 3}')),
    ),
    "list": (
        lambda one: one is HERMES,
        lambda one, text: replaced(replaced(text, '{"name"', '[{"name"'), "}}", "}}]"),
    ),
    "fence": (
        lambda one: one is HERMES,
        lambda one, text: replaced(replaced(text, '{"name"', '```json\n{"name"'), "}}", "}}\n```"),
    ),
}


@pytest.mark.parametrize("repair", REPAIRS)
@pytest.mark.parametrize("call_format", FORMATS, ids=lambda one: one.name)
def test_each_repair_of_each_format_gives_the_call(call_format: CallFormat, repair: str) -> None:
    applies, mend = REPAIRS[repair]
    if applies(call_format):
        text = mend(call_format, written(call_format, [PARIS]))
        assert [part for part in read(call_format, text) if not isinstance(part, str)] == [PARIS], text


@pytest.mark.parametrize("inner", FORMATS, ids=lambda one: one.name)
@pytest.mark.parametrize("outer", MARKED, ids=lambda one: one.name)
def test_another_familys_form_is_read_between_the_markers(outer: CallFormat, inner: CallFormat) -> None:
    # FunctionGemma's quotes within Gemma 4's form are no quotes: both begin alike.
    if inner not in (HARMONY, FUNCTION_GEMMA) and (inner, outer) not in ((KIMI_K2, LFM2), (GEMMA4, FUNCTION_GEMMA)):
        text = f"{outer.open}{body_of(inner, [PARIS])}{outer.close}"
        assert meaning(pieces_of(parser_of(outer, TOOLS), list(text))) == [PARIS], text


@pytest.mark.parametrize("call_format", FORMATS, ids=lambda one: one.name)
def test_several_calls_are_several(call_format: CallFormat) -> None:
    calls: list[tuple[str, Any]] = [PARIS, DATA, ("ping", {}), ROME]
    assert read(call_format, written(call_format, calls)) == calls


@pytest.mark.parametrize("call_format", MARKED, ids=lambda one: one.name)
def test_two_calls_between_one_pair_of_markers_are_two(call_format: CallFormat) -> None:
    bodies = [body_of(call_format, [PARIS]), body_of(call_format, [ROME])]
    for gap in ("", "\n", ", ") if not isinstance(call_format.body, Tags) else ("", "\n"):
        text = f"{call_format.open}{gap.join(bodies)}{call_format.close}"
        if call_format.tag or call_format.is_envelope or call_format.gap == ", ":
            assert read(call_format, text) == [PARIS, ROME], text


@pytest.mark.parametrize("call_format", FORMATS, ids=lambda one: one.name)
def test_a_call_of_an_undeclared_tool_is_text(call_format: CallFormat) -> None:
    text = replaced(written(call_format, [PARIS]), "get_weather", "drop_tables")
    assert read(call_format, f"{text}") == [text]


@pytest.mark.parametrize("call_format", FORMATS, ids=lambda one: one.name)
def test_an_answer_that_was_cut_off_makes_no_whole_call_of_its_end(call_format: CallFormat) -> None:
    text = written(call_format, [PARIS, ROME])
    for stop in range(len(text)):
        found = meaning(pieces_of(parser_of(call_format, TOOLS), [text[:stop]], is_complete=False))
        calls = [part for part in found if isinstance(part, tuple) and part[0] != "cut"]
        assert calls == [PARIS, ROME][: len(calls)]
        cut = [part for part in found if isinstance(part, tuple) and part[0] == "cut"]
        assert not cut or found[len(calls) :] == cut


def said(kind: str, text: str) -> tuple[str, str]:
    return kind, text


ZURICH = ("get_weather", {"city": "Zürich", "days": 2})
ARGUMENTS = '{"city": "Zürich", "days": 2}'
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
TO_WEATHER = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
AGAIN = "<|start|>assistant"
CALL = f'<tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS}}}</tool_call>'
LLAMA_CALL = f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}'
PYTHON_CALL = '[get_weather(city="Zürich", days=2)]'

CASES: list[tuple[CallFormat, str, list[Any]]] = [
    (HARMONY, f"{ANALYSIS}Easy.<|end|>{AGAIN}{FINAL}Hello <b>.", [said("thought", "Easy."), "Hello <b>."]),
    (HARMONY, "Hello.", ["Hello."]),
    (HARMONY, "", []),
    (HARMONY, f"{ANALYSIS}Cut of", [said("thought", "Cut of"), "Cut of"]),
    (HARMONY, f"{ANALYSIS}Look.<|end|>{AGAIN}{TO_WEATHER}{ARGUMENTS}", [said("thought", "Look."), ZURICH]),
    (HARMONY, f"{AGAIN} to=functions.get_weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>", [ZURICH]),
    (
        HARMONY,
        f"<|channel|>commentary<|message|>I look it up.<|end|>{AGAIN}{TO_WEATHER}{ARGUMENTS}<|call|>",
        ["I look it up.", ZURICH],
    ),
    (HARMONY, f"{TO_WEATHER}{ARGUMENTS}<|call|>{AGAIN}{TO_WEATHER}{{}}", [ZURICH, ("get_weather", {})]),
    (HARMONY, f"{TO_WEATHER}<|call|>", [("get_weather", {})]),
    (HARMONY, f"<|channel|>commentary <|constrain|>get_weather<|message|>{ARGUMENTS}<|call|>", [ZURICH]),
    (HARMONY, f"<|channel|>analysis to=functions.get_weather<|message|>{ARGUMENTS}", [ZURICH]),
    (HARMONY, f"{ANALYSIS}Look.{TO_WEATHER}{ARGUMENTS}<|call|>", [said("thought", "Look."), ZURICH]),
    (HARMONY, f"{TO_WEATHER}{{oops<|call|>", [f"{TO_WEATHER}{{oops<|call|>"]),
    (HARMONY, f"{TO_WEATHER}nothing<|call|>", [f"{TO_WEATHER}nothing<|call|>"]),
    (HARMONY, "<|channel|>analysis", ["<|channel|>analysis"]),
    (
        HARMONY,
        "<|channel|>commentary to=python<|message|>1+1<|call|>",
        ["<|channel|>commentary to=python<|message|>1+1<|call|>"],
    ),
    (DEEPSEEK_V3, "a < b", ["a < b"]),
    (
        DEEPSEEK_V3_1,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜><｜tool▁calls▁end｜>",
        ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜><｜tool▁calls▁end｜>"],
    ),
    (LLAMA, f" {LLAMA_CALL}; {LLAMA_CALL}\n{LLAMA_CALL}", [ZURICH] * 3),
    (LLAMA, f"{LLAMA_CALL} and so on", [ZURICH, " and so on"]),
    (LLAMA, f"Sure: {LLAMA_CALL}", [f"Sure: {LLAMA_CALL}"]),
    (LLAMA, '{"type": "function", "name": "ping", "parameters": {}}', [("ping", {})]),
    (LLAMA, PYTHON_CALL, [ZURICH]),
    (LLAMA, "Hello {there}.", ["Hello {there}."]),
    (LLAMA, '{"a": 1}', ['{"a": 1}']),
    (LLAMA, '{"name": "Ada", "age": 36}', ['{"name": "Ada", "age": 36}']),
    (LLAMA, '{"name": "ping"}', ['{"name": "ping"}']),
    (LLAMA, '<|python_tag|>print("x")', ['<|python_tag|>print("x")']),
    (PYTHONIC, PYTHON_CALL, [ZURICH]),
    (PYTHONIC, f"<|python_start|>{PYTHON_CALL}<|python_end|>", [ZURICH]),
    (PYTHONIC, f"{PYTHON_CALL} and so on", [ZURICH, " and so on"]),
    (
        PYTHONIC,
        "[opt(n=null, name=None, flag=true), ping()]",
        [("opt", {"n": None, "name": None, "flag": True}), ("ping", {})],
    ),
    (PYTHONIC, "[1, 2] are numbers", ["[1, 2] are numbers"]),
    (PYTHONIC, "[ping(1)]", ["[ping(1)]"]),
    (PYTHONIC, "[read(path=open('x'))]", ["[read(path=open('x'))]"]),
    (
        LFM2,
        r"<|tool_call_start|>[read(path='\x41\U0001f600\\ \d')]<|tool_call_end|>",
        [("read", {"path": "A😀\\ \\d"})],
    ),
    (LFM2, "<|tool_call_start|>[read(path='''a\n'b''')]<|tool_call_end|>", [("read", {"path": "a\n'b"})]),
    (HERMES, "Hello there.", ["Hello there."]),
    (HERMES, f"Let me look.\n{CALL}", ["Let me look.", ZURICH]),
    (HERMES, f"{CALL} Done.", [ZURICH, " Done."]),
    (HERMES, "a < b <tool", ["a < b <tool"]),
    (HERMES, "trailing \n ", ["trailing \n "]),
    (HERMES, "Hm.\n<tool_call>{</tool_call> so.", ["Hm.\n<tool_call>{</tool_call> so."]),
    (HERMES, f"<tool_call>{{</tool_call>{CALL}", ["<tool_call>{</tool_call>", ZURICH]),
    (HERMES, '<tool_call>{"name": "ping"}</tool_call>', [("ping", {})]),
    (HERMES, '<tool_call>{"name": "ping", "arguments": null}</tool_call>', [("ping", {})]),
    (HERMES, '<tool_call>{"name": "ping", "arguments": " "}</tool_call>', [("ping", {})]),
    (HERMES, f'<tool_call>{{"arguments": {ARGUMENTS}, "name": "get_weather"}}</tool_call>', [ZURICH]),
    (
        HERMES,
        r'<tool_call>{"name": "read", "arguments": {"path": "\ud83d\ude00\ud83d"}}</tool_call>',
        [("read", {"path": "😀\ufffd"})],
    ),
    (HERMES, "<tool_call>ping</tool_call>", [("ping", {})]),
    (HERMES, f"<tool_call>get_weather\n{ARGUMENTS}</tool_call>", [ZURICH]),
    (MISTRAL, f"[TOOL_CALLS]get_weather{ARGUMENTS}", [ZURICH]),
    (MISTRAL, f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}read[ARGS]{{}}", [ZURICH, ("read", {})]),
    (
        KIMI_K2,
        f"<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>",
        [ZURICH],
    ),
    (
        KIMI_K2,
        f"<|tool_call_section_begin|><|tool_call_begin|>get_weather<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_call_section_end|>",
        [ZURICH],
    ),
    (
        KIMI_K3,
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="0"<|sep|><|open|>json type="object"<|sep|>'
        f"{ARGUMENTS}<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        [ZURICH],
    ),
    (
        GEMMA4,
        '<|tool_call>call:move{command:<|"|>look<|"|>angle:90}<tool_call|>',
        [("move", {"command": "look", "angle": 90})],
    ),
    (
        GEMMA4,
        '<|tool_call>call:py{code:<|"|>q(<|"|><|"|><|"|> x <|"|><|"|><|"|>)<|"|>,n:[]}<tool_call|>',
        [("py", {"code": 'q(""" x """)', "n": []})],
    ),
    (
        MINICPM,
        '<function name="read"><param name="path"><![CDATA[a]]></param>]]></param></function>',
        [("read", {"path": "a]]></param>"})],
    ),
    (
        GLM,
        "<tool_call>hello world, this is no call</tool_call>",
        ["<tool_call>hello world, this is no call</tool_call>"],
    ),
]


@pytest.mark.parametrize(("call_format", "text", "expected"), CASES)
def test_an_answer_means_what_it_says(call_format: CallFormat, text: str, expected: list[Any]) -> None:
    assert read(call_format, text) == expected


NO_CALLS = [
    '{"name": "ping", "arguments": "{oops"}',
    '{"name": "ping", "arguments": "[1, 2]"}',
    '{"name": "ping", "arguments": [1, 2]}',
    '{"name": "ping", "arguments": 5}',
    '{"name": "ping", "arguments": {"a": NaN}}',
    '{"name": "ping", "arguments": {"a": 1e999}}',
    '{"name": "ping", "arguments": "{\\"a\\": NaN}"}',
    '{"name": "ping", "parameters": [1]}',
    '{"name": "ping", "arguments": ' + '{"a":' * 300 + "1" + "}" * 301,
    '{"name": "ping", "arguments": {"a": ' + "9" * 5000 + "}}",
    '{"name": "ping", "arguments": {"a": 1, "a": 2}}',
    '{"name": "ping", "arguments": {}, "arguments": {}}',
    '{"name": 5}',
    '{"arguments": {}}',
    "[]",
    "null",
]


@pytest.mark.parametrize("text", NO_CALLS)
def test_what_only_looks_like_a_call_is_text(text: str) -> None:
    found = read(HERMES, f"<tool_call>{text}</tool_call>")
    assert not any(part[0] == "ping" for part in found if isinstance(part, tuple))
    assert found == [f"<tool_call>{text}</tool_call>"] or found[0][0] == "cut"


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (STRING, "null", "null"),
        (STRING, "0123", "0123"),
        (STRING, "true", "true"),
        (STRING, '"quoted"', '"quoted"'),
        (INTEGER, "5", 5),
        (INTEGER, "5.0", 5.0),
        (INTEGER, "2026-01-15", "2026-01-15"),
        (INTEGER, "five", "five"),
        (INTEGER, "inf", "inf"),
        (NUMBER, "5", 5),
        (BOOLEAN, "True", True),
        (BOOLEAN, "yes", "yes"),
        (OBJECT, "{'a': None}", {"a": None}),
        (OBJECT, '{"a": NaN}', '{"a": NaN}'),
        (ARRAY, "-" * 10_000 + "1", "-" * 10_000 + "1"),
        (ARRAY, "[1, 2", "[1, 2"),
        ({"anyOf": [INTEGER, {"type": "null"}]}, "null", None),
        ({"anyOf": [STRING, {"type": "null"}]}, "123", "123"),
        ({"anyOf": [STRING, {"type": "null"}]}, "null", None),
        ({"type": ["boolean", "null"]}, "None", None),
        ({"type": "STRING"}, "1", "1"),
        ({"type": "any"}, "1", 1),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"$ref": "#/$defs/s"}, "1", "1"),
        ({"$ref": "#/$defs/t"}, "1", 1),
        ({}, "[1]", [1]),
        ({}, "plain, text", "plain, text"),
    ],
)
def test_a_value_between_tags_is_what_its_schema_says(schema: Any, text: str, value: Any) -> None:
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": {"s": STRING}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    written_so = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    [call] = meaning(pieces_of(parser_of(CODER, tools), list(written_so)))
    assert call == ("f", {"a": value}) and type(call[1]["a"]) is type(value)


def test_what_a_tag_says_of_a_values_kind_counts_where_the_schema_says_nothing() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for arguments in ({"a": "1"}, {"a": 1}, {"a": "[1]"}, {"a": [1]}):
        for call_format in (KIMI_K3, DSML):
            assert meaning(pieces_of(parser_of(call_format, tools), [written(call_format, [("f", arguments)])])) == [
                ("f", arguments)
            ]


def test_ids_of_the_model_are_kept_once() -> None:
    texts = {
        KIMI_K2: ("functions.ping:7", written(KIMI_K2, [("ping", {})]).replace(":0", ":7")),
        MISTRAL: ("abcdefghi", '[TOOL_CALLS][{"id": "abcdefghi", "name": "ping", "arguments": {}}]'),
    }
    for call_format, (call_id, text) in texts.items():
        parser = parser_of(call_format, TOOLS)
        pieces = [*parser.feed(text + text), *parser.finish(is_complete=True)]
        first, second = (piece.id for piece in pieces if isinstance(piece, ToolCallStarted))
        assert first == call_id and second.startswith("call_")


UNDECLARED: Final = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"I should look.\n{CALL}", [("thought", "I should look."), ZURICH]),
        (f"Maybe {CALL} or\n{CALL} \n{CALL}\n", [("thought", f"Maybe {CALL} or"), ZURICH, ZURICH]),
        (f"{CALL}", [ZURICH]),
        (f"Maybe {CALL} would do.", [("thought", f"Maybe {CALL} would do."), f"Maybe {CALL} would do."]),
        (f"Maybe {CALL}</think>\n\nNo.", [("thought", f"Maybe {CALL}"), "No."]),
        (f"Hm {UNDECLARED}", [("thought", f"Hm {UNDECLARED}"), f"Hm {UNDECLARED}"]),
        (f"Hm </think>\n{CALL}", [("thought", "Hm"), ZURICH]),
        ("a <tool_call", [("thought", "a <tool_call"), "a <tool_call"]),
    ],
)
def test_a_call_at_the_end_of_a_thought_that_ends_the_answer_is_a_call(text: str, expected: list[Any]) -> None:
    for is_open in (True, False):
        said_so = text if is_open else f"<think>{text}"
        for texts in ([said_so], *every_cut(said_so)):
            assert meaning(pieces_of(thinking_parser(HERMES, is_open=is_open), texts)) == expected
    cut_off = meaning(pieces_of(thinking_parser(HERMES), [text], is_complete=False))
    if "</think>" not in text:
        assert [part for part in cut_off if part[0] != "thought"] == []


@pytest.mark.parametrize("call_format", FORMATS, ids=lambda one: one.name)
def test_arguments_come_as_they_are_written(call_format: CallFormat) -> None:
    """The name comes with a text's first letters, and no more than 16 tokens of 4 letters without any."""
    content = "x = {'a': [1, 2]}  # <b> \\d\n" * 40
    text = written(call_format, [("create", {"content": content})])
    parser, silent, begun = parser_of(call_format, TOOLS), 0, False
    start = text.index("x = {")
    for place in range(0, len(text), 4):
        pieces = parser.feed(text[place : place + 4])
        silent = 0 if any(isinstance(piece, ToolArguments) for piece in pieces) else silent + 1
        if any(isinstance(piece, ToolCallStarted) for piece in pieces):
            begun = isinstance(pieces[-1], ToolArguments) and "x" in pieces[-1].text
            assert begun, "the name comes with letters of the value"
        assert begun == (place + 4 > start + 1) or (place + 4 - start) in range(-4, 9)
        assert silent <= 16 or not begun
    assert isinstance(parser.finish(is_complete=True)[-1:] or [ToolCallEnded()], list) and parser.made_calls


def test_a_quote_that_may_end_a_text_or_not_merges_no_arguments() -> None:
    text = r"<|tool_call_start|>[log_event(text='C:\', query='it's')]<|tool_call_end|>"
    assert read(LFM2, text)[0][:2] == ("cut", "log_event")


DOUBLED: Final = [
    (CODER, PARIS, "\n</parameter>\n", 1),
    (GLM, PARIS, "</arg_value>\n", 1),
    (MINIMAX, ROME, "</parameter>\n", 1),
    (KIMI_K3, PARIS, "<|close|>argument<|sep|>", 1),
]


@pytest.mark.parametrize(("call_format", "call", "end", "count"), DOUBLED)
def test_a_text_whose_end_tag_is_doubled_may_hold_one_and_is_no_call(
    call_format: CallFormat, call: Any, end: str, count: int
) -> None:
    text = replaced(written(call_format, [call]), end, end.rstrip() + end, count)
    found = read(call_format, text)
    assert found[0] == ("cut", "get_weather", found[0][2]) and found[0][2].startswith('{"city": "')
    assert not any(part[0] == "get_weather" for part in found)


MARKERS: Final = sorted(
    {
        part
        for one in FORMATS
        for text in (
            *(one.open, one.head.replace("{}", "get_weather").replace("#", "0"), one.end, one.close),
            *((one.body.key.replace("{}", "city"), one.body.end) if isinstance(one.body, Tags) else [one.body.quote]),
        )
        for part in (text, text.strip())
        if part
    }
    | {*("</think>", "<think>", "```", "\n", " ", "\\", "\\n", "\\d", '"', "'", "}", "]", ",", "{", "[", ": ")}
    | {*("null", "0123", "é", "😀", "\t", "\r\n", "word", "\u2028", "&lt;")}
)
WORDS: Final = st.lists(st.one_of(st.sampled_from(MARKERS), st.text("ab <>/=\n{}\"'", max_size=6)), max_size=10).map(
    "".join
)
VALUES: Final = st.recursive(
    st.one_of(WORDS, st.integers(-99, 10**6), st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["k0", "k1"]), inner)),
    max_leaves=6,
)
ARGUMENT: Final = {
    "text": WORDS,
    "query": WORDS,
    "city": WORDS,
    "days": st.integers(0, 99),
    "safe": st.booleans(),
    "data": st.dictionaries(st.sampled_from(["k0", "k1"]), VALUES),
    "exclude": st.lists(WORDS, max_size=3),
    "n": st.integers(0, 9),
    "max_results": st.integers(0, 9),
    "note": WORDS,
}


@st.composite
def calls_of(draw: st.DrawFn) -> Any:
    name = draw(st.sampled_from(["log_event", "search", "get_weather"]))
    keys = [key for key in SCHEMAS[name] if key in ARGUMENT]
    chosen = draw(st.lists(st.sampled_from(keys), unique=True))
    return name, {key: draw(ARGUMENT[key]) for key in chosen}


@given(
    st.sampled_from(FORMATS), st.lists(calls_of(), min_size=1, max_size=2), st.lists(st.integers(0, 900), max_size=9)
)
@settings(max_examples=300, deadline=None)
def test_every_call_that_is_written_is_read_back_or_is_text(
    call_format: CallFormat, calls: list[Any], cuts: list[int]
) -> None:
    text = written(call_format, calls)
    pieces = pieces_of(parser_of(call_format, CLOSED), cuts_of(text, cuts))
    assert pieces == pieces_of(parser_of(call_format, CLOSED), [text])
    if call_format is GEMMA4:  # its quotes within a text are read as plain ones
        calls = json.loads(json.dumps(calls).replace('<|\\"|>', '\\"'))
    found = [part for part in meaning(pieces) if isinstance(part, tuple) and part[0] != "cut"]
    assert all([name, arguments] in [[*call] for call in calls] for name, arguments in found), "a call was made up"
    if call_format.body == JSON or (isinstance(call_format.body, Literal) and call_format.body.assign == "="):
        assert found == [tuple(call) for call in calls]


@given(
    st.sampled_from(FORMATS),
    st.lists(calls_of(), min_size=1, max_size=2),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 30), st.sampled_from(["", "Sure, ", "}", *MARKERS]))),
    st.lists(st.integers(0, 900), max_size=9),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_of_broken_texts_nothing_is_lost_and_cuts_change_nothing(
    call_format: CallFormat, calls: list[Any], breaks: list[tuple[int, int, str]], cuts: list[int], is_complete: bool
) -> None:
    text = written(call_format, calls)
    for place, size, instead in breaks[:3]:
        text = text[:place] + instead + text[place + size :]
    pieces = pieces_of(parser_of(call_format, TOOLS), [text], is_complete=is_complete)
    for texts in (list(text), cuts_of(text, cuts)):
        assert pieces == pieces_of(parser_of(call_format, TOOLS), texts, is_complete=is_complete)
    if not any(isinstance(piece, ToolCallEnded) for piece in pieces) and call_format is not HARMONY:
        told = "".join(piece.text for piece in pieces if isinstance(piece, Text | ToolCallCut))
        assert told.strip() == text.strip()


@pytest.mark.parametrize(
    "call_format", [one for one in FORMATS if isinstance(one.body, Tags)], ids=lambda one: one.name
)
def test_a_whole_call_within_a_text_is_of_the_text(call_format: CallFormat) -> None:
    example = written(call_format, [PARIS])
    for content in (example, f"So:\n{example}\nDone.", f"{example}\n{example}."):
        for calls in ([("create", {"content": content})], [("create", {"content": content}), PARIS]):
            found = meaning(pieces_of(parser_of(call_format, TOOLS), list(written(call_format, calls))))
            if content.count(example) == 1:
                assert found == calls
            else:  # there are two readings
                assert found == calls or found[0][:2] == ("cut", "create")


PARSERS: Final = {
    "qwen3_coder": CODER,
    "glm47": GLM,
    "longcat": LONGCAT,
    "minimax_m2": MINIMAX,
    "gemma4": GEMMA4,
    "function_gemma": FUNCTION_GEMMA,
    "pythonic": LFM2,
    "json_tools": HERMES,
    "kimi_k2": KIMI_K2,
    "mistral": MISTRAL,
    "minicpm5": MINICPM,
    "muse_spark": MUSE_SPARK,
    "kimi_k3": KIMI_K3,
}


@pytest.mark.parametrize("name", PARSERS)
def test_mlx_lms_parser_reads_a_plain_call_alike(name: str) -> None:
    parse, call_format = importlib.import_module(f"mlx_lm.tool_parsers.{name}").parse_tool_call, PARSERS[name]
    for call in (PARIS, ("read", {"path": "a b"}), ("log_event", {"text": "x", "n": 4})):
        text = written(call_format, [call])
        inner = text.strip().removeprefix(call_format.open.removesuffix("[").strip())
        inner = inner.removesuffix(call_format.close.removeprefix("]")).strip()
        parsed = parse(inner, TOOLS)
        one = parsed[0] if isinstance(parsed, list) else parsed
        assert [(one["name"], one["arguments"])] == read(call_format, text) == [call]


def parser_of(call_format: CallFormat, tools: DeclaredTools) -> OutputParser:
    """The parser of an answer without reasoning, or in channels."""
    return HarmonyReader(tools) if call_format is HARMONY else CallReader(call_format, tools)


def pieces_of(parser: OutputParser, texts: Sequence[str], *, is_complete: bool = True) -> list[Piece]:
    """All pieces, those of one kind that follow each other joined, without ids; fails for an impossible order.

    It fails as well if the arguments of a call are complete before its end.
    """
    fed = [piece for text in texts for piece in parser.feed(text)]
    fed += parser.finish(is_complete=is_complete)
    pieces, call = list[Piece](), None
    for piece in fed:
        match piece:
            case ToolCallStarted(call_id, name):
                assert call is None and call_id and name
                call, piece = "", ToolCallStarted("", name)
            case ToolArguments(text):
                assert call is not None and text
                call += text
            case ToolCallEnded():
                assert call is not None and isinstance(json.loads(call), dict)
                assert is_open(call[:-1])
                call = None
            case ToolCallCut(text):
                assert call and text and is_open(call)
                call = None
            case Text(text) | Reasoning(text):
                assert text and call is None
        last = pieces[-1] if pieces else None
        if isinstance(piece, Text | Reasoning | ToolArguments) and type(last) is type(piece):
            pieces[-1] = type(piece)(last.text + piece.text)
        else:
            pieces.append(piece)
    assert call is None
    assert parser.made_calls == any(isinstance(piece, ToolCallEnded) for piece in pieces)
    assert parser.is_cut == any(isinstance(piece, ToolCallCut) for piece in pieces)
    return pieces


def is_open(arguments: str) -> bool:
    """Whether arguments are no whole JSON text."""
    try:
        json.loads(arguments)
    except ValueError:
        return True
    return False


def meaning(pieces: Sequence[Piece]) -> list[Any]:
    """Texts, `("thought", text)`, calls as `(name, arguments)`, and cut ones as `("cut", name, arguments)`."""
    parts: list[Any] = []
    for piece in pieces:
        match piece:
            case Text(text):
                parts.append(text)
            case Reasoning(text):
                parts.append(("thought", text))
            case ToolCallStarted(_, name):
                parts.append((name, ""))
            case ToolArguments(text):
                parts[-1] = (parts[-1][0], parts[-1][1] + text)
            case ToolCallEnded():
                parts[-1] = (parts[-1][0], json.loads(parts[-1][1]))
            case ToolCallCut():
                parts[-1] = ("cut", *parts[-1])
    return parts


def cuts_of(text: str, places: Sequence[int]) -> list[str]:
    """`text` cut at places, those outside of it ignored."""
    edges = sorted({0, len(text), *(place for place in places if 0 < place < len(text))})
    return [text[start:stop] for start, stop in itertools.pairwise(edges)]


def every_cut(text: str) -> Iterator[list[str]]:
    """The text letter by letter, and cut in two at each place."""
    yield list(text)
    for place in range(1, len(text)):
        yield [text[:place], text[place:]]
