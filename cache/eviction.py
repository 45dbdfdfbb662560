"""What to give up when memory is short: a pure order over candidates.

A candidate is a whole leaf, or the snapshot of a node that others hang on. First goes what is worth least per byte:
the chance that it is wanted again, times the tokens to evaluate then, over the bytes that it takes and its age. The
chance falls with age because gaps between turns are long-tailed: who has been away for an hour will hardly be back
within the next minute. How often something was used says nothing: a conversation that has just ended was used more
often than one that has just begun.
"""

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

LONG_TOKENS = 70_000
"""Beyond this a conversation goes on the less likely the longer it is."""


class Chance(float, Enum):
    """How likely state is wanted when its conversation goes on, by what it is.

    Of 2 817 recorded requests of coding agents 2 624 went on from their conversation's end, 44 from the end of its
    last prompt, 86 from where that prompt had gone on itself, 8 from further back, and 55 kept no more than tools and
    system messages. The weights below are such shares, tried out and rounded; the hit rate of recorded conversations
    depends little on any of them.
    """

    REST = 30.0
    """The beginning of a conversation whose end is gone, all that is left: it would start from its first token."""
    FIRST = 2.0
    """The first restore point of a conversation: what is left of it, once all behind has gone."""
    CURRENT = 1.0
    """The end of a conversation."""
    SHARED = 1 / 10
    """Where conversations part, and the end of tools and system messages."""
    EARLIER = 1 / 12
    """A restore point well before a conversation's end: hardly gone back to, but left when the end has to go."""
    PROBATION = 1 / 16
    """The end of a prompt without a session that nothing has ever gone on from."""
    LANDING = 1 / 20
    """Where the newest turn of a conversation went on from."""
    PROMPT = 1 / 60
    """The end of the newest prompt."""
    LEFT = 1 / 100
    """An end of a conversation that has gone on elsewhere since."""
    SUPERSEDED = 1e-6
    """One with newer ones between it and the last."""
    UNUSABLE = 0.0
    """State behind the last restore point: no request can be restored with it."""


def chance_to_go_on(num_tokens: int) -> float:
    """Returns the chance that a conversation of so many tokens is wanted at its end.

    Contexts are bounded, and agents begin anew before the bound. Of recorded conversations that had been silent for
    64 to 256 requests, one that was shorter than 40 000 tokens came back about six times as often, with each request
    of others, as one longer than 140 000.
    """
    return Chance.CURRENT * min(1.0, (LONG_TOKENS / max(1, num_tokens)) ** 2)


@dataclass(frozen=True)
class Candidate:
    """Something that can be given up. `key` is the caller's handle and means nothing here."""

    key: Any
    num_bytes: int
    """Bytes that giving it up may free."""
    num_tokens: int
    """Tokens from the nearest restore point that remains: what would have to be evaluated again."""
    age: int
    """Requests since it was used, or something behind it."""
    chance: float = Chance.CURRENT
    is_explicit: bool = False
    """Asked for by name, so it goes after everything else."""
    is_guarded: bool = False
    """Who needs the room must not have it as long as anything else is left but what was asked for by name."""

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """Candidates go in this order."""
        value = self.chance * self.num_tokens / (self.num_bytes * max(1, self.age))
        return self.is_explicit, self.is_guarded, value


class Queue:
    """Candidates in the order in which to give them up. Nothing that frees no bytes is ever among them."""

    def __init__(self, candidates: Iterable[Candidate]) -> None:
        self._count = itertools.count()
        self._heap = [self._entry(candidate) for candidate in candidates if candidate.num_bytes > 0]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def order(self) -> tuple[bool, bool, float]:
        """The rank of the next candidate. Not for an empty queue."""
        return self._heap[0][0]

    def push(self, candidate: Candidate) -> None:
        """Adds a candidate, unless it would free nothing."""
        if candidate.num_bytes > 0:
            heapq.heappush(self._heap, self._entry(candidate))

    def pop(self) -> Candidate | None:
        """Removes and returns what should go next; None if nothing is left."""
        return heapq.heappop(self._heap)[-1] if self._heap else None

    def _entry(self, candidate: Candidate) -> tuple[tuple[bool, bool, float], int, Candidate]:
        return candidate.rank, next(self._count), candidate
