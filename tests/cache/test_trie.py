"""The trie by example, and at random against a list of sequences that knows nothing of edges."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache.slots import Lookup
from cache.trie import Node, Place, PrefixTrie
from cache.types import TokenArray

BYTES_PER_TOKEN = 7
SPLIT_COST = 3
"""Bytes a span takes whatever its length, so that splitting and joining change the sum."""


@dataclass(frozen=True)
class _Text:
    """A span that is the tokens themselves."""

    start: int
    tokens: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    @property
    def num_bytes(self) -> int:
        return SPLIT_COST + BYTES_PER_TOKEN * len(self.tokens)

    def split(self, offset: int) -> "tuple[_Text, _Text]":
        cut = offset - self.start
        return _Text(self.start, self.tokens[:cut]), _Text(offset, self.tokens[cut:])

    def join(self, later: "_Text") -> "_Text":
        assert later.start == self.stop
        return _Text(self.start, self.tokens + later.tokens)


@dataclass(frozen=True)
class _Mark:
    """A snapshot that is valid at one offset and can leave half of itself at an earlier one."""

    num_bytes: int
    is_divisible: bool = False
    window = None

    def split(self, offset: int) -> "tuple[_Mark | None, _Mark]":
        if not self.is_divisible:
            return None, self
        return _Mark(self.num_bytes // 2), _Mark(self.num_bytes - self.num_bytes // 2)


Text: Any = _Text
Mark: Any = _Mark
"""For the type checker: in place of a `Segment`, and of a `Snapshot`."""


def ids(*tokens: int) -> TokenArray:
    return np.array(tokens, np.int32)


def text_of(node: Node) -> list[int]:
    return [token for step in node.path() for token in step.tokens.tolist()]


def insert(trie: PrefixTrie, *tokens: int) -> Node:
    """Adds a sequence with stored spans and returns where it ends."""
    node = trie.extend(trie.root, ids(*tokens))
    for step in node.path():
        if step.span is None and step.home is None:
            trie.store(step, Text(step.start, tuple(step.tokens.tolist())))
    trie.check()
    return node


# ------------------------------------------------------------------------------------------------------ examples


def test_the_edges_of_a_trie_own_their_tokens() -> None:
    trie, tokens = PrefixTrie(), ids(1, 2, 3)
    trie.store(trie.extend(trie.root, tokens), Text(0, (1, 2, 3)))
    tokens[:] = 9
    assert trie.match(ids(1, 2, 3)).length == 3


@pytest.mark.parametrize("offset", [0, 2, 5, 9])
def test_an_edge_is_split_only_inside(offset: int) -> None:
    trie = PrefixTrie()
    insert(trie, 1, 2)
    leaf = insert(trie, 1, 2, 3, 4, 5)
    with pytest.raises(ValueError, match="cannot split"):
        trie.split(leaf, offset)
    with pytest.raises(ValueError, match="cannot split"):
        trie.split(trie.root, 0)


def chain(trie: PrefixTrie) -> tuple[Node, Node]:
    """Returns a parent [1, 2] and its only child [3]."""
    parent = insert(trie, 1, 2)
    return parent, insert(trie, 1, 2, 3)


def live_chain(trie: PrefixTrie) -> tuple[Node, Node]:
    nodes = chain(trie)
    for node in nodes:
        trie.make_live(node, "slot")
    return nodes


@pytest.mark.parametrize(
    "reason", ["snapshot", "explicit", "slot", "pin", "volatile", "sibling", "stored", "other home", "top"]
)
def test_what_needs_the_border_keeps_it(reason: str) -> None:
    trie = PrefixTrie()
    parent, child = live_chain(trie)
    match reason:
        case "snapshot":
            trie.snap(parent, Mark(1))
        case "explicit":
            parent.is_explicit = True
        case "slot":
            parent.num_slots = 1
        case "pin":
            parent.num_pins = 1
        case "volatile":
            child.is_volatile = True
        case "sibling":
            trie.make_live(trie.extend(parent, ids(4)), "slot")
        case "stored":
            for node in (parent, child):
                trie.store(node, Text(node.start, tuple(node.tokens.tolist())))
        case "other home":
            trie.make_live(parent, "another")
        case "top":
            child = parent
    assert not trie.try_absorb_parent(child)
    trie.check()


@pytest.mark.parametrize("damage", ["parent", "edge", "key", "both", "neither", "span", "slots", "count"])
def test_check_sees_damage(damage: str) -> None:
    trie = PrefixTrie()
    parent, child = chain(trie)
    match damage:
        case "parent":
            child.start += 1
        case "edge":
            child.tokens = ids()
        case "key":
            child.tokens = ids(9)
        case "both":
            child.home = "slot"
        case "neither":
            parent.span = None
        case "span":
            child.span = Text(1, (3,))
        case "slots":
            child.num_slots = -1
        case "count":
            trie.num_nodes += 1
    with pytest.raises(AssertionError):
        trie.check()


def test_it_tells_of_every_node_that_is_not_as_it_was() -> None:
    told: list[Node] = []
    snapped: list[Node] = []
    trie = PrefixTrie(changed=told.append, snapped=snapped.append)

    def news() -> set[Node]:
        found = set(told)
        told.clear()
        return found

    end = trie.extend(trie.root, ids(1, 2, 3, 4))
    assert news() == {trie.root, end}
    trie.make_live(end, "a")
    assert news() == {end}
    trie.store(end, Text(0, (1, 2, 3, 4)))
    assert news() == {end}
    upper = trie.split(end, 2)
    assert news() == {upper, end}
    trie.store(upper, Text(0, (1, 2)))
    assert news() == {upper}, "what goes with the end behind it is not the same"
    trie.snap(upper, Mark(5))
    trie.snap(upper, None)
    assert not news() and snapped == [upper, upper]
    branch = trie.extend(upper, ids(9))
    assert news() == {upper, branch}
    trie.remove(branch)
    assert news() == {upper, branch}
    for node in (upper, end):
        trie.make_live(node, "a")
    assert news() == {upper, end}
    assert trie.try_absorb_parent(end)
    assert news() == {upper, end}


# ------------------------------------------------------------------------------------------------------ at random


class TrieMachine(RuleBasedStateMachine):
    """The model: the set of all prefixes that can be found, and the bytes of everything stored."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self.trie = PrefixTrie(self._count)
        self.known: set[tuple[int, ...]] = {()}
        self.places: list[tuple[list[int], Place[Node]]] = []

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        assert self.num_bytes >= 0

    def _pick(self, which: int) -> Node:
        nodes = sorted(self.trie.nodes(), key=text_of)
        return nodes[which % len(nodes)]

    @rule(tokens=st.lists(st.integers(1, 3), min_size=1, max_size=8), home=st.sampled_from([None, None, "a", "b"]))
    def extend(self, tokens: list[int], home: str | None) -> None:
        self._extend_below(self.trie.root, tokens, home)

    @precondition(lambda self: self.trie.num_nodes)
    @rule(
        which=st.integers(0, 50),
        tokens=st.lists(st.integers(1, 2), min_size=1, max_size=5),
        home=st.sampled_from([None, "a"]),
    )
    def extend_below(self, which: int, tokens: list[int], home: str | None) -> None:
        self._extend_below(self._pick(which), tokens, home)

    def _extend_below(self, node: Node, tokens: list[int], home: str | None) -> None:
        before, homes = text_of(node), {id(node): node.home for node in self.trie.nodes()}
        end = self.trie.extend(node, ids(*tokens))
        assert text_of(end) == before + tokens
        for step in end.path():
            if step.span is None and step.home is None:
                assert id(step) not in homes or homes[id(step)] is None
                if home is None:
                    self.trie.store(step, Text(step.start, tuple(step.tokens.tolist())))
                else:
                    self.trie.make_live(step, home)
        whole = tuple(before + tokens)
        self.known |= {whole[:length] for length in range(len(whole) + 1)}

    @precondition(lambda self: any(len(node.tokens) > 1 for node in self.trie.nodes()))
    @rule(which=st.integers(0, 50), cut=st.integers(0, 7))
    def split(self, which: int, cut: int) -> None:
        nodes = [node for node in sorted(self.trie.nodes(), key=text_of) if len(node.tokens) > 1]
        node = nodes[which % len(nodes)]
        text, offset = text_of(node), node.start + 1 + cut % (len(node.tokens) - 1)
        upper = self.trie.split(node, offset)
        assert text_of(upper) == text[:offset]
        assert text_of(node) == text

    @precondition(lambda self: self.trie.num_nodes)
    @rule(which=st.integers(0, 50))
    def absorb_parent(self, which: int) -> None:
        node = self._pick(which)
        text = text_of(node)
        self.trie.try_absorb_parent(node)
        assert text_of(node) == text

    @precondition(lambda self: self.trie.num_nodes)
    @rule(which=st.integers(0, 50))
    def remove(self, which: int) -> None:
        node = self._pick(which)
        if node.children or node.num_slots:
            with pytest.raises(ValueError, match="not a removable leaf"):
                self.trie.remove(node)
            return
        text, start = tuple(text_of(node)), node.start
        self.trie.remove(node)
        self.known -= {text[:length] for length in range(start + 1, len(text) + 1)}

    @precondition(lambda self: self.trie.num_nodes)
    @rule(which=st.integers(0, 50), home=st.sampled_from(["a", "b"]))
    def make_live(self, which: int, home: str) -> None:
        self.trie.make_live(self._pick(which), home)

    @precondition(lambda self: any(node.home for node in self.trie.nodes()))
    @rule(which=st.integers(0, 50))
    def store(self, which: int) -> None:
        nodes = [node for node in sorted(self.trie.nodes(), key=text_of) if node.home]
        node = nodes[which % len(nodes)]
        self.trie.store(node, Text(node.start, tuple(node.tokens.tolist())))

    @precondition(lambda self: self.trie.num_nodes)
    @rule(which=st.integers(0, 50), mark=st.none() | st.builds(_Mark, st.integers(1, 20), st.booleans()))
    def snap(self, which: int, mark: Any) -> None:
        self.trie.snap(self._pick(which), mark)

    @precondition(lambda self: self.trie.num_nodes)
    @rule(which=st.integers(0, 50), is_explicit=st.booleans(), num_slots=st.integers(0, 1))
    def mark(self, which: int, is_explicit: bool, num_slots: int) -> None:
        node = self._pick(which)
        node.is_explicit, node.num_slots = is_explicit, num_slots

    @rule(tokens=st.lists(st.integers(1, 3), max_size=10))
    def match(self, tokens: list[int]) -> None:
        match = self.trie.match(ids(*tokens))
        assert match.length == max(n for n in range(len(tokens) + 1) if tuple(tokens[:n]) in self.known)
        found = [token for node in match.node.path() for token in node.tokens.tolist()]
        assert found[: match.length] == tokens[: match.length]
        assert not match.node.path() or match.node.path()[-1].start < match.length <= match.node.path()[-1].stop

    @rule(tokens=st.lists(st.integers(1, 3), min_size=1, max_size=10), cut=st.integers(0, 9))
    def find(self, tokens: list[int], cut: int) -> None:
        half = self.trie.follow(Place(self.trie.root, 0), ids(*tokens[:cut]))
        self.places.append((tokens, half))

    @rule(which=st.integers(0, 50))
    def go_on_from_a_place(self, which: int) -> None:
        there = [found for found in self.places if not found[1].is_gone]
        if there:
            tokens, place = there[which % len(there)]
            whole, match = self.trie.follow(place, ids(*tokens[place.length :])), self.trie.match(ids(*tokens))
            assert (whole.node.path(), whole.length) == (match.node.path(), match.length)

    @invariant()
    def places_stay_true(self) -> None:
        for tokens, place in self.places:
            if not place.is_gone:
                edges = [*reversed(list(place.edges(0, place.length)))]
                assert [token for node in edges for token in node.tokens.tolist()][: place.length] == (
                    tokens[: place.length]
                )
                assert not edges or edges[-1].start < place.length <= edges[-1].stop

    @invariant()
    def holds_exactly_what_is_known(self) -> None:
        self.trie.check()
        found: set[tuple[int, ...]] = {()}
        for node in self.trie.nodes():
            text = tuple(text_of(node))
            found |= {text[:length] for length in range(node.start + 1, node.stop + 1)}
            if node.span is not None:
                assert node.span == Text(node.start, text[node.start :])
        assert found == self.known
        assert self.num_bytes == sum(node.num_bytes for node in self.trie.nodes())


TestTrieAtRandom: Any = TrieMachine.TestCase
TestTrieAtRandom.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(lambda tokens: np.array(tokens, np.int32))


def add(trie: PrefixTrie, tokens: TokenArray) -> None:
    for node in trie.extend(trie.root, tokens).path():
        trie.make_live(node, "slot")


def remove_one(trie: PrefixTrie, which: int) -> None:
    leaves = [node for node in trie.nodes() if not node.children]
    if leaves:
        trie.remove(leaves[which % len(leaves)])


def join_all(trie: PrefixTrie) -> None:
    for node in list(trie.nodes()):
        while node.parent is not None and trie.try_absorb_parent(node):
            pass


@given(prompt=TEXTS, steps=st.lists(st.one_of(TEXTS, st.integers(0, 5), st.none()), max_size=20))
def test_a_lookup_that_is_carried_along_finds_what_a_new_one_finds(
    prompt: TokenArray, steps: list[TokenArray | int | None]
) -> None:
    trie, lookup = PrefixTrie(), Lookup(prompt)
    for step in steps:
        if step is None:
            join_all(trie)
        elif isinstance(step, int):
            remove_one(trie, step)
        else:
            add(trie, step)
        assert lookup.match(trie) == Lookup(prompt).match(trie)
