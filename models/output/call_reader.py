"""Splits an answer into texts and calls, in any format, as it comes. Pure.

A call is given out only if its name is declared, each value was found, and every character of it is accounted for:
else its text is text. What breaks after the first characters of a value stays a call without its last brace. White
space before calls, and at the end of an answer with calls, is dropped.
"""

import json
import logging
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final, TypeAlias

import regex as re

from models.output.call_arguments import ArgumentReader, Refused, Steps
from models.output.call_formats import CODER, FORMATS, GLM, HARMONY, HERMES, JSON, KIMI_K2, VARIANTS, CallFormat, Tags
from models.output.call_patterns import CUT, END, HARMONY_HEADER, OVER, Patterns, patterns_of
from models.output.call_values import json_text, properties_of
from models.output.pieces import (
    MarkerSearch,
    OutputParser,
    Piece,
    Reasoning,
    Text,
    ToolCallCut,
    ToolCallEnded,
    ToolCallStarted,
)
from models.texts import read_object, well_formed

logger = logging.getLogger(__name__)

DeclaredTools: TypeAlias = Sequence[Mapping[str, Any]]
"""Functions as OpenAI's bodies have them."""


class CallReader(OutputParser):
    """Reads one answer, or one thought."""

    def __init__(
        self, call_format: CallFormat, tools: DeclaredTools, *, is_forced: bool = False, in_thought: bool = False
    ) -> None:
        """`is_forced`: what is no call is dropped. `in_thought`: only calls at the very end are calls."""
        super().__init__()
        self.call_format = call_format
        self._tools = {function["name"]: function.get("parameters") or {} for function in map(_function, tools)}
        self._is_forced, self._in_thought = is_forced, in_thought
        self._reader = ArgumentReader()
        self._own = patterns_of(call_format)
        self._start = re.compile("|".join((*self._own.starts, f"[{OVER}]")))
        self._first_letters = frozenset((*(text[0] for text in call_format.openers), *OVER))
        self._space = self._line = ""
        self._has_calls = self._is_open = self._is_known = self._is_in_code = False
        self._is_draft = in_thought
        """The open call is one only if nothing but white space and fences of code follows."""
        self._ids, self._counts = set[str](), Counter[str]()
        self._ended: list[tuple[str, list[Piece]]] = []
        """Drafts so far, with their texts."""
        self._steps = self._answer()
        next(self._steps)

    @property
    def call_counts(self) -> Counter[str]:
        """As of `OutputParser`."""
        return self._counts

    def feed(self, text: str) -> list[Piece]:
        """As `OutputParser.feed`."""
        self._reader.text += text
        return self._advance()

    def finish(self, *, is_complete: bool) -> list[Piece]:
        """As `OutputParser.finish`."""
        self._reader.text += END if is_complete else CUT
        self._reader.is_over = True
        return self._advance()

    def _advance(self) -> list[Piece]:
        next(self._steps, None)
        pieces, self._reader.pieces = self._reader.pieces, []
        return self._noted(pieces)

    def _say(self, text: str) -> None:
        *lines, self._line = f"{self._line}{text}".split("\n")
        self._is_in_code ^= sum(bool(_FENCE_LINE.fullmatch(line)) for line in lines) % 2 == 1
        text = self._space + text
        visible = "" if self._ended and _FENCES.fullmatch(text) else text.rstrip()
        self._space = text[len(visible) :]
        if visible and not self._is_forced:
            drafts, self._ended = "".join(written for written, _ in self._ended), []
            self._reader.pieces.append(Text(drafts + visible))

    # -- the answer

    def _answer(self) -> Steps[None]:
        yield
        reader = self._reader
        if self.call_format.is_bare and (start := (yield from reader.match(_BARE_START))):
            yield from self._group(is_in_code="`" in start[0])
        while True:
            is_plain = self._first_letters.isdisjoint(reader.text)
            start = None if is_plain else self._start.search(reader.text, partial=not reader.is_over)
            stop = len(reader.text) if start is None else start.start()
            self._say(reader.text[:stop])
            reader.drop(stop)
            if start is None or start.partial:
                yield
            elif reader.text[0] in OVER:
                return self._end()
            elif self._line.replace("```", "").count("`") % 2:  # of code within a line: a call that is shown
                self._say(reader.text[0])
                reader.drop(1)
            else:
                yield from self._group(is_in_code=self._is_in_code ^ bool(_FENCE_LINE.fullmatch(self._line)))

    def _end(self) -> None:
        pieces = self._reader.pieces
        if self._ended and self._reader.text[0] == END:
            pieces += [piece for _, call in self._ended for piece in call]
            self._counts["repaired"] += len(self._ended)
        else:
            self._space = "".join(written for written, _ in self._ended) + self._space
        if (self._space.strip() or not self._has_calls) and self._space and not self._is_forced:
            pieces.append(Text(self._space))

    def _group(self, *, is_in_code: bool) -> Steps[None]:
        """Calls between one pair of markers, or without an opener. In a block of code they may be an example."""
        reader, own = self._reader, self._own
        self._is_draft = self._in_thought or is_in_code or bool(self._ended)
        reader.begin()
        try:
            is_opened = (yield from reader.take(own.open)) is not None
            if not is_opened and self.call_format.open and not self.call_format.is_bare:
                reader.mend("opener left out")
            form = yield from self._find_form(is_opened=is_opened)
            form = form if is_opened else form.unopened
            while True:
                self._is_open = False
                yield from self._call(form, is_opened=is_opened)
                tail = yield from reader.take(form.tail)
                if tail is None and (form.closes or isinstance(form.body, Tags)):
                    raise Refused
                self._note_tail(form, tail)
                self._end_call()
                if tail is None or tail["close"] is not None or reader.text[0] in OVER:
                    return
                if (yield from reader.match(own.open)) is not None:
                    return
        except (Refused, ValueError, RecursionError):
            self._fail()

    def _note_tail(self, form: Patterns, tail: Any) -> None:
        reader = self._reader
        if tail is not None and tail.groupdict().get("extra") == "}":
            reader.mend("one brace too many")
        if form.closes and not form.form.is_bare and tail["close"] is None and reader.text[reader.pos] in OVER:
            reader.mend("closer left out")

    def _find_form(self, *, is_opened: bool) -> Steps[Patterns]:
        """The form of the call that follows: the model's own, or another's; raises Refused."""
        unknown = None
        for form in (self._own, *_others(self.call_format, is_opened=is_opened)):
            head = yield from self._reader.match(form.head)
            if head is None:
                continue
            if form.form.is_envelope or self._declared(head["name"]) is not None:
                if form is not self._own:
                    self._reader.mend("another family's form")
                return form
            unknown = unknown or form
        if unknown is None:
            raise Refused
        return unknown

    def _call(self, form: Patterns, *, is_opened: bool) -> Steps[None]:
        reader = self._reader
        head = yield from reader.need(form.head)
        if form.form.is_envelope:
            yield from self._envelope(form, needs_arguments=not is_opened)
            return
        written = head["name"].strip()
        call_id = written if form.form.head == KIMI_K2.head else head.groupdict().get("id")
        schema = self._begin_call(written, call_id)
        if isinstance(form.body, Tags):
            yield from reader.tags(form, schema)
        else:
            yield from self._literal(form, schema)

    def _literal(self, form: Patterns, schema: Any) -> Steps[None]:
        if (yield from self._reader.match(form.without)) is not None:
            self._reader.add("{")
            return
        if form.body == JSON and (yield from self._reader.take(_FENCE)) is not None:
            self._reader.mend("fence")
        if form.body == JSON and (yield from self._unwrap(form, schema)):
            return
        if form.body == JSON and (yield from self._reader.match(_QUOTE)) is not None:
            self._reader.mend("arguments as a text")
            yield from self._field_of_arguments(form)
        else:
            yield from self._reader.members(form, form.body, schema)

    def _unwrap(self, form: Patterns, schema: Any) -> Steps[bool]:
        """Reads a whole call that stands for its own arguments; raises Refused for another one."""
        reader, match = self._reader, (yield from self._reader.match(_WRAPPED))
        name = None if match is None else self._declared(match["name"])
        if match is None or name is None or match["key"] in properties_of(schema):
            return False
        if reader.opening is None or name != reader.opening.name:
            raise Refused
        reader.pos = match.end()
        reader.mend("a call as its own arguments")
        yield from self._field_of_arguments(form)
        yield from reader.need(_CLOSED)
        return True

    def _envelope(self, form: Patterns, *, needs_arguments: bool) -> Steps[None]:
        """Reads a JSON object of name and arguments, in any order."""
        reader, schema, call_id = self._reader, None, None
        yield from reader.need(_BRACE)
        num_open, has_arguments, reader.is_held = 1, False, True
        while (field := (yield from reader.take(_FIELD))) is not None:
            key = field["key"]
            if key in _ARGUMENTS and not has_arguments:
                has_arguments = True
                yield from self._field_of_arguments(form)
            elif key == "function" and schema is None and (yield from reader.take(_BRACE)) is not None:
                num_open += 1
            elif key in ("name", "function") and schema is None:
                name = yield from reader.need(_STRING)
                schema = self._begin_call(name["word"] or json.loads(name[0], strict=False), call_id)
                if key != "name":
                    reader.mend("field of the name")
            elif key in ("id", "type", "index"):
                value = json.loads((yield from reader.need(_SCALAR))[0], strict=False)
                if key == "id" and isinstance(value, str):
                    call_id = value
                    if reader.opening is not None:
                        reader.opening = replace(reader.opening, id=self._call_id(value))
            else:
                raise Refused
        if schema is None or (needs_arguments and not has_arguments):
            raise Refused
        reader.add("" if has_arguments else "{")
        for _ in range(num_open):
            if (yield from reader.take(_CLOSED)) is None:
                yield from reader.need(form.without)
                reader.mend("brace left out")

    def _field_of_arguments(self, form: Patterns) -> Steps[None]:
        reader = self._reader
        if (yield from reader.match(_QUOTE)) is not None:
            text = json.loads((yield from reader.string()), strict=False)
            value = read_object(text if text.strip() else "{}")
            if value is None:
                raise Refused
            reader.give(json_text(value)[:-1])
        elif (yield from reader.take(_NULL)) is not None:
            reader.add("{")
        else:
            yield from reader.members(form, JSON, {})

    # -- calls

    def _declared(self, written: str) -> str | None:
        """The declared tool that a written name means."""
        name = written.strip()
        bare = _NUMBER.sub("", name)
        ends = (one[place + 1 :] for one in (name, bare) for place, letter in enumerate(one) if letter in ".:/")
        names = (name, bare, *ends, *(found[1] for found in [_UNDERLINED.fullmatch(name)] if found is not None))
        return next((one for one in names if one in self._tools), None)

    def _begin_call(self, written: str, call_id: str | None) -> Any:
        """Returns the schema of the arguments. A call of a tool that is not declared is read too, and is text."""
        name, reader = self._declared(written), self._reader
        self._is_open, self._is_known = True, name is not None
        reader.is_held = name is None or self._is_draft
        reader.opening = ToolCallStarted(self._call_id(call_id), name or "")
        if name is not None and name != written and not _USUAL.fullmatch(written):
            reader.mend("name")
        return {} if name is None else self._tools[name]

    def _call_id(self, written: str | None) -> str:
        """The id that the model wrote, if it wrote one that no other call has."""
        call_id = well_formed(written) if written else ""
        call_id = new_call_id() if call_id in self._ids or not call_id else call_id
        self._ids.add(call_id)
        return call_id

    def _end_call(self) -> None:
        reader, start = self._reader, len(self._reader.pieces)
        if self._is_known:
            reader.add("}")
            reader.give_out()
            reader.pieces.append(ToolCallEnded())
            if self._is_draft:
                self._ended.append((self._space + reader.written, reader.pieces[start:]))
                del reader.pieces[start:]
            self._has_calls, self._space = self._has_calls or not self._is_draft, ""
            self._count("repaired" if reader.repairs else "read")
        else:
            self._count("refused")
            self._say(reader.written)
        reader.begin()
        self._is_open = False

    def _count(self, outcome: str) -> None:
        if self._is_draft:
            return
        self._counts[outcome] += 1
        if outcome != "read":
            logger.debug("a call in the format %s: %s %s", self.call_format.name, outcome, self._reader.repairs)

    def _fail(self) -> None:
        reader = self._reader
        if not reader.written and reader.text[reader.pos] not in OVER:
            reader.pos += 1
        if self._is_open and reader.opening is None and not reader.is_held:
            self.is_cut = True
            self._count("cut")
            if reader.text[-1:] == CUT:
                reader.pos = len(reader.text) - 1  # what is left of the call is not yet a value
            reader.pieces.append(ToolCallCut(self._space + reader.written))
            self._space = ""
        else:
            if self._is_open:
                self._count("refused")
            self._say(reader.written)
        self._is_open = False
        reader.begin()


