"""Qwen3-VL's and Qwen3.5's way to see: how an image is cut into patches, and the tower that reads these.

An image is scaled to sides that are multiples of a token's, and cut into patches; a square of patches becomes a token
(Qwen3-VL Technical Report, 2025). Sizes are chosen as the family's processor in transformers chooses them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
from mlx.nn.layers.activations import gelu, gelu_approx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm
from mlx.nn.layers.positional_encoding import RoPE
from numpy.typing import NDArray

from models.errors import InvalidImage
from models.prompt.pictures import Picture
from models.vision.layers import DeepstackLayer, SeeingRope, VisionInputs
from models.vision.towers import (
    BICUBIC,
    Block,
    Images,
    Perceptron,
    Unproven,
    VisionTower,
    attend,
    cos_and_sin,
    frequencies_of,
    pixel_rules,
    processor_settings,
    turned,
)

_MAX_ASPECT = 200


@dataclass(frozen=True)
class QwenImages(Images):
    """What the processor of a folder does to images."""

    has_axes: ClassVar[bool] = True
    frames: int
    """Times that an image stands in its patches, as in a film."""
    min_pixels: int
    max_pixels: int

    @classmethod
    def read(cls, folder: Path, vision: Mapping[str, Any], max_tokens: int) -> "QwenImages":
        """Reads a model's folder and its `vision_config`, with at most `max_tokens` for an image."""
        given = processor_settings(folder)
        patch, merge, size = int(vision["patch_size"]), int(vision["spatial_merge_size"]), given.get("size") or {}
        token_pixels = (patch * merge) ** 2
        least = size.get("shortest_edge") or given.get("min_pixels") or 64 * token_pixels
        most = size.get("longest_edge") or given.get("max_pixels") or 16_384 * token_pixels
        most = min(int(most), max_tokens * token_pixels)
        # The family's own files all name one way to resample.
        rules = {**pixel_rules(given, (0.5,) * 3, (0.5,) * 3), "resample": BICUBIC, "max_tokens": max_tokens}
        frames, least = int(vision["temporal_patch_size"]), min(int(least), most)
        return cls(patch, merge, **rules, is_whole=False, frames=frames, min_pixels=least, max_pixels=most)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """As `Images.grid`."""
        side, sides = self.patch * self.merge, (height, width)
        if max(sides) > _MAX_ASPECT * min(sides):
            raise InvalidImage(f"the image has {width}x{height} pixels; no side may be {_MAX_ASPECT} times the other")
        grid = [round(one / side) for one in sides]
        pixels = math.prod(grid) * side**2
        if pixels > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            grid = [max(1, math.floor(one / shrink / side)) for one in sides]
        elif pixels < self.min_pixels:
            stretch = math.sqrt(self.min_pixels / (height * width))
            grid = [math.ceil(one * stretch / side) for one in sides]
        return grid[0], grid[1]

    def patches(self, picture: Picture) -> NDArray[np.float32]:
        """As `Images.patches`, but square by square, colour by colour, and as often as there are frames."""
        (rows, columns), merge, patch = picture.grid, self.merge, self.patch
        squares = super().patches(picture).reshape(rows, merge, columns, merge, patch, patch, 3)
        filmed = np.repeat(squares.transpose(0, 2, 1, 3, 6, 4, 5)[:, :, :, :, :, None], self.frames, axis=5)
        return np.ascontiguousarray(filmed.reshape(rows * columns * merge**2, -1))


