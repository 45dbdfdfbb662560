"""Tokenizes long prompts part by part, replies as they were generated. Any thread.

A tokenizer first cuts its added tokens (such as `<|im_start|>`) out of the raw text, leftmost and longest first, with
the white space that they strip. A *border* is found in any surroundings, so texts between borders are tokenized alike
together and apart. Not borders: normalized tokens, searched for later; single words, which depend on neighbours;
tokens whose white space a neighbour may strip. Each part between is tokenized once and remembered, after a border
unless it is the first. Text does not determine tokens ("Par" "is" or "Paris"), so a
reply's ids are remembered for its place: after the same text, a prompt has the tokens whose state is cached. Long
work asks between parts whether anybody waits (`abandoned_when`).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from tokenizers import AddedToken

import hashlib
import string
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import cycle, islice, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from models.errors import PromptTooLong, TokenizerFailed

if TYPE_CHECKING:
    from tokenizers import AddedToken

_SPACES = re.compile("[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]*")
"""Unicode's White_Space, which the library strips; Python has four more."""
_SURELY_NO_WORD = re.compile(r"[\t\n\r !-/:-@\[-^`{-~]")
_NEVER = "(?!)"

_Trie: TypeAlias = "dict[str, _Trie]"


class Cut(NamedTuple):
    """Range `[start, stop)` of a text; its added token, if a border."""

    start: int
    stop: int
    token_id: int | None


@dataclass(frozen=True, slots=True)
class _Border:
    token_id: int
    lstrip: bool
    rstrip: bool


class Borders:
    """One tokenizer's borders. Any thread."""

    def __init__(self, added: "Mapping[int, AddedToken]", template: str = "") -> None:
        """Borders are the special ones of `added`, by id, and those in `template`, if any.

        Some tokenizers add thousands of tokens common in code; cutting there gains nothing.
        """
        raw = {number: token for number, token in added.items() if not token.normalized and token.content}
        exact = _exact(raw)
        shown = {n for n, token in exact.items() if token.content in template and not token.content.isspace()}
        marks = {n: token for n, token in exact.items() if token.special or n in shown} or exact
        self._borders = {
            token.content: _Border(number, token.lstrip, token.rstrip) for number, token in marks.items()
        }
        texts = [token.content for token in raw.values()]
        self._pattern = re.compile(_any_of(_entangled(self._borders, texts)))
        self.token_ids = frozenset(marks)
        self.opener = self._choose_opener(texts)
        """Text that, put before any part, leaves the part's tokens unchanged."""

    def __bool__(self) -> bool:
        return bool(self._borders)

    @property
    def texts(self) -> Mapping[int, str]:
        return {border.token_id: text for text, border in self._borders.items()}

    def _choose_opener(self, texts: Sequence[str]) -> str | None:
        all_strip = all(border.rstrip for border in self._borders.values())
        for text, border in self._borders.items():
            goes_on = any(other != text and other.startswith(text) for other in texts)
            # If all include the white space after them, no part after a border begins with any.
            if not goes_on and (all_strip or not border.rstrip):
                return text
        return None

    def cut(self, text: str) -> list[Cut]:
        """Borders with stripped white space, and text between."""
        cuts, position = list[Cut](), 0
        for match in self._pattern.finditer(text):
            border = self._borders.get(match[0])
            if border is None:
                continue
            start = max(position, _spaces_before(text, match.start())) if border.lstrip else match.start()
            stop = _spaces_after(text, match.end()) if border.rstrip else match.end()
            if position < start:
                cuts.append(Cut(position, start, None))
            cuts.append(Cut(start, stop, border.token_id))
            position = stop
        if position < len(text):
            cuts.append(Cut(position, len(text), None))
        return cuts

    def cut_ids(self, ids: Sequence[int]) -> list[list[int]]:
        """`ids` cut before and after every border."""
        runs = list[list[int]]()
        for token in ids:
            if not runs or token in self.token_ids or runs[-1][0] in self.token_ids:
                runs.append([])
            runs[-1].append(token)
        return runs


