"""The Lark grammar of calls, from a format's description and the declared tools. Pure.

A call holds each required argument once and each other argument at most once, in any order. The JSON of strict tools
keeps the schema's order, as OpenAI has it. Values follow their schemas. A text between tags, or in quotes without
escapes, is any text, and ends where the reader of calls ends it. White space is the template's; after a text, other
white space would belong to the text.

Masks are cheap where a token's text is looked up in few lexemes: no lexeme here is lazy, and a text is cut before
each `<`. `llguidance` counts arguments in bits (`a::0x0`, `set_bit`), of which there are 64.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from models.output.call_formats import CallFormat, Literal, Tags
from models.output.call_values import properties_of, types_of
from models.output.grammar import JSON_STYLE

MAX_ARGUMENTS: Final = 64
ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object", "additionalProperties": True}
_PLAIN: Final = frozenset({"type", "properties", "required", "additionalProperties", "description", "title"})
_IGNORED: Final = frozenset({"$schema", "$id", "$defs", "definitions", "x-guidance"})


@dataclass(frozen=True)
class BoundTool:
    """A function that may be called, and the checked schema of its arguments."""

    name: str
    schema: Mapping[str, Any]
    is_strict: bool = False
    """Keywords of the schema that nothing can bind are errors."""

    @property
    def members(self) -> Mapping[str, Any] | None:
        """The schemas of all arguments that may be; None where the schema is of another form."""
        schema, properties = self.schema, properties_of(self.schema)
        is_open = bool(schema.get("additionalProperties", not properties))
        if not schema.keys() <= _PLAIN | _IGNORED or is_open or len(properties) > MAX_ARGUMENTS:
            return None
        return properties

    def required(self) -> list[str]:
        """The required ones of `members`, in order."""
        required = self.schema.get("required") or ()
        return [name for name in self.members or () if name in required]

    def json(self, schema: Any) -> str:
        """A value of this schema, or of one within it, as JSON."""
        whole = schema if isinstance(schema, Mapping) else {}
        if whole is not self.schema and "$ref" in json.dumps(whole):
            whole = {**{name: self.schema[name] for name in ("$defs", "definitions") if name in self.schema}, **whole}
        return "%json " + json.dumps({**whole, "x-guidance": {**JSON_STYLE, "lenient": not self.is_strict}})


class CallGrammar:
    """The grammars of one format's calls to some tools."""

    def __init__(self, form: CallFormat, tools: Sequence[BoundTool], spell: Callable[[str], str]) -> None:
        """`spell` returns a text as Lark has it: special tokens by number, all else in quotes; "" for no text."""
        self._form, self._tools, self._spell = form, tools, spell
        self._before, _, self._after = form.head.partition("{}")
        self._end = form.end + (form.close if form.repeats_open else "")
        self._rules = [*self._write_rules()]

    def forced(self, *, is_single: bool) -> list[str]:
        """The rule `calls` of one call, or of one and more, and those that it needs."""
        form = self._form
        again = form.gap + (form.open if form.repeats_open else "") + self._before
        more = "" if is_single else f"({self._spell(again)} function)*" if again else "function*"
        outer = "" if form.repeats_open else self._spellings(form.close)
        return [f"calls: {self._spellings(form.open, self._before)} function {more} {outer}", *self._rules]

    def lazy(self) -> list[str]:
        """The rule `start` of what stands after the opener, up to the call's end, and those that it needs."""
        form = self._form
        head = form.open[len(form.open.rstrip()) :] + (self._before if form.open else "")
        again = form.gap + self._before
        outer = "" if form.repeats_open else f"({self._spell(again)} function)* {self._spellings(form.close)}"
        return [f"start: {self._spell(head)} function {outer}", *self._rules]

    def _spellings(self, marker: str, after: str = "") -> str:
        """A marker in any spelling, and the text `after`; without special tokens where calls come bare."""
        if self._form.is_bare:
            return self._spell(re.sub(r"<\|.*?\|>", "", marker) + after)
        after = marker[len(marker.rstrip()) :] + after
        texts = [marker.rstrip(), *(alias for alias, text in self._form.aliases if text == marker)]
        return f"({' | '.join(self._spell(text + after) for text in texts)})"

    def opener(self) -> tuple[str, str]:
        """The text that opens calls, without white space at its end, and the letter that begins a call."""
        opener = self._form.open.rstrip() or self._before
        return opener, self._before[:1] if self._form.open else ""

    def _write_rules(self) -> Iterator[str]:
        yield f"function: {' | '.join(f'f{number}' for number in range(len(self._tools)))}"
        yield "NUMBER: /[0-9]+/\nTEXT: /(?s:.*)/\nCOMMA: /, ?/\nCOLON: /: ?/"
        body = self._form.body
        if isinstance(body, Tags):
            yield from self._texts(body)
        elif body.has_bare_keys:
            yield from self._literals(body)
        for number, tool in enumerate(self._tools):
            name = json.dumps(tool.name, ensure_ascii=False)[1:-1] if self._form.is_envelope else tool.name
            first, *others = self._after.split("#")
            begin = " NUMBER ".join(map(self._spell, (name + first, *others)))
            if isinstance(body, Tags):
                yield from self._tagged(body, number, tool, begin)
            else:
                yield from self._object(body, number, tool, begin)

    # -- arguments

    def _members(
        self, number: int, tool: BoundTool, begin: str, values: Mapping[str, str], between: str, end: str
    ) -> Iterator[str]:
        """Rules of arguments: each of `values` once, with `between` between two, and `end` after the last."""
        required, optional = tool.required(), [name for name in values if name not in tool.required()]
        done = f"%if is_ones([0:{len(required)}])" if required else ""
        empty = "" if required else f" | {begin} {end}"
        if not values:
            yield f"f{number}: {begin} {end}"
            return
        yield f"f{number}: {begin} a{number}::0x0{empty}"
        bits = [
            f"{values[name]} m{number}::set_bit({bit}) %if bit_clear({bit})"
            for bit, name in enumerate(required + optional)
        ]
        yield f"a{number}::_ : " + "\n | ".join(bits)
        left = f"%if not(is_ones([0:{len(bits)}]))"
        yield f"m{number}::_ : {between} a{number}::_ {left}\n | {end} {done}"

    def _object(self, body: Literal, number: int, tool: BoundTool, begin: str) -> Iterator[str]:
        """A call whose arguments are one literal."""
        members, closed = tool.members, self._spell(body.close + self._end)
        begin_object = self._spell(body.open)
        if (members is None or tool.is_strict) and not body.has_bare_keys:
            yield f"f{number}: {begin} {tool.json(tool.schema)} {self._spell(self._end)}"
        elif members is None:
            yield f"f{number}: {begin} {begin_object} (named (COMMA named)*)? {closed}"
        else:
            values = dict[str, str]()
            for bit, (name, schema) in enumerate(members.items()):
                key = name if body.has_bare_keys else json.dumps(name, ensure_ascii=False)
                colon = self._spell(body.assign) if body.has_bare_keys else "COLON"
                value = self._literal(body, schema, tool) if body.has_bare_keys else tool.json(schema)
                yield f"v{number}_{bit}: {value}"
                text = self._spell(key) if body.has_bare_keys else json.dumps(key, ensure_ascii=False)
                values[name] = f"{text} {colon} v{number}_{bit}"
            yield from self._members(number, tool, f"{begin} {begin_object}", values, "COMMA", closed)

    # -- arguments between tags

    def _texts(self, body: Tags) -> Iterator[str]:
        """The rule `text` of a text and its end tag."""
        end = body.end.lstrip()
        special = re.match(r'(?:"((?:[^"\\]|\\.)*)" )?(<\[\d+\]>.*)', self._spell(end), re.DOTALL)
        if special is not None:
            begun = json.loads(f'"{special[1] or ""}"')
            yield f"text: {f'/(?s:.*){_pattern(begun)}/' if begun else 'TEXT'} {special[2]}"
            return
        tag, key = _pattern(end.rstrip()), body.key.partition("{}")[0]
        others = "|".join([tag, _pattern(key), _pattern(self._end.strip())])
        # Two lexemes: masks are dear where one may go on after what another excludes.
        line = r"\n" if end.endswith("\n") else ""
        yield "text: BEFORE? (PIECE | other)* close"
        yield "other: close+ OTHER"
        yield f"close: TAG{' | LINE' if line else ''}"
        yield f"TAG: /{tag}/"
        if line:
            yield f"LINE: /{tag}{line}/"
        yield "BEFORE: /[^<]+/"
        yield f"PIECE: /<[^<]*/ & ~/{tag}{line}/"
        yield f"OTHER: /<[^<]*/ & ~/({others})(?s:.*)/"

    def _tagged(self, body: Tags, number: int, tool: BoundTool, begin: str) -> Iterator[str]:
        key, _, after = body.key.partition("{}")
        end, end_tag, members = self._spell(self._end), self._spell(body.end), tool.members
        if members is None:
            kinds = list(dict.fromkeys(kind for _, kind in body.kinds)) or [""]
            named = " | ".join(f'/[^<>="\\n]+/ {self._spell(after.replace("*", kind))} text' for kind in kinds)
            yield f"f{number}: {begin} ({self._spell(key)} ({named}))* {end}"
            return
        for bit, (name, schema) in enumerate(members.items()):
            written = self._written(body, schema, tool)
            ended = ((kind, value if value == "text" else f"{value} {end_tag}") for kind, value in written)
            options = (f"{self._spell(name + after.replace('*', kind))} {value}" for kind, value in ended)
            yield f"v{number}_{bit}: {' | '.join(options)}"
        values = {name: f"{self._spell(key)} v{number}_{bit}" for bit, name in enumerate(members)}
        yield from self._members(number, tool, begin, values, "", end)

    def _written(self, body: Tags, schema: Any, tool: BoundTool) -> Iterator[tuple[str, str]]:
        """How a value may be written: the kind in its tag, and its rule."""
        types, kinds = types_of(schema, tool.schema), dict(body.kinds)
        texts = schema.get("enum") if isinstance(schema, Mapping) else None
        if isinstance(texts, list) and texts and all(isinstance(one, str) and one for one in texts):
            options = " | ".join(json.dumps(one, ensure_ascii=False) for one in texts)
            yield kinds.get("string", ""), f"({options})"
        elif not kinds:
            yield "", "text" if not types or "string" in types else tool.json(schema)
        else:
            yield from self._of_kinds(kinds, types, schema, tool)

    def _of_kinds(
        self, kinds: Mapping[str, str], types: frozenset[str], schema: Any, tool: BoundTool
    ) -> Iterator[tuple[str, str]]:
        by_kind: dict[str, list[str]] = {}
        for one in types or {"string", "number", "boolean", "array", "object", "null"}:
            by_kind.setdefault(kinds.get(one, kinds.get("", "")), []).append(one)
        for kind, alike in by_kind.items():
            if "string" in alike:
                yield kind, "text"
            else:
                yield kind, tool.json(schema if len(by_kind) == 1 and types else {"type": alike})

    # -- literals with bare keys

    def _literals(self, body: Literal) -> Iterator[str]:
        is_python = body.assign == "="
        quote = self._spell(body.quote)
        if is_python:
            yield r"""string: /'([^'\\]|\\(?s:.))*'/ | /"([^"\\]|\\(?s:.))*"/"""
        elif quote.startswith("<["):
            yield f"string: {quote} TEXT {quote}"
        else:
            piece = f"/<[^<]*/ & ~/{_pattern(body.quote)}(?s:.*)/"
            yield f"string: {quote} BEFORE? PIECE* {quote}\nBEFORE: /[^<]+/\nPIECE: {piece}"
        words = '"True" | "False" | "None" | ' if is_python else ""
        yield f'any: string | FLOAT | list | dict | {words}"true" | "false" | "null"'
        yield r"FLOAT: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/" + "\nWHOLE: /-?(0|[1-9][0-9]*)/"
        yield 'list: "[" (any (COMMA any)*)? "]"\ndict: "{" (entry (COMMA entry)*)? "}"'
        yield f"entry: {'string' if is_python else 'NAME'} COLON any"
        yield f"named: NAME {self._spell(body.assign)} any"
        yield r"NAME: /[\w$][\w.$-]*/"

    def _literal(self, body: Literal, schema: Any, tool: BoundTool) -> str:
        is_python, types = body.assign == "=", types_of(schema, tool.schema)
        options = schema.get("enum") if isinstance(schema, Mapping) else None
        if isinstance(options, list) and options and not any(isinstance(one, list | dict) for one in options):
            quoted = [body.quote + one + body.quote if isinstance(one, str) else json.dumps(one) for one in options]
            return " | ".join(map(self._spell, map(repr, options) if is_python else quoted))
        words = ('"True" | "False"', '"None"') if is_python else ('"true" | "false"', '"null"')
        rules = {"string": "string", "integer": "WHOLE", "number": "FLOAT", "array": "list", "object": "dict"}
        rules |= {"boolean": words[0], "null": words[1]}
        return " | ".join(sorted(rules[one] for one in types)) or "any"


def _pattern(text: str) -> str:
    """A pattern of Lark that matches `text`."""
    return re.sub(r"([][.*+?^${}()|/\\])", r"\\\1", text).replace("\n", r"\n").replace('"', r"\x22")
