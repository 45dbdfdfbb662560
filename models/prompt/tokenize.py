"""Tokenizes long prompts part by part, replies as they were generated. Any thread.

A tokenizer first cuts its added tokens (such as `<|im_start|>`) out of the raw text, leftmost and longest first, with
the white space that they strip. A *border* is found in any surroundings, so texts between borders are tokenized alike
together and apart. Text does not determine tokens ("Par" "is" or "Paris"), so the ids of a part, tokenized or
generated, are remembered for its place: after the same text, a prompt has the tokens whose state is cached. Long work
asks between slices of a part whether anybody waits (`abandoned_when`).
"""

import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import cycle, groupby, pairwise
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from models.errors import InvalidParameter, PromptTooLong, TokenizerFailed
from models.texts import shared_length

if TYPE_CHECKING:
    from tokenizers import AddedToken

_SPACES = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
"""Unicode's White_Space, which the library strips; Python has four more."""
_LEADING_SPACES = re.compile(f"[{_SPACES}]*")
_NEVER = "(?!)"


class Cut(NamedTuple):
    """Range `[start, stop)` of a text; its added token, if a border."""

    start: int
    stop: int
    token_id: int | None


class Borders:
    """One tokenizer's borders. Any thread."""

    def __init__(self, added: "Mapping[int, AddedToken]", template: str = "") -> None:
        """Borders are the special ones of `added`, by id, and those in `template`, if any.

        Some tokenizers add thousands of tokens common in code; cutting there gains nothing. Not borders: normalized
        tokens, searched for later, and those that other tokens may hide. Where a token depends on its neighbours (a
        single word, or white space that a neighbour strips), there is none.
        """
        raw = {token.content: (number, token) for number, token in added.items() if not token.normalized}
        raw.pop("", None)
        strips = any(token.lstrip or token.rstrip for _, token in raw.values())
        if any(token.single_word or (strips and text.strip(_SPACES) != text) for text, (_, token) in raw.items()):
            raw = {}
        shown = {text for text, (_, token) in raw.items() if token.special or (text in template and text.strip())}
        marks, self._pattern = _never_hidden(shown or set(raw), set(raw) - shown if shown else set())
        self._borders = {text: raw[text] for text in raw if text in marks}
        self.ids = {text: number for text, (number, _) in self._borders.items()}
        self.token_ids = frozenset(self.ids.values())
        self.opener = self._choose_opener()
        """Text that, put before any part, leaves the part's tokens unchanged."""

    def _choose_opener(self) -> str | None:
        all_strip = all(token.rstrip for _, token in self._borders.values())
        for text, (_, token) in self._borders.items():
            goes_on = any(other != text and other.startswith(text) for other in self._borders)
            # If all include the white space after them, no part after a border begins with any.
            if not goes_on and (all_strip or not token.rstrip):
                return text
        return None

    def cut(self, text: str) -> list[Cut]:
        """Borders with stripped white space, and text between."""
        cuts, position = list[Cut](), 0
        for match in self._pattern.finditer(text):
            (number, token), (start, stop) = self._borders[match[0]], match.span()
            if token.lstrip:
                start = position + len(text[position:start].rstrip(_SPACES))
            if token.rstrip:
                stop = next(_LEADING_SPACES.finditer(text, stop)).end()
            if position < start:
                cuts.append(Cut(position, start, None))
            cuts.append(Cut(start, stop, number))
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


def _never_hidden(marks: set[str], others: set[str]) -> tuple[set[str], re.Pattern[str]]:
    """The marks that `others`, if found with them, hide nowhere, and a pattern of them."""
    while True:
        pattern = re.compile(_any_of(marks) or _NEVER)
        tails = {text[start:] for text in others for start in range(len(text))}
        hidden = {text for text in marks if any(text[:size] in tails for size in range(1, len(text)))}
        hidden.update(pattern.findall("\0".join(others)))
        if not hidden:
            return marks, pattern
        marks, others = marks - hidden, others | hidden


def _any_of(texts: Collection[str]) -> str:
    """A pattern of the longest of `texts`; its cost does not grow with their number."""
    branches = list[str]()
    for _, group in groupby(sorted(filter(None, texts)), key=lambda text: text[0]):
        alike = list(group)
        head = alike[0][: shared_length(alike[0], alike[-1])]
        branches.append(re.escape(head) + _any_of([text[len(head) :] for text in alike]))
    return f"(?:{'|'.join(branches)}){'?' if '' in texts else ''}" if branches else ""


