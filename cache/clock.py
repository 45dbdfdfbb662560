"""The logical clock of the cache: what is used gets its reading, and ages as others are. It knows no seconds."""

BEGINNING = 200
"""How much a conversation that begins counts, in beginnings and ends of requests: who begins one has often ended
another, and that is one of those that were silent meanwhile."""
MAX_SESSIONS = 10_000
"""Sessions whose names are remembered."""


class RequestClock:
    """Counts requests as they begin and as they end. Worker thread only."""

    def __init__(self) -> None:
        self.now = 0
        self._sessions: dict[tuple[str, str], None] = {}
        """By namespace and name, the one heard of last at the end."""

    def begin(self, namespace: str, session_id: str | None, *, is_background: bool = False) -> None:
        """Counts a request that begins. What runs in the background begins nothing that anybody waits for."""
        self.now += 1
        if session_id is None or is_background:
            return
        name = namespace, session_id
        if name not in self._sessions:
            self.now += BEGINNING
        self._sessions.pop(name, None)
        self._sessions[name] = None
        if len(self._sessions) > MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]

    def end(self) -> None:
        """Counts a request that ends."""
        self.now += 1
