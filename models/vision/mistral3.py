"""Mistral 3's and Ministral 3's way to see: Pixtral, of which a square of patches becomes a token.

An image keeps its shape and is scaled down to the longest side that a processor allows. A row of tokens ends with a
token of the text model's, which takes a place of the picture (Pixtral 12B, 2024). Attention is causal.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from numpy.typing import NDArray

from models.prompt.pictures import Picture
from models.vision.layers import VisionInputs
from models.vision.towers import (
    Attention,
    Block,
    GatedPerceptron,
    Images,
    Unproven,
    VisionTower,
    activation_of,
    cos_and_sin,
    frequencies_of,
    pixel_rules,
    processor_settings,
)

_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_ROW_ENDS = ("[IMG_BREAK]", "[IMG_END]")
_TEXT_MODELS = ("mistral", "ministral3")


@dataclass(frozen=True)
class MistralImages(Images):
    """What the processor of a folder does to images. A row has one token more than there are of the image."""

    longest_edge: int

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """As `Images.grid`."""
        side, edge = self.patch * self.merge, min(self.longest_edge, max(width, height))
        while True:
            shrink = max(1.0, height / edge, width / edge)
            rows, columns = (math.ceil(max(1, math.floor(one / shrink)) / side) for one in (height, width))
            if rows * (columns + 1) <= self.max_tokens or edge <= side:
                return rows, columns + 1
            edge -= side if edge > 2 * side else edge - side

    def patches_of(self, picture: Picture) -> tuple[int, int]:
        """As `Images.patches_of`."""
        return picture.grid[0] * self.merge, (picture.grid[1] - 1) * self.merge


class MistralTower(VisionTower):
    """Pixtral and Mistral 3's projector, with the names of their checkpoints."""

    num_block_matrices = 16
    names = (
        "vision_model.= transformer.= multi_modal_projector.= patch_merger.= "
        "patch_conv.=patch_projection. ffn_norm.=perceptron_norm. feed_forward.=perceptron."
    )

    def __init__(self, config: Mapping[str, Any], images: Images) -> None:
        """As `VisionTower`."""
        super().__init__(config, images)
        vision, text, width = config["vision_config"], config["text_config"], self._width
        if config.get("vision_feature_layer", -1) != -1:
            raise Unproven("its features are of a layer before the last")
        rope = vision.get("rope_parameters") or {}
        self._theta = float(rope.get("rope_theta") or vision.get("rope_theta") or 10_000)
        self._head = width // vision["num_attention_heads"]
        linear, norm = partial(Linear, bias=False), partial(RMSNorm, width, eps=1e-5)
        self.patch_projection, self.ln_pre = linear(3 * images.patch**2, width), norm()
        activation = activation_of(vision, "hidden_act", "gelu")
        attention = partial(Attention, linear, width, vision["num_attention_heads"])
        perceptron = partial(GatedPerceptron, linear, width, vision["intermediate_size"], activation)
        self.layers = [Block(attention, perceptron, norm) for _ in range(vision["num_hidden_layers"])]
        has_bias, out = bool(config.get("multimodal_projector_bias")), text["hidden_size"]
        self.norm = RMSNorm(width, eps=text.get("rms_norm_eps", 1e-5))
        self.merging_layer = Linear(width * images.merge**2, width, bias=False)
        self.linear_1, self.linear_2 = Linear(width, out, bias=has_bias), Linear(out, out, bias=has_bias)
        self._activation = activation_of(config, "projector_hidden_act", "gelu")
        self._row_ends = mx.zeros((2, out))

    @staticmethod
    def images_of(folder: Path, config: Mapping[str, Any], max_tokens: int) -> Images:
        """As `VisionTower.images_of`."""
        given, vision = processor_settings(folder), config["vision_config"]
        edge = int((given.get("size") or {}).get("longest_edge") or vision["image_size"])
        patch, merge = int(vision["patch_size"]), int(config.get("spatial_merge_size") or 2)
        rules = pixel_rules(given, _MEAN, _STD)
        return MistralImages(patch, merge, **rules, is_whole=False, max_tokens=max_tokens, longest_edge=edge)

    def attach(self, text: Any, config: Mapping[str, Any], inputs: VisionInputs, tokenizer: Any) -> None:
        """As `VisionTower.attach`; keeps what the text model has for the ends of rows."""
        kind = config["text_config"].get("model_type")
        if kind not in _TEXT_MODELS:
            raise Unproven(f"its text model {kind!r} was not compared")
        tokens = [tokenizer.convert_tokens_to_ids(name) for name in _ROW_ENDS]
        # MLX checks no index.
        is_embedded = all(isinstance(token, int) and token < config["text_config"]["vocab_size"] for token in tokens)
        if not is_embedded or tokenizer.convert_ids_to_tokens(tokens) != [*_ROW_ENDS]:
            raise Unproven("it has no tokens for the ends of rows")
        self._row_ends = text.embed_tokens(mx.array(tokens))
        mx.eval(self._row_ends)
        super().attach(text, config, inputs, tokenizer)

    def _embedded(self, picture: Picture, pixels: NDArray[np.float32]) -> tuple[mx.array, tuple[mx.array, ...]]:
        rows, columns = (one.reshape(-1) for one in np.indices(self.images.patches_of(picture)))
        frequencies = frequencies_of(self._theta, self._head)
        # Rows turn every other pair of a head, columns those between.
        angles = [rows[:, None] * frequencies[::2], columns[:, None] * frequencies[1::2]] * 2
        hidden = self.patch_projection(mx.array(pixels).astype(self.ln_pre.weight.dtype))
        return self.ln_pre(hidden), cos_and_sin(np.concatenate(angles, axis=-1))

    def _rows(self, picture: Picture, hidden: mx.array) -> mx.array:
        (rows, columns), merge = picture.grid, self.images.merge
        squares = self.norm(hidden).reshape(rows, merge, columns - 1, merge, -1).transpose(0, 2, 4, 1, 3)
        merged = self.merging_layer(squares.reshape(rows * (columns - 1), -1))
        tokens: mx.array = self.linear_2(self._activation(self.linear_1(merged)))
        places = mx.array([0] * (rows - 1) + [1])
        ends = self._row_ends[places][:, None].astype(tokens.dtype)
        return mx.concatenate([tokens.reshape(rows, columns - 1, -1), ends], axis=1).reshape(rows * columns, -1)
