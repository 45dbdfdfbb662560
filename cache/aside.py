"""Memory of the budget for state that is no conversation's, one amount at a time."""

from cache.ledger import ASIDE, Ledger
from cache.reclaim import Reclaimer
from cache.sizes import SequenceSizes


class SetAside:
    """Sets memory aside for a sequence that has no slot. Worker thread only."""

    def __init__(self, ledger: Ledger, sizes: SequenceSizes, reclaimer: Reclaimer) -> None:
        self._ledger = ledger
        self._sizes = sizes
        self._reclaimer = reclaimer

    def try_take(self, num_tokens: int) -> bool:
        """Sets aside what a sequence of `num_tokens` takes; False if running requests hold too much.

        Idle slots are paged out and stored state is evicted for it, the ends of sessions last.
        """
        num_bytes = self._sizes.bytes_for(num_tokens)
        if num_bytes > self._ledger.budget_bytes:
            return False
        if self._reclaimer.free(self._ledger.excess_bytes(num_bytes), is_background=True) > 0:
            return False
        self._ledger.reserve(ASIDE, num_bytes)
        return True

    def give_back(self) -> None:
        """Ends that."""
        self._ledger.reserve(ASIDE, 0)
