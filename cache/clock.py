"""The logical clock of the cache: it counts requests, and state ages by it. It knows no seconds."""

NEW_SESSION_COUNT = 200
"""How far the clock moves when a new session begins; it moves by 1 when any request begins or ends.

A client that begins a conversation has often ended another one. Nobody knows which, so all silent ones age."""
MAX_SESSIONS = 10_000
"""The most sessions that are remembered; a session that was forgotten counts as new."""


class RequestClock:
    """Counts requests as they begin and as they end. Worker thread only."""

    def __init__(self) -> None:
        self.now = 0
        self._sessions: dict[tuple[str, str], None] = {}
        """By namespace and name, in the order of their last request."""

    def begin(self, namespace: str, session_id: str | None, *, is_background: bool = False) -> None:
        """Counts a request that begins. Background requests begin no session."""
        self.now += 1
        if session_id is None or is_background:
            return
        name = namespace, session_id
        if name not in self._sessions:
            self.now += NEW_SESSION_COUNT
        self._sessions.pop(name, None)
        self._sessions[name] = None
        if len(self._sessions) > MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]

    def end(self) -> None:
        """Counts a request that ends."""
        self.now += 1
