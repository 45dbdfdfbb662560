"""The formats in which models write tool calls, found by tokens and template, and their parsers.

* harmony, of gpt-oss: each message has a header with channel and recipient. `<|channel|>analysis<|message|>` begins
  reasoning, `final` the answer; `commentary` with a recipient is a call, its body the JSON text of arguments. A
  message ends with `<|end|>` or the token that ends the answer, which has no text ("harmony response format").
* bare calls, which are all of an answer, often without markers: a possible one is held back to its end. Llama 3
  writes `{"name": …, "parameters": {…}}`, one or several; Llama 3.2, Llama 4 and others `[f(a=1), g(b="x")]`.
* DeepSeek's calls: of V3 and R1, with arguments in a block of code, and of V3.1.
"""

import ast
import json
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from models.output.pieces import MarkerSearch, OutputParser, Piece, Reasoning, ReasoningFormat, Text
from models.output.tool_calls import OpenCall, ToolCallParser, ToolFormat, checked_calls, pieces_of

CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
_HARMONY_START: Final = "<|start|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_REASONING = ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>")

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_HEADERS: Final = (CHANNEL, "to=", _HARMONY_START)
_NOBODY: Final = ("assistant", "user", "all")


@dataclass(frozen=True)
class HarmonyFormat:
    """Reasoning, text and calls are read together."""

    frames: tuple[str, ...] = (CHANNEL, MESSAGE, _HARMONY_START, *_ENDS, "<|constrain|>")


class HarmonyParser(OutputParser):
    """Splits one answer into reasoning, text and calls."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        super().__init__([MESSAGE])
        self._has_tools = bool(tools)
        self._header: str | None = ""
        """Header of the next message so far; None within a message's body."""
        self._is_reasoning = False
        self._call: _HarmonyCall | None = None

    def feed(self, text: str) -> list[Piece]:
        """As `OutputParser.feed`."""
        pieces = super().feed(text)
        while self._header is not None and not _may_be_header(self._header.lstrip()):
            # The model writes no headers: its text is the answer.
            said = self._header + self._search.flush()
            self._begin_message("")
            pieces += super().feed(said)
        return pieces

    def _rest(self, held: str, *, is_complete: bool) -> list[Piece]:
        if self._header is None:
            return [*self._take(held, None), *self._end_message("", is_complete=is_complete)]
        header = self._header + held
        return [Text(header)] if header.strip() not in ("", _HARMONY_START, f"{_HARMONY_START}assistant") else []

    def _take(self, text: str, marker: str | None) -> Iterator[Piece]:
        if self._header is not None:
            self._header += text
            if marker is not None:
                self._begin_message(self._header)
            return
        if text and self._call is not None:
            yield from self._call.push(text)
        elif text:
            yield Reasoning(text) if self._is_reasoning else Text(text)
        if marker is not None:
            yield from self._end_message(marker, is_complete=True)

    def _begin_message(self, header: str) -> None:
        channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
        self._is_reasoning = channel is not None and channel[1] == "analysis"
        if recipient is not None and recipient[1] not in _NOBODY:
            name = recipient[1].removeprefix("functions.") if self._has_tools else ""
            self._call = _HarmonyCall(name, header + MESSAGE)
        self._header, self._search = None, MarkerSearch([*_ENDS, _HARMONY_START])

    def _end_message(self, marker: str, *, is_complete: bool) -> list[Piece]:
        call, self._call = self._call, None
        self._header, self._search = marker if marker == _HARMONY_START else "", MarkerSearch([MESSAGE])
        return [] if call is None else call.end_message(marker, is_complete=is_complete)


def _may_be_header(begun: str) -> bool:
    return any(one.startswith(begun) or begun.startswith(one) for one in _HEADERS)


class _HarmonyCall(OpenCall):
    def __init__(self, name: str, header: str) -> None:
        super().__init__(self._find_body)
        self._recipient = name
        self._header = header

    def end_message(self, marker: str, *, is_complete: bool) -> list[Piece]:
        calls = checked_calls(self._read) if self._recipient and is_complete else []
        return self.end(calls, self._header + self.text + ("" if marker == _HARMONY_START else marker))

    def _find_body(self, text: str) -> tuple[str, int] | None:
        body = text.lstrip()
        return (self._recipient, len(text) - len(body)) if self._recipient and body.startswith("{") else None

    def _read(self) -> dict[str, Any]:
        """Raises if the body is neither the JSON text of arguments nor empty."""
        return {"name": self._recipient, "arguments": json.loads(self.text or "{}")}


@dataclass(frozen=True)
class BareFormat:
    """Calls that are all of an answer."""

    may_be_call: Callable[[str], bool]
    """Whether an answer that begins so, after white space, may be calls."""
    parse: Callable[[str, Any], Any]
    """(text, tools) to a list of `{"name", "arguments"}`; raises for other text."""
    call_start: str
    frames: tuple[str, ...] = ()


