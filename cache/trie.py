"""The prefix trie of the memory tier: nodes with the state of their tokens, stored or live in a slot.

Invariants, checked by `PrefixTrie.check` besides those of `cache.token_trie`:

* a node below the root holds the span state of exactly its edge: in a stored `span`, or live in its `home`;
* a snapshot's rows end at its node's `stop`;
* below a volatile node all nodes are volatile: a request that had the later tokens had the earlier ones too.

The trie decides where state belongs, not what it is: a span and a snapshot are anything that can be split and joined.
It knows no arrays, no clock and no budget.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from cache.token_trie import Match, Place, TokenNode, TokenTrie
from cache.tokens import TokenArray


class Span(Protocol):
    """Immutable state of the tokens `[start, stop)`, sliceable at any token."""

    @property
    def start(self) -> int:
        """The first token's offset."""

    @property
    def stop(self) -> int:
        """The offset after the last token."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that dropping this span frees."""

    def split(self, offset: int) -> tuple[Any, Any]:
        """Returns the spans `[start, offset)` and `[offset, stop)`, each owning its bytes."""

    def join(self, later: Any) -> Any:
        """Returns one span of this one and `later`, which starts where this one stops."""


class NodeSnapshot(Protocol):
    """Immutable state that is valid at one offset, its node's `stop`; in memory a `cache.snapshots.Snapshot`."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that dropping this snapshot frees."""

    def split(self, offset: int) -> tuple[Any, Any]:
        """Returns what remains valid at `offset` (None if nothing) and what remains at the old `stop`."""


class Node(TokenNode):
    """One edge of the trie, the state that belongs to it, and what is known of its use."""

    __slots__ = (
        "home",
        "is_background",
        "is_explicit",
        "is_on_probation",
        "is_volatile",
        "kind",
        "last_used",
        "last_used_behind",
        "num_pins",
        "num_slots",
        "num_uses",
        "place",
        "session_id",
        "snapshot",
        "span",
    )

    def __init__(self, parent: "Node | None", tokens: TokenArray, start: int) -> None:
        super().__init__(parent, tokens, start)
        self.span: Span | None = None
        self.snapshot: NodeSnapshot | None = None
        self.home: Any = None
        """The slot in which this edge's span is live; None if it is stored."""
        self.last_used = 0
        """The reading of a logical clock when a sequence was last restored at this node or recorded up to it."""
        self.last_used_behind = 0
        """The latest `last_used` of this node and all nodes below it."""
        self.session_id: str | None = None
        """The session of the last sequence that ended here."""
        self.is_on_probation = False
        """A sequence without a session ends here, and none has gone on from it."""
        self.is_background = False
        """A conversation of background requests ends here."""
        self.num_slots = 0
        """Slots whose live sequence ends at this node; such a node is never evicted nor merged away."""
        self.num_pins = 0
        """Pins on this node; the trie never merges a pinned node away."""
        self.num_uses = 0
        """Sequences that were restored with its tokens; for people, evictions do not look at it."""
        self.kind: Any = None
        """Why its snapshot was taken; not used by the trie."""
        self.is_explicit = False
        """A restore point that a client asked for: never merged away."""
        self.is_volatile = False
        """All requests with its tokens were volatile: none of its state may be written to disk."""
        self.place: Place[TokenNode] | None = None
        """Where its tokens end in the trie of the disk tier, as it was last found; not used by this trie."""

    @property
    def num_bytes(self) -> int:
        """Bytes of stored state on this node, span and snapshot."""
        return (self.span.num_bytes if self.span else 0) + (self.snapshot.num_bytes if self.snapshot else 0)

    def divide_state(self, upper: "Node", offset: int) -> None:
        """Splits span and snapshot; see `TokenNode`."""
        # Whatever may fail comes before the first change.
        spans = self.span.split(offset) if self.span is not None else (None, None)
        snapshots = self.snapshot.split(offset) if self.snapshot is not None else (None, None)
        upper.home, upper.last_used, upper.is_volatile = self.home, self.last_used, self.is_volatile
        upper.last_used_behind, upper.num_uses = self.last_used_behind, self.num_uses
        (upper.span, self.span), (upper.snapshot, self.snapshot) = spans, snapshots

    def may_join(self, parent: "Node") -> bool:
        """Whether nothing needs the border.

        A snapshot of the parent needs it, as do a slot, a pin and an explicit restore point. The spans must be of one
        kind: both stored, or both live in the same slot.
        """
        needs_border = parent.is_explicit or parent.num_slots or parent.num_pins or parent.snapshot is not None
        return (
            not needs_border
            and parent.home is self.home
            and parent.is_volatile is self.is_volatile
            and (parent.span is None) == (self.span is None)
        )

    def join_state(self, parent: "Node") -> None:
        """Joins the spans, if they are stored; see `TokenNode`."""
        if self.span is not None and parent.span is not None:
            self.span = parent.span.join(self.span)

    def drop_state(self) -> None:
        """Drops span and snapshot."""
        self.span = self.snapshot = self.home = None

    def check(self) -> None:
        """Asserts what is true of the node's state."""
        assert (self.span is None) != (self.home is None), f"{self} must be stored or live, not both"
        if self.span is not None:
            assert (self.span.start, self.span.stop) == (self.start, self.stop), f"{self} holds a foreign span"
        is_public = not self.is_volatile
        assert not (is_public and self.parent is not None and self.parent.is_volatile), (
            f"{self} is volatile no more, what is before it is"
        )
        assert self.num_slots >= 0, f"{self} was left by more slots than entered it"


