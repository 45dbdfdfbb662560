"""Records the costs of each session's last turns, for `/v1/sessions`.

Kept on the event loop from the events of finished requests, so that reading never waits for the engine. A session is
found under its namespace only. The number of turns per session and of sessions in all are bounded. Above the bound
the namespace with the most sessions loses its oldest, so that no client can push out the sessions of another.
Pure: no clock, no engine, no HTTP.

Requests that were refused, by namespace, for `/v1/sessions` and `mlx-serve doctor`.

The same refusal is kept once and counted. The number of refusals of a namespace and of namespaces is bounded; the
least recently used go. Pure: no clock, no HTTP. Event loop only.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeAlias

from server.diagnosis.account import Name
from server.engine.diagnosis import Miss

MAX_SESSIONS = 1024
"""Sessions kept in all namespaces together."""
_LOOKED_AT = 64
MAX_TURNS = 32
"""Turns kept of one session; the sums count dropped ones too."""


@dataclass(frozen=True)
class TurnRecord:
    """One request of a session that held a slot."""

    request_id: str
    model_id: str
    ended: float
    """Seconds since 1970."""
    finish: str
    """Why it ended: `stop`, `length`, `cancelled`, or that it failed."""
    prompt_tokens: int
    cached_tokens: int
    evaluated_tokens: int
    predicted_tokens: int
    prompt_ms: float
    """Time to evaluate `evaluated_tokens`."""
    tier: str | None
    kept: float | None
    lost_tokens: int
    """Tokens evaluated because of the miss, as far as the previous prompt reached."""
    misses: tuple[Miss, ...] = ()
    previous_id: str | None = None
    """The request that it was compared with; None without one."""

    @property
    def miss(self) -> Miss | None:
        """The costliest of its misses."""
        return max(self.misses, key=lambda miss: miss.lost_tokens, default=None)

    @property
    def lost_seconds(self) -> float:
        """The share of the prompt's time that went into `lost_tokens`."""
        if not self.evaluated_tokens:
            return 0.0
        return self.prompt_ms / 1000 * min(1.0, self.lost_tokens / self.evaluated_tokens)


@dataclass
class SessionRecord:
    """The turns of one session; changed by `SessionRecords` only."""

    name: Name
    created: float
    model_id: str = ""
    """That of its last turn."""
    num_turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    evaluated_tokens: int = 0
    predicted_tokens: int = 0
    lost_tokens: int = 0
    lost_seconds: float = 0.0
    last_miss: Miss | None = None
    turns: deque[TurnRecord] = field(default_factory=lambda: deque[TurnRecord](maxlen=MAX_TURNS))

    def add(self, turn: TurnRecord) -> None:
        """Counts a turn and keeps it; drops the oldest of more than `MAX_TURNS`."""
        self.num_turns += 1
        self.prompt_tokens += turn.prompt_tokens
        self.cached_tokens += turn.cached_tokens
        self.evaluated_tokens += turn.evaluated_tokens
        self.predicted_tokens += turn.predicted_tokens
        self.lost_tokens += turn.lost_tokens
        self.lost_seconds += turn.lost_seconds
        self.last_miss = turn.miss or self.last_miss
        self.model_id = turn.model_id
        self.turns.append(turn)


class SessionRecords:
    """The sessions of all namespaces. Event loop only."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._namespaces: OrderedDict[str, OrderedDict[str, SessionRecord]] = OrderedDict()
        self._max_sessions = max_sessions
        self._num_sessions = 0

    def record(self, name: Name, turn: TurnRecord) -> int:
        """Adds a turn to a session, and returns its number there; an unknown session begins with it."""
        namespace, session_id = name.namespace, name.id
        sessions = self._namespaces.setdefault(namespace, OrderedDict())
        if session_id not in sessions:
            sessions[session_id] = SessionRecord(name, created=turn.ended)
            self._num_sessions += 1
        session = sessions[session_id]
        session.add(turn)
        sessions.move_to_end(session_id)
        self._namespaces.move_to_end(namespace)
        if self._num_sessions > self._max_sessions:
            self._drop_one()
        return session.num_turns

    def sessions(self, namespace: str) -> Iterable[SessionRecord]:
        """Returns the sessions of a namespace, the last used first."""
        return reversed(self._namespaces.get(namespace, OrderedDict()).values())

    def all_sessions(self) -> Iterable[SessionRecord]:
        """Returns the sessions of all namespaces, the last used first."""
        every = [session for sessions in self._namespaces.values() for session in sessions.values()]
        return sorted(every, key=lambda session: -session.turns[-1].ended)

    def find(self, namespace: str, session_id: str) -> SessionRecord | None:
        """Returns a session, or None where the namespace has none of that name."""
        return self._namespaces.get(namespace, OrderedDict()).get(session_id)

    def forget(self, namespace: str, session_id: str) -> bool:
        """Drops a session; False where the namespace has none of that name."""
        sessions = self._namespaces.get(namespace, OrderedDict())
        if sessions.pop(session_id, None) is None:
            return False
        self._num_sessions -= 1
        if not sessions:
            del self._namespaces[namespace]
        return True

    def _drop_one(self) -> None:
        """Drops the oldest session of the namespace with the most; among equals, of the one used least recently.

        Single requests that no client named go first, as far as they are among the oldest.
        """
        fullest = max(self._namespaces, key=lambda name: len(self._namespaces[name]))
        sessions = self._namespaces[fullest]
        passing = (
            name for name, one in islice(sessions.items(), _LOOKED_AT) if not one.name.is_named and one.num_turns == 1
        )
        self.forget(fullest, next(passing, next(iter(sessions))))


MAX_REFUSALS = 32
"""Different refusals kept of one namespace."""
MAX_NAMESPACES = 128

_Key: TypeAlias = tuple[str, str, str]


@dataclass(frozen=True)
class Origin:
    """Whose request it is."""

    namespace: str
    session_id: str | None = None


@dataclass(frozen=True)
class Refusal:
    """A request that was answered with an error, the last of its kind."""

    origin: Origin
    request_id: str
    ended: float
    """Seconds since 1970."""
    path: str
    status: int
    code: str
    param: str | None
    message: str
    count: int = 1
    """How many were alike."""


class Refusals:
    """The refusals of all namespaces."""

    def __init__(self) -> None:
        self._namespaces: OrderedDict[str, OrderedDict[_Key, Refusal]] = OrderedDict()

    def record(self, refusal: Refusal) -> None:
        """Keeps a refusal, or counts it to an earlier one that said the same."""
        known = self._namespaces.setdefault(refusal.origin.namespace, OrderedDict())
        key = refusal.path, refusal.code, refusal.message
        before = known.pop(key, None)
        known[key] = refusal if before is None else replace(refusal, count=before.count + 1)
        if len(known) > MAX_REFUSALS:
            known.popitem(last=False)
        self._namespaces.move_to_end(refusal.origin.namespace)
        if len(self._namespaces) > MAX_NAMESPACES:
            self._namespaces.popitem(last=False)

    def of(self, namespace: str) -> Iterable[Refusal]:
        """Returns those of a namespace, the last first."""
        return reversed(self._namespaces.get(namespace, OrderedDict()).values())

    def all(self) -> Iterable[Refusal]:
        """Returns those of all namespaces, the last first."""
        every = [one for known in self._namespaces.values() for one in known.values()]
        return sorted(every, key=lambda one: -one.ended)

    def forget(self, namespace: str, session_id: str) -> None:
        """Drops what was refused of a session."""
        known = self._namespaces.get(namespace, OrderedDict())
        for key in [key for key, one in known.items() if one.origin.session_id == session_id]:
            del known[key]