class Abandoned(Exception):
    """Nobody waits for the result."""


MAX_REPEATED_BYTES = 64 << 20
"""Bytes that one request may have read or written beside its own body, which names them: see `spend`."""
BYTES_PER_USE = 4096
"""What each use counts besides its bytes."""


@dataclass
class _Work:
    is_abandoned: Callable[[], bool]
    num_left: int


_work: ContextVar[_Work] = ContextVar("work")


@contextmanager
def abandoned_when(is_abandoned: Callable[[], bool]) -> Iterator[None]:
    """The block is one request's work: `stop_if_abandoned` in it asks `is_abandoned`, on any thread."""
    token = _work.set(_Work(is_abandoned, MAX_REPEATED_BYTES))
    try:
        yield
    finally:
        _work.reset(token)


def stop_if_abandoned() -> None:
    """Raises Abandoned if nobody waits. Costs almost nothing."""
    work = _work.get(None)
    if work is not None and work.is_abandoned():
        raise Abandoned


def spend(num_bytes: int, param: str) -> None:
    """Counts what a few bytes of a body can ask for again and again: stored items, tools' definitions.

    Raises Abandoned if nobody waits, and InvalidParameter above `MAX_REPEATED_BYTES`.
    """
    stop_if_abandoned()
    if (work := _work.get(None)) is not None:
        work.num_left -= num_bytes + BYTES_PER_USE
        if work.num_left < 0:
            bound = f"{MAX_REPEATED_BYTES} bytes, each use counting {BYTES_PER_USE} more"
            raise InvalidParameter(param, f"{param}: the items and tools that it refers to have more than {bound}")


SLICE_CHARACTERS = 16_384
"""The library holds Python's lock while it returns results."""
OVERLAP_CHARACTERS = 256
MAX_REMEMBERED_BYTES = 64 << 20
PART_BYTES = 490
"""Bytes of a remembered part, besides its numbers."""

_KEY_BYTES = 16
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

Value = TypeVar("Value")

_Digest: TypeAlias = "hashlib.blake2b"
_Count: TypeAlias = Callable[[int], None]
_Rows: TypeAlias = NDArray[np.int32]
"""`[num_tokens, 3]`: each token's id, and the range of the text that it came from."""


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


