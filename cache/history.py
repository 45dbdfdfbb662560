"""Texts that a running output may repeat: what was said before, or is expected. Worker thread only. Pure.

A place holds one token of a text. Hash chains, as LZ77 compressors have them, lead from an output's last three tokens
to where these stood before, the newest first; a place counts only where the tokens agree. All namespaces share one
ring of places, so that the oldest text of all makes way for a new one. Invariants:
* a text is found only from an output of its namespace: the owner of each place is looked up;
* the first place of a text, and places outside of texts, hold `SEPARATOR`; one follows each text;
* an output that grows has places of its own: what is not kept, or is forgotten meanwhile, was never where others
  look.
"""

import hashlib
import secrets
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol, TypeAlias
from weakref import WeakSet

import numpy as np

from cache.types import TokenArray

SALT_BYTES = 16
SHORTEST_MATCH = 3
LONGEST_COMPARED = 32
"""Tokens back from a place that are compared with the output."""
CHAIN_DEPTH = 16
"""Places that are compared in one look-up."""
SEPARATOR = -1
_NOWHERE = 0
"""Ends a chain. The place itself holds a separator."""

_MULTIPLIER = 0x9E3779B1
_HASH_BITS = 32
_HASH_MASK = (1 << _HASH_BITS) - 1
_FIRST_BITS = 8
_CHAIN_LENGTH = 4
"""Places per chain, on average, from which the table of chains is doubled."""

_TEXT_PLACES = 64
"""The fewest places of a text, which bound its other bytes per place."""
_TEXT_BYTES = 192
PLACE_BYTES = 4 + 4 + 4 * 2 // _CHAIN_LENGTH + _TEXT_BYTES // _TEXT_PLACES + 1
"""Token, place before it in the chain, share of the table and of the texts, what arrays have in reserve."""


class _Chains:
    """Tokens by place, and chains through the places whose last three tokens have one hash."""

    def __init__(self) -> None:
        self.tokens = array("i", [SEPARATOR])
        self.before = array("i", [_NOWHERE])
        """For each place the one before it in its chain."""
        self.newest = array("i", bytes(4 << _FIRST_BITS))
        self.shift = _HASH_BITS - _FIRST_BITS

    def grow(self, num_places: int) -> None:
        """Has `num_places` at least."""
        missing = num_places - len(self.tokens)
        if missing > 0:
            self.tokens.frombytes(np.full(missing, SEPARATOR, np.int32).tobytes())
            self.before.frombytes(bytes(4 * missing))
        while num_places > _CHAIN_LENGTH * len(self.newest):
            self._split_chains()

    def write(self, start: int, tokens: TokenArray, salt: int) -> None:
        """Puts three tokens or more at `start`."""
        self.fill(start, tokens)
        places = np.arange(start + SHORTEST_MATCH - 1, start + len(tokens))
        # Sorted by chain, then by place.
        keys = np.sort((_hashes(tokens, salt) >> self.shift).astype(np.int64) << _HASH_BITS | places)
        places, chains = (keys & _HASH_MASK).astype(np.int32), keys >> _HASH_BITS
        differs = chains[1:] != chains[:-1]
        is_first, is_last = np.append(True, differs), np.append(differs, True)
        earlier = np.append(np.int32(_NOWHERE), places[:-1])
        newest = np.frombuffer(self.newest, np.int32)
        earlier[is_first] = newest[chains[is_first]]
        np.frombuffer(self.before, np.int32)[places] = earlier
        newest[chains[is_last]] = places[is_last]

    def fill(self, start: int, tokens: TokenArray) -> None:
        """Overwrites the tokens from `start` on; chains still lead there."""
        np.frombuffer(self.tokens, np.int32)[start : start + len(tokens)] = tokens

    def find(
        self, place: int, own: "LiveText", longest: int, accepts: Callable[[int], bool]
    ) -> tuple[int, int] | None:
        """The newest place from `place` on that agrees longest with the end of `own`.

        Also the length that agrees, which is more than `longest`. A token follows the place.
        """
        tokens, own_tokens = self.tokens, own.tokens
        limit = min(LONGEST_COMPARED, own.stop - 1)
        best = None
        for _ in range(CHAIN_DEPTH):
            if place == _NOWHERE or longest == limit:
                break
            if tokens[place - longest] == own_tokens[-1 - longest] and tokens[place + 1] != SEPARATOR:
                length = 0
                while length < limit and tokens[place - length] == own_tokens[-1 - length]:
                    length += 1
                if length > longest and accepts(place):
                    best, longest = (place, length), length
            place = self.before[place]
        return best

    def _split_chains(self) -> None:
        """Doubles the table; both halves of a chain go on as the whole."""
        self.newest = array("i", np.repeat(np.frombuffer(self.newest, np.int32), 2).tobytes())
        self.shift -= 1