class BareCallParser(OutputParser):
    """Reads an answer as calls if all of it is, else as text."""

    def __init__(self, bare_format: BareFormat, tools: Sequence[Mapping[str, Any]]) -> None:
        super().__init__()
        self._format = bare_format
        self._tools = list(tools)
        self._held: str | None = ""
        """None once the answer is text."""

    def _take(self, text: str, marker: str | None) -> Iterator[Piece]:
        said = (self._held or "") + text
        if self._held is not None and self._may_be_call(said):
            self._held = said
            return
        self._held = None
        yield Text(said)

    def _rest(self, held: str, *, is_complete: bool) -> list[Piece]:
        if not self._held:
            return []
        written = self._without_frames(self._held)
        calls = checked_calls(lambda: self._format.parse(written, self._tools)) if is_complete else []
        if not calls:
            return [Text(self._held)]
        return [piece for call in calls for piece in pieces_of(call)]

    def _may_be_call(self, text: str) -> bool:
        text = text.lstrip()
        if any(text.startswith(frame) or frame.startswith(text) for frame in self._format.frames):
            return True
        return self._format.may_be_call(text)

    def _without_frames(self, text: str) -> str:
        text = text.strip()
        for frame in self._format.frames:
            text = text.removeprefix(frame).removesuffix(frame).strip()
        return text


_DEEPSEEK_START: Final = "<｜tool▁call▁begin｜>"
_END: Final = "<｜tool▁call▁end｜>"
_SEPARATOR: Final = "<｜tool▁sep｜>"
_FRAMES: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")


def _deepseek(before: str, after: str) -> ToolFormat:
    """DeepSeek's format with these patterns around a name and its separator, and behind the arguments."""
    head = rf"\s*{before}\s*(?=\{{)"
    whole = re.compile(rf"{head}(?P<arguments>.*){after}\s*", re.DOTALL)

    def parse(text: str, tools: Any) -> dict[str, Any]:
        found = whole.fullmatch(text)
        if found is None:
            raise ValueError("no call of DeepSeek")
        return {"name": found["name"].strip(), "arguments": json.loads(found["arguments"])}

    return ToolFormat(_DEEPSEEK_START, _END, parse, head=re.compile(head), frames=_FRAMES)


DEEPSEEK_V3 = _deepseek(rf"function{_SEPARATOR}(?P<name>[^\n]+)\n```json", "```")
DEEPSEEK_V3_1 = _deepseek(rf"(?P<name>[^\n<]+){_SEPARATOR}", "")


PYTHON_TAG: Final = "<|python_tag|>"
_BEGINNINGS: Final = ('{"name":', '{"type":"function"')


def _may_be_json_call(text: str) -> bool:
    written = "".join(text.split())
    return any(written.startswith(beginning) or beginning.startswith(written) for beginning in _BEGINNINGS)


def _parse_json_calls(text: str, tools: Any) -> list[Any]:
    decoder, calls, position = json.JSONDecoder(), list[Any](), 0
    while position < len(text):
        call, position = decoder.raw_decode(text, position)
        if not isinstance(call, dict) or not call.keys() <= _KEYS or not call.keys() & _ARGUMENTS:
            raise ValueError("no call")
        calls.append(call)
        position += len(text[position:]) - len(text[position:].lstrip(" \t\r\n;"))
    return calls


_ARGUMENTS = frozenset({"parameters", "arguments"})
_KEYS = _ARGUMENTS | {"type", "name"}

_CALL_START: Final = r'\{\s*("type"\s*:\s*"function"|"name"\s*:\s*"[^"]*"\s*,\s*"(parameters|arguments)")'

LLAMA_JSON = BareFormat(_may_be_json_call, _parse_json_calls, _CALL_START, frames=(PYTHON_TAG,))


_BEGINNING = re.compile(r"\[\s*(?:[A-Za-z_][\w.]*\s*(?:\(.*)?)?", re.DOTALL)
_JSON_NAMES = {"true": True, "false": False, "null": None}


def _parse_python_calls(text: str, tools: Any) -> list[dict[str, Any]]:
    tree = ast.parse(text.strip(), mode="eval").body
    if not isinstance(tree, ast.List) or not tree.elts:
        raise ValueError("no list of calls")
    return [_call(node) for node in tree.elts]


def _call(node: ast.expr) -> dict[str, Any]:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("no call with named arguments only")
    arguments = {str(keyword.arg): ast.literal_eval(_JsonNames().visit(keyword.value)) for keyword in node.keywords}
    return {"name": ast.unparse(node.func), "arguments": arguments}


class _JsonNames(ast.NodeTransformer):
    """Replaces JSON's words by Python's: models write either."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


PYTHONIC = BareFormat(
    lambda text: not text or _BEGINNING.fullmatch(text) is not None,
    _parse_python_calls,
    r"\[\s*[A-Za-z_][A-Za-z0-9_.]*\s*\(",
    frames=("<|python_start|>", "<|python_end|>", "<|python_tag|>"),
)


ToolSyntax: TypeAlias = ToolFormat | BareFormat | HarmonyFormat


def find_tool_syntax(vocabulary: Container[str], template: str) -> ToolSyntax | None:
    """The first format here that fits the model, if any."""
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
    """A format's markers; some consist of special tokens."""
    if isinstance(syntax, ToolFormat):
        return tuple(text for text in (syntax.start, syntax.end, *syntax.frames) if text)
    return () if syntax is None else syntax.frames


def tool_parser(
    syntax: ToolFormat | BareFormat, tools: Sequence[Mapping[str, Any]], *, is_forced: bool = False
) -> OutputParser:
    """The parser for an answer that may call `tools`, or must."""
    if isinstance(syntax, ToolFormat):
        return ToolCallParser(syntax, tools, is_forced=is_forced)
    return BareCallParser(syntax, tools)
