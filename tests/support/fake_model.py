"""A model whose layer state is the tokens themselves, in mlx-lm's real cache classes.

Keys hold the token, values its position, recurrent state the list of all tokens so far. Whatever the cache under
test does, `contents` reads back which tokens each layer really stands for.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from cache.layers.kinds import HeadedKVCache
from cache.layers.state import RecurrentState, Segment, arrays_in, bytes_of
from cache.prefix_cache import PrefixCache
from cache.trie import Node, Snapshot
from cache.types import LayerCache, TokenArray

# isort: split
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache

WINDOW = 32
LAYOUTS = ("T", "W", "R", "WR")
"""Attention only; with sliding window; with recurrent state; with both, the recurrent layer in a list."""
POINTS_ONLY = "P"
"""Recurrent state alone, as Mamba and RWKV have it: edges without bytes."""
MORE_LAYOUTS = (*LAYOUTS, "C", "U", POINTS_ONLY)
"""And: chunked attention; attention beside a class that nobody knows; recurrent state alone."""


class Opaque:
    """A layer cache of a class that the cache has never heard of, and that changes its state in place."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.rows = mx.zeros((1, 1, 4, 1))

    def update(self, tokens: TokenArray) -> None:
        for token in tokens.tolist():
            self.rows[:, :, len(self.seen) % 4] = float(token)
            self.seen.append(token)

    @property
    def state(self) -> mx.array:
        return self.rows

    @property
    def last(self) -> list[int]:
        """The tokens that the rows hold, oldest first."""
        first = max(0, len(self.seen) - 4)
        rows = np.array(self.rows)[0, 0, :, 0].astype(int).tolist()
        return [rows[number % 4] for number in range(first, len(self.seen))]


def make_caches(layout: str, window: int = WINDOW) -> list[LayerCache]:
    """Returns fresh layer caches of a fake model."""
    made: list[LayerCache] = [ArraysCache(2), ArraysCache(2)] if layout == POINTS_ONLY else [KVCache(), KVCache()]
    if "W" in layout:
        made.append(RotatingKVCache(max_size=window))
    if "R" in layout:
        made.append(CacheList(ArraysCache(2), KVCache()) if layout == "WR" else ArraysCache(2))
    if "C" in layout:
        made.append(ChunkedKVCache(window))
    if "U" in layout:
        made.append(Opaque())
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
    elif isinstance(cache, Opaque):
        cache.update(tokens)
    else:
        if isinstance(cache, ChunkedKVCache):
            cache.maybe_trim_front()
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
        state = [] if cache[0] is None else _seen(cache[0])[0].tolist()
        assert cache[1] is None or _seen(cache[1])[0].tolist() == state[-3:], "convolution state is of another offset"
        return [state]
    if isinstance(cache, Opaque):
        assert cache.last == cache.seen[-4:], "rows are of another offset"
        return [cache.seen]
    if isinstance(cache, HeadedKVCache):
        whole = KVCache()
        whole.keys, whole.values = cache.keys_and_values()
        whole.offset = cache.offset
        return _contents_of(whole, num_tokens)
    if cache.keys is None:
        return [[]]
    assert cache.offset == num_tokens, f"layer rests at {cache.offset}, the sequence at {num_tokens}"
    keys, values = (_rows_in_order(cache, _seen(array)) for array in (cache.keys, cache.values))
    positions = values[0, 0, :, 0].astype(int).tolist()
    assert positions == list(range(num_tokens - len(positions), num_tokens)), "rows are not where they were written"
    assert (keys == keys[:, :1, :, :1]).all(), "heads disagree"
    return [keys[0, 1, :, 3].astype(int).tolist()]


def _seen(array: mx.array) -> np.ndarray:
    """The array's own bytes: each small operation of MLX, a slice too, costs a hop to another thread."""
    return np.asarray(array)


def _rows_in_order(cache: LayerCache, rows: np.ndarray) -> np.ndarray:
    """What `keys_and_values` and `_temporal_order` of mlx-lm give of a buffer, oldest first."""
    if isinstance(cache, RotatingKVCache):
        wrapped = rows[..., cache._idx :, :] if cache._idx < cache.offset else rows[..., :0, :]
        rows = np.concatenate([wrapped, rows[..., : cache._idx, :]], axis=2)
        return rows[..., -min(cache.offset, cache.keys.shape[2]) :, :]
    return rows[..., : cache.offset - getattr(cache, "start_position", 0), :]


def assert_holds(caches: Sequence[LayerCache], tokens: Sequence[int], window: int = WINDOW) -> None:
    """Asserts that every layer stands for exactly `tokens`; a window layer for the last of them."""
    for layer in contents(caches, len(tokens)):
        assert len(layer) >= min(len(tokens), window), f"a layer holds {len(layer)} of {len(tokens)} tokens"
        assert layer == list(tokens)[len(tokens) - len(layer) :], "a layer holds other tokens"


def assert_stored_right(prefix_cache: PrefixCache) -> None:
    """Asserts that all stored state stands for the tokens it is stored under."""
    for node in prefix_cache.memory.nodes():
        path = np.concatenate([step.tokens for step in node.path()]).tolist()
        if isinstance(node.span, Segment):
            _assert_rows(node.span, path)
        if isinstance(node.snapshot, Snapshot):
            _assert_snapshot(node, node.snapshot, path)


def _assert_snapshot(node: Node, snapshot: Snapshot, path: list[int]) -> None:
    if snapshot.window is not None:
        assert snapshot.window.stop == node.stop, "window rows end elsewhere than their node"
        _assert_rows(snapshot.window, path)
    if snapshot.recurrent is not None:
        assert snapshot.offset == node.stop, "recurrent state of another offset"
        for contents in snapshot.recurrent.caches:
            is_recurrent = isinstance(contents, ArraysCache)
            seen = _seen(contents[0])[0].tolist() if is_recurrent else contents.seen
            assert seen == path, "recurrent state of other tokens"
            last = _seen(contents[1])[0].tolist() if is_recurrent else contents.last
            assert last == path[-len(last) :], "recurrent state was written to"


def _assert_rows(segment: Segment, path: list[int]) -> None:
    for index in sorted(segment._where):
        pack, place = segment._where[index]
        rows = _seen(pack.rows)[place, 1, :, 2].astype(int).tolist()
        wanted = path[segment.start : segment.stop] if index % 2 == 0 else list(range(segment.start, segment.stop))
        assert rows == wanted, "stored rows of other tokens"


def assert_bytes_known(prefix_cache: PrefixCache) -> None:
    """Asserts that the ledger's stored bytes are the allocator's of all stored arrays, each found by hand."""
    assert prefix_cache.ledger.stored_bytes == stored_bytes(prefix_cache)


def stored_bytes(prefix_cache: PrefixCache) -> int:
    """Returns the allocator's bytes of all stored arrays, each found by hand."""
    arrays: list[mx.array] = []
    for node in prefix_cache.memory.nodes():
        snapshot = node.snapshot if isinstance(node.snapshot, Snapshot) else None
        for segment in (node.span, snapshot.window if snapshot else None):
            arrays += [pack.rows for pack in segment.packs] if isinstance(segment, Segment) else []
        arrays += (
            arrays_in(snapshot.recurrent.caches)
            if snapshot and isinstance(snapshot.recurrent, RecurrentState)
            else []
        )
    return bytes_of(arrays)
