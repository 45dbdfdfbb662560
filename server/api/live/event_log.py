"""The latest events, for any number of listeners who read as fast as they can.

Publishing costs the same however slow a listener is: all share one ring. A listener whose place has left the ring is
told how many events it lost of those that it may see. Nothing is made or kept once nobody has listened for a while.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from server.api.wire import json_text

CAPACITY = 1024
KEEP_SECONDS = 60.0
"""After the last listener left."""
BATCH = 128
"""Events sent together."""


@dataclass(frozen=True, eq=False)
class LiveEvent:
    """An event of one namespace; of none if everybody may see it."""

    id: str
    number: int
    name: str
    namespace: str | None
    fields: Mapping[str, Any]

    @cached_property
    def frame(self) -> bytes:
        """Encoded once for all listeners."""
        return frame_of(self.name, self.fields, self.id)


def frame_of(name: str, fields: Mapping[str, Any], event_id: str) -> bytes:
    """Returns a server-sent event with an id."""
    return f"id: {event_id}\nevent: {name}\ndata: {json_text({'type': name, **fields})}\n\n".encode()


class EventLog:
    """A ring of events. Event loop only."""

    def __init__(self, epoch: str, *, wall: Callable[[], float], clock: Callable[[], float]) -> None:
        """`epoch` tells this process's events from another's; `wall` reads seconds since 1970."""
        self.on_wanted: Callable[[bool], None] = lambda is_wanted: None
        """Called when events begin to be kept, and when they end."""
        self._epoch = epoch
        self._wall = wall
        self._clock = clock
        self._events: deque[LiveEvent] = deque(maxlen=CAPACITY)
        self._next = 1
        self._listeners: list[Listener] = []
        self._left_at: float | None = None
        """None while somebody listens."""
        self._is_wanted = False
        self.is_closed = False

    @property
    def is_wanted(self) -> bool:
        """Becomes False by itself some time after the last listener left."""
        if self._left_at is not None and self._clock() > self._left_at + KEEP_SECONDS:
            self._left_at, self._is_wanted = None, False
            self._events.clear()
            self.on_wanted(False)
        return self._is_wanted

    @property
    def num_listeners(self) -> int:
        return len(self._listeners)

    def publish(self, name: str, namespace: str | None, /, **fields: Any) -> None:
        """Keeps an event and wakes its listeners, while events are wanted."""
        if not self.is_wanted:
            return
        event = LiveEvent(
            self._id(self._next), self._next, name, namespace, {"time": round(self._wall(), 3), **fields}
        )
        self._next += 1
        self._events.append(event)
        for listener in self._listeners:
            listener.note(event)

    def listen(self, namespace: str | None, last_id: str | None = None) -> "Listener":
        """Returns a listener to a namespace, or all, behind the event `last_id` if known, else from now on."""
        had_been_wanted, self._left_at = self.is_wanted, None
        self._is_wanted = True
        listener = Listener(self, namespace, self._place_behind(last_id))
        self._listeners.append(listener)
        if not had_been_wanted:
            self.on_wanted(True)
        return listener

    def close(self) -> None:
        """Ends all listeners, because the server stops."""
        self.is_closed = True
        for listener in self._listeners:
            listener.wake.set()

    def leave(self, listener: "Listener") -> None:
        """Ends a listener; calling it again has no effect."""
        if listener in self._listeners:
            self._listeners.remove(listener)
            if not self._listeners:
                self._left_at = self._clock()

    def since(self, number: int) -> list[LiveEvent]:
        """Returns the kept events from `number` on."""
        if number <= self.first:
            return list(self._events)
        return [self._events[place] for place in range(number - self.first, len(self._events))]

    @property
    def first(self) -> int:
        """Of the next event if none is kept."""
        return self._events[0].number if self._events else self._next

    def id_before(self, number: int) -> str:
        """Returns the id of the place before an event."""
        return self._id(number - 1)

    def _id(self, number: int) -> str:
        return f"{self._epoch}-{number}"

    def _place_behind(self, last_id: str | None) -> int | None:
        """None if events in between are gone."""
        if last_id is None:
            return self._next
        epoch, _, number = last_id.rpartition("-")
        is_known = epoch == self._epoch and number.isascii() and number.isdecimal() and len(number) < 18
        place = int(number) + 1 if is_known else 0
        return place if self.first <= place <= self._next else None


@dataclass(frozen=True)
class Lost:
    """Events that a listener lost; `count` is None if unknown."""

    count: int | None
    next_number: int


class Listener:
    """One client's place in the log. Event loop only."""

    def __init__(self, log: EventLog, namespace: str | None, place: int | None) -> None:
        """`place` is the next event to read; None: an unknown number was lost."""
        self._log = log
        self._namespace = namespace
        self._lost_unknown = place is None
        self._place = log.first if place is None else place
        self._num_unread = sum(map(self._may_see, log.since(self._place)))
        self.wake = asyncio.Event()
        if self._num_unread or self._lost_unknown:
            self.wake.set()

    @property
    def place_id(self) -> str:
        """Of the last event taken, or the one before the first."""
        return self._log.id_before(self._place)

    def _may_see(self, event: LiveEvent) -> bool:
        return self._namespace is None or event.namespace is None or event.namespace == self._namespace

    def note(self, event: LiveEvent) -> None:
        """Counts a published event."""
        if self._may_see(event):
            self._num_unread += 1
            self.wake.set()

    def take(self) -> list[LiveEvent | Lost]:
        """Returns the next events to read, oldest first."""
        found: list[LiveEvent | Lost] = []
        events = [event for event in self._log.since(self._place) if self._may_see(event)]
        if self._lost_unknown:
            found.append(Lost(None, self._log.first))
            self._lost_unknown = False
        elif len(events) < self._num_unread:
            found.append(Lost(self._num_unread - len(events), self._log.first))
        taken = events[:BATCH]
        self._num_unread = len(events) - len(taken)
        self._place = taken[-1].number + 1 if taken else max(self._place, self._log.first)
        if not self._num_unread:
            self.wake.clear()
        return [*found, *taken]

    def close(self) -> None:
        """Ends the listener."""
        self._log.leave(self)
