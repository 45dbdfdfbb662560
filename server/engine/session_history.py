"""The tokens of each session's last turn, which its pin holds. Pure."""

from collections import OrderedDict

from cache.types import TokenArray, common_prefix_length

MAX_SESSIONS = 1024
MAX_BYTES = 64 << 20
"""Memory for the turns of all sessions: some 160 of 100 000 tokens."""
_TURN_BYTES = 512


class SessionHistory:
    """The last turn of each session, bounded in number and bytes; the least recently used go. Worker thread only."""

    def __init__(self) -> None:
        self._turns: OrderedDict[tuple[str, str], TokenArray] = OrderedDict()
        self.num_bytes = 0

    def record(self, namespace: str, session_id: str, tokens: TokenArray) -> None:
        """Keeps the tokens of a turn, unless they are only the beginning of those that are kept."""
        last = self._take(namespace, session_id)
        if last is not None and common_prefix_length(tokens, last) == len(tokens):
            tokens = last
        # A view would keep a longer array alive.
        tokens = tokens if tokens.base is None else tokens.copy()
        self._turns[namespace, session_id] = tokens
        self.num_bytes += _num_bytes(tokens)
        while len(self._turns) > MAX_SESSIONS or self.num_bytes > MAX_BYTES:
            self._take(*next(iter(self._turns)))

    def forget(self, namespace: str, session_id: str) -> None:
        """Drops the turn of a session; an unknown one has none."""
        self._take(namespace, session_id)

    def last(self, namespace: str, session_id: str) -> TokenArray | None:
        """Returns the tokens of the last turn."""
        return self._turns.get((namespace, session_id))

    def _take(self, namespace: str, session_id: str) -> TokenArray | None:
        tokens = self._turns.pop((namespace, session_id), None)
        if tokens is not None:
            self.num_bytes -= _num_bytes(tokens)
        return tokens


def _num_bytes(tokens: TokenArray) -> int:
    return int(tokens.nbytes) + _TURN_BYTES
