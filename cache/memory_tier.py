"""The memory tier: the tries of all namespaces, their bytes, eviction when memory is short, and pins against it.

The ledger's stored bytes are the bytes of all nodes, counted as nodes change. A leaf is evicted whole, of an inner
node only the snapshot, a node that lives in a slot never. So a pin protects the spans above too. An *explicit* pin
holds until released, a *soft* pin until a given time, or until a request would have to wait or fail. Slots are paged
out regardless: that loses nothing.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial

from cache.budget import CacheEvent, EvictionReason, Happening, Journal, Ledger, PinLimit
from cache.eviction import Candidate, Chance, EvictionOrder, over_share
from cache.layers.layout import Layout
from cache.snapshots import KEPT_POINTS, has_shared_rows
from cache.trie import Holding, Node, PrefixTrie, Snapshot
from cache.types import TokenArray

MAX_NAMESPACES = 1024
"""The most namespaces, since eviction visits all."""
FORGOTTEN_PART = 64
"""At the limit, one in so many is forgotten at once."""
MAX_EXTRA = 32
"""Superseded or unusable candidates evicted beyond a round's target."""


class MemoryTier:
    """Tries by namespace, and their bytes. Worker thread only."""

    def __init__(self, layout: Layout, budget_bytes: int, journal: Journal) -> None:
        self.ledger = Ledger(budget_bytes)
        self.journal = journal
        self.num_evictions = 0
        self.evictions = Counter[str]()
        self.before_eviction: Callable[[PrefixTrie, Node], None] = lambda trie, node: None
        self.find_awaited: Callable[[], Set[Node]] = frozenset
        """Nodes that waiting requests will restore: they are evicted last."""
        self._layout = layout
        self._tries: dict[str, PrefixTrie] = {}
        """In order of last use."""
        self._held = Counter[str]()
        """Stored bytes."""
        self._empty_leaves: dict[Node, PrefixTrie] = {}
        self.order = EvictionOrder(layout, self._find_over_share)
        """Must be told how nodes are used."""

    def trie(self, namespace: str, in_use: Iterable[str]) -> PrefixTrie:
        """Returns a namespace's trie; makes a missing one, and forgets empty ones not `in_use`.

        Beyond `MAX_NAMESPACES`, the least recently used lose all unpinned state.
        """
        found = self._tries.pop(namespace, None)
        if found is None:
            used = set(in_use)
            self._forget_idle([name for name in self._tries if name not in used])
            found = self._make_trie(namespace)
        self._tries[namespace] = found
        return found

    def _make_trie(self, name: str) -> PrefixTrie:
        store, held = self.ledger.store, self._held

        def count_bytes(num_bytes: int) -> None:
            store(num_bytes)
            held[name] += num_bytes

        return PrefixTrie(count_bytes, name, partial(self.order.changed, name), partial(self.order.snapped, name))

    def _forget_idle(self, idle: Sequence[str]) -> None:
        is_full = len(self._tries) >= MAX_NAMESPACES
        limit = MAX_NAMESPACES - MAX_NAMESPACES // FORGOTTEN_PART
        for name in sorted(idle, key=lambda name: self._tries[name].num_nodes > 0):
            trie = self._tries[name]
            if is_full and len(self._tries) >= limit:
                self._drop_idle(trie)
            if not trie.num_nodes:
                del self._tries[name]
                del self._held[name], self.evictions[name]

    def _drop_idle(self, trie: PrefixTrie) -> None:
        while leaves := [node for node in trie.nodes() if not node.children and _is_evictable(node)]:
            for leaf in leaves:
                self._evict_leaf(trie, leaf, (), EvictionReason.NAMESPACES)

    @property
    def namespaces(self) -> list[str]:
        return list(self._tries)

    def find_trie(self, namespace: str) -> PrefixTrie:
        """A namespace's trie, or an empty one not stored."""
        return self._tries.get(namespace) or PrefixTrie()

    def holding(self, namespace: str) -> Holding:
        """What a namespace's trie holds."""
        return self.find_trie(namespace).held

    def _find_over_share(self) -> set[str]:
        return over_share(self._held, self.ledger.budget_bytes)

    def nodes(self) -> Iterator[tuple[PrefixTrie, Node]]:
        """Every node with its trie, parents first."""
        for trie in self._tries.values():
            for node in trie.nodes():
                yield trie, node

    @property
    def num_nodes(self) -> int:
        return sum(trie.num_nodes for trie in self._tries.values())

    def clear(self, namespace: str | None) -> None:
        """Drops one namespace's state, or all, that lives in no slot."""
        tries = [trie for name, trie in self._tries.items() if namespace in (None, name)]
        for trie in tries:
            while leaves := [node for node in trie.nodes() if _is_free_leaf(node)]:
                for node in leaves:
                    trie.remove(node)
            for node in trie.nodes():
                trie.snap(node, None)

    def drop_below(self, trie: PrefixTrie, top: Node) -> None:
        """Drops a node and all below it."""
        above = top.parent
        for node in reversed(_subtree(top)):
            trie.remove(node)
        self._drop_empty(trie, above, ())

    def restored(self, trie: PrefixTrie, node: Node, now: int) -> None:
        """Records a sequence restored at a node."""
        for passed in node.path():
            passed.num_uses += 1
        self.order.used(trie.namespace, node, now)

    def supersede(self, trie: PrefixTrie, node: Node) -> None:
        """Newer snapshots replace a node's: it is evicted first."""
        node.last_used = 0
        self.order.changed(trie.namespace, node)

    def refresh_if_many_changed(self) -> None:
        """Updates the eviction order ahead of time."""
        self.order.refresh_if_many_changed()
        leaves, self._empty_leaves = self._empty_leaves, {}
        for node, trie in leaves.items():
            self._drop_empty(trie, node, ())

    def evict(self, target_bytes: int, kept: Collection[Node], now: int, *, guards_sessions: bool = False) -> None:
        """Evicts in order until `target_bytes` are charged, or only `kept` nodes are left.

        What waiting requests will restore goes last; before it, with `guards_sessions`, session ends and explicit
        restore points.
        """
        if self.ledger.charged_bytes <= target_bytes:
            return
        for spares_sessions, spared in _rounds(guards_sessions, self.find_awaited()):
            popped = list[Candidate]()
            try:
                for victim in self._in_order(target_bytes, now, popped):
                    is_guarded = spares_sessions and (victim.is_session_end or victim.is_explicit)
                    if not is_guarded and victim.key[1] not in spared:
                        self._evict_one(victim, kept)
            finally:
                for victim in popped:
                    self.order.put_back(victim)
            if self.ledger.charged_bytes <= target_bytes:
                return

    def _in_order(self, target_bytes: int, now: int, popped: list[Candidate]) -> Iterator[Candidate]:
        """Yields candidates, superseded or unusable ones beyond `target_bytes` too; `popped` gets all."""
        num_extra = 0
        while (victim := self.order.pop(now)) is not None:
            popped.append(victim)
            if self.ledger.charged_bytes <= target_bytes:
                num_extra += 1
                if victim.chance > Chance.SUPERSEDED or num_extra > MAX_EXTRA:
                    break
            yield victim

    def _evict_one(self, victim: Candidate, kept: Collection[Node]) -> None:
        namespace, node = victim.key
        if node not in kept and _is_evictable(node):
            trie, reason = self._tries[namespace], _reason_of(victim)
            if node.children:
                self._evict_snapshot(trie, node, reason)
            else:
                self._evict_leaf(trie, node, kept, reason)

    def _evict_leaf(self, trie: PrefixTrie, leaf: Node, kept: Collection[Node], reason: EvictionReason) -> None:
        self._note_eviction(trie, leaf, leaf.num_bytes, reason, is_snapshot=False)
        self.before_eviction(trie, leaf)
        parent = leaf.parent
        trie.remove(leaf)
        parent = self._drop_empty(trie, parent, kept)
        if parent is not None and parent.last_used <= leaf.last_used and not parent.children:
            # The conversation now ends at the parent, and its age stays the same.
            parent.session_id, parent.is_background = leaf.session_id, leaf.is_background
            self.order.used(trie.namespace, parent, leaf.last_used)
            self.order.ended(trie.namespace, parent)

    def _drop_empty(self, trie: PrefixTrie, node: Node | None, kept: Collection[Node]) -> Node | None:
        """Drops an empty leaf, then its parent if now a leaf; returns the first that stays.

        The order lacks `kept` and pinned nodes: they are tried again when a request ends.
        """
        while node is not None and _is_free_leaf(node) and not node.num_bytes:
            if node in kept or node.num_pins:
                self._empty_leaves[node] = trie
                break
            above = node.parent
            trie.remove(node)
            node = above
        return node

    def _evict_snapshot(self, trie: PrefixTrie, node: Node, reason: EvictionReason) -> None:
        """Drops a node's snapshot, except window rows that restore points below need."""
        snapshot = node.snapshot
        assert snapshot is not None
        rest = Snapshot(snapshot.offset, snapshot.window, None) if has_shared_rows(self._layout, node) else None
        if rest is None or rest.num_bytes < snapshot.num_bytes:
            num_bytes = snapshot.num_bytes - (rest.num_bytes if rest is not None else 0)
            self._note_eviction(trie, node, num_bytes, reason, is_snapshot=True)
            self.before_eviction(trie, node)
            trie.snap(node, rest)

    def _note_eviction(
        self, trie: PrefixTrie, node: Node, num_bytes: int, reason: EvictionReason, *, is_snapshot: bool
    ) -> None:
        name, num_tokens, what = trie.namespace, node.stop - node.start, Happening.EVICTED
        self.num_evictions += 1
        self.evictions[name] += 1
        if self.journal.tell is not None:  # there may be thousands of nodes
            self.journal.record(CacheEvent(what, name, num_tokens, num_bytes, is_snapshot=is_snapshot, reason=reason))

    def check(self) -> None:
        """Asserts the invariants."""
        for trie in self._tries.values():
            trie.check()
        self.order.check((trie.namespace, node) for trie, node in self.nodes())
        stored = sum(node.num_bytes for _, node in self.nodes())
        assert stored == self.ledger.stored_bytes, f"{stored} bytes stored, {self.ledger.stored_bytes} counted"
        held = Counter[str]()
        for trie, node in self.nodes():
            held[trie.namespace] += node.num_bytes
        assert +held == +self._held, f"{held} stored by namespace, {self._held} counted"


