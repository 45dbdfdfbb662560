"""A running sequence's hold on its slot and its path in the trie. Worker thread only.

A lease records edges for evaluated tokens, and snapshots at restore points. A leased slot's log may run ahead of the
trie; `Lease._commit` catches up.
"""

from collections.abc import Iterable
from enum import StrEnum

import numpy as np

from cache import snapshots
from cache.layers import layout
from cache.reclaim import Reclaimer
from cache.slots import CacheRequest, Slot
from cache.snapshots import RestorePoint, RestorePointKind, chunk_end, is_restorable
from cache.trie import Node, PrefixTrie
from cache.types import LayerCache, TokenArray

MAX_PIECES = 16
"""Most pieces of a sequence, beside borders for other reasons: restoring copies each, for each layer."""


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
        reclaimer: Reclaimer,
        slot: Slot,
        request: CacheRequest,
        match_tokens: int,
        points: Iterable[RestorePoint],
        tier: Tier | None,
    ) -> None:
        self._reclaimer = reclaimer
        self._pager = reclaimer.pager
        self._memory = reclaimer.memory
        self._slot = slot
        self.slot_index = slot.index
        self.num_prompt_tokens = len(request.tokens)
        self.match_tokens = match_tokens
        self.hit_tokens = slot.offset
        """Restored tokens, at most `match_tokens`."""
        self.tier = tier
        """None if nothing was restored."""
        self.rounded_tokens = sum(node.stop - node.start for node in slot.tip.path() if node.is_rounded)
        """Of `hit_tokens`, those whose state was rounded to 8 bits."""
        self.is_open = True
        self._points = {point.offset: point for point in points}

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

    @property
    def spare_tokens(self) -> int:
        """How many more the live buffers take."""
        return self._slot.capacity - self.offset

    def chunk_stop(self, chunk_tokens: int, limit: int) -> int:
        """The next prefill chunk's end: at `chunk_end`, or a restore point before."""
        stop = chunk_end(self.offset, limit, chunk_tokens)
        return min((point for point in self._points if self.offset < point < stop), default=stop)

    def want(self, point: RestorePoint) -> None:
        """Requests a restore point ahead, if needed."""
        if self._pager.layout.needs_snapshots and self.offset < point.offset < self.num_prompt_tokens:
            self._points.setdefault(point.offset, point)

    def advance(self, tokens: TokenArray) -> None:
        """Records evaluated prompt tokens; captures a restore point here, if requested."""
        self._slot.log.append(tokens)
        point = self._points.get(self.offset)
        self._commit(may_split=point is not None)
        if point is not None:
            self._capture(point.kind)

    def try_grow(self, max_tokens: int, needed: int = 1) -> bool:
        """Grows live buffers by a step, up to `max_tokens`; False if not `needed` more tokens fit.

        The caches must be evaluated; an error damages them.
        """
        if self.is_lost:
            return True
        # The snapshot at the prompt's end can be evicted only once the trie has the tokens after it.
        self._commit()
        return self._reclaimer.try_grow(self._slot, max_tokens, needed)

    def publish(self) -> None:
        """Lets other prompts restore all tokens so far. The caches must be evaluated."""
        if not self.is_lost:
            self._commit()

    def append(self, *tokens: int) -> None:
        """Records tokens of a decode step; the first of all is the prompt's last."""
        if not self.is_lost:
            self._slot.log.append(np.array(tokens, np.int32))

    def keep(self, kind: RestorePointKind) -> None:
        """Captures a restore point at the end. The caches must be evaluated."""
        self._commit()
        self._capture(kind)

    def close(self) -> None:
        """Ends the sequence, which stays live and recorded."""
        self._end()
        slot = self._slot
        self._memory.clock.now += 1
        self._release()
        self._cut_edges()
        self._mark_superseded()
        self._reclaimer.pins.follow(slot.namespace, slot.session_id, slot.tip)
        if not slot.is_background:
            # The conversation that was just answered will probably continue next: it is evicted last.
            self._reclaimer.free(protected=(slot.tip,))
        self._reclaimer.free(is_background=slot.is_background)
        self._memory.refresh_if_many_changed()

    def suspend(self) -> None:
        """Ends a lease that another will continue."""
        self._end()
        self._release()
        tip = self._slot.tip
        if tip.parent is not None:
            tip.is_on_probation = False  # the suspended sequence will restore it
            self._memory.order.changed(tip)
            self._cut_edges()

    def discard(self) -> None:
        """Ends a sequence with perhaps damaged caches: state only there is dropped."""
        self._end()
        self._pager.discard(self._slot)

    def _end(self) -> None:
        assert self.is_open, "a lease was closed twice"
        self.is_open = False

    def _release(self) -> None:
        slot = self._slot
        if self.is_lost:
            self._pager.discard(slot)
            return
        try:
            self._commit()
        except Exception:
            self._pager.discard(slot)
            raise
        slot.is_leased, slot.last_used = False, self._memory.clock.now
        self._pager.ledger.reserve(slot.index, 0)

    # -- the trie

    @property
    def _trie(self) -> PrefixTrie:
        return self._pager.trie(self._slot.namespace)

    def _commit(self, *, may_split: bool = True) -> None:
        """Records the slot's tokens in the trie, and drops stored spans that the slot holds.

        Without `may_split`, a sequence that ends inside an edge is recorded up to its start: the next chunk goes
        beyond.
        """
        slot, trie, recorded = self._slot, self._trie, self._slot.tip.stop
        if recorded < slot.offset:
            tip = trie.extend(slot.tip, slot.log.view(recorded), may_split=may_split)
            for node in tip.path():
                is_new = node.home is None and node.span is None
                # Once an ordinary request has had these tokens, they may be written to disk.
                node.is_volatile = slot.is_volatile and (node.is_volatile or is_new)
                if node.start >= recorded and node.home is None:
                    trie.make_live(node, slot)
            self._pager.move_tip(slot, tip)
            tip.session_id, tip.is_on_probation = slot.session_id, slot.is_on_probation
            tip.is_background = slot.leaves_background
            self._memory.ended(tip)
            self._join_edges([tip])
        self._measure()

    def _measure(self) -> None:
        """Charges the slot's allocated bytes."""
        if not self.is_lost:
            self._pager.layout.bound_growth(self.caches)
            self._pager.measure(self._slot)

    def _capture(self, kind: RestorePointKind) -> None:
        """Stores what restoring the sequence takes, if there is memory; else nothing is evicted for it."""
        trie, node = self._trie, self._slot.tip
        assert node.stop == self.offset, "only a committed sequence can be captured"
        before = node.snapshot, node.kind, node.is_explicit
        is_missing = self._pager.layout.needs_snapshots and not is_restorable(self._pager.layout, node)
        taken = self._pager.snapshot(self._slot) if is_missing else None
        node.is_explicit |= kind is RestorePointKind.EXPLICIT
        self._memory.order.changed(node)
        if taken is not None:
            node.kind = kind
            trie.snap(node, taken)
            marked, is_background = self._mark_superseded(), self._slot.is_background
            missing = self._reclaimer.free(protected=[node], is_background=is_background, or_nothing=True)
            if missing > 0 and node.parent is not None:  # an error may have taken the sequence
                snapshot, node.kind, node.is_explicit = before
                trie.snap(node, snapshot)
                for older, last_used in marked:
                    older.last_used = last_used
                    self._memory.order.changed(older)

    def _join_edges(self, nodes: Iterable[Node]) -> None:
        """Joins edges where nothing needs the border. Copies no state."""
        trie, length = self._trie, self._piece_tokens()
        for node in nodes:
            while node.start % length and trie.try_absorb_parent(node):
                pass

    def _cut_edges(self) -> None:
        """Has live edges end at multiples of a piece's length: eviction takes little more than needed.

        Borders stay as the sequence grows, until every other one goes.
        """
        path = self._slot.tip.path
        self._join_edges(reversed(path()))
        trie, length = self._trie, self._piece_tokens()
        for node in [node for node in path() if node.home is self._slot]:
            for offset in range(node.start - node.start % length + length, node.stop, length):
                trie.split(node, offset)

    def _piece_tokens(self) -> int:
        """A power of two; more than the sequence has if state is not sliceable anywhere."""
        num_tokens = self._slot.tip.stop
        least = num_tokens if self._pager.layout.needs_snapshots else num_tokens // MAX_PIECES
        return max(layout.GROWTH_TOKENS, 1 << least.bit_length())

    def _mark_superseded(self) -> list[tuple[Node, int]]:
        """Nodes whose snapshots go first from now on, and when they were used last."""
        slot = self._slot
        nodes = {node.stop: node for node in slot.tip.path() if node.snapshot is not None and node.last_used}
        nodes[slot.tip.stop] = slot.tip
        points = [snapshots.KeptPoint(node.stop, node.kind, is_branch=False) for node in nodes.values()]
        superseded = [nodes[offset] for offset in snapshots.superseded(points, slot.landing)]
        marked = [(node, node.last_used) for node in superseded if node.last_used and not node.is_explicit]
        for node, _ in marked:
            node.last_used = 0
            self._memory.order.changed(node)
        return marked


class PrivateLease(Lease):
    """A lease that neither reuses nor leaves state."""

    def want(self, point: RestorePoint) -> None:
        """Captures nothing."""

    def keep(self, kind: RestorePointKind) -> None:
        """Captures nothing."""

    def close(self) -> None:
        """Ends the sequence and forgets it."""
        self.discard()

    suspend = close

    def _commit(self, *, may_split: bool = True) -> None:
        self._measure()
