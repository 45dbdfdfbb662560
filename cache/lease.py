"""A running sequence's hold on its slot and its path in the trie. Worker thread only.

`Recorder` records edges for evaluated tokens, and snapshots at restore points. A leased slot's log may run ahead of
the trie; `Recorder.commit` catches up.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from cache import snapshots
from cache.layers import layout
from cache.layers.layout import Layout
from cache.memory_tier import MemoryTier, Pins
from cache.pager import Pager
from cache.reclaim import Reclaimer
from cache.slots import RequestClock, Slot
from cache.snapshots import RestorePoint, RestorePointKind, chunk_end, is_restorable
from cache.trie import Node, NodeMatch, PrefixTrie
from cache.types import LayerCache, TokenArray

MAX_PIECES = 16
"""Of a sequence, beside borders for other reasons: restoring copies each, for each layer."""


class Tier(StrEnum):
    """Where restored state came from."""

    LIVE = "live"
    MEMORY = "memory"
    """In memory at least in part: paged in, or copied from another slot."""
    DISK = "disk"


class Lease:
    """A running sequence's hold on slot and path. Must be closed exactly once."""

    def __init__(
        self,
        recorder: "Recorder",
        slot: Slot,
        tokens: TokenArray,
        match: NodeMatch,
        points: Iterable[RestorePoint],
        tier: Tier | None,
    ) -> None:
        self._recorder = recorder
        self._slot = slot
        self.num_prompt_tokens = len(tokens)
        self.match_tokens = match.length
        self.hit_tokens = slot.offset
        """Restored tokens, at most `match_tokens`."""
        self.tier = tier
        """None if nothing was restored."""
        self.is_open = True
        self._points = {point.offset: point for point in points}

    @property
    def slot_index(self) -> int:
        return self._slot.index

    @property
    def caches(self) -> list[LayerCache]:
        return self._slot.caches

    @property
    def offset(self) -> int:
        return self._slot.offset

    @property
    def is_lost(self) -> bool:
        """See `Slot.is_lost`; such a lease is to be discarded."""
        return self._slot.is_lost

    def chunk_stop(self, chunk_tokens: int, limit: int) -> int:
        """The next prefill chunk's end: at `chunk_end`, or a restore point before."""
        stop = chunk_end(self.offset, limit, chunk_tokens)
        return min((point for point in self._points if self.offset < point < stop), default=stop)

    def want(self, point: RestorePoint) -> None:
        """Requests a restore point ahead, if needed."""
        if self._recorder.layout.needs_snapshots and self.offset < point.offset < self.num_prompt_tokens:
            self._points.setdefault(point.offset, point)

    def advance(self, tokens: TokenArray) -> None:
        """Records evaluated prompt tokens; captures a restore point here, if requested."""
        self._slot.log.append(tokens)
        point = self._points.get(self.offset)
        self._recorder.commit(self._slot, may_split=point is not None)
        if point is not None:
            self._recorder.capture(self._slot, point.kind)

    @property
    def spare_tokens(self) -> int:
        """How many more the live buffers take."""
        return self._slot.capacity - self.offset

    def try_grow(self, max_tokens: int, needed: int = 1) -> bool:
        """Grows live buffers by a step, up to `max_tokens`; False if not `needed` more tokens fit.

        The caches must be evaluated; an error damages them.
        """
        # The snapshot at the prompt's end can be evicted only once the trie has the tokens after it.
        self._record_all()
        return self.is_lost or self._recorder.reclaimer.try_grow(self._slot, max_tokens, needed)

    def append(self, *tokens: int) -> None:
        """Records tokens of a decode step; the first of all is the prompt's last."""
        if not self.is_lost:
            self._slot.log.append(np.array(tokens, np.int32))

    def keep(self, kind: RestorePointKind) -> None:
        """Captures a restore point at the end. The caches must be evaluated."""
        self._recorder.commit(self._slot)
        self._recorder.capture(self._slot, kind)

    def close(self) -> None:
        """Ends the sequence, which stays live and recorded."""
        self._end()
        self._recorder.close(self._slot)

    def suspend(self) -> None:
        """Ends a lease that another will continue."""
        self._end()
        self._recorder.suspend(self._slot)

    def discard(self) -> None:
        """Ends a sequence with perhaps damaged caches: state only there is dropped."""
        self._end()
        self._recorder.pager.discard(self._slot)

    def _record_all(self) -> None:
        self._recorder.commit(self._slot)

    def _end(self) -> None:
        assert self.is_open, "a lease was closed twice"
        self.is_open = False


class PrivateLease(Lease):
    """A lease that neither reuses nor leaves state."""

    def want(self, point: RestorePoint) -> None:
        """Captures nothing."""

    def keep(self, kind: RestorePointKind) -> None:
        """Captures nothing."""

    def advance(self, tokens: TokenArray) -> None:
        """Records tokens in the slot alone."""
        self._slot.log.append(tokens)
        self._record_all()

    def close(self) -> None:
        """Ends the sequence and forgets it."""
        self.discard()

    def suspend(self) -> None:
        """Forgets the sequence, which is evaluated again."""
        self.discard()

    def _record_all(self) -> None:
        self._recorder.measure(self._slot)


