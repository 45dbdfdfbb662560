"""Layers with variants for adapters, chosen for each row of a call. Worker thread only, once loaded.

A wrapped layer holds the model's own and, per adapter, mlx-lm's layer around it. Rows of one adapter go through one,
bit for bit as without this module. Rows of different adapters share a call if all variants are plain LoRA of linear
layers and `can_mix` has shown that together they differ by little against an adapter's effect; else they take turns.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from cache.types import LayerCache
from models.adapter import NO_ADAPTER, Adapter
from models.inference.groups import BatchRow
from models.inference.ragged import RaggedBatch, ragged_attention
from models.mlx_lm_import import make_prompt_cache

logger = logging.getLogger(__name__)


class CannotMix(Exception):
    """A layer's call does not tell rows of different adapters apart."""


class _Mixture:
    def __init__(self, rows: tuple[int, ...]) -> None:
        self.rows = rows
        self._places: dict[tuple[tuple[int, float], ...], tuple[mx.array, mx.array]] = {}

    def places(self, held: tuple[tuple[int, float], ...]) -> tuple[mx.array, mx.array]:
        """Each row's index among the adapters `held`, and its scale: `[num_rows]`, `[num_rows, 1, 1]`."""
        found = self._places.get(held)
        if found is None:
            place = {index: number for number, (index, _) in enumerate(held)}
            scale = dict(held)
            places = mx.array([place.get(row, 0) for row in self.rows], dtype=mx.uint32)
            found = places, mx.array([scale.get(row, 0.0) for row in self.rows])[:, None, None]
            self._places[held] = found
        return found


class AdapterSet:
    """One model's adapters, and the next call's selection."""

    def __init__(self, adapters: Sequence[Adapter], num_bytes: int) -> None:
        self.adapters = tuple(adapters)
        self.num_bytes = num_bytes
        self.layers: list[AdaptedLayer] = []
        self.selected: int | _Mixture = NO_ADAPTER
        self._mixture: _Mixture | None = None

    @contextmanager
    def selecting(self, rows: Sequence[int]) -> Iterator[None]:
        """Model calls in the block evaluate each row with its adapter, by index."""
        self.selected = rows[0] if len(set(rows)) == 1 else self._mixed(tuple(rows))
        try:
            yield
        finally:
            self.selected = NO_ADAPTER

    def close(self) -> None:
        """Releases the adapters' weights."""
        for layer in self.layers:
            layer.forget()
        self._mixture = None

    def _mixed(self, rows: tuple[int, ...]) -> _Mixture:
        # The same rows decode together for many steps.
        if self._mixture is None or self._mixture.rows != rows:
            self._mixture = _Mixture(rows)
        return self._mixture


def selecting(adapters: AdapterSet | None, *rows: int) -> AbstractContextManager[None]:
    """Like `AdapterSet.selecting`, if there are adapters."""
    return nullcontext() if adapters is None else adapters.selecting(rows)


class AdaptedLayer(Module):
    """A model's layer with its variants."""

    def __init__(self, layer: Module, variants: "Variants", adapters: AdapterSet) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layer = layer
        # Among the module's own items the variants would count as weights of the model, once for each adapter.
        self.variants = variants
        self._adapters = adapters
        adapters.layers.append(self)

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        """Evaluates each row with its adapter."""
        selected = self._adapters.selected
        if isinstance(selected, _Mixture):
            return self._mixed(x, selected)
        return self._of(selected)(x, *args, **kwargs)  # type: ignore[no-any-return]

    def as_linear(self, x: mx.array) -> mx.array:
        """Evaluates an embedding as the layer that makes logits."""
        if isinstance(self._adapters.selected, _Mixture):
            raise CannotMix("an embedding")
        return self._of(self._adapters.selected).as_linear(x)  # type: ignore[no-any-return]

    def forget(self) -> None:
        """Releases the variants."""
        self.variants = Variants({}, are_plain=False)

    def _of(self, index: int) -> Any:
        return self.variants.by_index.get(index, self.layer)

    def _mixed(self, x: mx.array, mixture: _Mixture) -> mx.array:
        if x.ndim != 3 or x.shape[0] != len(mixture.rows):
            raise CannotMix(f"an input of shape {x.shape} for {len(mixture.rows)} rows")
        places, scales = mixture.places(self.variants.scales)
        a, b = self.variants.stacked
        added = scales * mx.gather_mm(mx.gather_mm(x, a, rhs_indices=places), b, rhs_indices=places)
        # Another adapter's result for a row is dropped, not multiplied by zero: it may be infinite.
        added = mx.where(scales == 0, 0, added)
        return self.layer(x) + added.astype(x.dtype)  # type: ignore[no-any-return]


