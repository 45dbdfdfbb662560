"""Records in the trie what running sequences evaluate: edges for their tokens, snapshots at restore points.

A leased slot's log may run ahead of the trie; `Recorder.commit` catches up. Slots are chosen elsewhere.
"""

from collections.abc import Iterable

from cache import restore_points
from cache.clock import RequestClock
from cache.layers import layout
from cache.memory_tier import MemoryTier
from cache.pager import Pager
from cache.pinning import Pinning
from cache.reclaim import Reclaimer
from cache.reservations import Reservations
from cache.restore_points import RestorePointKind
from cache.slots import Slot
from cache.snapshots import is_restorable
from cache.trie import Node, PrefixTrie


class Recorder:
    """Does what leases ask for; it is their `LeaseOwner`. Worker thread only."""

    def __init__(
        self,
        memory: MemoryTier,
        pager: Pager,
        clock: RequestClock,
        reclaimer: Reclaimer,
        reservations: Reservations,
        pinning: Pinning,
    ) -> None:
        self.layout = pager.layout
        self._memory = memory
        self._pager = pager
        self._clock = clock
        self._reclaimer = reclaimer
        self._reservations = reservations
        self._pinning = pinning

    def commit(self, slot: Slot, *, may_split: bool = True) -> None:
        """Records all tokens of a slot's log in the trie, and drops the spans that were stored of them: held once.

        A sequence may end inside an edge. Without `may_split` it is recorded only up to where that edge starts:
        the next chunk will go beyond its end.
        """
        trie, recorded = self._pager.trie(slot.namespace), slot.tip.stop
        if recorded < slot.offset:
            tip = trie.extend(slot.tip, slot.log.view(recorded), may_split=may_split)
            for node in tip.path():
                is_new = node.home is None and node.span is None
                # Once an ordinary request has had these tokens, they may be written to disk, whoever had them first.
                node.is_volatile = slot.turn.is_volatile and (node.is_volatile or is_new)
                if node.start >= recorded and node.home is None:
                    trie.make_live(node, slot)
            self._pager.move_tip(slot, tip)
            self._record_end(slot, trie)
            _join_edges(trie, [tip])
        self.measure(slot)

    def _record_end(self, slot: Slot, trie: PrefixTrie) -> None:
        """Notes at the tip whose sequence ends there, and when it was used."""
        tip = slot.tip
        tip.session_id, tip.is_on_probation = slot.turn.session_id, slot.turn.is_on_probation
        tip.is_background = slot.turn.leaves_background
        self._memory.used(trie, tip, self._clock.now)
        self._memory.ended(trie, tip)

    def capture(self, slot: Slot, kind: RestorePointKind) -> None:
        """Keeps what is needed to restore a slot's sequence where it ends now."""
        trie, node = self._pager.trie(slot.namespace), slot.tip
        assert node.stop == slot.offset, "only a committed sequence can be captured"
        node.is_explicit |= kind is RestorePointKind.EXPLICIT
        self._memory.changed(trie, node)
        if self.layout.needs_snapshots and not is_restorable(self.layout, node):
            node.kind = kind
            trie.snap(node, self._pager.snapshot(slot))
            self._mark_superseded(slot)
            self._reclaimer.free_excess(is_background=slot.turn.is_background)

    def measure(self, slot: Slot) -> None:
        """Charges a slot with what its buffers take, now that they are there."""
        self.layout.bound_growth(slot.caches)
        self._pager.measure(slot)

    def try_grow(self, slot: Slot, max_tokens: int) -> bool:
        """Grows the live buffers by a step, up to `max_tokens` in all; False if not even one more token fits."""
        return self._reservations.try_grow(slot, max_tokens)

    def close(self, slot: Slot) -> None:
        """Ends a lease; the sequence stays live, idle."""
        self._clock.end()
        self._release(slot)
        _join_edges(self._pager.trie(slot.namespace), reversed(slot.tip.path()))
        self._mark_superseded(slot)
        self._pinning.follow(slot)
        if not slot.turn.is_background:
            # The conversation that was just answered goes on next: it is evicted only if nothing else is left.
            self._reclaimer.free_excess(protected=(slot.tip,))
        self._reclaimer.free_excess(is_background=slot.turn.is_background)
        self._memory.refresh_if_many_changed()

    def suspend(self, slot: Slot) -> None:
        """Ends a lease whose sequence goes on once there is memory again. Its slot is idle then, like any other.

        If state can be restored at any token, the last edge is split into pieces, so that eviction takes no
        more of it than is needed.
        """
        self._release(slot)
        trie, piece = self._pager.trie(slot.namespace), slot.tip
        if piece.parent is None:
            return
        piece.is_on_probation = False  # the sequence itself will want it again
        self._memory.changed(trie, piece)
        if not self.layout.needs_snapshots:
            for offset in range(piece.stop - layout.GROWTH_TOKENS, piece.start, -layout.GROWTH_TOKENS):
                piece = trie.split(piece, offset)

    def discard(self, slot: Slot) -> None:
        """Ends a lease whose caches cannot be trusted: nodes that live only there are dropped."""
        self._pager.discard(slot)

    def _release(self, slot: Slot) -> None:
        """Records all of a sequence and ends its reservation; it stays live."""
        try:
            self.commit(slot)
        except Exception:
            self.discard(slot)
            raise
        slot.is_leased, slot.turn.last_used = False, self._clock.now
        self._pager.ledger.reserve(slot.index, 0)

    def _mark_superseded(self, slot: Slot) -> None:
        """Marks the snapshots of a slot's sequence that its newer ones replace: they are evicted first."""
        nodes = {node.stop: node for node in slot.tip.path() if node.snapshot is not None and node.last_used}
        nodes[slot.tip.stop] = slot.tip
        points = [restore_points.KeptPoint(node.stop, node.kind, is_branch=False) for node in nodes.values()]
        for offset in restore_points.superseded(points, slot.turn.landing):
            node = nodes[offset]
            if node.last_used and not node.is_explicit:
                self._memory.supersede(self._pager.trie(slot.namespace), node)


def _join_edges(trie: PrefixTrie, nodes: Iterable[Node]) -> None:
    """Joins live edges with those above them where nothing needs the border any more. Copies no state."""
    for node in nodes:
        while node.home is not None and trie.can_absorb_parent(node):
            trie.absorb_parent(node)
