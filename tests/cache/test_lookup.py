"""A lookup is matched again after whatever happened to the trie, and finds what a new one would."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cache.slots import Lookup
from cache.trie import PrefixTrie
from cache.types import TokenArray

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


def test_a_lookup_starts_anew_in_a_trie_that_took_the_place_of_another() -> None:
    prompt, lookup = np.arange(9, dtype=np.int32), Lookup(np.arange(9, dtype=np.int32))
    assert lookup.match(PrefixTrie()).length == 0
    trie = PrefixTrie()
    add(trie, prompt)
    assert lookup.match(trie).length == 8
