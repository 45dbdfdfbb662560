"""Takes one model's layer caches apart, puts them together, and sizes sequences.

mlx-lm gives every layer of a sequence a mutable cache object. A `Layout` sorts layers into three kinds: *span* state
(attention) is rows of any token range; *window* state (sliding or chunked attention) the last W rows; *recurrent*
state, and that of convolutions, is whole and valid at one offset. A class without an adapter counts as recurrent:
slower, never wrong. Nothing here knows tokens, nodes or a budget.

Sequences that share their first tokens may hold the span rows of these once, as a *head*, and the rest as *tails*. A
head's layer caches are ordinary ones that hold exactly `[0, head_length)`; nobody writes into them. A sequence's own
arrays begin at `head_length`. Windows and recurrent state are never shared.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import CacheList, KVCache

from cache.layers import state as segments
from cache.layers.state import Pack, RecurrentState, Segment, arrays_in, assert_rows, owned, packed, rows_up_to
from cache.types import LayerCache


@dataclass(frozen=True)
class RowLeaf:
    """Adapter of a cache class with rows per token; this base class, of those that keep every row."""

    num_components: int = 2
    has_spare: bool = True
    """Buffers may have spare rows; else each token copies them."""
    window: int = 0
    """Number of last rows kept; 0 if all are."""

    def length(self, cache: LayerCache) -> int:
        """The number of rows; the last is at the sequence's end."""
        return int(cache.offset) if cache.keys is not None else 0

    def arrays(self, cache: LayerCache) -> list[mx.array]:
        """Components in temporal order, each [1, num_heads, length, width]; views."""
        return [rows[..., : cache.offset, :] for rows in arrays_in([cache.keys, cache.values])]

    def load(self, cache: LayerCache, arrays: list[mx.array], num_rows: int, offset: int) -> None:
        """Makes `arrays`, whose first `num_rows` rows end at `offset`, the state. Consumes them."""
        # Of a `QuantizedKVCache`: packed numbers, scales and biases.
        cache.keys, cache.values = arrays if len(arrays) == 2 else (arrays[:3], arrays[3:])
        cache.offset = offset

    def capacity(self, cache: LayerCache) -> int | None:
        """How many rows fit the buffers, if any; for classes that keep all."""
        return int(arrays_in(cache.keys)[0].shape[2]) if cache.keys is not None else None

    def max_rows(self, num_tokens: int, chunk_tokens: int) -> int:
        """The most rows in a window class's buffers while `num_tokens` are evaluated.

        A call adds rows, up to `chunk_tokens`, before it removes old ones.
        """
        raise AssertionError("every row is kept, and buffers are resized to what was reserved")


class _RotatingLeaf(RowLeaf):
    """`RotatingKVCache` without kept first tokens: a ring of `max_size` rows."""

    def max_rows(self, num_tokens: int, chunk_tokens: int) -> int:
        joined = min(num_tokens, self.window - 1 + chunk_tokens)
        in_place = min(num_tokens + int(mlx_lm_cache.RotatingKVCache.step) - 1, self.window)
        return max(joined, in_place) if num_tokens else 0

    def length(self, cache: LayerCache) -> int:
        return min(int(cache.offset), int(cache.keys.shape[2])) if cache.keys is not None else 0

    def arrays(self, cache: LayerCache) -> list[mx.array]:
        return [cache._temporal_order(cache.keys), cache._temporal_order(cache.values)]

    def load(self, cache: LayerCache, arrays: list[mx.array], num_rows: int, offset: int) -> None:
        super().load(cache, arrays, num_rows, offset)
        cache._idx = num_rows


class _ChunkedLeaf(RowLeaf):
    """`ChunkedKVCache`: rows from `start_position` on, trimmed to the last `chunk_size` before each call."""

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


_SPAN_LEAVES: dict[type, RowLeaf] = {
    KVCache: RowLeaf(),
    mlx_lm_cache.ConcatenateKVCache: RowLeaf(has_spare=False),
    mlx_lm_cache.QuantizedKVCache: RowLeaf(num_components=6),
}


def row_leaf(cache: LayerCache) -> RowLeaf | None:
    """The adapter of a cache; None if it must be taken whole."""
    kind = type(cache)
    if kind is mlx_lm_cache.RotatingKVCache and cache.keep == 0:
        return _RotatingLeaf(window=cache.max_size)
    return _ChunkedLeaf(window=cache.chunk_size) if kind is mlx_lm_cache.ChunkedKVCache else _SPAN_LEAVES.get(kind)