def _exact(tokens: "Mapping[int, AddedToken]") -> "dict[int, AddedToken]":
    some_are_words = any(token.single_word for token in tokens.values())
    some_strip = any(token.lstrip or token.rstrip for token in tokens.values())
    some_may_be_stripped = any(_has_space_at_edge(token.content) for token in tokens.values())

    def is_exact(token: "AddedToken") -> bool:
        text = token.content
        separates_words = _SURELY_NO_WORD.match(text[0]) and _SURELY_NO_WORD.match(text[-1])
        if token.single_word or (some_are_words and not separates_words):
            return False
        if not (some_strip and some_may_be_stripped):
            return True
        return not (token.lstrip or token.rstrip or _has_space_at_edge(token.content))

    return {number: token for number, token in tokens.items() if is_exact(token)}


def _has_space_at_edge(text: str) -> bool:
    return _spaces_after(text, 0) > 0 or _spaces_before(text, len(text)) < len(text)


def _spaces_after(text: str, position: int) -> int:
    match = _SPACES.match(text, position)
    assert match is not None, "the pattern matches no characters as well"
    return match.end()


def _spaces_before(text: str, position: int) -> int:
    while position and _SPACES.fullmatch(text, position - 1, position):
        position -= 1
    return position


def _entangled(borders: Iterable[str], texts: Iterable[str]) -> list[str]:
    """Borders, and all texts whose overlaps can hide one."""
    found, left = list(borders), set(texts) - set(borders)
    fresh = found
    while fresh:
        overlaps = _Overlaps(fresh)
        fresh = [text for text in left if overlaps.any_with(text)]
        found, left = found + fresh, left.difference(fresh)
    return found


class _Overlaps:
    def __init__(self, texts: Sequence[str]) -> None:
        self._heads = {text[:size] for text in texts for size in range(1, len(text) + 1)}
        self._tails = {text[-size:] for text in texts for size in range(1, len(text) + 1)}
        self._inside = "\0".join(texts)
        self._any = re.compile(_any_of(texts))

    def any_with(self, text: str) -> bool:
        sizes = range(1, len(text) + 1)
        if any(text[-size:] in self._heads or text[:size] in self._tails for size in sizes):
            return True
        return text in self._inside or self._any.search(text) is not None


def _any_of(texts: Iterable[str]) -> str:
    """A pattern of the longest of `texts`; its cost does not grow with their number."""
    trie: _Trie = {}
    for text in texts:
        node = trie
        for letter in text:
            node = node.setdefault(letter, {})
        node[""] = {}
    return _pattern(trie) if trie else _NEVER


def _pattern(node: _Trie) -> str:
    branches = list[str]()
    for letter, below in node.items():
        if letter:
            chain, end = _chain(letter, below)
            branches.append(re.escape(chain) + _pattern(end))
    if not branches:
        return ""
    if "" in node:
        return f"(?:{'|'.join(branches)})?"
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _chain(letter: str, node: _Trie) -> tuple[str, _Trie]:
    while len(node) == 1 and "" not in node:
        follower, node = next(iter(node.items()))
        letter += follower
    return letter, node


SLICE_CHARACTERS = 16_384
"""A slice's least length, but the most for one that ends at a word's start."""
MAX_CHARACTERS = 32_768
"""Longest slice: more may take minutes and hold Python's lock."""
_AHEAD_CHARACTERS = 256
"""At a text's end no words are searched for: later text may change them."""
_TO_LAST_SPACE = re.compile(r"(?s:.*\S)(?=\s)")


@dataclass(frozen=True)
class CutPlace:
    """Where a text may be cut."""

    pattern: "re.Pattern[str]"
    num_before: int
    context: str
    """Text before which a slice after the cut is tokenized."""
    crossing: "re.Pattern[str]"


