"""Ragged decode: one model call for rows of any lengths, attention over each row's own cache. Worker thread only.

A model sees a batch of rows with one token each, so its linear layers run once. Two things differ per row:

- *Span and window layers*: a `RaggedLayer` stands in for all rows' caches, passes each row's keys and values to its
  own, and returns the content as `Rows`, over which MLX's attention loops within `ragged_attention()`. Nothing is
  padded, nothing is copied when a row joins or leaves.
- *Recurrent state* has one size for all rows. It stays merged while the same rows decode.

Knows no tokens, sampling or requests. Other threads' attention is unaffected.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import mlx.core as mx

from cache.layers.state import owned
from cache.types import LayerCache
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


class Rows(mx.array):
    """One item per row where a model expects one array: keys, values, masks or scores.

    Its shape fits no operation: one not overridden here fails.
    """

    items: list[Any]

    def __init__(self, items: Sequence[Any]) -> None:
        super().__init__(_MISFIT, next((item.dtype for item in items if isinstance(item, mx.array)), mx.bool_))
        self.items = list(items)

    def swapaxes(self, axis1: int, axis2: int) -> "Rows":  # type: ignore[override]
        """Swaps two axes of each item."""
        return Rows([item.swapaxes(axis1, axis2) for item in self.items])

    def astype(self, dtype: mx.Dtype, *_: Any) -> "Rows":
        """Converts each item."""
        return Rows([item.astype(dtype) for item in self.items])

    def __rmatmul__(self, batch: mx.array) -> "Rows":
        """Multi-head latent attention multiplies queries with cached positions outside of attention."""
        return Rows([row @ item for row, item in zip(_split(batch, len(self.items)), self.items, strict=True)])


class QuantizedRow(NamedTuple):
    """A row's keys or values as in its `QuantizedKVCache`."""

    arrays: tuple[mx.array, mx.array, mx.array]
    group_size: int
    bits: int


class RaggedLayer:
    """Stands in for one span or window layer of all rows, whose caches it borrows.

    A live slice of a buffer makes the next update copy all of it: never store what `update_and_fetch` returns.
    """

    def __init__(self, caches: Sequence[LayerCache], offsets: "OffsetArrays") -> None:
        self._caches = list(caches)
        self._offsets = offsets

    @property
    def offset(self) -> mx.array:
        """Tokens in each row's cache, `[num_rows]`, for rotary embeddings."""
        return self._offsets.of(self._caches)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Rows, Rows]:
        """Appends keys and values `[num_rows, num_heads, 1, head_dim]`; returns all of each row's cache."""
        num_rows = len(self._caches)
        updates = zip(self._caches, _split(keys, num_rows), _split(values, num_rows), strict=True)
        return self._rows(cache.update_and_fetch(key, value) for cache, key, value in updates)

    def keys_and_values(self) -> tuple[Rows, Rows]:
        """Each row's cache, for layers that attend to another layer's keys."""
        return self._rows(cache.keys_and_values() for cache in self._caches)

    def make_mask(self, num_tokens: int, **options: Any) -> Rows | None:
        """Each row's mask for its next `num_tokens`; None if no row needs one."""
        masks = [cache.make_mask(num_tokens, **options) for cache in self._caches]
        return None if all(mask is None for mask in masks) else Rows(masks)

    def _rows(self, fetched: Iterator[tuple[Any, Any]]) -> tuple[Rows, Rows]:
        keys, values = [], []
        for cache, (key, value) in zip(self._caches, fetched, strict=True):
            if isinstance(cache, QuantizedKVCache):
                key, value = (QuantizedRow(kv, cache.group_size, cache.bits) for kv in (key, value))
            keys.append(key)
            values.append(value)
        return Rows(keys), Rows(values)


class OffsetArrays:
    """Makes one array of row offsets for all layers with the same ones."""

    def __init__(self) -> None:
        self._offsets: tuple[int, ...] = ()
        self._array = mx.array([], dtype=mx.int32)

    def of(self, caches: Sequence[LayerCache]) -> mx.array:
        """Offsets of `caches`, int32 `[num_rows]`."""
        offsets = tuple([cache.offset for cache in caches])
        if offsets != self._offsets:
            self._offsets, self._array = offsets, mx.array(offsets, dtype=mx.int32)
        return self._array


