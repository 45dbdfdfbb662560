"""How the layer caches of one model come apart into state that can be stored, and go together again.

mlx-lm gives every layer of a sequence a mutable cache object. A `Layout` sorts the layers into three kinds:

* *span* state (attention keys and values): rows of any token range can be cut out and joined;
* *window* state (sliding window, chunked attention): the same, but only the last W rows are there;
* *point* state (recurrent, convolution, and every class without an adapter): whole, valid at one offset.

Nothing here knows tokens, nodes or a budget.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from cache.layers import segments
from cache.layers.adapters import RowLeaf, leaves_of, row_leaf
from cache.layers.arrays import arrays_in, owned
from cache.layers.points import PointState
from cache.layers.segments import (
    LiveRows,
    Pack,
    RowSource,
    Segment,
    assert_rows,
    cut_packs,
    groups,
    packed,
    rows_up_to,
)
from cache.types import LayerCache

GROWTH_TOKENS = 256
"""Rows by which a full span buffer grows. Each growth reads and writes all rows once, and attention reads them once a
token: growing adds one part in 128. On average a live sequence leaves half of a step unused."""


class Layout:
    """How the layer caches of one model come apart. Made once from a fresh list of them."""

    _spans: "Sequence[_Place]" = ()
    _windows: "Sequence[_Place]" = ()

    def __init__(self, caches: Sequence[LayerCache]) -> None:
        rows = [(index, row_leaf(cache)) for index, cache in enumerate(leaves_of(caches))]
        windows = {leaf.window for _, leaf in rows if leaf is not None and leaf.window is not None}
        self._spans = [_Place(i, leaf) for i, leaf in rows if leaf is not None and leaf.window is None]
        self._windows = [_Place(i, leaf) for i, leaf in rows if leaf is not None and leaf.window in windows]
        if len(windows) > 1:
            # Rows are kept for one common window; layers with several are taken whole instead.
            self._windows, windows = [], set()
        known = {place.index for place in (*self._spans, *self._windows)}
        self._points = [index for index, _ in rows if index not in known]
        self.window = next(iter(windows), None) or 0
        """Rows that must be there before an offset to restore the window layers at it; 0 without such layers."""
        _number(self._spans)
        _number(self._windows)

    def leave_out_unused(self, caches: Sequence[LayerCache]) -> None:
        """Leaves out the layers whose caches are still empty after the model has evaluated tokens with `caches`.

        Some models hand out a cache for each layer although some layers share another's keys and values.
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
        """Returns the bytes that live caches hold in the allocator, unused capacity included."""
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
        """Returns how many rows a window layer's buffers take at most while `num_tokens` are evaluated.

        Calls of up to `chunk_tokens` add their rows before old ones go, so this may be more than the window. It
        depends on the class of the cache.
        """
        return max((place.leaf.max_rows(num_tokens, chunk_tokens) for place in self._windows), default=0)

    def point_bytes(self, caches: Sequence[LayerCache]) -> int:
        """Returns the bytes of the point layers of one sequence that has evaluated something."""
        leaves = leaves_of(caches)
        return sum(array.nbytes for index in self._points for array in arrays_in(leaves[index]))

    # -- capacity of live buffers

    def capacity(self, caches: Sequence[LayerCache]) -> int | None:
        """Returns how many tokens all span buffers take; None if there are none yet."""
        leaves = leaves_of(caches)
        capacities = [
            place.leaf.capacity(leaves[place.index]) for place in self._spans if place.leaf.can_overallocate
        ]
        return min((num for num in capacities if num is not None), default=None)

    def resize(self, caches: Sequence[LayerCache], capacity_tokens: int) -> None:
        """Resizes span buffers to `capacity_tokens`, which must not be less than they hold.

        Those that are too small, or larger by more than a step of growth, are copied one after another, so that the
        extra memory is one buffer. A buffer that is not there yet is made so large by the first evaluation. After an
        error the caches are damaged.
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
        """Has span buffers that are there grow by a step from now on, however large their first size was."""
        leaves = leaves_of(caches)
        for place in self._spans:
            if place.leaf.can_overallocate and place.leaf.capacity(leaves[place.index]) is not None:
                leaves[place.index].step = GROWTH_TOKENS

    # -- spans

    def live_rows(self, caches: Sequence[LayerCache], start: int, stop: int) -> "LiveRows":
        """Returns the span rows `[start, stop)` of live caches as views to copy from at once."""
        leaves = leaves_of(caches)
        arrays = [array for place in self._spans for array in place.leaf.arrays(leaves[place.index])]
        return LiveRows([array[..., start:stop, :] for array in arrays])

    def cut_spans(
        self, caches: Sequence[LayerCache], ranges: Sequence[tuple[int, int]], *, consume: bool = False
    ) -> list[Segment]:
        """Copies token ranges out of live span caches, one owned segment per half-open range.

        With `consume` each layer is dropped as soon as its rows are out, so the extra memory is one pack.
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
        """Copies window rows of `[start, offset)` out of live caches that rest at `offset`."""
        leaves, rows = leaves_of(caches), list[mx.array]()
        for place in self._windows:
            skipped = place.leaf.length(leaves[place.index]) - (offset - start)
            rows.extend(
                array[..., skipped : skipped + offset - start, :] for array in place.leaf.arrays(leaves[place.index])
            )
        return Segment(start, offset, [packed(*group) for group in groups(range(len(rows)), rows)])

    def load_windows(self, caches: Sequence[LayerCache], rows: Sequence[Segment], offset: int) -> None:
        """Restores live window caches at `offset` from adjoining segments that cover the last rows before it.

        Raises AssertionError if they do not.
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
        """Returns the whole state of the point layers as it is now."""
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
    """Where one row layer stands: among the leaves, and its components among all of its kind."""

    index: int
    leaf: RowLeaf
    components: range = range(0)


def _bytes_per_row(places: Iterable[_Place], caches: Sequence[LayerCache]) -> float:
    """Returns the bytes of one row of all places together; a layer that holds no rows counts nothing."""
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
    """Returns the parts joined along tokens in a buffer of its own, with `num_spare` more rows at the end."""
    batch, num_heads, _, width = parts[0].shape
    if num_spare > 0:
        parts = [*parts, mx.zeros((batch, num_heads, num_spare, width), parts[0].dtype)]
    return mx.concatenate(parts, axis=2) if len(parts) > 1 else mx.array(parts[0])