AFTER_LINE = CutPlace(re.compile(r"\S\n[^\W\d_]"), 2, "a\n", re.compile("[\n\u010a](?![\u0100-\u0143])[^\\W\\d_]"))
BEFORE_SPACE = CutPlace(re.compile("[A-Za-z] [A-Za-z]"), 1, "a", re.compile("[A-Za-z][ \u0120\u2581]"))
BEFORE_BRACKET = CutPlace(re.compile(r"\S\n[<\[({]"), 2, "a\n", re.compile(r"[\n\u010a][<\[({]"))
PLACES = (AFTER_LINE, BEFORE_BRACKET, BEFORE_SPACE)


@dataclass(frozen=True, slots=True)
class TextSlice:
    """The range `[start, stop)` of a text, and the context to tokenize it after."""

    start: int
    stop: int
    context: str = ""
    num_context: int = 0


class TextCutter:
    """Cuts long texts. Any thread.

    The library holds Python's lock while it returns results. So a long text is cut before a word or bracket after a
    line break, and before a space between words, where no token reaches across. Later slices are tokenized after a
    few characters like the end of the slice before, whose tokens are left out. Other text (JSON in one line) is cut
    where the tokenizer's words begin, which later text does not change, but for the last. Else it is cut after
    `MAX_CHARACTERS`, where a token may differ.
    """

    def __init__(
        self, places: Mapping[CutPlace, int] | None = None, word_starts: Callable[[str], Sequence[int]] | None = None
    ) -> None:
        """`places` holds each context's number of tokens; `word_starts` returns, ascending, where words begin."""
        self._places = places or {}
        self._word_starts = word_starts

    def cut(self, text: str) -> Iterator[TextSlice]:
        """Yields `text`'s slices in order."""
        start, context, num_context = 0, "", 0
        while len(text) - start > SLICE_CHARACTERS:
            found = self._next_cut(text, start)
            if found is None:
                break
            yield TextSlice(start, found[0], context, num_context)
            start, context, num_context = found
        yield TextSlice(start, len(text), context, num_context)

    def _next_cut(self, text: str, start: int) -> tuple[int, str, int] | None:
        """A slice's end, the next one's context and its tokens; None for the last."""
        least, most = start + SLICE_CHARACTERS, start + MAX_CHARACTERS
        matches = ((place, count, place.pattern.search(text, least, most)) for place, count in self._places.items())
        found = [(match.start() + place.num_before, place.context, n) for place, n, match in matches if match]
        if found:
            return min(found)
        if self._word_starts is not None:
            words = self._word_starts(text[start : least + _AHEAD_CHARACTERS])
            stop = max((word for word in words if word <= SLICE_CHARACTERS), default=0)
            if stop:
                return start + stop, "", 0
        if len(text) <= most:
            return None
        spaced = _TO_LAST_SPACE.match(text, least, most)
        return (spaced.end() if spaced else most), "", 0


def tried_cutter(
    vocabulary: Mapping[str, int],
    encode: Callable[[str], Sequence[int]],
    encode_inner: Callable[[str], Sequence[int]],
    word_starts: Callable[[str], Sequence[int]],
) -> TextCutter:
    """A tokenizer's cutter. `encode_inner` gives a text's ids inside another."""
    spelled = "\0".join(vocabulary)
    holding = [place for place in PLACES if not place.crossing.search(spelled) and _holds(place, encode)]
    places = {place: len(encode(place.context)) for place in holding}
    return TextCutter(places, word_starts if _words_hold(encode, encode_inner, word_starts) else None)


def _holds(place: CutPlace, encode: Callable[[str], Sequence[int]]) -> bool:
    """Whether a cut there changes no token, tried with each letter at either side."""
    num_context = len(encode(place.context))

    def is_cut_alike(text: str) -> bool:
        together = list(encode(text))
        cuts = [match.start() + place.num_before for match in place.pattern.finditer(text)]
        return all([*encode(text[:at]), *encode(place.context + text[at:])[num_context:]] == together for at in cuts)

    return all(is_cut_alike(sample) for letter in string.ascii_letters for sample in _samples(letter))


