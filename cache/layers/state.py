"""Immutable state of layers as the trie stores it: rows of token ranges, and whole state at one offset.

A component is one array of one layer: keys, values, or scales. Rows of many are packed into few arrays: an allocator
may bound live buffers. A slice keeps a whole buffer alive, uncounted, so a slice is copied before it is stored.
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


def arrays_in(value: Any) -> list[mx.array]:
    """All arrays that a layer cache references, under any name."""
    if isinstance(value, mx.array):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        value = vars(value).values() if hasattr(value, "__dict__") else ()
    return [array for part in value for array in arrays_in(part)]


PACK_BYTES = 32 << 20
"""Successive layers share an array up to this size: few buffers, little extra memory in paging."""


class Pack(NamedTuple):
    """Rows of equally shaped components in one array, [num_components, num_heads, num_tokens, width]."""

    indices: tuple[int, ...]
    rows: mx.array


class Segment:
    """Immutable rows of the tokens `[start, stop)` for fixed components. Owns its bytes, unless made of views.

    Raises AssertionError for other numbers of rows: MLX silently shortens a slice beyond the end.
    """

    def __init__(self, start: int, stop: int, packs: Iterable[tuple[tuple[int, ...], mx.array]]) -> None:
        self.start = start
        self.stop = stop
        self.packs = [Pack(*pack) for pack in packs]
        for pack in self.packs:
            assert_rows(pack.rows, start, stop)
        self._where = {index: (pack, row) for pack in self.packs for row, index in enumerate(pack.indices)}
        self.is_whole = True
        self.num_bytes = int(mx.get_array_buffer_size(*[pack.rows for pack in self.packs])) if self.packs else 0

    def component(self, index: int) -> mx.array:
        """One component's rows, [1, num_heads, num_tokens, width]; a view."""
        pack, row = self._where[index]
        return pack.rows[row : row + 1]

    def forget(self, index: int) -> None:
        """Nobody will read this component again: the segment moves into caches, an array after the other."""
        del self._where[index]
        self.packs, self.is_whole = [], False

    def split(self, offset: int) -> "tuple[Segment, Segment]":
        """`[start, offset)` and `[offset, stop)`, each owning its bytes."""
        cut = offset - self.start
        before = [(pack.indices, owned(pack.rows[:, :, :cut])) for pack in self.packs]
        after = [(pack.indices, owned(pack.rows[:, :, cut:])) for pack in self.packs]
        return Segment(self.start, offset, before), Segment(offset, self.stop, after)

    def join(self, *later: "Segment") -> "Segment":
        """Joins `later`, each of which must start where the one before stops. Copies all rows once."""
        parts = [self, *later]
        for before, after in itertools.pairwise(parts):
            if after.start != before.stop:
                meeting = f"[{before.start}, {before.stop}) and [{after.start}, {after.stop})"
                raise ValueError(f"segments {meeting} do not meet")
        indices = sorted(self._where)
        rows = (mx.concatenate([part.component(i) for part in parts], axis=2) for i in indices)
        return Segment(self.start, parts[-1].stop, packed(indices, rows))

    def tail(self, start: int) -> "Segment":
        """The rows from `start` on."""
        return self if start <= self.start else self.split(start)[1]


def assert_rows(rows: mx.array, start: int, stop: int) -> None:
    """Raises AssertionError unless `[..., num_tokens, width]` has a row per token of `[start, stop)`.

    `assert` can be switched off; wrong rows would give wrong tokens, unnoticed.
    """
    if rows.shape[-2] != stop - start:
        raise AssertionError(f"{rows.shape[-2]} rows for the tokens [{start}, {stop})")


def packed(indices: Iterable[int], rows: Iterable[mx.array]) -> Iterator[Pack]:
    """Components' rows in arrays that own their bytes: runs of equal shapes share one, up to `PACK_BYTES`."""
    group, arrays = list[int](), list[mx.array]()
    for index, array in zip(indices, rows, strict=True):
        fits = arrays and arrays[0].shape == array.shape and arrays[0].dtype == array.dtype
        if arrays and not (fits and (len(arrays) + 1) * array.nbytes <= PACK_BYTES):
            yield _joined(group, arrays)
            group, arrays = [], []
        group.append(index)
        arrays.append(array)
    if arrays:
        yield _joined(group, arrays)


def _joined(indices: Sequence[int], rows: Sequence[mx.array]) -> Pack:
    if len(rows) == 1:
        return Pack(tuple(indices), owned(rows[0]))
    joined = mx.concatenate(list(rows), axis=0)
    mx.eval(joined)
    return Pack(tuple(indices), joined)


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
        self.held = [_copied(cache, owned) for cache in caches]
        """Not to be changed; `RecurrentState(held)` is the same state."""
        arrays = arrays_in(self.held)
        self.num_bytes = int(mx.get_array_buffer_size(*arrays)) if arrays else 0

    def put(self, caches: Sequence[LayerCache]) -> None:
        """Makes this the state of live caches of the same model."""
        for cache, state in zip(caches, self.held, strict=True):
            vars(cache).update(vars(_copied(state, lambda array: array)))


def _copied(cache: LayerCache, own: Callable[[mx.array], mx.array]) -> LayerCache:
    """With new objects over `own(array)`."""
    return copy.deepcopy(cache, {id(array): own(array[...]) for array in arrays_in(cache)})
