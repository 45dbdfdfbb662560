"""Open requests, sums of the past, events about requests and state, and the prefix trees of the last minutes.

A listener keeps only the latest unread events, so publishing costs the same however slow a listener is. A listener
that loses events learns how many. Event loop only.
"""

import asyncio
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

from cache.budget import CacheEvent
from models.adapter import client_namespace
from server.api.record import CANCELLED, OpenRequest, RequestRecord, counts_of
from server.api.sessions import Recent, TokenCounts
from server.api.wire import sse_event
from server.diagnosis.account import EvaluatedTurn
from server.diagnosis.causes import Miss
from server.engine.engine import Engine
from server.engine.request import Delta, Progress, Started, Timings
from server.pool.names import ModelChange

CAPACITY = 1024
KEEP_SECONDS = 60.0
"""How long events are kept after the last listener left."""


@dataclass(frozen=True, eq=False)
class LiveEvent:
    """An event of one namespace; of none if everybody may see it."""

    id: str
    name: str
    namespace: str | None
    fields: Mapping[str, Any]

    @cached_property
    def frame(self) -> bytes:
        """Encoded once for all listeners."""
        return f"id: {self.id}\n".encode() + sse_event({"type": self.name, **self.fields}, self.name)


class EventLog:
    """The latest events, and who listens."""

    def __init__(self, epoch: str, *, wall: Callable[[], float], clock: Callable[[], float]) -> None:
        """`epoch` names this process's events; `wall` reads seconds since 1970."""
        self.on_wanted: Callable[[bool], None] = lambda is_wanted: None
        """Called when events begin to be kept, and when they are no longer."""
        self._epoch, self._wall, self._clock = epoch, wall, clock
        self._events: deque[LiveEvent] = deque(maxlen=CAPACITY)
        self._num_published = 0
        self.listeners: list[Listener] = []
        self._left_at: float | None = None
        """None while somebody listens, and once nothing is kept."""
        self.is_closed = False

    @property
    def is_wanted(self) -> bool:
        """Becomes False some time after the last listener left."""
        if self._left_at is not None and self._clock() > self._left_at + KEEP_SECONDS:
            self._left_at = None
            self._events.clear()
            self.on_wanted(False)
        return bool(self.listeners) or self._left_at is not None

    def publish(self, name: str, namespace: str | None, /, **fields: Any) -> None:
        """Keeps an event and wakes its listeners, while events are wanted."""
        if not self.is_wanted:
            return
        self._num_published += 1
        event = self.event(self._id(self._num_published), name, namespace, **fields)
        self._events.append(event)
        for listener in self.listeners:
            listener.add(event)

    def event(self, event_id: str, name: str, namespace: str | None, /, **fields: Any) -> LiveEvent:
        """An event of now."""
        return LiveEvent(event_id, name, namespace, {"time": round(self._wall(), 3), **fields})

    def listen(self, namespace: str | None, last_id: str | None = None) -> "Listener":
        """A listener to a namespace, or all, after the event `last_id` if known, else from now on."""
        was_wanted, self._left_at = self.is_wanted, None
        kept = list(self._events)
        places = [self._id(self._num_published - len(kept)), *(event.id for event in kept)]
        is_known = last_id is None or last_id in places
        start = len(kept) if last_id is None else places.index(last_id) if is_known else 0
        listener = Listener(self, namespace, places[start], is_known=is_known)
        for event in kept[start:]:
            listener.add(event)
        self.listeners.append(listener)
        if not was_wanted:
            self.on_wanted(True)
        return listener

    def leave(self, listener: "Listener") -> None:
        """Ends a listener. Idempotent."""
        if listener in self.listeners:
            self.listeners.remove(listener)
            if not self.listeners:
                self._left_at = self._clock()

    def close(self) -> None:
        """Ends all listeners, because the server stops."""
        self.is_closed = True
        for listener in self.listeners:
            listener.wake.set()

    def _id(self, number: int) -> str:
        return f"{self._epoch}-{number}"


