"""Where two texts differ, and what kind of change it is. Pure.

The changed words tell the kind: `09:16` that becomes `09:17` is a clock in any place.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from difflib import SequenceMatcher
from html import unescape
from itertools import groupby
from typing import NamedTuple
from unicodedata import normalize

from models.texts import shared_length
from server.diagnosis.causes import Cause

WINDOW_CHARACTERS = 120
"""Characters considered on either side of a change."""
AROUND_WORDS = 8
"""Words shown on either side of a change."""
MAX_WORD_CHARACTERS = 80
"""Longer words are shown in part."""
MAX_WORDS = 2000
"""With more words between first and last change, only the first change is searched."""
MAX_ADDED_WORDS = 6
"""Adding or removing more words is an edit, whatever the words say."""
MAX_CHARACTERS = 1 << 18
"""Longer texts are compared only around their first change."""


_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_CLOCK = re.compile(
    rf"""
      \d{{1,4}}-\d{{1,2}}-\d{{1,2}}(?:[t ]\d{{1,2}}:\d{{2}}(?::\d{{2}}(?:[.,]\d+)?)?)?(?:z|[+-]\d\d:?\d\d)?(?![\w-])
    | (?<![\d:])\d{{1,2}}:\d{{2}}(?::\d{{2}}(?:[.,]\d+)?)?(?:\s?[ap]\.?m\b)?
    | (?<!\d)\d{{1,2}}\s?[ap]\.?m\b
    | (?<![\d./])\d{{1,2}}[./]\d{{1,2}}[./](?:\d{{4}}|\d{{2}})(?![\d./])
    | \b{_MONTH}\s+\d{{1,2}}(?:st|nd|rd|th)?(?:,?\s+\d{{4}})?\b
    | \b\d{{1,2}}(?:st|nd|rd|th)?\.?\s+{_MONTH}(?:,?\s+\d{{4}})?(?!\w)
    | \b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b
    | \b(?:january|february|march|april|june|july|august|september|october|november|december)\b
    | \b(?:morning|noon|afternoon|evening|night)\b
    | \b\d+(?:\.\d+)?\s*(?:seconds?|secs?|minutes?|mins?|hours?|hrs?|days?)\b
    | (?<![\w.-])1[5-9]\d{{8}}(?:\d{{3}}|\.\d+)?(?![\w-])
    """,
    re.VERBOSE | re.IGNORECASE,
)
_NUMBER = re.compile(r"[-+]?\d+(?:[,._]\d+)*(?:\s?%)?(?![A-Za-z\d])")
_FIGURE = re.compile(r"\d\s?%|^\s*[\[(<{][^\])>}]*\d[^\[(<{]*[\])>}]\s*$|\w:\s*[$€£]?\d")
"""A percentage, a note in brackets that holds a number, or a number behind its name."""
_WORD = re.compile(r"[A-Za-z0-9_+/~-]+")
_WORD_THERE = re.compile(r".?\s*\S*", re.DOTALL)
_QUOTES = str.maketrans("“”„‟«»‘’‚‛–—‐‑", '"' * 6 + "'" * 4 + "-" * 4, "\ufeff\u200b\u200c\u200d\u2060\u00ad")
"""Quotes and hyphens that mean the same, and letters that nobody sees."""
_ID_PREFIX = re.compile(
    r"(?:\b|_)(?:id|uuid|guid|nonce|hash|sha\d*|token|commit|cch|etag|trace|request|session)[\"']?\s*[:=#]\s*[\"'(]?$",
    re.IGNORECASE,
)


class WordChange(NamedTuple):
    """The words around a place where two texts differ."""

    cause: Cause
    before: str
    after: str


def find_changes(before: str, after: str) -> list[WordChange]:
    """Where a text changed, in order, one place per cause."""
    if before == after:
        return []
    whole = _cause_of_whole(before, after)
    if whole is not None:
        return [change_at(before, after, whole)]
    changes: dict[Cause, WordChange] = {}
    for one, other in _places(before, after):
        change = change_at(one, other, classify_text(one, other))
        changes.setdefault(change.cause, change)
    return list(changes.values())


def shared_ends(one: Sequence[str], other: Sequence[str]) -> tuple[int, int]:
    """Lengths of equal beginnings and ends."""
    head = shared_length(one, other)
    return head, shared_length(one[head:][::-1], other[head:][::-1])


def classify_text(before: str, after: str) -> Cause:
    """The kind of the first change."""
    start, tail = shared_ends(before, after)
    for cause, words_at in _KINDS:
        word, other_word = words_at(before, start), words_at(after, start)
        if word is not None and other_word is not None and word != other_word:
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
    return "".join(normalize("NFKC", unescape(text)).translate(_QUOTES).split())


def _words_of(pattern: re.Pattern[str]) -> Callable[[str, int], str | None]:
    def find(text: str, start: int) -> str | None:
        begin = max(0, start - WINDOW_CHARACTERS)
        window = text[begin : start + WINDOW_CHARACTERS]
        touching = [m[0] for m in pattern.finditer(window) if m.start() <= start - begin <= m.end()]
        return touching[-1] if touching else None

    return find


def _random_word(text: str, start: int) -> str | None:
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
    (Cause.CLOCK, _words_of(_CLOCK)),
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
            one = "".join(ours[head + i1 : head + i2 + AROUND_WORDS])
            other = "".join(theirs[head + j1 : head + j2 + AROUND_WORDS])
            yield lead + one, lead + other


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
    start = shared_length(before, after)
    return _spelled(before, start), _spelled(after, start)


def _visible(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def _looks(text: str) -> str:
    return normalize("NFKC", " ".join(text.split()))


def _spelled(text: str, start: int) -> str:
    """Shows blanks and look-alike letters of the word at `start`."""
    begin = max(0, start - 1)
    stop = begin + len(_WORD_THERE.match(text, begin)[0])  # type: ignore[index]
    shown = "".join("␣" if c == " " else ascii(c)[1:-1] if not c.isascii() else c for c in text[begin:stop])
    return _visible(text[:begin]) + shown + _visible(text[stop:])
