"""The order in which stored state is evicted, fair among namespaces, updated as nodes change. Pure.

A node is valued again only when a change may have lowered its value. A risen value is noticed before eviction, and
the node put back. Invariant: no value in the order is too high. A namespace's share is the budget divided by the
number of namespaces that hold anything; those over it lose state first.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Set

from cache.budget import Ledger
from cache.eviction.value import Candidate, Queue, Valuation
from cache.trie import Node
from cache.types import LayerKinds


def over_share(held_bytes: Mapping[str, int], budget_bytes: int) -> set[str]:
    """Namespaces over their share; none if only one holds anything."""
    active = {name: num_bytes for name, num_bytes in held_bytes.items() if num_bytes > 0}
    if len(active) < 2:
        return set()
    return {name for name, num_bytes in active.items() if num_bytes * len(active) > budget_bytes}


class Shares:
    """Each namespace's bytes, and which are over their share."""

    def __init__(self, ledger: Ledger) -> None:
        self.held: dict[str, int] = {}
        self._ledger = ledger
        self._over: set[str] | None = set()
        """None when outdated."""
        self._budget_bytes = ledger.budget_bytes

    def add(self, namespace: str, num_bytes: int) -> None:
        """Counts a namespace's new bytes; negative for released ones."""
        before, held = len(self.held), self.held.pop(namespace, 0) + num_bytes
        assert held >= 0, f"more bytes were dropped in {namespace!r} than stored"
        if held:
            self.held[namespace] = held
        if len(self.held) != before:
            self._over = None
        elif self._over is not None and before > 1:
            is_over = held * before > self._budget_bytes
            (self._over.add if is_over else self._over.discard)(namespace)

    def over(self) -> set[str]:
        """The namespaces over their share. Do not change the set."""
        if self._over is None or self._budget_bytes != self._ledger.budget_bytes:
            self._budget_bytes = self._ledger.budget_bytes
            self._over = over_share(self.held, self._budget_bytes)
        return self._over


class FairQueue:
    """Candidates of all namespaces, first those over their share."""

    def __init__(self, find_over_share: Callable[[], set[str]]) -> None:
        """Calls `find_over_share` before each candidate: evictions change the answer."""
        self._find_over_share = find_over_share
        self._queues: dict[str, Queue] = {}
        self._over, self._all = _Ranking(self._queues), _Ranking(self._queues)
        self._num_candidates = 0
        self._sweeping: Iterator[tuple[int, int]] = iter(())

    def __len__(self) -> int:
        return self._num_candidates

    def push(self, namespace: str, candidate: Candidate) -> None:
        """See `Queue.push`."""
        if candidate.num_bytes <= 0:
            return
        if namespace not in self._queues:
            self._queues[namespace] = Queue()
            if len(self._queues) == 2:
                # Candidates added while there was only one namespace were not ranked.
                self._over.forget()
                self._all.forget()
        self._queues[namespace].push(candidate)
        self._num_candidates += 1
        if len(self._queues) > 1:
            self._over.pushed(namespace)
            self._all.pushed(namespace)

    def pop(self, now: int) -> Candidate | None:
        """Removes and returns the next candidate, if any."""
        if len(self._queues) == 1:
            (only,) = self._queues.values()
            candidate = only.pop(now)
        else:
            candidate = self._over.pop(self._find_over_share(), now) or self._all.pop(self._queues.keys(), now)
        self._num_candidates -= candidate is not None
        return candidate

    def sweep(self, is_current: Callable[[Candidate], bool], num_candidates: int) -> None:
        """Removes outdated candidates among the next `num_candidates` or a few more; repeated calls reach all."""
        has_restarted = False
        while num_candidates > 0:
            step = next(self._sweeping, None)
            if step is not None:
                num_seen, num_removed = step
                num_candidates -= num_seen
                self._num_candidates -= num_removed
            elif has_restarted:
                return
            else:
                self._sweeping, has_restarted = self._sweep_all(is_current), True

    def _sweep_all(self, is_current: Callable[[Candidate], bool]) -> Iterator[tuple[int, int]]:
        for queue in list(self._queues.values()):
            yield from queue.sweep(is_current)


