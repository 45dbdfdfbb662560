"""Types that parts of the cache share, for those that must not know what stands behind them. Knows no MLX."""

from typing import Any, Protocol, TypeAlias

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
