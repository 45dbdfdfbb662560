"""Ragged decode: one model call for rows of any lengths, attention over each row's own cache or group. Worker thread
only.

A model sees a batch of rows with one token each, so its linear layers run once. Two things differ per row:

- *Span and window layers*: a `RaggedLayer` stands in for the caches of all *members*, rows alone and groups of rows
  (`groups.py`). It hands each member its part of the new keys and values, and returns what all hold as `Parts`;
  within `ragged_attention()` attention runs once per part. Where all rows are one group, its layer stands in.
- *Recurrent state* has one size for all rows. It stays merged while the same rows decode.

Knows no tokens, sampling or requests. Other threads' attention is unaffected.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import mlx.core as mx

from cache.layers.state import owned
from cache.types import LayerCache
from models.inference.groups import Group, GroupLayer
from models.mlx_lm_import import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    quantized_attention,
)


class NotRagged(Exception):
    """This class of layer cache cannot join a ragged batch."""


_MISFIT = mx.array([0.0] * 10_007)  # a prime number, so that no reshape can fit it either; nothing to evaluate


class Parts(mx.array):
    """One item per member where a model expects one array: keys, values, masks or scores.

    Its shape fits no operation: one not overridden here fails.
    """

    items: list[Any]
    cuts: Sequence[int]
    """Where a batch is split into members: the first row of each but the first."""

    def __init__(self, items: Sequence[Any], cuts: Sequence[int]) -> None:
        super().__init__(_MISFIT, next((item.dtype for item in items if isinstance(item, mx.array)), mx.bool_))
        self.items = list(items)
        self.cuts = cuts

    def swapaxes(self, axis1: int, axis2: int) -> "Parts":  # type: ignore[override]
        """Swaps two axes of each item."""
        return Parts([item.swapaxes(axis1, axis2) for item in self.items], self.cuts)

    def astype(self, dtype: mx.Dtype, *_: Any) -> "Parts":
        """Converts each item."""
        return Parts([item.astype(dtype) for item in self.items], self.cuts)

    def __rmatmul__(self, batch: mx.array) -> "Parts":
        """Multi-head latent attention multiplies queries with cached positions outside of attention."""
        parts = zip(_split(batch, self.cuts), self.items, strict=True)
        return Parts([part @ item for part, item in parts], self.cuts)


class QuantizedRow(NamedTuple):
    """A row's keys or values as in its `QuantizedKVCache`."""

    arrays: tuple[mx.array, mx.array, mx.array]
    group_size: int
    bits: int


class RaggedLayer:
    """Stands in for one span or window layer of all members, whose caches it borrows.

    A live slice of a buffer makes the next update copy all of it: never store what `update_and_fetch` returns.
    """

    def __init__(self, members: Sequence[LayerCache | GroupLayer], offsets: "OffsetArrays") -> None:
        self._members = list(members)
        self._cuts = list(itertools.accumulate(_num_rows(member) for member in members))[:-1]
        self._offsets = offsets

    @property
    def offset(self) -> mx.array:
        """Tokens in each row's cache, `[num_rows]`, for rotary embeddings."""
        return self._offsets.of(self._members)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Parts, Parts]:
        """Appends keys and values `[num_rows, num_heads, 1, head_dim]`; returns all of each member's cache."""
        updates = zip(self._members, _split(keys, self._cuts), _split(values, self._cuts), strict=True)
        return self._parts(member.update_and_fetch(key, value) for member, key, value in updates)

    def keys_and_values(self) -> tuple[Parts, Parts]:
        """Each member's cache, for layers that attend to another layer's keys."""
        return self._parts(member.keys_and_values() for member in self._members)

    def make_mask(self, num_tokens: int, **options: Any) -> Parts | None:
        """Each member's mask for its next `num_tokens`; None if none needs one."""
        masks = [member.make_mask(num_tokens, **options) for member in self._members]
        return None if all(mask is None for mask in masks) else Parts(masks, self._cuts)

    def _parts(self, fetched: Iterator[tuple[Any, Any]]) -> tuple[Parts, Parts]:
        keys, values = [], []
        for member, (key, value) in zip(self._members, fetched, strict=True):
            if isinstance(member, QuantizedKVCache):
                key, value = (QuantizedRow(kv, member.group_size, member.bits) for kv in (key, value))
            keys.append(key)
            values.append(value)
        return Parts(keys, self._cuts), Parts(values, self._cuts)


def _num_rows(member: LayerCache | GroupLayer) -> int:
    return len(member.offsets) if isinstance(member, GroupLayer) else 1


class OffsetArrays:
    """Makes one array of row offsets for all layers with the same ones."""

    def __init__(self) -> None:
        self._offsets: tuple[int, ...] = ()
        self._array = mx.array([], dtype=mx.int32)

    def of(self, members: Sequence[LayerCache | GroupLayer]) -> mx.array:
        """Offsets of the members' rows, int32 `[num_rows]`."""
        offsets: list[int] = []
        for member in members:
            offsets += member.offsets if isinstance(member, GroupLayer) else (member.offset,)
        if (found := tuple(offsets)) != self._offsets:
            self._offsets, self._array = found, mx.array(found, dtype=mx.int32)
        return self._array


