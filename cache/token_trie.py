"""A path-compressed prefix trie over token ids: edges, nodes, match, split, join. Knows nothing of what state is.

Invariants, checked by `TokenTrie.check`:

* a child starts where its parent stops, and an edge is as long as the range it covers;
* no two siblings begin with the same token.

Each tier hangs state of its own on the nodes, in a class derived from `TokenNode`: `cache.trie` in memory,
`cache.disk.tree` on disk. The trie asks a node to divide, join and drop that state as edges change. Tokens are
compared by whole edges, byte by byte: a match costs microseconds per thousand tokens and no Python object per token.
"""

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

import numpy as np

from cache.tokens import TOKEN_BYTES, TokenArray, common_prefix_length


class TokenNode:
    """One edge `[start, stop)` of a trie, and where it ends."""

    __slots__ = ("children", "data", "number", "parent", "start", "stop", "tokens")

    def __init__(self, parent: Self | None, tokens: TokenArray, start: int) -> None:
        self.parent = parent
        self.hold(np.asarray(tokens, np.int32).tobytes())
        self.start = start
        self.stop = start + len(tokens)
        self.children: dict[int, Self] = {}
        self.number = 0
        """Tells it apart from all other nodes that its trie ever had, but for the root."""

    def hold(self, data: bytes) -> None:
        """Sets the edge's tokens from their bytes in memory; the caller sets `start` and `stop`."""
        self.data = data
        """The same as `tokens`: bytes are compared in one call, arrays in several."""
        self.tokens: TokenArray = np.frombuffer(data, np.int32)

    def path(self) -> list[Self]:
        """Returns the nodes from below the root down to this one."""
        nodes: list[Self] = []
        node: Self | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def meeting(self, others: Collection[Self]) -> Self:
        """Returns the nearest of `others` on the way up from here, this node included; the root if there is none."""
        node = self
        while node.parent is not None and node not in others:
            node = node.parent
        return node

    def divide_state(self, upper: Self, offset: int) -> None:
        """Leaves the state of the tokens up to `offset` to `upper`, a new node, and keeps the rest.

        Changes nothing if it raises.
        """

    def may_join(self, parent: Self) -> bool:
        """Whether nothing but the structure needs the border between `parent` and this node."""
        return True

    def join_state(self, parent: Self) -> None:
        """Takes over the state of `parent`, whose edge becomes the first part of this one. Needs `may_join`."""

    def drop_state(self) -> None:
        """Lets go of all state: the node has left the trie."""

    def check(self) -> None:
        """Asserts what is true of the node's state."""

    def __repr__(self) -> str:
        return f"Node[{self.start}, {self.stop}) with {len(self.children)} children"


TrieNode = TypeVar("TrieNode", bound=TokenNode)
TrieNodeCo = TypeVar("TrieNodeCo", bound=TokenNode, covariant=True)


@dataclass(frozen=True)
class Match(Generic[TrieNodeCo]):
    """The longest stored prefix of some tokens: `path` covers `[0, length)`, its last node maybe in part."""

    path: list[TrieNodeCo]
    length: int


@dataclass(frozen=True, slots=True)
class Place(Generic[TrieNodeCo]):
    """Where the longest stored prefix of some tokens ends: after `length` tokens, on the edge of `node`.

    Remains valid when edges are split and added, until it `is_gone`.
    """

    node: TrieNodeCo
    length: int

    @property
    def is_gone(self) -> bool:
        """Whether its node has left the trie since: the tokens must be matched from the root again."""
        return self.length > 0 and self.node.parent is None

    def edges(self, start: int, stop: int) -> Iterator[TrieNodeCo]:
        """Yields the nodes on the path to the place whose edges overlap `[start, stop)`, the last one first."""
        node, stop = self.node, min(stop, self.length)
        while start < stop and node.parent is not None and node.stop > start:
            if node.start < stop:
                yield node
            node = node.parent