def leaves_of(caches: Iterable[LayerCache]) -> list[LayerCache]:
    """The caches with every `CacheList` replaced by its members."""
    leaves: list[LayerCache] = []
    for cache in caches:
        leaves.extend(leaves_of(cache.caches) if isinstance(cache, mlx_lm_cache.CacheList) else [cache])
    return leaves


CHUNK_TOKENS = 256
"""Prompt tokens in one model call, by default."""
GROWTH_TOKENS = 256
"""A full span buffer grows by so many tokens: copying all rows costs 1/128 of reading them for each token."""


_Rows: TypeAlias = tuple[RowLeaf, LayerCache, range]
"""One row layer: its adapter, its live cache, and the numbers of its components, counted over all row layers."""


class Layout:
    """How one model's layer caches come apart."""

    bytes_per_token = 0.0
    """Bytes of a token's span rows; 0 until `calibrate`."""
    _window_bytes_per_row = 0.0
    _recurrent_bytes = 0
    _spans: Sequence[tuple[int, RowLeaf]] = ()
    """With each layer's index among leaves."""
    _windows: Sequence[tuple[int, RowLeaf]] = ()

    def __init__(self, caches: Sequence[LayerCache], chunk_tokens: int = CHUNK_TOKENS) -> None:
        self._chunk_tokens = chunk_tokens
        leaves = leaves_of(caches)
        rows = [(index, leaf) for index, cache in enumerate(leaves) if (leaf := row_leaf(cache)) is not None]
        windows = {leaf.window for _, leaf in rows if leaf.window}
        self.has_windows = bool(windows)
        # Rows are kept for one common window; with several windows, the layers are taken whole instead.
        self.window = windows.pop() if len(windows) == 1 else 0
        """See `cache.types.LayerKinds`."""
        self._spans = [(index, leaf) for index, leaf in rows if not leaf.window]
        self._windows = [(index, leaf) for index, leaf in rows if leaf.window and self.window]
        known = dict([*self._spans, *self._windows])
        self._recurrent = [index for index in range(len(leaves)) if index not in known]
        self.has_recurrent = bool(self._recurrent)

    def calibrate(self, caches: Sequence[LayerCache]) -> None:
        """Measures a sequence's layers by caches with a few tokens; leaves out those that stay empty.

        Some models make caches for layers that share another's keys.
        """
        leaves = leaves_of(caches)
        self._spans, self._windows = (
            [(index, leaf) for index, leaf in layers if leaf.length(leaves[index])]
            for layers in (self._spans, self._windows)
        )
        self.bytes_per_token = _bytes_per_row(_rows(self._spans, caches))
        self._window_bytes_per_row = _bytes_per_row(_rows(self._windows, caches))
        self._recurrent_bytes = sum(array.nbytes for array in arrays_in(self._recurrent_leaves(caches)))

    @property
    def needs_snapshots(self) -> bool:
        return bool(self._recurrent or self._windows)

    @property
    def can_share_heads(self) -> bool:
        """Whether all spans are of the class that can be cut into a head and tails."""
        return bool(self._spans) and all(leaf == RowLeaf() for _, leaf in self._spans)

    def origin(self, caches: Sequence[LayerCache]) -> int:
        """Where a sequence's own span rows begin: after its head, if it has one."""
        return head_length(leaves_of(caches))

    def offsets(self, caches: Sequence[LayerCache]) -> set[int]:
        """Where the span and window layers that hold rows end, in tokens of the sequence."""
        layers, leaves = [*self._spans, *self._windows] if caches else [], leaves_of(caches)
        return {int(leaves[index].offset) for index, leaf in layers if leaf.length(tail_of(leaves[index]))}

    # -- sizes

    def live_bytes(self, caches: Sequence[LayerCache]) -> int:
        """Live caches' bytes in the allocator, with unused capacity."""
        arrays = arrays_in(list(caches))
        mx.eval(arrays)
        return int(mx.get_array_buffer_size(*arrays)) if arrays else 0

    def bytes_for(self, num_tokens: int, head_tokens: int = 0) -> int:
        """About the most own bytes of a live sequence until it has `num_tokens`, of them `head_tokens` in a head.

        0 until `calibrate`. A window layer counts right after a prefill chunk. Recurrent state counts twice: while
        rows decode together, the runner holds a merged copy.
        """
        window_rows = (leaf.max_rows(num_tokens, self._chunk_tokens) for _, leaf in self._windows)
        in_windows = max(window_rows, default=0) * self._window_bytes_per_row
        return int((num_tokens - head_tokens) * self.bytes_per_token + in_windows) + 2 * self._recurrent_bytes

    def tokens_without(self, excess_bytes: int, num_tokens: int) -> int:
        """How many of `num_tokens` remain, maybe negative, when rows take `excess_bytes` less. Needs `calibrate`."""
        if excess_bytes <= 0 or not self.bytes_per_token:
            return num_tokens
        return num_tokens - math.ceil(excess_bytes / self.bytes_per_token)

    # -- capacity of live buffers

    def capacity(self, caches: Sequence[LayerCache]) -> int | None:
        """How many tokens fit head and span buffers, if any exist."""
        spans, origin = _rows(self._spans, caches), self.origin(caches)
        capacities = [leaf.capacity(live) for leaf, live, _ in spans if leaf.has_spare]
        return min((origin + num for num in capacities if num is not None), default=None)

    def resize(self, caches: Sequence[LayerCache], capacity_tokens: int) -> None:
        """Resizes span buffers to `capacity_tokens`, at least what they hold, unless larger by a step at most.

        Copies one after another: the extra memory is one buffer. The first evaluation allocates missing ones at this
        size. An error damages the caches. A head counts towards `capacity_tokens`.
        """
        capacity_tokens -= self.origin(caches)
        for leaf, live, _ in _rows(self._spans, caches):
            capacity = leaf.capacity(live) if leaf.has_spare else capacity_tokens
            if capacity is None:
                live.step = capacity_tokens
            elif not capacity_tokens <= capacity <= capacity_tokens + GROWTH_TOKENS:
                _resize(leaf, live, capacity_tokens)
        self.bound_growth(caches)

    def bound_growth(self, caches: Sequence[LayerCache]) -> None:
        """Existing span buffers grow by a step from now on, however large."""
        for leaf, live, _ in _rows(self._spans, caches):
            if leaf.has_spare and leaf.capacity(live) is not None:
                live.step = GROWTH_TOKENS

    # -- spans, of a sequence with a head from there on

    def live_rows(self, caches: Sequence[LayerCache], start: int, stop: int) -> Segment:
        """Span rows `[start, stop)` as views, to be copied before the caches change."""
        first, last = _own_range(self.origin(caches), start, stop)
        arrays = [array for leaf, live, _ in _rows(self._spans, caches) for array in leaf.arrays(live)]
        rows = [array[..., first:last, :] for array in arrays]
        mx.eval(rows)
        return Segment(start, stop, [((index,), array) for index, array in enumerate(rows)])

    def cut_spans(
        self, caches: Sequence[LayerCache], ranges: Sequence[tuple[int, int]], *, consume: bool = False
    ) -> list[Segment]:
        """Copies half-open token ranges out of live span caches, as owned segments.

        With `consume` each layer is dropped once copied: the extra memory is one pack.
        """
        packs: list[list[Pack]] = [[] for _ in ranges]
        own_ranges = [_own_range(self.origin(caches), *tokens) for tokens in ranges]
        for batch in _batches(_rows(self._spans, caches)):
            arrays = [array for leaf, live, _ in batch for array in leaf.arrays(live)]
            indices = [index for _, _, components in batch for index in components]
            for pack, (start, stop) in zip(packs, own_ranges, strict=True):
                pack.extend(packed(indices, (array[..., start:stop, :] for array in arrays)))
            del arrays
            if consume:
                for _, live, _ in batch:
                    live.keys = live.values = None
        return [Segment(start, stop, pack) for pack, (start, stop) in zip(packs, ranges, strict=True)]

    def load_spans(
        self, caches: Sequence[LayerCache], sources: Sequence[Segment], *, keep: int, offset: int, capacity: int
    ) -> None:
        """Makes live span caches hold `[0, offset)`: their first `keep` rows, then `sources`.

        Buffers get `capacity`. Sources forget copied components. Raises AssertionError if rows are missing.
        """
        origin = self.origin(caches)
        _, num_kept = _own_range(origin, origin, keep)
        for leaf, live, components in _rows(self._spans, caches):
            rows = [array[..., :num_kept, :] for array in leaf.arrays(live)] if num_kept else []
            num_spare = capacity - offset if leaf.has_spare else 0
            arrays = []
            for number, component in enumerate(components):
                parts = [*rows[number : number + 1], *(source.component(component) for source in sources)]
                arrays.append(_with_spare_rows(parts, num_spare))
                assert_rows(arrays[-1], origin, offset + max(0, num_spare))
            mx.eval(arrays)
            leaf.load(live, arrays, offset - origin, offset - origin)
            for source in sources:
                for component in components:
                    source.forget(component)

    def truncate_spans(self, caches: Sequence[LayerCache], offset: int) -> None:
        """Forgets span rows from `offset` on."""
        origin = self.origin(caches)
        _, num_kept = _own_range(origin, origin, offset)
        for leaf, live, _ in _rows(self._spans, caches):
            live.offset = num_kept
            if not leaf.has_spare:  # its rows are all in the arrays
                leaf.load(live, [owned(rows) for rows in leaf.arrays(live)], num_kept, num_kept)

    def split_at_head(self, caches: list[LayerCache], head: Sequence[LayerCache], num_tokens: int) -> None:
        """See `split_at_head`."""
        split_at_head(caches, head, num_tokens)

    def put_on_head(self, caches: list[LayerCache], head: Sequence[LayerCache]) -> None:
        """Makes empty caches begin with `head`, without a copy."""
        split_at_head(caches, head, 0)

    # -- windows and recurrent state

    def window_start(self, caches: Sequence[LayerCache], offset: int) -> int:
        """The first token whose rows all window layers still hold at `offset`."""
        return offset - min((leaf.length(live) for leaf, live, _ in _rows(self._windows, caches)), default=0)

    def cut_window(self, caches: Sequence[LayerCache], start: int, offset: int) -> Segment:
        """Copies window rows `[start, offset)` of caches at `offset`."""
        rows = list[mx.array]()
        for leaf, live, _ in _rows(self._windows, caches):
            skipped = leaf.length(live) - (offset - start)
            rows.extend(array[..., skipped : skipped + offset - start, :] for array in leaf.arrays(live))
        return Segment(start, offset, packed(range(len(rows)), rows))

    def load_windows(self, caches: Sequence[LayerCache], rows: Sequence[Segment], offset: int) -> None:
        """Restores window caches at `offset` from adjoining segments; raises AssertionError without all rows."""
        num_rows = min(offset, self.window)
        end = rows_up_to(offset, num_rows, rows)
        for leaf, live, components in _rows(self._windows, caches):
            arrays = []
            for component in components:
                parts = [segment.component(component) for segment in rows]
                joined = mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0]
                arrays.append(owned(joined[..., end - num_rows : end, :]))
            leaf.load(live, arrays, num_rows, offset)

    def take_recurrent(self, caches: Sequence[LayerCache]) -> RecurrentState:
        """The current state of the recurrent layers."""
        return RecurrentState(self._recurrent_leaves(caches))

    def put_recurrent(self, caches: Sequence[LayerCache], state: RecurrentState) -> None:
        """Restores recurrent layers from a taken state."""
        state.put(self._recurrent_leaves(caches))

    def _recurrent_leaves(self, caches: Sequence[LayerCache]) -> list[LayerCache]:
        leaves = leaves_of(caches)
        return [leaves[index] for index in self._recurrent]


