"""The value of stored state, and the order in which it is evicted, fair among namespaces. Pure.

A candidate is a leaf, or the snapshot of a node with children. Value = chance of reuse × tokens to evaluate without
the state ÷ (bytes × age); the candidate of least value goes first. Value falls with age because gaps between turns
are long-tailed. The number of uses says nothing: a conversation that has just ended has more uses than a new one.

A node is valued again only when a change may have lowered its value. A risen value is noticed before eviction, and
the node put back. Invariant: no value in the order is too high. A namespace's share is the budget divided by the
number of namespaces that hold anything; those over it lose state first.
"""

import bisect
import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

from cache.snapshots import RestorePointKind, has_whole_snapshot
from cache.trie import Node
from cache.types import LayerKinds

LONG_TOKENS = 70_000
"""Longer conversations are less likely to continue: contexts are bounded, and agents begin anew before the bound.

Of recorded conversations silent for 64 to 256 requests, those under 40 000 tokens came back about six times as often
as those over 140 000.
"""


class Chance(float, Enum):
    """Relative chances that state is wanted when its conversation continues, by the state's role.

    Of 2 817 recorded requests of coding agents 2 624 continued from their conversation's end, 44 from its last
    prompt's end, 86 from where that prompt had continued, 8 from further back, and 55 kept only tools and system
    messages. The weights are such shares, rounded; the hit rate depends little on any.
    """

    REST = 30.0
    """Rest of a conversation whose end was evicted."""
    FIRST = 2.0
    CURRENT = 1.0
    SHARED = 1 / 10
    """Where conversations part; the end of tools and system messages."""
    EARLIER = 1 / 12
    """A point that is useful once the conversation's end is evicted."""
    PROBATION = 1 / 16
    """A prompt's end without a session."""
    LANDING = 1 / 20
    """Where the newest turn continued from."""
    PROMPT = 1 / 60
    FEATURES = 1 / 80
    """Of a picture: wanted where the state after it is gone, or in another conversation."""
    LEFT = 1 / 100
    """The session continued elsewhere."""
    LEFT_ROWS = 1 / 1000
    """As `LEFT`, where all that is before can be restored without it."""
    SUPERSEDED = 1e-6
    """Superseded by newer restore points."""
    UNUSABLE = 0.0
    """After the last restore point."""


@dataclass(frozen=True)
class Candidate:
    """State that can be evicted."""

    key: Any
    """The caller's name of the state, never inspected."""
    num_bytes: int
    num_tokens: int
    """To evaluate without the state, from the nearest remaining restore point."""
    last_used: int
    """Tick of the last use, here or below."""
    chance: float = Chance.CURRENT
    is_explicit: bool = False
    """Evicted last."""
    is_session_end: bool = False
    """A session ends here, other than of background work."""

    @cached_property
    def weight(self) -> tuple[bool, float]:
        """The value without age."""
        return self.is_explicit, self.chance * self.num_tokens / self.num_bytes

    def rank(self, now: int) -> tuple[bool, float]:
        """The value now; the lowest goes first."""
        is_explicit, value = self.weight
        return is_explicit, value / max(1, now - self.last_used)


AGE_PART = 4
"""Ages closer than one part in this many count as equal."""
MAX_HEAPS = 256
"""More are joined even without evictions."""
MAX_JOINED = 4096
"""Larger heaps stay apart while few, to be swept quickly."""


