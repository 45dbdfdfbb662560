"""What memory would be charged if running rows held one head together: a model, for a cache that copies it.

A head is the beginning that several running rows have in common. It is charged once; a newcomer on it needs memory
for the rest alone. There is one, that of the node on whose path (readers - 1) x length is largest. All that is copied
today is still copied: only the sums differ.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial

from cache.budget import Ledger
from cache.pager import Pager
from cache.prefix_cache import PrefixCache
from cache.reclaim import Reclaimer
from cache.slots import Slot
from cache.trie import Node

MIN_HEAD_TOKENS = 1024


def share_head(cache: PrefixCache, bytes_per_token: int) -> None:
    """Has a cache without slots in use charge the head of its running rows once."""
    cache.ledger.__class__ = HeadLedger
    object.__setattr__(cache.reclaimer, "__class__", HeadReclaimer)
    find = partial(_saved_bytes, cache.pager, bytes_per_token)
    vars(cache.ledger)["saved_bytes"] = vars(cache.reclaimer)["saved_bytes"] = find


def _saved_bytes(pager: Pager, bytes_per_token: int, path: Iterable[Node] = (), offset: int = 0) -> int:
    """Bytes of all copies of the head but one, with a newcomer that has `[0, offset)` of a path."""
    readers = Counter(node for slot in pager.slots if slot.is_leased for node in slot.tip.path())
    lengths = [(count - 1, node.stop) for node, count in readers.items()]
    lengths += [(readers[node], min(node.stop, offset)) for node in path if node.start < offset]
    return max((copies * stop for copies, stop in lengths if stop >= MIN_HEAD_TOKENS), default=0) * bytes_per_token


class HeadLedger(Ledger):
    """Charges the head once."""

    @property
    def charged_bytes(self) -> int:
        """All bytes but those saved."""
        saved: int = vars(self)["saved_bytes"]()
        return super().charged_bytes - saved


class HeadReclaimer(Reclaimer):
    """Frees nothing for a copy of the head."""

    def _growth(self, slot: Slot, path: Sequence[Node], offset: int, num_tokens: int) -> int:
        find = vars(self)["saved_bytes"]
        saved: int = find(path, offset) - find()
        return super()._growth(slot, path, offset, num_tokens) - saved
