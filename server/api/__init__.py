"""Dialects: each module translates one public API to engine requests and events to bytes."""

from importlib.metadata import version
from typing import Final

PRODUCT: Final = f"mlx-serve/{version('mlx-serve')}"
