"""The models of one process: finds them by name, loads them when they are asked for, unloads what makes way.

Invariants:

* a model has one identity, its `ModelSource.id`; every name is resolved to it before anything is compared;
* whoever uses a model holds it meanwhile, and a model that is held is never unloaded;
* one model at a time is loaded or unloaded, in the order in which they were asked for;
* what makes way is unloaded only when the files of the other model were found in order and it is known to fit.

A model that is to make way takes no more requests: those wait behind the model that waits for its memory. So two
models that do not fit together take turns, and neither starves.

`find` and `listed` may be called on any thread; everything else belongs to the event loop.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from cache.errors import FolderError
from models.errors import ModelError
from server.api.context import EnginePort, ListedModel, Occupancy, ServedModel
from server.api.model_facts import ModelFacts
from server.engine.errors import EngineStopped, QueueFull
from server.pool.catalog import Catalog, FixedCatalog
from server.pool.dormitory import Dormitory
from server.pool.errors import LoadFailed, ModelInUse, ModelNotLoaded, ModelUnknown, PoolBusy, PoolError
from server.pool.finder import ModelFinder
from server.pool.hold import ModelHold, adopt
from server.pool.keep_alive import FOREVER, WHEN_SHORT_SECONDS
from server.pool.loading import Around, Loading, LoadingAbandoned, Opener, on_thread
from server.pool.member import Member, OpenedModel
from server.pool.memory import choose_to_leave
from server.pool.settings import PoolSettings
from server.pool.source import ModelSource

logger = logging.getLogger(__name__)

MAX_WAIT_SECONDS = 120.0
"""How long a model waits for others to finish their answers."""
RETRY_SECONDS = 0.1
"""Pause before a model that stays is asked again for memory that its answers hold."""

Result = TypeVar("Result")


class ModelPool:
    """Owns the engines of all loaded models, by the identity of the model."""

    def __init__(
        self,
        catalog: Catalog,
        opened: Sequence[OpenedModel] = (),
        opener: Opener | None = None,
        settings: PoolSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`opened` are loaded already; the catalog knows them too. Without an `opener` no other is ever loaded."""
        self._catalog = catalog
        self._opener = opener
        self._settings = settings or PoolSettings()
        self._finder = ModelFinder(catalog, self._settings.aliases, self._settings.default_id)
        self._clock = clock
        self.on_change: Callable[[], None] = lambda: None
        """Called whenever what the models take has changed."""
        self._members: dict[str, Member] = {}
        self._ready: Mapping[str, Member] = {}
        """Those of them that take requests. Replaced as a whole, since other threads read it."""
        self._loadings: dict[str, Loading] = {}
        self._dormitory = Dormitory()
        self._changing = asyncio.Lock()
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._background: set[asyncio.Task[None]] = set()
        for one in opened:
            source = catalog.find(one.model.id) or ModelSource(one.model.id, Path())
            self._members[source.id] = Member(source, one, clock())
        self._publish()

    @classmethod
    def of(cls, *opened: OpenedModel) -> "ModelPool":
        """Returns a pool of models that are all loaded, and stay so."""
        return cls(FixedCatalog([ModelSource(one.model.id, Path()) for one in opened]), opened)

    # ------------------------------------------------------------------------------------------ looking things up

    @property
    def models(self) -> Mapping[str, ServedModel]:
        """The loaded models by id."""
        return {name: member.opened.model for name, member in self._members.items()}

    @property
    def engines(self) -> Mapping[str, EnginePort]:
        """Their engines, under the same ids."""
        return {name: member.opened.engine for name, member in self._members.items()}

    @property
    def members(self) -> Sequence[Member]:
        """The loaded models, the one used last at the end. For reports: do not change them."""
        return sorted(self._members.values(), key=lambda member: member.last_used)

    @property
    def taken_bytes(self) -> int:
        """What the loaded models may take together: weights, and budgets for state."""
        weights, dormant_bytes = self._weights(), self._dormitory.num_bytes
        share_bytes = self._settings.memory.share_bytes(weights, dormant_bytes)
        return sum(weights) + share_bytes * len(weights) + dormant_bytes

    def _weights(self) -> list[int]:
        return [member.opened.weights_bytes for member in self._members.values()]

    @property
    def loading(self) -> Mapping[str, str]:
        """The models on their way, each with what is being done."""
        return {name: loading.step for name, loading in self._loadings.items()}

    @property
    def occupancy(self) -> Sequence[Occupancy]:
        """The loaded models, the one used last at the end."""
        now = self._clock()
        return [
            Occupancy(member.opened.model, member.num_holds, max(self.expires(member) - now, 0.0))
            for member in self.members
        ]

    def listed(self) -> Sequence[ListedModel]:
        """Returns every model that requests may name, loaded or not. For any thread; may read the disk."""
        return [self._described(source) for source in self._catalog.all()]

    def describe(self, name: str) -> ListedModel:
        """Returns the model that a name stands for. For any thread; raises as `source_of` does."""
        return self._described(self._finder.find(name))

    def _described(self, source: ModelSource) -> ListedModel:
        member = self._ready.get(source.id)
        if member is not None:
            return ListedModel.of(member.opened.model)
        return (
            ListedModel(source.id, 0, None, ModelFacts()) if self._opener is None else self._opener.describe(source)
        )

    def source_of(self, name: str | None) -> ModelSource:
        """Returns which model a name stands for. For any thread; raises ModelNameNeeded and ModelUnknown."""
        return self._finder.find(name)

    def find(self, name: str | None) -> ServedModel:
        """Returns the loaded model that a name stands for; the default one where no name is given. For any thread.

        Raises ModelNameNeeded, ModelUnknown, and ModelNotLoaded for one that may be loaded.
        """
        source = self._finder.find(name)
        member = self._ready.get(source.id)
        if member is None:
            raise ModelNotLoaded(source)
        return member.opened.model

    # -------------------------------------------------------------------------------------------- using a model

    def try_hold(self, model: ServedModel) -> ModelHold | None:
        """Returns a hold on a model that `find` returned; None if it has been unloaded since, or is about to be."""
        member = self._ready.get(model.id)
        return self._hold(member) if member is not None and member.opened.model is model else None

    async def load(self, source: ModelSource) -> ModelHold:
        """Returns a hold on a model once it is loaded. Several who wait for it have it loaded once.

        Cancelled, it leaves the queue; a model whose files are being read already is loaded nevertheless.
        Raises LoadFailed, ModelTooLarge, PoolBusy, ModelUnknown, and EngineStopped while the server stops.
        """
        member = self._ready.get(source.id)
        if member is not None:
            return self._hold(member)
        loading = self._loadings.get(source.id) or self._begin(source)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        loading.waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            self._leave(loading, waiter)
            raise
        return adopt(self._members[source.id], self._released)

    async def unload(self, source: ModelSource) -> bool:
        """Unloads a model; False where it was not loaded. Raises ModelInUse."""
        async with self._changing:
            member = self._members.get(source.id)
            if member is None:
                return False
            if member.is_busy:
                raise ModelInUse(f"{source.id} answers {member.num_holds} requests; it can be unloaded when they end")
            with self._closed_to_others([member]):
                await self._take_out([member])
            await self._share_out()
        return True

    def forget_dormant(self, source: ModelSource, namespace: str) -> tuple[int, int]:
        """Drops what memory holds for a namespace of a model that is not loaded; returns the tokens and the bytes."""
        return self._dormitory.forget(source.id, namespace)

    def _hold(self, member: Member) -> ModelHold:
        return ModelHold(member, self._released)

    def _released(self, member: Member) -> None:
        member.last_used = self._clock()
        self.watch()

    # --------------------------------------------------------------------------------------------------- loading

    def _begin(self, source: ModelSource) -> Loading:
        if self._is_closed:
            raise EngineStopped("the server is stopping")
        if self._opener is None:
            raise ModelUnknown(source.id, "it is not loaded, and this server loads no other")
        loading = Loading(source)
        self._loadings[source.id] = loading
        loading.task = self._in_background(self._run(loading, self._opener))
        return loading

    async def _run(self, loading: Loading, opener: Opener) -> None:
        """Loads one model, and tells all who wait for it how that went."""
        error: Exception | None = None
        try:
            async with self._changing:
                if loading.source.id not in self._ready:
                    await self._bring_in(loading, opener)
                self._end(loading, None)
        except asyncio.CancelledError:
            error = EngineStopped("the server is stopping")
        except (PoolError, EngineStopped) as failure:
            error = failure
        except Exception:  # a bug of ours, or of an architecture's code: it concerns this model only
            logger.exception("%s could not be loaded", loading.source.id)
            error = LoadFailed(f"{loading.source.id} could not be loaded; the server's log has the details")
        if error is not None:
            self._end(loading, error)

    def _end(self, loading: Loading, error: Exception | None) -> None:
        """Lets go of all who wait. Where the model is loaded each of them holds it from now on."""
        self._loadings.pop(loading.source.id, None)
        for waiter in loading.waiters:
            if waiter.done():
                continue
            if error is not None:
                waiter.set_exception(error)
            else:
                # Held before anyone else gets a turn: whoever waits for memory would unload it unused.
                member = self._members[loading.source.id]
                member.num_holds += 1
                member.idle.clear()
                waiter.set_result(None)
        loading.waiters.clear()

    def _leave(self, loading: Loading, waiter: "asyncio.Future[None]") -> None:
        if waiter.done() and not waiter.cancelled():
            if waiter.exception() is None:
                adopt(self._members[loading.source.id], self._released).close()
            return
        loading.waiters.remove(waiter)
        if not loading.waiters and loading.can_be_given_up and loading.task is not None:
            self._loadings.pop(loading.source.id, None)
            loading.task.cancel()

    async def _bring_in(self, loading: Loading, opener: Opener) -> None:
        source = loading.source
        loading.step = "looking at its files"
        weights_bytes = await _checked(source, asyncio.to_thread(opener.measure, source))
        left = await self._make_way(loading, weights_bytes)
        logger.info("loading %s", source.id)
        began = self._clock()
        try:
            opened = await self._open(loading, opener)
        except BaseException:
            # As it was before: what made way in vain comes back.
            await self._share_out()
            for gone in left:
                self._bring_back(gone)
            raise
        self._members[source.id] = Member(source, opened, self._clock())
        self._publish()
        await self._share_out()
        logger.info("loaded %s in %.1f s", source.id, self._clock() - began)
        self.watch()

    async def _open(self, loading: Loading, opener: Opener) -> OpenedModel:
        source = loading.source
        dormant = self._dormitory.take(source.id)
        around = Around(self._weights(), self._dormitory.num_bytes, dormant)

        def tell(step: str) -> None:
            if self._is_closed:
                raise LoadingAbandoned
            loading.step = step

        def run() -> OpenedModel:
            opened = opener.open(source, around, tell)
            if self._is_closed:
                opened.unload()
                raise LoadingAbandoned
            return opened

        try:
            return await _checked(source, on_thread("mlx-serve-loader", run))
        except LoadingAbandoned:
            raise EngineStopped("the server is stopping") from None
        except Exception:
            if dormant is not None:
                self._dormitory.give_back(source.id, dormant)
            raise

    async def _make_way(self, loading: Loading, weights_bytes: int) -> list[ModelSource]:
        """Unloads what has to make way, once it is idle, and gives the others their new share; returns what went.

        Raises ModelTooLarge and PoolBusy; all stays as it was then.
        """
        settings, source = self._settings, loading.source
        residents = [member.resident() for member in self._members.values()]
        ids = choose_to_leave(residents, source.id, weights_bytes, settings.memory, settings.max_models)
        leaving = [self._members[name] for name in ids]
        staying = [member for member in self._members.values() if member not in leaving]
        with self._closed_to_others(leaving):
            async with self._time_limit(loading, [*leaving, *staying]):
                for member in leaving:
                    loading.step = f"waiting for {member.source.id} to finish its answers"
                    await member.idle.wait()
                await self._shrink(loading, staying, weights_bytes)
            loading.can_be_given_up = False
            await self._take_out(leaving)
        return [member.source for member in leaving]

    @contextlib.contextmanager
    def _closed_to_others(self, leaving: Sequence[Member]) -> Iterator[None]:
        """Keeps new requests from models that make way, so that they become idle."""
        for member in leaving:
            member.is_leaving = True
        self._publish()
        try:
            yield
        finally:
            for member in leaving:
                member.is_leaving = False
            self._publish()

    @contextlib.asynccontextmanager
    async def _time_limit(self, loading: Loading, members: Sequence[Member]) -> AsyncIterator[None]:
        """Raises PoolBusy when the models have not become idle in time; shares are then as they were."""
        try:
            async with asyncio.timeout(MAX_WAIT_SECONDS):
                yield
        except TimeoutError:
            busy = ", ".join(member.source.id for member in members if member.is_busy)
            await self._share_out()
            raise PoolBusy(
                f"{loading.source.id} fits only once {busy or 'others'} have finished; try again"
            ) from None
        except asyncio.CancelledError:
            await self._share_out()
            raise

    async def _shrink(self, loading: Loading, staying: Sequence[Member], weights_bytes: int) -> None:
        """Gives the models that stay the share that they have beside one more; waits for answers that hold more."""
        weights = [*(member.opened.weights_bytes for member in staying), weights_bytes]
        memory = self._settings.memory
        self._dormitory.drop_until(lambda dormant_bytes: dormant_bytes <= memory.largest_dormant_bytes(weights))
        share_bytes = memory.share_bytes(weights, self._dormitory.num_bytes)
        for member in staying:
            while await _resized(member, share_bytes):
                loading.step = f"waiting for memory that answers of {member.source.id} hold"
                await asyncio.sleep(RETRY_SECONDS)

    async def _share_out(self) -> None:
        """Gives each loaded model its share of the memory for state."""
        share_bytes = self._settings.memory.share_bytes(self._weights(), self._dormitory.num_bytes)
        for member in list(self._members.values()):
            await _resized(member, share_bytes)
        self.on_change()

    async def _take_out(self, leaving: Sequence[Member]) -> None:
        for member in leaving:
            assert not member.is_busy, "a model was unloaded while it was held"
            del self._members[member.source.id]
            self._publish()
            dormant = await asyncio.to_thread(member.opened.unload)
            if dormant is not None:
                limit_bytes = self._settings.memory.largest_dormant_bytes(self._weights())
                self._dormitory.keep(member.source.id, dormant, limit_bytes)
            logger.info("unloaded %s", member.source.id)

    def _bring_back(self, source: ModelSource) -> None:
        """Loads a model again that made way in vain; nobody waits for it."""
        if not self._is_closed and source.id not in self._loadings:
            self._begin(source).can_be_given_up = False

    def _publish(self) -> None:
        self._ready = {name: member for name, member in self._members.items() if not member.is_leaving}

    def _in_background(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    # ------------------------------------------------------------------------------------------------ keep-alive

    def expires(self, member: Member) -> float:
        """Returns when a model will have been idle for so long that it is unloaded, by the pool's clock."""
        asked = member.keep_alive_seconds
        if asked is None:
            asked = self._settings.keep_alive_seconds
        if asked is None:
            asked = WHEN_SHORT_SECONDS if self._settings.memory.is_short(self._weights()) else FOREVER
        return member.last_used + asked

    def watch(self) -> None:
        """Has idle models unloaded when their time is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        idle = [self.expires(member) for member in self._members.values() if not member.is_busy]
        if self._opener is None or self._is_closed or not idle or min(idle) == FOREVER:
            return
        seconds = max(min(idle) - self._clock(), 0.0)
        self._timer = asyncio.get_running_loop().call_later(
            seconds, lambda: self._in_background(self._unload_expired())
        )

    async def _unload_expired(self) -> None:
        async with self._changing:
            now = self._clock()
            over = [one for one in self._members.values() if not one.is_busy and self.expires(one) <= now]
            with self._closed_to_others(over):
                await self._take_out(over)
            if over:
                await self._share_out()
        self.watch()

    # --------------------------------------------------------------------------------------------------- the end

    async def drain(self, timeout_seconds: float) -> bool:
        """Takes no more requests and waits for the running ones; False if some were still running then.

        What is being loaded is given up.
        """
        self._is_closed = True
        for loading in list(self._loadings.values()):
            self._end(loading, EngineStopped("the server is stopping"))
            if loading.can_be_given_up and loading.task is not None:
                loading.task.cancel()
        engines = [member.opened.engine for member in self._members.values()]
        return all(await asyncio.gather(*(engine.drain(timeout_seconds) for engine in engines)))

    @property
    def num_running(self) -> int:
        """Requests of all models that have not ended."""
        return sum(member.opened.engine.stats().num_open for member in self._members.values())

    def stop(self) -> None:
        """Ends all engines. Blocks; for any thread, once nothing else happens here."""
        self._is_closed = True
        for member in list(self._members.values()):
            member.opened.engine.stop()


async def _resized(member: Member, budget_bytes: int) -> int:
    """Returns the bytes by which a model's running requests exceed its new budget; see `PooledEngine.try_resize`."""
    try:
        return await member.opened.engine.try_resize(budget_bytes)
    except QueueFull:
        return budget_bytes
    except EngineStopped:
        return 0


async def _checked(source: ModelSource, work: Awaitable[Result]) -> Result:
    """Returns the result of work with a model's files; raises LoadFailed for what is wrong with them."""
    try:
        return await work
    except ModelError as error:
        logger.warning("%s cannot be loaded: %s", source.id, error)
        # Clients are told which file it is, not where it lies.
        told = str(error).replace(f"{source.path}/", "").replace(str(source.path), source.id)
        raise LoadFailed(f"{source.id} cannot be loaded: {told}") from error
    except FolderError as error:
        logger.warning("%s cannot be loaded: %s", source.id, error)
        raise LoadFailed(f"{source.id} cannot be loaded: its folder of --cache-disk cannot be used") from error
    except OSError as error:
        raise LoadFailed(f"{source.id} cannot be read: {error.strerror or error}") from error
