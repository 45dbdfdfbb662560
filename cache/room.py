"""What the trie stores within a budget: the tries of all namespaces, their bytes, and what goes when memory is short.

Invariant: the ledger's stored bytes are the bytes of all nodes. A leaf goes whole; of an inner node its snapshot may
go. What lives in a slot is never dropped here. Which of several candidates goes first is `cache.eviction`'s to say.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

from cache import eviction
from cache.layers import Layout
from cache.ledger import Ledger
from cache.quota import FairQueue, over_share
from cache.snapshots import Snapshot, is_leant_on
from cache.trie import Node, PrefixTrie

QUEUE_ROOM = 1000
"""Entries of the eviction queue that may be out of date before it is made anew."""


class Room:
    """Tries by namespace, with the account of their bytes. Worker thread only."""

    def __init__(self, layout: Layout, budget_bytes: int) -> None:
        self.ledger = Ledger(budget_bytes)
        self.num_evictions = 0
        """Leaves and snapshots dropped for want of memory."""
        self.evictions: Counter[str] = Counter()
        """The same by namespace, for those that hold something."""
        self.before_dropping: Callable[[PrefixTrie, Node], None] = lambda trie, node: None
        """Told of a node whose state, or whose snapshot, is about to go."""
        self._layout = layout
        self._tries: dict[str, PrefixTrie] = {}
        self._held: Counter[str] = Counter()
        """Stored bytes by namespace."""
        self._queue, self._max_queue = FairQueue(self._over_share), QUEUE_ROOM

    def trie(self, namespace: str, in_use: set[str]) -> PrefixTrie:
        """Returns the trie of a namespace; forgets empty ones, but for those `in_use`."""
        if namespace not in self._tries:
            self._tries = {name: trie for name, trie in self._tries.items() if trie.num_nodes or name in in_use}
            self.evictions = Counter({name: count for name, count in self.evictions.items() if name in self._tries})
            self._held = Counter({name: self._held[name] for name in self._tries})
            self._tries[namespace] = PrefixTrie(partial(self._store, namespace), namespace)
        return self._tries[namespace]

    def find_trie(self, namespace: str) -> PrefixTrie:
        """Returns the trie of a namespace, or an empty one that is not kept."""
        return self._tries.get(namespace) or PrefixTrie()

    def nodes(self) -> Iterator[tuple[PrefixTrie, Node]]:
        """Yields every node with its trie, parents before children."""
        for trie in self._tries.values():
            for node in trie.nodes():
                yield trie, node

    @property
    def num_nodes(self) -> int:
        """Nodes of all namespaces."""
        return sum(trie.num_nodes for trie in self._tries.values())

    def clear(self, namespace: str | None) -> None:
        """Drops everything of one namespace, or of all, that lives in no slot."""
        tries = [trie for name, trie in self._tries.items() if namespace in (None, name)]
        for trie in tries:
            while leaves := [node for node in trie.nodes() if _is_free_leaf(node)]:
                for node in leaves:
                    trie.remove(node)
            for node in trie.nodes():
                trie.snap(node, None)
        self._search(set())

    def drop_below(self, trie: PrefixTrie, top: Node) -> None:
        """Drops a node and everything under it."""
        above = top.parent
        for node in reversed(_subtree(top)):
            trie.remove(node)
        if above is not None:
            self.offer(trie, above)

    def drop_oldest(self, target_bytes: int, kept: set[Node]) -> None:
        """Drops leaves and inner snapshots until no more than `target_bytes` are charged."""
        passed_over, has_searched = list[eviction.Candidate](), False
        while self.ledger.charged_bytes > target_bytes:
            victim = self._queue.pop()
            if victim is not None:
                passed_over += self._drop(victim, kept)
            elif has_searched:
                break
            else:
                # What became droppable without being offered: a split leaves window rows on its upper half.
                self._search(kept)
                has_searched = True
        for candidate in passed_over:
            self._queue.push(candidate.key[0].namespace, candidate)

    def _drop(self, victim: eviction.Candidate, kept: set[Node]) -> list[eviction.Candidate]:
        """Drops a candidate if it still is one; returns it if it must be kept for now."""
        trie, node = victim.key
        if not _is_droppable(node) or node.last_used != victim.last_used:
            return []
        if node in kept:
            return [victim]
        if node.children:
            self._drop_snapshot(trie, node)
        else:
            self._drop_leaf(trie, node)
        return []

    def offer(self, trie: PrefixTrie, node: Node) -> None:
        """Queues a node for eviction if it can be dropped now. Called whenever one may have become so, or younger."""
        if _is_droppable(node):
            self._queue.push(trie.namespace, _candidate(trie, node))
        if len(self._queue) > self._max_queue:
            self._search(set())

    def _search(self, kept: set[Node]) -> None:
        """Queues everything that can be dropped, anew."""
        self._queue = FairQueue(self._over_share)
        for trie, node in self.nodes():
            if node not in kept and _is_droppable(node):
                self._queue.push(trie.namespace, _candidate(trie, node))
        self._max_queue = 2 * len(self._queue) + QUEUE_ROOM

    def _drop_leaf(self, trie: PrefixTrie, node: Node) -> None:
        """Drops a leaf, and what above it holds no bytes; queues what is a leaf then."""
        self._count_eviction(trie)
        self.before_dropping(trie, node)
        parent = node.parent
        trie.remove(node)
        while parent is not None and _is_free_leaf(parent) and not parent.num_bytes:
            node, parent = parent, parent.parent
            trie.remove(node)
        if parent is not None:
            self.offer(trie, parent)

    def _drop_snapshot(self, trie: PrefixTrie, node: Node) -> None:
        """Drops what of a snapshot no other leans on."""
        snapshot = node.snapshot
        assert isinstance(snapshot, Snapshot)
        rest = Snapshot(snapshot.offset, snapshot.window, None) if is_leant_on(self._layout, node) else None
        if rest is None or rest.num_bytes < snapshot.num_bytes:
            self._count_eviction(trie)
            self.before_dropping(trie, node)
            trie.snap(node, rest)
        if rest is None and node.parent is not None:
            self.offer(trie, node.parent)  # which may have been leant on from here

    def _store(self, namespace: str, num_bytes: int) -> None:
        self.ledger.store(num_bytes)
        self._held[namespace] += num_bytes

    def _over_share(self) -> set[str]:
        return over_share(self._held, self.ledger.budget_bytes)

    def _count_eviction(self, trie: PrefixTrie) -> None:
        self.num_evictions += 1
        self.evictions[trie.namespace] += 1

    def check(self) -> None:
        """Asserts the invariants."""
        for trie in self._tries.values():
            trie.check()
        stored = sum(node.num_bytes for _, node in self.nodes())
        assert stored == self.ledger.stored_bytes, f"{stored} bytes stored, {self.ledger.stored_bytes} counted"
        held = Counter(
            {trie.namespace: sum(node.num_bytes for node in trie.nodes()) for trie in self._tries.values()}
        )
        assert +held == +self._held, f"{held} stored by namespace, {self._held} counted"


def _is_droppable(node: Node) -> bool:
    if node.num_pins:
        return False
    return node.snapshot is not None if node.children else _is_free_leaf(node)


def _candidate(trie: PrefixTrie, node: Node) -> eviction.Candidate:
    if not node.children:
        return eviction.Candidate((trie, node), node.num_bytes, node.last_used, node.stop)
    num_bytes = node.snapshot.num_bytes if node.snapshot is not None else 0
    return eviction.Candidate((trie, node), num_bytes, node.last_used, node.stop, node.is_explicit)


def _is_free_leaf(node: Node) -> bool:
    return node.parent is not None and not node.children and node.num_slots == 0 and node.home is None


def _subtree(node: Node) -> list[Node]:
    """Returns a node and everything below it, parents first."""
    found = [node]
    for parent in found:
        found.extend(parent.children.values())
    return found
