"""Reads adapters, and attaches them to a loaded model, which shares its weights among them.

Two forms are read, never code: mlx-lm's `adapter_config.json` with `lora_parameters` and `adapters.safetensors`;
PEFT's with `peft_type` and `adapter_model.safetensors`.
"""

import cache.layers  # noqa: F401

# isort: split

import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear
from mlx.utils import tree_unflatten
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.utils import load_adapters

from models import weights
from models.adapter import Adapter
from models.errors import ModelBroken, ModelNotFound, told_as
from models.lora import AdaptedLayer, AdapterSet, Variants, own_arrays

CONFIG = "adapter_config.json"
_MLX_WEIGHTS = "adapters.safetensors"
_PEFT_WEIGHTS = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class _AdapterFolder:
    """An adapter's files, checked without the model."""

    name: str
    path: Path
    config: Mapping[str, Any]
    is_peft: bool

    @property
    def weights(self) -> Path:
        return self.path / (_PEFT_WEIGHTS if self.is_peft else _MLX_WEIGHTS)

    def digest(self) -> str:
        """32 hexadecimal digits of the files' contents. Reads all."""
        digest = hashlib.sha256()
        for path in (self.path / CONFIG, self.weights):
            with told_as(ModelBroken, f"{path} is not readable"):
                digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()[:32]


def read_folder(name: str, folder: str) -> _AdapterFolder:
    """An adapter's folder; raises ModelNotFound and ModelBroken."""
    path = Path(folder).expanduser()
    if not (path / CONFIG).is_file():
        raise ModelNotFound(f"adapter {name}: there is no file {path / CONFIG}, so {path} is no adapter")
    config = weights.require_json(path / CONFIG, f"adapter {name}")
    adapter = _AdapterFolder(name, path, config, is_peft="peft_type" in config)
    if not adapter.weights.is_file():
        raise ModelNotFound(f"adapter {name}: there is no file {adapter.weights}")
    (_check_peft if adapter.is_peft else _check_mlx)(name, config)
    try:
        # MLX trusts the length in the header of such a file.
        weights.read_header(adapter.weights)
    except ModelBroken as error:
        raise ModelBroken(f"adapter {name}: {error}") from error
    return adapter


def _check_mlx(name: str, config: Mapping[str, Any]) -> None:
    kind, parameters = config.get("fine_tune_type", "lora"), cast(Any, config.get("lora_parameters"))
    if kind == "full":
        raise ModelBroken(f"adapter {name}: it is a full fine-tune, a model of its own; make one with mlx_lm.fuse")
    sizes = [parameters.get(key) for key in ("rank", "scale")] if isinstance(parameters, dict) else [None]
    has_numbers = all(isinstance(size, int | float) for size in (config.get("num_layers"), *sizes))
    if kind not in ("lora", "dora") or not has_numbers:
        wanted = "num_layers and lora_parameters with rank and scale, as mlx-lm writes them"
        raise ModelBroken(f"adapter {name}: {CONFIG} lacks {wanted}")


_NOT_SUPPORTED = {
    "use_dora": "DoRA in PEFT's form",
    "rank_pattern": "a rank of its own for some layers",
    "alpha_pattern": "an alpha of its own for some layers",
    "modules_to_save": "weights that replace the model's",
    "lora_bias": "a bias",
    "bias": "a bias",
}


def _check_peft(name: str, config: Mapping[str, Any]) -> None:
    if config["peft_type"] != "LORA":
        raise ModelBroken(f"adapter {name}: PEFT's {config['peft_type']!r} is not supported, only 'LORA' is")
    for key, what in _NOT_SUPPORTED.items():
        if config.get(key, "none") != "none" and (config[key] or key == "bias"):
            raise ModelBroken(f"adapter {name}: {key} in {CONFIG} asks for {what}, which is not supported")