class HarmonyReader(CallReader):
    """Reads an answer of gpt-oss, whose messages have headers ("harmony response format").

    A header names channel and recipient: `analysis` is reasoning, `final` the answer; a message to a tool is a call,
    its body the JSON text of arguments.
    """

    def __init__(self, tools: DeclaredTools) -> None:
        super().__init__(HARMONY, tools)
        self._has_said = False
        self._thought = ""
        """The text of a message of reasoning that has not ended."""

    def _answer(self) -> Steps[None]:
        yield
        reader = self._reader
        while (yield from reader.match(_ENDED)) is None:
            header = yield from reader.match(HARMONY_HEADER)
            if header is not None:
                yield from self._message(header)
            elif (yield from reader.take(_NO_MESSAGE)) is None:
                self._put(Text, reader.text[reader.pos])
                reader.pos += 1
                yield from self._body(Text)
            reader.drop(reader.pos)
        if reader.text[0] == END and self._thought and not self._has_calls and not self._has_said:
            self._say(self._thought)
        self._end()

    def _message(self, header: Any) -> Steps[None]:
        reader, channel = self._reader, _CHANNEL.search(header[0])
        recipients, kind = _RECIPIENT.findall(header[0]), _CONSTRAIN.search(header[0])
        tools = [one for one in recipients if one not in _NOBODY]
        name = tools[-1] if tools else str(kind[1]) if kind is not None else ""
        if not name or (not tools and self._declared(name) is None):
            reader.drop(header.end())
            yield from self._body(Reasoning if channel is not None and channel[1] == "analysis" else Text)
            return
        reader.begin()
        try:
            reader.pos = header.end() - header.start()
            schema = self._begin_call(name, None)
            yield from self._literal(self._own, schema)
            yield from reader.need(_CALLED)
            self._end_call()
        except (Refused, ValueError, RecursionError):
            self._fail()
            yield from self._body(Text, has_mark=True)

    def _body(self, kind: type[Text | Reasoning], *, has_mark: bool = False) -> Steps[None]:
        """Gives out a message's body, perhaps with its end marker."""
        reader, self._thought = self._reader, ""
        while True:
            frame = _FRAME.search(reader.text, reader.pos, partial=not reader.is_over)
            stop = len(reader.text) if frame is None else frame.start()
            self._put(kind, reader.text[reader.pos : stop])
            reader.drop(stop)
            if frame is not None and not frame.partial:
                break
            yield
        if frame[0] not in ("<|start|>", "<|channel|>", *OVER):
            self._put(Text, frame[0] if has_mark else "")
            self._thought, reader.pos = "", len(frame[0])

    def _put(self, kind: type[Text | Reasoning], text: str) -> None:
        if kind is Text:
            self._has_said = self._has_said or bool(text.strip())
            self._say(text)
        elif text:
            self._thought += text
            self._reader.pieces.append(Reasoning(text))


