"""Which request is evaluated next, which makes way, and when a refused one should retry. Pure.

* a request that continues an earlier one of its session waits for its end, since it may contain the earlier answer;
  all other requests of a session run side by side, in arrival order;
* a request whose prefix is being evaluated for another waits for that prefill, which gets the better of both ranks;
* a request whose state is being read from disk, or whose next picture is being decoded, lets others go on;
* requests that must wait do not count towards `LOOKAHEAD`;
* within a class the oldest goes first, but short prefills may pass each chunk of a long one `MAX_PASSES` times;
* a background request that was passed over `MAX_WAITS` times counts as interactive;
* a sequence preempted for memory goes on once another has ended, and before any of a worse rank begins.

Every live row decodes at each step. The same calls in the same order give the same decisions.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from operator import attrgetter
from typing import Generic, TypeAlias, TypeVar

import numpy as np

from cache.snapshots import chunk_end
from cache.types import common_prefix_length
from server.engine.request import GenerationRequest, Priority, TokenArray, Wait, WaitReason

MAX_PASSES = 4
MAX_WAITS = 64
MIN_SHARED_TOKENS = 32
"""A request waits only for a prefix longer by this."""
LOOKAHEAD = 16
"""Waiting requests, able to run, that a choice considers."""

Rank: TypeAlias = tuple[int, int]
"""Class and arrival; the lowest goes first."""


class Phase(Enum):
    """How far a request has come, forward but for a replay."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"


class Scheduled:
    """What the scheduler knows of a sequence."""

    def __init__(self, request: GenerationRequest, arrival: int) -> None:
        self.request = request
        self.arrival = arrival
        self.namespace = request.state_namespace
        self.is_loading = False
        """State of the request is being read from disk, or the pixels of its next picture are being decoded."""
        self.is_unread = False
        """The client has left much unread, so no other request waits for the end."""
        self.num_passed = self.num_passed_before = 0
        """Times that younger ones were chosen; of these, before its own latest chunk."""
        self.queue(request.tokens)

    def queue(self, tokens: TokenArray) -> None:
        """Has tokens evaluated from the first one: the prompt and, in a replay, the output."""
        self.tokens, self.offset, self.phase = tokens, 0, Phase.WAITING
        self.is_preempted = False
        """Nothing of a worse rank begins before the request goes on."""
        self.is_deferred = False
        """The device lacks memory: the request begins once another has ended."""

    @property
    def rank(self) -> Rank:
        aged = self.num_passed >= MAX_WAITS
        return (Priority.INTERACTIVE if aged else self.request.priority), self.arrival

    @property
    def limit(self) -> int:
        """Where the prefill ends: the last token is evaluated by the first decode step."""
        return len(self.tokens) - 1


S = TypeVar("S", bound=Scheduled)


