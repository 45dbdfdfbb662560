"""What the server is doing: open requests, events about them and their state, and sums of the past.

`Arrival` is an HTTP request, `OpenRequest` an engine request of it. `Totals` sums the costs of ended requests by
namespace. `Pace` estimates the time saved by restored tokens. Events about state come from the engines' workers
through their mailboxes, and only while somebody listens. Event loop only.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias

from cache.journal import CacheEvent, Happening, Tell
from models.adapter import client_namespace
from server.api.live.event_log import EventLog
from server.api.record import AnswerFigures, miss_of
from server.api.sessions import TurnRecord
from server.diagnosis.account import Conversations, Name
from server.engine.diagnosis import Miss
from server.engine.request import Delta, Event, GenerationRequest, Progress, Started, Timings
from server.pool.errors import ModelChange

MAX_NAMESPACES = 1024
"""Above this number, the sums of the namespace that asked least recently are dropped."""


@dataclass
class LostTokens:
    """How often, and how many, tokens were evaluated again for one reason."""

    count: int = 0
    tokens: int = 0


@dataclass
class Sums:
    """Sums of ended requests."""

    requests: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    evaluated_tokens: int = 0
    completion_tokens: int = 0
    saved_seconds: float = 0.0
    restored: dict[str, int] = field(default_factory=lambda: {"live": 0, "memory": 0, "disk": 0})
    """Tokens by the tier that held their state."""
    lost: dict[str, LostTokens] = field(default_factory=dict)
    """Keyed by reason."""

    def add(self, figures: AnswerFigures, misses: Iterable[Miss], saved_seconds: float) -> None:
        """Adds a request with all of its choices."""
        counts = figures.counts
        self.requests += 1
        self.succeeded += figures.has_ended
        self.failed += figures.error is not None
        self.cancelled += not figures.has_ended and figures.error is None
        self.completion_tokens += counts.predicted
        if figures.started is None:
            return
        self.prompt_tokens += counts.prompt
        self.cached_tokens += counts.cached
        self.evaluated_tokens += counts.evaluated
        self.saved_seconds += saved_seconds
        if figures.started.tier is not None:
            tier = str(figures.started.tier)
            self.restored[tier] = self.restored.get(tier, 0) + counts.cached
        for miss in misses:
            lost = self.lost.setdefault(miss.reason.value, LostTokens())
            lost.count += 1
            lost.tokens += miss.lost_tokens


class Totals:
    """The sums of one server. Event loop only."""

    def __init__(self) -> None:
        self.all = Sums()
        self._by_namespace: OrderedDict[str, Sums] = OrderedDict()

    def of(self, namespace: str | None) -> Sums:
        """Returns the sums of one namespace; None for all."""
        return self.all if namespace is None else self._by_namespace.get(namespace, Sums())

    def add(self, namespace: str, figures: AnswerFigures, misses: Iterable[Miss], saved_seconds: float) -> None:
        """Adds a request of a namespace."""
        known = list(misses)
        own = self._by_namespace.pop(namespace, None) or Sums()
        self._by_namespace[namespace] = own
        while len(self._by_namespace) > MAX_NAMESPACES:
            self._by_namespace.popitem(last=False)
        for sums in (self.all, own):
            sums.add(figures, known, saved_seconds)


PACE_TOKENS = 64
"""Prompts with fewer evaluated tokens are too short to measure the time per token."""


class Pace:
    """Seconds per prompt token of each model, by its last long prompt. Event loop only."""

    def __init__(self) -> None:
        self._seconds_per_token = dict[str, float]()

    def note(self, model_id: str, timings: Timings) -> None:
        """Learns from a successful request."""
        if timings.evaluated_tokens >= PACE_TOKENS:
            self._seconds_per_token[model_id] = timings.prompt_ms / 1000 / timings.evaluated_tokens

    def seconds(self, model_id: str, num_tokens: int) -> float | None:
        """Returns the time to evaluate `num_tokens`; None until the model's pace is known."""
        each = self._seconds_per_token.get(model_id)
        return None if each is None else num_tokens * each


class WatchedEngine(Protocol):
    """An engine that reports what happens to its state."""

    def watch(self, tell: Tell | None) -> None:
        """Calls `tell` on the event loop for each event about state; None ends that."""
        ...


