"""Types and token arrays that parts of the cache share without knowing their implementation. Knows no MLX. Pure."""

from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

LayerCache: TypeAlias = Any
"""An object with mlx-lm's cache interface; the library has no useful base type."""


class LayerKinds(Protocol):
    """The kinds of state in a model's layers, which decide how it is restored; `cache.layers.layout.Layout`."""

    @property
    def window(self) -> int:
        """Rows before an offset that restoring the window layers needs; 0 without such layers."""

    @property
    def has_points(self) -> bool:
        """Whether some state is valid at single offsets only."""

    @property
    def needs_snapshots(self) -> bool:
        """Whether restoring needs more than spans, so that offsets must be chosen ahead."""


TokenArray: TypeAlias = NDArray[np.int32]
TOKEN_BYTES = 4


def common_prefix_length(left: TokenArray, right: TokenArray) -> int:
    """Returns how many leading tokens two arrays share."""
    num = min(len(left), len(right))
    differs = left[:num] != right[:num]
    first = int(differs.argmax()) if num else 0
    return first if num and differs[first] else num