class Scheduler(Generic[S]):
    """All unfinished sequences, and the choice of the next chunk. Worker thread only."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self.sequences: dict[str, S] = {}
        self._sessions: dict[tuple[str, str], list[S]] = {}
        self._predecessors: dict[S, S | None] = {}
        """The sequence that each continues and waits for, once looked up."""
        self._awaited: dict[S, tuple[S, int]] = {}
        """The prefill that a sequence waits for, and the end of their common prefix."""
        self._lent: dict[S, Rank] = {}
        """The best rank among the sequences that wait for a prefill."""
        self._common: dict[S, dict[S, int]] = {}
        self.is_stalled = False
        """Nothing can begin until a request ends or memory is given back."""

    def add(self, sequence: S) -> None:
        """Queues a sequence."""
        self.sequences[sequence.request.request_id] = sequence
        others = self._of_session(sequence)
        for other in others:
            if other.arrival > sequence.arrival:  # as when a request is replayed
                self._predecessors.pop(other, None)
        others.append(sequence)

    def remove(self, sequence: S) -> None:
        """Forgets an ended sequence; waiting ones may be tried again."""
        self.take_out(sequence)
        deferred = [other for other in self.sequences.values() if other.is_deferred]
        if deferred:
            min(deferred, key=lambda other: other.rank).is_deferred = False

    def take_out(self, sequence: S) -> None:
        """Forgets a sequence that begins again; waiting ones may be tried again."""
        del self.sequences[sequence.request.request_id]
        self._predecessors.pop(sequence, None)
        self._lent.pop(sequence, None)
        self._awaited = {other: goal for other, goal in self._awaited.items() if sequence not in (other, goal[0])}
        for other in self._common.pop(sequence, {}):
            del self._common[other][sequence]
        self._leave_session(sequence)
        self.is_stalled = False

    def in_phase(self, phase: Phase) -> list[S]:
        """Sequences, best rank first."""
        return sorted([one for one in self.sequences.values() if one.phase is phase], key=attrgetter("rank"))

    def common_tokens(self, sequence: S, other: S) -> int:
        """The length of the common prefix, 0 where state may not be shared."""
        reuses = sequence.request.cache_prompt and other.request.cache_prompt
        if sequence.namespace != other.namespace or not reuses:
            return 0
        known = self._common.setdefault(sequence, {})
        if other not in known:
            known[other] = common_prefix_length(sequence.tokens, other.tokens)
            self._common.setdefault(other, {})[sequence] = known[other]
        return known[other]

    def choose_prefill(self, restorable: Callable[[S], int], max_tokens: int) -> S | None:
        """The sequence that gets the next prefill chunk; None if none can get one.

        A chunk of more than `max_tokens`, what this step has left, is not passed over: it goes first in the next
        step.
        """
        running, waiting = self.in_phase(Phase.PREFILLING), self._free_to_begin()
        left = {one: one.limit - one.offset for one in running}
        todo = {one: num_left for one, num_left in left.items() if not one.is_loading}
        todo |= self._could_begin(waiting, running, restorable)
        if not todo and not self.in_phase(Phase.DECODING):
            todo = left  # nothing else is to do
        if not todo:
            return None
        chosen = self._choose(todo)
        offset = chosen.limit - todo[chosen]
        if chunk_end(offset, chosen.limit, self._chunk_tokens) - offset > max_tokens:
            return None
        for one in (*running, *waiting):
            is_waiting = one in self._awaited or self._predecessors.get(one) is not None
            if one.arrival < chosen.arrival and not is_waiting:
                one.num_passed += 1
        chosen.num_passed_before = chosen.num_passed
        return chosen

    def _choose(self, todo: dict[S, int]) -> S:
        ranks = {one: min(one.rank, self._lent.get(one, one.rank)) for one in todo}
        first = min(todo, key=ranks.__getitem__)
        if todo[first] <= self._chunk_tokens or first.num_passed - first.num_passed_before >= MAX_PASSES:
            return first
        short = [one for one, left in todo.items() if left <= self._chunk_tokens and ranks[one][0] == ranks[first][0]]
        return min(short, key=ranks.__getitem__, default=first)

    def waits(self, *, has_slot: bool) -> dict[str, Wait]:
        """Why each waiting request waits, as the last choice found."""
        return {one.request.request_id: self._wait_of(one, has_slot) for one in self.in_phase(Phase.WAITING)}

    def _wait_of(self, sequence: S, has_slot: bool) -> Wait:
        if sequence in self._awaited:
            prefill, stop = self._awaited[sequence]
            return Wait(WaitReason.BEGINNING, prefill.request.request_id, min(prefill.offset, stop), stop)
        predecessor = self._predecessors.get(sequence)
        if predecessor is not None:
            return Wait(WaitReason.ANSWER, predecessor.request.request_id)
        lacks_memory = self.is_stalled or sequence.is_preempted or sequence.is_deferred
        reasons = {
            WaitReason.SLOT: not has_slot,
            WaitReason.DISK: sequence.is_loading,
            WaitReason.MEMORY: lacks_memory,
        }
        return Wait(next((reason for reason, holds in reasons.items() if holds), WaitReason.ORDER))

    # -- who may begin

    def _free_to_begin(self) -> list[S]:
        if self.is_stalled:
            return []
        waiting = self.in_phase(Phase.WAITING)
        # A worse rank would take the memory that a preempted one waits for; one with a predecessor waits for that.
        preempted = [one.rank for one in waiting if one.is_preempted and self._predecessor(one) is None]
        if len(waiting) < len(self.sequences):
            waiting = [one for one in waiting if not (one.is_loading or one.is_deferred)]
        return [one for one in waiting if not preempted or one.rank <= preempted[0]]

    def _could_begin(self, waiting: list[S], running: list[S], restorable: Callable[[S], int]) -> dict[S, int]:
        """The first sequences that wait for no other, with tokens to evaluate."""
        self._awaited = {
            one: (prefill, stop)
            for one, (prefill, stop) in self._awaited.items()
            if prefill.phase is Phase.PREFILLING and prefill.offset < stop
        }
        self._lent = {}
        stops: dict[S, int] = {}
        for one in waiting:
            if len(stops) == LOOKAHEAD:
                break
            if self._predecessor(one) is not None:
                continue
            if one not in self._awaited:
                num_restorable = restorable(one)
                prefill = next((other for other in running if self._computes_for(other, one, num_restorable)), None)
                if prefill is None:
                    stops[one] = one.limit - num_restorable
                    continue
                # The restorable tokens stay the same until that prefill has come far enough.
                self._awaited[one] = prefill, self._shared_stop(prefill, one)
            # The prefill goes by the waiting one's rank, so that others do not pass both.
            self._lent.setdefault(self._awaited[one][0], one.rank)
        return stops

    def _computes_for(self, prefill: S, sequence: S, num_restorable: int) -> bool:
        common = min(self.common_tokens(sequence, prefill), sequence.limit)
        return prefill.offset < self._shared_stop(prefill, sequence) and common - num_restorable >= MIN_SHARED_TOKENS

    def _shared_stop(self, prefill: S, sequence: S) -> int:
        return min(self.common_tokens(sequence, prefill), sequence.limit, prefill.limit)

    # -- sessions

    def _of_session(self, sequence: S) -> list[S]:
        session_id = sequence.request.session_id
        return [] if session_id is None else self._sessions.setdefault((sequence.namespace, session_id), [])

    def _leave_session(self, sequence: S) -> None:
        if sequence.request.session_id is None:
            return
        others = self._of_session(sequence)
        others.remove(sequence)
        if not others:
            del self._sessions[sequence.namespace, sequence.request.session_id]
        for other in others:
            if self._predecessors.get(other) is sequence:
                del self._predecessors[other]

    def _predecessor(self, sequence: S) -> S | None:
        predecessor = self._predecessors.get(sequence)
        if sequence not in self._predecessors or (predecessor is not None and predecessor.is_unread):
            others = (other for other in self._of_session(sequence) if not other.is_unread)
            predecessor = next((other for other in others if _goes_on_from(sequence, other)), None)
            self._predecessors[sequence] = predecessor
        return predecessor


def _goes_on_from(later: Scheduled, earlier: Scheduled) -> bool:
    """The prompt begins with all of an earlier one, so it may hold its answer.

    Nobody waits for a less urgent request, nor for state that is not shared.
    """
    prompt, start = later.request.tokens, earlier.request.tokens
    return (
        earlier.arrival < later.arrival
        and earlier.request.priority <= later.request.priority
        and earlier.request.cache_prompt
        and later.request.cache_prompt
        and len(start) < len(prompt)
        # Most prompts differ here already, and comparing one token costs next to nothing.
        and prompt[len(start) - 1] == start[-1]
        and np.array_equal(prompt[: len(start)], start)
    )


def choose_to_wait(running: Iterable[S]) -> S | None:
    """The sequence to be preempted for lack of memory; None where only one runs.

    The worst rank waits, so the oldest never does, and a sequence waits at most as often as others end.
    """
    ranked = sorted(running, key=lambda one: one.rank)
    return ranked[-1] if len(ranked) > 1 else None


MIN_SECONDS, MAX_SECONDS = 1, 60
UNKNOWN_SECONDS = 2
"""Seconds to wait, until a request has ended while others waited."""
NUM_ENDS = 64


class QueuePace:
    """How fast the queue moves. Its caller holds a lock; `now` is in seconds and never falls."""

    def __init__(self) -> None:
        self._waiting_since: float | None = None
        self._counted_seconds = 0.0
        """Seconds with requests waiting, up to the last time the queue was empty."""
        self._ends = deque([0.0], maxlen=NUM_ENDS + 1)
        """Start of the count, then the ends of requests, in counted seconds."""

    def change(self, now: float, *, has_waiting: bool) -> None:
        """Notes whether requests wait from now on."""
        if has_waiting and self._waiting_since is None:
            self._waiting_since = now
        elif not has_waiting:
            self._counted_seconds = self._counted_at(now)
            self._waiting_since = None

    def end(self, now: float) -> None:
        """Notes the end of a request, if others wait."""
        if self._waiting_since is not None:
            self._ends.append(self._counted_at(now))

    def retry_after_seconds(self, num_waiting: int, now: float) -> int:
        """The seconds, 1 to 60, until half of the waiting requests have begun."""
        counted = self._counted_at(now) - self._ends[0]
        num_ends = len(self._ends) - 1
        seconds = counted / num_ends * num_waiting / 2 if num_ends else max(counted, UNKNOWN_SECONDS)
        return max(MIN_SECONDS, min(math.ceil(seconds), MAX_SECONDS))

    def _counted_at(self, now: float) -> float:
        return self._counted_seconds + (0.0 if self._waiting_since is None else now - self._waiting_since)
