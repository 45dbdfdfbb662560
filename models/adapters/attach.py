"""Puts adapters on a loaded model, whose own weights stay as they are and are shared by all of them."""

import logging
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear
from mlx.utils import tree_map, tree_unflatten

from models.adapters.adapter import Adapter, AdapterPlace
from models.adapters.folder import AdapterFolder, LowRank, low_ranks, read_folder
from models.adapters.mlx_lm_lora import LoRALinear, load_adapters
from models.adapters.switch import AdaptedLayer, AdapterSet, Variants, own_arrays
from models.errors import ModelBroken

logger = logging.getLogger(__name__)


def attach(model: Module, places: Sequence[AdapterPlace], *, as_float32: bool = False) -> AdapterSet:
    """Puts adapters on a model; blocks until their weights are in memory.

    With `as_float32` these are converted, which a CPU is fastest with. Raises ModelNotFound and ModelBroken for one
    that is no adapter of this model; the model cannot be used then.
    """
    folders = [read_folder(place.name, place.folder) for place in places]
    variants: dict[str, dict[int, Module]] = {}
    for index, folder in enumerate(folders, start=1):
        for path, layer in _layers_of(model, folder).items():
            variants.setdefault(path, {})[index] = _settled(layer, as_float32=as_float32)
    adapters = [Adapter(folder.name, index, folder.digest()) for index, folder in enumerate(folders, start=1)]
    together = {path: _variants(layers) for path, layers in variants.items()}
    found = AdapterSet(adapters, sum(layers.num_bytes for layers in together.values()))
    own = dict(_named_modules(model))
    _replace(model, {path: AdaptedLayer(own[path], layers, found) for path, layers in together.items()})
    return found


def _variants(layers: dict[int, Module]) -> Variants:
    # Of what is derived from it, mlx-lm's other kinds among it, nothing is known.
    return Variants(layers, are_plain=all(type(layer) is LoRALinear for layer in layers.values()))


def _layers_of(model: Module, folder: AdapterFolder) -> dict[str, Module]:
    """Returns the layers that an adapter makes of some of the model's, by their path; leaves the model as it was."""
    own = dict(_named_modules(model))
    if folder.is_peft:
        return {path: _around(own, folder, path, part) for path, part in low_ranks(folder).items()}
    try:
        load_adapters(model, str(folder.path))
    except Exception as error:  # whatever mlx-lm finds wrong
        reason = " ".join(str(error).split())
        raise ModelBroken(f"adapter {folder.name}: it is not one of this model: {reason}") from error
    made = {path: layer for path, layer in _named_modules(model) if path in own and own[path] is not layer}
    _replace(model, {path: own[path] for path in made})
    if not made:
        raise ModelBroken(f"adapter {folder.name}: it changes no layer of this model")
    return made


def _around(own: dict[str, Module], folder: AdapterFolder, path: str, part: LowRank) -> Module:
    """Returns mlx-lm's layer around one of the model's, for an adapter in PEFT's form; raises ModelBroken."""
    layer = own.get(path)
    if not isinstance(layer, Linear | QuantizedLinear):
        what = "is none" if layer is None else f"is a {type(layer).__name__}"
        raise ModelBroken(f"adapter {folder.name}: {path} {what} of this model's linear layers")
    made = LoRALinear.from_base(layer, r=part.a.shape[1], scale=part.scale)
    shapes = made.lora_a.shape, made.lora_b.shape
    if shapes != (part.a.shape, part.b.shape):
        raise ModelBroken(
            f"adapter {folder.name}: {path} has factors of shapes {part.a.shape} and {part.b.shape}, and the model's "
            f"layer takes {shapes[0]} and {shapes[1]}"
        )
    made.lora_a, made.lora_b = part.a, part.b
    return cast(Module, made)


def _settled(layer: Module, *, as_float32: bool) -> Module:
    """Returns an adapter's layer ready for any thread: without dropout, its own weights in memory."""
    layer.eval()
    own: dict[str, Any] = own_arrays(layer)
    if as_float32:
        own = tree_map(lambda array: array.astype(mx.float32), own)
    mx.eval(own)
    layer.update(own)
    return layer


def _named_modules(model: Module) -> list[tuple[str, Module]]:
    return cast(list[tuple[str, Module]], model.named_modules())  # type: ignore[no-untyped-call]


def _replace(model: Module, layers: dict[str, Module]) -> None:
    model.update_modules(tree_unflatten(list(layers.items())))
