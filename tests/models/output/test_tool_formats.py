"""The formats of calls that are read here, on texts as models write them, cut everywhere, and on broken ones."""

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.output.pieces import (
    OutputParser,
    Piece,
    Reasoning,
    Text,
    ToolArguments,
    ToolCallEnded,
    ToolCallFailed,
    ToolCallStarted,
)
from models.output.tool_formats import (
    DEEPSEEK_V3,
    DEEPSEEK_V3_1,
    LLAMA_JSON,
    PYTHONIC,
    HarmonyFormat,
    HarmonyParser,
    ToolSyntax,
    find_tool_syntax,
    tool_parser,
)

TOOLS = [{"type": "function", "function": {"name": "get_weather"}}]
MakeParser = Callable[[], OutputParser]


def thought(text: str) -> tuple[str, str]:
    return "thought", text


def said(text: str) -> tuple[str, str]:
    return "said", text


def called(name: str, /, **arguments: Any) -> tuple[str, str, Any]:
    return "called", name, arguments


def read(parser: OutputParser, texts: Sequence[str], *, is_complete: bool = True) -> list[Any]:
    """What an answer means, parts of one kind that follow each other joined; fails for an impossible order."""
    pieces = [piece for text in texts for piece in parser.feed(text)]
    pieces += parser.finish(is_complete=is_complete)
    meaning = joined(pieces)
    assert parser.made_calls == any(part[0] == "called" for part in meaning)
    return meaning


def joined(pieces: Sequence[Piece]) -> list[Any]:
    parts: list[Any] = []
    call: list[str] | None = None
    for piece in pieces:
        match piece:
            case Text(text) | Reasoning(text) | ToolCallFailed(text):
                assert text and (call is None) != isinstance(piece, ToolCallFailed)
                call = None
                kind = "thought" if isinstance(piece, Reasoning) else "said"
                is_same = parts and parts[-1][0] == kind
                parts[-1:] = [(kind, parts[-1][1] + text)] if is_same else [*parts[-1:], (kind, text)]
            case ToolCallStarted(call_id, name):
                assert call is None and call_id
                call = [name]
            case ToolArguments(text):
                assert call is not None
                call.append(text)
            case ToolCallEnded():
                assert call is not None
                parts.append(("called", call[0], json.loads("".join(call[1:]))))
                call = None
    assert call is None
    return parts


def parser_of(syntax: ToolSyntax) -> OutputParser:
    return HarmonyParser(TOOLS) if isinstance(syntax, HarmonyFormat) else tool_parser(syntax, TOOLS)


WEATHER = called("get_weather", city="Zürich", days=[1, 2.5])
JSON = '{"city": "Zürich", "days": [1, 2.5]}'
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
TO_WEATHER = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
AGAIN = "<|start|>assistant"

