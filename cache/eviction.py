"""What to give up when memory is short: a pure order over candidates.

A candidate is a whole leaf, or the snapshot of a node that others hang on. The policy is least recently used, deepest
first among equals, and never a victim that frees nothing. The queue lives as long as the cache, and what changes is
queued again: whoever takes a candidate out asks whether it still is what it was.
"""

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Candidate:
    """Something that can be given up. `key` is the caller's handle and means nothing here."""

    key: Any
    num_bytes: int
    """Bytes that giving it up may free."""
    last_used: int
    offset: int
    """Where the state ends, in tokens: of two equally old, the deeper goes first."""
    is_explicit: bool = False
    """Asked for by name, so it goes after everything else."""


class Queue:
    """Candidates in the order in which to give them up."""

    def __init__(self, candidates: Iterable[Candidate]) -> None:
        self._count = itertools.count()
        self._heap = [self._entry(candidate) for candidate in candidates if candidate.num_bytes > 0]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def order(self) -> tuple[bool, int, int]:
        """Where the next candidate stands among those of other queues: the least goes first. Not for an empty one."""
        return self._heap[0][0]

    def push(self, candidate: Candidate) -> None:
        """Adds a candidate, unless it would free nothing."""
        if candidate.num_bytes > 0:
            heapq.heappush(self._heap, self._entry(candidate))

    def pop(self) -> Candidate | None:
        """Removes and returns what should go next; None if nothing is left."""
        return heapq.heappop(self._heap)[-1] if self._heap else None

    def _entry(self, candidate: Candidate) -> tuple[tuple[bool, int, int], int, Candidate]:
        return (candidate.is_explicit, candidate.last_used, -candidate.offset), next(self._count), candidate