class CallWatch:
    """Tells when an answer's first call ends."""

    def __init__(self, call_format: CallFormat, tools: DeclaredTools) -> None:
        """For a format whose calls have an end marker."""
        self.is_complete = False
        self._format, self._tools, self._text = call_format, tools, ""
        self._search = MarkerSearch([call_format.call_end])

    def accept(self, text: str) -> None:
        """Takes the answer's next text. A marker within a value ends no call, so the call is read."""
        while text and not self.is_complete:
            before, marker, text = self._search.push(text)
            self._text += before + (marker or "")
            if marker is not None:
                reader, close = CallReader(self._format, self._tools), self._format.close
                text_of_call = self._text if marker == close else self._text + close
                pieces = [*reader.feed(text_of_call), *reader.finish(is_complete=False)]
                self.is_complete = bool(pieces) and isinstance(pieces[-1], ToolCallEnded)


def new_call_id() -> str:
    """An id of our own."""
    return f"call_{uuid.uuid4().hex[:24]}"


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return tool.get("function") or tool


@lru_cache
def _others(call_format: CallFormat, *, is_opened: bool) -> tuple[Patterns, ...]:
    """Forms of other families that may stand in a format's place: between its markers, or without any."""
    forms = [one for one in FORMATS if one is not HARMONY and (is_opened or one.is_bare)]

    def within(one: CallFormat) -> Patterns:
        outer, close, aliases = call_format.open, call_format.close, call_format.aliases
        return patterns_of(
            replace(one, open=outer, close=close, aliases=aliases, repeats_open=call_format.repeats_open)
        )

    patterns = {patterns_of(call_format).head.pattern: patterns_of(call_format)}
    for one in (HERMES, CODER, GLM, *(VARIANTS if is_opened else ()), *forms):
        if one in forms or one in VARIANTS:
            patterns.setdefault(within(one).head.pattern, within(one))
    return tuple(patterns.values())[1:]


