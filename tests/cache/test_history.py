"""What may follow an output is found as by a naive search: in texts of its namespace, never in forgotten ones."""

import tracemalloc
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache import history
from cache.history import (
    CHAIN_DEPTH,
    LONGEST_COMPARED,
    PLACE_BYTES,
    SEPARATOR,
    SHORTEST_MATCH,
    History,
    HistoryFollower,
    LiveText,
)
from cache.types import TokenArray

NAMESPACES, SESSIONS = st.sampled_from(["ours", "theirs"]), st.sampled_from(["monday", "tuesday", None])
TOKENS = st.lists(st.integers(0, 1), min_size=4, max_size=25)


def array_of(tokens: list[int]) -> TokenArray:
    return np.array(tokens, np.int32)


def assert_tidy(known: History) -> None:
    """Places of texts hold tokens, all others a separator."""
    tokens = np.array(known.chains.tokens)
    is_text = np.zeros(len(tokens), bool)
    limits = [*(text.start for text in known._texts), len(tokens)]
    for text, limit in zip(known._texts, limits[1:], strict=True):
        assert 1 <= text.start < text.stop < limit
        is_text[text.start + 1 : text.stop] = True
    assert np.array_equal(is_text, tokens != SEPARATOR)


@dataclass
class NaiveText:
    namespace: str
    session_id: str | None
    tokens: list[int] = field(default_factory=list)
    is_known: bool = True


@dataclass
class NaiveOutput:
    """An output, and what it follows: looked for place by place."""

    text: NaiveText
    is_forgotten: bool = False
    followed: NaiveText | None = None
    next: int = 0
    length: int = 0

    def push(self, token: int, texts: list[NaiveText]) -> None:
        followed, self.followed = self.followed, None
        own = self.text.tokens
        own.append(token)
        if followed is not None and followed.is_known and followed.tokens[self.next] == token:
            self.next, self.length = self.next + 1, self.length + 1
            if self.next < len(followed.tokens):
                self.followed = followed
                return
        self.length = SHORTEST_MATCH - 1
        known = [one for one in reversed(texts) if one.is_known and one.namespace == self.text.namespace]
        for text in [self.text, *known]:
            for stop in range(len(text.tokens) - 1, SHORTEST_MATCH - 1, -1):
                agreed = 0
                limit = min(stop, len(own), LONGEST_COMPARED)
                while agreed < limit and text.tokens[stop - 1 - agreed] == own[-1 - agreed]:
                    agreed += 1
                if agreed > self.length:
                    self.followed, self.next, self.length = text, stop, agreed

    def next_tokens(self, limit: int) -> list[int]:
        if self.followed is None or not self.followed.is_known:
            return []
        found = self.followed.tokens[self.next :]
        return (found * (limit if self.followed is self.text else 1))[:limit]


class Compared:
    """A history and a naive one, which are told the same."""

    def __init__(self) -> None:
        self.history = History()
        self.texts: list[NaiveText] = []
        self.outputs: list[tuple[LiveText, HistoryFollower, NaiveOutput]] = []
        self.begin("ours", "monday")

    def add(self, namespace: str, session_id: str | None, tokens: list[int]) -> None:
        self.history.add(namespace, array_of(tokens), session_id)
        self.texts.append(NaiveText(namespace, session_id, list(tokens)))

    def begin(self, namespace: str, session_id: str | None) -> None:
        own = self.history.begin(namespace, session_id)
        naive = NaiveOutput(NaiveText(namespace, session_id))
        self.outputs.append((own, HistoryFollower(self.history, own), naive))

    def push(self, which: int, tokens: list[int]) -> None:
        if self.outputs:
            own, follower, naive = self.outputs[which % len(self.outputs)]
            for token in tokens:
                own.push(token)
                follower.push(token)
                naive.push(token, self.texts)
                self.check()

    def end(self, which: int, keeps: bool) -> None:
        if self.outputs:
            own, _, naive = self.outputs.pop(which % len(self.outputs))
            own.end(keeps)
            if keeps and not naive.is_forgotten:
                self.texts.append(naive.text)

    def forget(self, namespace: str, session_id: str | None) -> None:
        self.history.forget(namespace, session_id)

        def is_meant(text: NaiveText) -> bool:
            return text.namespace == namespace and (session_id is None or text.session_id in (session_id, None))

        for text in filter(is_meant, self.texts):
            text.is_known = False
        for _, _, naive in self.outputs:
            naive.is_forgotten |= is_meant(naive.text)

    def check(self) -> None:
        assert_tidy(self.history)
        for _, follower, naive in self.outputs:
            expected = naive.next_tokens(7)
            assert follower.next_tokens(7) == expected
            assert follower.match_length == (naive.length if expected else 0)


OPERATIONS = st.one_of(
    st.tuples(st.just("add"), NAMESPACES, SESSIONS, TOKENS),
    st.tuples(st.just("begin"), NAMESPACES, SESSIONS),
    st.tuples(st.just("push"), st.integers(0, 2), TOKENS),
    st.tuples(st.just("end"), st.integers(0, 2), st.booleans()),
    st.tuples(st.just("forget"), NAMESPACES, SESSIONS),
)