def _rounds(guards_sessions: bool, awaited: Set[Node]) -> Iterator[tuple[bool, Set[Node]]]:
    """For each round, whether session ends are spared, and which nodes; the last spares nothing."""
    if guards_sessions:
        yield True, awaited
    if awaited:
        yield False, awaited
    yield False, frozenset()


def _reason_of(victim: Candidate) -> EvictionReason:
    if victim.chance > Chance.SUPERSEDED:
        return EvictionReason.MEMORY
    return EvictionReason.UNUSABLE if victim.chance <= Chance.UNUSABLE else EvictionReason.SUPERSEDED


def _subtree(node: Node) -> list[Node]:
    found = [node]
    for parent in found:
        found.extend(parent.children.values())
    return found


def _is_evictable(node: Node) -> bool:
    if node.num_pins or node.num_slots:  # a head's rows stay while they are read, so must what restores them
        return False
    return node.snapshot is not None if node.children else _is_free_leaf(node)


def _is_free_leaf(node: Node) -> bool:
    return node.parent is not None and not node.children and node.num_slots == 0 and node.home is None


@dataclass(frozen=True)
class PinName:
    """A second pin of a name replaces the first."""

    namespace: str
    label: str
    is_soft: bool = False
    """A soft pin; the label may have an explicit pin too."""


