"""What a format's description means to its reader: patterns of the markers around calls, names and arguments. Pure.

A pattern ends at a marker or looks ahead to one, and none of its alternatives begins another: as long as more text
could change a match, the match is partial, so that matches do not depend on how a text is cut. White space may stand
wherever a description has some.
"""

from functools import cached_property, lru_cache
from typing import Any, Final

import regex as re

from models.output.call_formats import CallFormat, Literal

END, CUT = "\udfff", "\udffe"
"""Stand after an answer that ended by itself, or was cut off: no decoded text holds halves of characters."""
OVER: Final = f"{END}{CUT}"
_NEVER: Final = "(?!)"
_KEY: Final = rf"[^<>\n\"{OVER}]{{1,256}}?"
_NAME: Final = rf"[^<>\n\"{{}}()\[\]{OVER}]{{1,256}}?"
_WORD: Final = r"[\w.:/-]{1,256}"
_FENCE: Final = r"(?:```\w*\s*)?"
_SLACK: Final = r"\s*(?P<extra>[}\]])?\s*(?:```)?\s*[,;]?\s*"
"""One brace too many, a fence, a separator."""
_LINE: Final = r"(?:\r?\n)?"
_VALUE: Final = r"""(?:["'\[{(]|-?\d|[tT]rue|[fF]alse|null|None)"""


HARMONY_HEADER: Final = re.compile(rf"\s*(?:<\|start\|>|<\|channel\|>|to=)[^{OVER}]{{0,512}}?<\|message\|>")


def loosely(text: str) -> str:
    """A pattern of `text`, with any white space where it has some."""
    return r"\s*".join(re.escape(part) for part in re.split(r"\s+", text))


def _end_tag(text: str) -> str:
    """A pattern of what ends; models repeat names and attributes in end tags."""
    pattern = loosely(text)
    return f"{pattern[:-1]}(?:[= ][^<>\n]{{1,256}})?>" if text[:2] == "</" else pattern


def either(*patterns: str) -> str:
    """A pattern of one of these; empty ones do not count."""
    return "(?:" + ("|".join(one for one in patterns if one) or _NEVER) + ")"


class Ends:
    """Where a text without escapes ends: at its tag, if the format's next element follows."""

    inner: tuple[str, str] | None = None
    """A tag within the text, and what it stands for there."""

    def __init__(
        self,
        form: "Patterns",
        tag: str,
        more: str,
        closers: str = "",
        letters: str = "",
        *,
        missing: str = "",
        skipped: str = "",
        start: str = "",
        beside: str = "",
    ) -> None:
        """`more` goes on with arguments; `closers` stand before the call's end, and `beside` begins a call after it.

        The tag may be left out before one of `letters`, before the call's end `missing`, and before an argument
        `skipped`, which begins with `start`.
        """
        ends, close, another = rf"{closers}\s*(?:{form.ends}\s*){{0,2}}", form.close, form.another
        call_end = rf"{ends}{close}" if form.closes else rf"{closers}\s*{form.ends}"
        if not form.is_opened:
            call_end = rf"{closers}\s*(?:(?:{form.ends}\s*){{1,2}}(?:{close})?|{close})"
        over = rf"{ends}(?:{close}\s*)?(?:[{OVER}]|(?P<another>{either(another, beside)}))"
        repaired = rf"|(?P<repair>(?:\r\n|\s)?(?={missing}\s*(?:{END}|{another})))" if missing else ""
        repaired += rf"|(?P<skipped>(?={skipped}))" if skipped else ""
        before = (form.ends, form.close, start) if missing else (f"[{letters}]",) if letters else ()
        self.value = re.compile(rf"{tag}(?:(?={more})|(?P<last>(?={call_end}|{over}))){repaired}")
        bare = tag.removeprefix(_LINE)
        self.doubled = re.compile(rf"{tag}{_LINE}{bare}(?={more}|{call_end}|{over})" if missing else _NEVER)
        """The end tag twice. Models write that; a text that ends with such a tag looks the same."""
        nested = _NEVER if tag.startswith(r"\]") else form.nested  # a call within CDATA has other end tags
        self.mark = re.compile(rf"(?P<nested>{nested})|[{OVER}]|{either(bare, *before)}")
        self.letters = frozenset(f"<]{OVER}{letters}")
        """One of these begins each mark."""
        self.call_end = re.compile(rf"{tag}{call_end}")
        self.sure = re.compile(rf"{tag}{over}")
        self.later = re.compile(rf"(?P<again>{tag}(?:{call_end}|{over}))|[{OVER}]|{another}")


