"""Cuts a long text where a tokenizer cuts it in any case, so that it can be tokenized in parts.

The tokenizers library holds Python's lock while it hands over its results, and an encoding of megabytes cannot be
stopped halfway. So a long text is cut before a word or a bracket behind a line break, and before a space between two
words. There no token can reach across: none of the vocabulary has these characters within. A tokenizer may still mind
what stands at the beginning of a text (many put a space there), so a part that is not the first is tokenized behind a
few characters that end as the part before did, whose tokens are left out.

A text without such places (JSON or markup in one line, a picture in letters) is cut where the tokenizer's own words
begin. Most tokenizers cut a text into words first, from left to right, and look a few characters ahead for it; so the
words of a part are those of the whole text, but for the last ones. That costs tokenizing such a text twice.

Whether all this holds for a tokenizer is tried on samples; a kind of place that fails is not used.

No part has more than `MAX_CHARACTERS`, whatever the text and the tokenizer: where there is no place, a text is cut
anyhow, before white space if there is any. A token at such a cut may be another than it would be.
"""

import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

SEGMENT_CHARACTERS = 16_384
"""A part has at least so many, and ends at the next place where it can; at a word's start, at most so many."""
MAX_CHARACTERS = 32_768
"""A part has at most so many. More may take the library minutes, and searching them holds Python's lock."""
_AHEAD_CHARACTERS = 256
"""Words are not looked for in this many characters at the end of a searched text: what follows may change them."""
_TO_LAST_SPACE = re.compile(r"(?s:.*\S)(?=\s)")


@dataclass(frozen=True)
class CutPlace:
    """A kind of place where a text is cut."""

    pattern: "re.Pattern[str]"
    num_before: int
    """Characters of the match that stand before the cut."""
    context: str
    """What a part behind the cut is tokenized behind."""
    crossing: "re.Pattern[str]"
    """What a token of the vocabulary that reaches across has within, spelled in bytes or not."""