V3_CALL = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{JSON}\n```<｜tool▁call▁end｜>"
V3_1_CALL = f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
LLAMA_CALL = '{"name": "get_weather", "parameters": ' + JSON + "}"

RECORDED: list[tuple[ToolSyntax, str, list[Any]]] = [
    (HarmonyFormat(), f"{ANALYSIS}Easy.<|end|>{AGAIN}{FINAL}Hello <b>.", [thought("Easy."), said("Hello <b>.")]),
    (HarmonyFormat(), f"{FINAL}Hello.", [said("Hello.")]),
    (HarmonyFormat(), "Hello.", [said("Hello.")]),
    (HarmonyFormat(), "", []),
    (HarmonyFormat(), f"{ANALYSIS}Cut of", [thought("Cut of")]),
    (HarmonyFormat(), f"{ANALYSIS}Look.<|end|>{AGAIN}{TO_WEATHER}{JSON}", [thought("Look."), WEATHER]),
    (HarmonyFormat(), f"{TO_WEATHER}{JSON}<|call|>", [WEATHER]),
    (
        HarmonyFormat(),
        f"{AGAIN} to=functions.get_weather<|channel|>commentary json<|message|>{JSON}<|call|>",
        [WEATHER],
    ),
    (
        HarmonyFormat(),
        f"<|channel|>commentary<|message|>I look it up.<|end|>{AGAIN}{TO_WEATHER}{JSON}<|call|>",
        [said("I look it up."), WEATHER],
    ),
    (HarmonyFormat(), f"{TO_WEATHER}{JSON}<|call|>{AGAIN}{TO_WEATHER}{{}}", [WEATHER, called("get_weather")]),
    (HarmonyFormat(), f"{TO_WEATHER}<|call|>", [called("get_weather")]),
    (HarmonyFormat(), f'{TO_WEATHER}{{"name": "f", "arguments": 1}}', [called("get_weather", name="f", arguments=1)]),
    (DEEPSEEK_V3, f"Let me look.\n{BEGIN}{V3_CALL}{END}", [said("Let me look."), WEATHER]),
    (DEEPSEEK_V3, f"{BEGIN}{V3_CALL}\n{V3_CALL}{END}\n", [WEATHER, WEATHER]),
    (DEEPSEEK_V3, "a < b", [said("a < b")]),
    (DEEPSEEK_V3_1, f"Hm.{BEGIN}{V3_1_CALL}{V3_1_CALL}{END}", [said("Hm."), WEATHER, WEATHER]),
    (DEEPSEEK_V3_1, V3_1_CALL.replace(JSON, "{}"), [called("get_weather")]),
    (LLAMA_JSON, LLAMA_CALL, [WEATHER]),
    (LLAMA_JSON, f"<|python_tag|>{LLAMA_CALL}", [WEATHER]),
    (LLAMA_JSON, f" {LLAMA_CALL}; {LLAMA_CALL}\n{LLAMA_CALL}", [WEATHER] * 3),
    (LLAMA_JSON, '{"type": "function", "name": "f", "parameters": {}}', [called("f")]),
    (LLAMA_JSON, "Hello {there}.", [said("Hello {there}.")]),
    (LLAMA_JSON, '{"a": 1}', [said('{"a": 1}')]),
    (PYTHONIC, '[get_weather(city="Zürich", days=[1, 2.5])]', [WEATHER]),
    (PYTHONIC, '<|python_start|>[get_weather(city="Zürich", days=[1, 2.5])]<|python_end|>', [WEATHER]),
    (PYTHONIC, "[f(a=true, b=None), g.h()]", [called("f", a=True, b=None), called("g.h")]),
    (PYTHONIC, "[1, 2] are numbers", [said("[1, 2] are numbers")]),
    (PYTHONIC, "Hello.", [said("Hello.")]),
]


@pytest.mark.parametrize(("syntax", "text", "expected"), RECORDED)
def test_a_text_means_the_same_at_every_cut(syntax: ToolSyntax, text: str, expected: list[Any]) -> None:
    assert read(parser_of(syntax), [text]) == expected
    assert read(parser_of(syntax), list(text)) == expected
    for cut in range(len(text)):
        assert read(parser_of(syntax), [text[:cut], text[cut:]]) == expected


@given(st.sampled_from(RECORDED), st.lists(st.integers(0, 200)))
def test_many_cuts_change_nothing_either(case: tuple[ToolSyntax, str, list[Any]], cuts: list[int]) -> None:
    syntax, text, expected = case
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    assert read(parser_of(syntax), [text[a:b] for a, b in itertools.pairwise(edges)]) == expected


BROKEN: list[tuple[ToolSyntax, str]] = [
    (HarmonyFormat(), f"{TO_WEATHER}{{oops<|call|>"),
    (HarmonyFormat(), f'{TO_WEATHER}{{"a": 1}} and more<|call|>'),
    (HarmonyFormat(), f"{TO_WEATHER}nothing<|call|>"),
    (HarmonyFormat(), "<|channel|>analysis"),
    (DEEPSEEK_V3, f"{BEGIN}{V3_CALL.replace('}', '')}{END}"),
    (DEEPSEEK_V3, f"{BEGIN}{V3_CALL.replace('```', '')}{END}"),
    (DEEPSEEK_V3_1, f"Hm.\n {BEGIN}\n{V3_1_CALL.replace(']', '')}{END}\n"),
    (DEEPSEEK_V3_1, f"{BEGIN}<｜tool▁call▁begin｜>{END}"),
    (LLAMA_JSON, LLAMA_CALL[:-1]),
    (LLAMA_JSON, f"{LLAMA_CALL} and so on"),
    (LLAMA_JSON, '<|python_tag|>print("x")'),
    (LLAMA_JSON, '{"name": "Ada", "age": 36}'),
    (PYTHONIC, "[f(a=1)"),
    (PYTHONIC, "[f(1)]"),
    (PYTHONIC, "[f(a=open('x'))]"),
    (PYTHONIC, "[f(a=1)] and so on"),
]


