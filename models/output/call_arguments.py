"""Reads the arguments of calls, in any format, as a text comes; gives them out as JSON. Pure.

A reader is a generator that ends a step where it needs more text. Each decision is one match of one pattern, which
waits as long as more text could change it, so the pieces given out do not depend on how the text is cut. The first
piece of a call comes with the first characters of a value, and the last brace only with the call's certain end.
"""

import json
import math
from collections.abc import Collection, Generator
from functools import lru_cache
from typing import Any, Final, TypeAlias, TypeVar

import regex as re

from models.output.call_formats import JSON, Literal
from models.output.call_patterns import CUT, END, OVER, Ends, Patterns
from models.output.call_values import escaped, json_text, properties_of, types_of, value_text
from models.output.pieces import Piece, ToolArguments, ToolCallStarted
from models.texts import well_formed

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
Found: TypeAlias = Any
"""A match of the package `regex`, or None."""

MAX_DEPTH: Final = 100
MAX_DIGITS: Final = 1000
_TEXT: Final = frozenset({"string"})
_NO_TEXT: Final = frozenset({"object", "array", "number", "boolean", "null"})


class Refused(Exception):
    """What stands here is no call, or is not wholly understood."""


class ArgumentReader:
    """The text of an answer as it comes, read up to `pos`, and what is given out of the open call."""

    def __init__(self) -> None:
        self.text, self.pos, self.is_over = "", 0, False
        self.pieces: list[Piece] = []
        self.opening: ToolCallStarted | None = None
        """The open call, while nothing of it is given out."""
        self.is_held = False
        """Nothing of the open call may be given out yet."""
        self._has_crlf = False
        """The open value stands between line ends of Windows."""
        self.repairs: list[str] = []
        """Names of the repairs made in the open call."""
        self._waiting = ""
        self._taken: list[str] = []

    def match(self, pattern: Any, start: int | None = None) -> Steps[Found]:
        """The match of `pattern` at `start`, once no further text can change it."""
        while True:
            match = pattern.match(self.text, self.pos if start is None else start, partial=not self.is_over)
            if match is None or not match.partial:
                return match
            yield

    def take(self, pattern: Any) -> Steps[Found]:
        """As `match` at `pos`; reads what matches."""
        match = yield from self.match(pattern)
        if match is not None:
            self.pos = match.end()
        return match

    def need(self, pattern: Any) -> Steps[Found]:
        """As `take`; raises Refused."""
        match = yield from self.take(pattern)
        if match is None:
            raise Refused
        return match

    def drop(self, stop: int) -> None:
        """Forgets the text before `stop`, except in `written`."""
        self._taken.append(self.text[:stop])
        self.text, self.pos = self.text[stop:], 0

    def begin(self) -> None:
        """A call may begin here."""
        self.drop(self.pos)
        self._taken, self._waiting, self.repairs, self.opening, self.is_held = [], "", [], None, False

    @property
    def written(self) -> str:
        """All text read since `begin`."""
        return "".join((*self._taken, self.text[: self.pos])).rstrip(OVER)

    def mend(self, what: str) -> None:
        """Notes a repair."""
        if what not in self.repairs:
            self.repairs.append(what)

    def add(self, text: str) -> None:
        """Takes punctuation and keys, which are given out with the next characters of a value."""
        self._waiting += text

    def give(self, text: str) -> None:
        """Gives out characters of a value."""
        self._waiting += text
        if text and not self.is_held:
            self.give_out()

    def give_out(self) -> None:
        """Gives out all that waits."""
        if self.opening is not None:
            self.pieces.append(self.opening)
            self.opening = None
        text, self._waiting = self._waiting, ""
        last = self.pieces[-1] if self.pieces else None
        if isinstance(last, ToolArguments):
            self.pieces[-1] = ToolArguments(last.text + text)
        elif text:
            self.pieces.append(ToolArguments(text))

    def tags(self, form: Patterns, schema: Any) -> Steps[None]:
        """Reads arguments between tags; the last brace is not given out."""
        opened, closed = form.whole
        if (yield from self.take(opened)):
            yield from self.members(form, JSON, schema)
            yield from self.need(closed)
            return
        if (yield from self.match(_opening("{"))):
            self.mend("one object")
            yield from self.members(form, JSON, schema)
            return
        self.add("{")
        properties, given, was_text = properties_of(schema), set[str](), False
        while opener := (yield from self.take(form.key)):
            key, self._has_crlf = opener["key"].strip(), opener.groupdict().get("crlf") is not None
            if opener.groupdict().get("opened", key) is None:
                if key not in properties:
                    raise Refused
                self.mend("value's tag left out")
            self._name_argument(key, given, schema, was_text=was_text)
            types = types_of(properties.get(key), schema)
            if not types and (kind := opener.groupdict().get("kind")) is not None:
                types = _TEXT if kind in ("string", "true") else _NO_TEXT
            was_text = yield from self._tagged(form, types, properties.keys() - given)

    def _name_argument(self, key: str, given: set[str], schema: Any, *, was_text: bool) -> None:
        """After a text, what looks like an argument that cannot be may be of the text: raises Refused."""
        is_strange = was_text and key not in properties_of(schema) and "patternProperties" not in schema
        if key in given or (is_strange and schema.get("additionalProperties") is False):
            raise Refused
        self.add(f"{', ' if given else ''}{json_text(key)}: ")
        given.add(key)

    def _tagged(self, form: Patterns, types: frozenset[str], others: Collection[str]) -> Steps[bool]:
        """Reads a value between tags; returns whether it may be a text. Others are given out once whole."""
        is_quoted = (yield from self.take(form.quote)) is not None
        is_text = is_quoted or types == _TEXT
        if not is_text and (not types or "string" in types):
            is_text = (yield from self.match(_NO_LITERAL)) is not None
        ends = form.quoted_ends if is_quoted else form.value_ends
        if is_text:
            yield from self._text_until(ends, others)
            return True
        start = self.pos
        stop = yield from self._find_end(ends, others, is_text=False)
        self.give(value_text(self.text[start:stop], types))
        return not types or "string" in types

    def _text_until(self, ends: Ends, others: Collection[str]) -> Steps[None]:
        """Reads a text without escapes, and its end tag; gives it out as it comes."""
        self.add('"')
        yield from self._find_end(ends, others, is_text=True)
        self.add('"')

    def _find_end(self, ends: Ends, others: Collection[str], *, is_text: bool) -> Steps[int]:
        """Reads a value and its end tag; returns where one that is no text stops. `others` are keys not yet given."""
        scan, depth = self.pos, 0
        while True:
            ending = yield from self._next_mark(ends, scan, is_text=is_text)
            mark, size = ending.start(), len(ending[0])
            start = self._before_space(mark)
            if is_text:
                self._give_text(start)
                mark, start = mark - start, 0
            scan = mark + 1
            if ending["nested"] is not None:
                depth, scan = depth + 1, mark + size
                continue
            end = yield from self._end_at((start, mark), (ends.value,) if depth else (ends.value, ends.doubled))
            if end is not None and (end.re is ends.doubled or end.groupdict().get("skipped") is not None):
                depth = self._depth_before(end, depth, others, is_text=is_text)
            elif end is not None:
                depth = yield from self._depth_after(ends, end, depth, others)
            if depth < 0:
                if not is_text:
                    self.pos = end.end()
                    return int(end.start())
                self._give_text(end.start())
                self.pos = end.end() - end.start()
                return 0
            if self.text[mark] in OVER:
                raise Refused
            if ends.inner and ending[0] == ends.inner[0]:
                self._give_text(mark)
                self.give(escaped(ends.inner[1]))
                self.pos = scan = size
                self.mend("quote in a text")

    def _end_at(self, places: tuple[int, int], patterns: tuple[Any, ...]) -> Steps[Found]:
        """The first match of one of the patterns at one of the places."""
        for pattern in patterns:
            for place in places:
                if (match := (yield from self.match(pattern, place))) is not None:
                    return match
        return None

    def _next_mark(self, ends: Ends, scan: int, *, is_text: bool) -> Steps[Found]:
        """The next place where a value may end; a text before it is given out."""
        while True:
            mark = None
            if not ends.letters.isdisjoint(self.text[scan:]):
                mark = ends.mark.search(self.text, scan, partial=not self.is_over)
            if mark is not None and not mark.partial:
                return mark
            scan = len(self.text) if mark is None else mark.start()
            if is_text:
                stop = self._before_space(scan)
                self._give_text(stop)
                scan -= stop
            yield

    def _before_space(self, stop: int) -> int:
        """White space before an end tag may be of the format."""
        if self._has_crlf and self.text.endswith("\r\n", self.pos, stop):
            return stop - 2
        return stop - 1 if stop > self.pos and self.text[stop - 1].isspace() else stop

    def _give_text(self, stop: int) -> None:
        self.give(escaped(self.text[self.pos : stop]))
        self.drop(stop)

    def _depth_before(self, end: Found, depth: int, others: Collection[str], *, is_text: bool) -> int:
        """As `_depth_after`, where the end tag is left out before an argument, or stands twice."""
        if end.groupdict().get("skipped") is not None and (depth or end["key"].strip() not in others):
            return depth
        if is_text:
            raise Refused
        self.mend("end tag left out, or there twice")
        return -1

    def _depth_after(self, ends: Ends, end: Found, depth: int, others: Collection[str]) -> Steps[int]:
        """How many calls are open within a text after what may be its end; -1 after its end.

        Raises Refused where the text may as well go on.
        """
        if end.groupdict().get("repair") is not None:
            if depth:
                raise Refused
            self.mend("end tag left out")
            return -1
        if end["last"] is None:  # another argument follows
            if depth and end["key"] in others:
                raise Refused
            return depth or -1
        sure = yield from self.match(ends.sure, end.start())
        if sure is not None:
            if depth and sure["another"] is not None:
                raise Refused
            return -1
        scan = (yield from self.match(ends.call_end, end.start())).end()
        while True:  # text follows a whole call: if another end comes, it is the call's
            later = ends.later.search(self.text, scan, partial=not self.is_over)
            if later is not None and not later.partial:
                if later[0] == CUT:  # either the text or what follows it
                    raise Refused
                return -1 if later["again"] is None else max(depth - 1, 0)
            scan = len(self.text) if later is None else later.start()
            yield

    def members(self, form: Patterns, style: Literal, schema: Any, closers: tuple[str, ...] = ()) -> Steps[None]:
        """Reads an object or named arguments, within `closers`; the outermost's last brace is not given out."""
        closer = _CLOSERS[(yield from self.need(_opening("{" if closers else style.open)))[0][-1]]
        inner = (closer, *closers)
        if len(inner) > MAX_DEPTH:
            raise Refused
        properties, given, was_text = properties_of(schema), set[str](), False
        self.add("{")
        while not (yield from self.take(_closing(closer))):
            if not closers and (yield from self.match(form.without)):
                self.mend("brace left out")
                break
            match = yield from self.need(_key(style.quote))
            if given and not match["comma"]:
                if len(style.quote) == 1:
                    raise Refused
                self.mend("comma left out")
            key = match["bare"] if match["text"] is None else json.loads(f'"{match["text"]}"', strict=False)
            self._name_argument(well_formed(key), given, schema, was_text=was_text and not closers)
            keys = tuple(properties) if not closers else ()
            was_text = yield from self._value(form, style, properties.get(key), inner, keys)
        if closers:
            self.add("}")

    def _items(self, form: Patterns, style: Literal, schema: Any, closers: tuple[str, ...]) -> Steps[None]:
        closer = _CLOSERS[(yield from self.need(_LIST))[0][-1]]
        if len(closers) >= MAX_DEPTH:
            raise Refused
        self.add("[")
        items, is_first = schema.get("items") if isinstance(schema, dict) else None, True
        while not (yield from self.take(_closing(closer))):
            if not is_first:
                yield from self.need(_COMMA)
                self.add(", ")
            is_first = False
            yield from self._value(form, style, items, (closer, *closers), ())
        self.add("]")

    def _value(
        self, form: Patterns, style: Literal, schema: Any, closers: tuple[str, ...], keys: tuple[str, ...]
    ) -> Steps[bool]:
        """Reads a value in a literal; returns whether it is a text without escapes."""
        match = yield from self.match(_value_start(style.quote))
        kind, types = match.lastgroup if match is not None else None, types_of(schema)
        if kind == "object":
            yield from self.members(form, style, schema, closers)
        elif kind == "array" or (kind == "tuple" and style.assign == "="):
            yield from self._items(form, style, schema, closers)
        elif kind == "quote":
            self.pos = match.end()
            return (yield from self._quoted(match["quote"], style, is_argument=len(closers) == 1))
        elif kind == "raw":
            self.pos = match.end()
            yield from self._text_until(form.raw_ends(closers, keys, match["raw"]), set(keys))
            return True
        elif (len(style.quote) == 1 or types != _TEXT) and (bare := (yield from self.take(_BARE))) is not None:
            self.give(_bare_text(bare["bare"]))
        elif len(style.quote) > 1 and (not types or "string" in types):
            yield from self.need(_UNQUOTED)
            self.mend("quote left out")
            yield from self._text_until(form.raw_ends(closers, keys, ""), set(keys))
            return True
        else:
            raise Refused
        return False

    def string(self) -> Steps[str]:
        """Reads a JSON string, of which nothing is given out; returns its JSON text."""
        waiting, is_held = self._waiting, self.is_held
        self._waiting, self.is_held = "", True
        yield from self.need(_opening('"'))
        yield from self._quoted('"', JSON)
        text, self._waiting, self.is_held = self._waiting, waiting, is_held
        return text

    def _quoted(self, quote: str, style: Literal, *, is_argument: bool = False) -> Steps[bool]:
        """Reads a string with escapes, and its end; returns whether it holds a quote without its escape.

        In Python's arguments such a quote is of the text, unless what follows is the next element.
        """
        self.add('"')
        is_loose = is_argument and style.assign == "=" and len(quote) == 1
        plain, closing = _plain(quote[0]), re.compile(re.escape(quote) + (_AFTER_ARGUMENT if is_loose else ""))
        are_loose = set[bool]()
        while True:
            if match := plain.match(self.text, self.pos):
                self.give(escaped(match[0]))
                self.pos = match.end()
                if "\n" in match[0]:
                    self.mend("line break in a string")
            if self.pos == len(self.text):
                self.drop(self.pos)
                yield
                continue
            letter = self.text[self.pos]
            if letter in OVER:
                raise Refused
            if letter == "\\":
                escape = (yield from self.need(_ESCAPE))[0]
                are_loose |= {False} if escape[1:] == quote else set()
                self.give(_escape(escape, is_python=style.assign == "="))
            elif (yield from self.take(closing)):
                break
            else:
                are_loose |= {True} if is_loose else set()
                self.give(escaped(letter))
                self.pos += 1
            if is_loose and len(are_loose) > 1:  # what seemed an escape was the text's end
                raise Refused
        if True in are_loose:
            self.mend("quote in a text")
        self.add('"')
        return True in are_loose


