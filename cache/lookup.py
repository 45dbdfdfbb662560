"""What memory holds of one prompt: how much matches, how much can be restored."""

from collections.abc import Sequence
from dataclasses import dataclass

from cache.layers.layout import Layout
from cache.slots import Slot
from cache.snapshots import deepest, rows_before
from cache.trie import Match, Node, NodeMatch, Place, PrefixTrie
from cache.types import TokenArray


class Lookup:
    """A prompt and its last match: only the rest is compared again. Worker thread only."""

    def __init__(self, tokens: TokenArray, *, namespace: str = "") -> None:
        """The last prompt token is never restored: the model needs one."""
        self.namespace = namespace
        self.tokens = tokens[:-1]
        self._place: Place[Node] | None = None

    def match(self, trie: PrefixTrie) -> NodeMatch:
        """Matches the prompt against its namespace's trie."""
        place = self._place
        if place is None or not place.length or place.is_gone:
            place = Place(trie.root, 0)
        self._place = trie.follow(place, self.tokens[place.length :])
        return Match(self._place.node.path(), self._place.length)


@dataclass(frozen=True)
class LookupResult:
    """How much of a match is restorable. Valid until the cache changes.

    After an eviction, which spares only `nodes_to_restore`, look up again.
    """

    match: NodeMatch
    stored: int
    """Tokens restorable from the trie."""
    shared: list[int]
    """For each slot, common tokens of match and sequence."""
    restorable: int
    """Tokens restorable from the trie or an idle slot."""

    @property
    def path(self) -> list[Node]:
        return self.match.path

    def restorable_in(self, slot: Slot) -> int:
        """Tokens restorable for a request in `slot`."""
        return max(self.stored, _continued(slot, self.shared[slot.index]))

    def needed_in(self, slot: Slot, layout: Layout) -> list[Node]:
        """Nodes that restoring in `slot` needs."""
        offset = self.restorable_in(slot)
        is_live = offset == _continued(slot, self.shared[slot.index])
        return node_at(self.path, offset) if is_live else nodes_to_restore(layout, self.path, offset)


def look_up(match: NodeMatch, slots: Sequence[Slot], layout: Layout) -> LookupResult:
    """How much of a match is restorable."""
    path, length = set(match.path), match.length
    # Sequences with a common prefix share the nodes of a trie, so no tokens are compared here.
    shared = [min(slot.tip.meeting(path).stop, length) for slot in slots]
    stored = deepest(layout, match)
    live = (_continued(slot, num) for slot, num in zip(slots, shared, strict=True) if not slot.is_leased)
    return LookupResult(match, stored, shared, max(stored, *live, 0))


def nodes_to_restore(layout: Layout, path: Sequence[Node], offset: int) -> list[Node]:
    """Nodes of a path that must stay for restoring at `offset`.

    The node at `offset` protects the spans above; the others hold window rows.
    """
    return [*node_at(path, offset), *rows_before(layout, path, offset)]


def node_at(path: Sequence[Node], offset: int) -> list[Node]:
    """The node on whose edge `offset` lies, in a list; none for 0."""
    return [node for node in path if node.start < offset][-1:]


def _continued(slot: Slot, shared: int) -> int:
    return shared if shared == slot.offset else 0
