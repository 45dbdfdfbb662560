"""Pins prefixes by name: finds the nodes to pin, bounds what explicit pins take, moves a session's pin along."""

import contextlib

from cache.errors import PinLimit
from cache.pager import Pager
from cache.pins import PinName, Pins, choose_nodes, path_nodes
from cache.sizes import SequenceSizes
from cache.slots import Slot
from cache.tokens import TokenArray
from cache.trie import Node, PrefixTrie


class Pinning:
    """Pins what tries hold of given tokens. Worker thread only."""

    def __init__(self, pager: Pager, sizes: SequenceSizes) -> None:
        self.pins = Pins()
        self._pager = pager
        self._sizes = sizes

    def pin(self, name: PinName, tokens: TokenArray) -> int:
        """Pins what is stored of `tokens` until it is unpinned; returns how many tokens that are.

        Raises PinLimit if explicit pins would take more than half of the budget.
        """
        trie = self._pager.trie(name.namespace)
        match = trie.match(tokens)
        if match.path:
            self._pin_path(name, trie, match.path)
        return match.length

    def pin_until(self, name: PinName, tokens: TokenArray, until: float) -> None:
        """Pins what is stored of `tokens` softly, up to a reading of the caller's clock."""
        assert name.is_soft
        trie = self._pager.trie(name.namespace)
        path = trie.match(tokens).path
        if path:
            self.pins.hold(name, trie, choose_nodes(path), until)

    def follow(self, slot: Slot) -> None:
        """Moves the pin of a slot's session, if it has one, to the end of its sequence."""
        name = PinName(slot.namespace, slot.turn.session_id or "")
        if name in self.pins and slot.tip.parent is not None:
            with contextlib.suppress(PinLimit):  # the earlier part of the session stays pinned
                self._pin_path(name, self._pager.trie(slot.namespace), slot.tip.path())

    def _pin_path(self, name: PinName, trie: PrefixTrie, path: list[Node]) -> None:
        nodes = choose_nodes(path)
        num_bytes = self._bytes_of({*nodes, *self.pins.explicit(but=name)})
        limit = self._pager.ledger.budget_bytes // 2
        if num_bytes > limit:
            raise PinLimit(num_bytes, limit)
        self.pins.hold(name, trie, nodes)

    def _bytes_of(self, nodes: set[Node]) -> int:
        """Returns about how many bytes pins on `nodes` keep: the spans of their paths and their own snapshots."""
        snapshots = sum(node.snapshot.num_bytes for node in nodes if node.snapshot is not None)
        return snapshots + sum(
            node.span.num_bytes if node.span is not None else int(len(node.tokens) * self._sizes.bytes_per_token)
            for node in path_nodes(nodes)
        )
