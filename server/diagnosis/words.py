"""Where two texts differ, and what kind of change it is. Pure.

The changed words tell the kind: `09:16` that becomes `09:17` is a clock in any place.
"""

import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from difflib import SequenceMatcher
from html import unescape
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple
from unicodedata import category, normalize

from models.texts import shared_length
from server.diagnosis.causes import Cause

WINDOW_CHARACTERS = 120
"""Characters considered on either side of a change."""
CLOCK_CHARACTERS = 40
"""The longest date and time."""
AROUND_WORDS = 8
"""Words shown on either side of a change."""
MAX_WORD_CHARACTERS = 80
"""Longer words are shown in part."""
MAX_WORDS = 2000
"""With more words between first and last change, only the first change is searched."""
MAX_PLACES = 200
"""More changes of one text are not told apart."""
MAX_QUOTED_CHARACTERS = 1 << 14
"""How far before a change the beginning of a quoted file is searched."""
MAX_ADDED_WORDS = 6
"""Adding or removing more words is an edit, whatever the words say."""
MAX_CHARACTERS = 1 << 18
"""Longer texts are compared only around their first change."""

_CALENDAR: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("calendar.toml").read_text(encoding="utf-8")
)


def _named(*kinds: str) -> str:
    return "|".join(word for kind in kinds for words in _CALENDAR[kind].values() for word in words.split())


