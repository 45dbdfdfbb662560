"""What the state on each node of the tries is worth now: the figures from which `cache.eviction` decides."""

from collections.abc import Iterable, Iterator

from cache.eviction import Candidate, Chance
from cache.layers import Layout
from cache.placement import RestorePointKind
from cache.snapshots import Snapshot
from cache.trie import Node, PrefixTrie


class Survey:
    """A look at all nodes, for one round of giving up. `now` is the reading of the clock of `Node.last_used`."""

    def __init__(self, layout: Layout, tries: Iterable[PrefixTrie], now: int) -> None:
        self._layout = layout
        self._now = now
        self._last_used: dict[Node, int] = {}
        """When a node, or anything behind it, was used."""
        self._latest: dict[tuple[str, str], int] = {}
        """When a session, by namespace and name, was where it was last."""
        self._sessions: dict[Node, set[str | int]] = {}
        """Up to two of the sessions whose ends are behind a node; each end without a session counts as one."""
        self._droppable = list[tuple[PrefixTrie, Node]]()
        for trie in tries:
            self._look_at(trie)

    def _look_at(self, trie: PrefixTrie) -> None:
        nodes = list(trie.nodes())
        used = self._last_used
        for node in reversed(nodes):
            used[node] = max(used.get(node, 0), node.last_used)
            ends = self._sessions.setdefault(node, set())
            if not node.children:
                ends.add(node.session_id or id(node))
            if node.parent is not None:
                used[node.parent] = max(used.get(node.parent, 0), used[node])
                above = self._sessions.setdefault(node.parent, set())
                if len(above) < 2:
                    above |= ends
            if not node.children and node.session_id is not None:
                session = trie.namespace, node.session_id
                self._latest[session] = max(self._latest.get(session, 0), node.last_used)
        self._droppable += [(trie, node) for node in nodes if is_droppable(node)]

    def candidates(self) -> Iterator[tuple[PrefixTrie, Candidate]]:
        """Yields everything that could be given up when the survey was made."""
        for trie, node in self._droppable:
            yield trie, self.candidate(trie, node)

    def candidate(self, trie: PrefixTrie, node: Node) -> Candidate:
        """Returns what giving up a node that can be dropped would free and cost."""
        if node.children:
            num_bytes = node.snapshot.num_bytes if node.snapshot is not None else 0
            age, chance = self._now - self._last_used[node], self._chance_within(node)
            return Candidate((trie, node), num_bytes, node.stop - self._base(node), age, chance, node.is_explicit)
        age = self._now - node.last_used
        if not self._is_point(node):
            return Candidate((trie, node), node.num_bytes, 0, age, Chance.UNUSABLE)
        num_tokens, chance = node.stop - self._base(node), self._chance_at_end(trie, node)
        return Candidate((trie, node), self._tail_bytes(node), num_tokens, age, chance)

    def _chance_within(self, node: Node) -> Chance:
        if len(self._sessions.get(node, ())) > 1 or node.kind is RestorePointKind.SYSTEM_END:
            return Chance.SHARED
        return Chance.EARLIER if node.last_used else Chance.SUPERSEDED

    def _chance_at_end(self, trie: PrefixTrie, node: Node) -> Chance:
        if node.session_id is None:
            return Chance.PROBATION if node.is_on_probation else Chance.CURRENT
        latest = self._latest.get((trie.namespace, node.session_id), 0)
        return Chance.CURRENT if node.last_used >= latest else Chance.LEFT

    def _is_point(self, node: Node) -> bool:
        """Whether sequences can be restored where a node ends."""
        if not self._layout.needs_snapshots:
            return True
        snapshot = node.snapshot
        return isinstance(snapshot, Snapshot) and (snapshot.points is not None or not self._layout.has_points)

    def _base(self, node: Node) -> int:
        """Returns the nearest restore point before a node's end that does not go with it."""
        if not self._layout.needs_snapshots:
            return node.start
        above = node.parent
        while above is not None and above.parent is not None:
            if self._is_point(above):
                return above.stop
            above = above.parent
        return 0

    def _tail_bytes(self, leaf: Node) -> int:
        """Returns the bytes of a leaf, with those above it that would be of no use without it."""
        num_bytes, node = leaf.num_bytes, leaf.parent
        while node is not None and self._layout.needs_snapshots and not self._is_point(node):
            if len(node.children) > 1 or node.num_slots:
                break
            num_bytes, node = num_bytes + node.num_bytes, node.parent
        return num_bytes


def is_droppable(node: Node) -> bool:
    """Whether a node's snapshot, or all of a leaf, can be given up now."""
    if node.num_pins:
        return False
    return node.snapshot is not None if node.children else is_free_leaf(node)


def is_free_leaf(node: Node) -> bool:
    """Whether a node is a leaf that no slot needs."""
    return node.parent is not None and not node.children and node.num_slots == 0 and node.home is None
