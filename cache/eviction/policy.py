"""What to evict when memory is short: a pure order over candidates.

A candidate is a whole leaf, or the snapshot of a node with children. Its value is the chance that it is wanted again,
times the tokens to evaluate then, divided by its bytes and its age; the lowest value is evicted first. Value falls
with age because gaps between turns are long-tailed: a user who has been away for an hour will hardly be back within
the next minute. The number of uses says nothing: a conversation that has just ended was used more often than one that
has just begun.
"""

import bisect
import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

LONG_TOKENS = 70_000
"""The longer a conversation is beyond this, the less likely it goes on."""


class Chance(float, Enum):
    """How likely state is wanted when its conversation goes on, by what it is.

    Of 2 817 recorded requests of coding agents 2 624 went on from their conversation's end, 44 from the end of its
    last prompt, 86 from where that prompt had gone on itself, 8 from further back, and 55 kept no more than tools and
    system messages. The weights below are such shares, tried out and rounded; the hit rate of recorded conversations
    depends little on any of them.
    """

    REST = 30.0
    """All that is left of a conversation whose end was evicted: without it, the next turn evaluates everything."""
    FIRST = 2.0
    """The first restore point of a conversation: what is left of it once all later ones are evicted."""
    CURRENT = 1.0
    """The end of a conversation."""
    SHARED = 1 / 10
    """Where conversations part, and the end of tools and system messages."""
    EARLIER = 1 / 12
    """A restore point well before a conversation's end: seldom returned to, but useful once the end is evicted."""
    PROBATION = 1 / 16
    """The end of a prompt without a session that nothing has ever gone on from."""
    LANDING = 1 / 20
    """Where the newest turn of a conversation went on from."""
    PROMPT = 1 / 60
    """The end of the newest prompt."""
    LEFT = 1 / 100
    """An end of a session that has since gone on elsewhere."""
    SUPERSEDED = 1e-6
    """A restore point that newer ones of the same conversation replace."""
    UNUSABLE = 0.0
    """State after the last restore point: no request can be restored with it."""


def chance_to_go_on(num_tokens: int) -> float:
    """Returns the chance that a conversation of so many tokens is wanted at its end.

    Contexts are bounded, and agents begin anew before the bound. Of recorded conversations that had been silent for
    64 to 256 requests, one that was shorter than 40 000 tokens came back about six times as often, with each request
    of others, as one longer than 140 000.
    """
    return Chance.CURRENT * min(1.0, (LONG_TOKENS / max(1, num_tokens)) ** 2)


@dataclass(frozen=True)
class Candidate:
    """Something that can be evicted. `key` is the caller's handle and is not looked into."""

    key: Any
    num_bytes: int
    """Bytes that evicting it may free."""
    num_tokens: int
    """Tokens that would have to be evaluated again, from the nearest restore point that remains."""
    last_used: int
    """When it or anything below it was used, by a clock that counts requests."""
    chance: float = Chance.CURRENT
    is_explicit: bool = False
    """A client asked for it, so it is evicted after everything else."""
    is_session_end: bool = False
    """The end of a session that is no background work."""

    @cached_property
    def weight(self) -> tuple[bool, float]:
        """Its value without its age: of two that were used at the same time, the lower one is evicted first."""
        return self.is_explicit, self.chance * self.num_tokens / self.num_bytes

    def rank(self, now: int) -> tuple[bool, float]:
        """Its value at a reading of the clock. Candidates are evicted in ascending order of rank."""
        is_explicit, value = self.weight
        return is_explicit, value / max(1, now - self.last_used)


AGE_SHARE = 4
"""Candidates count as equally old if their ages differ by less than one part in this many."""
MAX_HEAPS = 256
"""At this many heaps neighbours are joined, even if nothing is evicted."""
MAX_JOINED = 4096
"""Two heaps are not joined if they hold more than this together and there are few heaps: so each is swept quickly."""


