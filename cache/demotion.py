"""Writes state to disk: what memory is about to evict, and in idle time whatever disk lacks."""

from collections.abc import Iterator

from cache.disk.connector import DiskConnector
from cache.memory_tier import MemoryTier
from cache.pager import Pager
from cache.trie import Node, PrefixTrie


class Demotion:
    """Demotes state from memory to disk. Worker thread only."""

    def __init__(self, disk: DiskConnector | None, memory: MemoryTier, pager: Pager) -> None:
        self.disk = disk
        """None without a disk tier, and once it is closed: then nothing is written."""
        self._memory = memory
        self._pager = pager
        memory.before_eviction = self._save_dropped

    def _save_dropped(self, trie: PrefixTrie, node: Node) -> None:
        if self.disk is not None:
            self.disk.save_dropped(trie.namespace, node)

    def save(self) -> Iterator[None]:
        """Writes the state that is to be kept and not on disk yet, the last used first; one piece with each step.

        For idle time: after any other call to the cache, make a new iterator.
        """
        if self.disk is None:
            return
        leaves = [(trie, node) for trie, node in self._memory.nodes() if not node.children]
        leaves.sort(key=lambda pair: pair[1].last_used, reverse=True)
        for (trie, leaf), used_at in zip(leaves, self.disk.tier.times_of_use(len(leaves)), strict=True):
            if leaf.parent is not None:
                yield from self._save_path(self.disk, trie, leaf, used_at)

    def _save_path(self, disk: DiskConnector, trie: PrefixTrie, leaf: Node, used_at: int) -> Iterator[None]:
        """Has a conversation written. The snapshot taken at its end for that stays in memory if the budget allows."""
        path = leaf.path()
        ends = [
            slot for slot in self._pager.slots if slot.tip in path and not slot.is_leased and not slot.tip.snapshot
        ]
        tips = [slot.tip for slot in ends]
        for slot in ends:
            self._pager.keep_tip(slot)
        try:
            yield from disk.save_path(trie.namespace, path, self._pager.copy_live, used_at)
        finally:
            for node in tips:
                is_over = self._memory.ledger.excess_bytes() > 0
                if is_over and node.parent is not None and node.snapshot is not None:
                    trie.snap(node, None)