def _samples(letter: str) -> Iterator[str]:
    yield f"{letter} {letter}"
    yield f"1{letter}\n{letter} {letter}\n\n{letter}."
    yield f"x.{letter});\n{letter}é  {letter} =\n日{letter}\n語 {letter}"
    yield f"<{letter}>\n<b>{letter}\n<{letter}/>\n(1.\n[{letter}]\n\n{{\n{{{letter}"


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
    return all(
        [*encode(text[:start]), *encode_inner(text[start:])] == list(encode(text))
        for text in _WORD_SAMPLES
        for start in word_starts(text)
    ) and any(map(word_starts, _WORD_SAMPLES))


class Abandoned(Exception):
    """Nobody waits for the result."""


_is_abandoned: ContextVar[Callable[[], bool]] = ContextVar("is_abandoned")


@contextmanager
def abandoned_when(is_abandoned: Callable[[], bool]) -> Iterator[None]:
    """`stop_if_abandoned` in the block asks `is_abandoned`, on any thread."""
    token = _is_abandoned.set(is_abandoned)
    try:
        yield
    finally:
        _is_abandoned.reset(token)


def stop_if_abandoned() -> None:
    """Raises Abandoned if nobody waits. Costs almost nothing."""
    is_abandoned = _is_abandoned.get(None)
    if is_abandoned is not None and is_abandoned():
        raise Abandoned


MAX_REMEMBERED_BYTES = 64 << 20
PART_BYTES = 560
"""Bytes of a remembered part, besides its numbers."""

_KEY_BYTES = 16
_MANY_TOKENS = 50_000
"""Returning more at once holds Python's lock."""
_SAMPLES = (
    "",
    " ",
    "\n",
    "Hello",
    " Hello",
    "Hello, world!\n",
    "user\nDas ist schön 🙂 12345 \t x\n\n",
    "  def f(x):\n    return x\n",
    "\n\n  ",
    "e\u0301 é 日本語",
)

_Digest: TypeAlias = "hashlib.blake2b"


@dataclass(frozen=True, eq=False, slots=True)
class PromptPart:
    """Token ids, and an upper bound of each one's end, in characters."""

    ids: NDArray[np.int32]
    ends: NDArray[np.int32]

    @property
    def num_bytes(self) -> int:
        return self.ids.nbytes + self.ends.nbytes + PART_BYTES


@dataclass(frozen=True, eq=False, slots=True)
class Tail:
    """A tokenized text's end from its last border on."""

    start: int
    text: str
    ids: NDArray[np.int32]
    digest: _Digest
    """Digest of namespace and text before `start`; never updated."""


@dataclass(frozen=True, eq=False, slots=True)
class Tokenized:
    """Token ids, where each ends at most, and a reply's context."""

    ids: NDArray[np.int32]
    ends: NDArray[np.int64]
    tail: Tail


