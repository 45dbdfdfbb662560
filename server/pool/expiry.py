"""When idle models are unloaded. Event loop only."""

import asyncio
from collections.abc import Callable

from server.pool.keep_alive import FOREVER, WHEN_SHORT_SECONDS
from server.pool.member import Member
from server.pool.members import Members
from server.pool.settings import PoolSettings


class Expiry:
    """Watches how long models have been idle."""

    def __init__(self, members: Members, settings: PoolSettings, clock: Callable[[], float]) -> None:
        self._members = members
        self._settings = settings
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None

    def expires(self, member: Member) -> float:
        """Returns when a model will have been idle for so long that it is unloaded, by the clock."""
        asked = member.keep_alive_seconds
        if asked is None:
            asked = self._settings.keep_alive_seconds
        if asked is None:
            asked = WHEN_SHORT_SECONDS if self._settings.memory.is_short(self._members.weights()) else FOREVER
        return member.last_used + asked

    def seconds_left(self, member: Member) -> float:
        """Returns how long a model stays if nobody asks for it; infinite if it is never unloaded."""
        return max(self.expires(member) - self._clock(), 0.0)

    def expired(self) -> list[Member]:
        """Returns the idle models whose time is over."""
        now = self._clock()
        return [one for one in self._members if not one.is_busy and self.expires(one) <= now]

    def watch(self, unload: Callable[[], object] | None) -> None:
        """Has `unload` called when the next model's time is over; None: never. Call it whenever anything changed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        idle = [self.expires(member) for member in self._members if not member.is_busy]
        if unload is None or not idle or min(idle) == FOREVER:
            return
        self._timer = asyncio.get_running_loop().call_later(max(min(idle) - self._clock(), 0.0), unload)