def attach(model: Module, places: Sequence[tuple[str, str]], *, as_float32: bool = False) -> AdapterSet:
    """Attaches adapters, by names and folders, to a model; blocks until their weights are in memory.

    `as_float32` converts the weights, fastest on a CPU. Raises ModelNotFound, and ModelBroken for a misfit; the model
    is unusable then.
    """
    folders = [read_folder(*place) for place in places]
    variants = defaultdict[str, dict[int, Module]](dict)
    for index, folder in enumerate(folders, start=1):
        for path, layer in _layers_of(model, folder).items():
            variants[path][index] = _settled(layer, as_float32=as_float32)
    # Classes derived from it, including mlx-lm's other kinds, may compute anything.
    together = {
        path: Variants(layers, are_plain=all(type(layer) is LoRALinear for layer in layers.values()))
        for path, layers in variants.items()
    }
    adapters = [Adapter(folder.name, index, folder.digest()) for index, folder in enumerate(folders, start=1)]
    adapter_set = AdapterSet(adapters, sum(layers.num_bytes for layers in together.values()))
    own = _modules_of(model)
    _replace(model, {path: AdaptedLayer(own[path], layers, adapter_set) for path, layers in together.items()})
    return adapter_set


def _layers_of(model: Module, folder: _AdapterFolder) -> dict[str, Module]:
    """Returns an adapter's layers by path; leaves the model unchanged."""
    own = _modules_of(model)
    if folder.is_peft:
        made = {path: _around(own.get(path), folder, path, pair) for path, pair in _factors(folder).items()}
    else:
        try:
            load_adapters(model, str(folder.path))
        except Exception as error:  # mlx-lm's, for whatever it finds wrong
            reason = " ".join(str(error).split())
            raise ModelBroken(f"adapter {folder.name}: it does not fit this model: {reason}") from error
        made = {path: layer for path, layer in _modules_of(model).items() if path in own and own[path] is not layer}
        _replace(model, {path: own[path] for path in made})
    if not made:
        raise ModelBroken(f"adapter {folder.name}: it changes no layer of this model")
    return made


def _factors(adapter: _AdapterFolder) -> dict[str, dict[str, mx.array]]:
    """The two factors of each layer, by path, of an adapter in PEFT's form; raises ModelBroken."""
    try:
        tensors = cast(dict[str, mx.array], mx.load(str(adapter.weights)))
    except Exception as error:  # the reader's error, for whatever is wrong with the file
        raise ModelBroken(f"adapter {adapter.name}: {adapter.weights} cannot be read: {error}") from error
    factors = defaultdict[str, dict[str, mx.array]](dict)
    for key, tensor in tensors.items():
        path, _, factor = key.removeprefix(_PEFT_PREFIX).rpartition(".lora_")
        if factor not in ("A.weight", "B.weight") or tensor.ndim != 2:
            raise ModelBroken(f"adapter {adapter.name}: {key} in {adapter.weights} is no part of a LoRA adapter")
        factors[path][factor[0]] = tensor.T
    return factors


def _around(layer: Module | None, folder: _AdapterFolder, path: str, factors: Mapping[str, mx.array]) -> Module:
    if set(factors) != {"A", "B"}:
        raise ModelBroken(f"adapter {folder.name}: {path} has one factor of two in {folder.weights}")
    if not isinstance(layer, Linear | QuantizedLinear):
        what = "is none" if layer is None else f"is a {type(layer).__name__}"
        raise ModelBroken(f"adapter {folder.name}: {path} {what} of this model's linear layers")
    a, b, rank = factors["A"], factors["B"], factors["A"].shape[1]
    alpha = float(folder.config.get("lora_alpha", rank))
    scale = alpha / (math.sqrt(rank) if folder.config.get("use_rslora") else rank)
    made = LoRALinear.from_base(layer, r=rank, scale=scale)
    shapes = made.lora_a.shape, made.lora_b.shape
    if shapes != (a.shape, b.shape):
        fault = f"factors of shapes {a.shape} and {b.shape}, and the model's layer takes {shapes[0]} and {shapes[1]}"
        raise ModelBroken(f"adapter {folder.name}: {path} has {fault}")
    made.lora_a, made.lora_b = a, b
    return cast(Module, made)


def _settled(layer: Module, *, as_float32: bool) -> Module:
    """Makes a layer usable by any thread, without dropout."""
    layer.eval()
    own = {name: array.astype(mx.float32) if as_float32 else array for name, array in own_arrays(layer).items()}
    mx.eval(own)
    layer.update(own)
    return layer


def _modules_of(model: Module) -> dict[str, Module]:
    return dict(model.named_modules())  # type: ignore[no-untyped-call]


def _replace(model: Module, layers: dict[str, Module]) -> None:
    model.update_modules(tree_unflatten(list(layers.items())))
