"""The names of mlx-lm's training that adapters need, which bring all of it along."""

import cache.layers.mlx_lm_guard  # noqa: F401

# isort: split
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.utils import load_adapters

__all__ = ["LoRALinear", "load_adapters"]
