"""Ragged decode: one model call for rows of any lengths, attention over each row's own cache or group. Worker thread
only.

A model sees a batch of rows with one token each, so its linear layers run once. Two things differ per row:

- *Span and window layers*: a `RaggedLayer` stands in for the caches of all *members*, rows alone and groups of rows
  (`groups.py`). It hands each member its part of the new keys and values, and returns what all hold as `Parts`;
  within `ragged_attention()` attention runs once per part. Where all rows are one group, its layer stands in.
- *Recurrent state* has one size for all rows. It stays merged while the same rows decode.

Where rows feed several tokens, the layer folds them for attention, once per neighbours that feed equally many.

Members on one *head* (`cache/layers/layout.py`) are neighbours. All their rows attend to the head at once, and each
member to its tails; the scores' peaks and sums merge both results, as in FlashAttention (arXiv:2205.14135).

Knows no tokens, sampling or requests. Other threads' attention is unaffected.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias, cast

import mlx.core as mx

from cache.layers.kinds import HeadedKVCache, kind_of, leaves_of, tail_of
from cache.layers.state import owned
from cache.types import LayerCache
from models.inference.groups import GroupLayer
from models.inference.row import DecodeRow, Group
from models.mlx_lm_import import (
    ArraysCache,
    CacheList,
    quantized_attention,
)


class NotRagged(Exception):
    """This class of layer cache cannot join a ragged batch."""


_MISFIT = mx.array([0.0] * 10_007)  # a prime number, so that no reshape can fit it either; nothing to evaluate


class Parts(mx.array):
    """One item per member or folding where a model expects one array: keys, values, masks or scores.

    The array's shape fits no operation: an operation that is not overridden here fails.
    """

    def __init__(
        self,
        items: Sequence[Any],
        cuts: Sequence[int],
        heads: Sequence[mx.array | None] | None = None,
        foldings: "Sequence[Folding] | None" = None,
        padding: "Padding | None" = None,
    ) -> None:
        super().__init__(_MISFIT, next((item.dtype for item in items if isinstance(item, mx.array)), mx.bool_))
        self.items = list(items)
        self.cuts = cuts
        """The first row of each item but the first."""
        self.heads = list(heads) if heads is not None else [None] * len(self.items)
        """What rows have before their item: the same array for neighbours on one head."""
        self.foldings = foldings
        """How each item's tokens are folded; None where all rows feed one token."""
        self.padding = padding
        """The padding, if the model sees padded rows."""

    @property
    def has_heads(self) -> bool:
        return bool([head for head in self.heads if head is not None])

    @property
    def runs(self) -> Iterator[tuple[mx.array | None, range]]:
        """Heads, and the neighbouring items on each."""
        for _, members in itertools.groupby(range(len(self.items)), key=lambda member: id(self.heads[member])):
            run = list(members)
            yield self.heads[run[0]], range(run[0], run[-1] + 1)

    def swapaxes(self, axis1: int, axis2: int) -> "Parts":  # type: ignore[override]
        """Of each item."""
        return self._each(lambda item: item.swapaxes(axis1, axis2))

    def astype(self, dtype: mx.Dtype, *_: Any) -> "Parts":
        """Of each item."""
        return self._each(lambda item: item.astype(dtype))

    def _each(self, operation: Callable[[Any], Any]) -> "Parts":
        heads = {id(head): None if head is None else operation(head) for head in self.heads}
        items = [operation(item) for item in self.items]
        return Parts(items, self.cuts, [heads[id(head)] for head in self.heads], self.foldings, self.padding)

    def __rmatmul__(self, batch: mx.array) -> "Parts":
        """Multi-head latent attention multiplies queries outside of attention."""
        if self.has_heads or self.foldings is not None:
            raise NotRagged("latent attention has no form for heads, nor for several tokens of a row")
        parts = zip(_split(batch, self.cuts), self.items, strict=True)
        return Parts([part @ item for part, item in parts], self.cuts)


