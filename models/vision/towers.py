"""The base of all families' vision towers: cuts images into patches, and evaluates a tower block by block.

Each family has a module beside this one. The module says how the family sizes images, what names its checkpoints give
tensors, and which layers of its text model take features.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, cast

import mlx.core as mx
import numpy as np
from mlx.nn.layers.activations import gelu, gelu_approx, silu
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from numpy.typing import NDArray

from models import weights
from models.errors import InvalidImage
from models.prompt.pictures import Picture, Placeholder, digest_of
from models.vision.features import Features
from models.vision.image_files import read_header, read_pixels
from models.vision.layers import SeeingEmbedding, VisionInputs

ACTIVATIONS = {"gelu": gelu, "gelu_pytorch_tanh": gelu_approx, "silu": silu}
BICUBIC = 3
"""As Pillow and the files of processors number resampling."""
_FUSED_WIDTHS = (64, 80, 128)
"""Widths of heads for which MLX has a kernel that keeps no matrix of all pairs."""


class Unproven(Exception):
    """A model has a part that was never compared with transformers; the message is a clause."""


def processor_settings(folder: Path) -> dict[str, Any]:
    """What a model's folder says of its image processor."""
    nested = weights.read_json(folder / "processor_config.json").get("image_processor")
    return {
        **(nested if isinstance(nested, dict) else {}),
        **weights.read_json(folder / "preprocessor_config.json"),
    }


def pixel_rules(
    settings: Mapping[str, Any], mean: Sequence[float], std: Sequence[float], resample: int = BICUBIC
) -> dict[str, Any]:
    """The fields `mean`, `std` and `resample` of `Images`: a folder's, or the family's where the folder has none."""
    means = tuple(settings.get("image_mean") or mean), tuple(settings.get("image_std") or std)
    return {"mean": means[0], "std": means[1], "resample": int(settings.get("resample") or resample)}


@dataclass(frozen=True)
class Images(ABC):
    """How a folder's processor makes patches of images. Pictures made by other rules have another digest."""

    has_axes: ClassVar[bool] = False
    patch: int
    """The side of a patch in pixels."""
    merge: int
    """The side of a token in patches."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: int
    is_whole: bool
    """As of `Picture`."""
    max_tokens: int

    @abstractmethod
    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tokens of an image; raises InvalidImage."""

    def patches_of(self, picture: Picture) -> tuple[int, int]:
        """Rows and columns of patches."""
        return picture.grid[0] * self.merge, picture.grid[1] * self.merge

    @cached_property
    def _processing(self) -> str:
        """The digest has the grid as well, which is all that limits change."""
        limits = {"max_tokens", "min_pixels", "max_pixels", "longest_edge"}
        fields = {name: value for name, value in asdict(self).items() if name not in limits}
        return json.dumps([fields, version("pillow")])

    def open(self, data: bytes) -> Picture:
        """The picture in an encoded file, from its header; raises InvalidImage."""
        width, height = read_header(data).size
        grid = self.grid(width, height)
        digest = digest_of(data, f"{self._processing} {grid}")
        return Picture(digest, data, width, height, grid, self.has_axes, self.is_whole)

    def patches(self, picture: Picture) -> NDArray[np.float32]:
        """`[num_patches, values]`, row by row, a patch's values by row, column and colour; raises InvalidImage."""
        (rows, columns), patch = self.patches_of(picture), self.patch
        image = read_pixels(picture.data).resize((columns * patch, rows * patch), self.resample)
        values: NDArray[Any] = np.asarray(image, np.float32) / np.float32(255)
        values = (values - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        squares = values.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 1, 3, 4)
        return np.ascontiguousarray(squares.reshape(rows * columns, -1))


