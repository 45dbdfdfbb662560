"""A model whose layer state is the tokens themselves, in mlx-lm's real cache classes.

Keys hold the token, values its position, recurrent state the list of all tokens so far. Whatever the cache under
test does, `contents` reads back which tokens each layer really stands for.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from cache.layers import LayerCache
from cache.trie import TokenArray

# isort: split
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

WINDOW = 32
LAYOUTS = ("T", "W", "R", "WR")
"""Attention only; with sliding window; with recurrent state; with both, the recurrent layer in a list."""


def make_caches(layout: str) -> list[LayerCache]:
    """Returns fresh layer caches of a fake model."""
    made: list[LayerCache] = [KVCache(), KVCache()]
    if "W" in layout:
        made.append(RotatingKVCache(max_size=WINDOW))
    if "R" in layout:
        made.append(CacheList(ArraysCache(2), KVCache()) if layout == "WR" else ArraysCache(2))
    return made


def tokens_of(*values: int) -> TokenArray:
    """Returns token ids as the cache wants them."""
    return np.array(values, np.int32)


def evaluate(caches: Sequence[LayerCache], tokens: TokenArray) -> None:
    """Does what a model's forward pass does to its caches."""
    for cache in caches:
        _evaluate_one(cache, tokens)
    mx.eval([cache.state for cache in caches])


def _evaluate_one(cache: LayerCache, tokens: TokenArray) -> None:
    if isinstance(cache, CacheList):
        for member in cache.caches:
            _evaluate_one(member, tokens)
    elif isinstance(cache, ArraysCache):
        new = mx.array(tokens)[None]
        cache[0] = new if cache[0] is None else mx.concatenate([cache[0], new], axis=1)
        cache[1] = cache[0][:, -3:]
    else:
        positions = np.arange(cache.offset, cache.offset + len(tokens))
        cache.update_and_fetch(_rows(tokens), _rows(positions))


def _rows(values: np.ndarray) -> mx.array:
    """Two heads of width 4; every number of a token's row is its value."""
    return mx.broadcast_to(mx.array(values.astype(np.float32))[None, None, :, None], (1, 2, len(values), 4))


def contents(caches: Sequence[LayerCache], num_tokens: int) -> list[list[int]]:
    """Returns, layer by layer, the tokens it stands for; asserts that their positions are right."""
    return [layer for cache in caches for layer in _contents_of(cache, num_tokens)]


def _contents_of(cache: LayerCache, num_tokens: int) -> list[list[int]]:
    if isinstance(cache, CacheList):
        return contents(cache.caches, num_tokens)
    if isinstance(cache, ArraysCache):
        held = [] if cache[0] is None else cache[0][0].tolist()
        assert cache[1] is None or cache[1][0].tolist() == held[-3:], "convolution state is of another offset"
        return [held]
    if cache.keys is None:
        return [[]]
    assert cache.offset == num_tokens, f"layer rests at {cache.offset}, the sequence at {num_tokens}"
    if isinstance(cache, RotatingKVCache):
        length = min(cache.offset, cache.keys.shape[2])
        keys, values = (cache._temporal_order(array)[..., -length:, :] for array in (cache.keys, cache.values))
    else:
        keys, values = cache.keys_and_values()
    positions = [int(value) for value in values[0, 0, :, 0].tolist()]
    assert positions == list(range(num_tokens - len(positions), num_tokens)), "rows are not where they were written"
    assert mx.all(keys == keys[:, :1, :, :1]).item(), "heads disagree"
    return [[int(value) for value in keys[0, 1, :, 3].tolist()]]


def assert_holds(caches: Sequence[LayerCache], tokens: Sequence[int]) -> None:
    """Asserts that every layer stands for exactly `tokens`; a window layer for the last of them."""
    for layer in contents(caches, len(tokens)):
        assert len(layer) >= min(len(tokens), WINDOW), f"a layer holds {len(layer)} of {len(tokens)} tokens"
        assert layer == list(tokens)[len(tokens) - len(layer) :], "a layer holds other tokens"
