"""Finds the one model that a name stands for, loaded or not. For any thread; may read the disk."""

from collections.abc import Sequence

from models.errors import ModelBroken
from server.pool.catalog import Catalog
from server.pool.errors import LoadFailed, ModelNameNeeded, ModelUnknown
from server.pool.names import Alias, served_instead, spellings
from server.pool.source import ModelSource


class ModelFinder:
    """Resolves names, aliases included, to identities."""

    def __init__(self, catalog: Catalog, aliases: Sequence[Alias] = (), default_id: str | None = None) -> None:
        """`default_id` is the name of the model of requests that name none; without it, the only one there is."""
        self._catalog = catalog
        self._aliases = aliases
        self._default_id = default_id

    def find(self, name: str | None) -> ModelSource:
        """Returns the model that a name stands for; raises ModelNameNeeded, ModelUnknown and LoadFailed."""
        if not name:
            return self._default()
        for spelling in spellings(name, self._aliases):
            source = self._looked_up(spelling)
            if source is not None:
                return source
        raise ModelUnknown(name, served_instead(name, [source.name for source in self._catalog.all()]))

    def _looked_up(self, name: str) -> ModelSource | None:
        try:
            return self._catalog.find(name)
        except ModelBroken as error:
            raise LoadFailed(str(error)) from error

    def _default(self) -> ModelSource:
        default = self._catalog.find(self._default_id) if self._default_id is not None else None
        if default is not None:
            return default
        sources = [source for source in self._catalog.all() if source.adapter is None]
        if len(sources) == 1:
            return sources[0]
        raise ModelNameNeeded(f"model: name one of {', '.join(source.id for source in sources)}")
