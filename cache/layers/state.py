"""Immutable state of layers as the trie stores it: rows of token ranges, and whole state at one offset.

A component is one array of one layer: keys, values, or scales. Rows of many are packed into few arrays: an allocator
may bound live buffers. A slice keeps a whole buffer alive, uncounted, so a slice is copied before it is stored.

Stored state may be *rounded* to 8 bits: each number is a whole part of 127 of its group's peak, the largest magnitude
of `GROUP` numbers beside each other, which is kept as it is. A restored number is rounded to its own type, bfloat16
at the coarsest, by less than half of such a part. So what was restored and is rounded again gives the same bits.
"""

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from cache.types import LayerCache

_PROBE_BYTES = 1 << 20
_SMALLEST_BYTES = 8
"""Smallest allocation on CUDA, where sizes below a page are powers of two."""


def owned(array: mx.array) -> mx.array:
    """`array`, or an evaluated copy if it is a view."""
    mx.eval(array)
    if int(mx.get_array_buffer_size(array)) > _allocated_bytes(array.nbytes):
        array = mx.array(array)
        mx.eval(array)
    return array


_is_by_size = False


def count_by_size(is_wanted: bool = True) -> None:
    """From now on bytes are what arrays need, which is equal on all machines, not what the allocator gave."""
    global _is_by_size
    _is_by_size = is_wanted


def bytes_of(arrays: Sequence[mx.array]) -> int:
    """Bytes of evaluated arrays in the allocator."""
    if _is_by_size:
        return sum(_allocated_bytes(array.nbytes) for array in arrays)
    return int(mx.get_array_buffer_size(*arrays)) if arrays else 0


