"""Fairness among namespaces when memory is short: from which of them to evict first. Pure.

A namespace's fair share is the budget divided by the number of namespaces that hold anything. A namespace may hold
more while memory is free. Once it is short, namespaces over their share are evicted from before all others.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping, Set

from cache.eviction.policy import Candidate, Queue
from cache.ledger import Ledger


def over_share(held_bytes: Mapping[str, int], budget_bytes: int) -> set[str]:
    """Returns the namespaces that hold more than their share; none as long as only one holds anything."""
    active = {name: num_bytes for name, num_bytes in held_bytes.items() if num_bytes > 0}
    if len(active) < 2:
        return set()
    return {name for name, num_bytes in active.items() if num_bytes * len(active) > budget_bytes}


class Shares:
    """The bytes that each namespace holds, and which of them hold more than their share."""

    def __init__(self, ledger: Ledger) -> None:
        """The budget is the ledger's."""
        self.held: dict[str, int] = {}
        """Bytes, of the namespaces that hold any."""
        self._ledger = ledger
        self._over: set[str] | None = set()
        """None if it must be computed again, because the number of namespaces or the budget has changed."""
        self._budget_bytes = ledger.budget_bytes

    def add(self, namespace: str, num_bytes: int) -> None:
        """Counts bytes that a namespace now holds; negative when it let go of them."""
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
        """Returns the namespaces over their share, as `over_share` does. Do not change the set."""
        if self._over is None or self._budget_bytes != self._ledger.budget_bytes:
            self._budget_bytes = self._ledger.budget_bytes
            self._over = over_share(self.held, self._budget_bytes)
        return self._over


class FairQueue:
    """Candidates of all namespaces; those of namespaces over their share come first. Otherwise ordered as `Queue`."""

    def __init__(self, find_over_share: Callable[[], set[str]]) -> None:
        """`find_over_share` is called before each candidate, since every eviction may change the answer."""
        self._find_over_share = find_over_share
        self._queues: dict[str, Queue] = {}
        self._over, self._all = _Ranking(self._queues), _Ranking(self._queues)
        self._num_candidates = 0
        self._sweeping: Iterator[tuple[int, int]] = iter(())
        """Goes once through all candidates; see `sweep`."""

    def __len__(self) -> int:
        return self._num_candidates

    def push(self, namespace: str, candidate: Candidate) -> None:
        """Adds a candidate, unless it would free nothing."""
        if candidate.num_bytes <= 0:
            return
        if namespace not in self._queues:
            self._queues[namespace] = Queue()
            if len(self._queues) == 2:
                # Candidates that came while there was only one namespace were not ranked.
                self._over.forget()
                self._all.forget()
        self._queues[namespace].push(candidate)
        self._num_candidates += 1
        if len(self._queues) > 1:
            self._over.pushed(namespace)
            self._all.pushed(namespace)

    def pop(self, now: int) -> Candidate | None:
        """Removes and returns what to evict next when the clock reads `now`; None if nothing is left."""
        if len(self._queues) == 1:
            (only,) = self._queues.values()
            candidate = only.pop(now)
        else:
            candidate = self._over.pop(self._find_over_share(), now) or self._all.pop(self._queues.keys(), now)
        self._num_candidates -= candidate is not None
        return candidate

    def sweep(self, is_current: Callable[[Candidate], bool], num_candidates: int) -> None:
        """Looks at the next `num_candidates` and removes the outdated ones; goes round all candidates in turn.

        It may look at a few more, since it takes whole heaps of a `Queue`.
        """
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
    """Some namespaces by the rank of what each of them would give up next, at one reading of the clock.

    All are ranked anew when the clock has moved on or a namespace has come in; else only those that have changed.
    """

    def __init__(self, queues: dict[str, Queue]) -> None:
        """`queues` is the caller's; an emptied one is removed from it."""
        self._queues = queues
        self._now = -1
        self._names: set[str] = set()
        """The namespaces that are ranked, those without candidates included."""
        self._firsts: list[tuple[tuple[bool, float], str]] = []
        """A heap. A namespace's rank in it is never too high."""

    def pushed(self, name: str) -> None:
        """Says that a namespace has one more candidate, which may be its first."""
        if name in self._names:
            heapq.heappush(self._firsts, (self._queues[name].rank(self._now), name))

    def forget(self) -> None:
        """Has all namespaces ranked anew when one is asked for."""
        self._now, self._names, self._firsts = -1, set(), []

    def pop(self, names: Set[str], now: int) -> Candidate | None:
        """Removes and returns what to evict next from some namespaces; None if they have no candidates."""
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
