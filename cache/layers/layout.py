"""Takes the layer caches of one model apart into state that can be stored, puts them together, and sizes sequences.

mlx-lm gives every layer of a sequence a mutable cache object. A `Layout` sorts the layers into three kinds:

* *span* state (attention keys and values): rows of any token range can be cut out and joined;
* *window* state (sliding window, chunked attention): the same, but only the last W rows are there;
* *point* state (recurrent, convolution, and every class without an adapter): whole, valid at one offset.

Each mlx-lm class whose state is rows per token has one adapter here. A class without an adapter is taken whole, as
point state: slower, never wrong. Nothing here knows tokens, nodes or a budget.
"""

from cache.layers import mlx_lm_guard as _guard  # noqa: F401

# isort: split

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from cache.layers import state as segments
from cache.layers.state import (
    LiveRows,
    Pack,
    PointState,
    RowSource,
    Segment,
    arrays_in,
    assert_rows,
    cut_packs,
    groups,
    owned,
    packed,
    rows_up_to,
)
from cache.types import LayerCache


class RowLeaf(Protocol):
    """Adapter of one layer cache class whose state is rows per token."""

    window: int | None
    """How many of the last rows the class keeps; None if it keeps all."""
    num_components: int
    can_overallocate: bool
    """Whether a buffer may be longer than its rows."""

    def length(self, cache: LayerCache) -> int:
        """Returns the number of rows; the last row is at the sequence's end."""

    def arrays(self, cache: LayerCache) -> list[mx.array]:
        """Returns the components in temporal order, each [1, num_heads, length, width]; views."""

    def load(self, cache: LayerCache, arrays: list[mx.array], num_rows: int, offset: int) -> None:
        """Makes `arrays` the cache's state; their first `num_rows` rows end at `offset`. Consumes the arrays."""

    def truncate(self, cache: LayerCache, offset: int) -> None:
        """Forgets rows from `offset` on; for classes that keep all rows."""

    def max_rows(self, num_tokens: int, chunk_tokens: int) -> int:
        """Returns the most rows in a window class's buffers while `num_tokens` are evaluated.

        Prompts are evaluated in calls of up to `chunk_tokens`, answers in calls of one token. A call adds rows before
        it removes old ones, so there may be more rows than the window.
        """

    def capacity(self, cache: LayerCache) -> int | None:
        """Returns how many rows fit the buffers, None before there are any; for classes that keep all rows."""


class _SpanLeaf:
    """Base of the classes that keep every row."""

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
    """`ConcatenateKVCache`: keys and values in buffers without spare rows; each token copies them."""

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
    """Base of the classes that keep the last rows."""

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
    """Returns the adapter of a cache whose state is rows; None for a cache that must be taken whole."""
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


GROWTH_TOKENS = 256
"""Rows by which a full span buffer grows. Each growth reads and writes all rows once, and attention reads all rows
once per token, so growing adds one part in 128. On average a live sequence leaves half of a step unused.
"""


