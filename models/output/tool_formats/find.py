"""Which format of tool calls a model writes, by its tokens and its template, and the parser of an answer in it."""

from collections.abc import Container, Mapping, Sequence
from typing import Any, TypeAlias

from models.output.pieces import OutputParser
from models.output.tool_calls import ToolCallParser
from models.output.tool_format import ToolFormat
from models.output.tool_formats.bare import BareCallParser, BareFormat
from models.output.tool_formats.deepseek import DEEPSEEK_V3, DEEPSEEK_V3_1
from models.output.tool_formats.harmony import CHANNEL, MESSAGE, HarmonyFormat
from models.output.tool_formats.llama_json import LLAMA_JSON, PYTHON_TAG
from models.output.tool_formats.pythonic import PYTHONIC

ToolSyntax: TypeAlias = ToolFormat | BareFormat | HarmonyFormat


def find_tool_syntax(vocabulary: Container[str], template: str) -> ToolSyntax | None:
    """Returns the format of calls for which there is a parser here; the first that fits counts."""
    if CHANNEL in vocabulary and MESSAGE in vocabulary:
        return HarmonyFormat()
    if DEEPSEEK_V3.start in vocabulary or DEEPSEEK_V3.start in template:
        return DEEPSEEK_V3 if "```json" in template else DEEPSEEK_V3_1
    if "tools" not in template:
        return None
    if "<|python_start|>" in vocabulary or "(params_name1=" in template:
        return PYTHONIC
    if PYTHON_TAG in vocabulary or PYTHON_TAG in template or '{"name": function name, "parameters":' in template:
        return LLAMA_JSON
    return None


def markers_of(syntax: ToolSyntax | None) -> tuple[str, ...]:
    """Returns the texts by which a format is read; some consist of special tokens."""
    if isinstance(syntax, ToolFormat):
        return tuple(text for text in (syntax.start, syntax.end, *syntax.frames) if text)
    return () if syntax is None else syntax.frames


def tool_parser(
    syntax: ToolFormat | BareFormat, tools: Sequence[Mapping[str, Any]], *, is_forced: bool = False
) -> OutputParser:
    """Returns what reads the answer of one request that offers `tools`, or forces calls of them."""
    if isinstance(syntax, ToolFormat):
        return ToolCallParser(syntax, tools, is_forced=is_forced)
    return BareCallParser(syntax, tools)