_ARGUMENTS: Final = ("arguments", "parameters")
_BARE_START: Final = re.compile(r"\s*(?:```\w*\s*)?[{\[]")
_BRACE: Final = re.compile(r"\s*\{")
_CLOSED: Final = re.compile(r"\s*,?\s*\}")
_FENCE: Final = re.compile(r"\s*```\w*\s*(?=\{)")
_QUOTE: Final = re.compile(r'\s*"')
_WRAPPED: Final = re.compile(
    rf'\s*\{{\s*"name"\s*:\s*"(?P<name>[^"\\{OVER}]{{1,256}})"\s*,\s*"(?P<key>arguments|parameters)"\s*:'
)
_FENCE_LINE: Final = re.compile(r"\s*```[^`]*")
_FENCES: Final = re.compile(r"\s*(?:```\w*\s+)*(?:`{1,3}\w*)?")
_NULL: Final = re.compile(r"\s*null(?=\s*[,}])")
_FIELD: Final = re.compile(r"""\s*,?\s*(?P<quote>["'])(?P<key>\w+)(?P=quote)\s*:""")
_STRING: Final = re.compile(rf"""\s*(?:"(?:[^"\\{OVER}]|\\[^{OVER}])*"|'(?P<word>[\w.:-]+)')""")
_SCALAR: Final = re.compile(rf'\s*(?:"(?:[^"\\{OVER}]|\\[^{OVER}])*"|[\w.-]+(?=\s*[,}}]))')
_NUMBER: Final = re.compile(r":\d+$")
_UNDERLINED: Final = re.compile(r"functions[._](.+?)(?:[:_]\d+)?")
_ENDED: Final = re.compile(f"[{OVER}]")
_FRAME: Final = re.compile(rf"<\|(?:end|call|return|start|channel)\|>|[{OVER}]")
_NO_MESSAGE: Final = re.compile(rf"\s*<\|start\|>(?:assistant)?\s*(?=[{OVER}])")
_CHANNEL: Final = re.compile(r"<\|channel\|>\W*(\w+)")
_RECIPIENT: Final = re.compile(r"\bto=([^\s<]+)")
_CONSTRAIN: Final = re.compile(r"<\|constrain\|>\s*([\w.-]+)")
_NOBODY: Final = ("assistant", "user", "all")
_CALLED: Final = re.compile(rf"\s*[}}\]]?\s*(?:```)?\s*(?:<\|(?:call|end|return)\|>|(?=<\|start\|>|{END}))")
_USUAL: Final = re.compile(r"(?:functions\.)?[\w-]+(?::\d+)?")