@given(operations=st.lists(OPERATIONS, max_size=30))
def test_what_is_followed_is_what_a_naive_search_follows(operations: list[tuple[Any, ...]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "CHAIN_DEPTH", 1 << 30)
        # All namespaces share their chains.
        patch.setattr(history.History, "salt_of", lambda self, namespace: 0)
        compared = Compared()
        for name, *arguments in operations:
            getattr(compared, name)(*arguments)
            compared.check()
            compared.push(len(arguments), [0, 1, 0, 0])


@given(
    texts=st.lists(st.tuples(NAMESPACES, st.lists(st.integers(0, 1), max_size=120)), min_size=3, max_size=40),
    output=st.lists(st.integers(0, 1), min_size=20, max_size=60),
)
def test_a_full_history_says_only_what_followed_in_a_text_of_the_namespace(
    texts: list[tuple[str, list[int]]], output: list[int]
) -> None:
    """Texts come and go between the tokens of an output that follows them."""
    max_bytes = 600 * PLACE_BYTES
    known = History(max_bytes)
    own = known.begin("ours")
    follower = HistoryFollower(known, own)
    added: list[list[int]] = []
    for number, token in enumerate(output):
        namespace, tokens = texts[number % len(texts)]
        known.add(namespace, array_of(tokens))
        if namespace == "ours":
            added.append(tokens)
        own.push(token)
        follower.push(token)
        assert_tidy(known)
        length, expected = follower.match_length, follower.next_tokens(5)
        assert bool(length) == bool(expected) and length <= number + 1
        so_far = output[: number + 1]
        sources = [*added, *(so_far + so_far[-period:] * 5 for period in range(1, number + 2))]
        if length:
            assert any(contains(source, so_far[-length:] + expected) for source in sources)


def contains(tokens: list[int], part: list[int]) -> bool:
    return any(tokens[start : start + len(part)] == part for start in range(len(tokens) - len(part) + 1))


def following(known: History, tokens: list[int], namespace: str = "") -> HistoryFollower:
    own = known.begin(namespace)
    follower = HistoryFollower(known, own)
    for token in tokens:
        own.push(token)
        follower.push(token)
    return follower


@pytest.mark.parametrize("seed", range(8))
def test_the_oldest_texts_of_all_namespaces_make_way(seed: int) -> None:
    known = History(5000 * PLACE_BYTES)
    added: list[TokenArray] = []
    for number, size in enumerate(np.random.default_rng(seed).integers(5, 800, 80).tolist()):
        added.append(np.arange(1000 * number, 1000 * number + size, dtype=np.int32))
        known.add("ab"[number % 2], added[-1])
        assert_tidy(known)
        found = [
            bool(following(known, text[:4].tolist(), "ab"[at % 2]).next_tokens(1)) for at, text in enumerate(added)
        ]
        assert found == sorted(found) and found[-1]
        kept = sum(len(text) for text, is_found in zip(added, found, strict=True) if is_found)
        assert all(found) or kept > 2500


def test_memory_grows_with_the_texts_up_to_the_limit() -> None:
    max_bytes = 1 << 20
    tracemalloc.start()
    try:
        known = History(max_bytes)
        assert tracemalloc.get_traced_memory()[0] < 10_000
        for number in range(5000):
            size = 500 if number < 1000 else 4
            known.add(f"{number % 10}", np.arange(number, number + size, dtype=np.int32))
            if number == 20:
                assert tracemalloc.get_traced_memory()[0] < max_bytes / 4
            assert tracemalloc.get_traced_memory()[0] < max_bytes * 1.05
        assert max_bytes / 3 < tracemalloc.get_traced_memory()[0]
        for number in range(10):
            known.forget(f"{number}")
        assert tracemalloc.get_traced_memory()[0] < 20_000
    finally:
        tracemalloc.stop()


class Stored:
    """Texts of "ours" and "theirs" that outlived a process."""

    def __init__(self) -> None:
        self.num_read = 0

    def namespaces(self) -> list[str]:
        return ["ours", "theirs"]

    def texts(self, namespace: str, max_tokens: int) -> list[TokenArray]:
        self.num_read += 1
        return [array_of([1, 2, 3, 4, 5]), array_of([1, 2, 3, 6, 7])]


def test_what_is_stored_of_a_namespace_is_read_once_before_its_first_text() -> None:
    stored = Stored()
    known = History(stored=stored)
    assert stored.num_read == 0
    known.add("another", array_of([1, 2, 3, 9]))
    assert stored.num_read == 0
    known.add("ours", array_of([2, 3, 4, 9]))
    assert following(known, [1, 2, 3], "ours").next_tokens(9) == [6, 7]
    assert following(known, [1, 2, 3, 4], "ours").next_tokens(9) == [5]
    assert following(known, [2, 3, 4], "ours").next_tokens(9) == [9]
    assert following(known, [1, 2, 3], "theirs").next_tokens(9) == [6, 7]
    assert stored.num_read == 2


@pytest.mark.parametrize("is_read", [True, False])
@pytest.mark.parametrize("session_id", ["s", None])
def test_what_is_stored_may_be_of_any_session_that_is_forgotten(is_read: bool, session_id: str | None) -> None:
    known = History(stored=Stored())
    for namespace in ("ours", "theirs") if is_read else ():
        known.begin(namespace)
    known.forget("ours", session_id)
    assert following(known, [1, 2, 3], "ours").next_tokens(9) == []
    assert following(known, [1, 2, 3], "theirs").next_tokens(9) == [6, 7]
    for one in (known, History(stored=Stored())):
        one.forget()
        assert following(one, [1, 2, 3], "theirs").next_tokens(9) == []


def test_no_client_can_name_a_namespace_that_crowds_out_anothers_texts() -> None:
    known, ours, theirs = History(), "/plumless", "/buckeroo"
    assert crc32(ours.encode()) == crc32(theirs.encode())
    texts = [array_of(list(range(10 * number, 10 * number + 6))) for number in range(8)]
    for namespace in (ours, *[theirs] * CHAIN_DEPTH):
        for text in texts:
            known.add(namespace, text)
    found = [following(known, text[:3].tolist(), ours).match_length for text in texts]
    assert sum(map(bool, found)) > len(texts) // 2
