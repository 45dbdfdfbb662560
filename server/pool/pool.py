"""The models of one process. Event loop only, but where a docstring says otherwise.

Models are compared by `ModelSource.id`. A held model is never unloaded, and has its due budget for state. Models are
loaded and unloaded one at a time in the order of the requests, and once for all who wait. Others are unloaded for one
only when its files are in order and it is known to fit. A model to be unloaded takes no more requests: new ones wait
after the model that waits for its memory.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from cache.budget import FolderError
from models.errors import ModelBroken, ModelError
from models.texts import size_text
from server.engine.engine import Engine
from server.engine.messages import on_thread
from server.engine.request import EngineStopped, EngineStuck
from server.pool.catalog import Catalog
from server.pool.members import Around, Budgets, Member, ModelHold
from server.pool.memory import SMALLEST_PART_BYTES, ModelUse, PoolSettings, choose_to_unload
from server.pool.names import (
    FOREVER,
    WHEN_SHORT_SECONDS,
    LoadFailed,
    ModelChange,
    ModelInUse,
    ModelNameNeeded,
    ModelNotLoaded,
    ModelSource,
    ModelUnknown,
    PoolBusy,
    PoolError,
    TellChange,
    served_instead,
    spellings,
)
from server.pool.served import ListedModel, ServedModel

logger = logging.getLogger(__name__)

MAX_WAIT_SECONDS = 120.0

Result = TypeVar("Result")


class Opener(Protocol):
    """Loads models. All methods block; `measure` and `open` raise ModelError for unusable files."""

    def measure(self, source: ModelSource) -> int:
        """Checks the files; returns about how many bytes the weights will take."""

    def open(self, source: ModelSource, around: Around, tell: Callable[[str], object]) -> Member:
        """The model, its engine running. `tell` is told each step, and may raise."""

    def describe(self, source: ModelSource) -> ListedModel:
        """What the files say; of damaged ones, the name."""


@dataclass(eq=False)
class Loading:
    """A model being loaded, or given its due budget, and who waits for it."""

    source: ModelSource
    waiters: "list[asyncio.Future[ModelHold]]" = field(default_factory=list)
    step: str = "waiting"
    """For a person."""
    task: "asyncio.Task[None] | None" = None
    """Cancelled when nobody waits; None once the files are being read."""


LOADED: ContextVar[Member | None] = ContextVar("LOADED", default=None)
"""The model that was loaded for a request, and is held while the request is planned.

