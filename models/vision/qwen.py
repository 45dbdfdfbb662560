"""Qwen3-VL's and Qwen3.5's way to see: how an image is cut into patches, and the tower that reads these.

An image is scaled to sides that are multiples of a token's, and cut into patches; a square of patches becomes a token
(Qwen3-VL Technical Report, 2025). Sizes are chosen as the family's processor in transformers chooses them.
"""

import json
import math
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.activations import gelu, gelu_approx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm
from numpy.typing import NDArray

from models import weights
from models.errors import InvalidImage
from models.prompt.pictures import Picture, digest_of
from models.vision.features import Features
from models.vision.image_files import read_header, read_pixels

_MAX_ASPECT = 200
_FUSED_WIDTHS = (64, 80, 128)
"""Widths of heads for which MLX has a kernel that keeps no matrix of all pairs."""


@dataclass(frozen=True)
class QwenImages:
    """What the processor of a folder does to images."""

    patch: int
    """The side of a patch in pixels."""
    merge: int
    """The side of a token in patches."""
    frames: int
    """Times that an image stands in its patches, as in a film."""
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def read(cls, folder: Path, vision: Mapping[str, Any], max_tokens: int) -> "QwenImages":
        """Reads a model's folder and its `vision_config`, with at most `max_tokens` for an image."""
        nested = weights.read_json(folder / "processor_config.json").get("image_processor")
        given = {
            **(nested if isinstance(nested, dict) else {}),
            **weights.read_json(folder / "preprocessor_config.json"),
        }
        patch, merge, size = int(vision["patch_size"]), int(vision["spatial_merge_size"]), given.get("size") or {}
        token_pixels = (patch * merge) ** 2
        least = size.get("shortest_edge") or given.get("min_pixels") or 64 * token_pixels
        most = size.get("longest_edge") or given.get("max_pixels") or 16_384 * token_pixels
        mean, std = (tuple(given.get(name) or (0.5,) * 3) for name in ("image_mean", "image_std"))
        most = min(int(most), max_tokens * token_pixels)
        return cls(patch, merge, int(vision["temporal_patch_size"]), min(int(least), most), most, mean, std)

    @cached_property
    def _processing(self) -> str:
        return json.dumps([{**asdict(self), "max_pixels": None, "min_pixels": None}, version("pillow")])

    def open(self, data: bytes) -> Picture:
        """The picture in an encoded file, from its header; raises InvalidImage."""
        width, height = read_header(data).size
        grid = self._grid(width, height)
        return Picture(digest_of(data, f"{self._processing} {grid}"), data, width, height, grid)

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tokens."""
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
        """`[num_patches, values]`, square by square; raises InvalidImage."""
        rows, columns = picture.grid
        side, merge, patch = self.patch * self.merge, self.merge, self.patch
        # Not at the top: text needs none of it.
        from PIL import Image

        image = read_pixels(picture.data).resize((columns * side, rows * side), Image.Resampling.BICUBIC)
        values: NDArray[Any] = np.asarray(image, np.float32) / np.float32(255)
        values = (values - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        squares = values.reshape(rows, merge, patch, columns, merge, patch, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        filmed = np.repeat(squares[:, :, :, :, :, None], self.frames, axis=5)
        return np.ascontiguousarray(filmed.reshape(rows * columns * merge**2, -1))


class _Attention(Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.qkv, self.proj = Linear(width, 3 * width), Linear(width, width)
        self._num_heads = num_heads

    def __call__(self, hidden: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
        queries, keys, values = self.qkv(hidden).reshape(len(hidden), 3, self._num_heads, -1).transpose(1, 2, 0, 3)
        queries, keys = _turned(queries, cos, sin), _turned(keys, cos, sin)
        width = values.shape[-1]
        missing = next((fused for fused in _FUSED_WIDTHS if fused >= width), width) - width
        padded = [mx.pad(one, [(0, 0), (0, 0), (0, missing)])[None] for one in (queries, keys, values)]
        output = mx.fast.scaled_dot_product_attention(*padded, scale=width**-0.5)[0, :, :, :width]
        return self.proj(output.transpose(1, 0, 2).reshape(len(hidden), -1))


def _turned(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    wide, half = x.astype(mx.float32), x.shape[-1] // 2
    other = mx.concatenate([-wide[..., half:], wide[..., :half]], axis=-1)
    return (wide * cos + other * sin).astype(x.dtype)


class _Perceptron(Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.linear_fc1, self.linear_fc2 = Linear(width, inner), Linear(inner, width)

    def __call__(self, hidden: mx.array) -> mx.array:
        return self.linear_fc2(gelu_approx(self.linear_fc1(hidden)))


class _Block(Module):
    def __init__(self, width: int, inner: int, num_heads: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.norm1, self.norm2 = LayerNorm(width, eps=1e-6), LayerNorm(width, eps=1e-6)
        self.attn, self.mlp = _Attention(width, num_heads), _Perceptron(width, inner)

    def __call__(self, hidden: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
        hidden = hidden + self.attn(self.norm1(hidden), cos, sin)
        return hidden + self.mlp(self.norm2(hidden))


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


class QwenTower(Module):
    """The tower of Qwen3-VL and Qwen3.5, with the names of their checkpoints."""

    def __init__(self, config: Mapping[str, Any], images: QwenImages) -> None:
        """`config` is the model's `vision_config`."""
        super().__init__()  # type: ignore[no-untyped-call]
        width, out, num_patches = config["hidden_size"], config["out_hidden_size"], images.merge**2
        self._images, self._width, self._num_heads = images, width, config["num_heads"]
        self._damaged = set[bytes]()
        self._deep: list[int] = config.get("deepstack_visual_indexes") or []
        self._side = math.isqrt(config["num_position_embeddings"])
        self.patch_embed = Linear(3 * images.frames * images.patch**2, width)
        self.pos_embed = Embedding(config["num_position_embeddings"], width)
        inner = config["intermediate_size"]
        self.blocks = [_Block(width, inner, self._num_heads) for _ in range(config["depth"])]
        self.merger = _Merger(width, num_patches, out, is_deep=False)
        self.deepstack_merger_list = [_Merger(width, num_patches, out, is_deep=True) for _ in self._deep]

    @staticmethod
    def sanitized(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
        """Tensors as this class names them; the kernel over patches becomes a matrix, whichever axis is its last."""
        kernel = tensors.pop("patch_embed.proj.weight")
        if kernel.shape[1] != 3:
            kernel = kernel.transpose(0, 4, 1, 2, 3)
        bias = tensors.pop("patch_embed.proj.bias")
        return {**tensors, "patch_embed.weight": kernel.reshape(len(kernel), -1), "patch_embed.bias": bias}

    def pixels(self, picture: Picture) -> NDArray[np.float32]:
        """As `Tower.pixels`."""
        try:
            return self._images.patches(picture)
        except InvalidImage:
            self.damaged.add(picture.digest)
            raise

    @property
    def damaged(self) -> set[bytes]:
        """The digests of pictures whose pixels could not be decoded."""
        return self._damaged

    def step_operations(self, picture: Picture) -> float:
        """As `Tower.step_operations`: of a block, whose matrices have about twelve times the width squared."""
        num_patches = picture.num_tokens * self._images.merge**2
        return float(num_patches * (2 * 12 * self._width**2 + 4 * num_patches * self._width))

    def steps(self, picture: Picture, pixels: NDArray[np.float32]) -> Generator[mx.array, None, Features]:
        """As `Tower.steps`."""
        rows, columns = self._places(picture)
        cos, sin = self._angles(rows, columns)
        places = self._embedded_places(picture, rows, columns)
        hidden = self.patch_embed(mx.array(pixels).astype(places.dtype)) + places
        deepstack = list[mx.array]()
        for number, block in enumerate(self.blocks):
            hidden = block(hidden, cos, sin)
            yield hidden
            if number in self._deep:
                deepstack.append(self.deepstack_merger_list[len(deepstack)](hidden))
                yield deepstack[-1]
        merged = self.merger(hidden)
        yield merged
        return Features(merged, tuple(deepstack))

    def _places(self, picture: Picture) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Row and column of each patch, square by square."""
        merge, (rows, columns) = self._images.merge, picture.grid
        places = np.indices((rows * merge, columns * merge)).reshape(2, rows, merge, columns, merge)
        flat = places.transpose(0, 1, 3, 2, 4).reshape(2, -1)
        return flat[0], flat[1]

    def _angles(self, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> tuple[mx.array, mx.array]:
        """Cosines and sines, `[num_patches, head_width]`: a quarter of a head's width turns by row, one by column."""
        half = self._width // self._num_heads // 2
        frequencies = np.float32(10_000) ** (-np.arange(0, half, 2, dtype=np.float32) / np.float32(half))
        angles = np.concatenate([rows[:, None] * frequencies, columns[:, None] * frequencies] * 2, axis=-1)
        return mx.array(np.cos(angles).astype(np.float32)), mx.array(np.sin(angles).astype(np.float32))

    def _embedded_places(self, picture: Picture, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> mx.array:
        """The square of learned positions, stretched over the picture: the four next to each patch, weighed."""
        merge, (height, width) = self._images.merge, picture.grid
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
    behind = at - before
    return [(before, 1 - behind), (np.minimum(before + 1, side - 1), behind.astype(np.float32))]
