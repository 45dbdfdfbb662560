"""The models of one process: finds them by name, loads them on request, unloads those that make way or expire.

Invariants:

* a model has one identity, its `ModelSource.id`; every name is resolved to it before anything is compared;
* a user of a model holds it, and a model that is held is never unloaded;
* one model at a time is loaded or unloaded, in the order of the requests;
* a model makes way only when the files of the other model were found in order and it is known to fit.

A model that is to make way takes no more requests: new ones wait behind the model that waits for its memory. So two
models that do not fit together take turns, and neither starves.

`find` and `listed` may be called on any thread; everything else belongs to the event loop.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from server.engine.request import EngineStopped
from server.pool.catalog import Catalog, FixedCatalog, ModelFinder
from server.pool.errors import (
    ChangeKind,
    LoadFailed,
    ModelChange,
    ModelNotLoaded,
    ModelUnknown,
    PoolError,
    TellChange,
)
from server.pool.loading import Loading, Loadings, Opener
from server.pool.members import Dormitory, Member, Members, ModelHold, OpenedModel
from server.pool.memory import PoolSettings
from server.pool.names import FOREVER, WHEN_SHORT_SECONDS, ModelSource
from server.pool.served import EnginePort, ListedModel, ModelFacts, Occupancy, ServedModel
from server.pool.turnover import StateShares, Turnover

logger = logging.getLogger(__name__)


class Expiry:
    """Unloads models that were idle too long."""

    def __init__(self, members: Members, settings: PoolSettings, clock: Callable[[], float]) -> None:
        self._members = members
        self._settings = settings
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None

    def expires(self, member: Member) -> float:
        """Returns when an idle model is unloaded, by the clock."""
        asked = member.keep_alive_seconds
        if asked is None:
            asked = self._settings.keep_alive_seconds
        if asked is None:
            asked = WHEN_SHORT_SECONDS if self._settings.memory.is_short(self._members.weights()) else FOREVER
        return member.last_used + asked

    def seconds_left(self, member: Member) -> float:
        """Returns the seconds that a model stays if nobody asks for it; infinite if it is never unloaded."""
        return max(self.expires(member) - self._clock(), 0.0)

    def expired(self) -> list[Member]:
        """Returns the idle models whose time is over."""
        now = self._clock()
        return [one for one in self._members if not one.is_busy and self.expires(one) <= now]

    def watch(self, unload: Callable[[], object] | None) -> None:
        """Calls `unload` when the next model's time is over; None: never. Call it whenever anything changed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        idle = [self.expires(member) for member in self._members if not member.is_busy]
        if unload is None or not idle or min(idle) == FOREVER:
            return
        self._timer = asyncio.get_running_loop().call_later(max(min(idle) - self._clock(), 0.0), unload)


