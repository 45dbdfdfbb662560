"""Span layers of sequences that share their first tokens: these are held once, as a *head*, the rest as *tails*.

A head's layer caches are ordinary ones that hold exactly `[0, head_length)`; nobody writes into them. A sequence's
own arrays begin at `head_length`. Windows and recurrent state are never shared.
"""

from collections.abc import Callable, Sequence
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


def put_on_head(caches: list[LayerCache], head: Sequence[LayerCache]) -> None:
    """Makes empty `caches` begin with `head`: tails without tokens."""
    caches[:] = _changed(caches, head, _empty_tail)


def split_at_head(caches: list[LayerCache], head: Sequence[LayerCache], num_tokens: int) -> None:
    """Cuts the first `num_tokens` off a sequence's span layers, one layer after another.

    Their rows move into the empty layer caches `head`, unless `head` holds the same rows already.
    """
    caches[:] = _changed(caches, head, lambda cache, one: _split(cache, one, num_tokens))


def _changed(
    caches: Sequence[LayerCache], head: Sequence[LayerCache], change: Callable[[LayerCache, KVCache], LayerCache]
) -> list[LayerCache]:
    return [
        CacheList(*_changed(cache.caches, one.caches, change)) if isinstance(cache, CacheList) else change(cache, one)
        for cache, one in zip(caches, head, strict=True)
    ]


def _empty_tail(cache: LayerCache, head: LayerCache) -> LayerCache:
    if type(head) is not KVCache or head.keys is None:
        return cache
    tail = KVCache()
    tail.keys, tail.values = (_empty_row(rows) for rows in (head.keys, head.values))
    return HeadedKVCache(head, tail)


def _split(cache: LayerCache, head: LayerCache, num_tokens: int) -> LayerCache:
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
    """The rows from `num_tokens` on, at least one: models and groups tell a layer in use by its arrays."""
    return mx.contiguous(rows[:, :, num_tokens:]) if rows.shape[2] > num_tokens else _empty_row(rows)


def _empty_row(rows: mx.array) -> mx.array:
    return mx.zeros((*rows.shape[:2], 1, rows.shape[3]), rows.dtype)
