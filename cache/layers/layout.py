"""Takes one model's layer caches apart, puts them together, and sizes sequences.

A `Layout` sorts a model's layers by `kinds.py`: *span* state (attention) is rows of any token range; *window* state
(sliding or chunked attention) the last W rows; *recurrent* state, and that of convolutions, is whole and valid at one
offset. Nothing here knows tokens, nodes or a budget.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import mlx.core as mx

from cache.layers import state as segments
from cache.layers.kinds import RowKind, head_length, kind_of, leaves_of, split_at_head, tail_of
from cache.layers.state import (
    GROUP,
    PACK_BYTES,
    Pack,
    RecurrentState,
    Rounded,
    Segment,
    arrays_in,
    assert_rows,
    bytes_of,
    numbered,
    owned,
    packed,
    rounding,
    rows_up_to,
)
from cache.types import LayerCache

CHUNK_TOKENS = 256
"""Prompt tokens in one model call, by default."""
GROWTH_TOKENS = 256
"""A full span buffer grows by so many tokens: copying all rows costs 1/128 of reading them for each token."""


@dataclass(frozen=True)
class StoredForm:
    """What stored state is rounded to 8 bits; the rest is stored as it is."""

    rows: bool = False
    """Spans, where a row has whole groups."""
    recurrent: bool = False
    """The matrices of recurrent layers."""
    told: str = field(default="", compare=False)
    """For a person, with why not more; empty where nobody asked."""

    @property
    def is_exact(self) -> bool:
        return not (self.rows or self.recurrent)

    def __str__(self) -> str:
        """What state depends on, beside the model."""
        return f"8 bits, groups of {GROUP}: {'rows' * self.rows} {'matrices' * self.recurrent}"


EXACT = StoredForm()

_Rows: TypeAlias = tuple[RowKind, LayerCache, range]
"""One row layer: kind, live cache, and the numbers of its components, which are counted over all row layers."""


class Layout:
    """How one model's layer caches come apart."""

    bytes_per_token = stored_bytes_per_token = 0.0
    """Bytes of a token's span rows, live and stored; 0 until `calibrate`."""
    form = EXACT
    _window_bytes_per_row = 0.0
    _shapes: Sequence[dict[int, tuple[int, int]]] = ()
    """Heads and width of each component of spans, and of windows; empty until `calibrate`."""
    _recurrent_bytes = 0
    _spans: Sequence[tuple[int, RowKind]] = ()
    """With each layer's index among leaves."""
    _windows: Sequence[tuple[int, RowKind]] = ()

    def __init__(
        self,
        caches: Sequence[LayerCache],
        chunk_tokens: int = CHUNK_TOKENS,
        form: StoredForm = EXACT,
    ) -> None:
        self._chunk_tokens, self.form = chunk_tokens, form
        leaves = leaves_of(caches)
        rows = [(index, kind) for index, cache in enumerate(leaves) if isinstance(kind := kind_of(cache), RowKind)]
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
        self._is_all_recurrent = all(kind_of(leaves[index]).is_merged for index in self._recurrent)

    def calibrate(self, caches: Sequence[LayerCache]) -> None:
        """Measures a sequence's layers by caches with a few tokens; leaves out those that stay empty.

        Some models make caches for layers that share another's keys.
        """
        leaves = leaves_of(caches)
        self._spans, self._windows = (
            [(index, leaf) for index, leaf in layers if leaf.length(leaves[index])]
            for layers in (self._spans, self._windows)
        )
        size_of = Rounded.size_of if self.form.rows else _size_of
        self.bytes_per_token = _bytes_per_row(_rows(self._spans, caches))
        self.stored_bytes_per_token = _bytes_per_row(_rows(self._spans, caches), size_of)
        self._window_bytes_per_row = _bytes_per_row(_rows(self._windows, caches))
        self._recurrent_bytes = sum(array.nbytes for array in arrays_in(self._recurrent_leaves(caches)))
        self._shapes = [
            {
                component: (array.shape[1], array.shape[3])
                for leaf, live, components in _rows(layers, caches)
                for component, array in zip(components, leaf.arrays(live), strict=True)
            }
            for layers in (self._spans, self._windows)
        ]

    def fits(self, rows: Segment | None, recurrent: RecurrentState | None, *, is_snapshot: bool) -> bool:
        """Whether span rows, or a snapshot, have the components and shapes of the caches that were measured."""
        packs = rows.packs if rows is not None else ()
        shapes = {index: (pack.rows.shape[1], pack.rows.shape[3]) for pack in packs for index in pack.indices}
        num_recurrent = len(recurrent.caches) if recurrent is not None else 0
        wanted = len(self._recurrent) if is_snapshot else 0
        return not self._shapes or (shapes == self._shapes[is_snapshot] and num_recurrent == wanted)

    @property
    def needs_snapshots(self) -> bool:
        return bool(self._recurrent or self._windows)

    @property
    def can_share_heads(self) -> bool:
        """Whether all spans are of the class that can be cut into a head and tails."""
        return bool(self._spans) and all(leaf.can_share_head for _, leaf in self._spans)

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
        return bytes_of(arrays)

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
                pack.extend(packed(numbered((array[..., start:stop, :] for array in arrays), indices)))
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

    # -- rounding to 8 bits

    def can_round_recurrent(self, state: RecurrentState) -> bool:
        """Whether the state, of which nothing but recurrent layers may be part, has something to round."""
        return self._is_all_recurrent and state.can_round

    def can_round(self, rows: Segment | None, recurrent: RecurrentState | None) -> bool:
        """Whether something is exact that is to be rounded."""
        has_rows = self.form.rows and rows is not None and rows.can_round
        return has_rows or (self.form.recurrent and recurrent is not None and recurrent.can_round)

    def rounding(self, rows: Segment, piece_bytes: int = PACK_BYTES) -> Iterator[tuple[int, Segment]]:
        """See `state.rounding`; nothing where rows stay exact."""
        return rounding(rows, piece_bytes) if self.form.rows else iter(())

    def rounded(self, rows: Segment) -> Segment:
        """Stored span rows in their last form."""
        last = deque(self.rounding(rows), maxlen=1)
        return last[0][1] if last else rows

    def rounded_recurrent(self, state: RecurrentState) -> RecurrentState:
        """Stored recurrent state in its last form."""
        return state.rounded() if self.form.recurrent else state

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
        return Segment(start, offset, packed(numbered(rows, range(len(rows)))))

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


def _rows(layers: Iterable[tuple[int, RowKind]], caches: Sequence[LayerCache]) -> list[_Rows]:
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


def _size_of(array: mx.array) -> int:
    return int(array.nbytes)


def _bytes_per_row(rows: Iterable[_Rows], size_of: Callable[[mx.array], int] = _size_of) -> float:
    return sum(sum(map(size_of, leaf.arrays(live))) / leaf.length(live) for leaf, live, _ in rows)


def _resize(leaf: RowKind, live: LayerCache, capacity_tokens: int) -> None:
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
