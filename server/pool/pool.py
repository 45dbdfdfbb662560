"""The loaded models of one process, and how one is found by name.

Invariants:

* a model has one identity, its `ModelSource.id`; every name is resolved to it before anything is compared;
* whoever uses a model holds it meanwhile.

`find` may be called on any thread; everything else belongs to the event loop.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from server.api.context import EnginePort, ServedModel
from server.pool.catalog import Catalog, FixedCatalog, ModelSource
from server.pool.errors import ModelNameNeeded, ModelNotLoaded, ModelUnknown
from server.pool.names import Alias, spellings, unknown_name


@dataclass(frozen=True, eq=False)
class OpenedModel:
    """One model in memory, with its engine running."""

    model: ServedModel
    engine: EnginePort
    weights_bytes: int = 0


class ModelPool:
    """Owns the engines of all loaded models, by the identity of the model."""

    def __init__(
        self, catalog: Catalog, opened: Sequence[OpenedModel] = (), *, aliases: Sequence[Alias] = ()
    ) -> None:
        """`opened` are loaded already; the catalog knows them too."""
        self._catalog = catalog
        self._aliases = aliases
        self._opened = {one.model.id: one for one in opened}

    @classmethod
    def of(cls, *opened: OpenedModel) -> "ModelPool":
        """Returns a pool of models that are all loaded, and stay so."""
        return cls(FixedCatalog([ModelSource(one.model.id, Path()) for one in opened]), opened)

    @property
    def models(self) -> Mapping[str, ServedModel]:
        """The loaded models by id."""
        return {name: one.model for name, one in self._opened.items()}

    @property
    def engines(self) -> Mapping[str, EnginePort]:
        """Their engines, under the same ids."""
        return {name: one.engine for name, one in self._opened.items()}

    def find(self, name: str | None) -> ServedModel:
        """Returns the loaded model that a name stands for; the only one where no name is given. For any thread.

        Raises ModelNameNeeded, ModelUnknown, and ModelNotLoaded for one that may be loaded.
        """
        if not name:
            return self._default()
        for spelling in spellings(name, self._aliases):
            source = self._catalog.find(spelling)
            if source is not None:
                return self._loaded(source)
        raise ModelUnknown(unknown_name(name, [source.id for source in self._catalog.all()]))

    def _default(self) -> ServedModel:
        sources = self._catalog.all()
        if len(sources) == 1:
            return self._loaded(sources[0])
        raise ModelNameNeeded(f"model: name one of {', '.join(source.id for source in sources)}")

    def _loaded(self, source: ModelSource) -> ServedModel:
        found = self._opened.get(source.id)
        if found is None:
            raise ModelNotLoaded(source.id)
        return found.model