class Listener:
    """What one client has yet to read."""

    def __init__(self, log: EventLog, namespace: str | None, place_id: str, *, is_known: bool) -> None:
        """`place_id` is of the event before the first; unless it `is_known`, an unknown number is lost before."""
        self.place_id = place_id
        self.wake = asyncio.Event()
        self._log, self._namespace = log, namespace
        self._unread = deque[LiveEvent](maxlen=CAPACITY)
        self._num_lost: int | None = 0 if is_known else None
        if not is_known:
            self.wake.set()

    def add(self, event: LiveEvent) -> None:
        """Keeps an event that the client may see; of too many the oldest is lost."""
        if self._namespace is not None and event.namespace not in (None, self._namespace):
            return
        if len(self._unread) == CAPACITY:
            self.place_id = self._unread[0].id
            self._num_lost = None if self._num_lost is None else self._num_lost + 1
        self._unread.append(event)
        self.wake.set()

    def take(self) -> list[LiveEvent]:
        """The unread events, oldest first. If events were lost, the first one tells how many."""
        lost = [] if self._num_lost == 0 else [self._log.event(self.place_id, "lost", None, count=self._num_lost)]
        taken, self._num_lost = [*lost, *self._unread], 0
        self._unread.clear()
        self.wake.clear()
        return taken


MAX_NAMESPACES = 1024
"""Beyond this the least recently active is dropped."""


@dataclass
class LostTokens:
    """Tokens evaluated again for one reason."""

    reason: str
    count: int = 0
    tokens: int = 0


@dataclass(kw_only=True)
class Sums(TokenCounts):
    """Sums of ended requests since the start."""

    requests: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    lost_tokens: int = 0
    saved_seconds: float = 0.0
    restored_tokens: dict[str, int] = field(default_factory=lambda: {"live": 0, "memory": 0, "disk": 0})
    """By tier."""
    misses: list[LostTokens] = field(default_factory=list)
    """The costliest reason first."""

    def add(self, record: RequestRecord) -> None:
        """Adds a request."""
        first, turn = record.first, record.turn
        self.requests += 1
        self.succeeded += first.has_ended
        self.failed += first.error is not None
        self.cancelled += not first.has_ended and first.error is None
        if first.started is None:
            return
        self.add_counts(turn)
        self.saved_seconds += record.saved_seconds
        if turn.tier is not None:
            self.restored_tokens[turn.tier] += turn.cached_tokens
        for miss in turn.misses:
            self._add_miss(miss)

    def _add_miss(self, miss: Miss) -> None:
        lost = next((one for one in self.misses if one.reason == miss.reason), LostTokens(miss.reason))
        if not lost.count:
            self.misses.append(lost)
        lost.count += 1
        lost.tokens += miss.lost_tokens
        self.lost_tokens += miss.lost_tokens
        self.misses.sort(key=lambda one: -one.tokens)


MAX_ENDED, MAX_ALL_ENDED = 256, 2048
"""Ended requests kept of one namespace, and of all."""
MAX_LEVELS = 512
MAX_DECIDED = 32
LEVEL_SECONDS = 2.0
"""Between two levels of held bytes: a quarter of an hour has 450."""
PACE_TOKENS = 64
"""Fewer are too short to measure the time per token."""


class Unplanned(NamedTuple):
    """A request whose model is being loaded."""

    id: str
    model: str
    endpoint: str
    namespace: str
    key: str | None
    session_id: str | None
    received_at: float
    """`time.monotonic()`."""


