"""Which request is evaluated next, which makes way, and when a refused one should retry. Pure.

* a request that continues an earlier one of its session waits for its end, since it may contain the earlier answer;
  all other requests of a session run side by side, in arrival order;
* a request whose prefix is being evaluated for another waits for that prefill, which gets the better of both ranks;
* a request whose state is being read from disk lets others go on;
* requests that must wait do not count towards `LOOKAHEAD`;
* within a class the oldest goes first, but short prefills may pass a long one `MAX_PASSES` times;
* a background request that was passed over `MAX_WAITS` times counts as interactive;
* a sequence preempted for memory goes on once another has ended, and before any of a worse rank begins.

Every live row decodes at each step. The same calls in the same order give the same decisions.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import numpy as np

from cache.snapshots import chunk_end
from cache.types import common_prefix_length
from server.engine.request import GenerationRequest, Priority, TokenArray

MAX_PASSES = 4
MAX_WAITS = 64
MIN_SHARED_TOKENS = 32
"""A request waits only for a prefix longer by this."""
LOOKAHEAD = 16
"""Waiting requests, able to run, that a choice considers."""

Rank: TypeAlias = tuple[int, int]
"""Class and arrival; the lowest goes first."""


class Phase(Enum):
    """How far a request has come, always forward; a replay begins with a new ticket."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"


@dataclass(eq=False)
class Ticket:
    """What the scheduler knows of one request."""

    request_id: str
    arrival: int
    tokens: TokenArray
    priority: Priority
    namespace: str
    session_id: str | None
    num_prompt: int
    """Later tokens were generated before a replay."""
    shares: bool
    """The request may reuse shared state and leave state for others."""
    phase: Phase = Phase.WAITING
    offset: int = 0
    is_preempted: bool = False
    """Nothing of a worse rank begins before the request goes on."""
    is_deferred: bool = False
    """The device lacks memory: the request begins once another has ended."""
    is_loading: bool = False
    """State of the request is being read from disk."""
    is_unread: bool = False
    """The client has left much unread, so no other request waits for the end."""
    num_passed: int = 0

    @property
    def rank(self) -> Rank:
        aged = self.num_passed >= MAX_WAITS
        return (Priority.INTERACTIVE if aged else self.priority), self.arrival

    @property
    def remaining(self) -> int:
        """The last prompt token is evaluated by the first decode step."""
        return len(self.tokens) - 1 - self.offset


def ticket_for(request: GenerationRequest, arrival: int, tokens: TokenArray) -> Ticket:
    """The ticket's `tokens` are the prompt and, in a replay, the output."""
    return Ticket(
        request_id=request.request_id,
        arrival=arrival,
        tokens=tokens,
        priority=request.priority,
        namespace=request.state_namespace,
        session_id=request.session_id,
        num_prompt=len(request.tokens),
        shares=request.cache_prompt,
    )


