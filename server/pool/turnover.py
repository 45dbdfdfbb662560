"""Loads and unloads models one at a time, in the order of the requests, and shares memory out among them.

A model makes way only when the files of the other model were found in order and it is known to fit. Event loop only.

Invariant: the budgets of all models add up to no more than their shares. So models that get less are told first, and
memory that they cannot give, because running requests hold it, goes to nobody else.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from cache.budget import FolderError
from models.errors import ModelError
from server.engine.request import EngineStopped, QueueFull
from server.pool.errors import ChangeKind, LoadFailed, ModelChange, ModelInUse, PoolBusy, TellChange
from server.pool.loading import Around, Loading, LoadingAbandoned, Opener, on_thread
from server.pool.members import Dormitory, Member, Members, OpenedModel
from server.pool.memory import IDLE_SECONDS, PoolMemory, PoolSettings, StateUse, choose_to_leave, plan_loans
from server.pool.names import ModelSource

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.1
"""Pause in seconds before a model that stays is asked again for memory that its answers hold."""


class StateShares:
    """The shares of memory for state, equal for all loaded models, and the loans between them."""

    def __init__(self, memory: PoolMemory, members: Members, dormitory: Dormitory) -> None:
        self._memory = memory
        self._members = members
        self._dormitory = dormitory
        self.on_change: Callable[[], None] = lambda: None
        """Called whenever the memory taken by models has changed."""

    @property
    def taken_bytes(self) -> int:
        """Bytes that the loaded models may take together: weights, and budgets for state."""
        weights = self._members.weights()
        return sum(weights) + self._share_bytes(weights) * len(weights) + self._dormitory.num_bytes

    @property
    def largest_dormant_bytes(self) -> int:
        """Current limit of dormant state in bytes."""
        return self._memory.largest_dormant_bytes(self._members.weights())

    async def share_out(self) -> None:
        """Gives each loaded model its share, smaller budgets first; memory still lent comes back later."""
        share_bytes = self._share_bytes(self._members.weights())
        members = sorted(self._members, key=lambda member: -_budget(member, share_bytes))
        for member in members:
            others = sum(_budget(other, share_bytes) for other in members if other is not member)
            left_bytes = share_bytes * len(members) - others
            await _resized(member, max(min(share_bytes, left_bytes), 1))
            member.is_lending = _budget(member, share_bytes) < share_bytes
        self.on_change()

    async def lend(self, now: float) -> None:
        """Makes idle models lend to one that is short of memory, if there are any."""
        share_bytes = self._share_bytes(self._members.weights())
        members = {member.source.id: member for member in self._members}
        plan = plan_loans([_state_use(member, share_bytes, now) for member in members.values()], share_bytes)
        lent_bytes = 0
        for model_id, budget_bytes in plan.items():
            member = members[model_id]
            before = _budget(member, share_bytes)
            if budget_bytes > before:
                await _resized(member, before + lent_bytes)
                continue
            # First, so that no request is planned for the lender meanwhile.
            member.is_lending = True
            await _resized(member, budget_bytes)
            lent_bytes += before - _budget(member, share_bytes)

    async def take_back(self, loading: Loading) -> None:
        """Gives a lender its whole share back; waits for answers that hold more than the borrower's share."""
        share_bytes = self._share_bytes(self._members.weights())
        for member in [one for one in self._members if one.source.id != loading.source.id]:
            while _budget(member, share_bytes) > share_bytes and await _resized(member, share_bytes):
                loading.step = f"waiting for memory that answers of {member.source.id} hold"
                await asyncio.sleep(RETRY_SECONDS)
        await self.share_out()

    async def shrink(self, loading: Loading, staying: Sequence[Member], weights_bytes: int) -> None:
        """Cuts the models that stay to their share beside one more; waits for answers that hold more."""
        weights = [*(member.opened.weights_bytes for member in staying), weights_bytes]
        limit_bytes = self._memory.largest_dormant_bytes(weights)
        self._dormitory.drop_until(lambda dormant_bytes: dormant_bytes <= limit_bytes)
        share_bytes, share_now = self._share_bytes(weights), self._share_bytes(self._members.weights())
        # Borrowers first: the new share may give a lender more memory.
        for member in sorted(staying, key=lambda member: -_budget(member, share_now)):
            while await _resized(member, share_bytes):
                loading.step = f"waiting for memory that answers of {member.source.id} hold"
                await asyncio.sleep(RETRY_SECONDS)

    def _share_bytes(self, weights: Sequence[int]) -> int:
        return self._memory.share_bytes(weights, self._dormitory.num_bytes)


