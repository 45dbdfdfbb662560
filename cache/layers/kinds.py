"""What layer caches of each class can do; nowhere else are classes told apart.

mlx-lm gives every layer of a sequence a mutable cache object. A class with a row per token has a `RowKind`: *spans*
keep every row, *windows* the last W. Any other state is whole and valid at one offset, as recurrent state is. A class
that is not named here is a plain `CacheKind`: its state is taken whole, its rows decode alone. Slower, never wrong.

Sequences that share their first tokens may hold the span rows of these once, as a *head*, and the rest as *tails*. A
head's layer caches are ordinary ones that hold exactly `[0, head_length)`; nobody writes into them. A sequence's own
arrays begin at `head_length`. Windows and recurrent state are never shared.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from cache.layers.state import arrays_in
from cache.types import LayerCache


def make_caches(model: Any) -> list[LayerCache]:
    """Empty layer caches of a model, for one sequence."""
    return list(make_prompt_cache(model))


@dataclass(frozen=True)
class CacheKind:
    """State that is taken whole, of a class of which nothing else is known."""

    window: int = 0
    """Number of last rows kept; 0 if all are."""
    is_merged = False
    """The state of rows that decode together is in one cache."""
    can_join = False
    """Caches of several rows may stand beside each other in a model call."""
    can_group = False
    """Rows may share padded buffers."""
    can_share_head = False
    """Rows may begin with a head."""
    can_forget = False
    """A row may go back to before some tokens of a call."""

    def before_call(self, cache: LayerCache) -> dict[str, Any]:
        """Attributes that a call replaces, to be put back if none of its tokens stay; none of buffers that grow."""
        return {}

    def forget(self, cache: LayerCache, num_tokens: int) -> None:
        """Takes the last tokens of a call out; nothing where only all can go."""
        cache.trim(num_tokens)


class _Recurrent(CacheKind):
    """`ArraysCache`: recurrent state and that of convolutions."""

    is_merged = can_join = can_forget = True

    def before_call(self, cache: LayerCache) -> dict[str, Any]:
        return {"cache": list(cache.cache)}

    def forget(self, cache: LayerCache, num_tokens: int) -> None: ...


class RowKind(CacheKind):
    """A row per token; of this base class, those that keep every row: `KVCache`."""

    num_components = 2
    has_spare = True
    """Buffers may have spare rows; else each token copies them."""
    can_join = can_group = can_share_head = can_forget = True

    def length(self, cache: LayerCache) -> int:
        """The number of rows; the last is at the sequence's end."""
        return int(cache.offset) if cache.keys is not None else 0

    def arrays(self, cache: LayerCache) -> list[mx.array]:
        """Components in temporal order, each [1, num_heads, length, width]; views."""
        return [rows[..., : cache.offset, :] for rows in arrays_in([cache.keys, cache.values])]

    def load(self, cache: LayerCache, arrays: list[mx.array], num_rows: int, offset: int) -> None:
        """Makes `arrays`, whose first `num_rows` rows end at `offset`, the state. Consumes them."""
        cache.keys, cache.values = arrays
        cache.offset = offset

    def capacity(self, cache: LayerCache) -> int | None:
        """How many rows fit the buffers, if any; for classes that keep all."""
        return int(arrays_in(cache.keys)[0].shape[2]) if cache.keys is not None else None

    def max_rows(self, num_tokens: int, chunk_tokens: int) -> int:
        """The most rows in a window class's buffers while `num_tokens` are evaluated.

        A call adds rows, up to `chunk_tokens`, before it removes old ones.
        """
        raise AssertionError("every row is kept, and buffers are resized to what was reserved")

    def turn(self, cache: LayerCache) -> None:
        """Of a ring just loaded that has lost rows: puts the oldest in the middle, as if it had gone round."""


class _Concatenated(RowKind):
    """`ConcatenateKVCache`."""

    has_spare = can_join = can_group = can_share_head = can_forget = False


class _Quantized(RowKind):
    """`QuantizedKVCache`: packed numbers, scales and biases of keys, then of values."""

    num_components = 6
    can_group = can_share_head = False

    def load(self, cache: LayerCache, arrays: list[mx.array], num_rows: int, offset: int) -> None:
        super().load(cache, [arrays[:3], arrays[3:]], num_rows, offset)  # type: ignore[list-item]