NodeMatch: TypeAlias = Match[Node]


class PrefixTrie(TokenTrie[Node]):
    """Edges and state for one namespace. Single-threaded, like everything in `cache`.

    Three callbacks follow what happens. `count_bytes` gets the bytes of stored state that a change adds, negative
    when it frees some. `changed` gets every node whose edge, span or children have changed, and every node that was
    removed or joined away, which has no parent by then. `snapped` gets every node whose snapshot was replaced.
    """

    def __init__(
        self,
        count_bytes: Callable[[int], None] = lambda num_bytes: None,
        namespace: str = "",
        changed: Callable[[Node], None] = lambda node: None,
        snapped: Callable[[Node], None] = lambda node: None,
    ) -> None:
        super().__init__(Node, namespace, changed)
        self._count_bytes = count_bytes
        self._snapped = snapped

    def split(self, node: Node, offset: int) -> Node:
        """Cuts `node` at `offset`, see `TokenTrie.split`; a half of shared rows may weigh more than its share."""
        before = node.num_bytes
        upper = super().split(node, offset)
        self._count_bytes(upper.num_bytes + node.num_bytes - before)
        return upper

    def absorb_parent(self, node: Node) -> None:
        """Joins `node` with its parent, see `TokenTrie.absorb_parent`."""
        before = node.num_bytes + (node.parent.num_bytes if node.parent is not None else 0)
        super().absorb_parent(node)
        self._count_bytes(node.num_bytes - before)

    def remove(self, leaf: Node) -> None:
        """Removes a leaf and the state that it holds; no slot may end there."""
        if leaf.num_slots:
            raise ValueError(f"{leaf} is not a removable leaf")
        num_bytes = leaf.num_bytes
        super().remove(leaf)
        self._count_bytes(-num_bytes)

    def store(self, node: Node, span: Span) -> None:
        """Stores a span on a node, which is then no longer live in a slot."""
        node.home = None
        node.span = span
        self._count_bytes(span.num_bytes)
        self._changed(node)

    def make_live(self, node: Node, home: Any) -> None:
        """Records that the node's span is live in the slot `home`; a stored copy is dropped."""
        if node.span is not None:
            self._count_bytes(-node.span.num_bytes)
            node.span = None
        node.home = home
        self._changed(node)

    def snap(self, node: Node, snapshot: NodeSnapshot | None) -> None:
        """Replaces or drops the node's snapshot."""
        before = node.num_bytes
        node.snapshot = snapshot
        self._count_bytes(node.num_bytes - before)
        self._snapped(node)