class Variants:
    """A layer's variants by adapter index; plain variants also stacked."""

    def __init__(self, by_index: Mapping[int, Module], *, are_plain: bool) -> None:
        """A plain variant adds exactly `scale * (x @ lora_a) @ lora_b`."""
        self.by_index: dict[int, Any] = dict(by_index)
        self.are_plain = are_plain

    @property
    def num_bytes(self) -> int:
        alone = sum(array.nbytes for layer in self.by_index.values() for array in own_arrays(layer).values())
        return 2 * alone if self.are_plain else alone

    @cached_property
    def scales(self) -> tuple[tuple[int, float], ...]:
        """Each adapter's index with its scale."""
        return tuple((index, float(layer.scale)) for index, layer in self.by_index.items())

    @cached_property
    def stacked(self) -> tuple[mx.array, mx.array]:
        """`[num_adapters, input_dims, rank]`, `[num_adapters, rank, output_dims]`, padded with zeros."""
        pairs = [(layer.lora_a, layer.lora_b) for layer in self.by_index.values()]
        rank = max(a.shape[1] for a, _ in pairs)
        first = mx.stack([mx.pad(a, [(0, 0), (0, rank - a.shape[1])]) for a, _ in pairs])
        second = mx.stack([mx.pad(b, [(0, rank - b.shape[0]), (0, 0)]) for _, b in pairs])
        mx.eval(first, second)
        return first, second


def own_arrays(layer: Module) -> dict[str, mx.array]:
    """Weights of an adapter's layer, without the model's."""
    return {name: value for name, value in layer.items() if isinstance(value, mx.array)}


_PROMPT_TOKENS = 5
_STEPS = 2
_LARGEST_SHARE = 0.1
"""Largest rounding, as a fraction of the adapters' effect."""
_ROUNDING = 16
"""Rounding of one logit, in units in the last place of the largest logit."""


def can_mix(model: Any, adapters: AdapterSet, vocab_size: int) -> bool:
    """Whether rows of different adapters give the same together as alone."""
    if not all(layer.variants.are_plain for layer in adapters.layers):
        logger.info("rows of different adapters take turns: not all layers of the adapters are plain LoRA")
        return False
    rows = [NO_ADAPTER, *(adapter.index for adapter in adapters.adapters), NO_ADAPTER]
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocab_size, (len(rows), _PROMPT_TOKENS + _STEPS))
    try:
        alone = np.stack([_alone(model, adapters, index, row) for index, row in zip(rows, tokens, strict=True)])
        bare = np.stack([_alone(model, adapters, NO_ADAPTER, row) for row in tokens])
        together, eps = _together(model, adapters, rows, tokens)
    except Exception as reason:  # an error only shows that this model cannot be called in this way
        logger.info("rows of different adapters take turns: %s: %s", type(reason).__name__, reason)
        return False
    effect = float(np.abs(alone - bare).max())
    error = float(np.abs(together - alone).max())
    allowed = max(_LARGEST_SHARE * effect, _ROUNDING * eps * float(np.abs(alone).max()))
    if not error <= allowed:
        logger.info("rows of different adapters take turns: together they differ from each alone by %.3g", error)
    return error <= allowed


def _alone(model: Any, adapters: AdapterSet, adapter: int, tokens: Any) -> Any:
    caches = _prefilled(model, adapters, adapter, tokens)
    found = []
    for step in range(_STEPS):
        with adapters.selecting([adapter]):
            found.append(model(mx.array([[int(tokens[_PROMPT_TOKENS + step])]]), cache=caches)[0, -1])
    return np.array(mx.stack(found).astype(mx.float32))


def _together(model: Any, adapters: AdapterSet, rows: Sequence[int], tokens: Any) -> tuple[Any, float]:
    """Logits `[num_rows, steps, vocab_size]`, and their precision."""
    pairs = zip(rows, tokens, strict=True)
    batch = RaggedBatch([BatchRow(_prefilled(model, adapters, index, row)) for index, row in pairs])
    found = []
    for step in range(_STEPS):
        fed = mx.array(tokens[:, _PROMPT_TOKENS + step, None].astype(np.int32))
        with adapters.selecting(rows), ragged_attention():
            found.append(model(fed, cache=batch.layers)[:, -1])
    logits = mx.stack(found, axis=1)
    return np.array(logits.astype(mx.float32)), float(mx.finfo(logits.dtype).eps)


def _prefilled(model: Any, adapters: AdapterSet, adapter: int, tokens: Any) -> list[LayerCache]:
    caches = list(make_prompt_cache(model))
    with adapters.selecting([adapter]):
        model(mx.array([tokens[:_PROMPT_TOKENS].tolist()]), cache=caches)
    mx.eval([cache.state for cache in caches])
    return caches