class Layout:
    """How the layer caches of one model come apart. Made once, from a fresh list of caches."""

    _spans: "Sequence[_Place]" = ()
    _windows: "Sequence[_Place]" = ()

    def __init__(self, caches: Sequence[LayerCache]) -> None:
        rows = [(index, row_leaf(cache)) for index, cache in enumerate(leaves_of(caches))]
        windows = {leaf.window for _, leaf in rows if leaf is not None and leaf.window is not None}
        self._spans = [_Place(i, leaf) for i, leaf in rows if leaf is not None and leaf.window is None]
        self._windows = [_Place(i, leaf) for i, leaf in rows if leaf is not None and leaf.window in windows]
        if len(windows) > 1:
            # Rows are kept for one common window; with several windows, the layers are taken whole instead.
            self._windows, windows = [], set()
        known = {place.index for place in (*self._spans, *self._windows)}
        self._points = [index for index, _ in rows if index not in known]
        self.window = next(iter(windows), None) or 0
        """Rows before an offset that restoring the window layers needs; 0 without such layers."""
        _number(self._spans)
        _number(self._windows)

    def leave_out_unused(self, caches: Sequence[LayerCache]) -> None:
        """Excludes the layers whose caches are still empty after the model has evaluated tokens with `caches`.

        Some models make a cache for each layer although some layers share another's keys and values.
        """
        leaves = leaves_of(caches)
        self._spans = [place for place in self._spans if place.leaf.length(leaves[place.index])]
        self._windows = [place for place in self._windows if place.leaf.length(leaves[place.index])]
        _number(self._spans)
        _number(self._windows)

    @property
    def has_points(self) -> bool:
        """Whether some state is valid at single offsets only."""
        return bool(self._points)

    @property
    def needs_snapshots(self) -> bool:
        """Whether restoring needs more than spans, so that offsets must be chosen ahead."""
        return bool(self._points or self._windows)

    # -- sizes

    def live_bytes(self, caches: Sequence[LayerCache]) -> int:
        """Returns the bytes that live caches hold in the allocator, including unused capacity."""
        arrays = [array for cache in leaves_of(caches) for array in arrays_in(cache)]
        mx.eval(arrays)
        return int(mx.get_array_buffer_size(*arrays)) if arrays else 0

    def span_bytes_per_token(self, caches: Sequence[LayerCache]) -> float:
        """Returns bytes of span state per token, measured on caches that hold at least one token."""
        return _bytes_per_row(self._spans, caches)

    def window_bytes_per_token(self, caches: Sequence[LayerCache]) -> float:
        """Returns bytes of window state per row, measured on caches that hold a few tokens."""
        return _bytes_per_row(self._windows, caches)

    def max_window_rows(self, num_tokens: int, chunk_tokens: int) -> int:
        """Returns the most rows in a window layer's buffers while `num_tokens` are evaluated.

        Calls of up to `chunk_tokens` add rows before old ones are removed, so there may be more rows than the window.
        The number depends on the class of the cache.
        """
        return max((place.leaf.max_rows(num_tokens, chunk_tokens) for place in self._windows), default=0)

    def point_bytes(self, caches: Sequence[LayerCache]) -> int:
        """Returns the bytes of the point layers of one sequence that has evaluated something."""
        leaves = leaves_of(caches)
        return sum(array.nbytes for index in self._points for array in arrays_in(leaves[index]))

    # -- capacity of live buffers

    def capacity(self, caches: Sequence[LayerCache]) -> int | None:
        """Returns how many tokens fit all span buffers; None before there are any."""
        leaves = leaves_of(caches)
        capacities = [
            place.leaf.capacity(leaves[place.index]) for place in self._spans if place.leaf.can_overallocate
        ]
        return min((num for num in capacities if num is not None), default=None)

    def resize(self, caches: Sequence[LayerCache], capacity_tokens: int) -> None:
        """Resizes span buffers to `capacity_tokens`, which must not be less than they hold.

        Buffers that are too small, or larger by more than a step of growth, are copied one after another, so the
        extra memory is one buffer. The first evaluation allocates missing buffers at this size. After an error the
        caches are damaged.
        """
        leaves = leaves_of(caches)
        for place in self._spans:
            capacity = place.leaf.capacity(leaves[place.index]) if place.leaf.can_overallocate else capacity_tokens
            if capacity is None:
                leaves[place.index].step = capacity_tokens
            elif not capacity_tokens <= capacity <= capacity_tokens + GROWTH_TOKENS:
                _resize(place.leaf, leaves[place.index], capacity_tokens)
        self.bound_growth(caches)

    def bound_growth(self, caches: Sequence[LayerCache]) -> None:
        """Makes existing span buffers grow by a step from now on, however large their first size was."""
        leaves = leaves_of(caches)
        for place in self._spans:
            if place.leaf.can_overallocate and place.leaf.capacity(leaves[place.index]) is not None:
                leaves[place.index].step = GROWTH_TOKENS

    # -- spans

    def live_rows(self, caches: Sequence[LayerCache], start: int, stop: int) -> "LiveRows":
        """Returns the span rows `[start, stop)` of live caches as views, to be copied at once."""
        leaves = leaves_of(caches)
        arrays = [array for place in self._spans for array in place.leaf.arrays(leaves[place.index])]
        return LiveRows([array[..., start:stop, :] for array in arrays])

    def cut_spans(
        self, caches: Sequence[LayerCache], ranges: Sequence[tuple[int, int]], *, consume: bool = False
    ) -> list[Segment]:
        """Copies token ranges out of live span caches, one owned segment per half-open range.

        With `consume` each layer is dropped as soon as its rows are copied, so the extra memory is one pack.
        """
        leaves = leaves_of(caches)
        packs: list[list[Pack]] = [[] for _ in ranges]
        for batch in self._batches(leaves):
            arrays = [array for place in batch for array in place.leaf.arrays(leaves[place.index])]
            indices = [index for place in batch for index in place.components]
            for held, (start, stop) in zip(packs, ranges, strict=True):
                held.extend(cut_packs(indices, arrays, start, stop))
            del arrays
            if consume:
                for place in batch:
                    leaves[place.index].keys = leaves[place.index].values = None
        return [Segment(start, stop, held) for held, (start, stop) in zip(packs, ranges, strict=True)]

    def load_spans(
        self,
        caches: Sequence[LayerCache],
        sources: Sequence[RowSource],
        *,
        keep: int,
        offset: int,
        capacity_tokens: int,
    ) -> None:
        """Makes live span caches hold `[0, offset)`: their first `keep` rows, then the rows of `sources`.

        Buffers are allocated for `capacity_tokens`. Sources forget each component once it is copied, layer by layer.
        Raises AssertionError if rows are missing.
        """
        leaves = leaves_of(caches)
        for place in self._spans:
            live = leaves[place.index]
            held = [array[..., :keep, :] for array in place.leaf.arrays(live)] if keep else []
            num_spare = capacity_tokens - offset if place.leaf.can_overallocate else 0
            arrays = []
            for number, component in enumerate(place.components):
                parts = [*held[number : number + 1], *(source.component(component) for source in sources)]
                arrays.append(_with_spare_rows(parts, num_spare))
                assert_rows(arrays[-1], 0, offset + max(0, num_spare))
            mx.eval(arrays)
            place.leaf.load(live, arrays, offset, offset)
            for source in sources:
                for component in place.components:
                    source.forget(component)

    def truncate_spans(self, caches: Sequence[LayerCache], offset: int) -> None:
        """Forgets span rows from `offset` on."""
        leaves = leaves_of(caches)
        for place in self._spans:
            place.leaf.truncate(leaves[place.index], offset)

    # -- windows and points

    def window_start(self, caches: Sequence[LayerCache], offset: int) -> int:
        """Returns the first token whose rows all live window layers still hold at `offset`."""
        leaves = leaves_of(caches)
        return offset - min((place.leaf.length(leaves[place.index]) for place in self._windows), default=0)

    def cut_window(self, caches: Sequence[LayerCache], start: int, offset: int) -> Segment:
        """Copies the window rows `[start, offset)` out of live caches that have evaluated exactly `offset` tokens."""
        leaves, rows = leaves_of(caches), list[mx.array]()
        for place in self._windows:
            skipped = place.leaf.length(leaves[place.index]) - (offset - start)
            rows.extend(
                array[..., skipped : skipped + offset - start, :] for array in place.leaf.arrays(leaves[place.index])
            )
        return Segment(start, offset, [packed(*group) for group in groups(range(len(rows)), rows)])

    def load_windows(self, caches: Sequence[LayerCache], rows: Sequence[Segment], offset: int) -> None:
        """Restores live window caches at `offset` from adjoining segments that cover the last rows before it.

        Raises AssertionError if they do not cover them.
        """
        leaves, num_rows = leaves_of(caches), min(offset, self.window)
        end = rows_up_to(offset, num_rows, rows)
        for place in self._windows:
            arrays = []
            for component in place.components:
                parts = [segment.component(component) for segment in rows]
                joined = mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0]
                arrays.append(owned(joined[..., end - num_rows : end, :]))
            place.leaf.load(leaves[place.index], arrays, num_rows, offset)

    def take_points(self, caches: Sequence[LayerCache]) -> PointState:
        """Returns the current state of the point layers."""
        leaves = leaves_of(caches)
        return PointState([leaves[index] for index in self._points])

    def put_points(self, caches: Sequence[LayerCache], state: PointState) -> None:
        """Restores live point layers from a state taken earlier."""
        leaves = leaves_of(caches)
        state.put([leaves[index] for index in self._points])

    def _batches(self, leaves: Sequence[LayerCache]) -> "Iterable[list[_Place]]":
        """Yields runs of span layers whose live rows fit one pack."""
        batch, num_bytes = list[_Place](), 0
        for place in self._spans:
            size = sum(array.nbytes for array in place.leaf.arrays(leaves[place.index]))
            if batch and num_bytes + size > segments.PACK_BYTES:
                yield batch
                batch, num_bytes = [], 0
            batch.append(place)
            num_bytes += size
        if batch:
            yield batch