class Queue:
    """Candidates in the order of eviction. Only what frees bytes is among them.

    Time changes the order only between candidates of different ages. So candidates of about the same age share a
    heap, ordered by weight, and only the first of each heap is compared. As candidates grow older, differences in
    age come to matter less, and neighbouring heaps are joined: there are never more than some dozens.
    """

    def __init__(self) -> None:
        self._count = itertools.count()
        self._num_candidates = 0
        self._heaps: list[_Heap] = []
        """In the order of use."""
        self._now = 0
        self._firsts: list[tuple[tuple[bool, float], int, _Heap]] = []
        """A heap of heaps, by the rank that the first of each had at `_now`."""

    def __len__(self) -> int:
        return self._num_candidates

    def push(self, candidate: Candidate) -> None:
        """Adds a candidate, unless it would free nothing."""
        if candidate.num_bytes > 0:
            heap = self._heap(candidate.last_used)
            heapq.heappush(heap.entries, (candidate.weight, candidate.last_used, next(self._count), candidate))
            self._num_candidates += 1
            if heap.entries[0][-1] is candidate:
                self._rank(heap)

    def rank(self, now: int) -> tuple[bool, float]:
        """The rank of the next candidate. Not for an empty queue."""
        heap = self._first(now)
        assert heap is not None, "an empty queue has no next candidate"
        return heap.rank(now)

    def pop(self, now: int) -> Candidate | None:
        """Removes and returns what to evict next; None if nothing is left."""
        heap = self._first(now)
        if heap is None:
            return None
        self._num_candidates -= 1
        return heapq.heappop(heap.entries)[-1]

    def sweep(self, is_current: Callable[[Candidate], bool]) -> Iterator[tuple[int, int]]:
        """Removes outdated candidates, one heap with each step; yields how many the heap held and how many it lost.

        The queue may be used between two steps.
        """
        for heap in list(self._heaps):
            if any(heap is held for held in self._heaps):
                num_held = len(heap.entries)
                heap.entries = [entry for entry in heap.entries if is_current(entry[-1])]
                heapq.heapify(heap.entries)
                num_removed = num_held - len(heap.entries)
                self._num_candidates -= num_removed
                yield num_held, num_removed

    def _first(self, now: int) -> "_Heap | None":
        if now != self._now:
            self._now = now
            self._join(now)
        while self._firsts:
            rank, _, heap = self._firsts[0]
            if heap.entries and heap.rank(now) == rank:
                return heap
            heapq.heappop(self._firsts)
            if heap.entries:
                self._rank(heap)
        return None

    def _rank(self, heap: "_Heap") -> None:
        heapq.heappush(self._firsts, (heap.rank(self._now), next(self._count), heap))

    def _heap(self, last_used: int) -> "_Heap":
        """Returns the heap of the candidates that were used then; makes it if there is none."""
        index = bisect.bisect_right(self._heaps, last_used, key=lambda heap: heap.start)
        if index and last_used < self._heaps[index - 1].stop:
            return self._heaps[index - 1]
        if len(self._heaps) >= MAX_HEAPS:
            self._join(self._heaps[-1].stop)
            index = bisect.bisect_right(self._heaps, last_used, key=lambda heap: heap.start)
        heap = _Heap(last_used, last_used + 1)
        self._heaps.insert(index, heap)
        return heap

    def _join(self, now: int) -> None:
        """Joins neighbours that are of about one age at `now`, and ranks all anew."""
        heaps = list[_Heap]()
        max_entries = MAX_JOINED if len(self._heaps) < MAX_HEAPS else self._num_candidates
        for heap in self._heaps:
            is_close = heaps and heap.stop - heaps[-1].start <= (now - heap.stop) // AGE_SHARE
            if is_close and len(heaps[-1].entries) + len(heap.entries) <= max_entries:
                heaps[-1].take(heap)
            elif heap.entries:
                heaps.append(heap)
        self._heaps, self._firsts = heaps, []
        for heap in heaps:
            self._rank(heap)


@dataclass
class _Heap:
    """Candidates that were used within `[start, stop)`, the one of least weight first, and of equals the oldest."""

    start: int
    stop: int
    entries: list[tuple[tuple[bool, float], int, int, Candidate]] = field(default_factory=list)

    def rank(self, now: int) -> tuple[bool, float]:
        """The rank of the first candidate, as `Candidate.rank` has it."""
        (is_explicit, value), last_used, _, _ = self.entries[0]
        return is_explicit, value / max(1, now - last_used)

    def take(self, later: "_Heap") -> None:
        """Adds all candidates of another heap, which were used later."""
        self.stop = later.stop
        if len(later.entries) > len(self.entries):
            self.entries, later.entries = later.entries, self.entries
        for entry in later.entries:
            heapq.heappush(self.entries, entry)
