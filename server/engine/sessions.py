"""All that the engine keeps of a session beyond the state of its tokens: last turn, pins, the claim to a slot."""

import numpy as np

from cache.pins import PinName
from cache.prefix_cache import PrefixCache
from server.engine.request import TokenArray
from server.engine.sequence import Sequence
from server.engine.session_history import SessionHistory


class EngineSessions:
    """Sessions by the namespace of their states and their id. Worker thread only."""

    def __init__(self, prefix_cache: PrefixCache) -> None:
        self._prefix_cache = prefix_cache
        self._history = SessionHistory()

    def record(self, sequence: Sequence) -> None:
        """Keeps the tokens of a finished turn. The lease must still be open."""
        request, lease = sequence.request, sequence.lease
        if request.is_idle_work or request.session_id is None or not request.cache_prompt or lease is None:
            return
        tokens = np.concatenate([request.tokens, np.array(sequence.output.tokens, np.int32)])
        self._history.record(request.state_namespace, request.session_id, tokens[: lease.offset])

    def last_turn(self, namespace: str, session_id: str) -> TokenArray | None:
        """Returns the tokens of a session's last turn; None for one that is not known."""
        return self._history.last(namespace, session_id)

    def pin(self, namespace: str, session_id: str) -> int:
        """Keeps the state of a session's last turn, and of those to come, from being evicted.

        Returns how many tokens are pinned; 0 for a session of which nothing is held. Raises PinLimit.
        """
        tokens = self.last_turn(namespace, session_id)
        if tokens is None:
            return 0
        return self._prefix_cache.pin(PinName(namespace, session_id), tokens)

    def unpin(self, namespace: str, session_id: str) -> bool:
        """Ends a session's pin; returns whether there was one."""
        name = PinName(namespace, session_id)
        was_pinned = name in self._prefix_cache.pins
        self._prefix_cache.unpin(name)
        return was_pinned

    def forget(self, namespace: str, session_id: str) -> None:
        """Drops all of it; the state of the session's tokens stays for others."""
        self._history.forget(namespace, session_id)
        for is_soft in (False, True):
            self._prefix_cache.unpin(PinName(namespace, session_id, is_soft))
        for slot in self._prefix_cache.slots:
            if (slot.namespace, slot.turn.session_id) == (namespace, session_id):
                slot.turn.session_id = None
