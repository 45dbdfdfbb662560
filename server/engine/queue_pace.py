"""How fast requests that wait get their turn, and so when one that was refused should come back. Pure.

Only time in which requests wait is counted: how long a server that is not full takes between two answers tells
nothing of a full one.
"""

import math
from collections import deque

MIN_SECONDS, MAX_SECONDS = 1, 60
UNKNOWN_SECONDS = 2
"""What is said until a request has ended while others waited."""
NUM_ENDS = 64
"""How many of the latest ends are remembered."""


class QueuePace:
    """Counts the ends of requests while others wait. Its caller holds a lock; `now` is in seconds and never falls."""

    def __init__(self) -> None:
        self._waiting_since: float | None = None
        self._counted_seconds = 0.0
        """For how long requests have waited, until they last ceased to."""
        self._ends = deque([0.0], maxlen=NUM_ENDS + 1)
        """When requests ended, in counted seconds, behind the time from which on that was counted."""

    def change(self, now: float, *, has_waiting: bool) -> None:
        """Notes whether requests wait from now on."""
        if has_waiting and self._waiting_since is None:
            self._waiting_since = now
        elif not has_waiting:
            self._counted_seconds = self._counted_at(now)
            self._waiting_since = None

    def end(self, now: float) -> None:
        """Notes that a request has ended; counts only while others wait."""
        if self._waiting_since is not None:
            self._ends.append(self._counted_at(now))

    def retry_after_seconds(self, num_waiting: int, now: float) -> int:
        """Returns in how many seconds half of those that wait have had their turn, between 1 and 60.

        Half: a client that comes back then finds a place, and the queue has not run dry before.
        """
        counted = self._counted_at(now) - self._ends[0]
        num_ends = len(self._ends) - 1
        seconds = counted / num_ends * num_waiting / 2 if num_ends else max(counted, UNKNOWN_SECONDS)
        return max(MIN_SECONDS, min(math.ceil(seconds), MAX_SECONDS))

    def _counted_at(self, now: float) -> float:
        return self._counted_seconds + (0.0 if self._waiting_since is None else now - self._waiting_since)
