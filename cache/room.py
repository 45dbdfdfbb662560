"""What the trie stores within a budget: the tries of all namespaces, their bytes, and what goes when memory is short.

Invariant: the ledger's stored bytes are the bytes of all nodes. A leaf goes whole; of an inner node its snapshot may
go. What lives in a slot is never dropped here. Which of several candidates goes first is `cache.eviction`'s to say.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial

from cache.eviction import Candidate, Chance
from cache.layers import Layout
from cache.ledger import Ledger
from cache.quota import FairQueue, over_share
from cache.snapshots import Snapshot, is_leant_on
from cache.survey import Survey, is_droppable, is_free_leaf
from cache.trie import Node, PrefixTrie

NODES_PER_TICK = 1024
"""For so many nodes the order of what to give up may be one reading of the clock old."""
MAX_EXTRA = 64
"""Of what is next to worthless, so much goes beyond the need in one round."""


@dataclass
class _Ranking:
    """What can be given up, in order, as it was found at a reading of the clock."""

    survey: Survey
    queue: FairQueue
    made_at: int


class Room:
    """Tries by namespace, with the account of their bytes. Worker thread only."""

    def __init__(self, layout: Layout, budget_bytes: int) -> None:
        self.ledger = Ledger(budget_bytes)
        self.num_evictions = 0
        """Leaves and snapshots dropped for want of memory."""
        self.evictions: Counter[str] = Counter()
        """The same by namespace, for those that hold something."""
        self.before_dropping: Callable[[PrefixTrie, Node], None] = lambda trie, node: None
        """Told of a node whose state, or whose snapshot, is about to go."""
        self._layout = layout
        self._tries: dict[str, PrefixTrie] = {}
        self._held: Counter[str] = Counter()
        """Stored bytes by namespace."""
        self._last_ranking: _Ranking | None = None

    def trie(self, namespace: str, in_use: set[str]) -> PrefixTrie:
        """Returns the trie of a namespace; forgets empty ones, but for those `in_use`."""
        if namespace not in self._tries:
            self._tries = {name: trie for name, trie in self._tries.items() if trie.num_nodes or name in in_use}
            self.evictions = Counter({name: count for name, count in self.evictions.items() if name in self._tries})
            self._held = Counter({name: self._held[name] for name in self._tries})
            self._tries[namespace] = PrefixTrie(partial(self._store, namespace), namespace)
        return self._tries[namespace]

    def find_trie(self, namespace: str) -> PrefixTrie:
        """Returns the trie of a namespace, or an empty one that is not kept."""
        return self._tries.get(namespace) or PrefixTrie()

    def nodes(self) -> Iterator[tuple[PrefixTrie, Node]]:
        """Yields every node with its trie, parents before children."""
        for trie in self._tries.values():
            for node in trie.nodes():
                yield trie, node

    @property
    def num_nodes(self) -> int:
        """Nodes of all namespaces."""
        return sum(trie.num_nodes for trie in self._tries.values())

    def clear(self, namespace: str | None) -> None:
        """Drops everything of one namespace, or of all, that lives in no slot."""
        self._last_ranking = None
        tries = [trie for name, trie in self._tries.items() if namespace in (None, name)]
        for trie in tries:
            while leaves := [node for node in trie.nodes() if is_free_leaf(node)]:
                for node in leaves:
                    trie.remove(node)
            for node in trie.nodes():
                trie.snap(node, None)

    def drop_below(self, trie: PrefixTrie, top: Node) -> None:
        """Drops a node and everything under it."""
        for node in reversed(_subtree(top)):
            trie.remove(node)

    def drop_cheapest(
        self, target_bytes: int, kept: Collection[Node], now: int, *, guards_sessions: bool = False
    ) -> None:
        """Drops what is worth least until no more than `target_bytes` are charged, or nothing more can go.

        What is next to worthless goes in any case, so that the next rounds come later. `now` is the reading of the
        clock of `Node.last_used`; with `guards_sessions` the ends of sessions go last.
        """
        if self.ledger.charged_bytes <= target_bytes:
            return
        ranking, is_new = self._ranking(now, guards_sessions)
        self._drop_by(ranking, target_bytes, kept)
        if self.ledger.charged_bytes > target_bytes and not is_new:
            self._last_ranking = None
            self._drop_by(self._ranking(now, guards_sessions)[0], target_bytes, kept)

    def _ranking(self, now: int, guards_sessions: bool) -> tuple[_Ranking, bool]:
        """Returns all candidates in order, and whether they were looked up just now.

        To look at every node takes long where there are many, and then it matters little what the newest did since.
        """
        last = self._last_ranking
        may_be_old = last is not None and now - last.made_at < self.num_nodes // NODES_PER_TICK
        if last is not None and may_be_old and last.survey.guards_sessions == guards_sessions:
            last.survey.now = now
            return last, False
        survey = Survey(self._layout, self._tries.values(), now, guards_sessions=guards_sessions)
        queue = FairQueue(self._over_share)
        for trie, candidate in survey.candidates():
            queue.push(trie.namespace, candidate)
        self._last_ranking = _Ranking(survey, queue, now)
        return self._last_ranking, True

    def _drop_by(self, ranking: _Ranking, target_bytes: int, kept: Collection[Node]) -> None:
        """Drops candidates in their order, down to the target; those that cannot go now stay in the ranking."""
        survey, queue, passed = ranking.survey, ranking.queue, list[tuple[PrefixTrie, Candidate]]()
        num_extra = 0
        while (victim := queue.pop()) is not None:
            trie, node = victim.key
            if self.ledger.charged_bytes <= target_bytes:
                num_extra += 1
                if victim.chance > Chance.SUPERSEDED or num_extra > MAX_EXTRA:
                    passed.append((trie, victim))
                    break
            if node in kept or not is_droppable(node):
                # Pinned, in a slot, or about to be restored; unless it has gone, or all that could go of it.
                may_go_later = node.parent is not None and (not node.children or node.snapshot is not None)
                passed += [(trie, victim)] if may_go_later else []
                continue
            fresh = survey.candidate(trie, node)
            if fresh.rank > victim.rank:
                queue.push(trie.namespace, fresh)  # what it would be evaluated from has gone meanwhile
                continue
            exposed = self._drop_snapshot(trie, node) if node.children else self._drop_leaf(trie, node)
            if exposed is not None and is_droppable(exposed):
                queue.push(trie.namespace, survey.candidate(trie, exposed))
        for trie, victim in passed:
            queue.push(trie.namespace, victim)

    def _drop_leaf(self, trie: PrefixTrie, node: Node) -> Node | None:
        """Drops a leaf, and what above it holds no bytes; returns what may be a leaf then."""
        self._count_eviction(trie)
        self.before_dropping(trie, node)
        leaf, parent = node, node.parent
        trie.remove(node)
        while parent is not None and is_free_leaf(parent) and not parent.num_bytes:
            node, parent = parent, parent.parent
            trie.remove(node)
        if parent is not None and parent.last_used < leaf.last_used:
            # The conversation ends here now, and is no older for that.
            parent.last_used, parent.session_id = leaf.last_used, leaf.session_id
            parent.is_background = leaf.is_background
        return parent

    def _drop_snapshot(self, trie: PrefixTrie, node: Node) -> Node | None:
        """Drops what of a snapshot no other leans on; returns what may no longer be leant on then."""
        snapshot = node.snapshot
        assert isinstance(snapshot, Snapshot)
        rest = Snapshot(snapshot.offset, snapshot.window, None) if is_leant_on(self._layout, node) else None
        if rest is None or rest.num_bytes < snapshot.num_bytes:
            self._count_eviction(trie)
            self.before_dropping(trie, node)
            trie.snap(node, rest)
        return node.parent if rest is None else None

    def _store(self, namespace: str, num_bytes: int) -> None:
        self.ledger.store(num_bytes)
        self._held[namespace] += num_bytes

    def _over_share(self) -> set[str]:
        return over_share(self._held, self.ledger.budget_bytes)

    def _count_eviction(self, trie: PrefixTrie) -> None:
        self.num_evictions += 1
        self.evictions[trie.namespace] += 1

    def check(self) -> None:
        """Asserts the invariants."""
        for trie in self._tries.values():
            trie.check()
        stored = sum(node.num_bytes for _, node in self.nodes())
        assert stored == self.ledger.stored_bytes, f"{stored} bytes stored, {self.ledger.stored_bytes} counted"
        held = Counter(
            {trie.namespace: sum(node.num_bytes for node in trie.nodes()) for trie in self._tries.values()}
        )
        assert +held == +self._held, f"{held} stored by namespace, {self._held} counted"


def _subtree(node: Node) -> list[Node]:
    """Returns a node and everything below it, parents first."""
    found = [node]
    for parent in found:
        found.extend(parent.children.values())
    return found