class VisionTower(Module):
    """A tower of a family, a `features.Tower`: it is evaluated block by block."""

    num_block_matrices: ClassVar[float]
    """Weights of a block, in squares of its width."""
    names: ClassVar[str]
    """What parts of the names in checkpoints are called here, as `theirs=ours`; replaced in this order."""
    layers: list[Any]
    deepstack_merger_list: list[Any]

    def __init__(self, config: Mapping[str, Any], images: Images) -> None:
        """`config` is the whole model's."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.images, self._width = images, int(config["vision_config"]["hidden_size"])
        self.damaged = set[bytes]()
        """The digests of pictures whose pixels could not be decoded."""
        self._deep: Sequence[int] = ()
        """After which layers features for `Features.deepstack` are made, each by one of `deepstack_merger_list`."""

    @staticmethod
    def images_of(folder: Path, config: Mapping[str, Any], max_tokens: int) -> Images:
        """The rules for images of a model's folder, with at most `max_tokens` for one where the family can."""
        raise NotImplementedError

    @classmethod
    def sanitized(cls, tensors: dict[str, mx.array]) -> dict[str, mx.array]:
        """Tensors as the class names them; the kernel over patches as a matrix."""
        read = dict[str, mx.array]()
        for name, array in tensors.items():
            for part in cls.names.split():
                theirs, _, ours = part.partition("=")
                name = name.replace(theirs, ours)
            read[name] = as_matrix(array) if name == "patch_projection.weight" else array
        return read

    @staticmethod
    def placeholder(config: Mapping[str, Any], tokenizer: Any) -> Placeholder:
        """What a prompt has in a picture's place before it is known."""
        token = image_token(config)
        (text,) = token_texts(tokenizer, token)
        return Placeholder(text, token, text, (text,))

    def attach(self, text: Any, config: Mapping[str, Any], inputs: VisionInputs, tokenizer: Any) -> None:
        """Wraps what a picture reaches in the body of a text model; nothing where anything is unknown."""
        text.embed_tokens = SeeingEmbedding(text.embed_tokens, inputs)

    def _embedded(self, picture: Picture, pixels: NDArray[np.float32]) -> tuple[mx.array, tuple[mx.array, ...]]:
        """Embedded patches, and what each block takes beside them."""
        raise NotImplementedError

    def _rows(self, picture: Picture, hidden: mx.array) -> mx.array:
        """`Features.rows` of what the last block made."""
        raise NotImplementedError

    def pixels(self, picture: Picture) -> NDArray[np.float32]:
        """As `Tower.pixels`."""
        try:
            return self.images.patches(picture)
        except InvalidImage:
            self.damaged.add(picture.digest)
            raise

    def step_operations(self, picture: Picture) -> float:
        """As `Tower.step_operations`: of a block."""
        rows, columns = self.images.patches_of(picture)
        weights = self.num_block_matrices * self._width**2
        return float(rows * columns * (2 * weights + 4 * rows * columns * self._width))

    def steps(self, picture: Picture, pixels: NDArray[np.float32]) -> Generator[mx.array, None, Features]:
        """As `Tower.steps`."""
        hidden, further = self._embedded(picture, pixels)
        deepstack = list[mx.array]()
        for number, block in enumerate(self.layers):
            hidden = block(hidden, *further)
            yield hidden
            if number in self._deep:
                deepstack.append(self.deepstack_merger_list[len(deepstack)](hidden))
                yield deepstack[-1]
        rows = self._rows(picture, hidden)
        yield rows
        return Features(rows, tuple(deepstack))


def image_token(config: Mapping[str, Any]) -> int:
    """The id of the token that stands for a picture."""
    return int(config["image_token_id"] if "image_token_id" in config else config["image_token_index"])


def token_texts(tokenizer: Any, *tokens: int) -> list[str]:
    """What the tokenizer calls its tokens; raises Unproven."""
    texts = tokenizer.convert_ids_to_tokens(list(tokens))
    if not all(isinstance(text, str) and text for text in texts):
        raise Unproven(f"its tokenizer lacks one of the tokens {', '.join(map(str, tokens))}")
    return list(texts)


def as_matrix(kernel: mx.array) -> mx.array:
    """A kernel over patches, `[out, ...]` with colours first or last, as a matrix over `Images.patches`."""
    if kernel.ndim == 4 and kernel.shape[1] == 3:
        kernel = kernel.transpose(0, 2, 3, 1)
    elif kernel.ndim == 5 and kernel.shape[1] != 3:  # over frames, of which colours are the first axis
        kernel = kernel.transpose(0, 4, 1, 2, 3)
    return kernel.reshape(len(kernel), -1)


def activation_of(config: Mapping[str, Any], name: str, default: str) -> Any:
    """The function that a configuration names; raises Unproven."""
    wanted = config.get(name) or default
    if wanted not in ACTIVATIONS:
        raise Unproven(f"its activation {wanted!r} is not known")
    return ACTIVATIONS[wanted]


