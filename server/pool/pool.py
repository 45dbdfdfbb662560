"""The models of one process, as the rest of the server sees them.

Models are compared by `ModelSource.id`. A held model is never unloaded, and has its due budget for state. Event loop
only, but where a docstring says otherwise.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path

from models.errors import ModelBroken
from server.pool.catalog import Catalog
from server.pool.loader import Loader, Opener
from server.pool.members import Member, ModelHold, OpenedModel
from server.pool.memory import PoolSettings
from server.pool.names import (
    LoadFailed,
    ModelNameNeeded,
    ModelNotLoaded,
    ModelSource,
    ModelUnknown,
    served_instead,
    spellings,
)
from server.pool.served import EnginePort, ListedModel, ModelFacts, ServedModel

LOADED: ContextVar[Member | None] = ContextVar("LOADED", default=None)
"""The model that was loaded for a request, and is held while the request is planned.

Otherwise, two requests that take long to plan could have two models loaded by turns for ever.
"""


class ModelPool(Loader):
    """Models by name, and engines of the loaded ones."""

    def __init__(
        self,
        catalog: Catalog,
        opened: Sequence[OpenedModel] = (),
        opener: Opener | None = None,
        settings: PoolSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`opened` are loaded and in the catalog. Without an `opener` no other model is ever loaded."""
        settings = settings or PoolSettings()
        super().__init__(opener, settings, clock)
        self._catalog = catalog
        state_bytes = settings.memory.for_state([one.weights_bytes for one in opened]) // max(len(opened), 1)
        for one in opened:
            source = catalog.find(one.model.id) or ModelSource(one.model.id, Path())
            self.loaded[source.id] = Member(source, one, min(state_bytes, one.useful_bytes), clock())
        self.budgets.plan()

    @classmethod
    def of(cls, *opened: OpenedModel) -> "ModelPool":
        """A pool of models that all stay loaded."""
        sources = [ModelSource(one.model.id, Path(one.model.id)) for one in opened]
        return cls(Catalog(sources, has_others=False), opened)

    # ------------------------------------------------------------------------------------------ looking things up

    @property
    def members(self) -> Sequence[Member]:
        """Loaded models, the one used last at the end."""
        return sorted(self.loaded.values(), key=lambda member: member.last_used)

    @property
    def served(self) -> Sequence[ServedModel]:
        opened = [member.opened for member in self.members]
        return [model for one in opened for model in (one.model, *one.variants.values())]

    @property
    def engines(self) -> Mapping[str, EnginePort]:
        return {member.source.id: member.opened.engine for member in self.members}

    def idle_seconds_left(self, member: Member) -> float:
        """Infinite if the model stays."""
        return max(self.expires(member) - self._clock(), 0.0)

    def listed(self) -> Sequence[ListedModel]:
        """Loaded or not. For any thread; may read the disk."""
        return [self._described(source) for source in self._catalog.all()]

    def describe(self, name: str) -> ListedModel:
        """For any thread; raises as `source_of`."""
        return self._described(self.source_of(name))

    def _described(self, source: ModelSource) -> ListedModel:
        member = self.find_loaded(source.id)
        served = None if member is None else member.served(source)
        if served is not None:
            known = (served.id, served.created, served.context_tokens, served.facts)
            return ListedModel(*known, served=served, parent_id=served.parent_id)
        if self._opener is None:
            return ListedModel(source.name, 0, None, ModelFacts())
        return self._opener.describe(source)

    def source_of(self, name: str | None) -> ModelSource:
        """What a name means; without one the default or only model. For any thread; reads the disk.

        Raises ModelNameNeeded, ModelUnknown and LoadFailed.
        """
        if not name:
            return self._default_source()
        try:
            found = (self._catalog.find(spelling) for spelling in spellings(name, self._settings.aliases))
            source = next((source for source in found if source is not None), None)
        except ModelBroken as error:
            raise LoadFailed(str(error)) from error
        if source is None:
            raise ModelUnknown(name, served_instead(name, [source.name for source in self._catalog.all()]))
        return source

    def _default_source(self) -> ModelSource:
        default_id = self._settings.default_id
        default = self._catalog.find(default_id) if default_id is not None else None
        if default is not None:
            return default
        sources = [source for source in self._catalog.all() if source.adapter is None]
        if len(sources) != 1:
            raise ModelNameNeeded(f"model: name one of {', '.join(source.id for source in sources)}")
        return sources[0]

    def find(self, name: str | None) -> ServedModel:
        """A loaded model, without a name the default. For any thread; raises as `source_of`, and ModelNotLoaded."""
        source, own = self.source_of(name), LOADED.get()
        member = self.find_loaded(source.id)
        if member is None and own is not None and own.source.id == source.id:
            member = own
        if member is None:
            raise ModelNotLoaded(source)
        served = member.served(source)
        assert served is not None, "a model is loaded with all adapters that its names stand for"
        return served

    # -------------------------------------------------------------------------------------------- using a model

    def try_hold(self, model: ServedModel) -> ModelHold | None:
        """A hold on what `find` returned; None if it is to be loaded."""
        own = LOADED.get()
        if own is not None and own.has(model):
            return self._hold(own)
        member = self.find_loaded(model.base_id)
        return self._try_hold(member) if member is not None and member.has(model) else None

    def forget_unloaded(self, source: ModelSource, namespace: str) -> tuple[int, int]:
        """Drops a namespace of an unloaded model; returns its tokens and bytes."""
        state = self.budgets.unloaded.get(source.id)
        return (0, 0) if state is None else state.clear(namespace)

    def forget_session_of_unloaded(self, namespace: str, session_id: str) -> None:
        """Drops what unloaded models left of a session, but not the state of its tokens."""
        for state in self.budgets.unloaded.values():
            state.forget_client(namespace, session_id)

    # --------------------------------------------------------------------------------------------------- the end

    async def drain(self, timeout_seconds: float) -> bool:
        """Refuses new requests; returns whether running ones ended in time."""
        self.close()
        engines = [member.opened.engine for member in self.members]
        return all(await asyncio.gather(*(engine.drain(timeout_seconds) for engine in engines)))

    @property
    def num_running(self) -> int:
        return sum(member.opened.engine.stats().num_open for member in self.members)

    def stop(self) -> None:
        """Ends all engines. Blocks; for any thread, once the pool is otherwise quiet."""
        self.is_closed = True
        for member in self.members:
            member.opened.engine.stop()