class PromptParts:
    """Tokenization part by part, with a memory."""

    def __init__(
        self, backend: Any, added: "Mapping[int, AddedToken]", template: str = "", *, at_borders: bool = True
    ) -> None:
        """Borrows `backend`; `added` holds its added tokens by id.

        Unless cut `at_borders`, a text is one part, and nothing is remembered.
        """
        self._backend = backend
        self._borders = Borders(added if at_borders else {}, template)
        opener = self._borders.opener
        self._opener, self._num_opener = (opener, 1) if opener else ("", 0)
        self._cutter = self._choose_cutter(added)
        self._memory: OrderedDict[bytes, PromptPart] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def fits(self) -> bool:
        """Whether the tokenizer cuts as assumed, tried with each border."""
        texts, mark = self._borders.texts, self._borders.opener
        if mark is None:
            return False
        samples = [f"{a}{mark}{b}{mark}{mark}{c}" for a in _SAMPLES for b, c in pairwise(_SAMPLES)]
        samples += _between(list(texts.values()))
        try:
            return all(self._ids(text) == [number] for number, text in texts.items()) and all(
                self.tokenize(text).ids.tolist() == self._ids(text) for text in samples
            )
        except TokenizerFailed:
            return False

    def tokenize(self, text: str, namespace: str | None = "", max_tokens: int | None = None) -> Tokenized:
        """Token ids of `text`; raises Abandoned, and PromptTooLong above `max_tokens`.

        Without a namespace nothing is recalled or remembered.
        """
        digest, tail_start, tail_digest = _digest_of(namespace or ""), 0, _digest_of(namespace or "")
        cuts, parts, tail_part, count = self._borders.cut(text), list[PromptPart](), 0, _Count(max_tokens)
        for cut in cuts:
            stop_if_abandoned()
            if cut.token_id is not None:
                tail_start, tail_digest, tail_part = cut.start, digest.copy(), len(parts)
            parts.append(self._part(namespace, text[cut.start : cut.stop], cut, digest, count))
        tail_ids = _joined_ids(parts[tail_part:])
        ends = [part.ends.astype(np.int64) + cut.start for part, cut in zip(parts, cuts, strict=True)]
        tail = Tail(tail_start, text[tail_start:], tail_ids, tail_digest)
        return Tokenized(_joined_ids(parts), np.concatenate([np.empty(0, np.int64), *ends]), tail)

    def remember_reply(self, tail: Tail, reply: str, reply_ids: Sequence[int]) -> None:
        """Remembers that `reply`, generated after `tail`, was `reply_ids`, without the end of turn.

        Nothing if text and ids disagree on added tokens.
        """
        if not self._borders:
            return
        text = tail.text + reply
        cuts = self._borders.cut(text)
        runs = self._borders.cut_ids([*tail.ids.tolist(), *reply_ids])
        marks = [run[0] if run[0] in self._borders.token_ids else None for run in runs]
        if marks != [cut.token_id for cut in cuts]:
            return
        digest = tail.digest.copy()
        for cut, run in zip(cuts, runs, strict=True):
            digest.update(_bytes(text[cut.start : cut.stop]))
            if cut.token_id is None:
                # Where a generated token ends in the text is unknown, so every token gets the end of the part.
                ends = np.full(len(run), cut.stop - cut.start, np.int32)
                self._keep(_place_key(digest, tail.start + cut.start), PromptPart(np.array(run, np.int32), ends))

    def _part(self, namespace: str | None, text: str, cut: Cut, digest: _Digest, count: "_Count") -> PromptPart:
        raw = _bytes(text)
        digest.update(raw)
        if cut.token_id is not None:
            count.add(1)
            return PromptPart(np.array([cut.token_id], np.int32), np.array([len(text)], np.int32))
        if namespace is None or not self._borders:
            return self._encode(text, cut.start == 0, count)
        key = _part_key(namespace, raw, is_first=cut.start == 0)
        known = self._recall(_place_key(digest, cut.start)) or self._recall(key)
        if known is not None:
            count.add(len(known.ids))
            return known
        part = self._encode(text, cut.start == 0, count)
        self._keep(key, part)
        return part

    def _recall(self, key: bytes) -> PromptPart | None:
        with self._lock:
            known = self._memory.get(key)
            if known is not None:
                self._memory.move_to_end(key)
            return known

    def _keep(self, key: bytes, part: PromptPart) -> None:
        with self._lock:
            replaced = self._memory.pop(key, None)
            self._num_bytes += part.num_bytes - (replaced.num_bytes if replaced else 0)
            self._memory[key] = part
            while self._num_bytes > MAX_REMEMBERED_BYTES and self._memory:
                self._num_bytes -= self._memory.popitem(last=False)[1].num_bytes

    def _encode(self, text: str, is_first: bool, count: "_Count") -> PromptPart:
        parts, starts = list[PromptPart](), list[int]()
        for text_slice in self._cutter.cut(text):
            stop_if_abandoned()
            parts.append(self._encode_slice(text, text_slice, is_first and text_slice.start == 0))
            starts.append(text_slice.start)
            count.add(len(parts[-1].ids))
        if len(parts) == 1:
            return parts[0]
        ends = [part.ends + np.int32(start) for part, start in zip(parts, starts, strict=True)]
        return PromptPart(_joined_ids(parts), np.concatenate(ends))

    def _encode_slice(self, text: str, text_slice: TextSlice, is_first: bool) -> PromptPart:
        context, num_context = text_slice.context, text_slice.num_context
        if not context and not is_first:
            context, num_context = self._opener, self._num_opener
        encoding = encode(self._backend, context + text[text_slice.start : text_slice.stop])
        ends = token_ends(encoding, len(context) + text_slice.stop - text_slice.start)[num_context:] - len(context)
        return PromptPart(np.array(encoding.ids, np.int32)[num_context:], ends.astype(np.int32))

    def _ids(self, text: str) -> list[int]:
        return list(encode(self._backend, text).ids)

    def _choose_cutter(self, added: "Mapping[int, AddedToken]") -> TextCutter:
        inner = [token for number, token in added.items() if number not in self._borders.token_ids]
        if any(token.lstrip or token.rstrip or token.single_word for token in inner):
            return TextCutter()
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        try:
            return tried_cutter(vocabulary, self._ids, self._inner_ids, self._word_starts)
        except TokenizerFailed:
            return TextCutter()

    def _inner_ids(self, text: str) -> list[int]:
        return self._ids(self._opener + text)[self._num_opener :]

    def _word_starts(self, text: str) -> list[int]:
        """Where words begin, but not beside white space."""
        encoding = encode(self._backend, self._opener + text)
        tokens = zip(encoding.word_ids, encoding.offsets, strict=True)
        starts = [
            start - len(self._opener)
            for (word, (_, end)), (next_word, (start, _)) in pairwise(tokens)
            if None not in (word, next_word) and word != next_word and end == start
        ]
        return [start for start in starts if start > 0 and not any(map(str.isspace, text[start - 1 : start + 1]))]


