"""Finds a model's vision in its folder, and makes its text model see.

Tensors tell whether a folder has a tower: conversions drop the tower, or its configuration. A text model's layers are
wrapped last, once nothing more goes by the names of their parameters.
"""

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE
from mlx.nn.layers.quantized import quantize

from models import weights
from models.errors import InvalidImage, brief
from models.mlx_lm_import import infer_quant_config
from models.mtp import language_model
from models.prompt.pictures import Picture
from models.vision.layers import DeepstackLayer, SeeingEmbedding, SeeingRope, VisionInputs
from models.vision.qwen import QwenImages, QwenTower

logger = logging.getLogger(__name__)

_FAMILIES: Final = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_PROCESSOR_FILES: Final = ("preprocessor_config.json", "processor_config.json")
_PREFIXES: Final = ("model.visual.", "visual.", "model.vision_tower.", "vision_tower.")


@dataclass(frozen=True, eq=False)
class Vision:
    """What a model sees with."""

    images: QwenImages
    tower: QwenTower
    inputs: VisionInputs
    placeholder: str
    """What the chat template shows for a picture, as a text."""
    placeholder_id: int

    def open(self, data: bytes) -> Picture:
        """The picture in an encoded file, on any thread; raises InvalidImage."""
        picture = self.images.open(data)
        if picture.digest in self.tower.damaged:
            raise InvalidImage("the image cannot be decoded")
        return picture


def load_vision(
    folder: Path, name: str, model: Module, config: Mapping[str, Any], tokenizer: Any, max_image_tokens: int
) -> Vision | None:
    """A loaded model's vision, its tower not evaluated, its layers wrapped; None, and a line in the log, without."""
    tensors = _read_tensors(folder)
    if not tensors:
        if "vision_config" in config:
            logger.info("%s sees no images: its files hold no vision tower", name)
        return None
    try:
        placeholder = tokenizer.convert_ids_to_tokens(config["image_token_id"])
        images = QwenImages.read(folder, config["vision_config"], max_image_tokens)
        tower = _tower(config, images, tensors)
        inputs = _attached(model, config)
    except _Unproven as error:
        reason = str(error)
    except Exception as error:  # a configuration holds anything
        reason = (
            f"its tower and its configuration do not belong together: {type(error).__name__}: {brief(error, 120)}"
        )
    else:
        return Vision(images, tower, inputs, placeholder, config["image_token_id"])
    logger.warning("%s sees no images: %s", name, reason)
    return None


class _Unproven(Exception):
    """The message is a clause."""


def _read_tensors(folder: Path) -> dict[str, mx.array]:
    """A tower's, lazy, by their names after the prefix; whatever the files are called."""
    read = dict[str, mx.array]()
    for file in sorted(folder.glob("*.safetensors")):
        names = [name for name in weights.read_header(file) if name.startswith(_PREFIXES)]
        tensors: Any = mx.load(str(file), format="safetensors") if names else {}
        for name in names:
            prefix = next(prefix for prefix in _PREFIXES if name.startswith(prefix))
            read[name.removeprefix(prefix)] = tensors[name]
    return read


def keep_vision(folder: Path, target: Path) -> None:
    """Copies a model's tower and its configuration to the folder of a conversion, beside the text model."""
    tensors = _read_tensors(folder)
    config = weights.read_json(folder / "config.json")
    if not tensors or config.get("model_type") not in _FAMILIES:
        return
    named = {f"vision_tower.{name}": array for name, array in tensors.items()}
    mx.save_safetensors(str(target / "model-vision.safetensors"), named, metadata={"format": "mlx"})
    told = {name: config[name] for name in ("vision_config", "image_token_id") if name in config}
    written = weights.read_json(target / "config.json")
    (target / "config.json").write_text(json.dumps({**written, **told}, indent=4), encoding="utf-8")
    for name in _PROCESSOR_FILES:
        if (folder / name).is_file():
            shutil.copy(folder / name, target / name)


def _tower(config: Mapping[str, Any], images: QwenImages, tensors: dict[str, mx.array]) -> QwenTower:
    if config["model_type"] not in _FAMILIES:
        raise _Unproven(f"towers of the family {config['model_type']!r} are not read yet")
    weights, tower = QwenTower.sanitized(tensors), QwenTower(config["vision_config"], images)
    quantize(tower, class_predicate=partial(_packing, weights))
    tower.load_weights(list(weights.items()))
    tower.eval()
    return tower


def _packing(tensors: dict[str, mx.array], path: str, layer: Module) -> dict[str, Any] | bool:
    return f"{path}.scales" in tensors and cast(dict[str, Any], infer_quant_config(path, layer, tensors))


def _attached(model: Module, config: Mapping[str, Any]) -> VisionInputs:
    """Wraps what a picture reaches. Nothing is wrapped if anything is unknown."""
    text, inputs = language_model(model).model, VisionInputs()
    text_config = config["text_config"]
    sections = (text_config.get("rope_parameters") or text_config.get("rope_scaling") or {}).get(
        "mrope_section"
    ) or ()
    attentions = [layer.self_attn for layer in text.layers if "self_attn" in layer]
    for attention in attentions:
        rope = attention.rope
        if type(rope) is not RoPE or rope.scale != 1.0 or rope.traditional or sum(sections) != rope.dims // 2:
            raise _Unproven("its positions are none that are known")
    for attention in attentions:
        attention.rope = SeeingRope(attention.rope, inputs, sections)
    for index in range(len(config["vision_config"].get("deepstack_visual_indexes") or ())):
        text.layers[index] = DeepstackLayer(text.layers[index], inputs, index)
    text.embed_tokens = SeeingEmbedding(text.embed_tokens, inputs)
    return inputs
