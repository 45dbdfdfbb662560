"""The memory tier: all namespaces' tries, features of pictures, their bytes, eviction, and pins against it.

The ledger's stored bytes are those of all nodes, counted as nodes change, and of features. A leaf is evicted whole,
of an inner node only the snapshot, a node that lives in a slot never. So a pin protects the spans above too. An
*explicit* pin holds until released, a *soft* pin until a given time, or until a request would have to wait or fail.
Slots are paged out regardless: that loses nothing.
"""

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from dataclasses import dataclass, replace
from typing import Any, TypeAlias
from weakref import WeakSet

from cache.budget import EvictionReason, Happening, Journal, Ledger, PinLimit
from cache.disk.connector import DiskConnector
from cache.eviction import Candidate, Chance, EvictionOrder, over_share
from cache.layers.layout import Layout
from cache.slots import RequestClock
from cache.snapshots import KEPT_POINTS, has_shared_rows
from cache.trie import Node, PrefixTrie, Snapshot
from cache.types import TokenArray

logger = logging.getLogger(__name__)

MAX_NAMESPACES = 1024
"""The most namespaces, since eviction visits all."""
FORGOTTEN_PART = 64
"""At the limit, one in so many is forgotten at once."""
ROUNDED_TOKENS = 256
"""Tokens whose stored state is rounded to 8 bits between two steps: far cheaper than to evaluate as many."""
MAX_EXTRA = 32
"""Superseded or unusable candidates evicted beyond a round's target."""


FeaturesKey: TypeAlias = tuple[str, bytes]
"""Namespace, and a picture's digest."""


@dataclass(eq=False)
class _Kept:
    value: Any
    entry: Candidate
    users: "WeakSet[Any]"


class KeptFeatures:
    """Features of pictures, charged to the ledger. Worker thread only."""

    def __init__(self, ledger: Ledger, clock: RequestClock) -> None:
        self._ledger, self._clock = ledger, clock
        self._kept: dict[FeaturesKey, _Kept] = {}

    def recall(self, key: FeaturesKey, user: Any) -> Any:
        """A picture's features, if they are kept. The features stay while `user` lives."""
        if (kept := self._kept.get(key)) is None:
            return None
        kept.entry = replace(kept.entry, last_used=self._clock.now)
        kept.users.add(user)
        return kept.value

    def keep(self, key: FeaturesKey, value: Any, num_bytes: int, num_tokens: int, user: Any) -> None:
        """Charges features that take as long to make as `num_tokens`; whoever calls frees memory for them."""
        entry = Candidate(key, num_bytes, num_tokens, self._clock.now, Chance.FEATURES)
        self._kept[key] = _Kept(value, entry, WeakSet([user]))
        self._ledger.store(num_bytes)

    def in_order(self) -> list[Candidate]:
        """What nobody uses, the least value first."""
        free = (kept.entry for kept in self._kept.values() if not kept.users)
        return sorted(free, key=lambda entry: entry.rank(self._clock.now))

    def drop(self, entry: Candidate) -> None:
        """Forgets features."""
        del self._kept[entry.key]
        self._ledger.store(-entry.num_bytes)

    def clear(self, namespace: str | None) -> None:
        """Forgets those of one namespace, or all, that nobody uses."""
        for entry in self.in_order():
            if namespace in (None, entry.key[0]):
                self.drop(entry)

    @property
    def num_bytes(self) -> int:
        return sum(kept.entry.num_bytes for kept in self._kept.values())

    @property
    def used_bytes(self) -> int:
        return sum(kept.entry.num_bytes for kept in self._kept.values() if kept.users)


