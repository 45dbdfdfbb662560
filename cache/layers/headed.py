"""Span layers of sequences that share their first tokens: these are held once, as a *head*, the rest as *tails*.

A head's layer caches are ordinary ones that hold exactly `[0, head_length)`; nobody writes into them. A sequence's
own arrays begin at `head_length`. Windows and recurrent state are never shared.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache

from cache.types import LayerCache


class HeadedKVCache(KVCache):  # type: ignore[misc]
    """One span layer of a sequence with a head.

    Models see one cache: `update_and_fetch` joins head and tail, for a prefill chunk. Decoding attends to them apart.
    """

    __slots__ = ("head",)  # not in `vars`: the arrays of a head are not the sequence's

    def __init__(self, head: KVCache, tail: KVCache) -> None:
        self.head = head
        self.tail = tail  # type: ignore[misc]

    @property
    def offset(self) -> int:
        """Tokens of the sequence."""
        return int(self.head.offset + self.tail.offset)

    @property
    def state(self) -> Any:
        return self.tail.state

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Appends to the tail; returns copies of all keys and values: extra memory while the layer is evaluated."""
        self.tail.update_and_fetch(keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Copies of all keys and values."""
        parts = zip(self.head.keys_and_values(), self.tail.keys_and_values(), strict=True)
        keys, values = (mx.concatenate(list(part), axis=2) for part in parts)
        return keys, values


def tail_of(cache: LayerCache) -> LayerCache:
    """The layer cache with a sequence's own arrays."""
    return cache.tail if isinstance(cache, HeadedKVCache) else cache


def head_length(leaves: Sequence[LayerCache]) -> int:
    """Tokens that a sequence has in its head; 0 without one."""
    return next((int(cache.head.offset) for cache in leaves if isinstance(cache, HeadedKVCache)), 0)


def put_on_head(caches: list[LayerCache], head: Sequence[LayerCache], spare_tokens: int) -> None:
    """Makes empty `caches` begin with `head`: tails without tokens, with room for `spare_tokens`."""
    caches[:] = [_on_head(cache, one, spare_tokens) for cache, one in zip(caches, head, strict=True)]


def _on_head(cache: LayerCache, head: LayerCache, spare_tokens: int) -> LayerCache:
    if isinstance(cache, CacheList):
        pairs = zip(cache.caches, head.caches, strict=True)
        return CacheList(*[_on_head(part, one, spare_tokens) for part, one in pairs])
    if type(head) is not KVCache or head.keys is None:
        return cache
    return HeadedKVCache(head, _tail_like(head, spare_tokens))


def _tail_like(head: KVCache, num_tokens: int) -> KVCache:
    tail = KVCache()
    tail.keys, tail.values = (_empty_like(rows, num_tokens) for rows in (head.keys, head.values))
    return tail


def split_at_head(caches: list[LayerCache], head: Sequence[LayerCache], num_tokens: int) -> None:
    """Cuts the first `num_tokens` off a sequence's span layers, one layer after another.

    They move into the empty layer caches `head`, unless these hold the same tokens already.
    """
    caches[:] = [_split(cache, one, num_tokens) for cache, one in zip(caches, head, strict=True)]


def _split(cache: LayerCache, head: LayerCache, num_tokens: int) -> LayerCache:
    if isinstance(cache, CacheList):
        pairs = zip(cache.caches, head.caches, strict=True)
        return CacheList(*[_split(part, one, num_tokens) for part, one in pairs])
    if type(cache) is not KVCache or cache.keys is None:
        return cache
    if head.keys is None:
        head.keys, head.values = (mx.contiguous(rows[:, :, :num_tokens]) for rows in (cache.keys, cache.values))
        head.offset = num_tokens
        mx.eval(head.keys, head.values)
    tail = KVCache()
    tail.keys, tail.values = (_rest(rows, num_tokens) for rows in (cache.keys, cache.values))
    tail.offset, tail.step = cache.offset - num_tokens, cache.step
    mx.eval(tail.keys, tail.values)
    cache.keys = cache.values = None
    return HeadedKVCache(head, tail)


def _rest(rows: mx.array, num_tokens: int) -> mx.array:
    """At least one row: models and groups tell a layer in use by its arrays."""
    if rows.shape[2] > num_tokens:
        return mx.contiguous(rows[:, :, num_tokens:])
    return _empty_like(rows, 1)


def _empty_like(rows: mx.array, num_tokens: int) -> mx.array:
    return mx.zeros((*rows.shape[:2], num_tokens, rows.shape[3]), rows.dtype)