class Scheduler:
    """Chooses the next chunk. Worker thread only."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._tickets: dict[str, Ticket] = {}
        self._sessions: dict[tuple[str, str], list[Ticket]] = {}
        self._predecessors: dict[Ticket, Ticket | None] = {}
        """The ticket that each continues and waits for, once looked up."""
        self._awaited: dict[Ticket, tuple[Ticket, int]] = {}
        """The prefill that a ticket waits for, and the end of their common prefix."""
        self._lent: dict[Ticket, Rank] = {}
        """The best rank among the tickets that wait for a prefill."""
        self._common: dict[Ticket, dict[Ticket, int]] = {}
        self.is_stalled = False
        """Nothing can begin until a request ends or memory is given back."""

    def add(self, ticket: Ticket) -> None:
        """Queues a request."""
        self._tickets[ticket.request_id] = ticket
        tickets = self._of_session(ticket)
        for other in tickets:
            if other.arrival > ticket.arrival:  # as when a request is replayed
                self._predecessors.pop(other, None)
        tickets.append(ticket)

    def remove(self, ticket: Ticket) -> None:
        """Forgets an ended request; waiting ones may be tried again."""
        self._take_out(ticket)
        deferred = [other for other in self._tickets.values() if other.is_deferred]
        if deferred:
            min(deferred, key=lambda other: other.rank).is_deferred = False

    def replace(self, ticket: Ticket, by: Ticket) -> None:
        """Queues a request again; waiting ones may be tried again."""
        self._take_out(ticket)
        self.add(by)

    def _take_out(self, ticket: Ticket) -> None:
        del self._tickets[ticket.request_id]
        self._predecessors.pop(ticket, None)
        self._awaited.pop(ticket, None)
        for other in self._common.pop(ticket, {}):
            del self._common[other][ticket]
        self._leave_session(ticket)
        self.is_stalled = False

    def in_phase(self, phase: Phase) -> list[Ticket]:
        """Tickets, best rank first."""
        return sorted((t for t in self._tickets.values() if t.phase is phase), key=lambda ticket: ticket.rank)

    def count(self, phase: Phase) -> int:
        """How many tickets are in a phase."""
        return sum(ticket.phase is phase for ticket in self._tickets.values())

    def common_tokens(self, one: Ticket, other: Ticket) -> int:
        """The length of the common prefix, 0 where state may not be shared."""
        if one.namespace != other.namespace or not (one.shares and other.shares):
            return 0
        found = self._common.setdefault(one, {})
        if other not in found:
            found[other] = common_prefix_length(one.tokens, other.tokens)
            self._common.setdefault(other, {})[one] = found[other]
        return found[other]

    def choose_prefill(self, restorable: Callable[[Ticket], int], max_tokens: int) -> Ticket | None:
        """The request that gets the next prefill chunk; None if none can get one.

        A chunk of more than `max_tokens`, what this step has left, is not passed over: it goes first in the next
        step.
        """
        running, waiting = self.in_phase(Phase.PREFILLING), self._free_to_begin()
        todo = {ticket: ticket.remaining for ticket in running}
        todo |= self._could_begin(waiting, running, restorable)
        if not todo:
            return None
        chosen = self._choose(todo)
        limit = len(chosen.tokens) - 1
        offset = limit - todo[chosen]
        if chunk_end(offset, limit, self._chunk_tokens) - offset > max_tokens:
            return None
        for ticket in (*running, *waiting):
            if ticket.arrival < chosen.arrival and not self._waits_for_another(ticket):
                ticket.num_passed += 1
        return chosen

    def _choose(self, todo: dict[Ticket, int]) -> Ticket:
        ranks = {ticket: min(ticket.rank, self._lent.get(ticket, ticket.rank)) for ticket in todo}
        first = min(todo, key=ranks.__getitem__)
        if todo[first] <= self._chunk_tokens or first.num_passed >= MAX_PASSES:
            return first
        short = [t for t, left in todo.items() if left <= self._chunk_tokens and ranks[t][0] == ranks[first][0]]
        return min(short, key=ranks.__getitem__, default=first)

    # -- who may begin

    def _free_to_begin(self) -> list[Ticket]:
        if self.is_stalled:
            return []
        is_busy = any(ticket.phase is not Phase.WAITING for ticket in self._tickets.values())
        waiting = self.in_phase(Phase.WAITING)
        # A worse rank would take the memory that a preempted ticket waits for; one with a predecessor waits for that.
        preempted = [ticket for ticket in waiting if ticket.is_preempted and self._predecessor(ticket) is None]
        last = min((ticket.rank for ticket in preempted), default=None)
        if is_busy:
            waiting = [ticket for ticket in waiting if not (ticket.is_loading or ticket.is_deferred)]
        return [ticket for ticket in waiting if last is None or ticket.rank <= last]

    def _could_begin(
        self, waiting: list[Ticket], running: list[Ticket], restorable: Callable[[Ticket], int]
    ) -> dict[Ticket, int]:
        """The first tickets that wait for no other, with tokens to evaluate."""
        self._awaited = {ticket: goal for ticket, goal in self._awaited.items() if self._is_ahead(*goal)}
        self._lent = {}
        found: dict[Ticket, int] = {}
        for ticket in waiting:
            if len(found) == LOOKAHEAD:
                break
            if self._predecessor(ticket) is not None:
                continue
            if ticket not in self._awaited:
                num_restorable = restorable(ticket)
                prefill = next((t for t in running if self._is_computing_for(t, ticket, num_restorable)), None)
                if prefill is None:
                    found[ticket] = len(ticket.tokens) - 1 - num_restorable
                    continue
                # The restorable tokens stay the same until that prefill has come far enough.
                self._awaited[ticket] = prefill, self._shared_stop(prefill, ticket)
            # The prefill goes by the waiting ticket's rank, so that others do not pass both.
            self._lent.setdefault(self._awaited[ticket][0], ticket.rank)
        return found

    def _waits_for_another(self, ticket: Ticket) -> bool:
        return ticket in self._awaited or self._predecessors.get(ticket) is not None

    def _is_ahead(self, prefill: Ticket, stop: int) -> bool:
        is_running = prefill.phase is Phase.PREFILLING and self._tickets.get(prefill.request_id) is prefill
        return is_running and prefill.offset < stop

    def _is_computing_for(self, other: Ticket, ticket: Ticket, restorable: int) -> bool:
        common = min(self.common_tokens(ticket, other), len(ticket.tokens) - 1)
        return other.offset < self._shared_stop(other, ticket) and common - restorable >= MIN_SHARED_TOKENS

    def _shared_stop(self, other: Ticket, ticket: Ticket) -> int:
        return min(self.common_tokens(ticket, other), len(ticket.tokens) - 1, len(other.tokens) - 1)

    # -- sessions

    def _of_session(self, ticket: Ticket) -> list[Ticket]:
        if ticket.session_id is None:
            return []
        return self._sessions.setdefault((ticket.namespace, ticket.session_id), [])

    def _leave_session(self, ticket: Ticket) -> None:
        if ticket.session_id is None:
            return
        tickets = self._of_session(ticket)
        tickets.remove(ticket)
        if not tickets:
            del self._sessions[ticket.namespace, ticket.session_id]
        for other in tickets:
            if self._predecessors.get(other) is ticket:
                del self._predecessors[other]

    def _predecessor(self, ticket: Ticket) -> Ticket | None:
        found = self._predecessors.get(ticket)
        if ticket not in self._predecessors or (found is not None and found.is_unread):
            tickets = (other for other in self._of_session(ticket) if not other.is_unread)
            found = next((other for other in tickets if _goes_on_from(ticket, other)), None)
            self._predecessors[ticket] = found
        return found


def _goes_on_from(ticket: Ticket, earlier: Ticket) -> bool:
    """The prompt begins with all of an earlier one, so it may hold its answer.

    Nobody waits for a less urgent request, nor for state that is not shared.
    """
    num = earlier.num_prompt
    return (
        earlier.arrival < ticket.arrival
        and earlier.priority <= ticket.priority
        and earlier.shares
        and ticket.shares
        and num < ticket.num_prompt
        # Most prompts differ here already, and comparing one token costs next to nothing.
        and ticket.tokens[num - 1] == earlier.tokens[num - 1]
        and np.array_equal(ticket.tokens[:num], earlier.tokens[:num])
    )


def choose_to_wait(running: Iterable[Ticket]) -> Ticket | None:
    """The ticket to be preempted for lack of memory; None where only one runs.

    The worst rank waits, so the oldest never does, and a sequence waits at most as often as others end.
    """
    ranked = sorted(running, key=lambda ticket: ticket.rank)
    return ranked[-1] if len(ranked) > 1 else None


MIN_SECONDS, MAX_SECONDS = 1, 60
UNKNOWN_SECONDS = 2
"""Until a request has ended while others waited."""
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
