"""Open requests, sums of the past, and events about requests and state.

Listeners share one ring of the latest events, so publishing costs the same however slow a listener is. A listener
whose place has left the ring is told how many of its events were lost. Event loop only.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from typing import Any

from cache.budget import CacheEvent, Happening
from models.adapter import client_namespace
from server.api.record import Moment, OpenRequest, RequestRecord, Told, miss_of
from server.api.sessions import MissBody
from server.api.wire import json_text
from server.engine.request import Delta, Progress, Started, Timings
from server.pool.names import ModelChange
from server.pool.served import EnginePort

CAPACITY = 1024
KEEP_SECONDS = 60.0
"""How long events are kept after the last listener left."""
BATCH = 128


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
    """A server-sent event with an id."""
    return f"id: {event_id}\nevent: {name}\ndata: {json_text({'type': name, **fields})}\n\n".encode()


class EventLog:
    """A ring of events."""

    def __init__(self, epoch: str, *, wall: Callable[[], float], clock: Callable[[], float]) -> None:
        """`epoch` names this process's events; `wall` reads seconds since 1970."""
        self.on_wanted: Callable[[bool], None] = lambda is_wanted: None
        """Called when events begin to be kept, and when they are no longer."""
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
        """Becomes False some time after the last listener left."""
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
        """A listener to a namespace, or all, behind the event `last_id` if known, else from now on."""
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
        """Ends a listener. Idempotent."""
        if listener in self._listeners:
            self._listeners.remove(listener)
            if not self._listeners:
                self._left_at = self._clock()

    def since(self, number: int) -> list[LiveEvent]:
        """The kept events from `number` on."""
        return list(islice(self._events, max(number - self.first, 0), None))

    @property
    def first(self) -> int:
        return self._events[0].number if self._events else self._next

    def id_before(self, number: int) -> str:
        """The id of the place before an event."""
        return self._id(number - 1)

    def _id(self, number: int) -> str:
        return f"{self._epoch}-{number}"

    def _place_behind(self, last_id: str | None) -> int | None:
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
    """One client's place in the log."""

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
        """Id of the last event taken, or of the event before the first."""
        return self._log.id_before(self._place)

    def _may_see(self, event: LiveEvent) -> bool:
        return self._namespace is None or event.namespace is None or event.namespace == self._namespace

    def note(self, event: LiveEvent) -> None:
        """Counts a published event."""
        if self._may_see(event):
            self._num_unread += 1
            self.wake.set()

    def take(self) -> list[LiveEvent | Lost]:
        """The next events to read, oldest first."""
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


MAX_NAMESPACES = 1024
"""Beyond this the least recently active is dropped."""


@dataclass
class LostTokens:
    """Tokens evaluated again for one reason."""

    reason: str
    count: int = 0
    tokens: int = 0


@dataclass
class Sums:
    """Sums of ended requests since the start."""

    requests: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    evaluated_tokens: int = 0
    completion_tokens: int = 0
    lost_tokens: int = 0
    saved_seconds: float = 0.0
    restored_tokens: dict[str, int] = field(default_factory=lambda: {"live": 0, "memory": 0, "disk": 0})
    """By tier."""
    misses: list[LostTokens] = field(default_factory=list)
    """The costliest reason first."""

    def add(self, record: RequestRecord) -> None:
        """Adds a request."""
        first, counts = record.first, record.counts
        self.requests += 1
        self.succeeded += first.has_ended
        self.failed += first.error is not None
        self.cancelled += not first.has_ended and first.error is None
        self.completion_tokens += counts.predicted_tokens
        if record.turn is None:
            return
        self.prompt_tokens += counts.prompt_tokens
        self.cached_tokens += counts.cached_tokens
        self.evaluated_tokens += counts.evaluated_tokens
        self.saved_seconds += record.saved_seconds
        if first.tier is not None:
            self.restored_tokens[first.tier] += counts.cached_tokens
        for miss in record.turn.misses:
            self._add_miss(miss)

    def _add_miss(self, miss: MissBody) -> None:
        lost = next((one for one in self.misses if one.reason == miss["reason"]), LostTokens(miss["reason"]))
        if not lost.count:
            self.misses.append(lost)
        lost.count += 1
        lost.tokens += miss["lost_tokens"]
        self.lost_tokens += miss["lost_tokens"]
        self.misses.sort(key=lambda one: -one.tokens)


class Totals:
    """The sums of all requests and by namespace."""

    def __init__(self) -> None:
        self.all = Sums()
        self._by_namespace: OrderedDict[str, Sums] = OrderedDict()

    def of(self, namespace: str | None) -> Sums:
        """The sums of one namespace; None for all."""
        return self.all if namespace is None else self._by_namespace.get(namespace, Sums())

    def add(self, record: RequestRecord) -> None:
        """Adds a request."""
        namespace = record.first.request.namespace
        own = self._by_namespace.setdefault(namespace, Sums())
        self._by_namespace.move_to_end(namespace)
        while len(self._by_namespace) > MAX_NAMESPACES:
            self._by_namespace.popitem(last=False)
        for sums in (self.all, own):
            sums.add(record)


PACE_TOKENS = 64
"""Fewer are too short to measure the time per token."""


class Pace:
    """Seconds per prompt token of each model, by its last long prompt."""

    def __init__(self) -> None:
        self._seconds_per_token = dict[str, float]()

    def note(self, model_id: str, timings: Timings) -> None:
        """Learns from a successful request."""
        if timings.evaluated_tokens >= PACE_TOKENS:
            self._seconds_per_token[model_id] = timings.prompt_ms / 1000 / timings.evaluated_tokens

    def seconds(self, model_id: str, num_tokens: int) -> float | None:
        """The time for `num_tokens`; None until the pace is known."""
        each = self._seconds_per_token.get(model_id)
        return None if each is None else num_tokens * each


