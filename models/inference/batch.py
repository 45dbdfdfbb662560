"""The rows that decode together, from step to step: who is in which group, and whose state is where.

Invariants:

- Between steps each row's span and window state is in the row's own caches or in one group; a group has only rows of
  the latest step. Recurrent state is merged until the set of rows changes.
- An error while state moves loses the rows that were in groups or whose recurrent state was merged: they are marked,
  and a step with one of them raises `RowLost`. Others are unharmed.
- All tokens of a feed join the row's state, until `settle` takes the last back.
- Groups take memory beyond what their rows reserved only where the caller has some to spare.

Which rows to put together is decided by `grouping.py`. Worker thread only.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, cast

import mlx.core as mx

from cache.layers.layout import head_length, head_of, leaves_of, split_at_head, tail_of
from cache.types import LayerCache
from models.inference.feeds import forget_last, unchanged
from models.inference.grouping import GROWTH_TOKENS, Buffer, Row, Wanted, capacity_for
from models.inference.groups import (
    Group,
    bytes_per_token,
    is_fresh,
    length_of,
    reserved_tokens_of,
    used_leaves,
)
from models.inference.ragged import RaggedBatch, has_recurrent, ragged_attention
from models.mlx_lm_import import ArraysCache, KVCache, RotatingKVCache

MAX_MEMBER_TOKENS = 65_536.0
"""Where reading costs nothing measurable."""


class BatchRow(Protocol):
    """A sequence while it decodes."""

    caches: list[LayerCache]
    is_lost: bool


@dataclass(eq=False)
class TrialRow:
    """A row of no sequence, to be measured or compared."""

    caches: list[LayerCache]
    is_lost: bool = False


class Choose(Protocol):
    """Chooses groups; `grouping.plan` with the costs of a model."""

    def __call__(self, rows: Sequence[Row], groups: Sequence[Buffer], *, spare_tokens: float) -> list[Wanted]:
        """Groups that hold at most `spare_tokens` more than their rows reserved."""


@dataclass(eq=False)
class DecodeBatch:
    """Rows that are evaluated in one model call."""

    choose: Choose | None
    """None: no groups."""
    max_feed_tokens: int = 1
    """The most tokens that a row may feed in a step."""
    rows: list[BatchRow | None] = field(default_factory=list)
    """In the order of the batch; None for a row that was taken out since."""
    has_changed: bool = False
    """Bytes have moved since this was last set to False."""
    _groups: list[Group] = field(default_factory=list)
    _joined: RaggedBatch | None = None
    _has_fresh: bool = False
    """Some rows had no token yet, and could not be in a group."""
    _fed: list[int] | None = None
    """Tokens that each row feeds, from `arrange` until `settle`; None where each row feeds one."""

    # -- steps

    def arrange(
        self, rows: Sequence[BatchRow], spare_bytes: float, lengths: Sequence[int] | None = None
    ) -> list[LayerCache]:
        """Layer caches for a model call with `self.rows`, which are `rows` in an order that suits groups.

        Each row feeds one token, or `lengths` in the order of `rows`, each a batch row, one feed after another.
        Groups may take `spare_bytes` more than their rows reserved. Raises `NotRagged`.
        """
        layers = self._arrange(rows, spare_bytes)
        if lengths is None or max(lengths) == 1:
            return layers
        assert max(lengths) <= self.max_feed_tokens
        return self._feed(dict(zip(rows, lengths, strict=True)))

    def _arrange(self, rows: Sequence[BatchRow], spare_bytes: float) -> list[LayerCache]:
        is_same = self._joined is not None and len(self.rows) == len(rows) and set(self.rows) == set(rows)
        if is_same and not self._has_fresh and not self._grow():
            assert self._joined is not None
            return self._joined.layers
        self._release([row for row in self.rows if row is not None and row not in rows])
        self._extract_all()
        if self.choose is not None:
            self._regroup(rows, spare_bytes)
        self._joined = RaggedBatch(self._members(rows))
        by_caches = {id(row.caches): row for row in rows}
        self.rows = [by_caches[id(caches)] for caches in self._joined.rows]
        self._has_fresh = any(is_fresh(row.caches) for row in rows)
        self._joined.take_over()
        return self._joined.layers

    def _feed(self, lengths: Mapping[BatchRow, int]) -> list[LayerCache]:
        assert self._joined is not None
        fed = [lengths[row] for row in self.rows if row is not None]
        layers = self._joined.flat(fed)
        self._fed = fed
        for group in self._groups:
            group.clock.feed(self._of_group(group, fed))
        self._grow()
        return layers

    def _of_group(self, group: Group, numbers: Sequence[int]) -> list[int]:
        """Of `numbers`, one for each row of the batch, those of a group's."""
        found = {id(row.caches): number for row, number in zip(self.rows, numbers, strict=True) if row is not None}
        return [found[id(caches)] for caches in group.rows]

    def settle(self, kept: Sequence[int]) -> list[int]:
        """Leaves the first `kept` tokens of each feed, at least one, in the rows' state; in the order of `self.rows`.

        Directly after `advance`. Returns how many stay, maybe none.
        """
        fed, self._fed = self._fed, None
        if fed is None:
            return list(kept)
        if self._joined is not None and has_recurrent(self._joined.layers):
            kept = [stays if stays == length else 0 for length, stays in zip(fed, kept, strict=True)]
            self._joined.settle([bool(stays) for stays in kept])
        surplus = [length - stays for length, stays in zip(fed, kept, strict=True)]
        assert all(0 <= number <= length for number, length in zip(surplus, fed, strict=True))
        for group in self._groups:
            group.clock.rewind(self._of_group(group, surplus))
        grouped = {id(caches) for group in self._groups for caches in group.rows}
        for row, number in zip(self.rows, surplus, strict=True):
            if row is not None and number and id(row.caches) not in grouped:
                for cache in leaves_of(row.caches):
                    if not isinstance(cache, ArraysCache):
                        forget_last(tail_of(cache), number)
        return list(kept)

    def _members(self, rows: Sequence[BatchRow]) -> list[Group | Sequence[LayerCache]]:
        """Members on one head are neighbours: attention then reads the head once."""
        grouped = {id(caches) for group in self._groups for caches in group.rows}
        alone = [row.caches for row in rows if id(row.caches) not in grouped]
        members: list[Group | Sequence[LayerCache]] = [*self._groups, *alone]
        return sorted(members, key=lambda one: id(one.head if isinstance(one, Group) else head_of(one)))

    def last_layers(self, number: int) -> list[LayerCache]:
        """The last layers of the latest step; none if a row has left since."""
        return self._joined.layers[-number:] if self._joined is not None and None not in self.rows else []

    @contextmanager
    def trial(
        self, layers: Sequence[LayerCache], lengths: Sequence[int]
    ) -> Iterator[tuple[Sequence[LayerCache], Callable[[], None]]]:
        """In the block, tokens may join `layers`, the last, which forget them at its end.

        Yields the layers for a first call with `lengths` tokens of each row, and what counts a call's tokens.
        """
        offsets = [(group, list(group.clock.offsets)) for group in self._groups]

        def count() -> None:
            self.advance()
            self.settle(lengths)
            self._grow()

        grouped = {id(caches) for group in self._groups for caches in group.rows}
        alone = [row.caches for row in self.rows if row is not None and id(row.caches) not in grouped]
        own = [cache for caches in alone for cache in caches[-len(layers) :]]
        merged = [leaf for leaf in leaves_of(layers) if isinstance(leaf, ArraysCache)]
        self._grow()
        try:
            with unchanged([*leaves_of(own), *merged]):
                rows = cast(Sequence[BatchRow], self.rows)
                is_even = max(lengths) == 1
                yield layers if is_even else self._feed(dict(zip(rows, lengths, strict=True)))[-len(layers) :], count
        finally:
            for group, before in offsets:
                group.clock.set(before)

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
        """Gives a row its state back: recurrent state as lazy slices, the rest evaluated."""
        for index, row in enumerate(self.rows):
            if row is not None and row.caches is caches:
                self._extract(index)
                self._leave_group(row)
                self.rows[index] = None
        self._end_if_empty()

    def drop(self, caches: Sequence[LayerCache]) -> None:
        """Takes a row out whose state nobody wants: its place in a group is free at once."""
        for index, row in enumerate(self.rows):
            if row is not None and row.caches is caches:
                self.rows[index] = None
                self._leave_group(row, keeps_state=False)
        self._end_if_empty()

    def _end_if_empty(self) -> None:
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
        """Drops what is shared, which may be damaged: rows in groups or with merged state are lost."""
        shared = [caches for group in self._groups for caches in group.rows]
        is_merged = self._joined is not None and has_recurrent(self._joined.layers)
        for row in self.rows:
            if row is not None and (is_merged or any(row.caches is caches for caches in shared)):
                row.is_lost = True
        self.rows, self._groups, self._joined, self._fed = [], [], None, None

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

    def _leave_group(self, row: BatchRow, *, keeps_state: bool = True) -> None:
        for group in self._groups:
            if (index := group.index_of(row.caches)) is not None:
                group.leave(index, keeps_state=keeps_state)
                self.has_changed = True
        self._end_small_groups()

    def _end_small_groups(self) -> None:
        """A group of one row is none."""
        for group in [group for group in self._groups if len(group.rows) < 2]:
            group.dissolve()
            self._groups.remove(group)

    # -- groups

    def _regroup(self, rows: Sequence[BatchRow], spare_bytes: float) -> None:
        """Rows share a buffer only with others on the same head, or without one."""
        sizes = [group.bytes_per_token for group in self._groups] + [bytes_per_token(row.caches) for row in rows]
        before, spare_tokens = self._groups, spare_bytes / max(1, *sizes)
        heads = {id(head): head for head in (head_of(row.caches) for row in rows)}
        found = list[Group]()
        for head in heads.values():
            members = [row for row in rows if head_of(row.caches) is head]
            groups = [group for group in before if group.head is head]
            made = self._regrouped(members, groups, spare_tokens)
            spare_tokens -= sum(group.extra_tokens for group in made)
            found += made
        self._groups = found

    def _regrouped(self, rows: Sequence[BatchRow], groups: Sequence[Group], spare_tokens: float) -> list[Group]:
        assert self.choose is not None
        described, slack_tokens = [_describe(row, groups) for row in rows], self._slack_tokens(rows, groups)
        wanted = list[Wanted]()
        if slack_tokens <= spare_tokens or not slack_tokens:
            buffers = [group.buffer for group in groups]
            wanted = self.choose(described, buffers, spare_tokens=spare_tokens - slack_tokens)
        self._empty(groups, rows, wanted)
        return [self._filled(groups, [rows[place] for place in one.rows], one) for one in wanted]

    def _slack_tokens(self, rows: Sequence[BatchRow], groups: Sequence[Group]) -> int:
        """Tokens that the slack of all rings may take, as if every layer were a ring."""
        if not any(isinstance(cache, RotatingKVCache) for cache in leaves_of(rows[0].caches)):
            return 0
        # New groups have room for fewer than twice their rows.
        return (self.max_feed_tokens - 1) * (2 * len(rows) + sum(group.room for group in groups))

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
        slack = self.max_feed_tokens - 1
        group = Group(rows[0].caches, wanted.buffer, slack) if wanted.kept is None else groups[wanted.kept]
        joining = [row.caches for row in rows if group.index_of(row.caches) is None]
        if joining:
            group.join(joining)
            self.has_changed = True
        return group

    # -- memory

    @property
    def shared_bytes(self) -> int:
        """Bytes of all groups' buffers and of merged state."""
        merged = self._joined.recurrent_bytes if self._joined is not None else 0
        return merged + sum(group.num_bytes for group in self._groups)

    def own_bytes(self, caches: Sequence[LayerCache]) -> int:
        """Bytes of what a row shares, were it its own; else 0."""
        if not any(row is not None and row.caches is caches for row in self.rows):
            return 0
        merged = self._joined.recurrent_bytes // len(self.rows) if self._joined is not None else 0
        return merged + sum(group.own_bytes_of(caches) for group in self._groups)

    @property
    def all_own_bytes(self) -> int:
        return sum(self.own_bytes(row.caches) for row in self.rows if row is not None)


