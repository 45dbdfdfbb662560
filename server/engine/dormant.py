"""The conversations of a model that was unloaded, kept in memory until it is loaded again.

One thread at a time: first that of the worker that ended, then whoever holds it, then that of the next worker.
"""

from cache.prefix_cache import PrefixCache
from server.engine.sessions import EngineSessions


class DormantState:
    """State without a model: arrays in memory, and the tries that know whose they are."""

    def __init__(self, prefix_cache: PrefixCache, sessions: EngineSessions, fingerprint: str) -> None:
        """The cache is parked. `fingerprint` is that of the model, its precision and the libraries."""
        self.prefix_cache = prefix_cache
        self.sessions = sessions
        self.fingerprint = fingerprint
        self.is_dropped = False

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return self.prefix_cache.ledger.stored_bytes

    def shrink(self, budget_bytes: int) -> None:
        """Drops what is worth least until the rest takes no more than `budget_bytes`, as far as pins allow."""
        self.prefix_cache.try_resize(budget_bytes)

    def forget(self, namespace: str) -> tuple[int, int]:
        """Drops what is held for a namespace; returns how many tokens and bytes that were."""
        num_tokens = self.prefix_cache.memory.holdings(namespace).total.num_tokens
        before = self.num_bytes
        self.prefix_cache.clear(namespace)
        return num_tokens, before - self.num_bytes

    def drop(self) -> None:
        """Drops all of it now, whoever still refers to the cache."""
        self.prefix_cache.clear()
        self.is_dropped = True