@dataclass(eq=False)
class OpenRequest:
    """An engine request that has not ended."""

    request: GenerationRequest
    model_id: str
    endpoint: str
    key_name: str | None
    received: float
    """Reading of `time.monotonic()`."""
    figures: AnswerFigures
    log: EventLog
    session_id: str | None = None
    received_at: float = field(default_factory=time.time)
    """Seconds since 1970."""

    @property
    def phase(self) -> str:
        """`waiting`, `prefill` or `decode`."""
        if self.figures.started is None:
            return "waiting"
        return "prefill" if self.figures.first_text_at is None else "decode"

    def begin(self) -> None:
        """Publishes that the request is queued."""
        self.session_id = self.request.session_id
        request = self.request
        self._tell(
            "request.queued",
            endpoint=self.endpoint,
            prompt_tokens=len(request.tokens),
            max_tokens=request.max_tokens,
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            top_k=request.sampling.top_k,
            min_p=request.sampling.min_p,
            seed=request.sampling.seed,
        )

    def observe(self, event: Event, session_id: str | None) -> None:
        """Publishes an event that `figures` have counted; `session_id` is the conversation's present name."""
        self.session_id = session_id
        match event:
            case Started():
                self._tell_started(event)
            case Progress():
                self._tell("request.progress", evaluated=event.evaluated, total=event.total)
            case Delta() if self.figures.num_predicted == len(event.token_ids):
                self._tell("request.first_token", ms=_ms(time.monotonic() - self.received))

    def _tell_started(self, event: Started) -> None:
        self._tell(
            "request.started",
            slot=event.slot,
            prompt_tokens=event.prompt_tokens,
            match_tokens=event.match_tokens,
            cached_tokens=event.hit_tokens,
            tier=event.tier,
            queue_ms=max(0.0, round(_ms(self.figures.started_at - self.received) - event.restore_ms, 1)),
            restore_ms=round(event.restore_ms, 1),
            miss=miss_of(event.reuse.miss),
        )

    def end(self, turn: TurnRecord | None) -> None:
        """Publishes how the request ended; `turn` is None for a request without a slot, and for further choices."""
        figures = self.figures
        timings = figures.timings if figures.has_ended else None
        self._tell(
            "request.ended",
            finish=figures.outcome or "cancelled",
            prompt_tokens=len(self.request.tokens),
            cached_tokens=figures.started.hit_tokens if figures.started is not None else 0,
            evaluated_tokens=figures.num_evaluated,
            completion_tokens=figures.num_predicted,
            prompt_ms=None if timings is None else round(timings.prompt_ms, 1),
            predicted_ms=None if timings is None else round(timings.predicted_ms, 1),
            total_ms=_ms(time.monotonic() - self.received),
            tier=figures.started.tier if figures.started is not None else None,
            lost_tokens=turn.lost_tokens if turn is not None else 0,
            miss=miss_of(turn.miss) if turn is not None else None,
        )

    def _tell(self, name: str, **fields: Any) -> None:
        if self.log.is_wanted:
            self.log.publish(
                name,
                self.request.namespace,
                id=self.request.request_id,
                model=self.model_id,
                namespace=self.request.namespace,
                key=self.key_name,
                session_id=self.session_id,
                **fields,
            )