def _describe(row: BatchRow, groups: Sequence[Group]) -> Row:
    for number, group in enumerate(groups):
        if (index := group.index_of(row.caches)) is not None:
            return group.describe(index, number)
    num_tokens = length_of(row.caches) - head_length(leaves_of(row.caches))
    return Row(num_tokens, reserved_tokens_of(row.caches), can_share=used_leaves(row.caches) is not None)


_NUM_ROWS, _NUM_LAYERS = 4, 2
_MIN_TRIALS, _MAX_TRIALS, _TRIAL_SECONDS = 5, 20, 0.15
_SHORT_TOKENS, _LONG_TOKENS = 512, 2048
_TAIL_TOKENS = 64
_QUERIES_PER_KEY = 4
"""Query heads for each key head, as in models of today."""


def measure_member_tokens(caches: Sequence[LayerCache]) -> float:
    """Cost of one more member of a batch in a step, in tokens read: see `grouping.py`.

    Times attention in layers like those of `caches`: rows by themselves, in a group, and longer ones.
    """
    like, num_rows = _layer_of(caches), _NUM_ROWS
    alone, grouped, longer = _best_seconds(
        _Trial(_rows_like(like, num_rows, _SHORT_TOKENS), None),
        _Trial(_rows_like(like, num_rows, _SHORT_TOKENS), _one_group),
        _Trial(_rows_like(like, num_rows, _LONG_TOKENS), None),
    )
    member = max(0.0, alone - grouped) / (num_rows - 1)
    token = max(1e-12, longer - alone) / (num_rows * (_LONG_TOKENS - _SHORT_TOKENS))
    return float(min(member / token, MAX_MEMBER_TOKENS))