class Padding(NamedTuple):
    """Rows padded to the longest feed, for models with recurrent layers, and all their tokens in a line."""

    places: mx.array
    """In the line, `[num_rows, longest]`: after a row's tokens the last one's, repeated."""
    seen: mx.array
    """Where padded rows, one after the other, hold the line's tokens."""

    @classmethod
    @lru_cache(4)
    def of(cls, lengths: tuple[int, ...]) -> "Padding":
        """The padding of rows of `lengths` tokens."""
        longest, stops = max(lengths), itertools.accumulate(lengths)
        rows = zip(lengths, stops, strict=True)
        places = [[min(stop - length + at, stop - 1) for at in range(longest)] for length, stop in rows]
        seen = [row * longest + at for row, length in enumerate(lengths) for at in range(length)]
        return cls(mx.array(places), mx.array(seen))

    def flatten(self, padded: mx.array) -> mx.array:
        """`[num_rows, num_heads, longest, width]` as `[num_tokens, num_heads, 1, width]`."""
        return padded.swapaxes(1, 2).flatten(0, 1)[self.seen][:, :, None]

    def pad(self, flat: mx.array) -> mx.array:
        """The reverse of `flatten`."""
        return flat[:, :, 0][self.places].swapaxes(1, 2)


class Folding(NamedTuple):
    """Tokens of rows that feed equally many in one step: a row alone, or neighbours in a group.

    *Flat*: a row per token, `[num_tokens, num_heads, 1, width]`. *Folded*: `[num_rows, num_heads, length, width]`.
    """

    length: int
    rows: slice | None
    """Places in the group; None for a row alone."""
    num_rows: int = 1

    def fold(self, flat: mx.array) -> mx.array:
        """A flat array as a folded one."""
        if self.length == 1:
            return flat
        return flat.reshape(self.num_rows, self.length, flat.shape[1], -1).swapaxes(1, 2)

    def flatten(self, folded: mx.array) -> mx.array:
        """The reverse of `fold`."""
        if self.length == 1:
            return folded
        return folded.swapaxes(1, 2).reshape(-1, folded.shape[1], 1, folded.shape[3])


def _foldings_of(lengths: Sequence[int]) -> list[Folding]:
    """The foldings of a member whose rows feed `lengths` tokens; several rows are a group."""
    if len(lengths) == 1:
        return [Folding(lengths[0], None)]
    # Rows of different lengths are not padded: attention over many keys costs by query.
    foldings, first = list[Folding](), 0
    for length, rows in itertools.groupby(lengths):
        num_rows = len(list(rows))
        foldings.append(Folding(length, slice(first, first + num_rows), num_rows))
        first += num_rows
    return foldings


