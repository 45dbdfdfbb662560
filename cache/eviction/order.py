"""The order in which stored state is evicted, updated as nodes change.

There are too many nodes to value all of them for each request. So a node is valued again only when a change, of the
node or of another one, may have lowered its value. A value that has risen meanwhile, since state before the node was
evicted or another request used it, is noticed when the node is about to be evicted: it is then valued again and put
back. Invariant: no value in the order is too high. How values fall with age is for `cache.eviction.policy.Queue`.
"""

from collections.abc import Callable, Iterable

from cache.eviction.policy import Candidate
from cache.eviction.quota import FairQueue
from cache.eviction.value import Valuation
from cache.trie import Node
from cache.types import LayerKinds

MANY_CHANGED = 64
"""At this many changed nodes all are valued again, although memory is not short, so that eviction takes less time
later."""
MIN_GARBAGE = 1024
"""Up to this many outdated entries may stay in the queue."""
SWEPT_PER_CHANGE = 4
"""Entries that are looked at, to remove outdated ones, for each changed node. Only while half of all are outdated."""


class EvictionOrder:
    """Candidates for eviction from all namespaces, in order. Worker thread only.

    Whoever changes a node's state, children or use must say so. Nodes that are pinned or live in a slot are in the
    order too; whoever pops one of them puts it back.
    """

    def __init__(self, layout: LayerKinds, find_over_share: Callable[[], set[str]]) -> None:
        """For `find_over_share` see `FairQueue`."""
        self._valuation = Valuation(layout)
        self._find_over_share = find_over_share
        self._queue = FairQueue(find_over_share)
        self._latest: dict[Node, Candidate] = {}
        """The entries of the queue that are not outdated."""
        self._changed: dict[Node, str] = {}
        """Nodes to value anew, with their namespaces."""

    def changed(self, namespace: str, node: Node) -> None:
        """Says that a node or one of its children has changed, or that the node has left the trie.

        A node that has left the trie leaves the order at once: a long prompt joins hundreds of edges while it is
        evaluated, and none of them should be looked at again.
        """
        if node.parent is not None:
            self._changed[node] = namespace
        else:
            self._changed.pop(node, None)
            self._latest.pop(node, None)

    def snapped(self, namespace: str, node: Node) -> None:
        """Says that a node has another snapshot, from which nodes below it may now be evaluated."""
        self.changed(namespace, node)
        for below in self._valuation.evaluated_from(node):
            self.changed(namespace, below)

    def used(self, namespace: str, node: Node, now: int) -> None:
        """Says that a sequence was restored at a node, or recorded up to it, when the clock read `now`."""
        node.last_used = now
        above: Node | None = node
        while above is not None and above.last_used_behind < now:
            above.last_used_behind = now
            above = above.parent
        self.changed(namespace, node)

    def ended(self, namespace: str, node: Node) -> None:
        """Says that a node is now where its session ends."""
        for left in self._valuation.record_session_end(namespace, node):
            self.changed(namespace, left)

    def refresh_if_many_changed(self) -> None:
        """Values the nodes that have changed anew if they are many."""
        if len(self._changed) > MANY_CHANGED:
            self._refresh()

    def pop(self, now: int) -> Candidate | None:
        """Removes and returns what to evict next, with its value of now; None if nothing is left.

        `now` is the reading of the clock of `Node.last_used`.
        """
        if self._changed:
            self._refresh()
        while (candidate := self._queue.pop(now)) is not None:
            namespace, node = candidate.key
            if not self._is_current(candidate):
                continue
            del self._latest[node]
            fresh = self._valuation.candidate(namespace, node)
            if fresh.num_bytes > 0 and fresh.rank(now) <= candidate.rank(now):
                return fresh
            self.push(fresh)  # its value has risen: it was used since, or the restore point before it was evicted
        return None

    def put_back(self, candidate: Candidate) -> None:
        """Returns to the order what was popped, unless it was evicted."""
        namespace, node = candidate.key
        if _is_evictable(node) and node not in self._latest:
            self.changed(namespace, node)

    def push(self, candidate: Candidate) -> None:
        """Adds a candidate, unless evicting it would free nothing."""
        namespace, node = candidate.key
        if candidate.num_bytes > 0:
            self._latest[node] = candidate
            self._queue.push(namespace, candidate)

    def check(self, nodes: Iterable[tuple[str, Node]]) -> None:
        """Asserts that every node that could be evicted is in the order, and that no value there is too high.

        Computes every value. Leaves out the nodes that are to be valued anew before the next eviction.
        """
        pending = self._find_stale()
        for namespace, node in nodes:
            if _is_evictable(node) and node not in pending:
                held, fresh = self._latest.get(node), self._valuation.candidate(namespace, node)
                assert held is not None or fresh.num_bytes <= 0, f"{node} could be evicted and is not in the order"
                is_lower = held is None or fresh.num_bytes <= 0 or held.weight <= fresh.weight
                assert is_lower and (held is None or held.last_used <= fresh.last_used), f"{held}, by now {fresh}"

    def _find_stale(self) -> dict[Node, str]:
        """Returns the changed nodes and those whose value may be lower because of them, with namespaces."""
        found, seen = dict(self._changed), set[Node]()
        for node, namespace in self._changed.items():
            end = self._valuation.leaf_counting(node)
            if end is not None:
                found[end] = namespace
            found.update(dict.fromkeys(self._valuation.affected_above(node, self._latest, seen), namespace))
        return found

    def _refresh(self) -> None:
        changed, self._changed = self._find_stale(), {}
        for node, namespace in changed.items():
            self._revalue(namespace, node)
        limit = 2 * len(self._latest) + MIN_GARBAGE
        self._valuation.forget_sessions(limit)
        if len(self._queue) > limit:
            self._queue.sweep(self._is_current, SWEPT_PER_CHANGE * len(changed))

    def _revalue(self, namespace: str, node: Node) -> None:
        self._latest.pop(node, None)
        if _is_evictable(node):
            self.push(self._valuation.candidate(namespace, node))

    def _is_current(self, candidate: Candidate) -> bool:
        """Whether an entry of the queue is the newest of its node."""
        return self._latest.get(candidate.key[1]) is candidate


def _is_evictable(node: Node) -> bool:
    """Whether a node is a leaf or has a snapshot, and so can be evicted unless it is pinned or lives in a slot."""
    return node.parent is not None and (not node.children or node.snapshot is not None)
