"""The rows that decode together, from step to step: who is in which group, and whose state is where.

Invariants:

- Between steps each row's span and window state is in the row's own caches or in one group; a group has only rows of
  the latest step. Recurrent state is merged until the set of rows changes.
- An error while state moves out of groups loses nothing. An error in a step loses its rows, and all that share
  buffers with one: `Runner.drain` empties their lists of layer caches, and a step with one of them raises `RowLost`.
- All tokens of a feed join the row's state, until `settle` takes the last back.
- Groups take memory beyond what their rows reserved only where the caller has some to spare.

Which rows to put together is decided by `grouping.py`. Worker thread only.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import mlx.core as mx

from cache.layers.kinds import kind_of, leaves_of, tail_of
from cache.types import LayerCache
from models.inference.grouping import Row, Wanted
from models.inference.ragged import flat_layers, join_layers, put_back
from models.inference.rewind import Rewind, unchanged
from models.inference.row import DecodeRow, Group
from models.mlx_lm_import import ArraysCache

Choose: TypeAlias = Callable[..., list[Wanted]]
"""Chooses groups: `grouping.plan` with a model's costs."""


@dataclass(eq=False)
class DecodeBatch:
    """Rows that decode in one step: in one model call, or some by themselves."""

    choose: Choose | None
    """None for no groups."""
    max_feed_tokens: int = 1
    """The most tokens that a row may feed in a step."""
    rows: list[Any] = field(default_factory=list)
    """Each `DecodeRow` of the joint call, in its order; None for a row that was taken out since."""
    has_changed: bool = False
    """Bytes have moved since this was last set to False."""
    _groups: list[Group] = field(default_factory=list)
    _layers: list[LayerCache] = field(default_factory=list)
    """For a model call of one token a row; empty while rows must be joined first."""
    _merged: list[ArraysCache] = field(default_factory=list)
    """Merged recurrent states; the rows have none of their own meanwhile."""
    _before: list[list[mx.array | None]] = field(default_factory=list)
    """State in `_merged`, while feeds are not settled."""
    _has_fresh: bool = False
    """Some rows had no token yet, and could not be in a group."""
    _fed: dict[DecodeRow, int] = field(default_factory=dict)
    """Tokens that each row of the joint call feeds, until `settle`; empty where each feeds one."""
    _rewinds: dict[DecodeRow, Rewind] = field(default_factory=dict)
    """How the caches of rows by themselves go back, until `settle`."""

    # -- steps

    def arrange(
        self, rows: Sequence[DecodeRow], spare_bytes: float, lengths: Sequence[int] | None = None
    ) -> list[LayerCache]:
        """Layer caches for a model call with `self.rows`, which are `rows` in an order that suits groups.

        Each row feeds one token, or `lengths` in the order of `rows`, each a batch row, one feed after another.
        Groups may take `spare_bytes` more than their rows reserved. Raises `NotRagged`.
        """
        is_same = bool(self._layers) and len(self.rows) == len(rows) and set(self.rows) == set(rows)
        if not is_same or self._has_fresh or self._grow():
            self._join(rows, spare_bytes)
        if lengths is None or max(lengths) == 1:
            return self._layers
        assert max(lengths) <= self.max_feed_tokens
        return self._feed(dict(zip(rows, lengths, strict=True)))

    def _join(self, rows: Sequence[DecodeRow], spare_bytes: float) -> None:
        for row in [row for row in self.rows if row is not None and row not in rows]:
            self.remove(row.caches)
        self._extract_all()
        if self.choose is not None:
            self._regroup(rows, spare_bytes)
        members: list[Group | DecodeRow] = [*self._groups, *[row for row in rows if row.group is None]]
        # Members on one head are neighbours, heads as they first appear: attention then reads a head once.
        places = {head: place for place, head in enumerate(dict.fromkeys([member.head for member in members]))}
        members.sort(key=lambda member: places[member.head])
        self._layers = join_layers(members)
        self.rows = [row for member in members for row in member.rows]
        self._has_fresh = self.choose is not None and any(row.is_fresh for row in rows)
        self._merged = [leaf for leaf in leaves_of(self._layers) if kind_of(leaf).is_merged]
        # Slices of merged state would hold an earlier batch's.
        for own in [leaf for row in rows if self._merged for leaf in row.leaves]:
            if kind_of(own).is_merged:
                own.cache = [None] * len(own.cache)

    def _feed(self, lengths: Mapping[DecodeRow, int]) -> list[LayerCache]:
        self._fed = {row: lengths[row] for row in self.rows}
        self._before = [list(merged.cache) for merged in self._merged]
        fed = tuple(self._fed.values())
        for merged in self._merged if len(set(fed)) > 1 else ():
            merged.prepare(fed)
        for group in self._groups:
            group.clock.feed([lengths[row] for row in group.rows])
        self._grow()
        return flat_layers(self._layers, fed)

    def hold(self, row: DecodeRow, num_tokens: int) -> None:
        """Before a call with a row's own caches, of whose tokens some may not stay."""
        self._rewinds[row] = Rewind(row.caches, num_tokens)

    def settle(self, stays: dict[Any, int]) -> None:
        """Leaves the first tokens of each row's feed in its state, as many as `stays` says.

        Directly after `advance`. Corrects `stays` to 0 where only all could stay.
        """
        for row, rewind in self._rewinds.items():
            stays[row] = rewind.keep(stays[row])
        fed, self._fed, self._rewinds = self._fed, {}, {}
        if self._merged and fed:
            stays |= {row: 0 for row, length in fed.items() if stays[row] < length}
            before, self._before = self._before, []
            for merged, states in zip(self._merged, before, strict=True):
                put_back(merged, [bool(stays[row]) for row in fed], states)
        surplus = {row: length - stays[row] for row, length in fed.items()}
        assert all(0 <= number <= fed[row] for row, number in surplus.items())
        for group in self._groups if fed else ():
            group.clock.rewind([surplus[row] for row in group.rows])
        alone = [(row, number) for row, number in surplus.items() if number and row.group is None]
        for cache, number in [(cache, number) for row, number in alone for cache in row.leaves]:
            kind_of(cache).forget(tail_of(cache), number)

    @contextmanager
    def trial(
        self, num_layers: int, lengths: Sequence[int]
    ) -> Iterator[tuple[Sequence[LayerCache], Sequence[LayerCache], Callable[[], None]]]:
        """In the block, tokens may join the last layers of the latest step, which forget them at its end.

        Yields the layers, those for a first call with `lengths` tokens of each row, and what counts a call's tokens.
        """
        assert self._layers
        layers, feeds = self._layers[-num_layers:], dict(zip(self.rows, lengths, strict=True))
        offsets = [(group.clock, group.clock.offsets) for group in self._groups]

        def count() -> None:
            self.advance()
            self.settle(feeds.copy())
            self._grow()

        own = [cache for row in self.rows if row.group is None for cache in row.caches[-num_layers:]]
        merged = [leaf for leaf in leaves_of(layers) if kind_of(leaf).is_merged]
        self._grow()
        try:
            with unchanged([*leaves_of(own), *merged]):
                first = layers if max(lengths) == 1 else self._feed(feeds)[-num_layers:]
                yield layers, first, count
        finally:
            for clock, before in offsets:
                clock.set(before)

    def advance(self) -> None:
        """After a model call."""
        for group in self._groups:
            group.clock.advance()

    def _grow(self) -> bool:
        grown = [group.make_room() for group in self._groups]
        self.has_changed |= any(grown)
        return any(grown)

    # -- rows that leave

    def remove(self, caches: Sequence[LayerCache], *, keeps_state: bool = True) -> None:
        """Takes a row out: gives it its state back, recurrent state as lazy slices and the rest evaluated.

        Unless nobody wants it: a place in a group is then free at once.
        """
        # Of a step that failed before it was settled.
        self._rewinds = {row: rewind for row, rewind in self._rewinds.items() if row.caches is not caches}
        for index, row in enumerate(self.rows):
            if row is None or row.caches is not caches:
                continue
            if keeps_state:
                self._extract(index)
            if (group := row.group) is not None:
                group.leave(row, keeps_state=keeps_state)
                self.has_changed = True
                if not group.rows:  # a row left behind gets its state back before the next step
                    self._groups.remove(group)
            self.rows[index] = None
            if not any(self.rows) or not self._merged:
                # Frees their arrays now, not at the next step.
                self._layers, self._merged, self._before = [], [], []

    def _extract(self, index: int) -> None:
        """Writes a row's recurrent state into its own caches, as lazy slices."""
        for merged, own in zip(leaves_of(self._layers), self.rows[index].leaves, strict=True) if self._merged else ():
            if kind_of(own).is_merged:
                own.cache = [None if state is None else state[index : index + 1] for state in merged.cache]

    def _extract_all(self) -> None:
        for index, row in enumerate(self.rows):
            if row is not None:
                self._extract(index)
        self._layers, self._merged, self._before = [], [], []

    def dissolve(self) -> None:
        """Gives all rows their state back."""
        self._extract_all()
        self.has_changed |= bool(self._groups)
        while self._groups:
            self._groups[-1].dissolve()
            self._groups.pop()
        self._clear()

    def dissolve_groups(self) -> None:
        """Gives rows in groups their state back; the next step arranges them anew."""
        if self._groups:
            self.dissolve()

    def forget(self) -> None:
        """Drops what is shared, which may be damaged: rows in groups or with merged state are lost."""
        for row in self.rows:
            if row is not None and (self._merged or row.group is not None):
                row.caches.clear()
                row.group = None
        self.has_changed = True
        self._clear()

    def _clear(self) -> None:
        self.rows, self._groups, self._fed, self._rewinds = [], [], {}, {}
        self._layers, self._merged, self._before = [], [], []

    # -- groups

    def _regroup(self, rows: Sequence[DecodeRow], spare_bytes: float) -> None:
        """Rows share a buffer only with others on the same head, or without one."""
        sizes = [group.num_bytes // group.num_places for group in self._groups]
        sizes += [row.bytes_per_token for row in rows]
        spare_tokens, regrouped = spare_bytes / max(1, *sizes), list[Group]()
        for head in dict.fromkeys([row.head for row in rows]):
            groups = [group for group in self._groups if group.head is head]
            made = self._regrouped([row for row in rows if row.head is head], groups, spare_tokens)
            reserved = sum(row.reserved_tokens for group in made for row in group.rows)
            spare_tokens -= sum(group.num_places for group in made) - reserved
            regrouped += made
        self._groups = regrouped

    def _regrouped(self, rows: Sequence[DecodeRow], groups: Sequence[Group], spare_tokens: float) -> list[Group]:
        assert self.choose is not None
        described, slack_tokens = [_describe(row, groups) for row in rows], self._slack_tokens(rows, groups)
        wanted = list[Wanted]()
        if slack_tokens <= spare_tokens or not slack_tokens:
            buffers = [group.buffer for group in groups]
            wanted = self.choose(described, buffers, spare_tokens=spare_tokens - slack_tokens)
        staying = {one.kept: [rows[place] for place in one.rows] for one in wanted}
        for number, group in enumerate(groups):
            leaving = [row for row in group.rows if row not in staying.get(number, ())]
            self.has_changed |= bool(leaving)
            if number not in staying:
                group.dissolve()
            for row in leaving if number in staying else ():
                group.leave(row)
        return [self._filled(groups, [rows[place] for place in one.rows], one) for one in wanted]

    def _slack_tokens(self, rows: Sequence[DecodeRow], groups: Sequence[Group]) -> int:
        """Tokens that the slack of all rings may take, as if every layer were a ring."""
        if not any(kind_of(cache).window for cache in rows[0].leaves):
            return 0
        # New groups have room for fewer than twice their rows.
        return (self.max_feed_tokens - 1) * (2 * len(rows) + sum(group.buffer.room for group in groups))

    def _filled(self, groups: Sequence[Group], rows: Sequence[DecodeRow], wanted: Wanted) -> Group:
        slack = self.max_feed_tokens - 1
        group = Group(rows[0], wanted.buffer, slack) if wanted.kept is None else groups[wanted.kept]
        if joining := [row for row in rows if row.group is not group]:
            group.join(joining)
            self.has_changed = True
        return group

    # -- memory

    @property
    def padding_bytes(self) -> int:
        """Bytes of all groups' buffers and of merged state beyond those of the rows' own."""
        shared = self._merged_bytes + sum(group.num_bytes for group in self._groups)
        return max(0, shared - sum(self._own_bytes(row) for row in self.rows if row is not None))

    @property
    def _merged_bytes(self) -> int:
        return sum(merged.nbytes for merged in self._merged)

    def own_bytes(self, caches: Sequence[LayerCache]) -> int:
        """Bytes of what a row shares, were it its own; else 0."""
        return sum(self._own_bytes(row) for row in self.rows if row is not None and row.caches is caches)

    def _own_bytes(self, row: DecodeRow) -> int:
        return self._merged_bytes // len(self.rows) + (0 if row.group is None else row.group.own_bytes_of(row))


def _describe(row: DecodeRow, groups: Sequence[Group]) -> Row:
    """A row as `grouping.py` knows it."""
    if (group := row.group) is None:
        return Row(row.own_length, row.reserved_tokens, can_share=row.used_leaves() is not None)
    num_tokens = group.clock.lasts[group.rows.index(row)] - group.start
    return Row(num_tokens, row.reserved_tokens, groups.index(group))