class RaggedLayer:
    """Stands in for one span or window layer of all members, whose caches it borrows.

    Where rows feed `lengths` tokens, the model sees a batch row per token, `[num_tokens, num_heads, 1, head_dim]`, or
    rows with `padding`. A live slice of a buffer makes its next update copy all of it: never store a result.
    """

    def __init__(
        self,
        members: Sequence[LayerCache | GroupLayer],
        lengths: tuple[int, ...] = (),
        padding: Padding | None = None,
    ) -> None:
        self.members = members
        self._lengths, self._padding = () if padding else lengths, padding
        counts = tuple(len(one.offsets) if isinstance(one, GroupLayer) else 1 for one in members)
        self._by_member, self._foldings, self._cuts, self._member_cuts = _folded(counts, lengths)

    @property
    def offset(self) -> mx.array:
        """Tokens before each batch row, int32 `[num_rows]`, for rotary embeddings."""
        offsets: list[int] = []
        for member in self.members:
            offsets += member.offsets if isinstance(member, GroupLayer) else (member.offset,)
        return _offset_array(tuple(offsets), self._lengths)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Parts, Parts]:
        """Appends those of all tokens; returns all of each item's cache."""
        if self._padding is not None:
            keys, values = self._padding.flatten(keys), self._padding.flatten(values)
        cuts, fetched = self._member_cuts, list[Any]()
        updates = zip(self.members, self._by_member, _split(keys, cuts), _split(values, cuts), strict=True)
        for member, foldings, *fed in updates:
            if self._foldings is not None and not isinstance(member, GroupLayer):
                fed = [foldings[0].fold(rows) for rows in fed]
            fetched.append(tail_of(member).update_and_fetch(*fed))
        return self._parts(fetched)

    def keys_and_values(self) -> tuple[Parts, Parts]:
        """Each item's keys and values, for layers that attend to another layer's keys."""
        return self._parts([tail_of(member).keys_and_values() for member in self.members])

    def make_mask(self, num_tokens: int, **options: Any) -> Parts | None:
        """Each item's mask, broadcastable to `[num_rows, 1, length, num_places]`; None if no row needs one."""
        members = zip(self.members, self._by_member, strict=True)
        masks: list[Any] = [_mask_of(member, foldings[0].length, options) for member, foldings in members]
        if self._foldings is None and all(mask is None for mask in masks):
            return None
        parts = [(mask, one) for mask, foldings in zip(masks, self._by_member, strict=True) for one in foldings]
        items = [mask if mask is None or one.rows is None else mask[one.rows, :, : one.length] for mask, one in parts]
        return Parts(items, self._cuts)

    def _parts(self, fetched: Sequence[tuple[Any, Any]]) -> tuple[Parts, Parts]:
        items = list[tuple[Any, Any, Any]]()
        for member, foldings, arrays in zip(self.members, self._by_member, fetched, strict=True):
            head = getattr(member, "head", None)
            for folding in foldings:
                keys, values = arrays if folding.rows is None else (arrays[0][folding.rows], arrays[1][folding.rows])
                items.append((head, keys, values))
        heads, all_keys, all_values = zip(*items, strict=True)
        head_keys = [None if head is None else head.keys for head in heads]
        head_values = [None if head is None else head.values for head in heads]
        return (
            Parts(all_keys, self._cuts, head_keys, self._foldings, self._padding),
            Parts(all_values, self._cuts, head_values, self._foldings, self._padding),
        )


@lru_cache(16)
def _folded(
    counts: tuple[int, ...], lengths: tuple[int, ...]
) -> tuple[list[list[Folding]], list[Folding] | None, list[int], list[int]]:
    """Of each member of so many rows, and of all; where the others than the first begin, of all and of all members.

    Made once for all layers of a step. Without `lengths` rows feed one token, and a member is not divided.
    """
    if not lengths:
        return [[Folding(1, None)]] * len(counts), None, _cuts(counts), _cuts(counts)
    rest = iter(lengths)
    fed = [list(itertools.islice(rest, count)) for count in counts]
    by_member = [_foldings_of(own) for own in fed]
    foldings = list(itertools.chain(*by_member))
    return by_member, foldings, _cuts([one.num_rows * one.length for one in foldings]), _cuts([*map(sum, fed)])


def _cuts(sizes: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(sizes))[:-1]


def _mask_of(member: LayerCache | GroupLayer, num_tokens: int, options: dict[str, Any]) -> mx.array | str | None:
    """A group knows how many tokens its rows feed."""
    if isinstance(member, GroupLayer):
        return member.make_mask(1, **options)
    if isinstance(member, HeadedKVCache):
        if options.get("window_size") is not None:
            raise NotRagged("a mask would have to cover a head")
        member, options = member.tail, options | {"return_array": True}
    return cast(mx.array | str | None, member.make_mask(num_tokens, **options))


@lru_cache(16)
def _offset_array(offsets: tuple[int, ...], lengths: tuple[int, ...]) -> mx.array:
    """One array for all layers with the same offsets; for each token where rows feed `lengths`."""
    if lengths:
        rows = zip(offsets, lengths, strict=True)
        offsets = tuple(first + place for first, length in rows for place in range(length))
    return mx.array(offsets, dtype=mx.int32)


def join_layers(members: Sequence[Group | DecodeRow]) -> list[LayerCache]:
    """Layer caches of all rows together. Members on one head must be neighbours. Raises `NotRagged`."""
    rows = [row for member in members for row in member.rows]
    columns = zip(*[row.leaves for row in rows], strict=True)
    return _arranged(rows[0].caches, (_join(members, leaf, column) for leaf, column in enumerate(columns)))


