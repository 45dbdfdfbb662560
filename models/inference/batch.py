"""The rows that decode together, from step to step: who is in which group, and whose state is where.

Invariants:

- Between steps each row's span and window state is in the row's own caches or in one group; a group has only rows of
  the latest step. Recurrent state is merged until the set of rows changes.
- An error while state moves loses the rows that were in groups or whose recurrent state was merged: they are marked,
  and a step with one of them raises `RowLost`. Others are unharmed.
- Groups take memory beyond what their rows reserved only where the caller has some to spare.

Which rows to put together is decided by `grouping.py`. Worker thread only.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx

from cache.layers.layout import leaves_of
from cache.types import LayerCache
from models.inference.grouping import GROWTH_TOKENS, Buffer, Row, Wanted, capacity_for
from models.inference.groups import Group, bytes_per_token, is_fresh, length_of, reserved_tokens_of, used_leaves
from models.inference.ragged import RaggedBatch, ragged_attention
from models.mlx_lm_import import KVCache

MAX_MEMBER_TOKENS = 65_536.0
"""Where reading costs nothing measurable."""


class BatchRow(Protocol):
    """A sequence while it decodes."""

    caches: list[LayerCache]
    is_lost: bool


class Choose(Protocol):
    """Chooses groups; `grouping.plan` with the costs of a model."""

    def __call__(self, rows: Sequence[Row], groups: Sequence[Buffer], *, spare_tokens: float) -> list[Wanted]:
        """Groups that hold at most `spare_tokens` more than their rows reserved."""


@dataclass(eq=False)
class DecodeBatch:
    """Rows that are evaluated in one model call."""

    choose: Choose | None
    """None: no groups."""
    rows: list[BatchRow | None] = field(default_factory=list)
    """In the order of the batch, groups first; None for a row that was taken out since."""
    has_changed: bool = False
    """Bytes have moved since this was last set to False."""
    _groups: list[Group] = field(default_factory=list)
    _joined: RaggedBatch | None = None
    _has_fresh: bool = False
    """Some rows had no token yet, and could not be in a group."""

    # -- steps

    def arrange(self, rows: Sequence[BatchRow], spare_bytes: float) -> list[LayerCache]:
        """Layer caches for a model call with `self.rows`, which are `rows` in an order that suits groups.

        Groups may take `spare_bytes` more than their rows reserved. Raises `NotRagged`.
        """
        is_same = self._joined is not None and len(self.rows) == len(rows) and set(self.rows) == set(rows)
        if is_same and not self._has_fresh and not self._grow():
            assert self._joined is not None
            return self._joined.layers
        self._release([row for row in self.rows if row is not None and row not in rows])
        self._extract_all()
        if self.choose is not None:
            self._regroup(rows, spare_bytes)
        by_caches = {id(row.caches): row for row in rows}
        ordered = [by_caches.pop(id(caches)) for group in self._groups for caches in group.rows]
        ordered += by_caches.values()
        self._joined = RaggedBatch([row.caches for row in ordered], self._groups)
        self.rows, self._has_fresh = list(ordered), any(is_fresh(row.caches) for row in ordered)
        return self._joined.layers

    def advance(self) -> None:
        """After a model call."""
        for group in self._groups:
            group.clock.advance()

    def _grow(self) -> bool:
        grown = [group.make_room() for group in self._groups]
        self.has_changed |= any(grown)
        return any(grown)

    # -- rows that leave

    def take_out(self, caches: Sequence[LayerCache]) -> None:
        """Gives a row all of its state back: recurrent state as lazy slices, other state evaluated."""
        for index, row in enumerate(self.rows):
            if row is not None and row.caches is caches:
                self._extract(index)
                self._leave_group(row)
                self.rows[index] = None
        if not any(self.rows):
            self._joined = None  # frees the merged state now, not at the next step

    def dissolve(self) -> None:
        """Gives all rows their state back."""
        self._extract_all()
        for group in self._groups:
            group.dissolve()
        self.has_changed |= bool(self._groups)
        self.forget()

    def dissolve_groups(self) -> None:
        """Gives rows in groups their state back; the next step arranges them anew."""
        if self._groups:
            self.dissolve()

    def forget(self) -> None:
        """Drops what is shared, which may be damaged: rows in groups are lost, and those with merged state."""
        shared = [caches for group in self._groups for caches in group.rows]
        is_merged = self._joined is not None and self._joined.has_recurrent
        for row in self.rows:
            if row is not None and (is_merged or any(row.caches is caches for caches in shared)):
                row.is_lost = True
        self.rows, self._groups, self._joined = [], [], None

    def _release(self, rows: Sequence[BatchRow]) -> None:
        for row in rows:
            self.take_out(row.caches)

    def _extract_all(self) -> None:
        for index in range(len(self.rows)):
            self._extract(index)
        self._joined = None

    def _extract(self, index: int) -> None:
        row = self.rows[index]
        if self._joined is not None and row is not None:
            self._joined.extract(index, row.caches)

    def _leave_group(self, row: BatchRow) -> None:
        for group in self._groups:
            if (index := group.index_of(row.caches)) is not None:
                group.leave(index)
                self.has_changed = True
        self._end_small_groups()

    def _end_small_groups(self) -> None:
        """A group of one row is none."""
        for group in [group for group in self._groups if len(group.rows) < 2]:
            group.dissolve()
            self._groups.remove(group)

    # -- groups

    def _regroup(self, rows: Sequence[BatchRow], spare_bytes: float) -> None:
        assert self.choose is not None
        described = [self._describe(row) for row in rows]
        before = list(self._groups)
        sizes = [group.bytes_per_token for group in before] + [bytes_per_token(row.caches) for row in rows]
        buffers, spare_tokens = [group.buffer for group in before], spare_bytes / max(1, *sizes)
        wanted = self.choose(described, buffers, spare_tokens=spare_tokens)
        self._empty(before, rows, wanted)
        self._groups = [self._filled(before, [rows[place] for place in one.rows], one) for one in wanted]

    def _empty(self, groups: Sequence[Group], rows: Sequence[BatchRow], wanted: Sequence[Wanted]) -> None:
        """Rows leave groups in which they are not wanted."""
        staying = {one.kept: [rows[place].caches for place in one.rows] for one in wanted}
        for number, group in enumerate(groups):
            if number not in staying:
                self.has_changed |= bool(group.rows)
                group.dissolve()
                continue
            for caches in [row for row in group.rows if not any(row is other for other in staying[number])]:
                group.leave(group.rows.index(caches))
                self.has_changed = True

    def _filled(self, groups: Sequence[Group], rows: Sequence[BatchRow], wanted: Wanted) -> Group:
        group = Group(rows[0].caches, wanted.buffer) if wanted.kept is None else groups[wanted.kept]
        joining = [row.caches for row in rows if group.index_of(row.caches) is None]
        if joining:
            group.join(joining)
            self.has_changed = True
        return group

    def _describe(self, row: BatchRow) -> Row:
        for number, group in enumerate(self._groups):
            if (index := group.index_of(row.caches)) is not None:
                return Row(group.clock.offsets[index], reserved_tokens_of(row.caches), number)
        can_share = used_leaves(row.caches) is not None
        return Row(length_of(row.caches), reserved_tokens_of(row.caches), can_share=can_share)

    # -- memory

    @property
    def shared_bytes(self) -> int:
        """Bytes of all groups' buffers."""
        return sum(group.num_bytes for group in self._groups)

    def own_bytes(self, caches: Sequence[LayerCache]) -> int:
        """Bytes that the buffers of a row in a group would have, were they its own; else 0."""
        for group in self._groups:
            if (index := group.index_of(caches)) is not None:
                return group.own_bytes(index)
        return 0

    @property
    def all_own_bytes(self) -> int:
        return sum(group.own_bytes(index) for group in self._groups for index in range(len(group.rows)))


