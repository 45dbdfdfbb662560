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
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from models.adapter import NO_ADAPTER, Adapter

logger = logging.getLogger(__name__)


class AdapterSet:
    """One model's adapters, and the next call's selection."""

    def __init__(self, adapters: Sequence[Adapter], num_bytes: int) -> None:
        self.adapters = tuple(adapters)
        self.num_bytes = num_bytes
        self.layers: list[AdaptedLayer] = []
        self.selected: int | tuple[int, ...] = NO_ADAPTER
        """The adapter of all rows, or of each row."""

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
            raise ValueError("an embedding does not tell rows of different adapters apart")
        return self._of(self._adapters.selected).as_linear(x)  # type: ignore[no-any-return]

    def _of(self, index: int) -> Any:
        return self.variants.by_index.get(index, self.layer)

    def _mixed(self, x: mx.array, rows: tuple[int, ...]) -> mx.array:
        if x.ndim != 3 or x.shape[0] != len(rows):
            raise ValueError(f"an input of shape {x.shape} does not tell rows of {len(rows)} adapters apart")
        places, scales = _places(rows, self.variants.scales)
        a, b = self.variants.stacked
        added = scales * mx.gather_mm(mx.gather_mm(x, a, rhs_indices=places), b, rhs_indices=places)
        # Another adapter's result for a row is dropped, not multiplied by zero: it may be infinite.
        added = mx.where(scales == 0, 0, added)
        return self.layer(x) + added.astype(x.dtype)  # type: ignore[no-any-return]


@lru_cache(16)
def _places(rows: tuple[int, ...], members: tuple[tuple[int, float], ...]) -> tuple[mx.array, mx.array]:
    """Each row's index among the adapters `members`, and its scale: `[num_rows]`, `[num_rows, 1, 1]`.

    Made once: the same rows decode together for many steps.
    """
    place, scale = {index: number for number, (index, _) in enumerate(members)}, dict(members)
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


_NUM_TOKENS = 3
_LARGEST_SHARE = 0.1
"""Largest rounding, as a fraction of the adapters' effect."""
_ROUNDING = 16
"""Rounding of one logit, in units in the last place of the largest logit."""


def can_mix(model: Any, adapters: AdapterSet, vocab_size: int) -> bool:
    """Whether rows of different adapters give the same together as alone."""
    fault = _find_mixing_fault(model, adapters, vocab_size)
    if fault is not None:
        logger.info("requests of different adapters take turns: %s", fault)
    return fault is None


def _find_mixing_fault(model: Any, adapters: AdapterSet, vocab_size: int) -> str | None:
    if not all(layer.variants.are_plain for layer in adapters.layers):
        return "not all layers of the adapters are plain LoRA"
    rows = [NO_ADAPTER, *(adapter.index for adapter in adapters.adapters), NO_ADAPTER]
    tokens = mx.array(np.random.default_rng(0).integers(0, vocab_size, (len(rows), _NUM_TOKENS)))
    try:
        together, bare = (_logits(model, adapters, which, tokens) for which in (rows, [NO_ADAPTER] * len(rows)))
        alone = mx.concatenate(
            [_logits(model, adapters, [row], tokens[place : place + 1]) for place, row in enumerate(rows)]
        )
        parts = together - alone, alone - bare, alone
        error, effect, largest = (float(np.abs(np.array(part.astype(mx.float32))).max()) for part in parts)
    except Exception as reason:  # an error only shows that this model cannot be called in this way
        return f"{type(reason).__name__}: {reason}"
    allowed = max(_LARGEST_SHARE * effect, _ROUNDING * float(mx.finfo(alone.dtype).eps) * largest)
    return None if error <= allowed else f"together they differ from each alone by {error:.3g}"


def _logits(model: Any, adapters: AdapterSet, rows: Sequence[int], tokens: mx.array) -> mx.array:
    """Logits of rows with these adapters, evaluated together: `[num_rows, num_tokens, vocab_size]`."""
    with adapters.selecting(rows):
        return cast(mx.array, model(tokens))
