"""What the cache holds of each namespace, in sums and edge by edge. Worker thread only; changes nothing."""

from cache.disk.connector import DiskConnector
from cache.disk.listing import NO_LISTING
from cache.memory_tier import MemoryTier
from cache.pager import Pager
from cache.pins import Pins
from cache.view import (
    CacheView,
    EdgeDetail,
    NamespaceView,
    SharedTokens,
    StateBytes,
    disk_views,
    edge_detail,
    views,
)


class CacheReports:
    """Reports on the tiers of one cache."""

    def __init__(self, memory: MemoryTier, pager: Pager, disk: DiskConnector | None, pins: Pins) -> None:
        self._memory = memory
        self._pager = pager
        self._tier = disk.tier if disk is not None else None
        self._pins = pins

    def view(self, namespace: str, max_nodes: int) -> CacheView:
        """Returns what is held for one namespace, with `max_nodes` edges at most."""
        memory, tier = self._memory, self._tier
        trie = memory.find_trie(namespace)
        on_disk = tier.contents.listing(namespace, max_nodes) if tier is not None else NO_LISTING
        shared = SharedTokens(trie, on_disk.entries)
        return CacheView(
            nodes=views(trie, max_nodes, shared),
            disk_nodes=disk_views(on_disk.entries, shared),
            num_nodes=trie.num_nodes,
            num_tokens=memory.holdings(namespace).total.num_tokens,
            num_disk_nodes=on_disk.num_edges,
            is_disk_truncated=on_disk.is_truncated,
            state=self.bytes_of(namespace),
            disk_writes=tier.write_budget.writes() if tier is not None else None,
            num_evictions=memory.evictions[namespace],
            budget_bytes=memory.ledger.budget_bytes,
            pinned=self._pins.labels(namespace),
        )

    def edge(self, namespace: str, number: int, max_tokens: int) -> EdgeDetail | None:
        """Returns one edge in memory with `max_tokens` of its tokens at most; None if it is there no more."""
        return edge_detail(self._memory.find_trie(namespace), number, max_tokens)

    def namespaces(self) -> list[NamespaceView]:
        """Returns what each namespace holds that holds anything, the most bytes first."""
        on_disk = self._tier.contents.namespaces() if self._tier is not None else []
        held = [self._namespace_view(name) for name in {*self._memory.namespaces, *on_disk}]
        held = [view for view in held if view.num_nodes or view.num_disk_nodes]
        return sorted(held, key=lambda view: (-view.state.in_memory - view.state.disk, view.namespace))

    def bytes_of(self, namespace: str) -> StateBytes:
        """Returns the bytes that are held for one namespace."""
        layout = self._pager.layout
        live = sum(layout.live_bytes(slot.caches) for slot in self._pager.slots if slot.namespace == namespace)
        disk = self._tier.contents.bytes_of(namespace) if self._tier is not None else 0
        held = self._memory.holdings(namespace).total
        return StateBytes(held.span_bytes, held.window_bytes, held.point_bytes, live, disk)

    def _namespace_view(self, namespace: str) -> NamespaceView:
        return NamespaceView(
            namespace,
            self._memory.find_trie(namespace).num_nodes,
            self._memory.holdings(namespace).total.num_tokens,
            self._tier.contents.num_edges(namespace) if self._tier is not None else 0,
            self.bytes_of(namespace),
        )