def flat_layers(layers: Sequence[LayerCache], lengths: tuple[int, ...]) -> list[LayerCache]:
    """Joined layers for a call in which each row feeds `lengths` tokens."""
    padding = Padding.of(lengths) if has_recurrent(layers) else None
    leaves = (
        leaf if kind_of(leaf).is_merged else RaggedLayer(getattr(leaf, "members", [leaf]), lengths, padding)
        for leaf in leaves_of(layers)
    )
    return _arranged(layers, leaves)


def put_back(merged: ArraysCache, stays: Sequence[bool], before: Sequence[mx.array | None]) -> None:
    """After a call with layers of `flat_layers`: rows that do not stay get their state of before."""
    merged.finalize()
    if not all(stays):
        merged.cache = [_chosen(stays, *pair) for pair in zip(merged.cache, before, strict=True)]


def _join(members: Sequence[Group | DecodeRow], leaf: int, column: Sequence[LayerCache]) -> LayerCache:
    """One layer of all rows; every row by itself where a group leaves the layer unused."""
    if kind_of(column[0]).is_merged:
        return ArraysCache.merge(column)
    if not all(kind_of(cache).can_join for cache in column):
        raise NotRagged(f"{type(column[0]).__name__} has no ragged form")
    rest, layers = iter(column), list[LayerCache | GroupLayer]()
    for member in members:
        caches = list(itertools.islice(rest, len(member.rows)))
        layer = member.layers.get(leaf) if isinstance(member, Group) else None
        layers += caches if layer is None else [layer]
    is_one_group = len(layers) == 1 and isinstance(layers[0], GroupLayer) and layers[0].head is None
    return layers[0] if is_one_group else RaggedLayer(layers)


def _arranged(like: Sequence[LayerCache], leaves: Iterator[LayerCache]) -> list[LayerCache]:
    """`leaves` in lists as those of `like`."""
    return [CacheList(*_arranged(one.caches, leaves)) if isinstance(one, CacheList) else next(leaves) for one in like]


def _chosen(stays: Sequence[bool], new: mx.array | None, old: mx.array | None) -> mx.array | None:
    """Each row's new or old state; none is zeros."""
    if new is None or (old is not None and not any(stays)):
        return old
    at = mx.array(list(stays)).reshape(-1, *[1] * (new.ndim - 1))
    return mx.where(at, new, mx.zeros_like(new) if old is None else old)


def has_recurrent(layers: Sequence[LayerCache]) -> bool:
    """Whether some layer has recurrent state."""
    return any(kind_of(leaf).is_merged for leaf in leaves_of(layers))


def inputs_of(
    line: mx.array, lengths: Sequence[int], layers: Sequence[LayerCache]
) -> tuple[mx.array, mx.array | None]:
    """A model call's input, and the places of the rows' tokens in its flattened output; None for all places."""
    if max(lengths) == 1 or not has_recurrent(layers):
        return line[:, None], None
    padding = Padding.of(tuple(lengths))
    return line[padding.places], padding.seen


def own_recurrent_state(caches: Sequence[LayerCache]) -> None:
    """Evaluates recurrent state and copies slices, which would keep a batch in memory."""
    for layer in leaves_of(caches):
        if kind_of(layer).is_merged:
            layer.cache = [state if state is None else owned(state) for state in layer.cache]


def _split(batch: mx.array, cuts: Sequence[int]) -> Sequence[mx.array]:
    return cast(Sequence[mx.array], mx.split(batch, list(cuts)) if cuts else [batch])  # the stub says array


_patch_lock = threading.Lock()
_patch_depth = 0
_mlx_attention: Callable[..., mx.array] = mx.fast.scaled_dot_product_attention


@contextmanager
def ragged_attention() -> Iterator[None]:
    """Lets `mx.fast.scaled_dot_product_attention` accept `Parts` in the block. Re-entrant.

    Models look the function up in `mx.fast` at each call.
    """
    _count_patch(1)
    try:
        yield
    finally:
        _count_patch(-1)


