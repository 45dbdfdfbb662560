"""Reads adapters, and attaches them to a loaded model, which shares its weights among them.

Two forms are read, never code: mlx-lm's `adapter_config.json` with `lora_parameters` and `adapters.safetensors`;
PEFT's with `peft_type` and `adapter_model.safetensors`.
"""

import cache.layers  # noqa: F401

# isort: split

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear
from mlx.utils import tree_map, tree_unflatten
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.utils import load_adapters

from models import weights
from models.adapter import Adapter, AdapterPlace
from models.errors import ModelBroken, ModelNotFound
from models.lora import AdaptedLayer, AdapterSet, Variants, own_arrays

logger = logging.getLogger(__name__)

CONFIG = "adapter_config.json"
MLX_WEIGHTS = "adapters.safetensors"
PEFT_WEIGHTS = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."
_PEFT_FACTORS = {".lora_A.weight": "a", ".lora_B.weight": "b"}


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter's files, checked without the model."""

    name: str
    path: Path
    config: Mapping[str, Any]
    is_peft: bool

    @property
    def weights(self) -> Path:
        return self.path / (PEFT_WEIGHTS if self.is_peft else MLX_WEIGHTS)

    def digest(self) -> str:
        """32 hexadecimal digits of the files' contents. Reads all."""
        found = hashlib.sha256()
        for path in (self.path / CONFIG, self.weights):
            found.update(hashlib.sha256(_content(self.name, path)).digest())
        return found.hexdigest()[:32]


@dataclass(frozen=True)
class LowRank:
    """An addition to one linear layer: `scale * (x @ a) @ b`."""

    a: mx.array
    """`[input_dims, rank]`."""
    b: mx.array
    """`[rank, output_dims]`."""
    scale: float


def read_folder(name: str, folder: str) -> AdapterFolder:
    """An adapter's folder; raises ModelNotFound and ModelBroken."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ModelNotFound(f"adapter {name}: there is no folder {path}")
    if not (path / CONFIG).is_file():
        raise ModelNotFound(f"adapter {name}: {path} has no {CONFIG}, so it is not an adapter")
    config = weights.require_json(path / CONFIG, f"adapter {name}")
    found = AdapterFolder(name, path, config, is_peft="peft_type" in config)
    if not found.weights.is_file():
        raise ModelNotFound(f"adapter {name}: {path} has no {found.weights.name}")
    (_check_peft if found.is_peft else _check_mlx)(name, config)
    try:
        # MLX trusts the length in the header of such a file.
        weights.read_header(found.weights)
    except ModelBroken as error:
        raise ModelBroken(f"adapter {name}: {error}") from error
    return found


def low_ranks(adapter: AdapterFolder) -> dict[str, LowRank]:
    """Additions of an adapter in PEFT's form, by layer path; raises ModelBroken."""
    factors: dict[str, dict[str, mx.array]] = {}
    for key, tensor in read_tensors(adapter).items():
        suffix = next((suffix for suffix in _PEFT_FACTORS if key.endswith(suffix)), None)
        if suffix is None or tensor.ndim != 2:
            raise ModelBroken(f"adapter {adapter.name}: {key} in {adapter.weights} is no part of a LoRA adapter")
        path = key.removesuffix(suffix).removeprefix(_PEFT_PREFIX)
        factors.setdefault(path, {})[_PEFT_FACTORS[suffix]] = tensor
    return {path: _low_rank(adapter, path, pair) for path, pair in factors.items()}


def read_tensors(adapter: AdapterFolder) -> dict[str, mx.array]:
    """An adapter's tensors; raises ModelBroken."""
    try:
        found = mx.load(str(adapter.weights))
    except Exception as error:  # the reader's error, for whatever is wrong with the file
        raise ModelBroken(f"adapter {adapter.name}: {adapter.weights} cannot be read: {error}") from error
    if not isinstance(found, dict) or not found:
        raise ModelBroken(f"adapter {adapter.name}: {adapter.weights} holds no tensors")
    return found