class _Count:
    def __init__(self, max_tokens: int | None) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0

    def add(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        if self._max_tokens is not None and self._num_tokens > self._max_tokens:
            raise PromptTooLong(self._num_tokens, self._max_tokens)


def encode(backend: Any, text: str, *, add_special_tokens: bool = False) -> Any:
    """The library's encoding of `text`; other threads run meanwhile. Raises TokenizerFailed."""
    try:
        return backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
    except BaseException as error:  # a panic of the library is no Exception, and would end the thread
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerFailed("the model's tokenizer fails on this text") from error


def token_ends(encoding: Any, text_length: int) -> NDArray[np.int64]:
    """An upper bound for each token's end, ascending.

    Byte-level tokenizers may trim white space from offsets: a token can end later than stated, never after the next
    one's start.
    """
    num_tokens = len(encoding)
    if num_tokens > _MANY_TOKENS:
        # Taking ids one by one takes longer, but other threads can run.
        offsets: Iterable[tuple[int, int]] = (encoding.token_to_chars(token) for token in range(num_tokens))
    else:
        offsets = encoding.offsets
    flat = np.fromiter((number for pair in offsets for number in pair), np.int64, 2 * num_tokens)
    spans = flat.reshape(-1, 2)
    next_starts = np.append(spans[1:, 0], text_length)
    ends: NDArray[np.int64] = np.maximum.accumulate(np.maximum(spans[:, 1], next_starts))
    return ends


def _between(marks: Sequence[str]) -> Iterator[str]:
    for start in range(0, len(marks), 200):
        some = marks[start : start + 200]
        yield "".join(sample + mark for sample, mark in zip(islice(cycle(_SAMPLES), len(some)), some, strict=True))


def _joined_ids(parts: Sequence[PromptPart]) -> NDArray[np.int32]:
    return np.concatenate([np.empty(0, np.int32), *(part.ids for part in parts)])


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _digest_of(namespace: str) -> _Digest:
    return hashlib.blake2b(_bytes(f"{len(namespace)} {namespace}"), digest_size=_KEY_BYTES, person=b"place")


def _place_key(digest: _Digest, start: int) -> bytes:
    key = digest.copy()
    key.update(b" %d" % start)
    return key.digest()


def _part_key(namespace: str, raw: bytes, *, is_first: bool) -> bytes:
    key = hashlib.blake2b(_bytes(f"{is_first} {len(namespace)} {namespace}"), digest_size=_KEY_BYTES, person=b"part")
    key.update(raw)
    return key.digest()
