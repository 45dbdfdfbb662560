"""How layer caches forget the last tokens of a call: some of a step's, or all.

References to earlier state are held from a step's preparation until it is settled (`row.py`), and only of arrays that
a call replaces: MLX would copy a buffer that grows in place. Worker thread only.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from cache.layers.kinds import kind_of, leaves_of, tail_of
from cache.types import LayerCache


class Rewind:
    """Takes the last tokens of a call out of one row's own layer caches. Made before the call."""

    def __init__(self, caches: Sequence[LayerCache], num_fed: int) -> None:
        self._num_fed = num_fed
        tails = [(kind_of(cache), tail_of(cache)) for cache in leaves_of(caches)]
        self._leaves = [(kind, cache, kind.before_call(cache)) for kind, cache in tails]

    def keep(self, num_kept: int) -> int:
        """Leaves the first `num_kept` of the call's tokens, or none; returns how many."""
        if num_kept == self._num_fed:
            return num_kept
        if any(kind.is_merged for kind, _, _ in self._leaves):
            num_kept = 0
        for kind, cache, before in self._leaves:
            if before and not num_kept:
                cache.__dict__.update(before)
            else:
                kind.forget(cache, self._num_fed - num_kept)
        return num_kept


@contextmanager
def unchanged(leaves: Sequence[LayerCache]) -> Iterator[None]:
    """Tokens that join layers in the block leave at its end; buffers keep their size."""
    tails = [tail_of(leaf) for leaf in leaves]
    spans = [(tail, int(tail.offset), _num_places(tail)) for tail in tails if kind_of(tail).can_share_head]
    others = [(tail, copied_state(tail)) for tail in tails if not kind_of(tail).can_share_head]
    try:
        yield
    finally:
        for tail, state in others:
            vars(tail).update(state)
        for tail, offset, num_places in spans:
            tail.trim(int(tail.offset) - offset)
            if _num_places(tail) > num_places:
                tail.keys, tail.values = (mx.contiguous(rows[:, :, :num_places]) for rows in (tail.keys, tail.values))


def copied_state(cache: LayerCache) -> dict[str, Any]:
    """All that a layer cache holds; nothing is copied until a buffer changes in place."""
    return {name: _copied(value) for name, value in vars(cache).items()}


def _copied(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_copied(part) for part in value)
    return value[...] if isinstance(value, mx.array) else value


def _num_places(cache: LayerCache) -> int:
    return 0 if cache.keys is None else int(cache.keys.shape[2])