class Patterns:
    """The patterns of one format."""

    def __init__(self, form: CallFormat, *, is_opened: bool = True) -> None:
        """`is_opened`: the calls' opener was there; without it calls may go without their closer."""
        self.form, body, self.is_opened = form, form.body, is_opened or form.is_bare
        self.body: Any = body
        opens, self.closes = _spellings(form, form.open), _spellings(form, form.close)
        if form.is_bare and isinstance(body, Literal) and body.has_bare_keys:
            self.closes.append(rf"\](?=\s*[^\s<{OVER}])")
        self.close, self.open = either(*self.closes), re.compile(either(*opens))
        self.ends = either("" if form.is_envelope else re.sub("^```", "(?:```)?", _end_tag(form.end.strip())))
        tag, head = re.escape(form.tag.removesuffix("functions.")), self._head
        is_literal = isinstance(form.body, Literal)
        is_listed = form.open[-1:] == "[" or (isinstance(body, Literal) and body.assign == "=")
        self.head = re.compile(rf"\s*\[?\s*{head}" if is_listed else rf"\s*{head}")
        self.is_tagged = tag[:1] == "<"
        self.starts = [*opens, *([tag] if self.is_tagged else [])]
        after, first = ("", "") if is_literal else (self._after_head, self._first_key)
        begun = either(*(rf"{one}\s*{head}" for one in opens), head if self.is_tagged else "")
        self.another, self.nested = begun + after, begun + first
        """Begins another call after one; begins one within a text, which has end tags of its own."""
        nexts = either(END, *opens, tag or (head if is_literal else ""))
        slack, close = (_SLACK if is_literal else r"\s*"), self.close if is_literal or self.closes else self.ends
        ended = rf"(?:{self.ends}{slack}){{0,2}}" if is_literal or self.closes else ""
        alone = _NEVER if self.is_opened else rf"(?:{slack}{self.ends}){{1,2}}(?=\s*[^\s<{OVER}])"
        self.tail = re.compile(rf"{slack}{ended}(?:(?P<close>{close})|(?={nexts}))|{alone}")
        self.without = re.compile(rf"\s*(?={either(END, *self.closes, self.ends)})")

    @cached_property
    def unopened(self) -> "Patterns":
        """The patterns of calls whose opener was left out."""
        return Patterns(self.form, is_opened=False)

    @cached_property
    def _head(self) -> str:
        """A pattern of a call up to its arguments, with the group `name`."""
        form, (before, _, after) = self.form, self.form.head.partition("{}")
        if form.is_envelope:
            return rf"{_FENCE}\[?\s*(?=\{{)"
        before, after = loosely(before.strip().removesuffix("functions.")), after.strip().removeprefix(":#")
        if isinstance(form.body, Literal):
            name = rf"(?P<name>{_WORD if form.body.has_bare_keys else _NAME})\s*"
            call_id = rf"(?:{re.escape(form.id_marker)}\s*(?P<id>\w+)\s*)?" if form.id_marker else ""
            return rf"{before}\s*{name}{call_id}{either(loosely(after), rf'(?={re.escape(form.body.open)})')}"
        name = rf"{before}(?P<name>{_NAME}){_attributes(loosely(after))}"
        return name if form.tag else name + self._after_head  # what follows a bare name tells that it is one

    @property
    def _first_key(self) -> str:
        return rf"\s*(?={either(*map(re.escape, (self.body.key.partition('{}')[0], self.body.whole[0])))})"

    @property
    def _after_head(self) -> str:
        return either(self._first_key, rf"\s*(?={either(self.ends, self.close, END)})")

    @cached_property
    def _key(self) -> str:
        before, _, after = self.body.key.partition("{}")
        end, line, opener = after.partition("\n<")
        if not line:
            return rf"\s*{loosely(before)}(?P<key>{_KEY}){_attributes(loosely(after.strip()))}"
        tags = rf"\s*(?:{re.escape(before)}\s*){{1,2}}(?P<key>{_KEY})(?:{re.escape(end)}\s*){{1,2}}"
        return rf"{tags}(?:(?P<opened>{re.escape(line.strip() + opener)})|(?=[^<\s]))"

    @cached_property
    def key(self) -> Any:
        return re.compile(
            self._key + (r"(?:(?P<crlf>\r\n)|\n|(?=[^\r\n]|\r[^\n]))" if self.body.key.endswith("\n") else "")
        )

    @cached_property
    def _value_tag(self) -> str:
        line = _LINE if self.body.end.startswith("\n") else ""
        return f"{line}{_end_tag(self.body.end.strip())}"

    @cached_property
    def value_ends(self) -> Ends:
        """The ends of an argument between tags."""
        missing = either(rf"(?:{self.ends}\s*)?{self.close}", self.ends)
        is_certain = self.body.key.strip().count("<") > 1
        skipped = self._key if is_certain else rf"\n{self._key}" if "\n" in self.body.end else ""
        start = re.escape(self.body.key.partition("{}")[0]) if skipped else ""
        return Ends(self, self._value_tag, self._key, missing=missing, skipped=skipped, start=start)

    @cached_property
    def quoted_ends(self) -> Ends:
        """The ends of an argument between tags and quotes."""
        tag = rf"{re.escape(self.body.quote[1])}\s*{self._value_tag}"
        return Ends(self, tag, self._key)

    @cached_property
    def quote(self) -> Any:
        return re.compile(rf"\s*{re.escape(self.body.quote[0])}" if self.body.quote[0] else _NEVER)

    @cached_property
    def whole(self) -> tuple[Any, Any]:
        """Around all arguments as one object."""
        return tuple(re.compile(rf"\s*{loosely(one)}" if one else _NEVER) for one in self.body.whole)

    @lru_cache(256)  # noqa: B019 - formats, and so patterns, are few and live as long as the process
    def raw_ends(self, closers: tuple[str, ...], keys: tuple[str, ...], opener: str) -> Ends:
        """Ends of a text in a literal after the quote `opener`.

        The text stands within open brackets. `closers` close these, the innermost first; `keys` are the outermost's.
        """
        quote = re.escape(self.body.quote)
        mark = rf"(?:{quote}|[\"'])?"
        more, before = list[str](), ""
        for closer in closers[:-1]:
            inner = (
                rf"(?:{quote}|{_VALUE if opener else '[^{OVER}]'})"
                if closer in "])"
                else rf"{mark}[\w$][\w.$-]*{mark}\s*[:=]"
            )
            more.append(rf"{before}\s*,\s*{inner}")
            before += rf"\s*{re.escape(closer)}"
        named = either(*(rf"(?P<key>{re.escape(key)})" for key in keys))
        more.append(rf"{before}(?:\s*{named}|\s*,\s*{mark}(?P<key>[\w$][\w.$-]*){mark})\s*[:=]")
        tag, letters = (re.escape(opener), "'" if opener == "'" else "") if opener else (rf"(?:{quote})?", r",\]})")
        closing = rf"{before}(?:\s*{re.escape(closers[-1])})?\s*[}}\]]?"
        beside = rf"[,;]?\s*{self._head}" if self.form.tag else ""
        ends = Ends(self, tag, either(*more), closing, letters, beside=beside)
        ends.inner = (self.body.quote, self.body.inner_quote) if opener != "'" and self.body.inner_quote else None
        return ends


def _spellings(form: CallFormat, marker: str) -> list[str]:
    """Patterns of a marker; a bracket within it may be left out, and one after it is of the head."""
    texts = [marker.strip(), *(alias for alias, text in form.aliases if text == marker)] if marker else []
    patterns = (loosely(text.removesuffix("[") if text[:1] != "[" else text) for text in texts)
    return [re.sub(r"^\\\](?=.)", r"\\]?\\s*", one) for one in patterns]


def _attributes(pattern: str) -> str:
    """Attributes with `#` or `*` may be left out; the group `kind` is the last one's value."""
    return str(re.sub(r'\\s\*\w+="\\[#*]"', r'(?:\\s+\\w+="(?P<kind>[^"<>]*)")*', pattern))


@lru_cache
def patterns_of(form: CallFormat) -> Patterns:
    """Compiled once for each format."""
    return Patterns(form)
