"""Gemma 4's way to see: an image of any shape, read patch by patch, and averaged to at most so many tokens.

An image is scaled up or down to nearly as many tokens as a processor allows, 280 where its folder says no other
number. In the models of 26B and 31B the places of a picture attend to each other in layers with a window, and only
there. Models that get patches without a tower (12B) are another family.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from numpy.typing import NDArray

from models.prompt.pictures import Picture, Placeholder
from models.vision.layers import MutualLayer, PaddedEmbedding, SeeingEmbedding, VisionInputs
from models.vision.towers import (
    Attention,
    GatedPerceptron,
    Images,
    Unproven,
    VisionTower,
    activation_of,
    attend,
    cos_and_sin,
    frequencies_of,
    image_token,
    pixel_rules,
    processor_settings,
    token_texts,
    turned,
)

_TOKEN_LIMITS = (70, 140, 280, 560, 1120)
"""The numbers of tokens that the models were trained for."""


@dataclass(frozen=True)
class Gemma4Images(Images):
    """What the processor of a folder does to images."""

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """As `Images.grid`."""
        scale = math.sqrt(self.max_tokens * (self.patch * self.merge) ** 2 / (width * height))
        rows, columns = (math.floor(scale * side / (self.patch * self.merge)) for side in (height, width))
        if not rows:
            return 1, min(width // height, self.max_tokens)
        return (rows, columns) if columns else (min(height // width, self.max_tokens), 1)


class _Clipped(Module):
    """A linear layer whose input and output are clipped, where a model has it so."""

    def __init__(self, width: int, out: int, *, clips: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.linear = Linear(width, out, bias=False)
        self._clips = clips
        if clips:
            self.input_min, self.output_min = mx.array(-math.inf), mx.array(-math.inf)
            self.input_max, self.output_max = mx.array(math.inf), mx.array(math.inf)

    def __call__(self, x: mx.array) -> mx.array:
        if not self._clips:
            return self.linear(x)
        return mx.clip(self.linear(mx.clip(x, self.input_min, self.input_max)), self.output_min, self.output_max)


class _Attention(Attention):
    def __init__(self, config: Mapping[str, Any], linear: Callable[[int, int], Module]) -> None:
        head, self._eps = config["head_dim"], config.get("rms_norm_eps", 1e-6)
        super().__init__(linear, config["hidden_size"], config["num_attention_heads"], head)
        self.q_norm, self.k_norm = RMSNorm(head, eps=self._eps), RMSNorm(head, eps=self._eps)

    def _attended(self, queries: mx.array, keys: mx.array, values: mx.array, *angles: mx.array) -> mx.array:
        queries, keys = (_turned_by_axis(one, *angles) for one in (self.q_norm(queries), self.k_norm(keys)))
        return attend(queries, keys, mx.fast.rms_norm(values, None, self._eps), 1.0)


def _turned_by_axis(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """The first half of a head turns by column, the second by row."""
    halves = zip(*(mx.split(one, 2, axis=-1) for one in (x, cos, sin)), strict=True)
    return mx.concatenate([turned(*half) for half in halves], axis=-1)


class _Block(Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        width, eps = config["hidden_size"], config.get("rms_norm_eps", 1e-6)
        linear = partial(_Clipped, clips=bool(config.get("use_clipped_linears")))
        self.self_attn = _Attention(config, linear)
        activation = activation_of(config, "hidden_activation", "gelu_pytorch_tanh")
        self.mlp = GatedPerceptron(linear, width, config["intermediate_size"], activation)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(width, eps=eps), RMSNorm(width, eps=eps)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = (RMSNorm(width, eps=eps) for _ in range(2))

    def __call__(self, hidden: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
        attended = self.self_attn(self.input_layernorm(hidden), cos, sin)
        hidden = hidden + self.post_attention_layernorm(attended)
        made: mx.array = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden)))
        return hidden + made


class Gemma4Tower(VisionTower):
    """Gemma 4's tower and projector, with the names of their checkpoints."""

    num_block_matrices = 16
    names = "embed_vision.= patch_embedder.= encoder.= input_proj.=patch_projection."

    def __init__(self, config: Mapping[str, Any], images: Images) -> None:
        """As `VisionTower`."""
        super().__init__(config, images)
        vision, width = config["vision_config"], self._width
        self._head, self._eps = int(vision["head_dim"]), vision.get("rms_norm_eps", 1e-6)
        self._theta = float((vision.get("rope_parameters") or {}).get("rope_theta", 100.0))
        self.patch_projection = Linear(3 * images.patch**2, width, bias=False)
        self.position_embedding_table = mx.zeros((2, vision.get("position_embedding_size", 10_240), width))
        self.layers = [_Block(vision) for _ in range(vision["num_hidden_layers"])]
        self._is_standardized = bool(vision.get("standardize"))
        if self._is_standardized:
            self.std_bias, self.std_scale = mx.zeros(width), mx.ones(width)
        self.embedding_projection = Linear(width, config["text_config"]["hidden_size"], bias=False)

    @staticmethod
    def images_of(folder: Path, config: Mapping[str, Any], max_tokens: int) -> Images:
        """As `VisionTower.images_of`: the most of the family's numbers of tokens, or the least of them."""
        given, vision = processor_settings(folder), config["vision_config"]
        wanted = min(max_tokens, int(given.get("max_soft_tokens") or 280))
        limit = max((one for one in _TOKEN_LIMITS if one <= wanted), default=_TOKEN_LIMITS[0])
        # The model itself takes 2 x - 1 of values from 0 to 1.
        rules = pixel_rules({"resample": given.get("resample")}, (0.5,) * 3, (0.5,) * 3)
        patch, merge = int(vision.get("patch_size") or 16), int(vision.get("pooling_kernel_size") or 3)
        return Gemma4Images(patch, merge, **rules, is_whole=_is_mutual(config), max_tokens=limit)

    @staticmethod
    def placeholder(config: Mapping[str, Any], tokenizer: Any) -> Placeholder:
        """As `VisionTower.placeholder`: what the processor of the family writes for its first token."""
        token = image_token(config)
        ends = config.get("boi_token_id", 255_999), config.get("eoi_token_id", 258_882)
        begin, image, end = token_texts(tokenizer, ends[0], token, ends[1])
        return Placeholder(image, token, f"{begin}{image}{end}", (image,))

    def attach(self, text: Any, config: Mapping[str, Any], inputs: VisionInputs, tokenizer: Any) -> None:
        """As `VisionTower.attach`."""
        given, vision = config["text_config"], config["vision_config"]
        if vision.get("num_key_value_heads") not in (None, vision["num_attention_heads"]):
            raise Unproven("heads of its tower share keys")
        if given.get("use_bidirectional_attention") not in (None, "vision"):
            raise Unproven("all its tokens attend to each other")
        if _is_mutual(config):
            for index, layer in enumerate(text.layers):
                if layer.layer_type == "sliding_attention":
                    text.layers[index] = MutualLayer(layer, inputs)
        if (inner := text.embed_tokens_per_layer) is not None:
            text.embed_tokens_per_layer = PaddedEmbedding(inner, int(given.get("pad_token_id") or 0))
        text.embed_tokens = SeeingEmbedding(text.embed_tokens, inputs, text.embed_scale)

    def _embedded(self, picture: Picture, pixels: NDArray[np.float32]) -> tuple[mx.array, tuple[mx.array, ...]]:
        rows, columns = (one.reshape(-1) for one in np.indices(self.images.patches_of(picture)))
        table = self.position_embedding_table
        places = table[0][mx.array(columns)] + table[1][mx.array(rows)]
        frequencies = frequencies_of(self._theta, self._head // 2)
        by_column, by_row = columns[:, None] * frequencies, rows[:, None] * frequencies
        angles = np.concatenate([by_column, by_column, by_row, by_row], axis=-1)
        return self.patch_projection(mx.array(pixels).astype(places.dtype)) + places, cos_and_sin(angles)

    def _rows(self, picture: Picture, hidden: mx.array) -> mx.array:
        (rows, columns), merge = picture.grid, self.images.merge
        squares = hidden.astype(mx.float32).reshape(rows, merge, columns, merge, -1)
        pooled = squares.mean(axis=(1, 3)).reshape(rows * columns, -1) * self._width**0.5
        if self._is_standardized:
            pooled = (pooled - self.std_bias) * self.std_scale
        normed = mx.fast.rms_norm(pooled.astype(hidden.dtype), None, self._eps)
        return self.embedding_projection(normed)


def _is_mutual(config: Mapping[str, Any]) -> bool:
    return bool(config["text_config"].get("use_bidirectional_attention") == "vision")