def measure_head_tokens(caches: Sequence[LayerCache]) -> float:
    """Tokens from which two rows on one head are faster than with a copy each; maybe infinite.

    Timed at two lengths; the gain counts as linear between and beyond.
    """
    like, lengths = _layer_of(caches), (_SHORT_TOKENS, _LONG_TOKENS)
    copied = [_rows_like(like, 2, num_tokens + _TAIL_TOKENS) for num_tokens in lengths]
    headed = [_rows_like(like, 2, num_tokens + _TAIL_TOKENS, num_tokens) for num_tokens in lengths]
    short_copied, long_copied, short_headed, long_headed = _best_seconds(
        *[_Trial(rows, _one_group) for rows in (*copied, *headed)]
    )
    short_gain, long_gain = short_copied - short_headed, long_copied - long_headed
    per_token = (long_gain - short_gain) / (_LONG_TOKENS - _SHORT_TOKENS)
    if long_gain <= 0 or per_token <= 0:
        return float("inf")
    return max(0.0, _SHORT_TOKENS - short_gain / per_token)


def _layer_of(caches: Sequence[LayerCache]) -> LayerCache:
    return next(cache for cache in leaves_of(caches) if length_of([cache]) and cache.keys is not None)


def _best_seconds(*sides: "_Trial") -> list[float]:
    """The best of several, in turns: other work of the machine only adds."""
    timed, begun = list[list[float]](), time.perf_counter()
    while len(timed) < _MIN_TRIALS or (len(timed) < _MAX_TRIALS and time.perf_counter() - begun < _TRIAL_SECONDS):
        timed.append([side.seconds() for side in sides])
    return [min(times) for times in zip(*timed, strict=True)]


