"""Which session a request belongs to, and what its last turns cost. Pure.

A session is a hint for slot affinity and order, never a key to other tokens. Without one the tokens themselves
decide. What may name it stands in `_candidates`, the strongest first.

Bytes of HTTP headers have no encoding: the server reads them as Latin-1, clients write UTF-8. What is recorded
belongs to its namespace and is bounded: the namespace with most sessions loses its oldest, so no client pushes out
another's. Knows no clock, no engine and no HTTP.
"""

import contextlib
import re
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import quote

from typing_extensions import TypedDict

from models.texts import read_object

if TYPE_CHECKING:
    from server.diagnosis.account import Name  # with numpy, which `doctor` starts without

MAX_SESSIONS = 1024
"""The most sessions of all namespaces together."""
_LOOKED_AT = 64
MAX_TURNS = 32
"""The sums include dropped turns."""


class MissBody(TypedDict):
    """One loss against the last turn, and what to do about it."""

    reason: str
    cause: str
    message_index: int | None
    role: str | None
    token: int | None
    before: str
    after: str
    lost_tokens: int
    missing_bytes: int | None
    cure: str


@dataclass(frozen=True, kw_only=True)
class TurnRecord:
    """One request of a session that held a slot."""

    id: str
    previous: str | None
    model: str
    ended: float
    """Seconds since 1970."""
    finish: str
    """`stop`, `length`, `cancelled`, or that it failed."""
    prompt_tokens: int
    cached_tokens: int
    evaluated_tokens: int
    completion_tokens: int
    prompt_ms: float
    tier: str | None
    kept: float | None
    lost_tokens: int
    """Evaluated because of the miss."""
    lost_seconds: float
    """The prompt's time spent on `lost_tokens`."""
    miss: MissBody | None
    """The costliest."""
    misses: list[MissBody]


_SUMMED = ["prompt_tokens", "cached_tokens", "evaluated_tokens", "completion_tokens", "lost_tokens", "lost_seconds"]


@dataclass
class SessionRecord:
    """One session's turns; only `SessionRecords` changes it."""

    name: "Name"
    created: float
    model: str = ""
    num_turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    evaluated_tokens: int = 0
    completion_tokens: int = 0
    lost_tokens: int = 0
    lost_seconds: float = 0.0
    last_miss: MissBody | None = None
    turns: deque[TurnRecord] = field(default_factory=lambda: deque[TurnRecord](maxlen=MAX_TURNS))

    def add(self, turn: TurnRecord) -> None:
        """Counts and keeps a turn; drops the oldest beyond `MAX_TURNS`."""
        self.num_turns += 1
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(turn, name))
        self.last_miss = turn.miss or self.last_miss
        self.model = turn.model
        self.turns.append(turn)


class SessionRecords:
    """The sessions of all namespaces. Event loop only."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._namespaces: OrderedDict[str, OrderedDict[str, SessionRecord]] = OrderedDict()
        self._max_sessions = max_sessions
        self._num_sessions = 0

    def record(self, name: "Name", turn: TurnRecord) -> int:
        """Adds a turn; returns its number in the session."""
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

    def num_turns(self, name: "Name") -> int:
        """A session's number of turns; 0 if unknown."""
        known = self.find(name.namespace, name.id)
        return 0 if known is None else known.num_turns

    def sessions(self, namespace: str | None) -> Iterable[SessionRecord]:
        """A namespace's sessions, or all; last used first."""
        if namespace is not None:
            return reversed(self._namespaces.get(namespace, OrderedDict()).values())
        every = [session for sessions in self._namespaces.values() for session in sessions.values()]
        return sorted(every, key=lambda session: -session.turns[-1].ended)

    def find(self, namespace: str, session_id: str) -> SessionRecord | None:
        """The namespace's session of that name, if any."""
        return self._namespaces.get(namespace, OrderedDict()).get(session_id)

    def forget(self, namespace: str, session_id: str) -> bool:
        """Drops a session; returns whether there was one."""
        sessions = self._namespaces.get(namespace, OrderedDict())
        if sessions.pop(session_id, None) is None:
            return False
        self._num_sessions -= 1
        if not sessions:
            del self._namespaces[namespace]
        return True

    def _drop_one(self) -> None:
        """Drops the fullest namespace's oldest session; unnamed ones of a single request first."""
        fullest = max(self._namespaces, key=lambda name: len(self._namespaces[name]))
        sessions = self._namespaces[fullest]
        passing = (
            name for name, one in islice(sessions.items(), _LOOKED_AT) if not one.name.is_named and one.num_turns == 1
        )
        self.forget(fullest, next(passing, next(iter(sessions))))


MAX_REFUSALS = 32
MAX_NAMESPACES = 128

_Key: TypeAlias = tuple[str, str, str]