def _count_patch(change: int) -> None:
    global _patch_depth
    with _patch_lock:
        _patch_depth += change
        mx.fast.scaled_dot_product_attention = _attend if _patch_depth else _mlx_attention  # type: ignore[assignment]


_Attending: TypeAlias = tuple[mx.array, Any, Any, Any, Folding | None]
"""A member's queries, keys, values, mask and folding."""


def _attend(queries: mx.array, keys: Any, values: Any, *, scale: float, **options: Any) -> mx.array:
    if not isinstance(keys, Parts):
        return _mlx_attention(queries, keys, values, scale=scale, **options)
    if keys.padding is not None:
        queries = keys.padding.flatten(queries)
    foldings = [None] * len(keys.items) if keys.foldings is None else keys.foldings
    masks = _masks(options.pop("mask", None), foldings)
    members = list(zip(_split(queries, keys.cuts), keys.items, values.items, masks, foldings, strict=True))
    if not keys.has_heads:
        outputs = [_attend_member(member, scale, options) for member in members]
    else:
        outputs = []
        for (head_keys, places), (head_values, _) in zip(keys.runs, values.runs, strict=True):
            run = members[places.start : places.stop]
            if head_keys is None or head_values is None:
                outputs += [_attend_member(member, scale, options) for member in run]
            else:
                outputs.append(_attend_from_head(run, head_keys, head_values, scale, **options))
    return _joined(outputs) if keys.padding is None else keys.padding.pad(_joined(outputs))


def _joined(arrays: Sequence[mx.array]) -> mx.array:
    return mx.concatenate(list(arrays)) if len(arrays) > 1 else arrays[0]


def _masks(mask: Any, foldings: Sequence[Folding | None]) -> list[Any]:
    """Each item's mask; also for a model that makes none for one token."""
    if isinstance(mask, Parts):
        return mask.items
    if mask is not None and mask != "causal":
        raise TypeError("a mask for rows of different lengths must be made by their caches")
    for folding in foldings:
        if folding is not None and folding.rows is not None and folding.length > 1:
            raise NotRagged("the model asks its caches for no mask")
    return [mask if folding is None else "causal" if folding.length > 1 else None for folding in foldings]


