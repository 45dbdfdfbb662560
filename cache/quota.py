"""Fairness among namespaces when memory is short: who must give something up first. Pure.

A namespace's fair share is the budget divided by the number of namespaces that hold anything. Nobody is kept from
holding more as long as there is room; but while one does, nothing is taken from those that do not.
"""

from collections.abc import Callable, Mapping

from cache.eviction import Candidate, Queue


def over_share(held_bytes: Mapping[str, int], budget_bytes: int) -> set[str]:
    """Returns the namespaces that hold more than their share; none as long as only one holds anything."""
    active = {name: num_bytes for name, num_bytes in held_bytes.items() if num_bytes > 0}
    if len(active) < 2:
        return set()
    return {name for name, num_bytes in active.items() if num_bytes * len(active) > budget_bytes}


class FairQueue:
    """Candidates of all namespaces. Those of namespaces over their share go first, in the order of `Queue`."""

    def __init__(self, find_over_share: Callable[[], set[str]]) -> None:
        """`find_over_share` is asked before each candidate, since each one that goes changes the answer."""
        self._find_over_share = find_over_share
        self._queues: dict[str, Queue] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def push(self, namespace: str, candidate: Candidate) -> None:
        """Adds a candidate, unless it would free nothing."""
        if namespace not in self._queues:
            self._queues[namespace] = Queue()
        self._queues[namespace].push(candidate)

    def pop(self, now: int) -> Candidate | None:
        """Removes and returns what should go next at a reading of the clock of use; None if nothing is left."""
        if len(self._queues) == 1:
            (only,) = self._queues.values()
            return only.pop(now)
        self._queues = {name: queue for name, queue in self._queues.items() if len(queue)}
        over = self._find_over_share()
        first = [queue for name, queue in self._queues.items() if name in over] or list(self._queues.values())
        return min(first, key=lambda queue: queue.rank(now)).pop(now) if first else None
