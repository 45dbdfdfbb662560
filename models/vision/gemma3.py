"""Gemma 3's way to see: a square of fixed size, read by SigLIP, and averaged to a square of tokens.

Whatever its size, an image becomes a square and takes the same number of tokens (Gemma 3 Technical Report, 2025);
crops of long images, which the report calls pan and scan, are not made. The places of a picture attend to each other
in every layer, within its window where it has one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm, RMSNorm
from numpy.typing import NDArray

from models.prompt.pictures import Picture, Placeholder
from models.vision.layers import MutualLayer, SeeingEmbedding, VisionInputs
from models.vision.towers import (
    Attention,
    Block,
    Images,
    Perceptron,
    Unproven,
    VisionTower,
    activation_of,
    image_token,
    pixel_rules,
    processor_settings,
    token_texts,
)

_BILINEAR = 2


@dataclass(frozen=True)
class Gemma3Images(Images):
    """What the processor of a folder does to images."""

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """As `Images.grid`."""
        side = math.isqrt(self.max_tokens)
        return side, side


class Gemma3Tower(VisionTower):
    """SigLIP (2023) and Gemma 3's projector."""

    num_block_matrices = 12
    names = (
        "multi_modal_projector.mm_input_projection_weight=projection multi_modal_projector.mm_soft_emb_norm.=norm. "
        "vision_model.= embeddings.= encoder.= patch_embedding.=patch_projection. self_attn.=attention. "
        "mlp.=perceptron. out_proj.=o_proj. layer_norm1.=attention_norm. layer_norm2.=perceptron_norm."
    )

    def __init__(self, config: Mapping[str, Any], images: Images) -> None:
        """As `VisionTower`."""
        super().__init__(config, images)
        vision, width, eps = config["vision_config"], self._width, config["vision_config"].get("layer_norm_eps", 1e-6)
        self.patch_projection = Linear(3 * images.patch**2, width)
        self.position_embedding = Embedding(images.max_tokens * images.merge**2, width)
        activation = activation_of(vision, "hidden_act", "gelu_pytorch_tanh")
        attention = partial(Attention, Linear, width, vision["num_attention_heads"])
        perceptron = partial(Perceptron, width, vision["intermediate_size"], activation)
        norm = partial(LayerNorm, width, eps=eps)
        self.layers = [Block(attention, perceptron, norm) for _ in range(vision["num_hidden_layers"])]
        self.post_layernorm, self.norm = LayerNorm(width, eps=eps), RMSNorm(width, eps=eps)
        self.projection = mx.zeros((width, config["text_config"]["hidden_size"]))

    @staticmethod
    def images_of(folder: Path, config: Mapping[str, Any], max_tokens: int) -> Images:
        """As `VisionTower.images_of`; an image has a fixed number of tokens."""
        given, vision = processor_settings(folder), config["vision_config"]
        if given.get("do_pan_and_scan"):
            raise Unproven("its processor cuts images into crops (pan and scan)")
        num_tokens, patch = int(config.get("mm_tokens_per_image") or 256), int(vision["patch_size"])
        side = vision["image_size"] // patch
        merge = side // math.isqrt(num_tokens)
        if merge * math.isqrt(num_tokens) != side:
            raise Unproven(f"its {side}x{side} patches are not averaged evenly to {num_tokens} tokens")
        rules = pixel_rules(given, (0.5,) * 3, (0.5,) * 3, _BILINEAR)
        return Gemma3Images(patch, merge, **rules, is_whole=True, max_tokens=num_tokens)

    @classmethod
    def sanitized(cls, tensors: dict[str, mx.array]) -> dict[str, mx.array]:
        """As `VisionTower.sanitized`; what SigLIP classifies with is left out."""
        read = super().sanitized({name: array for name, array in tensors.items() if ".head." not in f".{name}"})
        return {**read, "norm.weight": 1 + read["norm.weight"].astype(mx.float32)}

    @staticmethod
    def placeholder(config: Mapping[str, Any], tokenizer: Any) -> Placeholder:
        """As `VisionTower.placeholder`: what the processor of the family writes for its first token."""
        token = image_token(config)
        begin, image, end = token_texts(tokenizer, config["boi_token_index"], token, config["eoi_token_index"])
        return Placeholder(begin, token, f"\n\n{begin}{image}{end}\n\n", (begin, image))

    def attach(self, text: Any, config: Mapping[str, Any], inputs: VisionInputs, tokenizer: Any) -> None:
        """As `VisionTower.attach`."""
        text.layers = [MutualLayer(layer, inputs) for layer in text.layers]
        # As the model rounds it.
        scale = float(mx.array(config["text_config"]["hidden_size"] ** 0.5, mx.bfloat16))
        text.embed_tokens = SeeingEmbedding(text.embed_tokens, inputs, scale)

    def _embedded(self, picture: Picture, pixels: NDArray[np.float32]) -> tuple[mx.array, tuple[mx.array, ...]]:
        places = self.position_embedding(mx.arange(len(pixels)))
        return self.patch_projection(mx.array(pixels).astype(places.dtype)) + places, ()

    def _rows(self, picture: Picture, hidden: mx.array) -> mx.array:
        (rows, columns), merge = picture.grid, self.images.merge
        squares = self.post_layernorm(hidden).reshape(rows, merge, columns, merge, -1)
        averages = squares.mean(axis=(1, 3)).reshape(rows * columns, -1)
        return mx.matmul(self.norm(averages), self.projection)
