"""Chooses the types of weights on a CPU, and converts them.

MLX's kernels for a CPU are made for float32. Seconds per token of an answer and of a prompt, 0.6 billion weights of 4
bits, two x86-64 cores, a fast BLAS:

    as stored, scales in bfloat16      4.3     5.7
    scales in float32                  0.48    0.46
    all in float32                     0.29    0.04
"""

import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from models.mlx_lm_import import QuantizedSwitchLinear, SwitchLinear


class Precision(StrEnum):
    """The types of the weights in memory."""

    STORED = "as stored"
    FLOAT32_SCALES = "float32 scales"
    FLOAT32 = "float32"


def choose_precision(model: Module, limit_bytes: int | None) -> Precision:
    """The fastest on a CPU, float32 only within `limit_bytes`; as stored without a limit, on a GPU."""
    needed_bytes, stored_bytes = float32_bytes(model), sum(array.nbytes for _, array in parameters_of(model))
    if limit_bytes is None or needed_bytes == stored_bytes:
        return Precision.STORED
    if needed_bytes <= limit_bytes:
        return Precision.FLOAT32
    return Precision.FLOAT32_SCALES if any(_packed(model)) else Precision.STORED


def float32_bytes(model: Module) -> int:
    """Bytes of the weights in float32; evaluates nothing."""
    packed = [module for _, module in _packed(model)]
    packs = sum(_float32_bytes(module[name]) for module in packed for name in _PACK if module.get(name) is not None)
    plain = sum(_float32_bytes(array) for _, array in parameters_of(model)) - packs
    return plain + sum(4 * _num_weights(module) for module in packed)


def convert(
    model: Module, precision: Precision, tell: Callable[[int, int], object] = lambda done, total: None
) -> None:
    """Converts and evaluates weights, layer by layer; tells how many are converted, of how many."""
    if precision is Precision.STORED:
        return
    model.update(tree_map(_as_float32, cast(Any, model).parameters()))
    mx.eval(model)
    packed = list(_packed(model)) if precision is Precision.FLOAT32 else []
    done, total = 0, sum(_num_weights(module) for _, module in packed)
    while packed:
        tell(done, total)
        name, module = packed.pop()
        done += _num_weights(module)
        plain = _unpacked(module)
        mx.eval(plain)
        model.update_modules(cast(dict[str, Any], tree_unflatten([(name, plain)])))


def seconds_per_token(model: Module, active_share: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """About how long one token of an answer takes, measured by one matrix.

    `active_share` is the fraction of experts that a token uses; 1 without experts.
    """
    matrices = [module for _, module in cast(Any, model).named_modules() if type(module) in _MATRICES]
    flat = [module for module in matrices if isinstance(module, Linear | QuantizedLinear)]
    if not flat:
        return 0.0
    sample = max(flat, key=_num_weights)
    row = mx.ones((1, _num_weights(sample) // sample.weight.shape[0]), sample.get("scales", sample.weight).dtype)
    mx.eval(sample(row))
    begun = clock()
    mx.eval(sample(row))
    pace = (clock() - begun) / _num_weights(sample)
    shares = dict.fromkeys((QuantizedSwitchLinear, SwitchLinear), active_share)
    shares |= dict.fromkeys((QuantizedEmbedding, Embedding), 0.0)
    return pace * sum(_num_weights(module) * shares.get(type(module), 1.0) for module in matrices)


_PACK = ("weight", "scales", "biases")
_KINDS: dict[type[Module], Callable[[bool], Module]] = {
    QuantizedLinear: lambda has_bias: Linear(1, 1, bias=has_bias),
    QuantizedEmbedding: lambda has_bias: Embedding(1, 1),
    QuantizedSwitchLinear: lambda has_bias: SwitchLinear(1, 1, 1, bias=has_bias),
}
_MATRICES = (*_KINDS, Linear, Embedding, SwitchLinear)


def _packed(model: Module) -> Iterator[tuple[str, Module]]:
    for name, module in cast(Any, model).named_modules():
        if type(module) in _KINDS and module.get("global_scale") is None:
            yield name, module


def _unpacked(module: Module) -> Module:
    plain = _KINDS[type(module)]("bias" in module)
    weight, scales, biases = cast(tuple[mx.array, ...], tuple(module.get(name) for name in _PACK))
    kind = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
    plain.weight = mx.dequantize(weight, scales, biases, **kind).astype(mx.float32)
    if "bias" in module:
        plain.bias = module.bias
    return plain


def parameters_of(module: Module) -> list[tuple[str, mx.array]]:
    """A module's weights by name."""
    return cast(list[tuple[str, mx.array]], tree_flatten(cast(Any, module).parameters()))


def _num_weights(module: Module) -> int:
    weight: mx.array = module.weight
    return weight.size * 32 // module.bits if "scales" in module else weight.size


def _as_float32(array: mx.array) -> mx.array:
    return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array


def _float32_bytes(array: mx.array) -> int:
    return 4 * array.size if mx.issubdtype(array.dtype, mx.floating) else array.nbytes
