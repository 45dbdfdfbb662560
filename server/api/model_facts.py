"""What a served model is, for clients that show it to people. Nothing here changes an answer. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelFacts:
    """A loaded model, told in figures. What is not known is empty, or 0."""

    architecture: str = ""
    """Its `model_type`, such as `qwen3`."""
    fingerprint: str = ""
    """Differs for different models."""
    num_parameters: int = 0
    stored_bytes: int = 0
    """Weights on disk."""
    memory_bytes: int = 0
    """Weights in memory."""
    is_on_gpu: bool = False
    weight_format: str = ""
    """Such as `4-bit` or `BF16`."""
    num_layers: int = 0
    hidden_size: int = 0
    chat_template: str = ""
    bos_token: str = ""
    eos_token: str = ""


def architecture_facts(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns those fields of `ModelFacts` that a model's `config.json` tells."""
    inner = {**config, **(config.get("text_config") or {})}
    quantization = config.get("quantization") or {}
    bits = quantization.get("bits") if isinstance(quantization, dict) else None
    stored_type = str(inner.get("dtype") or inner.get("torch_dtype") or "")
    short = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}.get(stored_type, "")
    return {
        "architecture": str(config.get("model_type") or ""),
        "weight_format": f"{bits}-bit" if isinstance(bits, int) else short,
        "num_layers": _whole(inner.get("num_hidden_layers")),
        "hidden_size": _whole(inner.get("hidden_size")),
    }


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0