class _Ranking:
    """All namespaces are ranked again when the clock moves."""

    def __init__(self, queues: dict[str, Queue]) -> None:
        """Removes emptied queues from the caller's `queues`."""
        self._queues = queues
        self._now = -1
        self._names: set[str] = set()
        self._firsts: list[tuple[tuple[bool, float], str]] = []
        """A heap; no rank in it is too high."""

    def pushed(self, name: str) -> None:
        if name in self._names:
            heapq.heappush(self._firsts, (self._queues[name].rank(self._now), name))

    def forget(self) -> None:
        self._now, self._names, self._firsts = -1, set(), []

    def pop(self, names: Set[str], now: int) -> Candidate | None:
        if now != self._now or not names <= self._names:
            self._rank(names, now)
        while self._firsts:
            rank, name = self._firsts[0]
            queue = self._queues.get(name)
            if queue is None or not len(queue):
                heapq.heappop(self._firsts)
                self._queues.pop(name, None)
            elif name not in names:
                heapq.heappop(self._firsts)
                self._names.discard(name)
            elif (risen := queue.rank(now)) != rank:
                heapq.heapreplace(self._firsts, (risen, name))
            else:
                return queue.pop(now)
        return None

    def _rank(self, names: Set[str], now: int) -> None:
        self._now, self._names = now, set(names)
        filled = [name for name in names if name in self._queues and len(self._queues[name])]
        self._firsts = [(self._queues[name].rank(now), name) for name in filled]
        heapq.heapify(self._firsts)


MANY_CHANGED = 64
"""More changed nodes are valued early: a later eviction takes less time."""
MIN_GARBAGE = 1024
"""Outdated entries that may stay."""
SWEPT_PER_CHANGE = 4
"""Entries checked per changed node while half of all are outdated."""


class EvictionOrder:
    """All namespaces' candidates, in order. Worker thread only.

    Must be told of every change of a node's state, children or use. Pinned nodes and those in slots are in the order
    too: the caller puts them back.
    """

    def __init__(self, layout: LayerKinds, find_over_share: Callable[[], set[str]]) -> None:
        self._valuation = Valuation(layout)
        self._queue = FairQueue(find_over_share)
        self._latest: dict[Node, Candidate] = {}
        self._changed: dict[Node, str] = {}

    def changed(self, namespace: str, node: Node) -> None:
        """Records a change of a node or a child, or that the node left the trie."""
        if node.parent is not None:
            self._changed[node] = namespace
        else:
            self._changed.pop(node, None)
            self._latest.pop(node, None)

    def snapped(self, namespace: str, node: Node) -> None:
        """Records a new snapshot: nodes below may be evaluated from there."""
        self.changed(namespace, node)
        for below in self._valuation.evaluated_from(node):
            self.changed(namespace, below)

    def used(self, namespace: str, node: Node, now: int) -> None:
        """Records a sequence restored at a node, or recorded up to it."""
        node.last_used = now
        above: Node | None = node
        while above is not None and above.last_used_behind < now:
            above.last_used_behind = now
            above = above.parent
        self.changed(namespace, node)

    def ended(self, namespace: str, node: Node) -> None:
        """A node's session now ends there."""
        for left in self._valuation.record_session_end(namespace, node):
            self.changed(namespace, left)

    def end_of(self, namespace: str, session_id: str | None) -> Node | None:
        """See `Valuation.end_of`."""
        return self._valuation.end_of(namespace, session_id)

    def refresh_if_many_changed(self) -> None:
        """Values changed nodes if many."""
        if len(self._changed) > MANY_CHANGED:
            self._refresh()

    def pop(self, now: int) -> Candidate | None:
        """Removes and returns the next candidate, with its current value."""
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
        """A popped candidate, unless its node was evicted."""
        namespace, node = candidate.key
        if _is_candidate(node) and node not in self._latest:
            self.changed(namespace, node)

    def push(self, candidate: Candidate) -> None:
        """See `Queue.push`."""
        namespace, node = candidate.key
        if candidate.num_bytes > 0:
            self._latest[node] = candidate
            self._queue.push(namespace, candidate)

    def check(self, nodes: Iterable[tuple[str, Node]]) -> None:
        """Asserts that all evictable nodes are here, no value too high."""
        pending = self._find_stale()
        for namespace, node in nodes:
            if _is_candidate(node) and node not in pending:
                held, fresh = self._latest.get(node), self._valuation.candidate(namespace, node)
                assert held is not None or fresh.num_bytes <= 0, f"{node} could be evicted and is not in the order"
                is_lower = held is None or fresh.num_bytes <= 0 or held.weight <= fresh.weight
                assert is_lower and (held is None or held.last_used <= fresh.last_used), f"{held}, by now {fresh}"

    def _find_stale(self) -> dict[Node, str]:
        """Changed nodes, and nodes whose value the changes may have lowered."""
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
            self._latest.pop(node, None)
            if _is_candidate(node):
                self.push(self._valuation.candidate(namespace, node))
        limit = 2 * len(self._latest) + MIN_GARBAGE
        self._valuation.forget_sessions(limit)
        if len(self._queue) > limit:
            self._queue.sweep(self._is_current, SWEPT_PER_CHANGE * len(changed))

    def _is_current(self, candidate: Candidate) -> bool:
        return self._latest.get(candidate.key[1]) is candidate


def _is_candidate(node: Node) -> bool:
    return node.parent is not None and (not node.children or node.snapshot is not None)