class Activity:
    """One server's open requests, log of events, sums, and pace."""

    def __init__(self, log: EventLog, engines: Callable[[], Mapping[str, Engine]]) -> None:
        self.log = log
        self._engines = engines
        self._open: dict[OpenRequest, None] = {}
        self.unplanned: dict[Unplanned, None] = {}
        """The oldest first."""
        self._sums_of_all, self._sums = Sums(), Recent[Sums](MAX_NAMESPACES)
        self._ended = Recent[dict[str, Any]](MAX_ALL_ENDED, MAX_ENDED)
        self.levels = deque[tuple[float, int, int, int]](maxlen=MAX_LEVELS)
        """At ends of requests: seconds since 1970, and bytes of state live, stored and on disk."""
        self.decided = deque[tuple[str, str, EvaluatedTurn]](maxlen=MAX_DECIDED)
        """Namespace, model and prompt of the last requests that generate nothing, as decisions do."""
        self._seconds_per_token = dict[str, float]()
        """By model, of its last long prompt."""
        log.on_wanted = self._watch_all

    def sums_of(self, namespace: str | None) -> Sums:
        """The sums of one namespace; None for all."""
        return self._sums_of_all if namespace is None else self._sums.find(namespace, "") or Sums()

    def note_pace(self, model_id: str, timings: Timings) -> None:
        """Learns from a successful request."""
        if timings.evaluated_tokens >= PACE_TOKENS:
            self._seconds_per_token[model_id] = timings.prompt_ms / 1000 / timings.evaluated_tokens

    def seconds_for(self, model_id: str, num_tokens: int) -> float | None:
        """The time to evaluate `num_tokens`; None until the model's pace is known."""
        each = self._seconds_per_token.get(model_id)
        return None if each is None else num_tokens * each

    def open_requests(self, namespace: str | None) -> Sequence[OpenRequest]:
        """Open requests of one namespace or all, oldest first."""
        return [one for one in self._open if namespace is None or one.request.namespace == namespace]

    def latest(self, namespace: str | None) -> list[dict[str, Any]]:
        """The last ended requests of one namespace or all, the latest first, with the fields of their events."""
        return self._ended.of(namespace)

    def forget_session(self, namespace: str, session_id: str) -> None:
        """Drops a session's ended requests."""
        for one in self._ended.of(namespace):
            if one["session_id"] == session_id:
                self._ended.forget(namespace, one["id"])

    def forget(self, request: OpenRequest) -> None:
        """Notes that a request runs no more."""
        self._open.pop(request, None)

    def note(self, request: OpenRequest, event: Started | Progress | Delta | None = None) -> None:
        """Publishes what happened: an event, of deltas the first; None: the request waits for a slot."""
        if event is None:
            self._open[request] = None
        if self.log.is_wanted:
            self._publish(request, *running_event(request, event))

    def tell(self, record: RequestRecord) -> None:
        """Sums an ended request, and publishes the end of its choices."""
        namespace = record.first.request.namespace
        own = self.sums_of(namespace)
        self._sums.put(namespace, "", own)
        for sums in (self._sums_of_all, own):
            sums.add(record)
        self._note_level(record.ended_at)
        if record.first.request.is_prefix_only and (turn := record.first.turn_so_far) is not None:
            self.decided.append((namespace, record.first.model_id, turn))
        for choice in reversed(record.choices):
            self._open.pop(choice, None)
            ended, known = ended_fields(record, choice), known_fields(choice)
            received = round(record.ended_at - record.total_seconds, 3)
            times = {"received": received, "ended": round(record.ended_at, 3)}
            self._ended.put(namespace, choice.request.request_id, {**known, **ended, **times})
            if self.log.is_wanted:
                self._publish(choice, "request.ended", ended)

    def _note_level(self, now: float) -> None:
        if self.levels and now - self.levels[-1][0] < LEVEL_SECONDS:
            return
        caches = [engine.stats().cache for engine in self._engines().values()]
        sums = (
            sum(getattr(cache, name) for cache in caches) for name in ("live_bytes", "stored_bytes", "disk_bytes")
        )
        self.levels.append((round(now, 3), *sums))

    def _publish(self, request: OpenRequest, name: str, fields: Mapping[str, Any]) -> None:
        self.log.publish(name, request.request.namespace, **request.who, **fields)

    # ------------------------------------------------------------------------------------------- models and state

    def note_model(self, change: ModelChange) -> None:
        """Publishes that a model comes or goes, and listens to its engine."""
        if not self.log.is_wanted:
            return
        seconds = None if change.seconds is None else round(change.seconds, 1)
        fields = {"model": change.model_id, "seconds": seconds, "message": change.message}
        known = {name: value for name, value in fields.items() if value is not None}
        self.log.publish(f"model.{change.kind}", None, **known)
        engine = self._engines().get(change.model_id)
        if engine is not None:
            engine.watch(partial(self._note_state, change.model_id))

    def _watch_all(self, is_wanted: bool) -> None:
        for model_id, engine in self._engines().items():
            engine.watch(partial(self._note_state, model_id) if is_wanted else None)

    def _note_state(self, model_id: str, event: CacheEvent) -> None:
        namespace, _ = client_namespace(event.namespace)
        self.log.publish(event.what.value, namespace, model=model_id, namespace=namespace, **event.fields)


def known_fields(request: OpenRequest) -> dict[str, Any]:
    """What events have said of a request so far."""
    started = running_event(request, request.started)[1] if request.started is not None else {}
    first = {} if request.first_text_ms is None else {"first_ms": request.first_text_ms}
    return {**request.who, **running_event(request, None)[1], **started, **first}


