"""A path-compressed prefix trie over token ids, and the memory tier's trie with state on its nodes. Pure.

Each tier derives its nodes from `TokenNode`: here for memory, in `cache.disk.tree` for disk. The tries decide where
state belongs, not what it is. Whole edges are compared, byte by byte: microseconds per thousand tokens, no Python
object per token. Invariants:
* a child starts where its parent stops, and an edge is as long as the range it covers;
* no two siblings begin with the same token;
* a `Node` below the root holds the span of exactly its edge, stored or live in its `home`; a snapshot ends at `stop`;
* below a volatile node all are volatile: a request with the later tokens had the earlier ones too.
"""

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np

from cache.types import TOKEN_BYTES, TokenArray, common_prefix_length

if TYPE_CHECKING:
    from cache.layers.state import RecurrentState, Segment


@dataclass(slots=True, eq=False, repr=False)
class TokenNode:
    """One edge `[start, stop)` of a trie, and the node at its end."""

    parent: Self | None
    tokens: TokenArray
    start: int
    stop: int = field(init=False)
    data: bytes = field(init=False)
    """`tokens` as bytes, which one call compares."""
    children: dict[int, Self] = field(init=False, default_factory=dict)
    trie: "TokenTrie[Any]" = field(init=False)
    number: int = field(init=False, default=0)
    """Unique in its trie for ever."""

    def __post_init__(self) -> None:
        self.stop = self.start + len(self.tokens)
        self.set_tokens(np.asarray(self.tokens, np.int32).tobytes())

    def set_tokens(self, data: bytes) -> None:
        """The caller sets `start` and `stop`."""
        self.data, self.tokens = data, np.frombuffer(data, np.int32)

    def path(self) -> list[Self]:
        """The nodes from below the root to here."""
        nodes: list[Self] = []
        node: Self | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def below(self) -> Iterator[Self]:
        """The nodes below, parents first."""
        stack = list(self.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def meeting(self, others: Collection[Self]) -> Self:
        """The nearest of `others` from this node up; else the root."""
        node = self
        while node.parent is not None and node not in others:
            node = node.parent
        return node

    def divide_state(self, upper: Self, offset: int) -> None:
        """Moves the state up to `offset` to `upper`, a new node; atomic."""

    def drop_state(self) -> None:
        """Releases all state: the node has left the trie."""

    def check(self) -> None:
        """Asserts the invariants of the state."""

    def __repr__(self) -> str:
        return f"Node[{self.start}, {self.stop}) with {len(self.children)} children"


TrieNode = TypeVar("TrieNode", bound=TokenNode)
TrieNodeCo = TypeVar("TrieNodeCo", bound=TokenNode, covariant=True)


@dataclass(frozen=True, slots=True)
class Place(Generic[TrieNodeCo]):
    """Where a longest stored prefix, a match, ends on `node`'s edge. Valid until it `is_gone`."""

    node: TrieNodeCo
    length: int

    @property
    def is_gone(self) -> bool:
        """Match again from the root."""
        return self.length > 0 and self.node.parent is None

    def edges(self, start: int, stop: int) -> Iterator[TrieNodeCo]:
        """Nodes on the path whose edges overlap `[start, stop)`, the last first."""
        node, stop = self.node, min(stop, self.length)
        while start < stop and node.parent is not None and node.stop > start:
            if node.start < stop:
                yield node
            node = node.parent


class TokenTrie(Generic[TrieNode]):
    """Edges and nodes of one namespace. Single-threaded.

    `changed` gets every node with changed edge, state or children; one that left the trie has no parent.
    """

    def __init__(
        self, node_type: type[TrieNode], namespace: str = "", changed: Callable[[TrieNode], None] = lambda node: None
    ) -> None:
        self.namespace = namespace
        self.num_nodes = 0
        self._node_type = node_type
        self._changed = changed
        self._numbers = itertools.count()
        self.root = self._make_node(None, np.empty(0, np.int32), 0)

    def match(self, tokens: TokenArray) -> Place[TrieNode]:
        """Finds the longest stored prefix of `tokens`."""
        return self.follow(Place(self.root, 0), tokens)

    def follow(self, place: Place[TrieNode], tokens: TokenArray) -> Place[TrieNode]:
        """Where the match of `tokens`, which follow `place`, ends."""
        node, length, done = place.node, place.length, 0
        while node.parent is not None and length <= node.start:
            node = node.parent  # the edge was cut since
        data = np.ascontiguousarray(tokens, np.int32).data.cast("B") if len(tokens) else memoryview(b"")
        while done < len(tokens):
            if length == node.stop:
                child = node.children.get(tokens.item(done))
                if child is None:
                    break
                node = child
            edge_done, edge_left = length - node.start, node.stop - length
            # A path has many edges, and nearly all of them match completely: this comparison takes most of the time.
            piece = data[TOKEN_BYTES * done : TOKEN_BYTES * (done + edge_left)]
            if node.data.startswith(piece, TOKEN_BYTES * edge_done):
                matched = len(piece) // TOKEN_BYTES
            else:
                matched = common_prefix_length(node.tokens[edge_done:], tokens[done:])
            length, done = length + matched, done + matched
            if matched < edge_left:
                break
        return Place(node, length)

    def extend(self, node: TrieNode, tokens: TokenArray, *, may_split: bool = True) -> TrieNode:
        """The node where `tokens` end below `node`, splitting and adding edges as needed.

        Without `may_split`, the start of an edge that the tokens end inside. The caller gives an added edge a span or
        home at once.
        """
        end = self.follow(Place(node, node.stop), tokens)
        tokens = tokens[end.length - node.stop :]
        if end.length == end.node.stop:
            node = end.node
        elif len(tokens) or may_split or end.node.parent is None:
            node = self.split(end.node, end.length)
        else:
            return end.node.parent
        return self._add(node, tokens) if len(tokens) else node

    def split(self, node: TrieNode, offset: int) -> TrieNode:
        """Cuts `node`, then the lower half, at `offset`; returns the upper."""
        if not node.start < offset < node.stop or node.parent is None:
            raise ValueError(f"cannot split {node} at {offset}")
        cut, parent = offset - node.start, node.parent
        upper = self._make_node(parent, node.tokens[:cut], node.start)
        node.divide_state(upper, offset)
        parent.children[int(upper.tokens[0])] = upper
        node.set_tokens(node.data[TOKEN_BYTES * cut :])
        node.parent, node.start = upper, offset
        upper.children[int(node.tokens[0])] = node
        self.num_nodes += 1
        self._changed(upper)
        self._changed(node)
        return upper

    def remove(self, leaf: TrieNode) -> None:
        """Removes a leaf and its state."""
        if leaf.children or leaf.parent is None:
            raise ValueError(f"{leaf} is not a removable leaf")
        parent = leaf.parent
        del parent.children[int(leaf.tokens[0])]
        leaf.parent = None
        leaf.drop_state()
        leaf.set_tokens(b"")  # references to a removed node keep no tokens alive
        self.num_nodes -= 1
        self._changed(parent)
        self._changed(leaf)

    def nodes(self) -> Iterator[TrieNode]:
        """All nodes but the root, parents first."""
        return self.root.below()

    def check(self) -> None:
        """Asserts the module's invariants."""
        num_nodes = 0
        for node in self.nodes():
            num_nodes += 1
            parent = node.parent
            assert parent is not None and parent.stop == node.start, f"{node} does not start at its parent's stop"
            assert len(node.tokens) > 0, f"{node} has an empty edge"
            assert node.stop - node.start == len(node.tokens), f"{node} is not as long as its edge"
            assert parent.children.get(int(node.tokens[0])) is node, f"{node} is not under its first token"
            node.check()
        assert num_nodes == self.num_nodes, f"{num_nodes} nodes found, {self.num_nodes} counted"

    def _make_node(self, parent: TrieNode | None, tokens: TokenArray, start: int) -> TrieNode:
        node = self._node_type(parent, tokens, start)
        node.trie, node.number = self, next(self._numbers)
        return node

    def _add(self, parent: TrieNode, tokens: TokenArray) -> TrieNode:
        node = self._make_node(parent, tokens, parent.stop)
        parent.children[int(node.tokens[0])] = node
        self.num_nodes += 1
        self._changed(parent)
        self._changed(node)
        return node


@dataclass(frozen=True)
class Snapshot:
    """Window and recurrent state to restore `offset`; window rows may serve later ones."""

    offset: int
    window: "Segment | None"
    recurrent: "RecurrentState | None"

    @property
    def num_bytes(self) -> int:
        return (self.window.num_bytes if self.window else 0) + (self.recurrent.num_bytes if self.recurrent else 0)

    def split(self, offset: int) -> "tuple[Snapshot | None, Snapshot]":
        """The window rows before `offset`, if any, and the rest."""
        if self.window is None or self.window.start >= offset:
            return None, self
        before, after = self.window.split(offset)
        return Snapshot(offset, before, None), Snapshot(self.offset, after, self.recurrent)


class Holding(NamedTuple):
    """Tokens on edges, and stored bytes by kind."""

    num_tokens: int = 0
    span_bytes: int = 0
    window_bytes: int = 0
    recurrent_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        return self.span_bytes + self.window_bytes + self.recurrent_bytes


@dataclass(slots=True, eq=False, repr=False)
class Node(TokenNode):
    """One edge, its state, and its use."""

    trie: "PrefixTrie" = field(init=False)
    span: "Segment | None" = None
    snapshot: Snapshot | None = None
    home: Any = None
    """The span's slot; None if stored."""
    last_used: int = 0
    """Tick of the last restore or recording."""
    last_used_below: int = 0
    """The latest `last_used` here and below."""
    session_id: str | None = None
    is_on_probation: bool = False
    """A sequence without a session ends here."""
    is_background: bool = False
    num_slots: int = 0
    """Sequences in slots that end here: never evicted nor merged away."""
    num_pins: int = 0
    """A pinned node is never merged away."""
    num_uses: int = 0
    """Sequences restored; for people only."""
    kind: Any = None
    is_explicit: bool = False
    """A client's restore point: never merged away."""
    is_volatile: bool = False
    """Nothing may go to disk."""
    is_rounded: bool = False
    """The tokens' state, stored or live, was rounded to 8 bits."""
    place: Place[TokenNode] | None = None
    """Last known in the disk tier's trie; this trie ignores it."""

    @property
    def num_bytes(self) -> int:
        return (self.span.num_bytes if self.span else 0) + (self.snapshot.num_bytes if self.snapshot else 0)

    @property
    def holding(self) -> Holding:
        span_bytes = self.span.num_bytes if self.span is not None else 0
        rows = self.snapshot.window if self.snapshot is not None else None
        window_bytes = rows.num_bytes if rows is not None else 0
        return Holding(len(self.tokens), span_bytes, window_bytes, self.num_bytes - span_bytes - window_bytes)

    def divide_state(self, upper: "Node", offset: int) -> None:
        """Splits span and snapshot."""
        # Whatever may fail comes before the first change.
        spans = self.span.split(offset) if self.span is not None else (None, None)
        snapshots = self.snapshot.split(offset) if self.snapshot is not None else (None, None)
        upper.home, upper.last_used, upper.is_volatile = self.home, self.last_used, self.is_volatile
        upper.last_used_below, upper.num_uses = self.last_used_below, self.num_uses
        upper.is_rounded = self.is_rounded
        (upper.span, self.span), (upper.snapshot, self.snapshot) = spans, snapshots

    def drop_state(self) -> None:
        """Drops span and snapshot."""
        self.span = self.snapshot = self.home = None

    def check(self) -> None:
        """Asserts the invariants of the state."""
        assert (self.span is None) != (self.home is None), f"{self} must be stored or live, not both"
        if self.span is not None:
            assert (self.span.start, self.span.stop) == (self.start, self.stop), f"{self} holds a foreign span"
        is_below_volatile = self.parent is not None and self.parent.is_volatile
        assert self.is_volatile or not is_below_volatile, f"{self} is volatile no more, what is before it is"
        assert self.num_slots >= 0, f"{self} was left by more slots than entered it"


NodeMatch: TypeAlias = Place[Node]


class PrefixTrie(TokenTrie[Node]):
    """Edges and state of one namespace. Single-threaded.

    `count_bytes` gets the stored bytes that a change adds, or frees if negative; `snapped` every node with a new
    snapshot, `changed` every node with another change.
    """

    def __init__(
        self,
        count_bytes: Callable[[int], None] = lambda num_bytes: None,
        namespace: str = "",
        changed: Callable[[Node], None] = lambda node: None,
        snapped: Callable[[Node], None] = lambda node: None,
    ) -> None:
        super().__init__(Node, namespace, changed)
        self.holding = Holding()
        """The sum over all nodes."""
        self._count_bytes = count_bytes
        self._snapped = snapped

    def split(self, node: Node, offset: int) -> Node:
        """Cuts `node` at `offset`; the halves may take more bytes."""
        before = node.holding
        upper = super().split(node, offset)
        self._count(before, upper.holding, node.holding)
        return upper

    def try_absorb_parent(self, node: Node) -> bool:
        """Joins `node` with its parent, which leaves the trie, if nothing needs the border between two live edges."""
        parent = node.parent
        if parent is None or parent.parent is None or len(parent.children) > 1 or node.home is None:
            return False
        if parent.is_explicit or parent.num_slots or parent.num_pins or parent.snapshot is not None:
            return False
        if parent.home is not node.home or parent.is_volatile is not node.is_volatile:
            return False
        if parent.is_rounded is not node.is_rounded:
            return False
        node.set_tokens(parent.data + node.data)
        node.start, node.parent = parent.start, parent.parent
        node.parent.children[int(node.tokens[0])] = node
        parent.parent = None
        self.num_nodes -= 1
        self._changed(parent)
        self._changed(node)
        return True

    def remove(self, leaf: Node) -> None:
        """Removes a leaf and its state; no slot may end there."""
        if leaf.num_slots:
            raise ValueError(f"{leaf} is not a removable leaf")
        before = leaf.holding
        super().remove(leaf)
        self._count(before)

    def store(self, node: Node, span: "Segment") -> None:
        """Stores a span on a node, which is no longer live."""
        before = node.holding
        node.home, node.span = None, span
        self._count(before, node.holding)
        self._changed(node)

    def make_live(self, node: Node, home: Any) -> None:
        """Records a span as live in slot `home`; drops a stored copy."""
        before = node.holding
        node.home, node.span = home, None
        self._count(before, node.holding)
        self._changed(node)

    def snap(self, node: Node, snapshot: Snapshot | None) -> None:
        """Replaces or drops the node's snapshot."""
        before = node.holding
        node.snapshot = snapshot
        self._count(before, node.holding)
        self._snapped(node)

    def check(self) -> None:
        """Asserts the module's invariants."""
        super().check()
        sums = Holding(*map(sum, zip(Holding(), *(node.holding for node in self.nodes()), strict=True)))
        assert self.holding == sums, f"{self.holding} counted, {sums} held"

    def _add(self, parent: Node, tokens: TokenArray) -> Node:
        node = super()._add(parent, tokens)
        self._count(Holding(), node.holding)
        return node

    def _count(self, before: Holding, *after: Holding) -> None:
        """Counts a node's change: subtracts what the node held `before`, adds what the nodes `after` hold."""
        last = self.holding
        self.holding = Holding(
            *(total - old + sum(new) for total, old, *new in zip(last, before, *after, strict=True))
        )
        self._count_bytes(self.holding.num_bytes - last.num_bytes)