class _Trial:
    """Attention of some rows in a few layers, to be timed."""

    def __init__(self, rows: Sequence[TrialRow], choose: Choose | None) -> None:
        self._rows = rows
        self._batch = DecodeBatch(choose)
        like, num_rows = tail_of(rows[0].caches[0]), len(rows)
        num_heads, width = like.keys.shape[1], like.keys.shape[3]
        self._queries = mx.zeros((num_rows, _QUERIES_PER_KEY * num_heads, 1, width), like.keys.dtype)
        self._added = [
            mx.zeros((num_rows, num_heads, 1, rows.shape[3]), rows.dtype) for rows in (like.keys, like.values)
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


def _rows_like(like: LayerCache, num_rows: int, num_tokens: int, head_tokens: int = 0) -> list[TrialRow]:
    """Rows without content, the first `head_tokens` on one head."""
    rows = [TrialRow([_made_up(like, num_tokens) for _ in range(_NUM_LAYERS)]) for _ in range(num_rows)]
    head = [KVCache() for _ in range(_NUM_LAYERS)]
    for row in rows if head_tokens else ():
        split_at_head(row.caches, head, head_tokens)
    return rows


def _made_up(like: LayerCache, num_tokens: int) -> LayerCache:
    cache = KVCache()
    shapes = [(*rows.shape[:2], num_tokens + GROWTH_TOKENS, rows.shape[3]) for rows in (like.keys, like.values)]
    cache.keys, cache.values = (mx.zeros(shape, like.keys.dtype) for shape in shapes)
    cache.offset = num_tokens
    mx.eval(cache.keys, cache.values)
    return cache


def _one_group(rows: Sequence[Row], groups: Sequence[Buffer], *, spare_tokens: float) -> list[Wanted]:
    return [Wanted(tuple(range(len(rows))), Buffer(len(rows), capacity_for(rows)))]