def _attend_member(member: _Attending, scale: float, options: dict[str, Any]) -> mx.array:
    queries, keys, values, mask, folding = member
    queries = queries if folding is None else folding.fold(queries)
    if isinstance(keys, mx.array):
        output = _mlx_attention(queries, keys, values, scale=scale, mask=mask, **options)
    elif options.get("sinks") is not None:
        raise ValueError("quantized keys and values cannot be combined with attention sinks")
    else:
        # Of a `QuantizedKVCache`: packed numbers, scales and biases.
        width, (packed, scales, _) = queries.shape[-1], keys
        sizes = {"group_size": width // scales.shape[-1], "bits": 32 * packed.shape[-1] // width}
        output = quantized_attention(queries, keys, values, scale, mask, **sizes)
    return output if folding is None else folding.flatten(output)


# ----------------------------------------------------------------------------------------------- attention with heads


def _attend_from_head(
    members: Sequence[_Attending], keys: mx.array, values: mx.array, scale: float, *, sinks: mx.array | None = None
) -> mx.array:
    """All rows of the members over one head's keys and values, `[1, num_heads, num_tokens, width]`, then their tails.

    Returns `[num_rows, num_query_heads, num_queries, width]`, of the queries' type.
    """
    queries = _joined([member[0] for member in members])
    head = _over_head(queries, keys, values, scale)
    tails = [_over_tails(*member, scale) for member in members]
    tail = _Partial(*(_joined(arrays) for arrays in zip(*tails, strict=True)))
    if sinks is not None:
        # One more score for each query head, without a value.
        peak = sinks[None, :, None, None].astype(mx.float32)
        tail = _add(tail, _Partial(mx.zeros_like(peak), peak, mx.ones_like(peak)))
    return _merge(*head, *tail).astype(queries.dtype)


_BLOCK_TOKENS = 8192
"""Tokens of a head that are read at a time: its keys take memory in float32."""


class _Partial(NamedTuple):
    """A result before its division by `total`: softmax over some of the keys, with weights `exp(score - peak)`."""

    weighted: mx.array
    peak: mx.array
    total: mx.array


def _over_head(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> _Partial:
    """Queries of all rows as one matrix: each key head is read once."""
    (num_rows, num_query_heads, num, width), num_heads = queries.shape, keys.shape[1]
    folded = queries.reshape(num_rows, num_heads, -1, width).swapaxes(0, 1).reshape(num_heads, -1, width)
    keys, values = keys.squeeze(0), values.squeeze(0)  # not `[0]`, which copies
    size = keys.shape[1] if keys.dtype == mx.float32 else _BLOCK_TOKENS
    part = _partial(folded, keys[:, :size], values[:, :size], scale, None)
    for start in range(size, keys.shape[1], size):
        block = [rows[:, start : start + size] for rows in (keys, values)]
        # One block after another, or all would be in memory at once.
        more_keys, more_values = mx.depends(block, [part.weighted])
        part = _add(part, _partial(folded, more_keys, more_values, scale, None))
    shape = num_heads, num_rows, num_query_heads // num_heads * num
    unfolded = (array.reshape(*shape, -1).swapaxes(0, 1) for array in part)
    return _Partial(*(array.reshape(num_rows, num_query_heads, num, -1) for array in unfolded))


def _over_tails(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None, folding: Folding | None, scale: float
) -> _Partial:
    """Rows of one buffer, `mask` broadcastable to `[num_rows, 1, num_queries, num_places]`."""
    if folding is not None:
        queries = folding.fold(queries)
    num_rows, num_query_heads, num, width = queries.shape
    num_heads = keys.shape[1]
    if num > 1 and mask is not None:
        mask = mx.tile(mask, (num_query_heads // num_heads, 1))
    part = _partial(queries.reshape(num_rows, num_heads, -1, width), keys, values, scale, mask)
    unfolded = (array.reshape(num_rows, num_query_heads, num, -1) for array in part)
    return _Partial(*(unfolded if folding is None else map(folding.flatten, unfolded)))


def _partial(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None) -> _Partial:
    """Scores in float32: half precision would err by more than fused attention."""
    scores = (queries.astype(mx.float32) * scale) @ keys.astype(mx.float32).swapaxes(-1, -2)
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(mx.float32).min)
    peak = scores.max(axis=-1, keepdims=True)
    weights = _weights(scores, peak)
    total = weights.sum(axis=-1, keepdims=True)
    return _Partial(_weighted(weights, total, values), peak, total)


_MAX_TOTAL = 16.0
"""The largest sum of weights in float16: larger sums may overflow, smaller weights lose bits."""


def _weighted(weights: mx.array, total: mx.array, values: mx.array) -> mx.array:
    if values.dtype != mx.float16:
        return weights.astype(values.dtype) @ values
    share = mx.minimum(1.0, _MAX_TOTAL / total)
    return ((weights * share).astype(values.dtype) @ values).astype(mx.float32) / share


@partial(mx.compile, shapeless=True)
def _weights(scores: mx.array, peak: mx.array) -> mx.array:
    return mx.exp(scores - peak)


def _add(part: _Partial, other: _Partial) -> _Partial:
    peak = mx.maximum(part.peak, other.peak)
    part_weight, weight = mx.exp(part.peak - peak), mx.exp(other.peak - peak)
    weighted = part.weighted * part_weight + other.weighted * weight
    return _Partial(weighted, peak, part.total * part_weight + other.total * weight)


@partial(mx.compile, shapeless=True)
def _merge(*arrays: mx.array) -> mx.array:
    """The result of attention over all keys; `arrays` are those of two partial results."""
    whole = _add(_Partial(*arrays[:3]), _Partial(*arrays[3:]))
    return whole.weighted / whole.total