def _bare_text(written: str) -> str:
    """A number or word as JSON has it; raises Refused for a number beyond what clients can read."""
    text = {"True": "true", "False": "false", "None": "null"}.get(written, written)
    if len(text) > MAX_DIGITS or (text[-1].isdigit() and not math.isfinite(float(text))):
        raise Refused
    return text


def _escape(written: str, *, is_python: bool) -> str:
    """An escape as JSON has it; one that JSON does not know is meant as written."""
    kind, digits = written[1], written[2:]
    if kind == "u" and len(written) == 6 and 0xD800 <= int(digits, 16) < 0xE000:
        return "\\ufffd"
    if (kind == "u" and digits) or kind in '"\\bfnrt' or (kind == "/" and not is_python):
        return written
    if is_python and digits:
        return escaped(chr(int(digits, 16))) if int(digits, 16) <= 0x10FFFF else "\\ufffd"
    if kind == "'":
        return "'"
    return "\\\\" + escaped(written[1:])


_CLOSERS: Final = {"{": "}", "[": "]", "(": ")"}
_NO_LITERAL: Final = re.compile(rf"\s*[^\s{{\[\"'\-0-9tfnTFN<{OVER}]")
_LIST: Final = re.compile(r"\s*[\[(]")
_COMMA: Final = re.compile(r"\s*,")
_AFTER_ARGUMENT: Final = rf"(?=\s*(?:,\s*(?:[^\W\d]\w*\s*=|\))|\)\s*[\],<{OVER}]|[{OVER}]))"
_UNQUOTED: Final = re.compile(rf"\s*(?=[^\s<{OVER}])")
_BARE: Final = re.compile(
    r"\s*(?P<bare>-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null|True|False|None)"
    rf"(?=\s*[,}}\])<`{END}])"
)
_HEX: Final = "[0-9a-fA-F]"
_HIGH: Final = rf"u[dD][89abAB]{_HEX}{{2}}"
_NO_LOW: Final = rf"(?=[^\\]|\\[^u]|\\u(?:[^dD]|[dD](?:[^c-fC-F]|[c-fC-F](?:[^0-9a-fA-F]|{_HEX}[^0-9a-fA-F]))))"
_ESCAPE: Final = re.compile(
    rf"\\(?:{_HIGH}(?:\\u[dD][c-fC-F]{_HEX}{{2}}|{_NO_LOW})"
    rf"|u(?:[0-9a-cA-CeEfF]{_HEX}{{3}}|[dD][0-7c-fC-F]{_HEX}{{2}})|x{_HEX}{{2}}|U{_HEX}{{8}}"
    rf"|u(?={_HEX}{{0,3}}[^0-9a-fA-F])|x(?={_HEX}?[^0-9a-fA-F])|U(?={_HEX}{{0,7}}[^0-9a-fA-F])|[^uxU{OVER}])",
    re.DOTALL,
)