class RaggedBatch:
    """The layer caches of several rows, groups first, borrowed and joined into a batch's cache.

    From the first model call until `extract`, rows' own recurrent state is outdated; other state of rows in no group
    never is.
    """

    layers: list[LayerCache]

    def __init__(self, rows: Sequence[Sequence[LayerCache]], groups: Sequence[Group] = ()) -> None:
        """`rows` begin with those of the groups, in order. Raises `NotRagged`."""
        self._groups = groups
        self._num_grouped = sum(len(group.rows) for group in groups)
        self._offsets = OffsetArrays()
        leaves = itertools.count()
        self.layers = [self._join(column, leaves) for column in zip(*rows, strict=True)]

    @property
    def has_recurrent(self) -> bool:
        return any(True for _ in _recurrent_layers(self.layers, self.layers))

    def extract(self, index: int, caches: Sequence[LayerCache]) -> None:
        """Writes row `index`'s recurrent state into `caches`, the row's own, as lazy slices."""
        for merged, own in _recurrent_layers(self.layers, caches):
            own.cache = [None if state is None else state[index : index + 1] for state in merged.cache]

    def _join(self, column: Sequence[LayerCache], leaves: Iterator[int]) -> LayerCache:
        if isinstance(column[0], CacheList):
            parts = zip(*(row.caches for row in column), strict=True)
            return CacheList(*[self._join(part, leaves) for part in parts])
        leaf = next(leaves)
        if isinstance(column[0], ArraysCache):
            return ArraysCache.merge(column)
        if not all(isinstance(cache, KVCache | RotatingKVCache | QuantizedKVCache) for cache in column):
            raise NotRagged(f"{type(column[0]).__name__} has no ragged form")
        members = self._members(column, leaf)
        is_one_group = len(members) == 1 and isinstance(members[0], GroupLayer)
        return members[0] if is_one_group else RaggedLayer(members, self._offsets)

    def _members(self, column: Sequence[LayerCache], leaf: int) -> list[LayerCache | GroupLayer]:
        """Every row by itself where the layer is unused."""
        grouped = [layer for group in self._groups if (layer := group.layer(leaf)) is not None]
        assert len(grouped) in (0, len(self._groups)), "groups of one model use the same layers"
        return [*grouped, *column[self._num_grouped :]] if grouped else list(column)


def own_recurrent_state(caches: Sequence[LayerCache]) -> None:
    """Evaluates recurrent state and copies slices, which would keep a whole batch in memory."""
    layers = [own for own, _ in _recurrent_layers(caches, caches)]
    mx.eval([layer.cache for layer in layers])
    for layer in layers:
        layer.cache = [state if state is None else owned(state) for state in layer.cache]


def _recurrent_layers(
    joined: Sequence[LayerCache], own: Sequence[LayerCache]
) -> Iterator[tuple[ArraysCache, ArraysCache]]:
    for one, other in zip(joined, own, strict=True):
        if isinstance(one, CacheList):
            yield from _recurrent_layers(one.caches, other.caches)
        elif isinstance(one, ArraysCache):
            yield one, other


def _split(batch: mx.array, cuts: Sequence[int]) -> Sequence[mx.array]:
    return cast(Sequence[mx.array], mx.split(batch, list(cuts)) if cuts else [batch])  # the stub says array


_ATTENTION = "scaled_dot_product_attention"

_patch_lock = threading.Lock()
_patch_depth = 0
_mlx_attention: Callable[..., mx.array] = mx.fast.scaled_dot_product_attention


@contextmanager
def ragged_attention() -> Iterator[None]:
    """Lets `mx.fast.scaled_dot_product_attention` accept `Parts` in the block. Re-entrant.

    Models look the function up in `mx.fast` at each call.
    """
    _count_patch(1)
    try:
        yield
    finally:
        _count_patch(-1)


def _count_patch(change: int) -> None:
    global _patch_depth
    with _patch_lock:
        _patch_depth += change
        setattr(mx.fast, _ATTENTION, _attend if _patch_depth else _mlx_attention)


def _attend(queries: mx.array, keys: Any, values: Any, *, scale: float, **options: Any) -> mx.array:
    if not isinstance(keys, Parts):
        return _mlx_attention(queries, keys, values, scale=scale, **options)
    masks = _masks(options.pop("mask", None), len(keys.items))
    parts = zip(_split(queries, keys.cuts), keys.items, values.items, masks, strict=True)
    return mx.concatenate([_attend_member(q, k, v, scale, m, options) for q, k, v, m in parts])


def _masks(mask: Any, num_members: int) -> list[Any]:
    if isinstance(mask, Parts):
        return mask.items
    if mask is None or mask == "causal":
        return [mask] * num_members
    raise TypeError("a mask for rows of different lengths must be made by their caches")


def _attend_member(
    queries: mx.array, keys: Any, values: Any, scale: float, mask: mx.array | None, options: dict[str, Any]
) -> mx.array:
    if not isinstance(keys, QuantizedRow):
        return _mlx_attention(queries, keys, values, scale=scale, mask=mask, **options)
    if options.get("sinks") is not None:
        raise ValueError("quantized keys and values cannot be combined with attention sinks")
    sizes = {"group_size": keys.group_size, "bits": keys.bits}
    return cast(mx.array, quantized_attention(queries, keys.arrays, values.arrays, scale, mask, **sizes))