def _low_rank(adapter: AdapterFolder, path: str, pair: Mapping[str, mx.array]) -> LowRank:
    if set(pair) != {"a", "b"}:
        raise ModelBroken(f"adapter {adapter.name}: {path} has one factor of two in {adapter.weights}")
    a, b = pair["a"].T, pair["b"].T
    if a.shape[1] != b.shape[0]:
        raise ModelBroken(f"adapter {adapter.name}: the ranks of {path} are {a.shape[1]} and {b.shape[0]}")
    rank = a.shape[1]
    alpha = float(adapter.config.get("lora_alpha", rank))
    return LowRank(a, b, alpha / (math.sqrt(rank) if adapter.config.get("use_rslora") else rank))


def _check_mlx(name: str, config: Mapping[str, Any]) -> None:
    kind = config.get("fine_tune_type", "lora")
    if kind == "full":
        raise ModelBroken(f"adapter {name}: it is a full fine-tune, a model of its own; make one with mlx_lm.fuse")
    parameters: Any = config.get("lora_parameters")
    has_places = isinstance(parameters, dict) and isinstance(config.get("num_layers"), int)
    if kind not in ("lora", "dora") or not has_places:
        raise ModelBroken(f"adapter {name}: {CONFIG} names no lora_parameters and num_layers, as mlx-lm writes them")
    missing = [key for key in ("rank", "scale") if not isinstance(parameters.get(key), int | float)]
    if missing:
        raise ModelBroken(f"adapter {name}: {CONFIG} has no {missing[0]} in lora_parameters")


def _check_peft(name: str, config: Mapping[str, Any]) -> None:
    if config["peft_type"] != "LORA":
        raise ModelBroken(f"adapter {name}: PEFT's {config['peft_type']!r} is not supported, only 'LORA' is")
    refused = {
        "use_dora": "DoRA in PEFT's form",
        "rank_pattern": "a rank of its own for some layers",
        "alpha_pattern": "an alpha of its own for some layers",
        "modules_to_save": "weights that replace the model's",
        "lora_bias": "a bias",
    }
    for key, what in refused.items():
        if config.get(key):
            raise ModelBroken(f"adapter {name}: {key} in {CONFIG} asks for {what}, which is not supported")
    if config.get("bias", "none") != "none":
        raise ModelBroken(f"adapter {name}: bias in {CONFIG} asks for a bias, which is not supported")


def _content(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelBroken(f"adapter {name}: {path} cannot be read: {error.strerror}") from error


def attach(model: Module, places: Sequence[AdapterPlace], *, as_float32: bool = False) -> AdapterSet:
    """Attaches adapters to a model; blocks until their weights are in memory.

    `as_float32` converts the weights, fastest on a CPU. Raises ModelNotFound, and ModelBroken for a misfit; the model
    is unusable then.
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
    # Classes derived from it, including mlx-lm's other kinds, may compute anything.
    return Variants(layers, are_plain=all(type(layer) is LoRALinear for layer in layers.values()))


def _layers_of(model: Module, folder: AdapterFolder) -> dict[str, Module]:
    """Returns an adapter's layers by path; leaves the model unchanged."""
    own = dict(_named_modules(model))
    if folder.is_peft:
        return {path: _around(own, folder, path, part) for path, part in low_ranks(folder).items()}
    try:
        load_adapters(model, str(folder.path))
    except Exception as error:  # mlx-lm's, for whatever it finds wrong
        reason = " ".join(str(error).split())
        raise ModelBroken(f"adapter {folder.name}: it is not one of this model: {reason}") from error
    made = {path: layer for path, layer in _named_modules(model) if path in own and own[path] is not layer}
    _replace(model, {path: own[path] for path in made})
    if not made:
        raise ModelBroken(f"adapter {folder.name}: it changes no layer of this model")
    return made


def _around(own: dict[str, Module], folder: AdapterFolder, path: str, part: LowRank) -> Module:
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
    """Makes a layer usable by any thread, without dropout."""
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