class TokenTrie(Generic[TrieNode]):
    """Edges and nodes for one namespace. Single-threaded, like everything in `cache`.

    `changed` gets every node whose edge, state or children have changed, and every node that was removed or joined
    away, which has no parent by then.
    """

    def __init__(
        self,
        node_type: type[TrieNode],
        namespace: str = "",
        changed: Callable[[TrieNode], None] = lambda node: None,
    ) -> None:
        self.namespace = namespace
        """Not used by the trie."""
        self.root = node_type(None, np.empty(0, np.int32), 0)
        self.num_nodes = 0
        self._node_type = node_type
        self._changed = changed
        self._numbers = itertools.count(1)

    def match(self, tokens: TokenArray) -> Match[TrieNode]:
        """Finds the longest stored prefix of `tokens`, comparing every token."""
        place = self.follow(Place(self.root, 0), tokens)
        return Match(place.node.path(), place.length)

    def follow(self, place: Place[TrieNode], tokens: TokenArray) -> Place[TrieNode]:
        """Returns the place where matching goes on with `tokens`, those after `place`; every one is compared."""
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
            # A path has many edges, and nearly all of them match whole: this comparison takes most of the time.
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
        """Returns the node at which `tokens` end below `node`, splitting and adding edges as needed.

        Without `may_split`, returns the start of the edge if the tokens end inside one. An added edge holds no state
        yet: the caller gives it a span or a home at once. Existing nodes are changed by splitting only.
        """
        done = 0
        while done < len(tokens):
            child = node.children.get(int(tokens[done]))
            if child is None:
                return self._add(node, tokens[done:])
            matched = common_prefix_length(child.tokens, tokens[done:])
            done += matched
            if matched < len(child.tokens) and done == len(tokens) and not may_split:
                return node
            node = child if matched == len(child.tokens) else self.split(child, child.start + matched)
        return node

    def split(self, node: TrieNode, offset: int) -> TrieNode:
        """Cuts `node` at `offset` and returns the new upper half; `node` stays the lower one.

        Each half gets its part of the state. References to `node` keep their `stop`.
        """
        if not node.start < offset < node.stop or node.parent is None:
            raise ValueError(f"cannot split {node} at {offset}")
        cut, parent = offset - node.start, node.parent
        upper = self._make_node(parent, node.tokens[:cut], node.start)
        node.divide_state(upper, offset)
        parent.children[int(upper.tokens[0])] = upper
        node.hold(node.data[TOKEN_BYTES * cut :])
        node.parent, node.start = upper, offset
        upper.children[int(node.tokens[0])] = node
        self.num_nodes += 1
        self._changed(upper)
        self._changed(node)
        return upper

    def can_absorb_parent(self, node: TrieNode) -> bool:
        """Whether `node` and its parent are one edge in two pieces, with nothing that needs the border."""
        parent = node.parent
        return (
            parent is not None and parent.parent is not None and len(parent.children) == 1 and node.may_join(parent)
        )

    def absorb_parent(self, node: TrieNode) -> None:
        """Joins `node` with its parent, which disappears. Needs `can_absorb_parent(node)`."""
        parent = node.parent
        if parent is None or parent.parent is None or not self.can_absorb_parent(node):
            raise ValueError(f"{node} cannot absorb its parent")
        node.join_state(parent)
        node.hold(parent.data + node.data)
        node.start = parent.start
        node.parent = parent.parent
        node.parent.children[int(node.tokens[0])] = node
        parent.parent = None
        self.num_nodes -= 1
        self._changed(parent)
        self._changed(node)

    def remove(self, leaf: TrieNode) -> None:
        """Removes a leaf and the state that it holds."""
        if leaf.children or leaf.parent is None:
            raise ValueError(f"{leaf} is not a removable leaf")
        parent = leaf.parent
        del parent.children[int(leaf.tokens[0])]
        leaf.parent = None
        leaf.drop_state()
        leaf.hold(b"")  # references to a removed node keep no tokens alive
        self.num_nodes -= 1
        self._changed(parent)
        self._changed(leaf)

    def nodes(self) -> Iterator[TrieNode]:
        """Yields every node below the root, parents before children."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Asserts the module's invariants and those of the nodes' state; cheap enough after every step of a test."""
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

    def _make_node(self, parent: TrieNode, tokens: TokenArray, start: int) -> TrieNode:
        node = self._node_type(parent, tokens, start)
        node.number = next(self._numbers)
        return node

    def _add(self, parent: TrieNode, tokens: TokenArray) -> TrieNode:
        node = self._make_node(parent, tokens, parent.stop)
        parent.children[int(node.tokens[0])] = node
        self.num_nodes += 1
        self._changed(parent)
        self._changed(node)
        return node