Otherwise, two requests that take long to plan could have two models loaded by turns for ever.
"""


class ModelPool:
    """Models by name, and engines of the loaded ones."""

    def __init__(
        self,
        catalog: Catalog,
        opened: Sequence[Member] = (),
        opener: Opener | None = None,
        settings: PoolSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`opened` are loaded and in the catalog. Without an `opener` no other model is ever loaded."""
        self._catalog, self._opener, self._clock = catalog, opener, clock
        self._settings = settings = settings or PoolSettings()
        self.loaded: dict[str, Member] = {}
        self._unloading: dict[str, Member] = {}
        self.budgets = Budgets(settings.memory, self.loaded, clock)
        self.on_change: TellChange = lambda change: None
        self._loadings: dict[str, Loading] = {}
        self._changing = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.is_closed = False
        state_bytes = settings.memory.for_state([engine.weights_bytes for engine in opened]) // max(len(opened), 1)
        for engine in opened:
            engine.budget_bytes, engine.last_used = min(state_bytes, engine.useful_bytes), clock()
            self.loaded[engine.source.id] = engine
        self.budgets.plan()

    @classmethod
    def of(cls, *opened: Member) -> "ModelPool":
        """A pool of models that all stay loaded."""
        return cls(Catalog([one.source for one in opened], has_others=False), opened)

    # ------------------------------------------------------------------------------------------ looking things up

    @property
    def members(self) -> Sequence[Member]:
        """Loaded models, the one used last at the end."""
        return sorted(self.loaded.values(), key=lambda member: member.last_used)

    @property
    def served(self) -> Sequence[ServedModel]:
        return [model for member in self.members for model in member.models]

    @property
    def engines(self) -> Mapping[str, Engine]:
        return {member.source.id: member.engine for member in self.members}

    @property
    def watched(self) -> Mapping[str, Engine]:
        """All engines that may get stuck, also those that end. For any thread."""
        return {model_id: member.engine for model_id, member in {**self.loaded, **self._unloading}.items()}

    @property
    def stuck(self) -> dict[str, float]:
        """The models whose engines are stuck, and for how many seconds."""
        engines = self.watched.items()
        return {name: round(seconds, 1) for name, engine in engines if (seconds := engine.stuck_seconds) is not None}

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
        if member is not None:
            return member.served(source)
        return ListedModel(source.name) if self._opener is None else self._opener.describe(source)

    def source_of(self, name: str | None) -> ModelSource:
        """What a name means; without one the default or only model. For any thread; reads the disk.

        Raises ModelNameNeeded, ModelUnknown and LoadFailed.
        """
        if not name:
            return self._default_source()
        try:
            sources = (self._catalog.find(spelling) for spelling in spellings(name, self._settings.aliases))
            source = next((source for source in sources if source is not None), None)
        except ModelBroken as error:
            raise LoadFailed(str(error)) from error
        if source is None:
            raise ModelUnknown(name, served_instead(name, [source.name for source in self._catalog.all()]))
        return source

    def _default_source(self) -> ModelSource:
        default_id = self._settings.default_id
        if default_id is not None and (default := self._catalog.find(default_id)) is not None:
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
        return member.served(source)

    # -------------------------------------------------------------------------------------------- using a model

    def try_hold(self, model: ServedModel) -> ModelHold | None:
        """A hold on what `find` returned; None if it is to be loaded, or lacks its due budget."""
        own = LOADED.get()
        if own is not None and own.has(model):
            return self._hold(own)
        member = self.find_loaded(model.base_id)
        return self._hold(member) if member and member.has(model) and self.budgets.has_due(member) else None

    def forget_unloaded(self, source: ModelSource, namespace: str) -> tuple[int, int, int]:
        """Drops a namespace of an unloaded model; returns as `EngineState.clear`."""
        state = self.budgets.unloaded.get(source.id)
        return (0, 0, 0) if state is None else state.clear(namespace)

    def forget_session_of_unloaded(self, namespace: str, session_id: str) -> None:
        """Drops what unloaded models left of a session, but not the state of its tokens."""
        for state in self.budgets.unloaded.values():
            state.forget_client(namespace, session_id)

    def find_loaded(self, model_id: str) -> Member | None:
        """A loaded model that takes requests. For any thread."""
        member = self.loaded.get(model_id)
        return None if member is None or member.is_leaving else member

    async def load(self, source: ModelSource) -> ModelHold:
        """Waits until the model is loaded. A cancel ends the loading, but for others or read files.

        Raises PoolError, and EngineStopped while the server stops.
        """
        member = self.find_loaded(source.id)
        if member is not None and self.budgets.has_due(member):
            return self._hold(member)
        loading = self._loadings.get(source.id) or self._begin(source)
        waiter: asyncio.Future[ModelHold] = asyncio.get_running_loop().create_future()
        loading.waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            self._leave(loading, waiter)
            raise

    @property
    def loading(self) -> Mapping[str, str]:
        return {model_id: loading.step for model_id, loading in self._loadings.items()}

    async def unload(self, source: ModelSource) -> bool:
        """Whether the model was loaded. Raises ModelInUse and EngineStuck."""
        async with self._changing:
            member = self.loaded.get(source.id)
            if member is None:
                return False
            if (seconds := member.engine.stuck_seconds) is not None:
                raise EngineStuck(seconds)
            if member.engine.is_divided:
                raise ModelInUse(f"{source.id} is divided among machines, and stays loaded until the server ends")
            if member.is_busy:
                raise ModelInUse(f"{source.id} answers {member.num_holds} requests; it can be unloaded when they end")
            await self._unload([member])
            await self.budgets.divide()
        return True

    def close(self) -> None:
        """Gives up loadings, and refuses new ones."""
        self.is_closed = True
        for loading in list(self._loadings.values()):
            self._give_up(loading)

    def _hold(self, member: Member) -> ModelHold:
        return ModelHold(member, self._released)

    def _released(self, member: Member) -> None:
        member.num_holds -= 1
        if not member.num_holds:
            member.idle.set()
        member.last_used = self._clock()
        self.watch()
        # The model's conversations may need more memory than it is due.
        if len(self.loaded) > 1 and not self.is_closed and not self._changing.locked():
            self._in_background(self._divide())

    def resize(self, total_bytes: int) -> None:
        """Changes what weights and state may take; later, if models are being loaded or unloaded just now."""
        if self.is_closed or self._changing.locked():
            return
        memory = self._settings.memory
        if abs(total_bytes - memory.total_bytes) >= SMALLEST_PART_BYTES:
            logger.debug("other servers leave %s for weights and state", size_text(total_bytes))
            memory.total_bytes = total_bytes
        elif self.budgets.taken_bytes <= memory.total_bytes:
            return
        self._in_background(self._divide())

    async def _divide(self) -> None:
        async with self._changing:
            await self.budgets.divide()

    # --------------------------------------------------------------------------------------------------- waiting

    def _begin(self, source: ModelSource) -> Loading:
        if self.is_closed:
            raise EngineStopped("the server is stopping")
        if self._opener is None and source.id not in self.loaded:
            raise ModelUnknown(source.id, "it is not loaded, and this server loads no other model")
        loading = self._loadings[source.id] = Loading(source)
        loading.task = self._in_background(self._run(loading))
        return loading

    async def _run(self, loading: Loading) -> None:
        try:
            async with self._changing:
                # Held before the next model's turn, which would unload the unused model.
                self._end(loading, await self._ready(loading))
        except asyncio.CancelledError:
            self._fail(loading, EngineStopped("the server is stopping"))
        except (PoolError, EngineStopped) as error:
            self._fail(loading, error)
        except Exception:  # a bug of ours, or of an architecture's code: it concerns this model only
            logger.exception("%s could not be loaded", loading.source.id)
            text = f"{loading.source.id} could not be loaded; the server's log has the details"
            self._fail(loading, LoadFailed(text))
        self.watch()

    def _fail(self, loading: Loading, error: Exception) -> None:
        self.on_change(ModelChange("failed", loading.source.id, message=str(error)))
        self._end(loading, error)

    def _end(self, loading: Loading, outcome: Member | Exception) -> None:
        """Wakes all who wait; each holds the model."""
        if self._loadings.get(loading.source.id) is loading:
            del self._loadings[loading.source.id]
        for waiter in loading.waiters:
            if waiter.done():
                continue
            if isinstance(outcome, Exception):
                waiter.set_exception(outcome)
            else:
                waiter.set_result(self._hold(outcome))

    def _leave(self, loading: Loading, waiter: "asyncio.Future[ModelHold]") -> None:
        if not waiter.cancelled():
            if waiter.exception() is None:
                waiter.result().close()
        elif all(one.cancelled() for one in loading.waiters) and loading.task is not None:
            self._give_up(loading)

    def _give_up(self, loading: Loading) -> None:
        self._end(loading, EngineStopped("the server is stopping"))
        if loading.task is not None:
            loading.task.cancel()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    # --------------------------------------------------------------------------------------------------- loading

    async def _ready(self, loading: Loading) -> Member:
        is_loaded = loading.source.id in self.loaded
        with ExitStack() as stack:
            try:
                member = self.loaded[loading.source.id] if is_loaded else await self._load(loading)
                # The model counts as in use from now on, however long this takes.
                stack.enter_context(self._hold(member))
                if is_loaded:
                    await self._make_room(loading, [])
                return member
            finally:
                await self.budgets.divide()

    async def _load(self, loading: Loading) -> Member:
        source, settings, opener = loading.source, self._settings, self._opener
        assert opener is not None, "a model is to be loaded, and nothing can open it"
        loading.step = "looking at its files"
        weights_bytes = await _checked(source, asyncio.to_thread(opener.measure, source))
        now, former = self._clock(), self.budgets.unloaded.get(source.id)
        uses = [member.use(now) for member in self.loaded.values()]
        ids = choose_to_unload(uses, source.id, weights_bytes, settings.memory, settings.max_models)
        leaving = [self.loaded[model_id] for model_id in ids]
        used_bytes = 0 if former is None else former.num_bytes
        self.budgets.joining = ModelUse(source.id, now, weights_bytes, used_bytes, is_in_use=True)
        for member in leaving:
            member.is_leaving = True
        try:
            plan = await self._make_room(loading, leaving)
            loading.task = None
            await self._unload(leaving)
            await self.budgets.shrink(plan)
            try:
                return await self._open(loading, opener, plan[source.id])
            except BaseException:
                # Models that were unloaded in vain come back.
                for member in leaving:
                    if not self.is_closed and member.source.id not in self._loadings:
                        self._begin(member.source).task = None
                raise
        finally:
            self.budgets.joining = None
            for member in leaving:
                member.is_leaving = False

    async def _make_room(self, loading: Loading, leaving: Sequence[Member]) -> Mapping[str, int]:
        """Waits for models to unload, cuts the budgets of the others; returns the plan. Raises PoolBusy."""

        def tell_wait(member: Member) -> None:
            loading.step = f"waiting for memory that answers of {member.source.id} hold"

        try:
            async with asyncio.timeout(MAX_WAIT_SECONDS):
                for member in leaving:
                    loading.step = f"waiting for {member.source.id} to finish its answers"
                    await member.idle.wait()
                    if member.source.id in self.stuck:
                        raise TimeoutError
                plan = self.budgets.plan()
                await self.budgets.shrink(plan, tell_wait)
                return plan
        except TimeoutError:
            busy = ", ".join(member.source.id for member in self.loaded.values() if member.is_busy) or "others"
            raise PoolBusy(f"{loading.source.id} fits only once {busy} have finished; try again") from None

    async def _open(self, loading: Loading, opener: Opener, budget_bytes: int) -> Member:
        source, began = loading.source, self._clock()
        logger.info("loading %s", source.id)
        self.on_change(ModelChange("loading", source.id))
        former = self.budgets.unloaded.pop(source.id, None)
        weights = [member.weights_bytes for member in self.loaded.values()]
        around = Around(weights, budget_bytes, former)

        def tell(step: str) -> None:
            if self.is_closed:
                raise EngineStopped("the server is stopping")
            loading.step = step

        def run() -> Member:
            opened = opener.open(source, around, tell)
            if self.is_closed:
                opened.unload()
                raise EngineStopped("the server is stopping")
            return opened

        try:
            member = await _checked(source, on_thread("mlx-serve-loader", run))
        except Exception:
            if former is not None:
                self.budgets.unloaded[source.id] = former
            raise
        if former is not None and not former.num_bytes:
            self.budgets.on_given_up(source.id)
        member.budget_bytes, member.last_used = budget_bytes, self._clock()
        self.loaded[source.id] = member
        await self._wire()
        seconds = self._clock() - began
        logger.info("loaded %s in %.1f s", source.id, seconds)
        self.on_change(ModelChange("loaded", source.id, seconds))
        return member

    # ------------------------------------------------------------------------------------------------- unloading

    async def _unload(self, leaving: Sequence[Member]) -> None:
        for member in leaving:
            model_id = member.source.id
            self._unloading[model_id] = self.loaded.pop(model_id)
            try:
                state = await asyncio.to_thread(member.unload)
            finally:
                del self._unloading[model_id]
            await self._wire()
            if state is not None:
                state.last_used = member.last_used
                self.budgets.unloaded[model_id] = state
            else:
                self.budgets.on_given_up(model_id)  # at most on disk
            logger.info("unloaded %s", model_id)
            self.on_change(ModelChange("unloaded", model_id))

    async def _wire(self) -> None:
        is_quiet = not any(one.is_busy for one in self.loaded.values())
        await asyncio.to_thread(self._settings.wire, self.budgets.weights_bytes, is_quiet)

    def expires(self, member: Member) -> float:
        """Returns when an idle model is unloaded: as a client or the setting says, else if memory is short."""
        if member.engine.is_divided:
            return FOREVER
        is_short = self._settings.memory.is_short(self.budgets.weights_bytes)
        asked = (member.keep_alive_seconds, self._settings.keep_alive_seconds)
        default = WHEN_SHORT_SECONDS if is_short else FOREVER
        return member.last_used + next((seconds for seconds in asked if seconds is not None), default)

    def watch(self) -> None:
        """Unloads idle models in time; to be called when anything changed."""
        if self._timer is not None:
            self._timer.cancel()
        next_at = min((self.expires(one) for one in self.loaded.values() if not one.is_busy), default=FOREVER)
        if next_at < FOREVER and self._opener is not None and not self.is_closed:
            seconds = max(next_at - self._clock(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(
                seconds, lambda: self._in_background(self._unload_expired())
            )

    def _expired(self) -> list[Member]:
        now = self._clock()
        return [one for one in self.loaded.values() if not one.is_busy and self.expires(one) <= now]

    async def _unload_expired(self) -> None:
        async with self._changing:
            # One by one: others may be asked for meanwhile.
            while expired := self._expired():
                await self._unload(expired[:1])
            await self.budgets.divide()
        self.watch()

    # --------------------------------------------------------------------------------------------------- the end

    async def drain(self, timeout_seconds: float) -> bool:
        """Refuses new requests; returns whether running ones ended in time."""
        self.close()
        engines = [member.engine for member in self.members]
        return all(await asyncio.gather(*(engine.drain(timeout_seconds) for engine in engines)))

    @property
    def num_running(self) -> int:
        return sum(member.engine.stats().num_open for member in self.members)

    def stop(self) -> None:
        """Ends all engines. Blocks; for any thread, once the pool is otherwise quiet."""
        self.is_closed = True
        # One that hangs keeps no other from saving its state.
        for member in self.members:
            member.engine.begin_stop()
        for member in self.members:
            member.engine.stop()


async def _checked(source: ModelSource, work: Awaitable[Result]) -> Result:
    try:
        return await work
    except ModelError as error:
        logger.warning("%s cannot be loaded: %s", source.id, error)
        # Clients get the name of the file, not its folder.
        text = str(error).replace(f"{source.path}/", "").replace(str(source.path), source.id)
        raise LoadFailed(f"{source.id} cannot be loaded: {text}") from error
    except FolderError as error:
        logger.warning("%s cannot be loaded: %s", source.id, error)
        raise LoadFailed(f"{source.id} cannot be loaded: its folder of --cache-disk cannot be used") from error
    except OSError as error:
        raise LoadFailed(f"{source.id} cannot be read: {error.strerror or error}") from error