class _Rotating(RowKind):
    """`RotatingKVCache` without kept first tokens: a ring of `max_size` rows."""

    can_share_head = False

    def max_rows(self, num_tokens: int, chunk_tokens: int) -> int:
        joined = min(num_tokens, self.window - 1 + chunk_tokens)
        in_place = min(num_tokens + int(RotatingKVCache.step) - 1, self.window)
        return max(joined, in_place) if num_tokens else 0

    def length(self, cache: LayerCache) -> int:
        return min(int(cache.offset), int(cache.keys.shape[2])) if cache.keys is not None else 0

    def arrays(self, cache: LayerCache) -> list[mx.array]:
        return [cache._temporal_order(cache.keys), cache._temporal_order(cache.values)]

    def load(self, cache: LayerCache, arrays: list[mx.array], num_rows: int, offset: int) -> None:
        super().load(cache, arrays, num_rows, offset)
        cache._idx = num_rows

    def before_call(self, cache: LayerCache) -> dict[str, Any]:
        return dict(vars(cache))

    def forget(self, cache: LayerCache, num_tokens: int) -> None:
        if cache.keys is not None:
            # The call left them in temporal order, with all that the window of the first new token needs.
            num_rows = cache.keys.shape[2] - num_tokens
            cache.keys, cache.values = cache.keys[:, :, :num_rows], cache.values[:, :, :num_rows]
            cache.offset, cache._idx = cache.offset - num_tokens, num_rows

    def turn(self, cache: LayerCache) -> None:
        if (num_rows := cache.keys.shape[2]) < cache.offset:
            cache._idx = cache.offset % num_rows or num_rows
            cache.keys, cache.values = (mx.roll(rows, cache._idx, 2) for rows in (cache.keys, cache.values))


class _Chunked(RowKind):
    """`ChunkedKVCache`: rows from `start_position` on, trimmed to the last `chunk_size` before each call."""

    can_join = can_group = can_share_head = False

    def max_rows(self, num_tokens: int, chunk_tokens: int) -> int:
        step = int(mlx_lm_cache.ChunkedKVCache.step)
        num_steps = -(-min(num_tokens, max(1, chunk_tokens)) // step)
        return min(num_tokens, self.window) + num_steps * step

    def length(self, cache: LayerCache) -> int:
        return int(cache.offset - cache.start_position) if cache.keys is not None else 0

    def arrays(self, cache: LayerCache) -> list[mx.array]:
        return list(cache.keys_and_values())

    def load(self, cache: LayerCache, arrays: list[mx.array], num_rows: int, offset: int) -> None:
        super().load(cache, arrays, num_rows, offset)
        cache.start_position = offset - num_rows


_SPAN, _UNKNOWN = RowKind(), CacheKind()
_KINDS: dict[type, CacheKind] = {
    KVCache: _SPAN,
    mlx_lm_cache.ConcatenateKVCache: _Concatenated(),
    mlx_lm_cache.QuantizedKVCache: _Quantized(),
    ArraysCache: _Recurrent(),
}
_rotating, _chunked = lru_cache(_Rotating), lru_cache(_Chunked)


def register_kind(cache_class: type, kind: CacheKind) -> None:
    """Names a class of layer caches that stands beside its model."""
    _KINDS[cache_class] = kind


def kind_of(cache: LayerCache) -> CacheKind:
    """What a layer cache can do; with a head, what its tail can."""
    cache = tail_of(cache)
    kind = type(cache)
    if kind is RotatingKVCache and cache.keep == 0:
        return _rotating(cache.max_size)
    return _chunked(cache.chunk_size) if kind is mlx_lm_cache.ChunkedKVCache else _KINDS.get(kind, _UNKNOWN)


def leaves_of(caches: Iterable[LayerCache]) -> list[LayerCache]:
    """The caches with every `CacheList` replaced by its members."""
    leaves: list[LayerCache] = []
    for cache in caches:
        leaves.extend(leaves_of(cache.caches) if isinstance(cache, CacheList) else [cache])
    return leaves


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


def head_of(caches: Sequence[LayerCache]) -> LayerCache | None:
    """What names the head of a row: one of its layer caches."""
    return next((cache.head for cache in leaves_of(caches) if isinstance(cache, HeadedKVCache)), None)


def split_at_head(caches: list[LayerCache], head: Sequence[LayerCache], num_tokens: int) -> None:
    """Cuts the first `num_tokens` off a sequence's span layers, one layer after another.

    Empty layer caches `head` get these rows; a `head` that has rows already has the same ones, and stays as it is.
    Empty `caches` begin with such a head, their tails without tokens.
    """
    caches[:] = [_split(*pair, num_tokens) for pair in zip(caches, head, strict=True)]


def _split(cache: LayerCache, head: LayerCache, num_tokens: int) -> LayerCache:
    if isinstance(cache, CacheList):
        pairs = zip(cache.caches, head.caches, strict=True)
        return CacheList(*[_split(*pair, num_tokens) for pair in pairs])
    if type(cache) is not KVCache or (cache.keys is None and head.keys is None):
        return cache
    tail = KVCache()
    if cache.keys is None:
        tail.keys, tail.values = (_empty_row(rows) for rows in (head.keys, head.values))
        return HeadedKVCache(head, tail)
    if head.keys is None:
        head.keys, head.values = (mx.contiguous(rows[:, :, :num_tokens]) for rows in (cache.keys, cache.values))
        head.offset = num_tokens
        mx.eval(head.keys, head.values)
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