def _allocated_bytes(num_bytes: int) -> int:
    granule = _granule_bytes()
    if granule == 1:
        return num_bytes
    if num_bytes >= granule:
        return -(-num_bytes // granule) * granule
    return max(_SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length()) if num_bytes else _SMALLEST_BYTES


@functools.cache
def _granule_bytes() -> int:
    """1 byte on the CPU, 16 KiB on a GPU."""
    mx.clear_cache()  # a buffer that was freed may be handed out again although it is larger
    probe = mx.zeros((_PROBE_BYTES + 1,), mx.uint8)
    mx.eval(probe)
    return int(mx.get_array_buffer_size(probe)) - _PROBE_BYTES


GROUP = 32
"""Numbers of a row that share a peak."""
_LEVELS = 127


class Rounded(NamedTuple):
    """An array in 8 bits."""

    codes: mx.array
    """int8, shaped like the array."""
    peaks: mx.array
    """Of the array's type, [..., width / GROUP]."""

    @staticmethod
    def fits(array: mx.array) -> bool:
        """Whether these are rows, or a matrix, of each head, in whole groups of numbers."""
        return array.ndim == 4 and array.shape[-1] % GROUP == 0 and mx.issubdtype(array.dtype, mx.floating)

    @classmethod
    def size_of(cls, array: mx.array) -> int:
        """Bytes of the array once rounded, if it fits."""
        return array.size + array.nbytes // GROUP if cls.fits(array) else array.nbytes

    @classmethod
    def of(cls, array: mx.array) -> "Rounded":
        """Rounds an array that fits."""
        groups = mx.unflatten(array, -1, (-1, GROUP))
        peaks = mx.abs(groups).max(axis=-1)
        parts = groups.astype(mx.float32) / mx.where(peaks == 0, 1, peaks)[..., None].astype(mx.float32)
        return cls(mx.round(parts * _LEVELS).astype(mx.int8).flatten(-2), peaks)

    def exact(self) -> mx.array:
        """The numbers that the codes stand for, in the array's own type."""
        parts = mx.unflatten(self.codes, -1, (-1, GROUP)).astype(mx.float32) / _LEVELS
        return (parts * self.peaks[..., None].astype(mx.float32)).astype(self.peaks.dtype).flatten(-2)


def arrays_in(value: Any) -> list[mx.array]:
    """All arrays that a layer cache references, under any name."""
    parts = _parts_in(value)
    return [array for part in parts for array in (part if isinstance(part, Rounded) else (part,))]


def _parts_in(value: Any) -> list[mx.array | Rounded]:
    if isinstance(value, (mx.array, Rounded)):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        value = vars(value).values() if hasattr(value, "__dict__") else ()
    return [part for inner in value for part in _parts_in(inner)]


PACK_BYTES = 32 << 20
"""Successive layers share an array up to this size: few buffers, little extra memory in paging."""


class Pack(NamedTuple):
    """Rows of equally shaped components in one array, [num_components, num_heads, num_tokens, width]."""

    indices: tuple[int, ...]
    rows: mx.array
    peaks: mx.array | None = None
    """Of rounded rows, which are codes then."""

    @property
    def arrays(self) -> list[mx.array]:
        return [self.rows] if self.peaks is None else [self.rows, self.peaks]

    def exact(self) -> mx.array:
        """The rows as layer caches take them."""
        return self.rows if self.peaks is None else Rounded(self.rows, self.peaks).exact()

    @property
    def fits(self) -> bool:
        """Whether the rows are exact and can be rounded."""
        return self.peaks is None and Rounded.fits(self.rows)

    def of_each(self, change: Callable[[mx.array], mx.array]) -> "Pack":
        """With changed arrays."""
        return Pack(self.indices, *map(change, self.arrays))


class Segment:
    """Immutable rows of the tokens `[start, stop)` for fixed components. Owns its bytes, unless made of views.

    Raises AssertionError for other numbers of rows: MLX silently shortens a slice beyond the end.
    """

    def __init__(self, start: int, stop: int, packs: Iterable[tuple[Any, ...]]) -> None:
        """Packs, or what makes these."""
        self.start = start
        self.stop = stop
        self.packs = [Pack(*pack) for pack in packs]
        arrays = [array for pack in self.packs for array in pack.arrays]
        for array in arrays:
            assert_rows(array, start, stop)
        self._where = {index: (pack, row) for pack in self.packs for row, index in enumerate(pack.indices)}
        self.is_whole = True
        self.num_bytes = bytes_of(arrays)
        self.is_rounded = any(pack.peaks is not None for pack in self.packs)

    def component(self, index: int) -> mx.array:
        """One component's rows, [1, num_heads, num_tokens, width]; a view unless rounded."""
        return self._stored(index).exact()

    def _stored(self, index: int) -> Pack:
        pack, row = self._where[index]
        return Pack((index,), *(array[row : row + 1] for array in pack.arrays))

    def forget(self, index: int) -> None:
        """Nobody will read this component again: the segment moves into caches, an array after the other."""
        del self._where[index]
        self.packs, self.is_whole = [], False

    def split(self, offset: int) -> "tuple[Segment, Segment]":
        """`[start, offset)` and `[offset, stop)`, each owning its bytes."""
        cut = offset - self.start
        before = [pack.of_each(lambda array: owned(array[:, :, :cut])) for pack in self.packs]
        after = [pack.of_each(lambda array: owned(array[:, :, cut:])) for pack in self.packs]
        return Segment(self.start, offset, before), Segment(offset, self.stop, after)

    def join(self, *later: "Segment") -> "Segment":
        """Joins `later`, each of which must start where the one before stops. Copies all rows once."""
        parts = [self, *later]
        for before, after in itertools.pairwise(parts):
            if after.start != before.stop:
                meeting = f"[{before.start}, {before.stop}) and [{after.start}, {after.stop})"
                raise ValueError(f"segments {meeting} do not meet")
        components = (_joined([part._stored(index) for part in parts], 2) for index in sorted(self._where))
        return Segment(self.start, parts[-1].stop, packed(components))

    def tail(self, start: int) -> "Segment":
        """The rows from `start` on."""
        return self if start <= self.start else self.split(start)[1]

    def between(self, start: int, stop: int) -> "Segment":
        """The rows of `[start, stop)`, which the segment has."""
        if start <= self.start and self.stop <= stop:
            return self
        rows = slice(start - self.start, stop - self.start)
        return Segment(start, stop, [pack.of_each(lambda array: owned(array[:, :, rows])) for pack in self.packs])

    @property
    def can_round(self) -> bool:
        return any(pack.fits for pack in self.packs)


def rounding(segment: Segment, piece_bytes: int) -> Iterator[tuple[int, Segment]]:
    """Rounds what fits, a piece of each step: its bytes, and the segment so far.

    Only the caller may keep the segment: else its exact rows take memory until the end.
    """
    for number in range(len(segment.packs)):
        pack, parts = segment.packs[number], list[Pack]()
        if not pack.fits:
            continue
        num_tokens = max(1, piece_bytes * pack.rows.shape[2] // pack.rows.nbytes)
        for start in range(0, pack.rows.shape[2], num_tokens):
            rows = pack.rows[:, :, start : start + num_tokens]
            parts.append(Pack(pack.indices, *Rounded.of(rows)))
            mx.eval(parts[-1].arrays)
            yield rows.nbytes, segment
        packs = [*segment.packs[:number], _joined(parts, 2), *segment.packs[number + 1 :]]
        del pack, rows
        segment = Segment(segment.start, segment.stop, packs)
        yield 0, segment


def assert_rows(rows: mx.array, start: int, stop: int) -> None:
    """Raises AssertionError unless `[..., num_tokens, width]` has a row per token of `[start, stop)`.

    `assert` can be switched off; wrong rows would give wrong tokens, unnoticed.
    """
    if rows.shape[-2] != stop - start:
        raise AssertionError(f"{rows.shape[-2]} rows for the tokens [{start}, {stop})")


def packed(components: Iterable[Pack]) -> Iterator[Pack]:
    """Packs that own their bytes: runs of equally shaped components share one, up to `PACK_BYTES`."""
    group = list[Pack]()
    for component in components:
        if group and not _fits(component, group):
            yield _joined(group, 0)
            group = []
        group.append(component)
    if group:
        yield _joined(group, 0)


def numbered(components: Iterable[mx.array], indices: Iterable[int]) -> Iterator[Pack]:
    """Exact rows of one component each."""
    return (Pack((index,), rows) for index, rows in zip(indices, components, strict=True))


def _fits(component: Pack, group: Sequence[Pack]) -> bool:
    kind = [[(array.shape, array.dtype) for array in pack.arrays] for pack in (component, group[0])]
    return kind[0] == kind[1] and (len(group) + 1) * component.rows.nbytes <= PACK_BYTES


def _joined(packs: Sequence[Pack], axis: int) -> Pack:
    """One after the other along `axis`: components, which are the same along another axis."""
    indices = tuple(index for pack in packs for index in pack.indices) if axis == 0 else packs[0].indices
    if len(packs) == 1:
        return Pack(indices, *map(owned, packs[0].arrays))
    arrays = [mx.concatenate(list(parts), axis=axis) for parts in zip(*(pack.arrays for pack in packs), strict=True)]
    mx.eval(arrays)
    return Pack(indices, *arrays)


def rows_up_to(offset: int, num_rows: int, rows: Sequence[Segment]) -> int:
    """The number of rows up to `offset`; raises AssertionError without the last `num_rows`."""
    starts, stops = [segment.start for segment in rows], [segment.stop for segment in rows]
    if starts[1:] != stops[:-1] or min(starts, default=offset) > offset - num_rows or max(stops, default=0) < offset:
        ranges = ", ".join(f"[{start}, {stop})" for start, stop in zip(starts, stops, strict=True)) or "none"
        raise AssertionError(f"of the window rows [{offset - num_rows}, {offset}) some are missing: {ranges}")
    return offset - starts[0]


class RecurrentState:
    """Whole state of the recurrent layers at one offset. Immutable, owns its bytes.

    Shares at most buffers with a live cache: a model that writes into an array gets a new buffer.
    """

    def __init__(self, caches: Sequence[LayerCache]) -> None:
        self.caches = [_copied(cache, _owned_part) for cache in caches]
        """Not to be changed; `RecurrentState(caches)` is the same state."""
        parts = _parts_in(self.caches)
        self.is_rounded = any(isinstance(part, Rounded) for part in parts)
        self.can_round = any(isinstance(part, mx.array) and Rounded.fits(part) for part in parts)
        self.num_bytes = bytes_of(arrays_in(parts))

    def rounded(self) -> "RecurrentState":
        """With every array rounded that fits."""
        return RecurrentState([_copied(cache, _rounded_part) for cache in self.caches])

    def put(self, caches: Sequence[LayerCache]) -> None:
        """Makes this the state of live caches of the same model."""
        for cache, state in zip(caches, self.caches, strict=True):
            vars(cache).update(vars(_copied(state, _exact_part)))


def _owned_part(part: mx.array | Rounded) -> mx.array | Rounded:
    return Rounded(*map(owned, part)) if isinstance(part, Rounded) else owned(part[...])


def _exact_part(part: mx.array | Rounded) -> mx.array:
    return part.exact() if isinstance(part, Rounded) else part[...]


def _rounded_part(part: mx.array | Rounded) -> mx.array | Rounded:
    return Rounded.of(part) if isinstance(part, mx.array) and Rounded.fits(part) else part


def _copied(cache: LayerCache, change: Callable[[Any], mx.array | Rounded]) -> LayerCache:
    """With new objects over changed arrays."""
    return copy.deepcopy(cache, {id(part): change(part) for part in _parts_in(cache)})