@dataclass(frozen=True)
class Refusal:
    """Equal refusals of requests, by the last of them."""

    id: str
    namespace: str
    session_id: str | None
    ended: float
    """Seconds since 1970."""
    path: str
    status: int
    code: str
    param: str | None
    message: str
    count: int = 1


class Refusals:
    """The refusals of all namespaces."""

    def __init__(self) -> None:
        self._namespaces: OrderedDict[str, OrderedDict[_Key, Refusal]] = OrderedDict()

    def record(self, refusal: Refusal) -> None:
        """Keeps or counts a refusal."""
        known = self._namespaces.setdefault(refusal.namespace, OrderedDict())
        key = refusal.path, refusal.code, refusal.message
        before = known.pop(key, None)
        known[key] = refusal if before is None else replace(refusal, count=before.count + 1)
        if len(known) > MAX_REFUSALS:
            known.popitem(last=False)
        self._namespaces.move_to_end(refusal.namespace)
        if len(self._namespaces) > MAX_NAMESPACES:
            self._namespaces.popitem(last=False)

    def of(self, namespace: str | None) -> Iterable[Refusal]:
        """A namespace's refusals, or all; last first."""
        if namespace is not None:
            return reversed(self._namespaces.get(namespace, OrderedDict()).values())
        every = [one for known in self._namespaces.values() for one in known.values()]
        return sorted(every, key=lambda one: -one.ended)

    def forget(self, namespace: str, session_id: str) -> None:
        """Drops a session's refusals."""
        known = self._namespaces.get(namespace, OrderedDict())
        for key in [key for key, one in known.items() if one.session_id == session_id]:
            del known[key]


def header_text(value: str) -> str:
    """A header's value: UTF-8 if its bytes are, else Latin-1."""
    with contextlib.suppress(UnicodeError):
        # Must precede stripping white space: a letter's UTF-8 byte may be white space in Latin-1.
        value = value.encode("latin-1").decode()
    return value.strip()


def ascii_text(value: str) -> str:
    """A value for a header: printable ASCII, else UTF-8 with percent signs."""
    is_plain = value.isascii() and value.isprintable() and value == value.strip()
    return value if is_plain else quote(value, safe="", errors="replace")


SESSION_HEADERS = (
    "x-session-id",
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "thread-id",
    "x-session-affinity",
    "x-openwebui-chat-id",
    "x-conversation-id",
    "x-litellm-session-id",
    "x-smg-routing-key",
)
SESSION_METADATA = ("session_id", "chat_id", "conversation_id")
MAX_SESSION_ID_CHARACTERS = 256

_SESSION_SUFFIX = re.compile(
    r"_session_([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})\Z", re.IGNORECASE
)


class SessionIdError(ValueError):
    """`param` is the name's place in the request."""

    def __init__(self, param: str, reason: str) -> None:
        super().__init__(f"{param} {reason}")
        self.param = param


def resolve_session_id(body: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    """The session's name, 1 to 256 printable characters, or None; raises SessionIdError for any other name.

    Null and empty texts count as absent.
    """
    for param, value in _candidates(body, headers):
        if value is None or value == "":
            continue
        return _checked(param, value)
    return None


def _candidates(body: Mapping[str, Any], headers: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    yield "session_id", body.get("session_id")
    lowered = {name.lower(): value for name, value in headers.items()}
    for name in SESSION_HEADERS:
        yield name, header_text(lowered.get(name, ""))
    yield "prompt_cache_key", body.get("prompt_cache_key")
    metadata = body.get("metadata")
    if isinstance(metadata, Mapping):
        yield "metadata.user_id", _session_in_user_id(metadata.get("user_id"))
        for name in SESSION_METADATA:
            yield f"metadata.{name}", metadata.get(name)
    yield "previous_response_id", body.get("previous_response_id")
    conversation = body.get("conversation")
    yield "conversation", conversation.get("id") if isinstance(conversation, Mapping) else conversation


def _session_in_user_id(user_id: Any) -> Any:
    """Agents put the session into a user's name: as JSON with a `session_id`, or behind `_session_`."""
    if not isinstance(user_id, str):
        return None
    suffix = _SESSION_SUFFIX.search(user_id)
    if suffix:
        return suffix.group(1)
    fields = read_object(user_id, allow_nan=True) if user_id.startswith("{") else None
    return None if fields is None else fields.get("session_id")


def _checked(param: str, value: Any) -> str:
    if not isinstance(value, str):
        raise SessionIdError(param, "must be a text")
    if len(value) > MAX_SESSION_ID_CHARACTERS:
        raise SessionIdError(param, f"has {len(value)} characters; at most {MAX_SESSION_ID_CHARACTERS} are allowed")
    if not value.isprintable():
        raise SessionIdError(param, "holds control characters")
    return value