_NUM_ROWS, _NUM_LAYERS = 4, 2
_MIN_TRIALS, _MAX_TRIALS, _TRIAL_SECONDS = 5, 40, 0.3
_SHORT_TOKENS, _LONG_TOKENS = 512, 2048
_QUERIES_PER_KEY = 4
"""Heads of queries for each head of keys: common in models of today."""


def measure_member_tokens(caches: Sequence[LayerCache]) -> float:
    """Cost of one more member of a batch in a step, in tokens read: see `grouping.py`.

    Attention alone is timed, in layers like those of `caches`, a row with a few tokens: rows each by itself, the same
    rows in a group, and longer rows. The best of several, in turns: other work of the machine only adds.
    """
    like = next(cache for cache in leaves_of(caches) if length_of([cache]) and cache.keys is not None)
    sides = [
        _Trial(like, _SHORT_TOKENS, None),
        _Trial(like, _SHORT_TOKENS, _one_group),
        _Trial(like, _LONG_TOKENS, None),
    ]
    timed, begun = list[list[float]](), time.perf_counter()
    while len(timed) < _MIN_TRIALS or (len(timed) < _MAX_TRIALS and time.perf_counter() - begun < _TRIAL_SECONDS):
        timed.append([side.seconds() for side in sides])
    alone, grouped, longer = (min(times) for times in zip(*timed, strict=True))
    member = max(0.0, alone - grouped) / (_NUM_ROWS - 1)
    token = max(1e-12, longer - alone) / (_NUM_ROWS * (_LONG_TOKENS - _SHORT_TOKENS))
    return float(min(member / token, MAX_MEMBER_TOKENS))