class ModelPool:
    """Owns the engines of all loaded models, by the id of the model."""

    def __init__(
        self,
        catalog: Catalog,
        opened: Sequence[OpenedModel] = (),
        opener: Opener | None = None,
        settings: PoolSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`opened` are loaded already and known to the catalog. Without an `opener` no other model is ever loaded."""
        settings = settings or PoolSettings()
        self._catalog = catalog
        self._opener = opener
        self._finder = ModelFinder(catalog, settings.aliases, settings.default_id)
        self._members = Members(clock)
        self._members.on_release = self._released
        self._loadings = Loadings(self._members)
        self._dormitory = Dormitory()
        self.shares = StateShares(settings.memory, self._members, self._dormitory)
        self.expiry = Expiry(self._members, settings, clock)
        self._turnover = Turnover(
            self._members,
            self._dormitory,
            self.shares,
            settings,
            clock=clock,
            is_closed=lambda: self._loadings.is_closed,
            bring_back=self._bring_back,
        )
        self._background: set[asyncio.Task[None]] = set()
        for one in opened:
            source = catalog.find(one.model.id) or ModelSource(one.model.id, Path())
            self._members.add(Member(source, one, clock()))

    @classmethod
    def of(cls, *opened: OpenedModel) -> "ModelPool":
        """Returns a pool of models that are all loaded, and stay so."""
        return cls(FixedCatalog([ModelSource(one.model.id, Path()) for one in opened]), opened)

    # ------------------------------------------------------------------------------------------ looking things up

    @property
    def models(self) -> Mapping[str, ServedModel]:
        return {member.source.id: member.opened.model for member in self._members}

    @property
    def served(self) -> Sequence[ServedModel]:
        opened = [member.opened for member in self._members]
        return [model for one in opened for model in (one.model, *one.variants.values())]

    @property
    def engines(self) -> Mapping[str, EnginePort]:
        return {member.source.id: member.opened.engine for member in self._members}

    @property
    def members(self) -> Sequence[Member]:
        return list(self._members)

    @property
    def loading(self) -> Mapping[str, str]:
        """The models being loaded, each with its current step."""
        return self._loadings.steps

    @property
    def occupancy(self) -> Sequence[Occupancy]:
        return [
            Occupancy(member.opened.model, member.num_holds, self.expiry.seconds_left(member))
            for member in self._members
        ]

    def listed(self) -> Sequence[ListedModel]:
        """Returns every model that requests may name, loaded or not. For any thread; may read the disk."""
        return [self._described(source) for source in self._catalog.all()]

    def describe(self, name: str) -> ListedModel:
        """Returns the model that a name stands for. For any thread; raises as `source_of` does."""
        return self._described(self._finder.find(name))

    def _described(self, source: ModelSource) -> ListedModel:
        member = self._members.find_ready(source.id)
        served = None if member is None else member.served(source)
        if served is not None:
            return ListedModel.of(served)
        if self._opener is None:
            return ListedModel(source.name, 0, None, ModelFacts())
        return self._opener.describe(source)

    def source_of(self, name: str | None) -> ModelSource:
        """Returns the source that a name stands for. For any thread; raises ModelNameNeeded and ModelUnknown."""
        return self._finder.find(name)

    def find(self, name: str | None) -> ServedModel:
        """Returns the loaded model that a name stands for; the default one without a name. For any thread.

        Raises ModelNameNeeded, ModelUnknown, and ModelNotLoaded for one that may be loaded.
        """
        source = self._finder.find(name)
        member = self._members.find_ready(source.id)
        if member is None:
            raise ModelNotLoaded(source)
        served = member.served(source)
        assert served is not None, "a model is loaded with all adapters that its names stand for"
        return served

    # -------------------------------------------------------------------------------------------- using a model

    def try_hold(self, model: ServedModel) -> ModelHold | None:
        """Returns a hold on a model that `find` returned; None if `load` must bring back the model or its memory.

        The model may have been unloaded since, or be about to be, or have lent memory to another one.
        """
        member = self._members.find_ready(model.base_id)
        if member is None or member.is_lending or not member.has(model):
            return None
        return self._members.hold(member)

    async def load(self, source: ModelSource) -> ModelHold:
        """Returns a hold on a model once it is loaded. Several waiters load it once.

        A cancelled waiter leaves the queue; a model whose files are being read is loaded nevertheless. Raises
        LoadFailed, ModelTooLarge, PoolBusy, ModelUnknown, and EngineStopped while the server stops.
        """
        member = self._members.find_ready(source.id)
        if member is not None and not member.is_lending:
            return self._members.hold(member)
        return await self._loadings.wait(self._loadings.find(source) or self._begin(source))

    async def unload(self, source: ModelSource) -> bool:
        """Unloads a model; False where it was not loaded. Raises ModelInUse."""
        return await self._turnover.take_out(source)

    def forget_dormant(self, source: ModelSource, namespace: str) -> tuple[int, int]:
        """Drops dormant state of a namespace of an unloaded model; returns the tokens and the bytes."""
        return self._dormitory.forget(source.id, namespace)

    def tell_changes(self, tell: TellChange) -> None:
        """Calls `tell` when a model is being loaded, was loaded or unloaded, or could not be loaded."""
        self._turnover.on_change = tell

    def tell_given_up(self, tell: Callable[[str], None]) -> None:
        """Calls `tell` with the id of an unloaded model whose last conversation is dropped."""
        self._dormitory.on_given_up = tell

    # --------------------------------------------------------------------------------------------------- loading

    def _begin(self, source: ModelSource) -> Loading:
        if self._opener is None:
            raise ModelUnknown(source.id, "it is not loaded, and this server loads no other")
        loading = self._loadings.begin(source)
        loading.task = self._in_background(self._run(loading, self._opener))
        return loading

    async def _run(self, loading: Loading, opener: Opener) -> None:
        """Loads one model, and tells the result to all who wait for it."""
        error: Exception | None = None
        try:
            await self._turnover.bring_in(loading, opener, lambda: self._loadings.end(loading, None))
        except asyncio.CancelledError:
            error = EngineStopped("the server is stopping")
        except (PoolError, EngineStopped) as failure:
            error = failure
        except Exception:  # a bug of ours, or of an architecture's code: it concerns this model only
            logger.exception("%s could not be loaded", loading.source.id)
            error = LoadFailed(f"{loading.source.id} could not be loaded; the server's log has the details")
        if error is not None:
            self._turnover.on_change(ModelChange(ChangeKind.FAILED, loading.source.id, message=str(error)))
            self._loadings.end(loading, error)
        self.watch()

    def _bring_back(self, source: ModelSource) -> None:
        """Loads a model again that made way in vain; nobody waits for it."""
        if not self._loadings.is_closed and source.id not in self._loadings:
            self._begin(source).can_be_given_up = False

    def _released(self) -> None:
        """Called when a hold on a model has ended: its conversations may need more memory than its share."""
        self.watch()
        if len(self._members) > 1 and self._opener is not None and not self._loadings.is_closed:
            self._in_background(self._turnover.lend())

    def watch(self) -> None:
        """Schedules the unloading of idle models."""
        can_unload = self._opener is not None and not self._loadings.is_closed
        self.expiry.watch((lambda: self._in_background(self._unload_expired())) if can_unload else None)

    async def _unload_expired(self) -> None:
        await self._turnover.take_out_expired(self.expiry.expired)
        self.watch()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    # --------------------------------------------------------------------------------------------------- the end

    async def drain(self, timeout_seconds: float) -> bool:
        """Takes no more requests and waits for the running ones; False if some still ran after the time.

        Gives up the current loadings.
        """
        self._loadings.close()
        engines = [member.opened.engine for member in self._members]
        return all(await asyncio.gather(*(engine.drain(timeout_seconds) for engine in engines)))

    @property
    def num_running(self) -> int:
        return sum(member.opened.engine.stats().num_open for member in self._members)

    def stop(self) -> None:
        """Ends all engines. Blocks; for any thread, once the pool is otherwise quiet."""
        self._loadings.is_closed = True
        for member in self._members:
            member.opened.engine.stop()
