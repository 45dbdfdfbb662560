"""Which models a server may be asked for, whether they are loaded or not.

A name from a request is never taken for a path: folders are served only where the command line named them, under the
name of the folder. Everything else is `demo` or a complete repository of the local Hugging Face cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class ModelSource:
    """A model that may be served."""

    id: str
    """Its identity: the name under which it is listed, and by which it is compared."""
    path: Path
    """The folder with its configuration and its weights."""


class Catalog(Protocol):
    """Finds models by name. For any thread; may read the disk."""

    def find(self, name: str) -> ModelSource | None:
        """Returns the model of that name; None where there is none."""
        ...

    def all(self) -> Sequence[ModelSource]:
        """Returns every model that may be served, those of the command line first."""
        ...


class FixedCatalog:
    """Models that are known beforehand, by their ids."""

    def __init__(self, sources: Sequence[ModelSource]) -> None:
        self._sources = {source.id: source for source in sources}

    def find(self, name: str) -> ModelSource | None:
        """Returns the model of that id."""
        return self._sources.get(name)

    def all(self) -> Sequence[ModelSource]:
        """Returns them in order."""
        return list(self._sources.values())