def _rows(layers: Iterable[tuple[int, RowLeaf]], caches: Sequence[LayerCache]) -> list[_Rows]:
    leaves, first, rows = leaves_of(caches), 0, list[_Rows]()
    for index, leaf in layers:
        rows.append((leaf, tail_of(leaves[index]), range(first, first + leaf.num_components)))
        first += leaf.num_components
    return rows


def _own_range(origin: int, start: int, stop: int) -> tuple[int, int]:
    """A token range as indices of own rows; raises AssertionError for rows of a head."""
    if not origin <= start <= stop:
        raise AssertionError(f"the rows [{start}, {stop}) are not a sequence's own, which begin at {origin}")
    return start - origin, stop - origin


def _batches(spans: Iterable[_Rows]) -> Iterator[list[_Rows]]:
    batch, num_bytes = list[_Rows](), 0
    for span in spans:
        leaf, live, _ = span
        size = sum(array.nbytes for array in leaf.arrays(live))
        if batch and num_bytes + size > segments.PACK_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(span)
        num_bytes += size
    if batch:
        yield batch


def _bytes_per_row(rows: Iterable[_Rows]) -> float:
    return sum(sum(array.nbytes for array in leaf.arrays(live)) / leaf.length(live) for leaf, live, _ in rows)


def _resize(leaf: RowLeaf, live: LayerCache, capacity_tokens: int) -> None:
    length, arrays = leaf.length(live), leaf.arrays(live)
    for number, rows in enumerate(arrays):
        arrays[number] = _with_spare_rows([rows], capacity_tokens - length)
        del rows
        mx.eval(arrays[number])
        leaf.load(live, list(arrays), length, length)


def _with_spare_rows(parts: list[mx.array], num_spare: int) -> mx.array:
    batch, num_heads, _, width = parts[0].shape
    if num_spare > 0:
        parts = [*parts, mx.zeros((batch, num_heads, num_spare, width), parts[0].dtype)]
    return mx.concatenate(parts, axis=2) if len(parts) > 1 else mx.array(parts[0])


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
