"""What is inside each of mlx-lm's classes of layer cache whose state is rows per token.

One adapter per class. A class without one is taken whole, as point state: slower, never wrong.
"""

from collections.abc import Iterable
from typing import Protocol

import mlx.core as mx

from cache.layers import mlx_lm_guard as _guard  # noqa: F401
from cache.layers.arrays import owned

# isort: split
from mlx_lm.models import cache as mlx_lm_cache

from cache.types import LayerCache


class RowLeaf(Protocol):
    """Adapter of one class of layer cache whose state is rows per token."""

    window: int | None
    """How many of the last rows the class keeps; None keeps all."""
    num_components: int
    can_overallocate: bool
    """Whether a buffer may be longer than the rows in it."""

    def length(self, cache: LayerCache) -> int:
        """Returns how many rows are there, the last of them at the sequence's end."""

    def arrays(self, cache: LayerCache) -> list[mx.array]:
        """Returns the components in temporal order, [1, num_heads, length, width] each; views."""

    def load(self, cache: LayerCache, arrays: list[mx.array], num_rows: int, offset: int) -> None:
        """Makes `arrays`, whose first `num_rows` rows end at `offset`, the cache's state. Consumes them."""

    def truncate(self, cache: LayerCache, offset: int) -> None:
        """Forgets rows from `offset` on; for classes that keep all rows."""

    def max_rows(self, num_tokens: int, chunk_tokens: int) -> int:
        """Returns how many rows a window class's buffers take at most while `num_tokens` are evaluated.

        Prompts are evaluated in calls of up to `chunk_tokens`, answers in calls of one token. A call adds its
        rows before old ones go, so this may be more than the window.
        """

    def capacity(self, cache: LayerCache) -> int | None:
        """Returns how many rows the buffers take, None before there are any; for classes that keep all rows."""


class _SpanLeaf:
    """What the classes that keep every row have in common."""

    window: int | None = None
    num_components = 2
    can_overallocate = True

    def max_rows(self, num_tokens: int, chunk_tokens: int) -> int:
        raise AssertionError("every row is kept, and buffers are resized to what was reserved")

    def capacity(self, cache: LayerCache) -> int | None:
        return int(cache.keys.shape[2]) if cache.keys is not None else None

    def truncate(self, cache: LayerCache, offset: int) -> None:
        cache.offset = offset


class _AttentionLeaf(_SpanLeaf):
    """`KVCache`: keys and values of every token."""

    def length(self, cache: LayerCache) -> int:
        return int(cache.offset) if cache.keys is not None else 0

    def arrays(self, cache: LayerCache) -> list[mx.array]:
        return [cache.keys[..., : cache.offset, :], cache.values[..., : cache.offset, :]]

    def load(self, cache: LayerCache, arrays: list[mx.array], num_rows: int, offset: int) -> None:
        cache.keys, cache.values = arrays
        cache.offset = offset


class _ConcatenatingLeaf(_AttentionLeaf):
    """`ConcatenateKVCache`: the same in buffers without spare rows: each token copies them."""

    can_overallocate = False

    def truncate(self, cache: LayerCache, offset: int) -> None:
        cache.keys, cache.values = (owned(array[..., :offset, :]) for array in (cache.keys, cache.values))
        cache.offset = offset


class _QuantizedLeaf(_SpanLeaf):
    """`QuantizedKVCache`: keys and values as (packed, scales, biases)."""

    num_components = 6

    def capacity(self, cache: LayerCache) -> int | None:
        return int(cache.keys[0].shape[2]) if cache.keys is not None else None

    def length(self, cache: LayerCache) -> int:
        return int(cache.offset) if cache.keys is not None else 0

    def arrays(self, cache: LayerCache) -> list[mx.array]:
        return [array[..., : cache.offset, :] for array in (*cache.keys, *cache.values)]

    def load(self, cache: LayerCache, arrays: list[mx.array], num_rows: int, offset: int) -> None:
        cache.keys, cache.values = list(arrays[:3]), list(arrays[3:])
        cache.offset = offset


class _WindowLeaf:
    """What the classes that keep the last rows have in common."""

    num_components = 2
    can_overallocate = False

    def __init__(self, window: int) -> None:
        self.window: int | None = window

    def capacity(self, cache: LayerCache) -> int | None:
        raise AssertionError("a window allocates its own buffers")

    def truncate(self, cache: LayerCache, offset: int) -> None:
        raise AssertionError("a window is restored from stored rows, never truncated")


class _RotatingLeaf(_WindowLeaf):
    """`RotatingKVCache` without kept first tokens: a ring of the last `max_size` rows."""

    def max_rows(self, num_tokens: int, chunk_tokens: int) -> int:
        assert self.window is not None
        joined = min(num_tokens, self.window - 1 + chunk_tokens)
        in_place = min(num_tokens + int(mlx_lm_cache.RotatingKVCache.step) - 1, self.window)
        return max(joined, in_place) if num_tokens else 0

    def length(self, cache: LayerCache) -> int:
        return min(int(cache.offset), int(cache.keys.shape[2])) if cache.keys is not None else 0

    def arrays(self, cache: LayerCache) -> list[mx.array]:
        return [cache._temporal_order(cache.keys), cache._temporal_order(cache.values)]

    def load(self, cache: LayerCache, arrays: list[mx.array], num_rows: int, offset: int) -> None:
        cache.keys, cache.values = arrays
        cache.offset = offset
        cache._idx = num_rows


class _ChunkedLeaf(_WindowLeaf):
    """`ChunkedKVCache`: rows from `start_position` on, trimmed to the last `chunk_size` before each call."""

    def max_rows(self, num_tokens: int, chunk_tokens: int) -> int:
        assert self.window is not None
        step = int(mlx_lm_cache.ChunkedKVCache.step)
        num_steps = -(-min(num_tokens, max(1, chunk_tokens)) // step)
        return min(num_tokens, self.window) + num_steps * step

    def length(self, cache: LayerCache) -> int:
        return int(cache.offset - cache.start_position) if cache.keys is not None else 0

    def arrays(self, cache: LayerCache) -> list[mx.array]:
        return list(cache.keys_and_values())

    def load(self, cache: LayerCache, arrays: list[mx.array], num_rows: int, offset: int) -> None:
        cache.keys, cache.values = arrays
        cache.offset = offset
        cache.start_position = offset - num_rows


def row_leaf(cache: LayerCache) -> RowLeaf | None:
    """Returns the adapter of a cache whose state is rows, None for one that can only be taken whole."""
    kind = type(cache)
    if kind is mlx_lm_cache.KVCache:
        return _AttentionLeaf()
    if kind is mlx_lm_cache.ConcatenateKVCache:
        return _ConcatenatingLeaf()
    if kind is mlx_lm_cache.QuantizedKVCache:
        return _QuantizedLeaf()
    if kind is mlx_lm_cache.RotatingKVCache and cache.keep == 0:
        return _RotatingLeaf(cache.max_size)
    if kind is mlx_lm_cache.ChunkedKVCache:
        return _ChunkedLeaf(cache.chunk_size)
    return None


def leaves_of(caches: Iterable[LayerCache]) -> list[LayerCache]:
    """Returns the caches with every `CacheList` replaced by its members."""
    found: list[LayerCache] = []
    for cache in caches:
        found.extend(leaves_of(cache.caches) if isinstance(cache, mlx_lm_cache.CacheList) else [cache])
    return found