@dataclass(frozen=True, eq=False)
class Recorder:
    """Trie and budget operations of leases."""

    memory: MemoryTier
    pager: Pager
    clock: RequestClock
    reclaimer: Reclaimer
    pins: Pins

    @property
    def layout(self) -> Layout:
        return self.pager.layout

    def commit(self, slot: Slot, *, may_split: bool = True) -> None:
        """Records a slot's tokens in the trie, and drops stored spans that the slot holds.

        Without `may_split`, a sequence that ends inside an edge is recorded up to its start: the next chunk goes
        beyond.
        """
        trie, recorded = self.pager.trie(slot.namespace), slot.tip.stop
        if recorded < slot.offset:
            tip = trie.extend(slot.tip, slot.log.view(recorded), may_split=may_split)
            for node in tip.path():
                is_new = node.home is None and node.span is None
                # Once an ordinary request has had these tokens, they may be written to disk.
                node.is_volatile = slot.turn.is_volatile and (node.is_volatile or is_new)
                if node.start >= recorded and node.home is None:
                    trie.make_live(node, slot)
            self.pager.move_tip(slot, tip)
            self._record_end(slot, trie)
            self._join_edges(slot, [tip])
        self.measure(slot)

    def _record_end(self, slot: Slot, trie: PrefixTrie) -> None:
        tip = slot.tip
        tip.session_id, tip.is_on_probation = slot.turn.session_id, slot.turn.is_on_probation
        tip.is_background = slot.turn.leaves_background
        self.memory.order.used(trie.namespace, tip, self.clock.now)
        self.memory.order.ended(trie.namespace, tip)

    def capture(self, slot: Slot, kind: RestorePointKind) -> None:
        """Stores what restoring the sequence takes, if there is memory; else nothing is evicted for it."""
        trie, node = self.pager.trie(slot.namespace), slot.tip
        assert node.stop == slot.offset, "only a committed sequence can be captured"
        node.is_explicit |= kind is RestorePointKind.EXPLICIT
        self.memory.order.changed(trie.namespace, node)
        if self.layout.needs_snapshots and not is_restorable(self.layout, node):
            node.kind, before = kind, node.snapshot
            trie.snap(node, self.pager.snapshot(slot))
            marked, excess = self._mark_superseded(slot), self.pager.ledger.excess_bytes()
            is_background = slot.turn.is_background
            if self.reclaimer.free(excess, protected=[node], is_background=is_background, or_nothing=True) > 0:
                trie.snap(node, before)
                for older, last_used in marked:
                    older.last_used = last_used
                    self.memory.order.changed(trie.namespace, older)

    def measure(self, slot: Slot) -> None:
        """Charges a slot's allocated bytes."""
        if not slot.is_lost:
            self.layout.bound_growth(slot.caches)
            self.pager.measure(slot)

    def close(self, slot: Slot) -> None:
        """As `Lease.close`."""
        self.clock.end()
        self._release(slot)
        self._cut_edges(slot)
        self._mark_superseded(slot)
        self.pins.follow(slot.namespace, slot.turn.session_id, slot.tip)
        if not slot.turn.is_background:
            # The conversation that was just answered will probably continue next: it is evicted last.
            self.reclaimer.free_excess(protected=(slot.tip,))
        self.reclaimer.free_excess(is_background=slot.turn.is_background)
        self.memory.refresh_if_many_changed()

    def suspend(self, slot: Slot) -> None:
        """As `Lease.suspend`."""
        self._release(slot)
        if slot.tip.parent is not None:
            slot.tip.is_on_probation = False  # the suspended sequence will restore it
            self.memory.order.changed(slot.namespace, slot.tip)
            self._cut_edges(slot)

    def _join_edges(self, slot: Slot, nodes: Iterable[Node]) -> None:
        """Joins edges where nothing needs the border. Copies no state."""
        trie, length = self.pager.trie(slot.namespace), self._piece_tokens(slot)
        for node in nodes:
            while node.home is not None and node.start % length and trie.can_absorb_parent(node):
                trie.absorb_parent(node)

    def _cut_edges(self, slot: Slot) -> None:
        """Has live edges end at multiples of a piece's length: eviction takes little more than needed.

        Borders stay as the sequence grows, until every other one goes.
        """
        self._join_edges(slot, reversed(slot.tip.path()))
        trie, length = self.pager.trie(slot.namespace), self._piece_tokens(slot)
        for node in [node for node in slot.tip.path() if node.home is slot]:
            for offset in range(node.start - node.start % length + length, node.stop, length):
                trie.split(node, offset)

    def _piece_tokens(self, slot: Slot) -> int:
        """A power of two; more than the sequence has if state is not sliceable anywhere."""
        num_tokens = slot.tip.stop
        least = num_tokens if self.layout.needs_snapshots else num_tokens // MAX_PIECES
        return max(layout.GROWTH_TOKENS, 1 << least.bit_length())

    def _release(self, slot: Slot) -> None:
        try:
            self.commit(slot)
        except Exception:
            self.pager.discard(slot)
            raise
        slot.is_leased, slot.turn.last_used = False, self.clock.now
        self.pager.ledger.reserve(slot.index, 0)

    def _mark_superseded(self, slot: Slot) -> list[tuple[Node, int]]:
        """Nodes whose snapshots go first from now on, and when they were used last."""
        nodes = {node.stop: node for node in slot.tip.path() if node.snapshot is not None and node.last_used}
        nodes[slot.tip.stop] = slot.tip
        points = [snapshots.KeptPoint(node.stop, node.kind, is_branch=False) for node in nodes.values()]
        found = [nodes[offset] for offset in snapshots.superseded(points, slot.turn.landing)]
        marked = [(node, node.last_used) for node in found if node.last_used and not node.is_explicit]
        for node, _ in marked:
            self.memory.supersede(self.pager.trie(slot.namespace), node)
        return marked
