"""Tool calls between markers, found as text streams; malformed ones stay text. Pure.

JSON arguments are passed on once certain to be valid so far; at its end the format's parser, mlx-lm's for most
models, reads the whole call. White space before calls, and at the end of an answer with calls, is dropped; around a
malformed call it stays.
"""

import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from models.errors import FOREIGN_FAULTS
from models.output.pieces import (
    MarkerSearch,
    OutputParser,
    Piece,
    Text,
    ToolArguments,
    ToolCallCut,
    ToolCallEnded,
    ToolCallFailed,
    ToolCallStarted,
)
from models.texts import read_object, well_formed, well_formed_json


@dataclass(frozen=True)
class ToolCall:
    """A complete call; `arguments` is a JSON text."""

    id: str
    name: str
    arguments: str


JSON_HEAD: Final = re.compile(
    r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


@dataclass(frozen=True)
class ToolFormat:
    """Markers around a call, and the parser of the text between."""

    start: str
    end: str
    """End marker; empty if a call ends with the answer."""
    parse: Callable[[str, Any], Any]
    """(text, tools) to one or a list of `{"name", "arguments"}`; raises for malformed text."""
    head: re.Pattern[str] = JSON_HEAD
    """Text before arguments that are a JSON object, with group `name`."""
    frames: tuple[str, ...] = ()
    """Texts around all of an answer's calls; dropped like white space."""
    writes_json: bool = False
    """Each call is `{"name", "arguments"}` in JSON."""

    def find_arguments(self, text: str) -> tuple[str, int] | None:
        """An unfinished call's name, and where its arguments begin."""
        found = self.head.match(text)
        if found is None:
            return None
        name = found["name"]
        try:
            read = json.loads(name) if name.startswith('"') else name.strip()
        except ValueError:
            return None
        return (well_formed(read), found.end()) if read else None

    def read_calls(self, text: str, tools: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
        """Calls between two markers; none if malformed."""
        # Models use field names that some parsers do not know and therefore lose, so plain JSON is read here.
        written = _json_calls(text)
        return checked_calls(lambda: self.parse(text, tools) if written is None else written)


def checked_calls(parse: Callable[[], Any]) -> list[ToolCall]:
    """`parse`'s one call or list; none if it raises or returns anything else."""
    try:
        parsed = parse()
        return [_tool_call(fields) for fields in (parsed if isinstance(parsed, list) else [parsed])]
    except FOREIGN_FAULTS:
        return []


def _json_calls(text: str) -> list[Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    calls = value if isinstance(value, list) else [value]
    return calls if all(isinstance(call, dict) and "name" in call for call in calls) else None


def _tool_call(fields: Any) -> ToolCall:
    name, given = fields["name"], fields.get("id")
    if not isinstance(name, str) or not name:
        raise ValueError("a call without a name")
    call_id = given if isinstance(given, str) and given else _new_call_id()
    return ToolCall(well_formed(call_id), well_formed(name), _arguments_text(fields))


def _arguments_text(fields: Any) -> str:
    """`{}` without arguments; raises for anything but an object."""
    arguments = fields.get("arguments")
    if arguments is None:
        arguments = fields.get("parameters")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text = well_formed_json(arguments)
    if read_object(text) is None:
        raise ValueError("arguments that are no JSON object")
    return text


def _new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


_SPACE = " \t\r\n"
_LITERAL = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_LITERAL_END = re.compile(rf"[,\]}}{_SPACE}]")
_IN_STRING = re.compile(r'(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}))*')
"""Characters of a JSON string, without halves of surrogate pairs."""
_ESCAPE_BEGUN = re.compile(r"\\(?:u(?:[0-9a-cA-CeEfF][0-9a-fA-F]{0,2}|[dD](?:[0-7][0-9a-fA-F]?)?)?)?")


_VALUE: Final = '"{[v'
"""What a value may begin with; `v` stands for all that is neither text nor punctuation."""
_CLOSERS: Final = {"{": "}", "[": "]"}


class JsonPrefix:
    """Reads one JSON object from its first brace on; tells how much is certain to be valid.

    Ignores text after the object.
    """

    def __init__(self) -> None:
        self.is_broken = False
        self._text = ""
        self._closers = ""
        """Closers of what is open, the innermost last."""
        self._allowed = "{"
        """What may come next, as in `_VALUE`; empty after the object."""
        self._is_in_string = False

    @property
    def is_complete(self) -> bool:
        return not self._allowed

    def push(self, text: str) -> str:
        """The text that has become certain."""
        self._text += text
        start, stop = -1, 0
        while start < stop < len(self._text) and not self.is_broken and not self.is_complete:
            start, stop = stop, (self._string_end if self._is_in_string else self._end)(stop)
        certain, self._text = self._text[:stop], self._text[stop:]
        return certain

    def _string_end(self, start: int) -> int:
        inside = _IN_STRING.match(self._text, start)
        assert inside is not None, "the pattern matches no characters as well"
        stop = inside.end()
        if self._text.startswith('"', stop):
            self._is_in_string = False
            return stop + 1
        self.is_broken = stop < len(self._text) and not _ESCAPE_BEGUN.fullmatch(self._text, stop)
        return stop

    def _end(self, start: int) -> int:
        """The end of the next letter, or of a literal once complete: a number may continue with every digit."""
        letter = self._text[start]
        if letter in _SPACE:
            return start + 1
        kind = letter if letter in '"{}[]:,' else "v"
        end = _LITERAL_END.search(self._text, start) if kind == "v" else None
        is_whole = kind != "v" or (end is not None and _LITERAL.fullmatch(self._text, start, end.start()) is not None)
        self.is_broken = kind not in self._allowed or (end is not None and not is_whole)
        if self.is_broken or not is_whole:
            return start
        self._allowed = self._following(kind)
        return start + 1 if end is None else end.start()

    def _following(self, kind: str) -> str:
        is_key = kind == '"' and "v" not in self._allowed
        self._is_in_string = kind == '"'
        if kind in _CLOSERS:
            self._closers += _CLOSERS[kind]
            return '"}' if kind == "{" else _VALUE + "]"
        if kind == "," and self._closers[-1] == "}":
            return '"'
        if kind in ",:":
            return _VALUE
        self._closers = self._closers[:-1] if kind in "}]" else self._closers
        return ":" if is_key else "," + self._closers[-1] if self._closers else ""


MAX_HEAD_CHARACTERS = 2048
"""A call without arguments up to this length is read when complete."""


class OpenCall:
    """One call while the model writes it."""

    def __init__(self, find_arguments: Callable[[str], tuple[str, int] | None]) -> None:
        """`find_arguments` returns an unfinished call's name and its arguments' start."""
        self._find_arguments = find_arguments
        self._written: list[str] = []
        self._head = ""
        self._name = ""
        self._start = 0
        self._id = _new_call_id()
        self._object = JsonPrefix()
        self._passed_on: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._written)

    def push(self, text: str, *, is_last: bool = False) -> list[Piece]:
        """Returns what has become certain: nothing of a call that came at once (`is_last`)."""
        self._written.append(text)
        opening: list[Piece] = []
        if not self._name:
            if is_last or len(self._head) > MAX_HEAD_CHARACTERS:
                return []
            self._head += text
            self._name, self._start = self._find_arguments(self._head) or ("", 0)
            if not self._name:
                return []
            opening, text = [ToolCallStarted(self._id, self._name)], self._head[self._start :]
        certain = self._object.push(text)
        self._passed_on.append(certain)
        return [*opening, ToolArguments(certain)] if certain else opening

    def end(self, calls: Sequence[ToolCall], text: str) -> list[Piece]:
        """`calls` are what the whole `text`, with markers, means."""
        if not self._name:
            return [piece for call in calls for piece in pieces_of(call)] or [Text(text)]
        rest = self._rest(calls[0]) if len(calls) == 1 else None
        if rest is None:
            return [ToolCallFailed(text)]
        return [*([ToolArguments(rest)] if rest else []), ToolCallEnded()]

    def _rest(self, call: ToolCall) -> str | None:
        if call.name != self._name:
            return None
        passed_on = "".join(self._passed_on)
        if self._object.is_complete:
            return "" if read_object(passed_on) == read_object(call.arguments) else None
        # Halves of characters were left unchanged: now the whole text is known, and they are replaced.
        text = self.text[self._start :]
        try:
            written = well_formed_json(text[: json.JSONDecoder().raw_decode(text)[1]])
        except (ValueError, RecursionError):
            return None
        is_same = read_object(written) == read_object(call.arguments) and written.startswith(passed_on)
        return written[len(passed_on) :] if is_same else None


class ToolCallParser(OutputParser):
    """Splits an answer into text and calls."""

    def __init__(
        self, tool_format: ToolFormat, tools: Sequence[Mapping[str, Any]], *, is_forced: bool = False
    ) -> None:
        super().__init__([tool_format.start, *tool_format.frames])
        self._is_forced = is_forced
        self._format = tool_format
        self._tools = list(tools)
        self._starts, self._ends = self._search, MarkerSearch([tool_format.end] if tool_format.end else [])
        self._space = ""
        self._call: OpenCall | None = None

    def _rest(self, held: str, *, is_complete: bool) -> list[Piece]:
        if self._call is None:
            rest = "" if self._is_forced else self._space + held
            return [] if not rest or (self.made_calls and not self._without_frame(rest)) else [Text(rest)]
        # A complete answer's open call may lack its end marker.
        pieces = self._end_call(self._call, self._call.text + held, "", is_complete=is_complete)
        if self._is_forced and isinstance(pieces[-1], Text | ToolCallFailed):
            return [ToolCallCut()] if isinstance(pieces[-1], ToolCallFailed) else []
        return pieces

    def _take(self, text: str, marker: str | None) -> Iterator[Piece]:
        if self._call is None:
            yield from self._take_text(self._space + text, marker)
            return
        yield from self._call.push(text, is_last=marker is not None)
        if marker is not None:
            yield from self._end_call(self._call, self._call.text, marker, is_complete=True)

    def _take_text(self, text: str, marker: str | None) -> Iterator[Piece]:
        visible = self._without_frame(text)
        self._space = text[len(visible) :]
        if visible:
            yield Text(visible)
        if marker == self._format.start:
            self._call, self._search = OpenCall(self._format.find_arguments), self._ends
        elif marker is not None:
            self._space += marker

    def _without_frame(self, text: str) -> str:
        while True:
            shorter = text.rstrip()
            for frame in self._format.frames:
                shorter = shorter.removesuffix(frame)
            if shorter == text:
                return text
            text = shorter

    def _end_call(self, call: OpenCall, inner: str, marker: str, *, is_complete: bool) -> list[Piece]:
        calls = self._format.read_calls(inner, self._tools) if is_complete else []
        pieces = call.end(calls, f"{self._space}{self._format.start}{inner}{marker}")
        self._space, self._call, self._search = "", None, self._starts
        return pieces


def pieces_of(call: ToolCall) -> tuple[Piece, Piece, Piece]:
    """Pieces of a call that came at once."""
    return ToolCallStarted(call.id, call.name), ToolArguments(call.arguments), ToolCallEnded()


class CallWatch:
    """Tells when an answer's first call ends, valid or not."""

    def __init__(self, start: str, end: str) -> None:
        """The markers around a call; neither is empty."""
        self._searches = [MarkerSearch([end]), MarkerSearch([start])]

    @property
    def is_complete(self) -> bool:
        return not self._searches

    def accept(self, text: str) -> None:
        """Takes the answer's next text."""
        while text and self._searches:
            _, marker, text = self._searches[-1].push(text)
            if marker is not None:
                self._searches.pop()