@pytest.mark.parametrize(("syntax", "text"), BROKEN)
def test_of_what_is_broken_nothing_is_lost(syntax: ToolSyntax, text: str) -> None:
    assert read(parser_of(syntax), [text]) == [said(text)]
    for cut in range(len(text)):
        assert read(parser_of(syntax), [text[:cut], text[cut:]]) == [said(text)]


@pytest.mark.parametrize(("syntax", "text", "expected"), RECORDED)
def test_an_answer_that_was_cut_off_makes_no_call_of_its_end(
    syntax: ToolSyntax, text: str, expected: list[Any]
) -> None:
    for stop in range(len(text)):
        meaning = read(parser_of(syntax), list(text[:stop]), is_complete=False)
        calls = [part for part in meaning if part[0] == "called"]
        assert calls == [part for part in expected if part[0] == "called"][: len(calls)]


def test_arguments_of_harmony_and_deepseek_come_as_they_are_written() -> None:
    for syntax, text in (
        (HarmonyFormat(), f"{TO_WEATHER}{JSON}"),
        (DEEPSEEK_V3, V3_CALL),
        (DEEPSEEK_V3_1, V3_1_CALL),
    ):
        parser = parser_of(syntax)
        pieces = [piece for letter in text[: text.index("[1")] for piece in parser.feed(letter)]
        assert "".join(piece.text for piece in pieces if isinstance(piece, ToolArguments)) == JSON[: JSON.index("[1")]


def test_text_without_a_header_is_released_at_once() -> None:
    parser = HarmonyParser(TOOLS)
    assert [parser.feed(text) for text in ("<|cha", "os", "!<|end|>Hi")] == [
        [],
        [Text("<|chaos")],
        [Text("!"), Text("Hi")],
    ]


def test_without_tools_a_message_to_one_is_text() -> None:
    text = f"{TO_WEATHER}{JSON}<|call|>"
    assert read(HarmonyParser([]), list(text)) == [said(text)]


@pytest.mark.parametrize(
    ("vocabulary", "template", "syntax"),
    [
        ({"<|channel|>", "<|message|>", "<|start|>"}, "tools", HarmonyFormat()),
        ({DEEPSEEK_V3.start}, "tools ```json", DEEPSEEK_V3),
        ({DEEPSEEK_V3.start}, "tools", DEEPSEEK_V3_1),
        ({"<|python_tag|>"}, "if tools", LLAMA_JSON),
        ({"<|python_tag|>"}, "messages only", None),
        ({"<|python_start|>", "<|python_tag|>"}, "if tools", PYTHONIC),
        (set(), "if tools: [func_name1(params_name1=params_value1)]", PYTHONIC),
        (set(), "if tools", None),
    ],
)
def test_a_format_is_found_by_tokens_and_template(
    vocabulary: set[str], template: str, syntax: ToolSyntax | None
) -> None:
    assert find_tool_syntax(vocabulary, template) == syntax
