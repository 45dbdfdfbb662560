"""A row is a sequence while it decodes; a group holds the state of several rows in its buffers. Worker thread only.

A step evaluates a row's *feed*: its *known* tokens, chosen but not yet in its caches, and its *draft*, a guess at the
tokens after them. The step samples after the last known token and after each one of the draft, all as steps of one
token would. A drafted token is *accepted* while it equals the sample before it. Then a step in which some row feeds
several tokens is *settled*: the rest of the draft leaves the caches, or the whole feed where state cannot go back
token by token. A step of one token a row needs no settling: the next may begin before it is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from cache.layers.kinds import head_length, head_of, kind_of, leaves_of, tail_of
from cache.types import LayerCache
from models.adapter import NO_ADAPTER
from models.inference.grouping import Buffer, Row, capacity_for
from models.inference.groups import Clock, GroupLayer
from models.inference.sampling import RowSampling
from models.inference.sampling_params import SamplingParams
from models.output.grammar import MaskWords


@dataclass(eq=False)
class DecodeRow:
    """A sequence while it decodes; by itself it is a member of a batch with one row.

    Only the runner changes its caches until it is detached.
    """

    caches: list[LayerCache]
    """Emptied once an error has taken the state: the slot of the sequence holds the same list."""
    sampling: RowSampling = field(default_factory=lambda: RowSampling(SamplingParams(temperature=0.0), 0))
    known: list[int] = field(default_factory=list)
    """Chosen tokens that the caches lack; empty while they lack only the sample of a step that is not read."""
    adapter: int = NO_ADAPTER
    shift: int = 0
    """Added to the row's offsets, it gives positions; 0 without pictures."""
    before: mx.array | None = None
    """With a drafter: hidden states before each known token, `[num_known, width]`.

    Until a step is settled: before each fed token, and after the last.
    """
    draft: list[int] = field(default_factory=list)
    """A guess at the tokens after the known ones."""
    masks: list[MaskWords | None] = field(default_factory=list)
    """A mask for each sample of the next step; empty where they are not known before the step begins."""
    is_forced: bool = False
    """The last known token was not sampled."""
    ahead: list[RowSampling] = field(default_factory=list)
    """Until a step is settled: the states that draw after the last known token and after each of the draft."""
    group: "Group | None" = None
    """Whose buffers hold its span and window rows."""

    @property
    def num_fed(self) -> int:
        """Tokens that the next step evaluates."""
        return max(1, len(self.known)) + len(self.draft)

    @property
    def is_lost(self) -> bool:
        return not self.caches

    @property
    def head(self) -> LayerCache | None:
        return head_of(self.caches)

    @property
    def rows(self) -> "list[DecodeRow]":
        return [self]

    @property
    def leaves(self) -> list[LayerCache]:
        return leaves_of(self.caches)

    @property
    def length(self) -> int:
        """Tokens in the caches; 0 if none of them can be in a group."""
        return max([int(leaf.offset) for leaf in self.leaves if kind_of(leaf).can_group], default=0)

    @property
    def own_length(self) -> int:
        """Tokens that the row's own caches hold: `length` without those of the head."""
        return self.length - head_length(self.leaves)

    @property
    def reserved_tokens(self) -> int:
        """Tokens that fit the row's own span buffers, at least those that it has; without those of its head."""
        spans = [tail_of(leaf) for leaf in self.leaves if kind_of(leaf).can_group and not kind_of(leaf).window]
        reserved = [int(span.step if span.keys is None else span.keys.shape[2]) for span in spans]
        return max([self.own_length, *reserved])

    @property
    def is_fresh(self) -> bool:
        """Whether the row is empty, and may join a group once it holds a token."""
        return self.length == 0 and any(kind_of(leaf).can_group for leaf in self.leaves)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's keys and values; an upper bound beyond a window."""
        tails = [tail_of(leaf) for leaf in self.leaves if kind_of(leaf).can_group]
        arrays = [array for tail in tails if tail.keys is not None for array in (tail.keys, tail.values)]
        return sum(array.nbytes // array.shape[2] for array in arrays)

    def used_leaves(self) -> tuple[int, ...] | None:
        """The leaves whose rows can be in a group; None if the row must stay alone.

        A model may leave caches empty whose layers share the keys of others.
        """
        spans = [(index, leaf) for index, leaf in enumerate(self.leaves) if not kind_of(leaf).is_merged]
        used = tuple([index for index, leaf in spans if tail_of(leaf).keys is not None])
        return used if used and all(kind_of(leaf).can_group for _, leaf in spans) else None


def _adopt(given: Sequence[tuple[LayerCache, dict[str, Any]]]) -> None:
    """Has layer caches hold what `GroupLayer.given` says: all of them, or by an error none."""
    mx.eval([state[name] for _, state in given for name in ("keys", "values")])
    for cache, state in given:
        own = tail_of(cache).__dict__
        if "_idx" not in state:
            own.pop("step", None)  # buffers grow again as much as before they were shared
        own.update(state)


class Group:
    """Rows that decode as one member of a batch.

    An error while rows leave or while the group dissolves loses nothing: each layer's state is where `layers` says.
    """

    def __init__(self, like: DecodeRow, buffer: Buffer, slack: int = 0) -> None:
        """Empty. Rows may feed `slack + 1` tokens in a step."""
        used, leaves = like.used_leaves(), like.leaves
        assert used is not None, "a row that must stay alone was put into a group"
        self.head, self.start = like.head, head_length(leaves)
        self.buffer = buffer
        self.rows: list[DecodeRow] = []
        self.clock = Clock()
        self.layers = {index: GroupLayer(leaves[index], self.clock, buffer, self.start, slack) for index in used}
        """By leaf, without those that the model leaves unused, or that are dissolved already."""

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers.values())

    @property
    def num_places(self) -> int:
        """Tokens that fit the buffers."""
        return self.buffer.room * self.buffer.capacity

    def own_bytes_of(self, row: DecodeRow) -> int:
        """Bytes that a row's own buffers would have."""
        index, leaves = self.rows.index(row), row.leaves
        return sum(layer.own_bytes(index, leaves[leaf]) for leaf, layer in self.layers.items())

    def join(self, rows: Sequence[DecodeRow]) -> None:
        """Moves rows into the group, one layer after another: the extra memory is one layer's."""
        offsets = [row.length for row in rows]
        for leaf, layer in self.layers.items():
            for index, row in enumerate(rows, start=len(self.rows)):
                layer.take(row.leaves[leaf], index)
        self.rows += rows
        self.clock.set([*self.clock.offsets, *offsets])
        for row in rows:
            row.group = self

    def leave(self, row: DecodeRow, *, keeps_state: bool = True) -> None:
        """Gives a row its state back, or evaluates nothing where nobody wants it; the last row takes its place."""
        index, last, leaves = self.rows.index(row), len(self.rows) - 1, row.leaves
        if keeps_state:
            _adopt([(leaves[leaf], layer.given(leaves[leaf], index)) for leaf, layer in self.layers.items()])
        for layer in self.layers.values() if index != last else ():
            layer.move(last, index)
        offsets = self.clock.offsets
        self.rows[index], offsets[index] = self.rows[last], offsets[last]
        self.rows.pop()
        self.clock.set(offsets[:-1])
        row.group = None

    def dissolve(self) -> None:
        """Gives all rows their state back and frees the buffers, layer by layer."""
        for leaf, layer in list(self.layers.items()):
            caches = [row.leaves[leaf] for row in self.rows]
            _adopt([(cache, layer.given(cache, index)) for index, cache in enumerate(caches)])
            del self.layers[leaf], layer.keys, layer.values  # the latest step refers to the layer
        for row in self.rows:
            row.group = None
        self.rows = []
        self.clock.set([])

    def make_room(self) -> bool:
        """Whether buffers had to grow for the next tokens."""
        if not self.rows or max(self.clock.lasts) - self.start < self.buffer.capacity:
            return False
        for index, row in enumerate(self.rows):
            for leaf, layer in self.layers.items():
                layer.extend_own(index, row.leaves[leaf])
        lasts = zip(self.rows, self.clock.lasts, strict=True)
        described = [Row(last - self.start, row.reserved_tokens) for row, last in lasts]
        self.buffer = Buffer(self.buffer.room, capacity_for(described))
        for layer in self.layers.values():
            layer.grow(self.buffer.capacity)
        return True