class LatelyUsed(Generic[Value]):
    """Values of a total size; the least recently used are forgotten. Any thread."""

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._kept: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.size = 0

    def recall(self, key: Hashable) -> Value | None:
        """The value kept last."""
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def keep(self, key: Hashable, value: Value, size: int) -> Value:
        """Returns the value."""
        with self._lock:
            self.size += size - (self._kept.pop(key)[1] if key in self._kept else 0)
            self._kept[key] = value, size
            while self.size > self._max_size:
                self.size -= self._kept.popitem(last=False)[1][1]
        return value


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
        self._memory = LatelyUsed[PromptPart](MAX_REMEMBERED_BYTES)

    def fits(self) -> bool:
        """Whether the tokenizer cuts as assumed, tried with each border."""
        ids, mark = self._borders.ids, self._borders.opener
        if mark is None:
            return False
        samples = [f"{a}{mark}{b}{mark}{mark}{c}" for a in _SAMPLES for b, c in pairwise(_SAMPLES)]
        spread = [sample + text for sample, text in zip(cycle(_SAMPLES), ids)]
        samples += ["".join(spread[start : start + 200]) for start in range(0, len(spread), 200)]
        try:
            return all(self._ids(text) == [number] for text, number in ids.items()) and all(
                self.tokenize(text, None).ids.tolist() == self._ids(text) for text in samples
            )
        except TokenizerFailed:
            return False

    def tokenize(self, text: str, namespace: str | None = "", max_tokens: int | None = None) -> Tokenized:
        """Token ids of `text`; raises Abandoned, and PromptTooLong above `max_tokens`.

        Without a namespace nothing is recalled or remembered.
        """
        digest, tail_start, tail_digest = _digest_of(namespace or ""), 0, _digest_of(namespace or "")
        cuts, parts, tail_part, total = self._borders.cut(text), list[PromptPart](), 0, 0

        def count(num_tokens: int) -> None:
            nonlocal total
            total += num_tokens
            if max_tokens is not None and total > max_tokens:
                raise PromptTooLong(total, max_tokens)

        for cut in cuts:
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
        text, marks = tail.text + reply, self._borders.token_ids
        cuts, runs = self._borders.cut(text), self._borders.cut_ids([*tail.ids.tolist(), *reply_ids])
        if not marks or [run[0] if run[0] in marks else None for run in runs] != [cut.token_id for cut in cuts]:
            return
        digest = tail.digest.copy()
        for cut, run in zip(cuts, runs, strict=True):
            digest.update(_bytes(text[cut.start : cut.stop]))
            if cut.token_id is None:
                # Where a generated token ends in the text is unknown, so every token gets the end of the part.
                ends = np.full(len(run), cut.stop - cut.start, np.int32)
                part = PromptPart(np.array(run, np.int32), ends)
                self._memory.keep(_place_key(digest, tail.start + cut.start), part, part.num_bytes)

    def _part(self, namespace: str | None, text: str, cut: Cut, digest: _Digest, count: _Count) -> PromptPart:
        digest.update(_bytes(text))
        if cut.token_id is not None:
            count(1)
            return PromptPart(np.array([cut.token_id], np.int32), np.array([len(text)], np.int32))
        key = _place_key(digest, cut.start) if namespace is not None and self._borders.ids else None
        known = self._memory.recall(key) if key is not None else None
        if known is not None:
            count(len(known.ids))
            return known
        part = self._encode(text, cut.start == 0, count)
        if key is not None:
            self._memory.keep(key, part, part.num_bytes)
        return part

    def _encode(self, text: str, is_first: bool, count: _Count) -> PromptPart:
        slices = list[_Rows]()
        for rows in self._slices(text, "" if is_first else self._borders.opener or ""):
            count(len(rows))
            slices.append(rows)
        rows = np.concatenate(slices)
        # Byte-level tokenizers may trim white space from ranges: a token can end later than stated, never after the
        # next one's start.
        ends = np.maximum.accumulate(np.maximum(rows[:, 2], np.append(rows[1:, 1], np.int32(len(text)))))
        return PromptPart(rows[:, 0].copy(), ends)

    def _slices(self, text: str, opener: str) -> Iterator[_Rows]:
        """Yields the tokens of `text` after `opener`, slice by slice.

        A slice begins at a token of the one before. The two are joined between two tokens that both have: what both
        make of that place, the tokenizer makes of the whole text. If there is none, a token there may differ.
        """
        start, rows = 0, _rows(self._backend, opener + text[:SLICE_CHARACTERS], -len(opener))[bool(opener) :]
        while (stop := start + SLICE_CHARACTERS) < len(text):
            starts = rows[1:, 1]
            is_apart = (starts == rows[:-1, 2]) & (starts >= start + SLICE_CHARACTERS // 2)
            places = np.flatnonzero(is_apart & (starts <= stop - OVERLAP_CHARACTERS))
            place = int(places[-1]) + 1 if len(places) else len(rows)
            start = int(rows[place, 1]) if len(places) else stop
            following = _rows(self._backend, text[start : start + SLICE_CHARACTERS], start)
            num_kept, num_known = _joint(rows, following, place)
            yield rows[:num_kept]
            rows = following[num_known:]
        yield rows

    def _ids(self, text: str) -> list[int]:
        return list(encode(self._backend, text).ids)


def encode(backend: Any, text: str, *, add_special_tokens: bool = False) -> Any:
    """The library's encoding of `text`; other threads run meanwhile. Raises TokenizerFailed and Abandoned."""
    stop_if_abandoned()
    try:
        return backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
    except BaseException as error:  # a panic of the library is no Exception, and would end the thread
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerFailed("the model's tokenizer fails on this text") from error


def _rows(backend: Any, text: str, start: int) -> _Rows:
    encoding = encode(backend, text)
    ranges = np.array(encoding.offsets, np.int32).reshape(-1, 2)
    return np.column_stack((np.array(encoding.ids, np.int32), ranges + np.int32(start)))


def _joint(rows: _Rows, following: _Rows, place: int) -> tuple[int, int]:
    """How many of `rows` to keep, and of `following`, which begins at token `place` of `rows`, to leave out."""
    last = [tuple(row) for row in rows[place:, :2].tolist()]
    first = [tuple(row) for row in following[: 2 * len(last), :2].tolist()]
    known = {pair: number for number, pair in enumerate(pairwise(last), place + 1)}
    shared = [(known[pair], number) for number, pair in enumerate(pairwise(first), 1) if pair in known]
    return shared[len(shared) // 2] if shared else (place, 0)


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
