"""Everything that could be given up, in the order in which to do so, kept up as things change.

Where much is stored, nobody can look at all of it for each request. So a node is looked at when something changes at
it or right behind it. That it is worth more by now than when it was looked at, because something before it has gone
or somebody else came by, is found out when its turn comes. What age does to the order is the queue's to know.
"""

from collections.abc import Callable

from cache.eviction import Candidate
from cache.layers import Layout
from cache.quota import FairQueue
from cache.trie import Node
from cache.worth import Worth

MANY_CHANGED = 64
"""So many changed nodes are looked at though nothing has to go, to have less to do when something has."""
MIN_GARBAGE = 1024
"""Outdated entries that are never worth clearing away."""


class Order:
    """The order of what to give up, over the nodes of all namespaces. Worker thread only.

    It must be told of every node that `changed`: its state, its children, what is known of it. A node that is pinned,
    or in a slot, has its place in the order too; whoever pops it puts it back.
    """

    def __init__(self, layout: Layout, find_over_share: Callable[[], set[str]]) -> None:
        """For `find_over_share` see `FairQueue`."""
        self._worth = Worth(layout)
        self._find_over_share = find_over_share
        self._queue = FairQueue(find_over_share)
        self._latest: dict[Node, Candidate] = {}
        """What the queue holds that is not outdated."""
        self._changed: dict[Node, str] = {}
        """Nodes to look at, with their namespaces."""

    def changed(self, namespace: str, node: Node) -> None:
        """Says that a node, or something right behind it, is no longer as it was, or gone."""
        self._changed[node] = namespace

    def used(self, namespace: str, node: Node, now: int) -> None:
        """Says that a sequence was restored at a node, or written up to there, at a reading of the clock."""
        node.last_used = now
        above: Node | None = node
        while above is not None and above.last_used_behind < now:
            above.last_used_behind = now
            above = above.parent
        self.changed(namespace, node)

    def ended(self, namespace: str, node: Node) -> None:
        """Says that the session of a node has come to end there."""
        left = self._worth.move_end(namespace, node)
        if left is not None:
            self.changed(namespace, left)

    def keep_up(self) -> None:
        """Looks at what has changed, if that is much."""
        if len(self._changed) > MANY_CHANGED:
            self._look_at_changed()

    def pop(self, now: int) -> Candidate | None:
        """Removes and returns what should go next, as it was when it was looked at; None if nothing is left.

        `now` is the reading of the clock of `Node.last_used`.
        """
        if self._changed:
            self._look_at_changed()
        while (candidate := self._queue.pop(now)) is not None:
            if self._latest.get(candidate.key[1]) is candidate:
                del self._latest[candidate.key[1]]
                return candidate
        return None

    def put_back(self, candidate: Candidate) -> None:
        """Puts back what was popped, unless it has gone or has been looked at since."""
        node = candidate.key[1]
        if _could_go(node) and node not in self._latest:
            self.push(candidate)

    def push(self, candidate: Candidate) -> None:
        """Gives a candidate its place, as it is now."""
        namespace, node = candidate.key
        self._latest[node] = candidate
        self._queue.push(namespace, candidate)

    def refreshed(self, candidate: Candidate) -> Candidate:
        """Returns a candidate that was popped as it is now."""
        namespace, node = candidate.key
        return self._worth.of(namespace, node)

    def check(self, namespace: str, node: Node) -> None:
        """Asserts that a node that could go, pins and slots aside, is in the order or about to be looked at."""
        if _could_go(node) and node not in self._changed:
            is_there = node in self._latest or self._worth.of(namespace, node).num_bytes <= 0
            assert is_there, f"{node} could be given up and is in no order"

    def _look_at_changed(self) -> None:
        changed, self._changed = self._changed, {}
        for node, namespace in changed.items():
            self._look_at(namespace, node)
        limit = 2 * len(self._latest) + MIN_GARBAGE
        self._worth.forget_ends(limit)
        if len(self._queue) > limit:
            self._clear_away()

    def _look_at(self, namespace: str, node: Node) -> None:
        self._latest.pop(node, None)
        if _could_go(node):
            candidate = self._worth.of(namespace, node)
            if candidate.num_bytes > 0:
                self.push(candidate)

    def _clear_away(self) -> None:
        """Drops what is outdated from the queue."""
        self._queue = FairQueue(self._find_over_share)
        for candidate in self._latest.values():
            self._queue.push(candidate.key[0], candidate)


def _could_go(node: Node) -> bool:
    """Whether a node is a leaf or has a snapshot: what can be given up, unless it is pinned or in a slot."""
    return node.parent is not None and (not node.children or node.snapshot is not None)