@dataclass(frozen=True, eq=False)
class _Pin:
    nodes: list[Node]
    until: float | None


class Pins:
    """All pins by name. Worker thread only."""

    def __init__(self, ledger: Ledger, layout: Layout) -> None:
        """Explicit pins may protect half of the budget."""
        self._ledger = ledger
        self._layout = layout
        self._pins: dict[PinName, _Pin] = {}

    def __contains__(self, name: PinName) -> bool:
        return name in self._pins

    def pin(self, name: PinName, trie: PrefixTrie, tokens: TokenArray) -> int:
        """As `PrefixCache.pin`."""
        match = trie.match(tokens)
        if match.path:
            self._pin_path(name, match.path)
        return match.length

    def pin_until(self, name: PinName, trie: PrefixTrie, tokens: TokenArray, until: float) -> None:
        """Pins stored state softly, until the caller's clock reads `until`."""
        assert name.is_soft
        path = trie.match(tokens).path
        if path:
            self._hold(name, _nodes_to_pin(path), until)

    def follow(self, namespace: str, session_id: str | None, tip: Node) -> None:
        """Moves a session's pin, if any, to its sequence's end."""
        name = PinName(namespace, session_id or "")
        if name in self and tip.parent is not None:
            with contextlib.suppress(PinLimit):  # the earlier part of the session stays pinned
                self._pin_path(name, tip.path())

    def _pin_path(self, name: PinName, path: list[Node]) -> None:
        nodes = _nodes_to_pin(path)
        num_bytes = self._bytes_of({*nodes, *self.explicit(but=name)})
        limit = self._ledger.budget_bytes // 2
        if num_bytes > limit:
            raise PinLimit(num_bytes, limit)
        self._hold(name, nodes, None)

    def _bytes_of(self, nodes: set[Node]) -> int:
        snapshots = sum(node.snapshot.num_bytes for node in nodes if node.snapshot is not None)
        return snapshots + sum(
            node.span.num_bytes if node.span is not None else int(len(node.tokens) * self._layout.bytes_per_token)
            for node in path_nodes(nodes)
        )

    def _hold(self, name: PinName, nodes: list[Node], until: float | None) -> None:
        for node in nodes:
            node.num_pins += 1
        self.release(name)
        self._pins[name] = _Pin(nodes, until)

    def release(self, name: PinName) -> None:
        """Ends a pin, if any."""
        pin = self._pins.pop(name, None)
        for node in pin.nodes if pin is not None else ():
            node.num_pins -= 1

    def release_expired(self, now: float) -> None:
        """Ends expired soft pins."""
        self._release(lambda name, pin: pin.until is not None and pin.until <= now)

    def release_soft(self) -> bool:
        """Ends soft pins; returns whether that unpinned a node."""
        nodes = self._release(lambda name, pin: pin.until is not None)
        return any(node.num_pins == 0 and node.parent is not None for node in nodes)

    def release_all(self, namespace: str | None) -> None:
        """Ends the pins of one namespace, or all."""
        self._release(lambda name, pin: namespace in (None, name.namespace))

    def _release(self, is_over: Callable[[PinName, _Pin], bool]) -> list[Node]:
        ended = [(name, pin) for name, pin in self._pins.items() if is_over(name, pin)]
        for name, _ in ended:
            self.release(name)
        return [node for _, pin in ended for node in pin.nodes]

    def labels(self, namespace: str) -> tuple[str, ...]:
        """Labels of a namespace's explicit pins."""
        return tuple(n.label for n, pin in self._pins.items() if n.namespace == namespace and pin.until is None)

    def explicit(self, *, but: PinName | None = None) -> set[Node]:
        """Nodes with explicit pins other than `but`."""
        held = (pin for name, pin in self._pins.items() if pin.until is None and name != but)
        return {node for pin in held for node in pin.nodes if node.parent is not None}


def path_nodes(nodes: Iterable[Node]) -> set[Node]:
    """Nodes on the paths to `nodes`, inclusive."""
    return {above for node in nodes for above in node.path()}


def _nodes_to_pin(path: list[Node]) -> list[Node]:
    """The end protects all spans; two turns' snapshots serve a next turn rendered differently."""
    inner = [node for node in path[:-1] if node.snapshot is not None]
    return [*inner[-KEPT_POINTS:], *path[-1:]]