_TOLD_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")


def running_event(request: OpenRequest, event: Started | Progress | Delta | None) -> tuple[str, dict[str, Any]]:
    """An event's name and fields."""
    match event:
        case None:
            sampling = {name: getattr(request.request.sampling, name) for name in _TOLD_SAMPLING}
            tokens = {"prompt_tokens": len(request.request.tokens), "max_tokens": request.request.max_tokens}
            return "request.queued", {"endpoint": request.arrival.endpoint, **tokens, **sampling}
        case Started():
            queue_ms = 1000 * (request.started_at - request.arrival.received) - event.restore_ms
            return "request.started", {
                "slot": event.slot,
                "prompt_tokens": event.prompt_tokens,
                "match_tokens": event.match_tokens,
                "cached_tokens": event.hit_tokens,
                "tier": event.tier,
                "rounded_tokens": event.rounded_tokens,
                "queue_ms": max(0.0, round(queue_ms, 1)),
                "restore_ms": round(event.restore_ms, 1),
                "miss": event.reuse.miss,
            }
        case Progress():
            return "request.progress", {"evaluated": event.evaluated, "total": event.total}
        case Delta():
            return "request.first_token", {"ms": request.first_text_ms}


def ended_fields(record: RequestRecord, request: OpenRequest) -> dict[str, Any]:
    """Fields of the event about a choice's end."""
    timings, is_first = request.timings, request is record.first
    return {
        "finish": request.outcome or CANCELLED,
        **vars(counts_of([request])),
        "prompt_ms": None if timings is None else round(timings.prompt_ms, 1),
        "predicted_ms": None if timings is None else round(timings.predicted_ms, 1),
        "total_ms": round(1000 * record.total_seconds, 1),
        "tier": request.tier,
        "lost_tokens": record.turn.lost_tokens if is_first else 0,
        "miss": record.turn.miss if is_first else None,
        "saved_seconds": round(record.saved_seconds, 3) if is_first else 0.0,
    }


# ---------------------------------------------------------------------------------------------------- earlier trees

KEEP_TREE_SECONDS = 900.0
MIN_SAMPLE_SECONDS = 5.0
"""Between two samples of one tree."""
MAX_TREE_BYTES = 8 << 20


class TreeSample(NamedTuple):
    """What `/v1/cache` answered, packed."""

    namespace: str
    model: str
    time: float
    packed: bytes


class TreeHistory:
    """Samples of prefix trees in the last minutes, the oldest first; the oldest go beyond `max_bytes`."""

    def __init__(self, wall: Callable[[], float], max_bytes: int = MAX_TREE_BYTES) -> None:
        """`wall` reads seconds since 1970."""
        self._wall, self._max_bytes = wall, max_bytes
        self._samples = deque[TreeSample]()
        self.num_bytes = 0

    def is_due(self, namespace: str, model: str) -> bool:
        """Whether the last sample of a tree is old enough."""
        times = self.times(namespace, model)
        return not times or self._wall() - times[-1] >= MIN_SAMPLE_SECONDS

    def times(self, namespace: str, model: str) -> list[float]:
        """When a tree was sampled."""
        self._drop()
        return [one.time for one in self._samples if (one.namespace, one.model) == (namespace, model)]

    def add(self, namespace: str, model: str, body: bytes) -> None:
        """Keeps an answer."""
        sample = TreeSample(namespace, model, round(self._wall(), 3), zlib.compress(body, 1))
        self._samples.append(sample)
        self.num_bytes += len(sample.packed)
        self._drop()

    def at(self, namespace: str, model: str, time: float) -> bytes | None:
        """The last answer not later than a time."""
        samples = (one for one in reversed(self._samples) if (one.namespace, one.model) == (namespace, model))
        sample = next((one for one in samples if one.time <= time), None)
        return None if sample is None else zlib.decompress(sample.packed)

    def forget(self, namespace: str) -> None:
        """Drops all samples of a namespace, whose state or texts are to go."""
        self._samples = deque(one for one in self._samples if one.namespace != namespace)
        self.num_bytes = sum(len(one.packed) for one in self._samples)

    def _drop(self) -> None:
        oldest = self._wall() - KEEP_TREE_SECONDS
        while self._samples and (self.num_bytes > self._max_bytes or self._samples[0].time < oldest):
            self.num_bytes -= len(self._samples.popleft().packed)
