"""Types that parts of the cache share, for those that must not know what stands behind them. Knows no MLX.

Sequences of tokens as arrays, and where two of them part. Pure.
"""

from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

LayerCache: TypeAlias = Any
"""An object with mlx-lm's cache interface; the library has no useful base type."""


class LayerKinds(Protocol):
    """Which kinds of state a model's layers have, so what is needed to restore them; `cache.layers.layout.Layout`."""

    @property
    def window(self) -> int:
        """Rows that must be there before an offset to restore the window layers at it; 0 without such layers."""

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