class MemoryTier:
    """Tries by namespace, and their bytes. Worker thread only."""

    def __init__(self, layout: Layout, budget_bytes: int, disk: DiskConnector | None) -> None:
        self.layout = layout
        self.ledger = Ledger(budget_bytes)
        self.disk = disk
        """Gets what is evicted; None without a disk tier, or once closed."""
        self.journal = disk.tier.journal if disk is not None else Journal()
        self.clock = RequestClock()
        self.features = KeptFeatures(self.ledger, self.clock)
        self.num_evictions = 0
        self.evictions = Counter[str]()
        self.find_awaited: Callable[[], Set[Node]] = frozenset
        """Nodes that waiting requests will restore: they are evicted last."""
        self.tries: dict[str, PrefixTrie] = {}
        """By namespace, in order of last use."""
        self._empty_leaves: dict[Node, None] = {}
        self.order = EvictionOrder(layout, self._find_over_share)
        """Must be told how nodes are used."""
        self._exact: dict[Node, None] = {}
        """Nodes with stored state to be rounded, the oldest first."""
        self.may_round = True
        """Only on the worker thread, whose MLX streams nobody else may have."""
        self._rounding = self._round()

    def trie(self, namespace: str, in_use: Iterable[str]) -> PrefixTrie:
        """Returns a namespace's trie; makes a missing one, and forgets empty ones not `in_use`.

        Beyond `MAX_NAMESPACES`, the least recently used lose all unpinned state.
        """
        trie = self.tries.pop(namespace, None)
        if trie is None:
            self._forget_idle(set(in_use))
            trie = PrefixTrie(self.ledger.store, namespace, self._changed, self._snapped)
        self.tries[namespace] = trie
        return trie

    def _changed(self, node: Node) -> None:
        self.order.changed(node)
        self._note_form(node)

    def _snapped(self, node: Node) -> None:
        self.order.snapped(node)
        self._note_form(node)

    def _note_form(self, node: Node) -> None:
        if self.layout.form.is_exact:
            return
        node.is_rounded = node.is_rounded or (node.span is not None and node.span.is_rounded)
        if self._can_round(node):
            self._exact[node] = None

    def _forget_idle(self, in_use: set[str]) -> None:
        is_full = len(self.tries) >= MAX_NAMESPACES
        limit = MAX_NAMESPACES - MAX_NAMESPACES // FORGOTTEN_PART
        idle = [(name, trie) for name, trie in self.tries.items() if name not in in_use]
        for name, trie in sorted(idle, key=lambda pair: pair[1].num_nodes > 0):
            while is_full and len(self.tries) >= limit and (leaves := _evictable_leaves(trie)):
                for leaf in leaves:
                    self._evict(leaf, (), EvictionReason.NAMESPACES)
            if not trie.num_nodes:
                del self.tries[name], self.evictions[name]

    def find_trie(self, namespace: str) -> PrefixTrie:
        """A namespace's trie, or an empty one not stored."""
        return self.tries.get(namespace) or PrefixTrie()

    def _find_over_share(self) -> set[str]:
        held_bytes = {name: trie.holding.num_bytes for name, trie in self.tries.items()}
        return over_share(held_bytes, self.ledger.budget_bytes)

    def nodes(self) -> Iterator[Node]:
        """Every node, parents first."""
        return (node for trie in self.tries.values() for node in trie.nodes())

    def clear(self, namespace: str | None) -> None:
        """Drops one namespace's state, or all, that lives in no slot."""
        self.features.clear(namespace)
        for trie in [trie for name, trie in self.tries.items() if namespace in (None, name)]:
            while leaves := [node for node in trie.nodes() if _is_free_leaf(node)]:
                for node in leaves:
                    trie.remove(node)
            for node in trie.nodes():
                trie.snap(node, None)

    def drop_below(self, top: Node) -> None:
        """Drops a node and all below it."""
        above = top.parent
        for node in reversed([top, *top.below()]):
            node.trie.remove(node)
        self._drop_empty(above, ())

    def used(self, node: Node) -> None:
        """Records that a sequence was restored at a node, or recorded up to it."""
        self.order.used(node, self.clock.now)

    def ended(self, node: Node) -> None:
        """Records that a node's session ends there now."""
        self.used(node)
        self.order.ended(node)

    def refresh_if_many_changed(self) -> None:
        """Updates the eviction order ahead of time."""
        self.order.refresh_if_many_changed()
        leaves, self._empty_leaves = self._empty_leaves, {}
        for node in leaves:
            self._drop_empty(node, ())

    # -- rounding to 8 bits

    @property
    def has_exact(self) -> bool:
        """Whether stored state is still to be rounded."""
        return self.may_round and bool(self._exact)

    def round_stored(self, num_tokens: float, target_bytes: int = -1) -> None:
        """Rounds state of about `num_tokens`, until `target_bytes` are charged; what an error meets stays exact.

        Nothing else may be under way on the device.
        """
        left = num_tokens * max(self.layout.bytes_per_token, 1.0)
        while self.has_exact and left > 0 and self.ledger.charged_bytes > target_bytes:
            try:
                left -= next(self._rounding, math.inf)
            except Exception as error:
                logger.warning("stored state stays exact: %s", error)
                del self._exact[next(iter(self._exact))]
                self._rounding = self._round()

    def _round(self) -> Iterator[int]:
        """Yields the bytes of each piece."""
        while True:
            node = next(iter(self._exact), None)
            if node is None:
                yield 0
                continue
            yield from self._round_rows(node)
            snapshot = node.snapshot
            if snapshot is not None and snapshot.recurrent is not None:
                rounded = self.layout.rounded_recurrent(snapshot.recurrent)
                node.trie.snap(node, Snapshot(snapshot.offset, snapshot.window, rounded))
                yield snapshot.num_bytes
            if not self._can_round(node):
                self._exact.pop(node, None)

    def _round_rows(self, node: Node) -> Iterator[int]:
        """Ends where the node's rows were moved or cut meanwhile."""
        span = node.span
        if span is None:
            return
        piece_bytes = int(ROUNDED_TOKENS * self.layout.bytes_per_token)
        for num_bytes, rounded in self.layout.rounding(span, piece_bytes):
            if node.span is not span:
                return
            if rounded is not span:
                node.trie.store(node, rounded)
                span = rounded
            yield num_bytes

    def _can_round(self, node: Node) -> bool:
        return self.layout.can_round(node.span, node.snapshot.recurrent if node.snapshot is not None else None)

    # -- eviction

    def evict(self, target_bytes: int, kept: Collection[Node], *, guards_sessions: bool = False) -> None:
        """Evicts in order until `target_bytes` are charged, or only `kept` nodes are left.

        What waiting requests will restore goes last; before it, with `guards_sessions`, session ends and explicit
        restore points.
        """
        if self.ledger.charged_bytes <= target_bytes:
            return
        awaited, features = frozenset(self.find_awaited()), self.features.in_order()
        rounds = [(guards_sessions, awaited), (False, awaited), (False, frozenset[Node]())]
        for spares_sessions, spared in dict.fromkeys(rounds):
            popped = list[Candidate]()
            try:
                for victim in self._in_order(target_bytes, popped):
                    self._drop_features(features, target_bytes, victim)
                    if self.ledger.charged_bytes <= target_bytes and victim.chance > Chance.SUPERSEDED:
                        break
                    is_guarded = spares_sessions and (victim.is_session_end or victim.is_explicit)
                    node = victim.key
                    if not is_guarded and node not in spared and node not in kept and _is_evictable(node):
                        self._evict(node, kept, _reason_of(victim))
            finally:
                for victim in popped:
                    self.order.put_back(victim)
            if self.ledger.charged_bytes <= target_bytes:
                return
        self._drop_features(features, target_bytes)

    def _drop_features(self, features: list[Candidate], target_bytes: int, before: Candidate | None = None) -> None:
        """Drops the first features, those that are worth less than `before` if given."""
        now = self.clock.now
        while features and self.ledger.charged_bytes > target_bytes:
            if before is not None and features[0].rank(now) > before.rank(now):
                return
            self.features.drop(features.pop(0))

    def _in_order(self, target_bytes: int, popped: list[Candidate]) -> Iterator[Candidate]:
        """Yields candidates, superseded or unusable ones beyond `target_bytes` too; `popped` gets all."""
        num_extra = 0
        while (victim := self.order.pop(self.clock.now)) is not None:
            popped.append(victim)
            if self.ledger.charged_bytes <= target_bytes:
                num_extra += 1
                if victim.chance > Chance.SUPERSEDED or num_extra > MAX_EXTRA:
                    break
            yield victim

    def _evict(self, node: Node, kept: Collection[Node], reason: EvictionReason) -> None:
        """Drops a leaf, or a node's snapshot except window rows that restore points below need."""
        rest, num_bytes, is_snapshot = None, node.num_bytes, bool(node.children)
        if is_snapshot:
            snapshot = node.snapshot
            assert snapshot is not None
            rest = Snapshot(snapshot.offset, snapshot.window, None) if has_shared_rows(self.layout, node) else None
            num_bytes = snapshot.num_bytes - (rest.num_bytes if rest is not None else 0)
            if rest is not None and not num_bytes:
                return
        name = node.trie.namespace
        self.num_evictions += 1
        self.evictions[name] += 1
        if self.journal.tell is not None:  # there may be thousands of nodes
            fields = {"kind": "snapshot" if is_snapshot else "edge", "tokens": node.stop - node.start}
            self.journal.record(Happening.EVICTED, name, **fields, bytes=num_bytes, reason=reason)
        if self.disk is not None:
            try:
                self.disk.save_dropped(node)
            except Exception as error:  # the state is dropped all the more
                logger.warning("dropped state was not written to disk: %s", error)
        if is_snapshot:
            node.trie.snap(node, rest)
        else:
            self._remove_leaf(node, kept)

    def _remove_leaf(self, leaf: Node, kept: Collection[Node]) -> None:
        parent = leaf.parent
        leaf.trie.remove(leaf)
        parent = self._drop_empty(parent, kept)
        if parent is not None and parent.last_used <= leaf.last_used and not parent.children:
            # The conversation now ends at the parent, and its age stays the same.
            parent.session_id, parent.is_background = leaf.session_id, leaf.is_background
            self.order.used(parent, leaf.last_used)
            self.order.ended(parent)

    def _drop_empty(self, node: Node | None, kept: Collection[Node]) -> Node | None:
        """Drops an empty leaf, then its parent if now a leaf; returns the first that stays.

        The order lacks `kept` and pinned nodes: they are tried again when a request ends.
        """
        while node is not None and _is_free_leaf(node) and not node.num_bytes:
            if node in kept or node.num_pins:
                self._empty_leaves[node] = None
                break
            above = node.parent
            node.trie.remove(node)
            node = above
        return node

    def check(self) -> None:
        """Asserts the invariants."""
        for trie in self.tries.values():
            trie.check()
        self.order.check(self.nodes())
        stored = sum(trie.holding.num_bytes for trie in self.tries.values()) + self.features.num_bytes
        assert stored == self.ledger.stored_bytes, f"{stored} bytes stored, {self.ledger.stored_bytes} counted"


