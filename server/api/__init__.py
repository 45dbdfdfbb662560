"""Dialects: each module translates one public API to engine requests and events to bytes."""

from importlib.metadata import version
from typing import Final

PRODUCT: Final = f"mlx-serve/{version('mlx-serve')}"
"""What the server calls itself wherever a program may look for who answers."""