_MONTH = rf"(?:{_named('months')})(?!\w)\.?"
_WEEKDAY = (
    rf"(?<!\w)(?:{_named('weekdays')})(?!\w)"
    "|(?:星期|[周週]|[礼禮]拜)[一二三四五六日天]|[月火水木金土日]曜日?|[월화수목금토일]요일"
)
_STAMP = rf"""
    (?=\d)(?:
      \d{{1,4}}-\d{{1,2}}-\d{{1,2}}(?:[t\ ]\d{{1,2}}:\d{{2}}(?::\d{{2}}(?:[.,]\d+)?)?)?(?:z|[+-]\d\d:?\d\d)?(?![\w-])
      | (?<![0-9a-z_:])(?<!\d\.)\d{{1,2}}:\d{{2}}(?::\d{{2}}(?:[.,]\d+)?)?(?!\d)(?:\s?[ap]\.?m\b)?
      | (?<!\d)\d{{1,2}}\s?[ap]\.?m\b | (?<![\w=])\d{{8}}t\d{{4,6}}z?\b
      | (?<![\d./])(?:\d{{1,2}}[./]\d{{1,2}}[./](?:\d{{4}}|\d{{2}})|\d{{4}}[./]\d{{1,2}}[./]\d{{1,2}})(?!\d|[./]\d)
      | (?<![\w./$€£])(?:0?[1-9]|[12]\d|3[01])\.(?:0[1-9]|1[0-2])\.(?!\d)
      | \b\d{{1,2}}(?:st|nd|rd|th|er|º|ª)?\.?\s*(?:d[ei]\s)?{_MONTH}(?:(?:,?\s+|\sde\s)\d{{4}})?
      | (?<!\d)\d{{1,2}}\s?h\s?\d{{2}}(?!\w) | (?<!\d)\d{{1,2}}(?:[.:]\d{{2}})?\s?uhr(?:\s\d{{1,2}})?\b
      | \d{{1,4}}\s?[年년](?:\s?\d{{1,2}}\s?[月월](?:\s?\d{{1,2}}\s?[日号號일])?)?
      | \d{{1,2}}\s?[月월]\s?\d{{1,2}}\s?[日号號일]
      | \d{{1,2}}\s?[時时点點시](?:\s?(?:\d{{1,2}}\s?[分분]|半))?
      | \d+\s?(?:小[时時]|分[钟鐘]?|秒|天|時間|日|시간|분|초|일)
      | (?<!\w)\d+(?:[.,]\d+)?\s*(?:{_named("units")})(?!\w)
      | (?<![\w.])(?:(?:\d+\s?[dhm]\s?)+\d+\s?(?:[hms]|min|sec)(?!\w)|\d+(?:\.\d+)?(?:ms|[dhms])(?![\w/²³°]))
      | (?<![\w.-])1[5-9]\d{{8}}(?:\d{{3}}|\.\d+)?(?![\w-]))
    | (?<!\w)(?:{_MONTH}\s+\d{{1,2}}(?:st|nd|rd|th)?(?:,?\s+\d{{4}})?\b
      | (?:kl\.?|klo|ore|alle|om|um|godz\.?|saat|jam|в)\s\d{{1,2}}\.\d{{2}}(?!\d))
    | (?:[上下]午|凌晨|早上|中午|晚上|午[前後]|오[전후])\s?\d{{1,2}}(?:\s?[時时点點시:](?:\s?\d{{1,2}}\s?[分분]?)?)?
"""
_CLOCK = re.compile(f"{_STAMP}|{_WEEKDAY}", re.VERBOSE | re.IGNORECASE)
_CLOCK_WORD = re.compile(
    rf"{_STAMP}|{_WEEKDAY}|(?<!\w)(?:{_named('months', 'times_of_day', 'short')})(?!\w)(?:[.,]*\s\d{{1,2}}(?![\w:]))?"
    r"|[上下]午|[凌清]晨|[早晚]上|中午|午[前後]|[朝昼夜]|오[전후]|아침|점심|저녁|밤|[(（][月火水木金土日월화수목금토일][)）]",
    re.VERBOSE | re.IGNORECASE,
)
"""With words that may mean something else; they count where both texts have one."""
_ADDRESS = re.compile(
    r"""
      \b[a-z][a-z0-9+.-]*://[^\s/?\#"'`<>),;]+
    | (?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,5})?(?!\.?\d) | \[[0-9a-f:]{2,}\](?::\d{1,5})?
    | (?<![\w.])localhost:\d{1,5} | \b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b | (?<![a-z])ports?["']?\s?[=:\s]\s?\d{2,5}\b
    """,
    re.VERBOSE | re.IGNORECASE,
)
_NUMBER = re.compile(r"[-+]?\d+(?:[,._]\d+)*(?:\s?%)?(?![A-Za-z\d])")
_FIGURE = re.compile(r"\d\s?%|^\s*[\[(<{][^\])>}]*\d[^\[(<{]*[\])>}]\s*$|\w:\s*[$€£]?\d")
"""A percentage, a note in brackets that holds a number, or a number after its name."""
_WORD = re.compile(r"[A-Za-z0-9_+/~-]+")
_WORD_THERE = re.compile(r".?\s*\S*", re.DOTALL)
_QUOTES = str.maketrans("“”„‟«»‘’‚‛–—‐‑", '"' * 6 + "'" * 4 + "-" * 4)
"""Quotes and hyphens that mean the same."""
_UNSEEN = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
"""Variation selectors, fillers and joiners; with control and format characters, what nobody sees."""
_ID_PREFIX = re.compile(
    r"(?:\b|_)(?:id|uuid|guid|nonce|hash|sha\d*|token|commit|cch|etag|trace|request|session|bearer|cookie|csrf|salt)[\"']?\s*[:=#]\s*[\"'(]?$",
    re.IGNORECASE,
)
_ID = re.compile(
    r"0x[0-9a-fA-F]{4,}|eyJ[\w-]{8,}(?:\.[\w-]+)*|(?:(?<=/tmp/)|(?<=/T/)|(?<![A-Za-z0-9])tmp[._-]?)[\w.-]{4,}"
    r"|(?<![A-Za-z0-9])g?[0-9a-f]{7,40}(?![A-Za-z0-9])"
)
"""A number in memory, a JSON web token, a temporary path, a hash of git."""
_HEADING = re.compile(r"^[ \t]*(?:[#<].*|.*\w.*:)[ \t]*$", re.MULTILINE)
_OF_EXAMPLES = re.compile(r"examples?\b|shots?\b|demonstration", re.IGNORECASE)
_EXAMPLE = re.compile(r"\W*(?:q|a|question|answer|input|output|user|assistant|example)\W*\d*\W*[:>]", re.IGNORECASE)
_TAG = re.compile(r"<(\w*(?:file|document|code|source|attachment)\w*)\b[^<>]*>(?!.*</\1>)", re.IGNORECASE | re.DOTALL)
_CODE = re.compile(
    r"\s*(?:[\w.\[\]]+\s[-+*/]?=\s|(?:return|def|const|let|var|for|while|if|func|fn|public|private|static)\b.*\d"
    r"|(?:    |\t).*[(){};=])"
)


class WordChange(NamedTuple):
    """The words around a place where two texts differ."""

    cause: Cause
    before: str
    after: str
    is_removed: bool = False
    """The later text only lacks something."""