class Queue:
    """Candidates in the order of eviction.

    Candidates of about one age share a heap by weight: time reorders only heaps, and only their firsts are compared.
    Differences of age matter less with time: neighbours are joined, some dozens remain.
    """

    def __init__(self) -> None:
        self._count = itertools.count()
        self._num_candidates = 0
        self._heaps: list[_Heap] = []
        self._now = 0
        self._firsts: list[tuple[tuple[bool, float], int, _Heap]] = []
        """By their first candidate's rank at `_now`."""

    def __len__(self) -> int:
        return self._num_candidates

    def push(self, candidate: Candidate) -> None:
        """Adds a candidate, unless evicting it frees nothing."""
        if candidate.num_bytes > 0:
            heap = self._heap(candidate.last_used)
            heapq.heappush(heap.entries, (candidate.weight, candidate.last_used, next(self._count), candidate))
            self._num_candidates += 1
            if heap.entries[0][-1] is candidate:
                self._rank(heap)

    def rank(self, now: int) -> tuple[bool, float]:
        """The next candidate's rank; the queue must not be empty."""
        heap = self._first(now)
        assert heap is not None, "an empty queue has no next candidate"
        return heap.rank(now)

    def pop(self, now: int) -> Candidate | None:
        """Removes and returns the next candidate, if any."""
        heap = self._first(now)
        if heap is None:
            return None
        self._num_candidates -= 1
        return heapq.heappop(heap.entries)[-1]

    def sweep(self, is_current: Callable[[Candidate], bool]) -> Iterator[int]:
        """Removes outdated candidates, a heap a step; yields how many it held. Other calls may come between."""
        for heap in list(self._heaps):
            if any(heap is own for own in self._heaps):
                num_held = len(heap.entries)
                heap.entries = [entry for entry in heap.entries if is_current(entry[-1])]
                heapq.heapify(heap.entries)
                self._num_candidates -= num_held - len(heap.entries)
                yield num_held

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
        heaps = list[_Heap]()
        max_entries = MAX_JOINED if len(self._heaps) < MAX_HEAPS else self._num_candidates
        for heap in self._heaps:
            is_close = heaps and heap.stop - heaps[-1].start <= (now - heap.stop) // AGE_PART
            if is_close and len(heaps[-1].entries) + len(heap.entries) <= max_entries:
                heaps[-1].take(heap)
            elif heap.entries:
                heaps.append(heap)
        self._heaps, self._firsts = heaps, []
        for heap in heaps:
            self._rank(heap)


@dataclass
class _Heap:
    """Candidates last used in `[start, stop)`, the lightest first, then the oldest."""

    start: int
    stop: int
    entries: list[tuple[tuple[bool, float], int, int, Candidate]] = field(default_factory=list)

    def rank(self, now: int) -> tuple[bool, float]:
        (is_explicit, value), last_used, _, _ = self.entries[0]
        return is_explicit, value / max(1, now - last_used)

    def take(self, later: "_Heap") -> None:
        self.stop = later.stop
        if len(later.entries) > len(self.entries):
            self.entries, later.entries = later.entries, self.entries
        for entry in later.entries:
            heapq.heappush(self.entries, entry)


def over_share(held_bytes: Mapping[str, int], budget_bytes: int) -> set[str]:
    """Namespaces over their share; none if only one holds anything."""
    active = {name: num_bytes for name, num_bytes in held_bytes.items() if num_bytes > 0}
    if len(active) < 2:
        return set()
    return {name for name, num_bytes in active.items() if num_bytes * len(active) > budget_bytes}


class FairQueue:
    """Candidates of all namespaces, first those over their share."""

    def __init__(self, find_over_share: Callable[[], set[str]]) -> None:
        """Calls `find_over_share` before each candidate: evictions change the answer."""
        self._find_over_share = find_over_share
        self._queues = defaultdict[str, Queue](Queue)
        self._now = 0
        self._ranks: dict[str, tuple[bool, float]] = {}
        """Each queue's, at `_now`."""
        self._sweeping: Iterator[int] = iter(())

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def push(self, namespace: str, candidate: Candidate) -> None:
        """See `Queue.push`."""
        self._queues[namespace].push(candidate)
        self._rank(namespace)

    def pop(self, now: int) -> Candidate | None:
        """Removes and returns the next candidate, if any."""
        if now != self._now:
            self._now = now
            self._rank_all()
        names = self._find_over_share() & self._ranks.keys() or self._ranks.keys()
        name = min(names, key=lambda name: (self._ranks[name], name), default=None)
        if name is None:
            return None
        candidate = self._queues[name].pop(now)
        self._rank(name)
        return candidate

    def _rank_all(self) -> None:
        for name in list(self._queues):
            self._rank(name)

    def _rank(self, name: str) -> None:
        if len(self._queues[name]):
            self._ranks[name] = self._queues[name].rank(self._now)
        else:
            del self._queues[name]
            self._ranks.pop(name, None)

    def sweep(self, is_current: Callable[[Candidate], bool], num_candidates: int) -> None:
        """Removes outdated candidates among the next `num_candidates` or a few more; repeated calls reach all."""
        queues = list(self._queues.values())
        for sweeping in (self._sweeping, itertools.chain.from_iterable(queue.sweep(is_current) for queue in queues)):
            self._sweeping = sweeping
            while num_candidates > 0 and (num_seen := next(sweeping, None)) is not None:
                num_candidates -= num_seen
            if num_candidates <= 0:
                break
        self._rank_all()


