"""What a model is known by before it is loaded. Pure."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ModelSource:
    """A model that may be served."""

    id: str
    """Its identity: the name under which it is listed, and by which it is compared."""
    path: Path
    """The folder with its configuration and its weights."""