def find_changes(before: str, after: str) -> list[WordChange]:
    """Where a text changed, in order, one place per cause."""
    if before == after:
        return []
    whole = _cause_of_whole(before, after) or (Cause.EXAMPLES if _are_examples(before, after) else None)
    if whole is not None:
        return [change_at(before, after, whole)]
    changes: dict[Cause, WordChange] = {}
    for excerpt_before, excerpt_after in islice(_places(before, after), MAX_PLACES):
        change = change_at(excerpt_before, excerpt_after, classify_text(excerpt_before, excerpt_after))
        is_removed = sum(shared_ends(excerpt_before, excerpt_after)) == len(excerpt_after)
        changes.setdefault(change.cause, change._replace(is_removed=is_removed))
    return list(changes.values())


def shared_ends(text: Sequence[str], other: Sequence[str]) -> tuple[int, int]:
    """Lengths of equal beginnings and ends."""
    head = shared_length(text, other)
    return head, shared_length(text[head:][::-1], other[head:][::-1])


def classify_text(before: str, after: str) -> Cause:
    """The kind of the first change."""
    start, tail = shared_ends(before, after)
    for cause, words_at in _KINDS:
        word, other_word = words_at(before, start), words_at(after, start)
        if not word or not other_word or word == other_word:
            continue
        if cause is not Cause.NONCE or not (word + other_word).isdigit() or max(len(word), len(other_word)) >= 12:
            return cause
    return _cause_of_addition(before, after, start, tail)


def _cause_of_addition(before: str, after: str, start: int, tail: int) -> Cause:
    inner, other = before[start : len(before) - tail], after[start : len(after) - tail]
    added = inner or other
    if (inner and other) or len(added.split()) > MAX_ADDED_WORDS:
        return Cause.EDITED
    if any(_looks_random(word) for word in _WORD.findall(added)):
        return Cause.NONCE
    if _CLOCK.search(added):
        return Cause.CLOCK
    return Cause.COUNTER if _FIGURE.search(added) else Cause.EDITED


def _cause_of_whole(before: str, after: str) -> Cause | None:
    if max(len(before), len(after)) > MAX_CHARACTERS:
        return None
    if "".join(before.split()) == "".join(after.split()):
        return Cause.REFORMATTED
    if _decoded(before) == _decoded(after):
        return Cause.ENCODED
    return Cause.REORDERED if _is_same_words(before, after) else None


def _decoded(text: str) -> str:
    return "".join(_seen(normalize("NFKC", unescape(text))).translate(_QUOTES).split())


def _is_unseen(letter: str) -> bool:
    return category(letter) in ("Cc", "Cf") or _UNSEEN.match(letter) is not None


def _seen(text: str) -> str:
    return text if text.isascii() else "".join(c for c in text if c.isspace() or not _is_unseen(c))


def is_in_code(text: str, start: int) -> bool:
    """Whether a place is in a file or code that a message quotes."""
    before, begin = text[max(0, start - MAX_QUOTED_CHARACTERS) : start], text.rfind("\n", 0, start) + 1
    line = text[begin:].partition("\n")[0]
    return text.count("```", 0, start) % 2 == 1 or bool(_TAG.search(before) or _CODE.match(line))


def _are_examples(before: str, after: str) -> bool:
    """Whether some lines differ that a heading calls examples, or that say so themselves."""
    ours, theirs = before.splitlines(), after.splitlines()
    head, tail = shared_ends(ours, theirs)
    inner = ours[head : len(ours) - tail], theirs[head : len(theirs) - tail]
    if min(map(len, inner)) < 2:
        return False
    headings = _HEADING.findall("\n".join(ours[:head]))
    is_named = bool(headings) and _OF_EXAMPLES.search(headings[-1]) is not None
    return is_named or all(_EXAMPLE.match(line) for lines in inner for line in lines if line.strip())


def _words_of(pattern: re.Pattern[str], reach: int = WINDOW_CHARACTERS) -> Callable[[str, int], str | None]:
    """Finds a pattern at a place, of at most `reach` characters."""

    def find(text: str, start: int) -> str | None:
        begin = max(0, start - reach)
        window = text[begin : start + reach]
        touching = [m[0] for m in pattern.finditer(window) if m.start() <= start - begin <= m.end()]
        return touching[-1] if touching else None

    return find


def _random_word(text: str, start: int) -> str | None:
    if known := _words_of(_ID)(text, start):
        return known
    word = _words_of(_WORD)(text, start)
    if word is None:
        return None
    begin = text.rfind(word, 0, start + len(word))
    named = _ID_PREFIX.search(text[max(0, begin - WINDOW_CHARACTERS) : begin])
    return word if _looks_random(word) or (named and len(word) >= 4 and not word.isdigit()) else None