@dataclass
class _Place:
    """A row layer's index among the leaves, and the indices of its components among all of the same kind."""

    index: int
    leaf: RowLeaf
    components: range = range(0)


def _bytes_per_row(places: Iterable[_Place], caches: Sequence[LayerCache]) -> float:
    """Returns the bytes of one row of all places together; a layer without rows counts 0."""
    leaves, total = leaves_of(caches), 0.0
    for place in places:
        cache = leaves[place.index]
        length = place.leaf.length(cache)
        total += sum(array.nbytes for array in place.leaf.arrays(cache)) / length if length else 0
    return total


def _number(places: Iterable[_Place]) -> None:
    first = 0
    for place in places:
        place.components = range(first, first + place.leaf.num_components)
        first = place.components.stop


def _resize(leaf: RowLeaf, live: LayerCache, capacity_tokens: int) -> None:
    """Moves the rows of a span cache into buffers for `capacity_tokens`, one component after another."""
    length, arrays = leaf.length(live), leaf.arrays(live)
    for number, rows in enumerate(arrays):
        arrays[number] = _with_spare_rows([rows], capacity_tokens - length)
        del rows
        mx.eval(arrays[number])
        leaf.load(live, list(arrays), length, length)


def _with_spare_rows(parts: list[mx.array], num_spare: int) -> mx.array:
    """Joins the parts along tokens in a new buffer with `num_spare` more rows at the end."""
    batch, num_heads, _, width = parts[0].shape
    if num_spare > 0:
        parts = [*parts, mx.zeros((batch, num_heads, num_spare, width), parts[0].dtype)]
    return mx.concatenate(parts, axis=2) if len(parts) > 1 else mx.array(parts[0])


