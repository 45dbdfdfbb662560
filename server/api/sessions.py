"""Which session a request belongs to, and what its last turns cost. Pure.

A session is a hint for slot affinity and order, never a key to other tokens. Without one the tokens themselves
decide. What may name it stands in `_candidates`, the strongest first.

Bytes of HTTP headers have no encoding: the server reads them as Latin-1, clients write UTF-8. What is recorded
belongs to its namespace and is bounded: the namespace with most sessions loses its oldest, so no client pushes out
another's. Knows no clock, no engine and no HTTP.
"""

import contextlib
import re
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import quote

from models.errors import InvalidParameter
from models.texts import read_object
from server.diagnosis.causes import Healed, Miss
from server.diagnosis.prompt import RepeatedCall

if TYPE_CHECKING:
    from server.diagnosis.account import Name  # with numpy, which `doctor` starts without

Value = TypeVar("Value")

MAX_SESSIONS = 1024
"""The most sessions of all namespaces together."""
_LOOKED_AT = 64
MAX_TURNS = 32
"""The sums include dropped turns."""


@dataclass(kw_only=True)
class TokenCounts:
    """Tokens of all choices; a shared prompt counts once."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    evaluated_tokens: int = 0
    completion_tokens: int = 0

    def add_counts(self, more: "TokenCounts") -> None:
        """Adds other tokens to these."""
        for counted in fields(TokenCounts):
            setattr(self, counted.name, getattr(self, counted.name) + getattr(more, counted.name))


@dataclass(kw_only=True)
class TurnRecord(TokenCounts):
    """One request of a session. Never changed."""

    id: str
    previous: str | None
    model: str
    ended: float
    """Seconds since 1970."""
    finish: str
    """`stop`, `length`, `cancelled`, or that it failed."""
    prompt_ms: float
    tier: str | None
    rounded_tokens: int = 0
    """Of `cached_tokens`, those whose state was stored in 8 bits."""
    kept: float | None
    lost_tokens: int
    """Evaluated because of the miss."""
    lost_seconds: float
    """The prompt's time spent on `lost_tokens`."""
    miss: Miss | None
    """The costliest."""
    misses: list[Miss]
    healed: Healed | None = None


class Recent(Generic[Value]):
    """Values by namespace and key, the last put first; of too many the fullest namespace loses its oldest."""

    def __init__(self, most: int, most_each: int | None = None) -> None:
        """`most_each` is the bound of a namespace, if it has one of its own."""
        self._most, self._most_each = most, most_each or most
        self._values: OrderedDict[tuple[str, Hashable], Value] = OrderedDict()
        self._sizes: dict[str, int] = {}

    def find(self, namespace: str, key: Hashable) -> Value | None:
        """The value, if any."""
        return self._values.get((namespace, key))

    def of(self, namespace: str | None) -> list[Value]:
        """A namespace's values, or all; the last put first."""
        return [value for (space, _), value in reversed(self._values.items()) if namespace in (None, space)]

    def put(self, namespace: str, key: Hashable, value: Value) -> None:
        """Adds or replaces a value."""
        self.forget(namespace, key)
        self._values[namespace, key] = value
        self._sizes[namespace] = self._sizes.pop(namespace, 0) + 1
        if self._sizes[namespace] > self._most_each:
            self._drop_one(namespace)
        elif len(self._values) > self._most:
            self._drop_one(max(self._sizes, key=self._sizes.__getitem__))

    def forget(self, namespace: str, key: Hashable) -> bool:
        """Drops a value; returns whether there was one."""
        if self._values.pop((namespace, key), None) is None:
            return False
        self._sizes[namespace] -= 1
        if not self._sizes[namespace]:
            del self._sizes[namespace]
        return True

    def is_passing(self, value: Value) -> bool:
        """Whether a value goes before older ones."""
        return False

    def _drop_one(self, namespace: str) -> None:
        own = ((key, value) for (space, key), value in self._values.items() if space == namespace)
        oldest = list(islice(own, _LOOKED_AT))
        self.forget(namespace, next((key for key, value in oldest if self.is_passing(value)), oldest[0][0]))


@dataclass(kw_only=True)
class SessionRecord(TokenCounts):
    """A session's sums and last state."""

    id: str
    object: str = "session"
    named: bool
    namespace: str
    key: str | None = None
    client: str = ""
    """The first word of the last request's `User-Agent`."""
    title: str = ""
    """The beginning of the first question, while it is kept; filled in where the session is told."""
    model: str = ""
    created: float
    last_used: float = 0.0
    num_turns: int = 0
    lost_tokens: int = 0
    lost_seconds: float = 0.0
    healed_tokens: int = 0
    rounded_tokens: int = 0
    kept: float | None = None
    last_miss: Miss | None = None
    repeated_call: RepeatedCall | None = None


@dataclass(kw_only=True)
class SessionDetail(SessionRecord):
    """A session with its last turns."""

    turns: list[TurnRecord] = field(default_factory=list)