def _reason_of(victim: Candidate) -> EvictionReason:
    if victim.chance > Chance.SUPERSEDED:
        return EvictionReason.MEMORY
    return EvictionReason.UNUSABLE if victim.chance <= Chance.UNUSABLE else EvictionReason.SUPERSEDED


def _is_evictable(node: Node) -> bool:
    if node.num_pins or node.num_slots:  # a head's rows stay while they are read, so must what restores them
        return False
    return node.snapshot is not None if node.children else _is_free_leaf(node)


def _evictable_leaves(trie: PrefixTrie) -> list[Node]:
    return [node for node in trie.nodes() if not node.children and _is_evictable(node)]


def _is_free_leaf(node: Node) -> bool:
    return node.parent is not None and not node.children and node.num_slots == 0 and node.home is None


@dataclass(frozen=True)
class PinName:
    """A second pin of a name replaces the first."""

    namespace: str
    label: str
    is_soft: bool = False
    """A soft pin; the label may have an explicit pin too."""


class Pins:
    """All pins by name. Worker thread only."""

    def __init__(self, memory: MemoryTier) -> None:
        self._memory = memory
        self._pins: dict[PinName, tuple[list[Node], float]] = {}
        """Nodes, and when the clock reads what the pin ends."""

    def pin(self, name: PinName, tokens: TokenArray, until: float = math.inf) -> int:
        """Protects the stored state of `tokens`; returns their number.

        An explicit pin moves to each turn's end of its session; raises PinLimit if all would exceed half the budget.
        A soft pin holds until the caller's clock reads `until`, or a request must wait.
        """
        match = self._memory.find_trie(name.namespace).match(tokens)
        if match.length:
            self._hold(name, match.node.path(), until)
        return match.length

    def follow(self, namespace: str, session_id: str | None, tip: Node) -> None:
        """Moves a session's pin, if any, to its sequence's end."""
        name = PinName(namespace, session_id or "")
        if name in self._pins and tip.parent is not None:
            with contextlib.suppress(PinLimit):  # the earlier part of the session stays pinned
                self._hold(name, tip.path(), math.inf)

    def _hold(self, name: PinName, path: list[Node], until: float) -> None:
        # The end protects all spans; two turns' snapshots serve a next turn rendered differently.
        inner = [node for node in path[:-1] if node.snapshot is not None]
        nodes = [*inner[-KEPT_POINTS:], path[-1]]
        if not name.is_soft:
            num_bytes = self._bytes_of({*nodes, *self.explicit(but=name)})
            limit = self._memory.ledger.budget_bytes // 2
            if num_bytes > limit:
                raise PinLimit(num_bytes, limit)
        for node in nodes:
            node.num_pins += 1
        self.release(name)
        self._pins[name] = nodes, until

    def _bytes_of(self, nodes: set[Node]) -> int:
        per_token = self._memory.layout.stored_bytes_per_token
        snapshots = sum(node.snapshot.num_bytes for node in nodes if node.snapshot is not None)
        return snapshots + sum(
            node.span.num_bytes if node.span is not None else int(len(node.tokens) * per_token)
            for node in path_nodes(nodes)
        )

    def release(self, name: PinName) -> list[Node]:
        """Ends a pin; returns its nodes, none if there was no pin."""
        nodes, _ = self._pins.pop(name, ([], 0))
        for node in nodes:
            node.num_pins -= 1
        return nodes

    def release_expired(self, now: float) -> None:
        """Ends expired soft pins."""
        self.release_if(lambda name: self._pins[name][1] <= now)

    def release_soft(self) -> bool:
        """Ends soft pins; returns whether that unpinned a node."""
        nodes = self.release_if(lambda name: name.is_soft)
        return any(node.num_pins == 0 and node.parent is not None for node in nodes)

    def release_if(self, is_over: Callable[[PinName], bool]) -> list[Node]:
        """Ends pins; returns their nodes."""
        return [node for name in list(filter(is_over, self._pins)) for node in self.release(name)]

    def labels(self, namespace: str) -> tuple[str, ...]:
        """Labels of a namespace's explicit pins."""
        return tuple(name.label for name in self._pins if name.namespace == namespace and not name.is_soft)

    def explicit(self, *, but: PinName | None = None) -> set[Node]:
        """Nodes with explicit pins other than `but`."""
        pinned = (nodes for name, (nodes, _) in self._pins.items() if not name.is_soft and name != but)
        return {node for nodes in pinned for node in nodes if node.parent is not None}


def path_nodes(nodes: Iterable[Node]) -> set[Node]:
    """Nodes on the paths to `nodes`, inclusive."""
    return {above for node in nodes for above in node.path()}
