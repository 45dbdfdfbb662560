"""Random LoRA adapters of the tiny models, in the forms in which adapters are found."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from tests.support import tiny_models

RANK = 4


def fresh(name: str) -> Module:
    """Returns a tiny model of its own, which may be changed."""
    return tiny_models.make(tiny_models.CONFIGS[name])


def write_mlx(
    model_name: str,
    folder: Path,
    *,
    seed: int,
    keys: Sequence[str] | None = None,
    rank: int = RANK,
    scale: float = 2.0,
    kind: str = "lora",
    size: float = 0.2,
) -> Path:
    """Writes an adapter as mlx-lm's training does, of the layers `keys` or of all; returns `folder`."""
    parameters = {"rank": rank, "scale": scale, "dropout": 0.5, **({} if keys is None else {"keys": list(keys)})}
    return _trained(fresh(model_name), folder, parameters, seed=seed, kind=kind, size=size)


def random_adapter(model: Any, folder: Path, *, seed: int, rank: int) -> Path:
    """Writes an adapter of all layers of `model`, which is changed; returns `folder`."""
    parameters = {"rank": rank, "scale": 2.0, "dropout": 0.0}
    return _trained(model, folder, parameters, seed=seed, kind="lora", size=0.05)


def _trained(model: Any, folder: Path, parameters: dict[str, Any], *, seed: int, kind: str, size: float) -> Path:
    model.freeze()
    linear_to_lora_layers(model, len(model.layers), parameters, use_dora=kind == "dora")
    rng = np.random.default_rng(seed)
    weights = {
        path: array if path.endswith(".m") else mx.array(rng.normal(0, size, array.shape), dtype=mx.float32)
        for path, array in cast(list[tuple[str, mx.array]], tree_flatten(model.trainable_parameters()))
        if path.rsplit(".", 1)[-1] in ("lora_a", "lora_b", "m")
    }
    config = {"fine_tune_type": kind, "num_layers": len(model.layers), "lora_parameters": parameters}
    return _written(folder, config, weights, "adapters.safetensors")


def write_peft(folder: Path, layers: dict[str, tuple[int, int]], *, seed: int, **config: Any) -> Path:
    """Writes an adapter as PEFT does; `layers` are paths with input and output dimensions. Returns `folder`."""
    rng, weights = np.random.default_rng(seed), {}
    for path, (num_in, num_out) in layers.items():
        for factor, shape in (("A", (RANK, num_in)), ("B", (num_out, RANK))):
            key = f"base_model.model.{path}.lora_{factor}.weight"
            weights[key] = mx.array(rng.normal(0, 0.2, shape), dtype=mx.float32)
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none", **config}
    return _written(folder, settings, weights, "adapter_model.safetensors")


def _written(folder: Path, config: dict[str, Any], weights: dict[str, mx.array], name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / name), weights)
    return folder
