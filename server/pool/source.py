"""What a model is known by before it is loaded. Pure."""

from dataclasses import dataclass, field
from pathlib import Path

from models.store.stored_model import ModelDefaults


@dataclass(frozen=True)
class ModelSource:
    """A model that may be served."""

    id: str
    """Its identity: the name under which it is listed, and by which it is compared."""
    path: Path
    """The folder with its configuration and its weights."""
    adapter: str | None = None
    """The name of an adapter of it that is meant, which is loaded with it."""
    label: str | None = None
    """What clients call it where that is not its id: a name of our own, say."""
    defaults: ModelDefaults = field(default_factory=ModelDefaults)
    """What requests under the label get where they say nothing."""

    @property
    def name(self) -> str:
        """What clients call it."""
        return self.adapter or self.label or self.id

    @property
    def plain(self) -> "ModelSource":
        """The model itself, under its id."""
        return ModelSource(self.id, self.path)