class RaggedBatch:
    """Several rows' layer caches, borrowed and joined into a batch's cache.

    From the first model call until `extract`, rows' own recurrent state is outdated; other state never is.
    """

    layers: list[LayerCache]

    def __init__(self, rows: Sequence[Sequence[LayerCache]]) -> None:
        """Raises `NotRagged`."""
        offsets = OffsetArrays()
        self.layers = [_join(column, offsets) for column in zip(*rows, strict=True)]

    def extract(self, index: int, caches: Sequence[LayerCache]) -> None:
        """Writes row `index`'s recurrent state into `caches`, the row's own, as lazy slices."""
        for merged, own in _recurrent_layers(self.layers, caches):
            own.cache = [None if state is None else state[index : index + 1] for state in merged.cache]


def leaves(caches: Iterable[LayerCache]) -> Iterator[LayerCache]:
    """The layer caches with every `CacheList` replaced by its members."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from leaves(cache.caches)
        else:
            yield cache


def own_recurrent_state(caches: Sequence[LayerCache]) -> None:
    """Evaluates recurrent state and copies slices, which would keep a whole batch in memory."""
    layers = [own for own, _ in _recurrent_layers(caches, caches)]
    mx.eval([layer.cache for layer in layers])
    for layer in layers:
        layer.cache = [state if state is None else owned(state) for state in layer.cache]


def _join(column: Sequence[LayerCache], offsets: OffsetArrays) -> LayerCache:
    first = column[0]
    if isinstance(first, CacheList):
        return CacheList(*(_join(part, offsets) for part in zip(*(row.caches for row in column), strict=True)))
    if isinstance(first, ArraysCache):
        return ArraysCache.merge(column)
    if all(isinstance(cache, KVCache | RotatingKVCache | QuantizedKVCache) for cache in column):
        return RaggedLayer(column, offsets)
    raise NotRagged(f"{type(first).__name__} has no ragged form")


def _recurrent_layers(
    joined: Sequence[LayerCache], own: Sequence[LayerCache]
) -> Iterator[tuple[ArraysCache, ArraysCache]]:
    for one, other in zip(joined, own, strict=True):
        if isinstance(one, CacheList):
            yield from _recurrent_layers(one.caches, other.caches)
        elif isinstance(one, ArraysCache):
            yield one, other


def _split(batch: mx.array, num_rows: int) -> Sequence[mx.array]:
    return cast(Sequence[mx.array], mx.split(batch, num_rows))  # the stub says array


_ATTENTION = "scaled_dot_product_attention"

_patch_lock = threading.Lock()
_patch_depth = 0
_mlx_attention: Callable[..., mx.array] = mx.fast.scaled_dot_product_attention


@contextmanager
def ragged_attention() -> Iterator[None]:
    """Lets `mx.fast.scaled_dot_product_attention` accept `Rows` in the block. Re-entrant.

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
    if not isinstance(keys, Rows):
        return _mlx_attention(queries, keys, values, scale=scale, **options)
    num_rows = len(keys.items)
    masks = _masks(options.pop("mask", None), num_rows)
    rows = zip(_split(queries, num_rows), keys.items, values.items, masks, strict=True)
    return mx.concatenate([_attend_row(q, k, v, scale, m, options) for q, k, v, m in rows])


def _masks(mask: Any, num_rows: int) -> list[Any]:
    if isinstance(mask, Rows):
        return mask.items
    if mask is None or mask == "causal":
        return [mask] * num_rows
    raise TypeError("a mask for rows of different lengths must be made by their caches")


def _attend_row(
    queries: mx.array, keys: Any, values: Any, scale: float, mask: mx.array | None, options: dict[str, Any]
) -> mx.array:
    if not isinstance(keys, QuantizedRow):
        return _mlx_attention(queries, keys, values, scale=scale, mask=mask, **options)
    if options.get("sinks") is not None:
        raise ValueError("quantized keys and values cannot be combined with attention sinks")
    sizes = {"group_size": keys.group_size, "bits": keys.bits}
    return cast(mx.array, quantized_attention(queries, keys.arrays, values.arrays, scale, mask, **sizes))
