"""Layers of a group: rows in padded buffers, with one write and one attention per layer for all of them.

A group (`row.py`) has a buffer `[room, num_heads, capacity, head_dim]` for the keys and one for the values of each
span and window layer. Rows are left-aligned. A window layer is a ring: token `p` is at `p % places`.

Taking back a row's last tokens changes only lengths. A ring has *slack* for that, places beyond its window, so that
no such token was written over one that the window still covers.

Rows on one head (`cache/layers/layout.py`) share a buffer of their tails: places in span layers count from its end.

While a row is in a group, its own layer caches hold no arrays; `step` of a span cache says how many tokens the row's
own buffers are to have. Worker thread only.
"""

from collections.abc import Callable, Sequence
from operator import sub
from typing import Any, cast

import mlx.core as mx

from cache.layers.kinds import head_of, kind_of, tail_of
from cache.layers.layout import GROWTH_TOKENS
from cache.types import LayerCache
from models.inference.grouping import Buffer


class Clock:
    """Lengths of a group's rows, and arrays made from them once a step for all layers."""

    def __init__(self) -> None:
        self.set([])

    def set(self, offsets: Sequence[int]) -> None:
        """After rows have come or gone."""
        self.offsets = self.lasts = list(offsets)
        """Each row's offset before this step; the offset of the last token that it feeds."""
        self.lengths: list[int] | None = None
        """Tokens that each row feeds in this step; None for one of each."""
        self.is_even = len(set(offsets)) == 1
        """All rows have one length, and feed one token."""
        self.offset: mx.array | None = None
        """`offsets` as an array, once a layer has needed it."""
        self._made: dict[Any, Any] = {}

    def feed(self, lengths: list[int]) -> None:
        """Before a step in which some member of the batch feeds several tokens."""
        self.set(self.offsets)
        if max(lengths) > 1:
            self.is_even = False
            self.lengths, self.lasts = lengths, [sum(row) - 1 for row in zip(self.offsets, lengths, strict=True)]

    def advance(self) -> None:
        """After a step."""
        self.set([offset + 1 for offset in self.lasts])

    def rewind(self, counts: Sequence[int]) -> None:
        """Takes back each row's last tokens."""
        self.set(list(map(sub, self.offsets, counts)))

    def made(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returns, once a step for each key."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


class GroupLayer:
    """One span or window layer of a group's rows, in place of a layer cache."""

    def __init__(self, like: LayerCache, clock: Clock, buffer: Buffer, head_tokens: int, slack: int) -> None:
        self._clock = clock
        self.window = kind_of(like).window
        self._ring = self.window + slack if self.window else 0
        self.head = head_of([like])
        self._head_tokens = head_tokens
        self._start = 0 if self.window else head_tokens
        self.capacity = self._bounded(buffer.capacity)
        like = tail_of(like)
        self.keys, self.values = (_empty(rows, buffer.room, self.capacity) for rows in (like.keys, like.values))

    def _bounded(self, capacity: int) -> int:
        return min(capacity + self._head_tokens, self._ring) if self._ring else capacity

    @property
    def offset(self) -> mx.array:
        """Tokens before this step, int32 `[num_rows]`, for rotary embeddings."""
        clock = self._clock
        if clock.offset is None:
            clock.offset = mx.array(clock.offsets, dtype=mx.int32)
        return clock.offset

    @property
    def offsets(self) -> list[int]:
        return self._clock.offsets

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def own_bytes(self, index: int, cache: LayerCache) -> int:
        """Bytes that row `index` would take in buffers of its own."""
        return self._own_tokens(index, tail_of(cache)) * (self.num_bytes // (self.keys.shape[0] * self.capacity))

    def _own_tokens(self, index: int, own: LayerCache) -> int:
        offset = self._clock.offsets[index] - self._start
        return min(offset, self.window) if self.window else max(offset, own.step)

    def extend_own(self, index: int, cache: LayerCache) -> None:
        """A row that has used up its own buffers gets larger ones, as layer caches do."""
        own, last = tail_of(cache), self._clock.lasts[index] - self._start
        if not self.window and last >= own.step:
            own.step = last + GROWTH_TOKENS

    # -- in a model

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Appends keys and values `[num_tokens, num_heads, 1, head_dim]`; returns views of all rows, with padding."""
        num_rows, num_heads = keys.shape[:2]
        if self._clock.is_even:
            place = self._place_of(self._clock.offsets[0])
            self.keys[:num_rows, :, place : place + 1] = keys
            self.values[:num_rows, :, place : place + 1] = values
        elif self._clock.lengths is None and num_rows == self.keys.shape[0]:
            # The cheapest on a GPU; made for all rows of the buffer only.
            at = self._clock.made(("along", self.window), lambda: self._place_of(self.offset)[:, None, None, None])
            self.keys = mx.put_along_axis(self.keys, at, keys, 2)
            self.values = mx.put_along_axis(self.values, at, values, 2)
        else:
            # Whole index arrays, made once a step, leave one operation per layer.
            at = self._clock.made(("at", num_heads, self.window), lambda: self._indices(num_heads))
            self.keys[at] = keys[:, :, 0]
            self.values[at] = values[:, :, 0]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Views of all rows up to the longest, this step's token included, from the head's end on."""
        num_rows, stop = len(self._clock.offsets), self._stop
        return self.keys[:num_rows, :, :stop], self.values[:num_rows, :, :stop]

    def make_mask(self, num_tokens: int, window_size: int | None = None, **_: Any) -> mx.array | None:
        """Boolean `[num_rows, 1, longest, num_places]` of the places that a row's tokens may attend to.

        None if all may attend to all.
        """
        assert num_tokens == 1, "in a batch each token is a row"
        assert self.head is None or window_size is None, "a mask that bounds attention would have to cover the head"
        seen = min(window_size or self.window or self._stop, self.window or self._stop)
        if (self._clock.is_even or self._end_of(min(self._clock.offsets)) >= self._stop) and seen >= self._stop:
            return None
        key = "mask", self.window, self._stop, seen
        return cast(mx.array, self._clock.made(key, lambda: self._mask(seen)))

    @property
    def _stop(self) -> int:
        return min(self._end_of(max(self._clock.lasts)), self._ring or self.capacity)

    def _end_of(self, offset: int) -> int:
        return offset + 1 - self._start

    def _place_of(self, offset: Any) -> Any:
        return offset % self._ring if self._ring else offset - self._start

    def _indices(self, num_heads: int) -> tuple[mx.array, ...]:
        lasts = enumerate(zip(self._clock.offsets, self._clock.lasts, strict=True))
        tokens = [(row, self._place_of(place)) for row, (first, last) in lasts for place in range(first, last + 1)]
        rows, places = mx.array(tokens, dtype=mx.uint32).T[:, :, None]
        heads, shape = mx.arange(num_heads, dtype=mx.uint32)[None], (len(tokens), num_heads)
        return tuple(mx.broadcast_to(index, shape) for index in (rows, heads, places))

    def _mask(self, seen: int) -> mx.array:
        """By age: how many tokens before each fed one a place was written, as a ring where there is a window."""
        token, places = self.offset[:, None, None, None] - self._start, mx.arange(self._stop, dtype=mx.int32)
        last = token
        if self._clock.lengths is not None:
            last = mx.array(self._clock.lasts)[:, None, None, None] - self._start
            token = mx.minimum(token + mx.arange(max(self._clock.lengths), dtype=mx.int32)[:, None], last)
        if not self._ring:
            return (places <= token) & (places > token - seen)
        age = (last % self._ring + self._ring - places) % self._ring
        if self._clock.lengths is None:
            return (age < seen) & (age <= token)
        age = age - (last - token)
        return (age >= 0) & (age < seen) & (age <= token)

    # -- rows that come and go

    def take(self, cache: LayerCache, index: int) -> None:
        """Moves what `cache` holds to row `index`."""
        cache = tail_of(cache)
        offset = int(cache.offset)
        for buffer, rows in ((self.keys, cache.keys), (self.values, cache.values)):
            rows = self._as_ring(cache, rows, offset) if self.window else rows[:, :, :offset]
            buffer[index : index + 1, :, : rows.shape[2]] = rows
            # What a row before left here is masked, but a NaN would not be.
            buffer[index : index + 1, :, rows.shape[2] :] = 0
        mx.eval(self.keys, self.values)
        if not self.window:
            cache.step = cache.keys.shape[2]
        cache.keys = cache.values = None

    def _as_ring(self, cache: LayerCache, rows: mx.array, offset: int) -> mx.array:
        rows = cache._temporal_order(rows)
        rows = rows[:, :, max(0, rows.shape[2] - self.window) :]
        if (first := offset - rows.shape[2]) == 0:
            return rows
        if spare := self.capacity - rows.shape[2]:
            rows = mx.concatenate([rows, _empty(rows, 1, spare)], axis=2)
        return mx.roll(rows, first % self._ring, 2)

    def given(self, cache: LayerCache, index: int) -> dict[str, Any]:
        """What a row's own `cache` is to hold in place of row `index`; lazy."""
        offset, num_kept = self._clock.offsets[index] - self._start, self._own_tokens(index, tail_of(cache))
        if self._ring:
            places = mx.arange(offset - num_kept, offset) % self._ring
            keys, values = (buffer[index : index + 1][:, :, places] for buffer in (self.keys, self.values))
            return {"keys": keys, "values": values, "offset": offset, "_idx": num_kept}
        keys, values = (_copied(buffer, index, num_kept) for buffer in (self.keys, self.values))
        return {"keys": keys, "values": values, "offset": offset}

    def move(self, source: int, target: int) -> None:
        """Row `source` overwrites row `target`, with the next evaluation of the buffers."""
        for buffer in (self.keys, self.values):
            buffer[target : target + 1] = _copied(buffer, source, self.capacity)

    def grow(self, capacity: int) -> None:
        """Makes room for rows of `capacity` tokens."""
        capacity = self._bounded(capacity)
        for name in ("keys", "values"):
            buffer = getattr(self, name)
            spare = _empty(buffer, buffer.shape[0], capacity - self.capacity)
            setattr(self, name, mx.concatenate([buffer, spare], axis=2) if spare.size else buffer)
            del buffer
            mx.eval(getattr(self, name))
        self.capacity = capacity


def _empty(like: mx.array, num_rows: int, num_tokens: int) -> mx.array:
    return mx.zeros((num_rows, like.shape[1], num_tokens, like.shape[3]), like.dtype)


def _copied(rows: mx.array, index: int, num_tokens: int) -> mx.array:
    """Row `index` in a buffer for `num_tokens`: a slice would keep all rows in memory."""
    if num_tokens == rows.shape[2]:
        return mx.take(rows, mx.array([index]), axis=0)
    row = rows[index : index + 1, :, :num_tokens]
    if num_tokens < rows.shape[2]:
        return mx.contiguous(row)
    return mx.concatenate([row, _empty(rows, 1, num_tokens - row.shape[2])], axis=2)
