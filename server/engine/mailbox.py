"""From the worker thread to the event loop: what is posted while the loop is still to wake is read in one go.

A decode step posts a token for each of its rows. Waking the loop for each of them costs a system call, and has the
loop's thread and the worker's take the interpreter from one another once a row.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

Delivery: TypeAlias = Callable[[], None]


class Mailbox:
    """Runs deliveries on one event loop, in the order in which they were posted."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._posted: deque[Delivery] = deque()
        self._wakes = False
        """Whether the loop was woken and has not begun to read since."""

    def post(self, delivery: Delivery) -> None:
        """Has `delivery` run on the loop. Safe from any thread; raises RuntimeError if the loop is closed."""
        self._posted.append(delivery)
        if self._wakes:
            return
        # First the mark, then the call: were it the other way round, the loop might read between the two, and the
        # mark would stand for ever.
        self._wakes = True
        try:
            self.loop.call_soon_threadsafe(self._read)
        except RuntimeError:
            self._wakes = False
            raise

    def _read(self) -> None:
        # What is posted from here on wakes the loop again, whether or not it is still read now.
        self._wakes = False
        for _ in range(len(self._posted)):
            self._posted.popleft()()