class Attention(Module):
    """All patches attend to all, without a kernel's matrix of all pairs where MLX has one for heads so wide."""

    def __init__(
        self, linear: Callable[[int, int], Module], width: int, num_heads: int, head: int | None = None
    ) -> None:
        """`linear` makes a projection; `head` is a head's width where heads do not share `width`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._head = head or width // num_heads
        inner = num_heads * self._head
        self.q_proj, self.k_proj, self.v_proj = (linear(width, inner) for _ in range(3))
        self.o_proj = linear(inner, width)

    def __call__(self, hidden: mx.array, *angles: mx.array) -> mx.array:
        """`[num_patches, width]`, and angles for `turned`, if there are any."""
        layers: Sequence[Any] = (self.q_proj, self.k_proj, self.v_proj)
        parts = (layer(hidden).reshape(len(hidden), -1, self._head) for layer in layers)
        return cast(mx.array, cast(Any, self.o_proj)(self._attended(*parts, *angles)))

    def _attended(self, queries: mx.array, keys: mx.array, values: mx.array, *angles: mx.array) -> mx.array:
        if angles:
            queries, keys = turned(queries, *angles), turned(keys, *angles)
        return attend(queries, keys, values, self._head**-0.5)


class Perceptron(Module):
    """Two layers."""

    def __init__(self, width: int, inner: int, activation: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fc1, self.fc2, self._activation = Linear(width, inner), Linear(inner, width), activation

    def __call__(self, hidden: mx.array) -> mx.array:
        """`[num_patches, width]`."""
        return self.fc2(self._activation(self.fc1(hidden)))


class Block(Module):
    """A layer of a tower: attention, then a perceptron, each evaluated on a norm and added."""

    def __init__(self, attention: Callable[[], Any], perceptron: Callable[[], Any], norm: Callable[[], Any]) -> None:
        """Each makes a part."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.attention_norm, self.perceptron_norm = norm(), norm()
        self.attention, self.perceptron = attention(), perceptron()

    def __call__(self, hidden: mx.array, *angles: mx.array) -> mx.array:
        """`[num_patches, width]`, and what the attention takes beside them."""
        hidden = hidden + self.attention(self.attention_norm(hidden), *angles)
        return cast(mx.array, hidden + self.perceptron(self.perceptron_norm(hidden)))


class GatedPerceptron(Module):
    """Two layers, of which the first has a gate."""

    def __init__(self, linear: Callable[[int, int], Module], width: int, inner: int, activation: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gate_proj, self.up_proj, self.down_proj = (
            linear(width, inner),
            linear(width, inner),
            linear(inner, width),
        )
        self._activation = activation

    def __call__(self, hidden: mx.array) -> mx.array:
        """`[num_patches, width]`."""
        gate, up, down = (cast(Any, layer) for layer in (self.gate_proj, self.up_proj, self.down_proj))
        return cast(mx.array, down(self._activation(gate(hidden)) * up(hidden)))


def attend(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """All places with all, `[num_places, num_heads, head_width]` each; returns `[num_places, width]`."""
    width = values.shape[-1]
    missing = next((fused for fused in _FUSED_WIDTHS if fused >= width), width) - width
    padded = [mx.pad(one.swapaxes(0, 1), [(0, 0), (0, 0), (0, missing)])[None] for one in (queries, keys, values)]
    output = mx.fast.scaled_dot_product_attention(*padded, scale=scale)[0, :, :, :width]
    return output.swapaxes(0, 1).reshape(len(queries), -1)


def turned(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Queries or keys, `[num_places, num_heads, width]`, turned by angles `[num_places, width]`, half by half."""
    wide, half = x.astype(mx.float32), x.shape[-1] // 2
    other = mx.concatenate([-wide[..., half:], wide[..., :half]], axis=-1)
    return (wide * cos[:, None] + other * sin[:, None]).astype(x.dtype)


def frequencies_of(base: float, width: int) -> NDArray[np.float32]:
    """The frequencies of rotary positions, one for each pair of `width` numbers."""
    return np.float32(base) ** (-np.arange(0, width, 2, dtype=np.float32) / np.float32(width))


def cos_and_sin(angles: NDArray[np.float32]) -> tuple[mx.array, mx.array]:
    """The cosine and the sine of each angle."""
    return mx.array(np.cos(angles).astype(np.float32)), mx.array(np.sin(angles).astype(np.float32))