class _Attention(Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.qkv, self.proj = Linear(width, 3 * width), Linear(width, width)
        self._num_heads = num_heads

    def __call__(self, hidden: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
        queries, keys, values = self.qkv(hidden).reshape(len(hidden), 3, self._num_heads, -1).swapaxes(0, 1)
        queries, keys = turned(queries, cos, sin), turned(keys, cos, sin)
        return self.proj(attend(queries, keys, values, values.shape[-1] ** -0.5))


class _Merger(Module):
    """Makes a token of a square of patches."""

    def __init__(self, width: int, num_patches: int, out: int, *, is_deep: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        wide = width * num_patches
        self.norm = LayerNorm(wide if is_deep else width, eps=1e-6)
        self.linear_fc1, self.linear_fc2 = Linear(wide, wide), Linear(wide, out)
        self._wide, self._is_deep = wide, is_deep

    def __call__(self, hidden: mx.array) -> mx.array:
        if self._is_deep:
            hidden = hidden.reshape(-1, self._wide)
        hidden = self.norm(hidden).reshape(-1, self._wide)
        return self.linear_fc2(gelu(self.linear_fc1(hidden)))


class QwenTower(VisionTower):
    """The tower of Qwen3-VL and Qwen3.5, with the names of their checkpoints."""

    num_block_matrices = 12
    names = (
        "patch_embed.proj.=patch_projection. blocks.=layers. attn.=attention. mlp.linear_=perceptron. "
        "norm1.=attention_norm. norm2.=perceptron_norm."
    )

    def __init__(self, config: Mapping[str, Any], images: QwenImages) -> None:
        """As `VisionTower`."""
        super().__init__(config, images)
        vision = config["vision_config"]
        width, out, num_patches = self._width, vision["out_hidden_size"], images.merge**2
        self._num_heads = vision["num_heads"]
        self._deep = vision.get("deepstack_visual_indexes") or ()
        self._side = math.isqrt(vision["num_position_embeddings"])
        self.patch_projection = Linear(3 * images.frames * images.patch**2, width)
        self.pos_embed = Embedding(vision["num_position_embeddings"], width)
        inner = vision["intermediate_size"]
        attention, norm = partial(_Attention, width, self._num_heads), partial(LayerNorm, width, eps=1e-6)
        perceptron = partial(Perceptron, width, inner, gelu_approx)
        self.layers = [Block(attention, perceptron, norm) for _ in range(vision["depth"])]
        self.merger = _Merger(width, num_patches, out, is_deep=False)
        self.deepstack_merger_list = [_Merger(width, num_patches, out, is_deep=True) for _ in self._deep]

    @staticmethod
    def images_of(folder: Path, config: Mapping[str, Any], max_tokens: int) -> QwenImages:
        """As `VisionTower.images_of`."""
        return QwenImages.read(folder, config["vision_config"], max_tokens)

    def attach(self, text: Any, config: Mapping[str, Any], inputs: VisionInputs, tokenizer: Any) -> None:
        """As `VisionTower.attach`."""
        text_config = config["text_config"]
        rope = text_config.get("rope_parameters") or text_config.get("rope_scaling") or {}
        sections = rope.get("mrope_section") or ()
        attentions = [layer.self_attn for layer in text.layers if "self_attn" in layer]
        for attention in attentions:
            rope = attention.rope
            if type(rope) is not RoPE or rope.scale != 1.0 or rope.traditional or sum(sections) != rope.dims // 2:
                raise Unproven("its positions are none that are known")
        for attention in attentions:
            attention.rope = SeeingRope(attention.rope, inputs, sections)
        for index in range(len(self._deep)):
            text.layers[index] = DeepstackLayer(text.layers[index], inputs, index)
        super().attach(text, config, inputs, tokenizer)

    def _embedded(self, picture: Picture, pixels: NDArray[np.float32]) -> tuple[mx.array, tuple[mx.array, ...]]:
        rows, columns = self._places(picture)
        places = self._embedded_places(picture, rows, columns)
        return self.patch_projection(mx.array(pixels).astype(places.dtype)) + places, self._angles(rows, columns)

    def _rows(self, picture: Picture, hidden: mx.array) -> mx.array:
        return self.merger(hidden)

    def _places(self, picture: Picture) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Row and column of each patch, square by square."""
        merge, (rows, columns) = self.images.merge, picture.grid
        places = np.indices((rows * merge, columns * merge)).reshape(2, rows, merge, columns, merge)
        flat = places.transpose(0, 1, 3, 2, 4).reshape(2, -1)
        return flat[0], flat[1]

    def _angles(self, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> tuple[mx.array, mx.array]:
        """Cosines and sines, `[num_patches, head_width]`: a quarter of a head's width turns by row, one by column."""
        frequencies = frequencies_of(10_000, self._width // self._num_heads // 2)
        angles = np.concatenate([rows[:, None] * frequencies, columns[:, None] * frequencies] * 2, axis=-1)
        return cos_and_sin(angles)

    def _embedded_places(self, picture: Picture, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> mx.array:
        """The square of learned positions, stretched over the picture: the four next to each patch, weighed."""
        merge, (height, width) = self.images.merge, picture.grid
        embedded: mx.array | int = 0
        for row, row_share in _neighbours(rows, height * merge, self._side):
            for column, column_share in _neighbours(columns, width * merge, self._side):
                near = self.pos_embed(mx.array(row * self._side + column))
                embedded = embedded + near * mx.array((row_share * column_share)[:, None]).astype(near.dtype)
        assert isinstance(embedded, mx.array)
        return embedded


def _neighbours(
    places: NDArray[np.int64], count: int, side: int
) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """The learned positions before and after each of `count` places, and the share of each."""
    at = np.linspace(0, side - 1, count, dtype=np.float32)[places]
    before = at.astype(np.int64)
    share = at - before
    return [(before, 1 - share), (np.minimum(before + 1, side - 1), share.astype(np.float32))]
