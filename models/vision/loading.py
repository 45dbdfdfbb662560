"""Finds a model's vision in its folder, and makes its text model see.

Tensors tell whether a folder has a tower: conversions drop the tower, or its configuration. A text model's layers are
wrapped last, once nothing more goes by the names of their parameters.
"""

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx.nn.layers.base import Module

from models import weights
from models.errors import InvalidImage, brief
from models.mtp import language_model, pack_like
from models.prompt.pictures import Picture, Placeholder
from models.vision.gemma3 import Gemma3Tower
from models.vision.gemma4 import Gemma4Tower
from models.vision.layers import VisionInputs
from models.vision.mistral3 import MistralTower
from models.vision.qwen import QwenTower
from models.vision.towers import Images, Unproven, VisionTower

logger = logging.getLogger(__name__)

FAMILIES: Final[Mapping[str, type[VisionTower]]] = {
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), QwenTower),
    "gemma3": Gemma3Tower,
    "gemma4": Gemma4Tower,
    "mistral3": MistralTower,
}
_PROCESSOR_FILES: Final = ("preprocessor_config.json", "processor_config.json")
_TOWERS: Final = ("visual.", "vision_tower.")
_PROJECTORS: Final = ("multi_modal_projector.", "embed_vision.")


@dataclass(frozen=True, eq=False)
class Vision:
    """What a model sees with."""

    tower: VisionTower
    inputs: VisionInputs
    placeholder: Placeholder

    @property
    def whole_tokens(self) -> int:
        """Most tokens of a picture that one chunk holds whatever a chunk's size is."""
        return self.tower.images.max_tokens if self.tower.images.is_whole else 0

    def open(self, data: bytes) -> Picture:
        """The picture in an encoded file, on any thread; raises InvalidImage."""
        picture = self.tower.images.open(data)
        if picture.digest in self.tower.damaged:
            raise InvalidImage("the image cannot be decoded")
        return picture


def find_images(folder: Path, config: Mapping[str, Any], max_image_tokens: int) -> Images | None:
    """How a folder's model cuts images into tokens, by its headers alone; None for a model that sees nothing."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or "vision_config" not in config or not any(_tower_names(folder)):
        return None
    try:
        return family.images_of(folder, config, max_image_tokens)
    except Exception:  # a configuration holds anything, and `load_vision` says what
        return None


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
        family = _family(config)
        tower = _tower(family, folder, config, tensors, max_image_tokens)
        if not any((folder / file).is_file() for file in _PROCESSOR_FILES):
            logger.info("%s is shown images as is usual for its family: it has no %s", name, _PROCESSOR_FILES[0])
        placeholder, inputs = family.placeholder(config, tokenizer), VisionInputs()
        tower.attach(language_model(model).model, config, inputs, tokenizer)
    except Unproven as error:
        reason = str(error)
    except Exception as error:  # a configuration holds anything
        detail = f"{type(error).__name__}: {brief(error, 120)}"
        reason = f"its tower and its configuration do not belong together: {detail}"
    else:
        return Vision(tower, inputs, placeholder)
    logger.warning("%s sees no images: %s", name, reason)
    return None


def placeholder_of(config: Mapping[str, Any], tokenizer: Any) -> Placeholder | None:
    """The placeholder of a model that sees images, from its configuration alone; None for a model that sees none."""
    try:
        return _family(config).placeholder(config, tokenizer)
    except Exception:  # a configuration holds anything
        return None


def _family(config: Mapping[str, Any]) -> type[VisionTower]:
    if config["model_type"] not in FAMILIES:
        raise Unproven(f"towers of the family {config['model_type']!r} are not read yet")
    return FAMILIES[config["model_type"]]


def _read_tensors(folder: Path) -> dict[str, mx.array]:
    """The tensors of a folder's tower and projector, lazy, by their names in the tower; from any of its files."""
    read = dict[str, mx.array]()
    for file, names in _tower_names(folder):
        tensors: Any = mx.load(str(file), format="safetensors")
        for name in names:
            short = name.removeprefix("model.")
            prefix = next((prefix for prefix in _TOWERS if short.startswith(prefix)), "")
            read[short.removeprefix(prefix)] = tensors[name]
    return {} if all(name.startswith(_PROJECTORS) for name in read) else read


def _tower_names(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """The files that hold tensors of a tower, and the names of these."""
    for file in sorted(folder.glob("*.safetensors")):
        wanted = (*_TOWERS, *_PROJECTORS)
        if names := [name for name in weights.read_header(file) if name.removeprefix("model.").startswith(wanted)]:
            yield file, names


def keep_vision(folder: Path, target: Path) -> None:
    """Copies a model's tower and its configuration to the folder of a conversion, beside the text model."""
    tensors, config = _read_tensors(folder), weights.read_json(folder / "config.json")
    if not tensors or config.get("model_type") not in FAMILIES:
        return
    prefixes = {name: "" if name.startswith(_PROJECTORS) else "vision_tower." for name in tensors}
    named = {prefixes[name] + name: array for name, array in tensors.items()}
    mx.save_safetensors(str(target / "model-vision.safetensors"), named, metadata={"format": "mlx"})
    written = weights.read_json(target / "config.json")
    if "vision_config" in config:
        written.setdefault("vision_config", config["vision_config"])
    (target / "config.json").write_text(json.dumps(written, indent=4), encoding="utf-8")
    for name in _PROCESSOR_FILES:
        if (folder / name).is_file():
            shutil.copy(folder / name, target / name)


def _tower(
    family: type[VisionTower], folder: Path, config: Mapping[str, Any], tensors: dict[str, mx.array], max_tokens: int
) -> VisionTower:
    read = family.sanitized(tensors)
    tower = family(config, family.images_of(folder, config, max_tokens))
    pack_like(tower, read)
    tower.load_weights(list(read.items()))
    tower.eval()
    return tower
