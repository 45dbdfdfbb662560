"""What the state on each node of the tries is worth now: the figures from which `cache.eviction` decides."""

from collections.abc import Iterable, Iterator

from cache.eviction import Candidate, Chance, chance_to_go_on
from cache.layers import Layout
from cache.placement import RestorePointKind
from cache.snapshots import Snapshot
from cache.trie import Node, PrefixTrie

_MANY = -1
"""Several sessions."""
_HEADS = (RestorePointKind.SYSTEM_END, RestorePointKind.BRANCH, RestorePointKind.INTERVAL)
"""Points at which no conversation ends by itself."""


class Survey:
    """A look at all nodes, to give some up. `now` is the reading of the clock of `Node.last_used`.

    It may be used again at a later `now`: what it does not know of nodes made since, or used, makes them look older.
    """

    def __init__(
        self, layout: Layout, tries: Iterable[PrefixTrie], now: int, *, guards_sessions: bool = False
    ) -> None:
        """With `guards_sessions` the ends of sessions go last; not of those that nobody waits for."""
        self._layout = layout
        self.now = now
        self.guards_sessions = guards_sessions
        self._last_used: dict[Node, int] = {}
        """When a node, or anything behind it, was used."""
        self._latest: dict[tuple[str, str], int] = {}
        """When a session, by namespace and name, was where it was last."""
        self._newer: dict[Node, Node] = {}
        """Where only one conversation goes on behind a node: its next restore point there, or its end."""
        self._owner: dict[Node, str | int] = {}
        """Whose ends are behind a node: a session's, one without a session's, or `_MANY`."""
        self._needs_snapshots = layout.needs_snapshots
        self._droppable = list[tuple[PrefixTrie, Node]]()
        for trie in tries:
            self._look_at(trie)

    def _look_at(self, trie: PrefixTrie) -> None:
        nodes, used, owners, newer = list(trie.nodes()), self._last_used, self._owner, self._newer
        for node in reversed(nodes):
            if len(node.children) == 1:
                (child,) = node.children.values()
                newer[node] = child if child.snapshot is not None else newer.get(child, child)
            elif not node.children:
                owners[node] = node.session_id or id(node)
                if node.session_id is not None:
                    session = trie.namespace, node.session_id
                    self._latest[session] = max(self._latest.get(session, 0), node.last_used)
            last_used, owner, above = max(node.last_used, used.get(node, 0)), owners[node], node.parent
            used[node] = last_used
            if above is not None and above.parent is not None:
                if last_used > used.get(above, 0):
                    used[above] = last_used
                if owners.setdefault(above, owner) != owner:
                    owners[above] = _MANY
        self._droppable += [(trie, node) for node in nodes if is_droppable(node)]

    def candidates(self) -> Iterator[tuple[PrefixTrie, Candidate]]:
        """Yields everything that could be given up when the survey was made."""
        for trie, node in self._droppable:
            yield trie, self.candidate(trie, node)

    def candidate(self, trie: PrefixTrie, node: Node) -> Candidate:
        """Returns what giving up a node that can be dropped would free and cost."""
        return self._of_snapshot(trie, node) if node.children else self._of_leaf(trie, node)

    def _of_snapshot(self, trie: PrefixTrie, node: Node) -> Candidate:
        num_bytes = node.snapshot.num_bytes if node.snapshot is not None else 0
        age, base = self.now - self._last_used.get(node, node.last_used), self._base(node)
        chance = self._chance_within(node) if base or not node.last_used else Chance.FIRST
        return Candidate((trie, node), num_bytes, node.stop - base, age, chance, node.is_explicit)

    def _of_leaf(self, trie: PrefixTrie, node: Node) -> Candidate:
        age = self.now - node.last_used
        if not self._is_point(node):
            return Candidate((trie, node), node.num_bytes, 0, age, Chance.UNUSABLE)
        base, chance = self._base(node), self._chance_at_end(trie, node)
        if chance is Chance.CURRENT and not base and node.kind in _HEADS:
            chance = Chance.REST
        is_session = node.session_id is not None and not node.is_background and chance is not Chance.LEFT
        return Candidate(
            (trie, node),
            self._tail_bytes(node),
            node.stop - base,
            age,
            chance_to_go_on(node.stop) if chance is Chance.CURRENT else chance,
            is_guarded=self.guards_sessions and is_session,
        )

    def _chance_within(self, node: Node) -> Chance:
        if self._owner.get(node) == _MANY or node.kind is RestorePointKind.SYSTEM_END:
            return Chance.SHARED
        return self._chance_behind_end(node) if node.last_used else Chance.SUPERSEDED

    def _chance_behind_end(self, node: Node) -> Chance:
        prompt_end, newer = RestorePointKind.PROMPT_END, self._newer.get(node)
        if newer is not None and not newer.children:
            return Chance.PROMPT if node.kind is prompt_end else Chance.LANDING
        is_landing = newer is not None and newer.kind is prompt_end and self._is_last_point(newer)
        return Chance.LANDING if is_landing else Chance.EARLIER

    def _is_last_point(self, node: Node) -> bool:
        newer = self._newer.get(node)
        return newer is not None and not newer.children

    def _chance_at_end(self, trie: PrefixTrie, node: Node) -> Chance:
        if node.session_id is None:
            return Chance.PROBATION if node.is_on_probation else Chance.CURRENT
        latest = self._latest.get((trie.namespace, node.session_id), 0)
        return Chance.CURRENT if node.last_used >= latest else Chance.LEFT

    def _is_point(self, node: Node) -> bool:
        """Whether sequences can be restored where a node ends."""
        if not self._needs_snapshots:
            return True
        snapshot = node.snapshot
        return isinstance(snapshot, Snapshot) and (snapshot.points is not None or not self._layout.has_points)

    def _base(self, node: Node) -> int:
        """Returns the nearest restore point before a node's end that does not go with it."""
        if not self._needs_snapshots:
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
        while node is not None and self._needs_snapshots and not self._is_point(node):
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
