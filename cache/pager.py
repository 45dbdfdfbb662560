"""Pages state between tries and slots: in, out, and what is dropped when that fails half-way.

What to move and what to evict is decided elsewhere. Invariants:
* a node's span is stored on the node, or live in its home slot, on whose path the node is;
* state leaves a slot in `page_out` only, which first stores every span that is live only there;
* a slot's log, layer caches and path to the tip hold the same tokens; of a running request the log may be ahead.
"""

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from cache.budget import PADDING
from cache.journal import CacheEvent, Happening
from cache.layers.layout import Layout
from cache.layers.state import RowSource, Segment
from cache.memory_tier import MemoryTier
from cache.slots import Slot
from cache.snapshots import RestorePointKind, Snapshot, cover, is_restorable, window_rows
from cache.trie import Node, PrefixTrie
from cache.types import LayerCache, SharedBuffers, TokenArray, TokenLog

CLEAR_BYTES = 64 << 20
"""After paging out this much MLX's pool is freed: nothing else needs such buffers."""


class Pager:
    """All slots of one model. Worker thread only."""

    def __init__(
        self, layout: Layout, memory: MemoryTier, make_caches: Callable[[], list[LayerCache]], num_slots: int
    ) -> None:
        self.layout = layout
        self.ledger = memory.ledger
        self._memory = memory
        self._make_caches = make_caches
        self.shared: SharedBuffers | None = None
        """The runner's, once there is one."""
        self.slots: list[Slot] = []
        root = self.trie("").root
        self.slots = [Slot(index, make_caches(), TokenLog(), root) for index in range(num_slots)]

    def trie(self, namespace: str) -> PrefixTrie:
        """A namespace's trie; made if missing."""
        return self._memory.trie(namespace, in_use=(slot.namespace for slot in self.slots))

    def use_caches_of(self, make_caches: Callable[[], list[LayerCache]]) -> None:
        """Replaces the maker of layer caches; all slots must be empty."""
        assert not any(slot.caches for slot in self.slots), "a slot holds caches of a model that has gone"
        self._make_caches = make_caches

    def enter(self, slot: Slot, trie: PrefixTrie) -> None:
        """Assigns a slot to a namespace; an empty slot gets layer caches."""
        slot.caches = slot.caches or self._make_caches()
        slot.namespace = trie.namespace
        if slot.tip.parent is None:
            slot.tip = trie.root

    def land(self, trie: PrefixTrie, path: list[Node], offset: int) -> Node:
        """The node that stops at `offset` on `path`, split if needed."""
        if offset == 0:
            return trie.root
        node = next(node for node in path if node.stop >= offset)
        return node if node.stop == offset else trie.split(node, offset)

    def page_in(self, slot: Slot, trie: PrefixTrie, landing: Node, tokens: TokenArray, capacity: int) -> None:
        """Moves the state of `tokens`, which end at `landing`, into a slot that holds the first.

        Raises AssertionError for missing state; then `give_up` the slot.
        """
        keep, path = slot.offset, landing.path()
        missing = [node for node in path if node.stop > keep]
        if missing:
            sources = [self._source(node) for node in missing]
            self.layout.load_spans(slot.caches, sources, keep=keep, offset=landing.stop, capacity_tokens=capacity)
            for node in missing:
                if node.home is None:
                    trie.make_live(node, slot)
        if landing.parent is not None:
            self._restore_snapshots(slot, path, landing.stop)
        slot.log.append(tokens[keep:])
        slot.is_cut = False
        self.move_tip(slot, landing)
        self.measure(slot)
        if len(tokens) > keep:
            self._record(Happening.PAGED_IN, slot, len(tokens) - keep)

    def _source(self, node: Node) -> RowSource:
        if node.span is not None:
            return node.span  # type: ignore[return-value]
        self._separate(node.home)
        return self.layout.live_rows(node.home.caches, node.start, node.stop)

    def _restore_snapshots(self, slot: Slot, path: list[Node], offset: int) -> None:
        if self.layout.window:
            self.layout.load_windows(slot.caches, window_rows(self.layout, path, offset), offset)
        if self.layout.has_recurrent:
            snapshot = path[-1].snapshot
            if not isinstance(snapshot, Snapshot) or snapshot.recurrent is None or snapshot.offset != offset:
                raise AssertionError(f"no recurrent state to restore at {offset}")
            self.layout.put_recurrent(slot.caches, snapshot.recurrent)

    def page_out(self, slot: Slot, keep: int) -> None:
        """Takes `[keep, …)` out of a slot: nodes live only there are stored, others get another home.

        Unless `keep` is 0 the slot `is_cut`: page it in, or give it up.
        """
        if slot.offset > keep and slot.tip.parent is not None:
            try:
                self.keep_tip(slot)
                self._store_homed(slot, self.trie(slot.namespace), keep)
            except Exception:
                self.give_up(slot, slot.tip.path())
                raise
            self._record(Happening.PAGED_OUT, slot, slot.offset - keep)
        if keep == 0:
            num_bytes = self.ledger.slot_bytes(slot.index)
            self.empty(slot)
            if num_bytes >= CLEAR_BYTES:
                mx.clear_cache()
            return
        tip = next(node for node in slot.tip.path() if node.stop >= keep)
        if tip.stop > keep:
            tip = self.trie(slot.namespace).split(tip, keep)
        self.move_tip(slot, tip)
        slot.log.truncate(keep)
        slot.is_cut = True
        self.layout.truncate_spans(slot.caches, keep)

    def _record(self, what: Happening, slot: Slot, num_tokens: int) -> None:
        self._memory.journal.record(CacheEvent(what, slot.namespace, num_tokens, slot=slot.index))

    def page_out_idle(self, target_bytes: int, busy: Slot | None) -> None:
        """Pages idle slots out until `target_bytes` are charged.

        Frees only spare capacity, and copies in other slots.
        """
        idle = [slot for slot in self.slots if slot is not busy and not slot.is_leased and slot.offset]
        for slot in sorted(idle, key=lambda slot: slot.tip.last_used):
            if self.ledger.charged_bytes > target_bytes:
                self.page_out(slot, 0)

    def _store_homed(self, slot: Slot, trie: PrefixTrie, keep: int) -> None:
        cut = next((node for node in slot.tip.path() if node.start < keep < node.stop), None)
        if cut is not None:
            trie.split(cut, keep)
        homes = self._other_homes(slot)
        leaving = [node for node in slot.tip.path() if node.start >= keep and node.home is slot]
        staying = [node for node in leaving if node not in homes]
        for node in leaving:
            node.home = homes.get(node, slot)
        ranges = [(node.start, node.stop) for node in staying]
        segments = self.layout.cut_spans(slot.caches, ranges, consume=keep == 0)
        for node, segment in zip(staying, segments, strict=True):
            trie.store(node, segment)

    def _other_homes(self, slot: Slot) -> dict[Node, Slot]:
        others = [s for s in self.slots if s is not slot and s.namespace == slot.namespace]
        return {node: other for other in others for node in other.tip.path()}

    def empty(self, slot: Slot) -> None:
        """Empties a slot, whose state was stored, or is dropped next.

        `enter` makes new layer caches: there may be no memory now.
        """
        self.move_tip(slot, self.trie(slot.namespace).root)
        slot.caches = []
        slot.log.truncate(0)
        slot.is_cut = False
        slot.turn.session_id, slot.capacity, slot.reserved_tokens = None, 0, 0
        self.ledger.set_live(slot.index, 0)
        self.ledger.reserve(slot.index, 0)

    def give_up(self, slot: Slot, path: Sequence[Node]) -> None:
        """Empties a slot; drops nodes of `path` that are live only there or damaged."""
        trie, homes = self.trie(slot.namespace), self._other_homes(slot)
        for node in path:
            if node.home is slot and node in homes:
                node.home = homes[node]
        lost = next((node for node in path if node.home is slot or not _is_whole(node)), None)
        self.empty(slot)
        if lost is not None:
            self._memory.drop_below(trie, lost)

    def discard(self, slot: Slot) -> None:
        """Ends a lease with untrusted caches."""
        self.give_up(slot, slot.tip.path())
        slot.is_leased = False

    def move_tip(self, slot: Slot, tip: Node) -> None:
        """Records that a slot's sequence ends at `tip`."""
        left, trie = slot.tip, self.trie(slot.namespace)
        left.num_slots -= 1
        slot.tip = tip
        tip.num_slots += 1
        self._memory.order.changed(trie.namespace, left)
        self._memory.order.changed(trie.namespace, tip)

    def keep_tip(self, slot: Slot) -> None:
        """Takes a snapshot at an idle sequence's end."""
        is_whole = not slot.is_cut and slot.tip.parent is not None and slot.tip.stop == slot.offset
        if is_whole and self.layout.needs_snapshots and not is_restorable(self.layout, slot.tip):
            slot.tip.kind = RestorePointKind.TURN_END
            self.trie(slot.namespace).snap(slot.tip, self.snapshot(slot))

    def snapshot(self, slot: Slot) -> Snapshot:
        """Copies a slot's window and recurrent state."""
        offset, window = slot.offset, None
        if self.layout.window:
            first = max(0, offset - self.layout.window, self.layout.window_start(slot.caches, offset))
            covered = cover(slot.tip.path()[:-1])
            reaches = covered is not None and covered[0] <= first and covered[1] >= slot.tip.start
            window = self.layout.cut_window(slot.caches, max(first, slot.tip.start) if reaches else first, offset)
        recurrent = self.layout.take_recurrent(slot.caches) if self.layout.has_recurrent else None
        return Snapshot(offset, window, recurrent)

    def measure(self, slot: Slot) -> None:
        """Charges a slot with the bytes held now."""
        self.ledger.set_live(slot.index, self.live_bytes(slot))
        self._measure_padding()

    def live_bytes(self, slot: Slot) -> int:
        """Bytes of a slot's own buffers, or of its part of shared ones."""
        num_bytes = self.layout.live_bytes(slot.caches)
        return num_bytes + (self.shared.own_bytes(slot.caches) if self.shared is not None else 0)

    def measure_running(self) -> None:
        """After running sequences have begun to share buffers, or ended it."""
        for slot in self.slots:
            if slot.is_leased:
                self.ledger.set_live(slot.index, self.live_bytes(slot))
        self._measure_padding()

    def _measure_padding(self) -> None:
        self.ledger.set_live(PADDING, self.shared.padding_bytes if self.shared is not None else 0)

    def take_back_padding(self) -> None:
        """Frees what shared buffers hold beyond what was reserved."""
        if self.shared is not None and self.ledger.slot_bytes(PADDING):
            self.shared.separate_all()
            self.measure_running()

    def _separate(self, slot: Slot) -> None:
        if self.shared is not None:
            self.shared.separate(slot.caches)

    def copy_live(self, node: Node) -> Segment:
        """Copies the rows of a live node."""
        self._separate(node.home)
        (segment,) = self.layout.cut_spans(node.home.caches, [(node.start, node.stop)])
        return segment

    def check(self) -> None:
        """Asserts the module's invariants."""
        for slot in self.slots:
            self._check_slot(slot)
        for _, node in self._memory.nodes():
            assert node.home is None or node in node.home.tip.path(), f"{node} is live in a slot that left it"

    def _check_slot(self, slot: Slot) -> None:
        path = slot.tip.path()
        tokens = np.concatenate([node.tokens for node in path]) if path else np.empty(0, np.int32)
        assert np.array_equal(tokens, slot.log.view(0, len(tokens))), f"slot {slot.index} left its path"
        assert slot.is_leased or slot.offset == len(tokens), f"slot {slot.index} is idle ahead of the trie"
        assert not slot.is_cut, f"slot {slot.index} was cut and not restored"
        assert slot.tip.num_slots >= 1 or slot.tip.parent is None
        assert slot.tip.parent is not None or slot.tip is self.trie(slot.namespace).root


def _is_whole(node: Node) -> bool:
    return not isinstance(node.span, Segment) or node.span.is_whole