class SessionRecords(Recent[SessionDetail]):
    """The sessions of all namespaces. Event loop only."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        super().__init__(max_sessions)

    def record(
        self, name: "Name", turn: TurnRecord, repeated_call: RepeatedCall | None = None, client: str = ""
    ) -> None:
        """Counts and keeps a turn; drops the oldest beyond `MAX_TURNS`."""
        new = SessionDetail(id=name.id, named=name.is_named, namespace=name.namespace, created=turn.ended)
        session = self.find(name.namespace, name.id) or new
        session.num_turns += 1
        session.add_counts(turn)
        session.lost_tokens += turn.lost_tokens
        session.lost_seconds += turn.lost_seconds
        session.rounded_tokens += turn.rounded_tokens
        session.healed_tokens += turn.healed.saved_tokens if turn.healed is not None else 0
        session.model, session.last_used, session.kept = turn.model, turn.ended, turn.kept
        session.client = client or session.client
        session.last_miss = turn.miss or session.last_miss
        session.repeated_call = repeated_call or session.repeated_call
        session.turns = [*session.turns, turn][-MAX_TURNS:]
        self.put(name.namespace, name.id, session)

    def is_passing(self, value: SessionDetail) -> bool:
        """An unnamed session of a single request."""
        return not value.named and value.num_turns == 1


MAX_REFUSALS = 32
"""The most refusals of one namespace."""
MAX_ALL_REFUSALS = 4096


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


class Refusals(Recent[Refusal]):
    """The refusals of all namespaces."""

    def __init__(self) -> None:
        super().__init__(MAX_ALL_REFUSALS, MAX_REFUSALS)

    def record(self, refusal: Refusal) -> None:
        """Keeps or counts a refusal."""
        key = refusal.path, refusal.code, refusal.message
        before = self.find(refusal.namespace, key)
        self.put(refusal.namespace, key, refusal if before is None else replace(refusal, count=before.count + 1))

    def forget_session(self, namespace: str, session_id: str) -> None:
        """Drops a session's refusals."""
        for one in self.of(namespace):
            if one.session_id == session_id:
                self.forget(namespace, (one.path, one.code, one.message))


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
    *("x-session-id", "x-claude-code-session-id", "session-id", "session_id", "thread-id", "x-session-affinity"),
    *("x-openwebui-chat-id", "x-conversation-id", "x-litellm-session-id", "x-smg-routing-key"),
)
SESSION_METADATA = ("session_id", "chat_id", "conversation_id")
MAX_SESSION_ID_CHARACTERS = 256

_SESSION_SUFFIX = re.compile(
    r"_session_([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})\Z", re.IGNORECASE
)


def resolve_session_id(body: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    """The session's name, 1 to 256 printable characters, or None; raises InvalidParameter for any other name.

    Null and empty texts count as absent.
    """
    for param, value in _candidates(body, headers):
        if value is None or value == "":
            continue
        if not isinstance(value, str):
            raise InvalidParameter(param, f"{param} must be a text")
        if len(value) > MAX_SESSION_ID_CHARACTERS:
            allowed = f"at most {MAX_SESSION_ID_CHARACTERS} are allowed"
            raise InvalidParameter(param, f"{param} has {len(value)} characters; {allowed}")
        if not value.isprintable():
            raise InvalidParameter(param, f"{param} holds control characters")
        return value
    return None


def resolve_line(body: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    """`SESSION/LINE` for a request with a line of its own, else the session's name; raises InvalidParameter.

    Sub-agents, titles, reviews and compactions say what they are, and continue none of the session's own turns.
    """
    session, metadata = resolve_session_id(body, headers), codex_metadata(body, headers)
    thread, kind = metadata.get("thread_id"), metadata.get("request_kind")
    whose = metadata.get(AGENT_HEADER) or (thread if thread != session else None) or metadata.get("x-openai-subagent")
    lines = (whose, None if kind == "turn" else kind)
    named = [one for one in lines if isinstance(one, str) and one and one.isprintable()]
    return "/".join(filter(None, [session, *named]))[:MAX_SESSION_ID_CHARACTERS] or None


AGENT_HEADER = "x-claude-code-agent-id"
_TURN_METADATA = "x-codex-turn-metadata"
_LINE_HEADERS = {"thread-id": "thread_id", "x-openai-subagent": "x-openai-subagent", AGENT_HEADER: AGENT_HEADER}


def codex_metadata(body: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    """What agents say of a request: in headers, in the field `client_metadata`, and in JSON in either."""
    field, lowered = body.get("client_metadata"), {name.lower(): value for name, value in headers.items()}
    metadata = dict(field) if isinstance(field, Mapping) else {}
    texts = metadata.get(_TURN_METADATA), header_text(lowered.get(_TURN_METADATA, ""))
    for text in texts:
        metadata |= (read_object(text, allow_nan=True) if isinstance(text, str) and text else None) or {}
    return metadata | {known: header_text(lowered[name]) for name, known in _LINE_HEADERS.items() if name in lowered}


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
    """Agents put the session into a user's name: as JSON with a `session_id`, or after `_session_`."""
    if not isinstance(user_id, str):
        return None
    suffix = _SESSION_SUFFIX.search(user_id)
    if suffix:
        return suffix.group(1)
    fields = read_object(user_id, allow_nan=True) if user_id.startswith("{") else None
    return None if fields is None else fields.get("session_id")