AFTER_LINE = CutPlace(re.compile(r"\S\n[^\W\d_]"), 2, "a\n", re.compile("[\n\u010a](?![\u0100-\u0143])[^\\W\\d_]"))
BEFORE_SPACE = CutPlace(re.compile("[A-Za-z] [A-Za-z]"), 1, "a", re.compile("[A-Za-z][ \u0120\u2581]"))
BEFORE_BRACKET = CutPlace(re.compile(r"\S\n[<\[({]"), 2, "a\n", re.compile(r"[\n\u010a][<\[({]"))
PLACES = (AFTER_LINE, BEFORE_BRACKET, BEFORE_SPACE)
NO_PLACES: Mapping[CutPlace, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class TextPart:
    """The range `[start, stop)` of a text, and what to tokenize it behind."""

    start: int
    stop: int
    context: str = ""


class TextCutter:
    """The places of one tokenizer. Any thread."""

    def __init__(
        self,
        places: Mapping[CutPlace, int] = NO_PLACES,
        word_starts: Callable[[str], Sequence[int]] | None = None,
    ) -> None:
        """`places` says how many tokens each context has; with nothing given, a text is cut only where it must be.

        `word_starts` says, ascending, where the tokenizer's own words begin that no white space stands beside.
        """
        self._places = places
        self._word_starts = word_starts

    def num_context_tokens(self, segment: TextPart) -> int:
        """Returns how many tokens of an encoded segment belong to what it stands behind."""
        return next((count for place, count in self._places.items() if place.context == segment.context), 0)

    def cut(self, text: str) -> Iterator[TextPart]:
        """Yields the parts of `text` in order."""
        start, context = 0, ""
        while len(text) - start > SEGMENT_CHARACTERS:
            found = self._next_cut(text, start)
            if found is None:
                break
            stop, next_context = found
            yield TextPart(start, stop, context)
            start, context = stop, next_context
        yield TextPart(start, len(text), context)

    def _next_cut(self, text: str, start: int) -> tuple[int, str] | None:
        """Returns where the part that begins at `start` ends, and the context of the next; None if it has no end."""
        least, most = start + SEGMENT_CHARACTERS, start + MAX_CHARACTERS
        matches = ((place, place.pattern.search(text, least, most)) for place in self._places)
        found = [(match.start() + place.num_before, place.context) for place, match in matches if match]
        if found:
            return min(found)
        if self._word_starts is not None:
            words = self._word_starts(text[start : least + _AHEAD_CHARACTERS])
            stop = max((word for word in words if word <= SEGMENT_CHARACTERS), default=0)
            if stop:
                return start + stop, ""
        if len(text) <= most:
            return None
        spaced = _TO_LAST_SPACE.match(text, least, most)
        return (spaced.end() if spaced else most), ""


def tried_cutter(
    vocabulary: Mapping[str, int],
    encode: Callable[[str], Sequence[int]],
    encode_inner: Callable[[str], Sequence[int]],
    word_starts: Callable[[str], Sequence[int]],
) -> TextCutter:
    """Returns the cutter of a tokenizer; raises what `encode` raises.

    `vocabulary` maps the tokens as they are spelled; `encode` gives the ids of a whole text, `encode_inner` those of
    a text in the middle of another.
    """
    spelled = "\0".join(vocabulary)
    holding = [place for place in PLACES if not place.crossing.search(spelled) and _holds(place, encode)]
    do_words_hold = _words_hold(encode, encode_inner, word_starts)
    return TextCutter(
        {place: len(encode(place.context)) for place in holding}, word_starts if do_words_hold else None
    )


def _holds(place: CutPlace, encode: Callable[[str], Sequence[int]]) -> bool:
    """Whether cutting at a kind of place changes nothing, tried on samples with each letter at either side."""
    samples = [sample for letter in string.ascii_letters for sample in _samples(letter)]
    return all(_is_cut_alike(sample, place, encode) for sample in samples)


def _samples(letter: str) -> Iterator[str]:
    yield f"{letter} {letter}"
    yield f"1{letter}\n{letter} {letter}\n\n{letter}."
    yield f"x.{letter});\n{letter}é  {letter} =\n日{letter}\n語 {letter}"
    yield f"<{letter}>\n<b>{letter}\n<{letter}/>\n(1.\n[{letter}]\n\n{{\n{{{letter}"


def _is_cut_alike(text: str, place: CutPlace, encode: Callable[[str], Sequence[int]]) -> bool:
    num_context = len(encode(place.context))
    together = list(encode(text))
    for match in place.pattern.finditer(text):
        cut = match.start() + place.num_before
        behind = list(encode(place.context + text[cut:]))
        if list(encode(text[:cut])) + behind[num_context:] != together:
            return False
    return True


_WORD_SAMPLES = (
    "<table><tr><td>one</td><td class='two'><b>2</b></td></tr></table>\n<table>  <tr>\n\n  </tr>it's I'LL",
    '{"name":"Émile","list":[1,22,333,4444,-5.5e6],"empty":{},"日本":"語。",  "next":null}\r\n{"a":\t"b"}',
    "QUJDREVGR0hJSktMTU5PUFFS+U1RVVldY/WVphYmNkZWZnaGlqa2xtbm9w==;x.y(z)[0]+=1;//e\u0301a\u0301?!...---### 🙂🙂a",
)


def _words_hold(
    encode: Callable[[str], Sequence[int]],
    encode_inner: Callable[[str], Sequence[int]],
    word_starts: Callable[[str], Sequence[int]],
) -> bool:
    """Whether cutting before words changes nothing, and what follows moves no word, tried on samples."""
    return all(
        [*encode(text[:start]), *encode_inner(text[start:])] == list(encode(text))
        for text in _WORD_SAMPLES
        for start in word_starts(text)
    ) and any(map(word_starts, _WORD_SAMPLES))