@lru_cache
def _opening(opener: str) -> Any:
    return re.compile(rf"\s*{re.escape(opener)}")


@lru_cache
def _closing(closer: str) -> Any:
    return re.compile(rf"\s*,?\s*{re.escape(closer)}")


@lru_cache
def _plain(quote: str) -> Any:
    return re.compile(rf"[^{quote}\\{OVER}]+")


@lru_cache
def _key(quote: str) -> Any:
    mark = re.escape(quote)
    bare = rf"{mark}(?P<bare>\w[\w .-]*){mark}" if len(quote) > 1 else r"'(?P<bare>[^'\\]*)'"
    text = rf'"(?P<text>(?:[^"\\{OVER}]|\\.)*)"'
    return re.compile(rf"\s*(?P<comma>,)?\s*(?:{text}|{bare}|(?P<bare>[\w$][\w.$-]*))\s*[:=]")


@lru_cache
def _value_start(quote: str) -> Any:
    raw = rf"|(?P<raw>{re.escape(quote)}|')" if len(quote) > 1 else ""
    quotes = r"""'''|\"{3}|'(?=[^']|'[^'])|"(?=[^"]|"[^"])""" if quote == "'" else '"' if raw else "[\"']"
    starts = r"(?P<object>(?=\{))|(?P<array>(?=\[))|(?P<tuple>(?=\())"
    return re.compile(rf"\s*(?:{starts}|(?P<quote>{quotes}){raw})")