def _looks_random(word: str) -> bool:
    """Whether a word is hexadecimal, a UUID, base64, or has too many digits to count with."""
    core = re.sub(r"^[a-z]{2,12}[_-](?=\w)", "", word)
    parts = [part for part in re.split(r"[-_]+", core) if part]
    letters, digits = sum(map(str.isalpha, core)), sum(map(str.isdigit, core))
    if not letters:
        return len(parts) == 1 and digits >= 12
    if all(re.fullmatch(r"[0-9a-fA-F]{4,}", part) for part in parts):
        return digits > 0 and len(core) >= 5
    runs = [*groupby(core, lambda c: (c.isdigit(), c.isupper()))]
    has_both_cases = core.lower() != core and core.upper() != core
    return len(core) >= 8 and (has_both_cases or len(core) >= 16) and digits > 0 and len(runs) >= 4


_KINDS: tuple[tuple[Cause, Callable[[str, int], str | None]], ...] = (
    (Cause.ADDRESS, _words_of(_ADDRESS)),
    (Cause.CLOCK, _words_of(_CLOCK_WORD, CLOCK_CHARACTERS)),
    (Cause.NONCE, _random_word),
    (Cause.COUNTER, _words_of(_NUMBER)),
)


def _is_same_words(before: str, after: str) -> bool:
    if abs(len(before) - len(after)) > WINDOW_CHARACTERS:
        return False
    ours, theirs = (re.findall(r"\w+", text) for text in (before, after))
    return ours != theirs and sorted(ours) == sorted(theirs)


def _places(before: str, after: str) -> Iterator[tuple[str, str]]:
    """Yields changed stretches of both texts."""
    ours, theirs = (re.findall(r"\S+|\s+", text) for text in (before, after))
    head, tail = shared_ends(ours, theirs)
    inner, other_inner = ours[head : len(ours) - tail], theirs[head : len(theirs) - tail]
    if len(inner) + len(other_inner) > MAX_WORDS:
        yield before, after
        return
    for kind, i1, i2, j1, j2 in SequenceMatcher(None, inner, other_inner, autojunk=False).get_opcodes():
        if kind != "equal":
            lead = "".join(ours[max(0, head + i1 - AROUND_WORDS) : head + i1])
            old = "".join(ours[head + i1 : head + i2 + AROUND_WORDS])
            new = "".join(theirs[head + j1 : head + j2 + AROUND_WORDS])
            yield lead + old, lead + new


def change_at(before: str, after: str, cause: Cause) -> WordChange:
    """The place of the first difference."""
    start = shared_length(before, after)
    return WordChange(cause, excerpt(before, start), excerpt(after, start))


def excerpt(text: str, offset: int) -> str:
    """Whole words, about `WINDOW_CHARACTERS` on either side."""
    begin, end = max(0, offset - WINDOW_CHARACTERS), min(len(text), offset + WINDOW_CHARACTERS)
    # The offset may be within a word that is longer than the window's rest.
    while begin > 0 and not text[begin - 1].isspace() and offset - begin < WINDOW_CHARACTERS + MAX_WORD_CHARACTERS:
        begin -= 1
    while end < len(text) and not text[end].isspace() and end - offset < WINDOW_CHARACTERS + MAX_WORD_CHARACTERS:
        end += 1
    return text[begin:end]


def told_apart(before: str, after: str) -> tuple[str, str]:
    """Texts in which a reader sees the difference: `\\ufeff`, `\\u0301`, `␣` for a blank that counts."""
    shown, other = _visible(before), _visible(after)
    if not before or not after or before == after or _looks(shown) != _looks(other):
        return shown, other
    start, only_unseen = shared_length(before, after), _seen(before) == _seen(after)
    return _spelled(before, start, only_unseen=only_unseen), _spelled(after, start, only_unseen=only_unseen)


def _visible(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def _looks(text: str) -> str:
    return normalize("NFKC", " ".join(_seen(text).split()))


def _spelled(text: str, start: int, *, only_unseen: bool) -> str:
    """Shows blanks and look-alike letters of the word at `start`, or what nobody sees there."""
    begin = max(0, start - 1)
    stop = begin + len(_WORD_THERE.match(text, begin)[0])  # type: ignore[index]
    spelled = (ascii(c)[1:-1] if _is_unseen(c) or not (c.isascii() or only_unseen) else c for c in text[begin:stop])
    shown = "".join(spelled).replace(" ", " " if only_unseen else "␣")
    return _visible(text[:begin]) + shown + _visible(text[stop:])