CHUNK_TOKENS = 256
"""The most prompt tokens evaluated in one model call, by default."""


class SequenceSizes:
    """Bytes of the sequences of one model, estimated from a short sequence before memory is allocated. Worker thread
    only.
    """

    def __init__(self, layout: Layout, chunk_tokens: int) -> None:
        """Prompts are evaluated in calls of up to `chunk_tokens`."""
        self.bytes_per_token = 0.0
        """Bytes of span state per token; 0 until `calibrate`."""
        self._layout = layout
        self._chunk_tokens = chunk_tokens
        self._window_bytes_per_token = 0.0
        self._point_bytes = 0

    def calibrate(self, caches: Sequence[LayerCache]) -> None:
        """Measures `caches`, which hold a few evaluated tokens. Until then all estimates are 0."""
        self.bytes_per_token = self._layout.span_bytes_per_token(caches)
        self._window_bytes_per_token = self._layout.window_bytes_per_token(caches)
        self._point_bytes = self._layout.point_bytes(caches)

    def bytes_for(self, num_tokens: int) -> int:
        """Returns the approximate most bytes that a live sequence takes until it has `num_tokens`.

        A window layer counts with its rows right after a prefill chunk, which are more than its window. Point state
        counts twice: while rows decode together, the runner holds a merged copy of it.
        """
        in_windows = self._layout.max_window_rows(num_tokens, self._chunk_tokens)
        rows = num_tokens * self.bytes_per_token + in_windows * self._window_bytes_per_token
        return int(rows) + 2 * self._point_bytes

    def tokens_without(self, excess_bytes: int, num_tokens: int) -> int:
        """Returns how many of `num_tokens` remain when their rows must take `excess_bytes` less.

        All of them if nothing is in excess or nothing has been measured; negative if the rows are not enough.
        """
        if excess_bytes <= 0 or not self.bytes_per_token:
            return num_tokens
        return num_tokens - math.ceil(excess_bytes / self.bytes_per_token)
