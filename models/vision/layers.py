"""What wrapped layers of a text model of mlx-lm read besides tokens: features of a picture, and positions.

A chunk of a prompt lies in one picture, or in none. In a picture each place has a position on three axes, time, row
and column (M-RoPE; Qwen2-VL, 2024); elsewhere a position is the offset plus a shift, one for each row of a call.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from models.prompt.pictures import SeenChunk


class VisionInputs:
    """What the layers read in the next call. Worker thread only."""

    def __init__(self) -> None:
        self.rows: mx.array | None = None
        """In place of the call's embeddings, `[num_tokens, width]`."""
        self.deepstack: Sequence[mx.array] = ()
        self.positions: mx.array | None = None
        """Float32 `[3, num_tokens]`, in a picture."""
        self.shift: mx.array | int = 0

    @contextmanager
    def chunk(self, seen: SeenChunk, num_tokens: int) -> Iterator[None]:
        """For a chunk of a prompt."""
        self.shift, placed = seen.pictures.shift(seen.start), seen.pictures.at(seen.start)
        if placed is not None:
            start = seen.start - placed.start
            part = slice(start, start + num_tokens)
            self.rows = seen.features.rows[part]
            self.deepstack = [rows[part] for rows in seen.features.deepstack]
            if placed.picture.has_axes:
                stop = seen.start + num_tokens
                self.positions = mx.array(seen.pictures.positions(seen.start, stop).astype(np.float32))
        try:
            yield
        finally:
            self.rows, self.deepstack, self.positions, self.shift = None, (), None, 0

    @contextmanager
    def shifted(self, shifts: Sequence[int]) -> Iterator[None]:
        """For a decode call: a shift for each row, or for each token where a row stands for one."""
        self.shift = shifts[0] if len({*shifts}) == 1 else mx.array([*shifts], dtype=mx.int32)
        try:
            yield
        finally:
            self.shift = 0


class SeeingEmbedding(Module):
    """An embedding in which a picture's features stand for its places."""

    def __init__(self, inner: Module, inputs: VisionInputs, scale: float = 1.0) -> None:
        """`scale`: by what the model multiplies embeddings, which are all that should be."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner, self._inputs, self._scale = inner, inputs, scale

    def __call__(self, tokens: mx.array) -> mx.array:
        """`[batch, num_tokens, width]`."""
        inner, rows = cast(Any, self.inner), self._inputs.rows
        if rows is None:
            # MLX checks no index: a negative one, by whatever fault of ours, would end the process.
            return cast(mx.array, inner(mx.maximum(tokens, 0) if tokens.dtype == mx.int32 else tokens))
        kind = inner(mx.zeros_like(tokens)).dtype
        return mx.broadcast_to((rows / self._scale).astype(kind), (*tokens.shape, rows.shape[-1]))

    def as_linear(self, hidden: mx.array) -> mx.array:
        """The output matrix of a model that has no other."""
        return cast(mx.array, cast(Any, self.inner).as_linear(hidden))


class SeeingRope(Module):
    """Rotary positions on three axes in a picture, else shifted ones."""

    def __init__(self, inner: Module, inputs: VisionInputs, sections: Sequence[int]) -> None:
        """`sections`: the number of frequencies of each axis, which take turns while they last (Qwen3-VL, 2025)."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner, self._inputs = inner, inputs
        self._num_turned: int = cast(Any, inner).dims
        half = self._num_turned // 2
        frequencies = cast(Any, inner).base ** (-np.arange(half, dtype=np.float64) / half)
        axes = np.zeros(half, np.int64)
        for axis in (1, 2):
            axes[axis : 3 * sections[axis] : 3] = axis
        self._frequencies, self._axes = mx.array(frequencies.astype(np.float32)), mx.array(axes)

    def __call__(self, x: mx.array, offset: mx.array | int = 0) -> mx.array:
        """Queries or keys, `[batch, num_heads, num_tokens, head_width]`, turned."""
        positions, shift, half = self._inputs.positions, self._inputs.shift, self._num_turned // 2
        if positions is None:
            is_shifted = isinstance(shift, mx.array) or shift
            return cast(mx.array, cast(Any, self.inner)(x, offset=offset + shift if is_shifted else offset))
        angles = positions[self._axes].T * self._frequencies
        cos, sin = mx.cos(angles), mx.sin(angles)
        first, second = x[..., :half].astype(mx.float32), x[..., half : self._num_turned].astype(mx.float32)
        turned = first * cos - second * sin, second * cos + first * sin
        return mx.concatenate([*(one.astype(x.dtype) for one in turned), x[..., self._num_turned :]], axis=-1)


class PaddedEmbedding(Module):
    """An embedding in which one token stands for all places of pictures."""

    def __init__(self, inner: Module, token: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner, self._token = inner, token

    def __call__(self, tokens: mx.array) -> mx.array:
        """`[batch, num_tokens, width]`."""
        if tokens.dtype == mx.int32:
            tokens = mx.where(tokens < 0, self._token, tokens)
        return cast(mx.array, cast(Any, self.inner)(tokens))


class _SeeingLayer(Module):
    """A layer that reads something of pictures, else as the layer it wraps."""

    def __init__(self, inner: Module, inputs: VisionInputs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner, self._inputs = inner, inputs

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class DeepstackLayer(_SeeingLayer):
    """A layer after which a picture's features are added."""

    def __init__(self, inner: Module, inputs: VisionInputs, index: int) -> None:
        super().__init__(inner, inputs)
        self._index = index

    def __call__(self, x: mx.array, *given: Any, **named: Any) -> mx.array:
        """As the layer."""
        hidden = cast(Any, self.inner)(x, *given, **named)
        if self._index >= len(self._inputs.deepstack):
            return cast(mx.array, hidden)
        return cast(mx.array, hidden + self._inputs.deepstack[self._index].astype(hidden.dtype))


class MutualLayer(_SeeingLayer):
    """A layer in which the places of a whole picture attend to each other."""

    def __call__(self, x: mx.array, mask: Any = None, *given: Any, **named: Any) -> Any:
        """As the layer."""
        if self._inputs.rows is not None:
            mask = with_later(mask)
        return cast(Any, self.inner)(x, mask, *given, **named)


def with_later(mask: mx.array | str | None) -> mx.array | None:
    """A causal mask, `[num_tokens, num_keys]`, that allows the later keys too; earlier ones as before."""
    if not isinstance(mask, mx.array):
        return None
    num_tokens, num_keys = mask.shape[-2:] if mask.ndim > 1 else (1, mask.shape[-1])
    return mask | ~mx.tri(num_tokens, num_keys, k=num_keys - num_tokens, dtype=mx.bool_)