def _hashes(tokens: TokenArray, salt: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """A hash for each three tokens in a row, as `LiveText.link` computes it."""
    words, multiplier = tokens.astype(np.uint32), np.uint32(_MULTIPLIER)
    mixed = (words[:-2] * multiplier ^ words[1:-1]) * multiplier ^ words[2:]
    return (mixed + np.uint32(salt)) * multiplier


class LiveText(_Chains):
    """An output that grows. Found only from itself until it ends."""

    def __init__(self, history: "History", namespace: str, session_id: str | None) -> None:
        super().__init__()
        self.namespace = namespace
        self.session_id = session_id
        self.stop = 1
        """The place after the last token; the first token's is 1."""
        self.hashed = 0
        """The hash of the last three tokens."""
        self.is_forgotten = False
        self._history = history
        self._salt = history.salt_of(namespace)

    def push(self, token: int) -> None:
        """Adds a token."""
        self.tokens.append(token)
        self.stop += 1

    def link(self) -> None:
        """Before a search: adds the tokens pushed since the last one to the chains."""
        tokens, salt, hashed = self.tokens, self._salt, 0
        for place in range(len(self.before), len(tokens)):
            if place < SHORTEST_MATCH:
                self.before.append(_NOWHERE)
                continue
            mixed = (tokens[place - 2] * _MULTIPLIER ^ tokens[place - 1]) * _MULTIPLIER ^ tokens[place]
            hashed = (mixed + salt) * _MULTIPLIER & _HASH_MASK
            self.before.append(self.newest[hashed >> self.shift])
            self.newest[hashed >> self.shift] = place
            if place > _CHAIN_LENGTH * len(self.newest):
                self._split_chains()
        self.hashed = hashed

    def end(self, keeps: bool) -> None:
        """With `keeps` the output joins the history, unless its namespace or session was forgotten meanwhile."""
        if keeps and not self.is_forgotten:
            self._history.add(self.namespace, np.array(self.tokens[1:], np.int32), self.session_id)


@dataclass(slots=True, eq=False)
class FinishedText:
    """A finished text in places `[start, stop)`, the first a separator; `stop` is 0 once it is dropped."""

    start: int
    stop: int
    namespace: str
    session_id: str | None
    """None if unknown, as of stored texts."""


_start_of = attrgetter("start")

MAX_STORED_TOKENS = 1 << 18
"""Most tokens of a namespace's texts on disk; so many are read in some milliseconds."""


class StoredTexts(Protocol):
    """Texts that outlive the process."""

    def namespaces(self) -> Iterable[str]:
        """The namespaces with texts."""

    def texts(self, namespace: str, max_tokens: int) -> Iterable[TokenArray]:
        """The newest texts of a namespace, the newest last."""


class History:
    """Finished texts of all namespaces, in at most `max_bytes`; the oldest make way.

    A namespace's `stored` texts are read once its first text comes.
    """

    def __init__(
        self, max_bytes: int = 32 << 20, stored: StoredTexts | None = None, salt: bytes | None = None
    ) -> None:
        """`salt`, random by default, must stay unknown to clients: see `salt_of`."""
        self._salt = secrets.token_bytes(SALT_BYTES) if salt is None else salt
        self._max_places = max_bytes // PLACE_BYTES
        self.chains = _Chains()
        self._texts: list[FinishedText] = []
        """In the order of their places."""
        self._end = 1
        """The place after the newest text."""
        self._growing = WeakSet[LiveText]()
        self._stored = stored
        self._unread = set() if stored is None else set(stored.namespaces())

    @property
    def namespaces(self) -> set[str]:
        """The namespaces with texts in memory."""
        return {text.namespace for text in self._texts}

    def add(self, namespace: str, tokens: TokenArray, session_id: str | None = None) -> None:
        """Adds a finished text; of one that takes more than a quarter of the ring, its end."""
        self._read_stored(namespace)
        tokens = tokens[-(self._max_places // 4) :]
        # No output repeats a picture, whose places have ids below the separator.
        for text in np.split(tokens, np.flatnonzero(np.diff(tokens < SEPARATOR)) + 1):
            if len(text) > SHORTEST_MATCH and text[0] >= 0:
                self._add(namespace, text, session_id)

    def _add(self, namespace: str, tokens: TokenArray, session_id: str | None) -> None:
        text = self._allocate(len(tokens), namespace, session_id)
        self.chains.write(text.start + 1, tokens, self.salt_of(namespace))

    def salt_of(self, namespace: str) -> int:
        """Unknown to clients, else one could choose a `cache_salt` whose texts crowd another's out of chains."""
        digest = hashlib.blake2b(namespace.encode(), digest_size=8, key=self._salt).digest()
        return int.from_bytes(digest, "little") & _HASH_MASK

    def begin(self, namespace: str, session_id: str | None = None) -> LiveText:
        """An output that grows."""
        self._read_stored(namespace)
        own = LiveText(self, namespace, session_id)
        self._growing.add(own)
        return own

    def forget(self, namespace: str | None = None, session_id: str | None = None) -> None:
        """Drops all texts, a namespace's, or those that may be of one session; growing ones will not join."""

        def is_meant(text: FinishedText | LiveText) -> bool:
            is_of_session = session_id is None or text.session_id in (session_id, None)
            return namespace in (None, text.namespace) and is_of_session

        for own in filter(is_meant, self._growing):
            own.is_forgotten = True
        self._unread = {name for name in self._unread if namespace not in (None, name)}
        for text in filter(is_meant, self._texts):
            self._drop(text)
        self._texts = [text for text in self._texts if text.stop]
        if not self._texts:
            self.chains, self._end = _Chains(), 1

    def find(self, own: LiveText, longest: int) -> tuple[FinishedText, int, int] | None:
        """As `_Chains.find`, with the text in which the place is."""
        chains, namespace = self.chains, own.namespace
        newest = chains.newest[own.hashed >> chains.shift]
        hit = chains.find(newest, own, longest, lambda place: self._text_at(place).namespace == namespace)
        return None if hit is None else (self._text_at(hit[0]), *hit)

    def _read_stored(self, namespace: str) -> None:
        if self._stored is not None and namespace in self._unread:
            self._unread.discard(namespace)
            for tokens in self._stored.texts(namespace, MAX_STORED_TOKENS):
                self.add(namespace, tokens)

    def _text_at(self, place: int) -> FinishedText:
        """The text to which a place with a token belongs."""
        return self._texts[bisect_right(self._texts, place, key=_start_of) - 1]

    def _allocate(self, num_tokens: int, namespace: str, session_id: str | None) -> FinishedText:
        num_places = max(num_tokens + 2, _TEXT_PLACES)
        if self._end + num_places > self._max_places:
            self._make_way(self._end, self._max_places)
            self._end = 1
        start, self._end = self._end, self._end + num_places
        index = self._make_way(start, self._end)
        self.chains.grow(self._end)
        text = FinishedText(start, start + 1 + num_tokens, namespace, session_id)
        self._texts.insert(index, text)
        return text

    def _make_way(self, start: int, stop: int) -> int:
        """Drops the texts that begin in `[start, stop)`; returns where in the order they stood."""
        first, after = (bisect_left(self._texts, place, key=_start_of) for place in (start, stop))
        for text in self._texts[first:after]:
            self._drop(text)
        del self._texts[first:after]
        return first

    def _drop(self, text: FinishedText) -> None:
        self.chains.fill(text.start, np.full(text.stop - text.start, SEPARATOR, np.int32))
        text.stop = 0


class HistoryFollower:
    """Where the continuation of an output stood before, if anywhere: in the output, or in texts of its namespace."""

    def __init__(self, history: History, own: LiveText) -> None:
        self._history = history
        self._own = own
        self._text: FinishedText | LiveText = own
        self._tokens = own.tokens
        self._next = own.stop
        """The place in `_text` of the next token."""
        self._length = 0
        self.expected: int | None = None
        """The text's next token."""

    @property
    def match_length(self) -> int:
        """Last tokens on which output and text agree: three or more, or 0."""
        return self._length if self._next < self._text.stop else 0

    def push(self, token: int) -> None:
        """Takes the output's next token, which `own` has already."""
        if token == self.expected:
            self._next += 1
            self._length += 1
            if self._next < self._text.stop:
                self.expected = self._tokens[self._next]
                return
        self._look_up()
        self.expected = self._tokens[self._next] if self.match_length else None

    def next_tokens(self, limit: int) -> list[int]:
        """What followed before, `limit` tokens at most; a repetition is expected to go on."""
        if not self.match_length:
            return []
        tokens = self._tokens[self._next : min(self._next + limit, self._text.stop)].tolist()
        return tokens if self._text is not self._own else (tokens * (limit // len(tokens) + 1))[:limit]

    def _look_up(self) -> None:
        own = self._own
        own.link()
        self._length = 0
        if own.stop <= SHORTEST_MATCH:
            return
        shortest = SHORTEST_MATCH - 1
        inside = own.find(own.before[-1], own, shortest, lambda _: True)
        if inside is not None:
            place, self._length = inside
            self._text, self._tokens, self._next = own, own.tokens, place + 1
        match = self._history.find(own, max(self._length, shortest))
        if match is not None:
            self._text, place, self._length = match
            self._tokens, self._next = self._history.chains.tokens, place + 1


class PredictionFollower:
    """Follows a client's prediction.

    After a divergence the row's last `SHORTEST_MATCH` tokens are looked up: their next place counts, else the first.
    """

    def __init__(self, prediction: TokenArray) -> None:
        self._tokens = array("i", prediction.tobytes())
        self._at = 0
        """Place of the next token; after a divergence, of the last one that agreed."""
        self.match_length = 1
        """Before the first token nothing disagrees."""
        self._last: tuple[int, ...] = ()
        codes = _codes(prediction)
        # Sorted by code, then by place.
        order = np.argsort(codes, kind="stable")
        self._codes, self._stops = codes[order], order + SHORTEST_MATCH
        self._is_said = bytearray(len(prediction))
        self._num_apart = 0
        """Tokens of the row since both agreed."""

    @property
    def expected(self) -> int | None:
        """The text's next token."""
        return self._tokens[self._at] if self.match_length and self._at < len(self._tokens) else None

    @property
    def num_confirmed(self) -> int:
        return self._is_said.count(1)

    @property
    def num_missed(self) -> int:
        return self._is_said.count(0)

    def push(self, token: int) -> None:
        """Takes the row's next token."""
        self._last = (*self._last[1 - SHORTEST_MATCH :], token)
        self._num_apart += 1
        if token == self.expected:
            self._at += 1
            self.match_length += 1
            self._confirm()
        else:
            self._find()

    def next_tokens(self, limit: int) -> list[int]:
        """Up to `limit` tokens of the text from here on."""
        return self._tokens[self._at : self._at + limit].tolist() if self.match_length else []

    def _find(self) -> None:
        self.match_length = 0
        if len(self._last) < SHORTEST_MATCH:
            return
        (code,) = _codes(np.array(self._last, np.int32))
        first, end = np.searchsorted(self._codes, (code, code + 1))
        if first < end:
            place = first + np.searchsorted(self._stops[first:end], self._at, side="right")
            self.match_length, self._at = SHORTEST_MATCH, int(self._stops[place if place < end else first])
            self._confirm()

    def _confirm(self) -> None:
        num_tokens = min(self._num_apart, SHORTEST_MATCH)
        self._is_said[self._at - num_tokens : self._at] = bytes([1]) * num_tokens
        self._num_apart = 0


class ForcedText:
    """Follows what an output must say next."""

    def __init__(self, forced: Callable[[], Sequence[int]]) -> None:
        """`forced` returns all of it that is known."""
        self._forced = forced
        self._tokens = [*forced()]

    @property
    def match_length(self) -> int:
        """All forced tokens have the same odds."""
        return LONGEST_COMPARED + 1 if self._tokens else 0

    @property
    def expected(self) -> int | None:
        """The text's next token."""
        return self._tokens[0] if self._tokens else None

    def push(self, token: int) -> None:
        """Takes the row's next token."""
        self._tokens = self._tokens[1:] if token == self.expected else []
        self._tokens = self._tokens or [*self._forced()]

    def next_tokens(self, limit: int) -> list[int]:
        """Up to `limit` tokens of the text from here on."""
        return self._tokens[:limit]


Follower: TypeAlias = HistoryFollower | PredictionFollower | ForcedText


def _codes(tokens: TokenArray) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """A number for each `SHORTEST_MATCH` tokens in a row, 21 bits a token."""
    wide = tokens.astype(np.int64)
    return wide[:-2] << 42 | wide[1:-1] << 21 | wide[2:]
