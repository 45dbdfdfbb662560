"""Moves state between memory and disk.

Promotion reads only beyond memory; `cache.disk.connector` decides whether that is worth a read.
"""

from collections.abc import Iterator

from cache.budget import CacheEvent, DiskFault, Happening
from cache.disk.connector import DiskConnector, DiskMatch
from cache.disk.io import Prefetch
from cache.layers.state import Segment
from cache.memory_tier import MemoryTier
from cache.pager import Pager
from cache.reclaim import Reclaimer
from cache.slots import Lookup, LookupResult, RequestClock, look_up
from cache.snapshots import RestorePointKind, Snapshot
from cache.trie import Node, NodeMatch, PrefixTrie

MAX_READS = 8
"""After so many unreadable files a prompt is evaluated without the disk."""


class DiskMoves:
    """Looks up prompts in memory and on disk, and moves state."""

    def __init__(
        self,
        disk: DiskConnector | None,
        memory: MemoryTier,
        pager: Pager,
        reclaimer: Reclaimer,
        clock: RequestClock,
    ) -> None:
        self.disk = disk
        """None without a disk tier, or once closed."""
        self._memory = memory
        self._pager = pager
        self._reclaimer = reclaimer
        self._clock = clock
        memory.before_eviction = self._save_dropped

    def find_in_memory(self, lookup: Lookup) -> LookupResult:
        """How much of a prompt memory can restore."""
        return self.result_of(lookup.match(self._memory.find_trie(lookup.namespace)))

    def result_of(self, match: NodeMatch) -> LookupResult:
        """How much of a match can be restored now."""
        return look_up(match, self._pager.slots, self._pager.layout)

    def _find_on_disk(self, lookup: Lookup, found: LookupResult) -> DiskMatch | None:
        if self.disk is None:
            return None
        return self.disk.find(lookup.namespace, lookup.tokens, found.match, restorable=found.restorable)

    def find_restorable(self, lookup: Lookup) -> int:
        """Tokens that memory and disk can restore together."""
        found = self.find_in_memory(lookup)
        disk_match = self._find_on_disk(lookup, found)
        return found.restorable if disk_match is None else disk_match.offset

    def prefetch(self, lookup: Lookup) -> Prefetch | None:
        """Begins the reads that `promote` would wait for."""
        disk_match = self._find_on_disk(lookup, self.find_in_memory(lookup)) if self.disk is not None else None
        if self.disk is None or disk_match is None:
            return None
        return self.disk.tier.reader.prefetch(disk_match.parts)

    def promote(self, lookup: Lookup, *, is_background: bool = False) -> tuple[LookupResult, bool]:
        """Reads what disk adds to a prompt, if memory can be freed.

        Returns what memory then holds, and whether anything was read.
        """
        found, ledger = self.find_in_memory(lookup), self._memory.ledger
        for _ in range(MAX_READS):
            disk_match = self._find_on_disk(lookup, found)
            if disk_match is None or self.disk is None or disk_match.num_bytes > ledger.budget_bytes:
                break
            # Freeing memory may write to disk, and a write may evict files. Recording the use now protects the files.
            self.disk.tier.space.touch(disk_match.place, disk_match.offset)
            excess = ledger.excess_bytes(disk_match.num_bytes)
            if self._reclaimer.free(excess, protected=found.path, is_background=is_background) > 0:
                return self.result_of(found.match), False
            try:
                loaded = disk_match.load()
                num_tokens, num_bytes = disk_match.offset - found.restorable, disk_match.num_bytes
                self._memory.journal.record(CacheEvent(Happening.READ, lookup.namespace, num_tokens, num_bytes))
                self._attach(lookup, disk_match.offset, *loaded)
            except DiskFault:
                # The faulty file is no longer found, but others may be. Freeing memory may have changed the match.
                found = self.find_in_memory(lookup)
                continue
            return self.find_in_memory(lookup), True
        return found, False

    def _attach(self, lookup: Lookup, offset: int, segment: Segment | None, snapshot: Snapshot | None) -> None:
        trie, tokens = self._pager.trie(lookup.namespace), lookup.tokens[:offset]
        first = segment.start if segment is not None else offset
        assert trie.match(tokens).length >= first, "the state that a read was to extend was evicted meanwhile"
        tip = trie.extend(trie.root, tokens)
        for node in tip.path():
            node.is_volatile = False  # only ordinary requests are written to disk
        if segment is not None:
            trie.store(tip, segment)
        if snapshot is not None:
            tip.kind = RestorePointKind.TURN_END
            trie.snap(tip, snapshot)
        self._memory.order.used(trie.namespace, tip, self._clock.now)

    def _save_dropped(self, trie: PrefixTrie, node: Node) -> None:
        if self.disk is not None:
            self.disk.save_dropped(trie.namespace, node)

    def save(self) -> Iterator[None]:
        """As `PrefixCache.save`, the last used first."""
        if self.disk is None:
            return
        leaves = [(trie, node) for trie, node in self._memory.nodes() if not node.children]
        leaves.sort(key=lambda pair: pair[1].last_used, reverse=True)
        for (trie, leaf), used_at in zip(leaves, self.disk.tier.space.ticks(len(leaves)), strict=True):
            if leaf.parent is not None:
                yield from self._save_path(self.disk, trie, leaf, used_at)

    def _save_path(self, disk: DiskConnector, trie: PrefixTrie, leaf: Node, used_at: int) -> Iterator[None]:
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
