"""Layers with variants for adapters, chosen for each row of a call. Worker thread only, once loaded.

A wrapped layer holds the model's own and, per adapter, mlx-lm's layer around it. Rows of one adapter go through one,
bit for bit as without this module. Rows of different adapters share a call if all variants are plain LoRA of linear
layers and `can_mix` has shown that together they differ by little against an adapter's effect; else they take turns.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from numpy.typing import NDArray

from cache.types import LayerCache
from models.adapter import NO_ADAPTER, Adapter
from models.inference.groups import BatchRow
from models.inference.ragged import RaggedBatch, ragged_attention
from models.mlx_lm_import import make_prompt_cache

logger = logging.getLogger(__name__)


class CannotMix(Exception):
    """A layer's call does not tell rows of different adapters apart."""


class AdapterSet:
    """One model's adapters, and the next call's selection."""

    def __init__(self, adapters: Sequence[Adapter], num_bytes: int) -> None:
        self.adapters = tuple(adapters)
        self.num_bytes = num_bytes
        self.layers: list[AdaptedLayer] = []
        self.selected: int | tuple[int, ...] = NO_ADAPTER
        """Of all rows, or of each."""

    @contextmanager
    def selecting(self, rows: Sequence[int]) -> Iterator[None]:
        """Model calls in the block evaluate each row with its adapter, by index."""
        self.selected = rows[0] if len(set(rows)) == 1 else tuple(rows)
        try:
            yield
        finally:
            self.selected = NO_ADAPTER

    def close(self) -> None:
        """Releases the adapters' weights."""
        for layer in self.layers:
            layer.variants = Variants({}, are_plain=False)


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
        if isinstance(selected, tuple):
            return self._mixed(x, selected)
        return self._of(selected)(x, *args, **kwargs)  # type: ignore[no-any-return]

    def as_linear(self, x: mx.array) -> mx.array:
        """Evaluates an embedding as the layer that makes logits."""
        if isinstance(self._adapters.selected, tuple):
            raise CannotMix("an embedding")
        return self._of(self._adapters.selected).as_linear(x)  # type: ignore[no-any-return]

    def _of(self, index: int) -> Any:
        return self.variants.by_index.get(index, self.layer)

    def _mixed(self, x: mx.array, rows: tuple[int, ...]) -> mx.array:
        if x.ndim != 3 or x.shape[0] != len(rows):
            raise CannotMix(f"an input of shape {x.shape} for {len(rows)} rows")
        places, scales = _places(rows, self.variants.scales)
        a, b = self.variants.stacked
        added = scales * mx.gather_mm(mx.gather_mm(x, a, rhs_indices=places), b, rhs_indices=places)
        # Another adapter's result for a row is dropped, not multiplied by zero: it may be infinite.
        added = mx.where(scales == 0, 0, added)
        return self.layer(x) + added.astype(x.dtype)  # type: ignore[no-any-return]


@lru_cache(16)
def _places(rows: tuple[int, ...], held: tuple[tuple[int, float], ...]) -> tuple[mx.array, mx.array]:
    """Each row's index among the adapters `held`, and its scale: `[num_rows]`, `[num_rows, 1, 1]`.

    Made once: the same rows decode together for many steps.
    """
    place, scale = {index: number for number, (index, _) in enumerate(held)}, dict(held)
    places = mx.array([place.get(row, 0) for row in rows], dtype=mx.uint32)
    scales = mx.array([[[scale.get(row, 0.0)]] for row in rows])
    mx.eval(places, scales)  # other models' threads may use them
    return places, scales


@dataclass(eq=False)
class Variants:
    """A layer's variants by adapter index; plain variants also stacked."""

    by_index: dict[int, Any]
    are_plain: bool
    """Each adds exactly `scale * (x @ lora_a) @ lora_b`."""

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
    fault = _find_mixing_fault(model, adapters, vocab_size)
    if fault is not None:
        logger.info("rows of different adapters take turns: %s", fault)
    return fault is None


def _find_mixing_fault(model: Any, adapters: AdapterSet, vocab_size: int) -> str | None:
    if not all(layer.variants.are_plain for layer in adapters.layers):
        return "not all layers of the adapters are plain LoRA"
    rows = [NO_ADAPTER, *(adapter.index for adapter in adapters.adapters), NO_ADAPTER]
    tokens = np.random.default_rng(0).integers(0, vocab_size, (len(rows), _PROMPT_TOKENS + _STEPS)).astype(np.int32)
    try:
        found = [
            mx.concatenate(
                [_logits(model, adapters, [row], fed[None]) for row, fed in zip(chosen, tokens, strict=True)]
            )
            for chosen in (rows, [NO_ADAPTER] * len(rows))
        ]
        found.append(_logits(model, adapters, rows, tokens))
        alone, bare, together = (np.array(logits.astype(mx.float32)) for logits in found)
    except Exception as reason:  # an error only shows that this model cannot be called in this way
        return f"{type(reason).__name__}: {reason}"
    error, rounding = float(np.abs(together - alone).max()), _ROUNDING * float(mx.finfo(found[-1].dtype).eps)
    allowed = max(_LARGEST_SHARE * float(np.abs(alone - bare).max()), rounding * float(np.abs(alone).max()))
    return None if error <= allowed else f"together they differ from each alone by {error:.3g}"


def _logits(model: Any, adapters: AdapterSet, rows: Sequence[int], tokens: NDArray[np.int32]) -> mx.array:
    """Of the last tokens of rows with these adapters, evaluated together: `[num_rows, steps, vocab_size]`."""
    caches = [_prefilled(model, adapters, index, row) for index, row in zip(rows, tokens, strict=True)]
    layers = RaggedBatch([BatchRow(one) for one in caches]).layers if len(rows) > 1 else caches[0]
    found = []
    for step in range(_PROMPT_TOKENS, _PROMPT_TOKENS + _STEPS):
        with adapters.selecting(rows), ragged_attention():
            found.append(model(mx.array(tokens[:, step, None]), cache=layers)[:, -1])
    return mx.stack(found, axis=1)


def _prefilled(model: Any, adapters: AdapterSet, adapter: int, tokens: NDArray[np.int32]) -> list[LayerCache]:
    caches = list(make_prompt_cache(model))
    with adapters.selecting([adapter]):
        model(mx.array(tokens[None, :_PROMPT_TOKENS]), cache=caches)
    mx.eval([cache.state for cache in caches])
    return caches
