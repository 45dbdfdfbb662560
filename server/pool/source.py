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
    adapter: str | None = None
    """The name of an adapter of it that is meant, which is loaded with it."""

    @property
    def name(self) -> str:
        """What clients call it."""
        return self.id if self.adapter is None else self.adapter