async def _resized(member: Member, budget_bytes: int) -> int:
    """Returns the bytes by which a model's running requests exceed its new budget; see `PooledEngine.try_resize`."""
    try:
        excess_bytes = await member.opened.engine.try_resize(budget_bytes)
    except QueueFull:
        return budget_bytes
    except EngineStopped:
        return 0
    if not excess_bytes:
        member.budget_bytes = budget_bytes
    return excess_bytes


def _budget(member: Member, share_bytes: int) -> int:
    return share_bytes if member.budget_bytes is None else member.budget_bytes


def _state_use(member: Member, share_bytes: int, now: float) -> StateUse:
    cache, budget_bytes = member.opened.engine.stats().cache, _budget(member, share_bytes)
    return StateUse(
        member.source.id,
        budget_bytes,
        cache.stored_bytes + cache.live_bytes,
        cache.budget_bytes or budget_bytes,
        member.last_used,
        is_idle=not member.is_busy and now - member.last_used >= IDLE_SECONDS,
    )


MAX_WAIT_SECONDS = 120.0
"""Seconds that a model waits for others to finish their answers."""

Result = TypeVar("Result")


class Turnover:
    """Changes which models are loaded."""

    def __init__(
        self,
        members: Members,
        dormitory: Dormitory,
        shares: StateShares,
        settings: PoolSettings,
        *,
        clock: Callable[[], float],
        is_closed: Callable[[], bool],
        bring_back: Callable[[ModelSource], None],
    ) -> None:
        """`is_closed` says, on any thread, whether the server stops; `bring_back` loads a model once more."""
        self._members = members
        self._dormitory = dormitory
        self._shares = shares
        self._settings = settings
        self._clock = clock
        self._is_closed = is_closed
        self._bring_back = bring_back
        self._changing = asyncio.Lock()
        self.on_change: TellChange = lambda change: None
        """Called when a model is being loaded, was loaded, or was unloaded."""

    async def bring_in(self, loading: Loading, opener: Opener, then: Callable[[], None]) -> None:
        """Loads a model, unless it was loaded meanwhile, and calls `then` before the next model's turn.

        Raises LoadFailed, ModelTooLarge, PoolBusy and EngineStopped.
        """
        async with self._changing:
            member = self._members.find(loading.source.id)
            if member is None:
                await self._bring_in(loading, opener)
            elif member.is_lending:
                await self._take_back(loading)
            then()

    async def take_out(self, source: ModelSource) -> bool:
        """Unloads a model; False where it was not loaded. Raises ModelInUse."""
        async with self._changing:
            member = self._members.find(source.id)
            if member is None:
                return False
            if member.is_busy:
                raise ModelInUse(f"{source.id} answers {member.num_holds} requests; it can be unloaded when they end")
            await self._take_out_idle([member])
        return True

    async def take_out_expired(self, expired: Callable[[], Sequence[Member]]) -> None:
        """Unloads the idle models that `expired` returns at their turn."""
        async with self._changing:
            over = expired()
            if over:
                await self._take_out_idle(over)

    async def lend(self) -> None:
        """Makes idle models lend to one short of memory, unless models are being loaded or unloaded."""
        if not self._changing.locked():
            async with self._changing:
                await self._shares.lend(self._clock())

    async def _take_back(self, loading: Loading) -> None:
        """Gives a lender its share back. Raises PoolBusy; then the loan goes on."""
        async with self._time_limit(loading, list(self._members)):
            await self._shares.take_back(loading)

    async def _bring_in(self, loading: Loading, opener: Opener) -> None:
        source = loading.source
        loading.step = "looking at its files"
        weights_bytes = await _checked(source, asyncio.to_thread(opener.measure, source))
        left = await self._make_way(loading, weights_bytes)
        logger.info("loading %s", source.id)
        self.on_change(ModelChange(ChangeKind.LOADING, source.id))
        began = self._clock()
        try:
            opened = await self._open(loading, opener)
        except BaseException:
            # Models that made way in vain come back.
            await self._shares.share_out()
            for gone in left:
                self._bring_back(gone)
            raise
        self._members.add(Member(source, opened, self._clock()))
        await self._shares.share_out()
        seconds = self._clock() - began
        logger.info("loaded %s in %.1f s", source.id, seconds)
        self.on_change(ModelChange(ChangeKind.LOADED, source.id, seconds))

    async def _open(self, loading: Loading, opener: Opener) -> OpenedModel:
        source = loading.source
        dormant = self._dormitory.take(source.id)
        around = Around(self._members.weights(), self._dormitory.num_bytes, dormant)

        def tell(step: str) -> None:
            if self._is_closed():
                raise LoadingAbandoned
            loading.step = step

        def run() -> OpenedModel:
            opened = opener.open(source, around, tell)
            if self._is_closed():
                opened.unload()
                raise LoadingAbandoned
            return opened

        try:
            opened = await _checked(source, on_thread("mlx-serve-loader", run))
        except LoadingAbandoned:
            raise EngineStopped("the server is stopping") from None
        except Exception:
            if dormant is not None:
                self._dormitory.give_back(source.id, dormant)
            raise
        if dormant is not None and dormant.is_dropped:
            self._dormitory.on_given_up(source.id)
        return opened

    async def _make_way(self, loading: Loading, weights_bytes: int) -> list[ModelSource]:
        """Unloads the models that make way, once idle, and shrinks the others' shares; returns the unloaded ones.

        Raises ModelTooLarge and PoolBusy; then nothing has changed.
        """
        settings, source = self._settings, loading.source
        residents = [member.resident() for member in self._members]
        ids = choose_to_leave(residents, source.id, weights_bytes, settings.memory, settings.max_models)
        leaving = [member for member in self._members if member.source.id in ids]
        staying = [member for member in self._members if member not in leaving]
        with self._members.closed_to_others(leaving):
            async with self._time_limit(loading, [*leaving, *staying]):
                for member in leaving:
                    loading.step = f"waiting for {member.source.id} to finish its answers"
                    await member.idle.wait()
                await self._shares.shrink(loading, staying, weights_bytes)
            loading.can_be_given_up = False
            await self._unload(leaving)
        return [member.source for member in leaving]

    @contextlib.asynccontextmanager
    async def _time_limit(self, loading: Loading, members: Sequence[Member]) -> AsyncIterator[None]:
        """Raises PoolBusy when the models have not become idle in time, and restores the shares."""
        try:
            async with asyncio.timeout(MAX_WAIT_SECONDS):
                yield
        except TimeoutError:
            busy = ", ".join(member.source.id for member in members if member.is_busy)
            await self._shares.share_out()
            raise PoolBusy(
                f"{loading.source.id} fits only once {busy or 'others'} have finished; try again"
            ) from None
        except asyncio.CancelledError:
            await self._shares.share_out()
            raise

    async def _take_out_idle(self, idle: Sequence[Member]) -> None:
        with self._members.closed_to_others(idle):
            await self._unload(idle)
        await self._shares.share_out()

    async def _unload(self, leaving: Sequence[Member]) -> None:
        for member in leaving:
            self._members.remove(member)
            dormant = await asyncio.to_thread(member.opened.unload)
            if dormant is not None:
                self._dormitory.keep(member.source.id, dormant, self._shares.largest_dormant_bytes)
            logger.info("unloaded %s", member.source.id)
            self.on_change(ModelChange(ChangeKind.UNLOADED, member.source.id))


async def _checked(source: ModelSource, work: Awaitable[Result]) -> Result:
    """Returns the result of work with a model's files. Raises LoadFailed for unusable files."""
    try:
        return await work
    except ModelError as error:
        logger.warning("%s cannot be loaded: %s", source.id, error)
        # Clients get the name of the file, not its folder.
        told = str(error).replace(f"{source.path}/", "").replace(str(source.path), source.id)
        raise LoadFailed(f"{source.id} cannot be loaded: {told}") from error
    except FolderError as error:
        logger.warning("%s cannot be loaded: %s", source.id, error)
        raise LoadFailed(f"{source.id} cannot be loaded: its folder of --cache-disk cannot be used") from error
    except OSError as error:
        raise LoadFailed(f"{source.id} cannot be read: {error.strerror or error}") from error