class _Trial:
    """Attention of some rows in a few layers, to be timed."""

    def __init__(self, like: LayerCache, num_tokens: int, choose: Choose | None) -> None:
        self._rows = [_MadeUpRow([_made_up(like, num_tokens) for _ in range(_NUM_LAYERS)]) for _ in range(_NUM_ROWS)]
        self._batch = DecodeBatch(choose)
        num_heads, width = like.keys.shape[1], like.keys.shape[3]
        self._queries = mx.zeros((_NUM_ROWS, _QUERIES_PER_KEY * num_heads, 1, width), like.keys.dtype)
        self._added = [
            mx.zeros((_NUM_ROWS, num_heads, 1, rows.shape[3]), rows.dtype) for rows in (like.keys, like.values)
        ]

    def seconds(self) -> float:
        """Of one step."""
        layers = self._batch.arrange(self._rows, float("inf"))
        begun = time.perf_counter()
        with ragged_attention():
            mx.eval([self._attend(layer) for layer in layers])
        seconds = time.perf_counter() - begun
        self._batch.advance()
        return seconds

    def _attend(self, layer: LayerCache) -> mx.array:
        keys, values = layer.update_and_fetch(*self._added)
        return mx.fast.scaled_dot_product_attention(self._queries, keys, values, scale=1.0, mask=None)


@dataclass(eq=False)
class _MadeUpRow:
    caches: list[LayerCache]
    is_lost: bool = False


def _made_up(like: LayerCache, num_tokens: int) -> LayerCache:
    cache = KVCache()
    shapes = [(*rows.shape[:2], num_tokens + GROWTH_TOKENS, rows.shape[3]) for rows in (like.keys, like.values)]
    cache.keys, cache.values = (mx.zeros(shape, like.keys.dtype) for shape in shapes)
    cache.offset = num_tokens
    mx.eval(cache.keys, cache.values)
    return cache


def _one_group(rows: Sequence[Row], groups: Sequence[Buffer], *, spare_tokens: float) -> list[Wanted]:
    return [Wanted(tuple(range(len(rows))), Buffer(len(rows), capacity_for(rows)))]