class Activity:
    """One server's open requests, log of events, and sums."""

    def __init__(self, log: EventLog, engines: Callable[[], Mapping[str, EnginePort]]) -> None:
        self.log = log
        self.pace = Pace()
        self.totals = Totals()
        self._engines = engines
        self._open: dict[OpenRequest, None] = {}
        log.on_wanted = self._watch_all

    def open_requests(self, namespace: str | None) -> Sequence[OpenRequest]:
        """Open requests of one namespace or all, oldest first."""
        return [one for one in self._open if namespace is None or one.request.namespace == namespace]

    def forget(self, request: OpenRequest) -> None:
        """Notes that a request runs no more."""
        self._open.pop(request, None)

    def tell(self, told: Told) -> None:
        """Publishes what happens, and sums ended requests."""
        if isinstance(told, Moment):
            if told.event is None:
                self._open[told.of] = None
            if self.log.is_wanted:
                self._publish(told.of, *moment_event(told))
            return
        self.totals.add(told)
        for one in reversed(told.choices):
            self._open.pop(one, None)
            if self.log.is_wanted:
                self._publish(one, "request.ended", ended_fields(told, one))

    def _publish(self, one: OpenRequest, name: str, fields: Mapping[str, Any]) -> None:
        namespace = one.request.namespace
        self.log.publish(
            name,
            namespace,
            id=one.request.request_id,
            model=one.model_id,
            namespace=namespace,
            key=one.arrival.key_name,
            session_id=one.session_id,
            **fields,
        )

    # ------------------------------------------------------------------------------------------- models and state

    def note_model(self, change: ModelChange) -> None:
        """Publishes that a model comes or goes, and listens to its engine."""
        if not self.log.is_wanted:
            return
        seconds = None if change.seconds is None else round(change.seconds, 1)
        fields = {"model": change.model_id, "seconds": seconds, "message": change.message}
        told = {name: value for name, value in fields.items() if value is not None}
        self.log.publish(f"model.{change.kind.value}", None, **told)
        engine = self._engines().get(change.model_id)
        if engine is not None:
            engine.watch(partial(self._note_state, change.model_id))

    def _watch_all(self, is_wanted: bool) -> None:
        for model_id, engine in self._engines().items():
            engine.watch(partial(self._note_state, model_id) if is_wanted else None)

    def _note_state(self, model_id: str, event: CacheEvent) -> None:
        namespace, _ = client_namespace(event.namespace)
        part = "edge" if event.what is Happening.EVICTED else "rows"
        values = {
            "slot": event.slot,
            "kind": "snapshot" if event.is_snapshot else part,
            "tokens": event.num_tokens,
            "files": event.num_files,
            "bytes": event.num_bytes,
            "reason": event.reason,
        }
        fields = {name: values[name] for name in _STATE_FIELDS[event.what].split()}
        self.log.publish(event.what.value, namespace, model=model_id, namespace=namespace, **fields)


_STATE_FIELDS: Mapping[Happening, str] = {
    Happening.PAGED_IN: "slot tokens",
    Happening.PAGED_OUT: "slot tokens",
    Happening.EVICTED: "kind tokens bytes reason",
    Happening.WRITTEN: "kind tokens bytes",
    Happening.READ: "tokens bytes",
    Happening.DELETED: "files bytes",
}
_TOLD_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")


def moment_event(moment: Moment) -> tuple[str, dict[str, Any]]:
    """An event's name and fields."""
    one, event = moment.of, moment.event
    match event:
        case None:
            sampling = {name: getattr(one.request.sampling, name) for name in _TOLD_SAMPLING}
            return "request.queued", {
                "endpoint": one.arrival.endpoint,
                "prompt_tokens": len(one.request.tokens),
                "max_tokens": one.request.max_tokens,
                **sampling,
            }
        case Started():
            queue_ms = _ms(one.started_at - one.arrival.received) - event.restore_ms
            return "request.started", {
                "slot": event.slot,
                "prompt_tokens": event.prompt_tokens,
                "match_tokens": event.match_tokens,
                "cached_tokens": event.hit_tokens,
                "tier": event.tier,
                "queue_ms": max(0.0, round(queue_ms, 1)),
                "restore_ms": round(event.restore_ms, 1),
                "miss": miss_of(event.reuse.miss),
            }
        case Progress():
            return "request.progress", {"evaluated": event.evaluated, "total": event.total}
        case Delta():
            assert one.first_text_at is not None, "a first token was counted"
            return "request.first_token", {"ms": _ms(one.first_text_at - one.arrival.received)}


def ended_fields(record: RequestRecord, one: OpenRequest) -> dict[str, Any]:
    """Fields of the event about a choice's end."""
    timings = one.timings if one.has_ended else None
    turn = record.turn if one is record.first else None
    return {
        "finish": one.outcome or "cancelled",
        "prompt_tokens": len(one.request.tokens),
        "cached_tokens": one.cached_tokens,
        "evaluated_tokens": one.evaluated_tokens,
        "completion_tokens": one.predicted_tokens,
        "prompt_ms": None if timings is None else round(timings.prompt_ms, 1),
        "predicted_ms": None if timings is None else round(timings.predicted_ms, 1),
        "total_ms": _ms(record.total_seconds),
        "tier": one.tier,
        "lost_tokens": turn.lost_tokens if turn is not None else 0,
        "miss": turn.miss if turn is not None else None,
    }


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)