MANY_CHANGED = 64
"""More changed nodes are valued early: a later eviction takes less time."""
MIN_GARBAGE = 1024
"""Outdated entries that may stay."""
SWEPT_PER_CHANGE = 4
"""Entries checked per changed node while half of all are outdated."""


_HEADS = (RestorePointKind.SYSTEM_END, RestorePointKind.BRANCH, RestorePointKind.INTERVAL)
"""Kinds at which no conversation ends."""


class EvictionOrder:
    """All namespaces' candidates, valued and in order; each session's last end. Worker thread only.

    Must be told of every change of a node's state, children or use. Pinned nodes and those in slots are in the order
    too: the caller puts them back.
    """

    def __init__(self, layout: LayerKinds, find_over_share: Callable[[], set[str]]) -> None:
        self._layout = layout
        self._needs_snapshots = layout.needs_snapshots
        self._ends: dict[tuple[str, str], Node] = {}
        """Where each session ended last."""
        self._current: dict[tuple[str, str], dict[Node, None]] = {}
        """Nodes valued as the end of each session: several if the last end was evicted."""
        self._queue = FairQueue(find_over_share)
        self._latest: dict[Node, Candidate] = {}
        self._changed: dict[Node, None] = {}

    def changed(self, node: Node) -> None:
        """Records a change of a node or a child, or that the node left the trie."""
        if node.parent is not None:
            self._changed[node] = None
        else:
            self._changed.pop(node, None)
            self._latest.pop(node, None)

    def snapped(self, node: Node) -> None:
        """Records a new snapshot: nodes below, up to the next restore points, may be evaluated from there."""
        self.changed(node)
        below = list(node.children.values()) if self._needs_snapshots and self._is_point(node) else []
        while below:
            next_node = below.pop()
            if next_node.snapshot is not None or not next_node.children:
                self.changed(next_node)
            if not self._is_point(next_node):
                below += next_node.children.values()

    def used(self, node: Node, now: int) -> None:
        """Records a sequence restored at a node, or recorded up to it."""
        node.last_used = now
        above: Node | None = node
        while above is not None and above.last_used_below < now:
            above.last_used_below = now
            above = above.parent
        self.changed(node)

    def ended(self, node: Node) -> None:
        """A node's session now ends there."""
        if node.session_id is None:
            return
        session = node.trie.namespace, node.session_id
        before = self._ends.get(session, node)
        if before.parent is None or before.last_used <= node.last_used:
            self._ends[session] = node
            for left in self._current.pop(session, {}):
                self.changed(left)

    def end_of(self, namespace: str, session_id: str | None) -> Node | None:
        """Where a session ended last, if that is still held."""
        end = self._ends.get((namespace, session_id)) if session_id is not None else None
        return end if end is not None and end.parent is not None else None

    def refresh_if_many_changed(self) -> None:
        """Values changed nodes if many."""
        if len(self._changed) > MANY_CHANGED:
            self._refresh()

    def pop(self, now: int) -> Candidate | None:
        """Removes and returns the next candidate, with its current value."""
        if self._changed:
            self._refresh()
        while (candidate := self._queue.pop(now)) is not None:
            if not self._is_current(candidate):
                continue
            del self._latest[candidate.key]
            fresh = self.value(candidate.key)
            if fresh.num_bytes > 0 and fresh.rank(now) <= candidate.rank(now):
                return fresh
            self.push(fresh)  # its value has risen: it was used since, or the restore point before it was evicted
        return None

    def put_back(self, candidate: Candidate) -> None:
        """A popped candidate, unless its node was evicted."""
        if _is_candidate(candidate.key) and candidate.key not in self._latest:
            self.changed(candidate.key)

    def push(self, candidate: Candidate) -> None:
        """See `Queue.push`."""
        if candidate.num_bytes > 0:
            self._latest[candidate.key] = candidate
            self._queue.push(candidate.key.trie.namespace, candidate)

    def check(self, nodes: Iterable[Node]) -> None:
        """Asserts that all evictable nodes are here, no value too high."""
        pending = self._find_stale()
        for node in nodes:
            if _is_candidate(node) and node not in pending:
                last, fresh = self._latest.get(node), self.value(node)
                assert last is not None or fresh.num_bytes <= 0, f"{node} could be evicted and is not in the order"
                is_lower = last is None or fresh.num_bytes <= 0 or last.weight <= fresh.weight
                assert is_lower and (last is None or last.last_used <= fresh.last_used), f"{last}, by now {fresh}"

    def _find_stale(self) -> dict[Node, None]:
        """Changed nodes, and nodes whose value the changes may have lowered."""
        stale, seen = dict(self._changed), set[Node]()
        for node in self._changed:
            end = self._leaf_counting(node)
            if end is not None:
                stale[end] = None
            stale.update(dict.fromkeys(self._affected_above(node, seen)))
        return stale

    def _leaf_counting(self, node: Node) -> Node | None:
        """The only leaf below, if any, whose value may count the node's bytes."""
        if not self._needs_snapshots or not node.children:
            return None
        while len(node.children) == 1 and not self._is_point(node):
            (node,) = node.children.values()
        return None if node.children else node

    def _affected_above(self, node: Node, seen: set[Node]) -> Iterator[Node]:
        """Nodes above whose chance a change may have lowered.

        A restore point's chance depends on the next two and the sessions below. Nodes further above go to `seen`:
        several changes on one path visit them once.
        """
        num_points, above = 0, node.parent if self._needs_snapshots else None
        while above is not None and above.parent is not None and not (num_points >= 2 and above in seen):
            if num_points >= 2:
                seen.add(above)
            if above.snapshot is not None:
                num_points += 1
                chance = self._latest[above].chance if above in self._latest else None
                was_shared = chance == Chance.SHARED and above.kind is not RestorePointKind.SYSTEM_END
                if was_shared or (num_points <= 2 and chance in (Chance.EARLIER, Chance.LANDING)):
                    yield above
            above = above.parent

    def _refresh(self) -> None:
        changed, self._changed = self._find_stale(), {}
        for node in changed:
            self._latest.pop(node, None)
            if _is_candidate(node):
                self.push(self.value(node))
        limit = 2 * len(self._latest) + MIN_GARBAGE
        self._forget_sessions(limit)
        if len(self._queue) > limit:
            self._queue.sweep(self._is_current, SWEPT_PER_CHANGE * len(changed))

    def _is_current(self, candidate: Candidate) -> bool:
        return self._latest.get(candidate.key) is candidate

    def _forget_sessions(self, max_sessions: int) -> None:
        """Forgets sessions with evicted ends beyond `max_sessions`."""
        if len(self._ends) > max_sessions:
            self._ends = {session: node for session, node in self._ends.items() if node.parent is not None}
        if len(self._current) > max_sessions:
            bound = ((key, [node for node in ends if node.parent is not None]) for key, ends in self._current.items())
            self._current = {session: dict.fromkeys(ends) for session, ends in bound if ends}

    # -- values

    def value(self, node: Node) -> Candidate:
        """What evicting a leaf, or another node's snapshot, would free and cost."""
        return self._of_snapshot(node) if node.children else self._of_leaf(node)

    def _of_snapshot(self, node: Node) -> Candidate:
        num_bytes = node.snapshot.num_bytes if node.snapshot is not None else 0
        base = self._base(node)
        chance = self._chance_within(node) if base or not node.last_used else Chance.FIRST
        return Candidate(node, num_bytes, node.stop - base, node.last_used_below, chance, node.is_explicit)

    def _of_leaf(self, node: Node) -> Candidate:
        last_used = node.last_used
        if not self._is_point(node):
            return Candidate(node, node.num_bytes, 0, last_used, Chance.UNUSABLE)
        base, chance = self._base(node), self._chance_at_end(node)
        is_left = chance in (Chance.LEFT, Chance.LEFT_ROWS)
        is_end = node.session_id is not None and not node.is_background and not is_left
        if chance is Chance.CURRENT:
            is_rest = not base and node.kind in _HEADS
            chance = Chance.REST if is_rest else chance * min(1.0, (LONG_TOKENS / max(1, node.stop)) ** 2)
        return Candidate(node, self._tail_bytes(node), node.stop - base, last_used, chance, is_session_end=is_end)

    def _chance_within(self, node: Node) -> Chance:
        owners = (leaf.session_id or leaf for leaf in _leaves(node))  # a leaf without a session counts as one
        first = next(owners)
        if node.kind is RestorePointKind.SYSTEM_END or any(owner != first for owner in owners):
            return Chance.SHARED
        return _chance_before_end(node) if node.last_used else Chance.SUPERSEDED

    def _chance_at_end(self, node: Node) -> float:
        if node.session_id is None:
            return Chance.PROBATION if node.is_on_probation else Chance.CURRENT
        session = node.trie.namespace, node.session_id
        end = self._ends.get(session, node)
        if end is not node and end.parent is not None:
            return Chance.LEFT if self._needs_snapshots else Chance.LEFT_ROWS
        self._current.setdefault(session, {})[node] = None
        return Chance.CURRENT

    def _is_point(self, node: Node) -> bool:
        return not self._needs_snapshots or has_whole_snapshot(self._layout, node)

    def _base(self, node: Node) -> int:
        if not self._needs_snapshots:
            return node.start
        above = node.parent
        while above is not None and above.parent is not None:
            if self._is_point(above):
                return above.stop
            above = above.parent
        return 0

    def _tail_bytes(self, leaf: Node) -> int:
        """Bytes of a leaf, and of nodes useless without it."""
        num_bytes, node = leaf.num_bytes, leaf.parent
        while node is not None and self._needs_snapshots and not self._is_point(node):
            if len(node.children) > 1 or node.num_slots:
                break
            num_bytes, node = num_bytes + node.num_bytes, node.parent
        return num_bytes


def _chance_before_end(node: Node) -> Chance:
    prompt_end, newer = RestorePointKind.PROMPT_END, _newer(node)
    if newer is not None and not newer.children:
        return Chance.PROMPT if node.kind is prompt_end else Chance.LANDING
    newest = _newer(newer) if newer is not None and newer.kind is prompt_end else None
    return Chance.LANDING if newest is not None and not newest.children else Chance.EARLIER


def _newer(node: Node) -> Node | None:
    """The next node below with a snapshot, else the leaf; None at a fork."""
    if len(node.children) != 1:
        return None
    (node,) = node.children.values()
    while node.snapshot is None and len(node.children) == 1:
        (node,) = node.children.values()
    return node


def _leaves(node: Node) -> Iterator[Node]:
    """A caller may need only the first of many."""
    stack = [iter((node,))]
    while stack:
        step = next(stack[-1], None)
        if step is None:
            stack.pop()
            continue
        while len(step.children) == 1:
            (step,) = step.children.values()
        if step.children:
            stack.append(iter(step.children.values()))
        else:
            yield step


def _is_candidate(node: Node) -> bool:
    return node.parent is not None and (not node.children or node.snapshot is not None)
