"""What the endpoints of one server share."""

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request

from server.api.activity import Activity, EventLog
from server.api.errors import stopped
from server.api.observe import Metrics, Tracing
from server.api.planning import Planning
from server.api.rate_limits import RateLimits
from server.api.record import RequestLog, RequestRecord, Subscriber, Told
from server.api.sessions import Refusals, SessionRecords
from server.app.config import ServerConfig
from server.app.keys import KeyRing
from server.diagnosis.account import Conversations
from server.pool.pool import ModelPool
from server.pool.served import EnginePort, ServedModel

Kept = TypeVar("Kept")


@dataclass(eq=False)
class ApiContext:
    """What all endpoints share. Event loop only, unless a member says otherwise."""

    config: ServerConfig
    pool: ModelPool
    keys: KeyRing = field(default_factory=KeyRing)
    """Replaced while the server runs."""
    rate_limits: RateLimits = field(default_factory=lambda: RateLimits(time.monotonic))
    sessions: SessionRecords = field(default_factory=SessionRecords)
    refusals: Refusals = field(default_factory=Refusals)
    conversations: Conversations = field(default_factory=Conversations)
    planning: Planning = field(default_factory=Planning)
    is_draining: bool = False

    background: set["asyncio.Task[None]"] = field(default_factory=set)
    metrics: Metrics = field(init=False)
    activity: Activity = field(init=False)
    started: float = field(default_factory=time.monotonic)
    """`time.monotonic()`."""
    subscribers: list[Subscriber] = field(init=False)
    tracing: Tracing | None = None
    _kept: dict[Callable[[ServerConfig], Any], Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.conversations.is_whole = self.config.cache_disk_bytes is None
        self.metrics = Metrics(lambda: self.pool.engines, self.config.slots)
        log = EventLog(secrets.token_hex(4), wall=time.time, clock=time.monotonic)
        self.activity = Activity(log, lambda: self.pool.engines)
        self.subscribers = [self._keep_turn, self.activity.tell, RequestLog().tell, self.metrics.tell]

    def tell(self, told: Told) -> None:
        """Tells every subscriber."""
        for subscriber in self.subscribers:
            subscriber(told)

    def _keep_turn(self, told: Told) -> None:
        if isinstance(told, RequestRecord) and told.name is not None and told.turn is not None:
            self.sessions.record(told.name, told.turn)

    def kept(self, make: Callable[[ServerConfig], Kept]) -> Kept:
        """What a dialect keeps, made by the first call. For any thread."""
        with self._lock:
            if make not in self._kept:
                self._kept[make] = make(self.config)
            found: Kept = self._kept[make]
        return found

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs work that handles its own errors."""
        task = asyncio.get_running_loop().create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    def find_model(self, name: str | None) -> ServedModel:
        """The loaded model, without a name the default. Any thread; raises PoolError."""
        return self.pool.find(name)

    def running_engine(self, model: ServedModel) -> EnginePort:
        """A model's engine; raises ApiError (503) if it accepts no requests."""
        engine = self.pool.engines.get(model.base_id)
        if self.is_draining or engine is None or not engine.is_running:
            raise stopped()
        return engine


def context_of(request: Request) -> ApiContext:
    """What the endpoints of the app share."""
    context = request.app.state.api
    assert isinstance(context, ApiContext)
    return context