class Activity:
    """The open requests of one server, the log of events, and the sums."""

    def __init__(self, log: EventLog, engines: Callable[[], Mapping[str, WatchedEngine]]) -> None:
        """`engines` returns the engines of the loaded models by id."""
        self.log = log
        self.pace = Pace()
        self.totals = Totals()
        self._engines = engines
        self._open: dict[OpenRequest, None] = {}
        log.on_wanted = self._watch_all

    def begin(self, request: OpenRequest) -> None:
        """Notes a submitted request."""
        self._open[request] = None
        request.begin()

    def end(self, request: OpenRequest, turn: TurnRecord | None) -> None:
        """Notes the end of a request, however it ended."""
        if self._open.pop(request, request) is None:
            request.end(turn)

    def withdraw(self, request: OpenRequest) -> None:
        """Forgets a request that was refused after all."""
        self._open.pop(request, None)

    def open_requests(self, namespace: str | None) -> Sequence[OpenRequest]:
        """Returns the open requests of one namespace, or of all, oldest first."""
        return [one for one in self._open if namespace is None or one.request.namespace == namespace]

    def note_counted(self, model_id: str, namespace: str, figures: AnswerFigures, turn: TurnRecord | None) -> float:
        """Adds a request with all of its choices to the sums; returns the seconds saved by restored tokens."""
        if figures.timings is not None and figures.has_ended:
            self.pace.note(model_id, figures.timings)
        saved = 0.0 if figures.started is None else self.pace.seconds(model_id, figures.counts.cached) or 0.0
        self.totals.add(namespace, figures, turn.misses if turn is not None else (), saved)
        return saved

    # ------------------------------------------------------------------------------------------- models and state

    def note_model(self, change: ModelChange) -> None:
        """Publishes that a model comes or goes, and listens to a loaded model's engine."""
        if not self.log.is_wanted:
            return
        fields: dict[str, Any] = {"model": change.model_id}
        if change.seconds is not None:
            fields["seconds"] = round(change.seconds, 1)
        if change.message is not None:
            fields["message"] = change.message
        self.log.publish(f"model.{change.kind.value}", None, **fields)
        engine = self._engines().get(change.model_id)
        if engine is not None:
            self._watch(change.model_id, engine)

    def _watch_all(self, is_wanted: bool) -> None:
        for model_id, engine in self._engines().items():
            if is_wanted:
                self._watch(model_id, engine)
            else:
                engine.watch(None)

    def _watch(self, model_id: str, engine: WatchedEngine) -> None:
        engine.watch(partial(self._note_state, model_id))

    def _note_state(self, model_id: str, event: CacheEvent) -> None:
        namespace, _ = client_namespace(event.namespace)
        self.log.publish(
            event.what.value, namespace, model=model_id, namespace=namespace, **_STATE_FIELDS[event.what](event)
        )


def _paged(event: CacheEvent) -> dict[str, Any]:
    return {"slot": event.slot, "tokens": event.num_tokens}


def _evicted(event: CacheEvent) -> dict[str, Any]:
    kind = "snapshot" if event.is_snapshot else "edge"
    reason = event.reason.value if event.reason is not None else None
    return {"kind": kind, "tokens": event.num_tokens, "bytes": event.num_bytes, "reason": reason}


def _written(event: CacheEvent) -> dict[str, Any]:
    kind = "snapshot" if event.is_snapshot else "rows"
    return {"kind": kind, "tokens": event.num_tokens, "bytes": event.num_bytes}


def _read(event: CacheEvent) -> dict[str, Any]:
    return {"tokens": event.num_tokens, "bytes": event.num_bytes}


def _deleted(event: CacheEvent) -> dict[str, Any]:
    return {"files": event.num_files, "bytes": event.num_bytes}


_STATE_FIELDS: Mapping[Happening, Callable[[CacheEvent], dict[str, Any]]] = {
    Happening.PAGED_IN: _paged,
    Happening.PAGED_OUT: _paged,
    Happening.EVICTED: _evicted,
    Happening.WRITTEN: _written,
    Happening.READ: _read,
    Happening.DELETED: _deleted,
}


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)


OnTurn: TypeAlias = Callable[[Name, TurnRecord], int]
"""Takes the conversation and its turn; returns the turn's number in the conversation, from 1."""


@dataclass(frozen=True, eq=False)
class Arrival:
    """One HTTP request."""

    endpoint: str
    received: float
    """Reading of `time.monotonic()`."""
    activity: Activity
    on_turn: OnTurn
    """Called once for each request that held a slot, however it ended."""
    conversations: Conversations = field(default_factory=Conversations)
    """The conversations that the request may continue."""
    key_name: str | None = None
    """Name of the request's key, for the log."""
    trace_parent: str | None = None
    """The header that names the client's trace."""

    def begin(self, request: GenerationRequest, model_id: str, figures: AnswerFigures) -> OpenRequest:
        """Notes that an engine request was submitted for this arrival."""
        opened = OpenRequest(
            request, model_id, self.endpoint, self.key_name, self.received, figures, self.activity.log
        )
        self.activity.begin(opened)
        return opened
