"""Tiny models that see: a text model of `tiny_models`, and a tower of seeded weights."""

import functools
import io
import json
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from PIL import Image
from tokenizers import AddedToken

from models.vision.loading import FAMILIES as FAMILIES_OF_TOWERS
from models.vision.towers import VisionTower
from tests.support import tiny_models

PAD = "<|image_pad|>"
BEGIN, END = "<|vision_start|>", "<|vision_end|>"
QWEN = ("qwen3_vl", "qwen3_5")
FAMILIES = (*QWEN, "gemma3", "gemma4", "mistral3")
BOUNDS = ("_min", "_max")
ROW_ENDS = ("[IMG_BREAK]", "[IMG_END]")
PROCESSOR = {"size": {"shortest_edge": 256, "longest_edge": 16_384}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 64,
    "in_channels": 3,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 4,
}


@functools.cache
def config_of(family: str) -> dict[str, Any]:
    """Returns the configuration of a tiny model of a family."""
    text: dict[str, Any]
    vision: dict[str, Any]
    begin, end, pad = tokenizer().convert_tokens_to_ids([BEGIN, END, PAD])
    if family == "gemma4":
        text = {**tiny_models.EXTRA_CONFIGS["gemma4"], "use_bidirectional_attention": "vision", "sliding_window": 12}
        tokens = {"boi_token_id": begin, "eoi_token_id": end, "image_token_id": pad, "vocab_size": tiny_models.VOCAB}
        sizes = {"head_dim": 16, "pooling_kernel_size": 2, "position_embedding_size": 64}
        vision = {**TOWER, **sizes, "use_clipped_linears": True, "standardize": True}
        return {"model_type": family, "text_config": text, "vision_config": vision, **tokens}
    if family == "mistral3":
        text = {**tiny_models.CONFIGS["llama"], "model_type": "mistral", "vocab_size": len(tokenizer())}
        mistral = {"model_type": family, "text_config": text, "vision_config": TOWER}
        return {**mistral, "image_token_index": pad}
    if family == "gemma3":
        text = {**tiny_models.CONFIGS["gemma3"], "sliding_window": 12}
        tokens = {"boi_token_index": begin, "eoi_token_index": end, "image_token_index": pad}
        sizes = {"vocab_size": tiny_models.VOCAB, "mm_tokens_per_image": 16}
        return {"model_type": family, "text_config": text, "vision_config": TOWER, **tokens, **sizes}
    dense = tiny_models.CONFIGS["qwen3"]
    text = dict(tiny_models.CONFIGS["qwen3_5"]["text_config"]) if family == "qwen3_5" else {**dense, "head_dim": 16}
    rope = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    if family == "qwen3_vl":
        text["rope_scaling"] = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    else:
        text["rope_parameters"] = {**text["rope_parameters"], **rope}
    vision = {**VISION, "out_hidden_size": text["hidden_size"]}
    if family == "qwen3_vl":
        vision["deepstack_visual_indexes"] = [0, 1]
    return {"model_type": family, "text_config": text, "vision_config": vision, "image_token_id": pad}


@functools.cache
def tokenizer() -> Any:
    """Returns a tokenizer with a token for pictures, whose template shows these."""
    found = tiny_models.tokenizer.__wrapped__()
    spare = [AddedToken(name, special=True, normalized=False) for name in (PAD, BEGIN, END, *ROW_ENDS)]
    found.add_tokens(spare, special_tokens=True)
    shown = (
        "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
        "{{ '<|image_pad|>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
    )
    found.chat_template = tiny_models.CHAT_TEMPLATE.replace("{{ message.content }}", shown)
    return found


def make_tower(config: dict[str, Any], folder: Path) -> VisionTower:
    """Returns the tower of a configuration, without weights."""
    kind = FAMILIES_OF_TOWERS[config["model_type"]]
    return kind(config, kind.images_of(folder, config, 100))


def write(family: str, folder: Path, **changes: Any) -> Path:
    """Writes a tiny model that sees as a folder; `changes` are of its configuration. Returns `folder`."""
    config = {**config_of(family), **changes}
    model = tiny_models.make(config)
    tower: Any = make_tower(config, folder)
    generator = np.random.default_rng(3)
    shapes = {name: array.shape for name, array in cast(Any, tree_flatten(tower.parameters()))}
    scales = {name: 3.0 / shape[-1] ** 0.5 if len(shape) > 1 else 0.3 for name, shape in shapes.items()}
    seeded = {name: generator.normal(0, scales[name], shape) for name, shape in shapes.items()}
    seeded |= {name: np.full((), 1.5 if name.endswith("_max") else -1.5) for name in shapes if name[-4:] in BOUNDS}
    if family in QWEN:
        seeded["patch_projection.weight"] = seeded["patch_projection.weight"].reshape(-1, 3, 2, 4, 4)
        seeded = {_checkpoint_name(tower, name): array for name, array in seeded.items()}
    folder.mkdir(parents=True, exist_ok=True)
    text = dict(tree_flatten(cast(Any, model).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), text, metadata={"format": "mlx"})
    towers = {f"vision_tower.{name}": mx.array(array.astype(np.float32)) for name, array in seeded.items()}
    mx.save_safetensors(str(folder / "model-vision.safetensors"), towers, metadata={"format": "mlx"})
    tokenizer().save_pretrained(str(folder))
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": tokenizer().eos_token_id}))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def _checkpoint_name(tower: VisionTower, name: str) -> str:
    for part in tower.names.split():
        theirs, _, ours = part.partition("=")
        name = name.replace(ours, theirs)
    return name


@functools.cache
def image(seed: int, width: int = 48, height: int = 32) -> bytes:
    """Returns a PNG of noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    return buffer.getvalue()
