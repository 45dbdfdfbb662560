"""Pages state between tries and slots.

Decides neither what to move nor what to evict. Invariants:
* a node's span is stored on the node, or live in its home slot, on whose path the node is;
* state leaves a slot in `page_out` only, which first stores every span that is live only there;
* a slot's log, layer caches and path to the tip hold the same tokens; of a running request the log may be ahead;
* a slot with a head has own spans after the head's tokens only, and is home of no node before.

An error leaves a slot as it was, or empty: nodes that were live only there are then gone. Giving up and discarding
evaluate nothing.
"""

import itertools
import logging
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from cache.budget import PADDING, Happening
from cache.layers.state import Segment
from cache.memory_tier import MemoryTier
from cache.slots import Slot
from cache.snapshots import RestorePointKind, first_row, is_restorable, window_rows
from cache.trie import Node, PrefixTrie, Snapshot
from cache.types import LayerCache, SharedBuffers, TokenArray, TokenLog

logger = logging.getLogger(__name__)

CLEAR_BYTES = 64 << 20
"""After paging out this much MLX's pool is freed: nothing else needs such buffers."""


class Pager:
    """All slots of one model. Worker thread only."""

    def __init__(self, memory: MemoryTier, make_caches: Callable[[], list[LayerCache]], num_slots: int) -> None:
        self.layout = memory.layout
        self.ledger = memory.ledger
        self.memory = memory
        self.make_caches = make_caches
        self.shared: SharedBuffers | None = None
        """The runner's, once there is one."""
        self.heads: list[Slot] = []
        root = memory.trie("", in_use=()).root
        self.slots = [Slot(index, make_caches(), TokenLog(), root) for index in range(num_slots)]

    def trie(self, namespace: str) -> PrefixTrie:
        """A namespace's trie; made if missing."""
        return self.memory.trie(namespace, in_use=(slot.namespace for slot in self.all_live))

    @property
    def all_live(self) -> list[Slot]:
        return [*self.heads, *self.slots]

    def enter(self, slot: Slot, trie: PrefixTrie) -> None:
        """Assigns a slot to a namespace; an empty slot gets layer caches."""
        slot.caches = slot.caches or self.make_caches()
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
        keep = slot.offset
        missing = [node for node in landing.path() if node.stop > keep]
        if missing:
            sources = [node.span if node.span is not None else self._live_rows(node) for node in missing]
            self.layout.load_spans(slot.caches, sources, keep=keep, offset=landing.stop, capacity=capacity)
            for node in missing:
                if node.home is None:
                    trie.make_live(node, slot)
        if landing.parent is not None:
            self._restore_snapshots(slot, landing)
        slot.log.append(tokens[keep:])
        slot.is_cut = False
        self.move_tip(slot, landing)
        self.measure(slot)
        if len(tokens) > keep:
            self._record(Happening.PAGED_IN, slot, len(tokens) - keep)

    def _live_rows(self, node: Node) -> Segment:
        return self.layout.live_rows(self._separated(node.home), node.start, node.stop)

    def _restore_snapshots(self, slot: Slot, landing: Node) -> None:
        offset, snapshot = landing.stop, landing.snapshot
        if self.layout.window:
            self.layout.load_windows(slot.caches, window_rows(self.layout, landing, offset), offset)
        if self.layout.has_recurrent:
            if snapshot is None or snapshot.recurrent is None or snapshot.offset != offset:
                raise AssertionError(f"no recurrent state to restore at {offset}")
            self.layout.put_recurrent(slot.caches, snapshot.recurrent)
            for node in landing.path() if snapshot.recurrent.is_rounded else ():
                node.is_rounded = True

    def page_out(self, slot: Slot, keep: int) -> None:
        """Takes `[keep, …)` out of a slot: nodes live only there are stored, others get another home.

        A slot that keeps less than its head keeps nothing. Unless `keep` is 0 the slot `is_cut`: page it in, or give
        it up. By an error the slot is given up; it is raised if something was to be kept.
        """
        keep = keep if keep >= slot.origin else 0
        if slot.offset > keep and slot.tip.parent is not None:
            try:
                self.keep_tip(slot)
                self._store_homed(slot, self.trie(slot.namespace), keep)
            except Exception as error:
                logger.warning("what slot %d held is evaluated again: %s", slot.index, error)
                self.give_up(slot, slot.tip.path())
                if keep:
                    raise
                return
            self._record(Happening.PAGED_OUT, slot, slot.offset - max(keep, slot.origin))
        if keep == 0:
            num_bytes = self.ledger.slot_bytes(slot.index)
            self.empty(slot)
            if num_bytes >= CLEAR_BYTES:
                mx.clear_cache()
            return
        self.move_tip(slot, self.land(self.trie(slot.namespace), slot.tip.path(), keep))
        slot.log.truncate(keep)
        slot.is_cut = True
        self.layout.truncate_spans(slot.caches, keep)

    def _record(self, what: Happening, slot: Slot, num_tokens: int) -> None:
        index = None if slot in self.heads else slot.index
        self.memory.journal.record(what, slot.namespace, slot=index, tokens=num_tokens)

    def page_out_idle(self, target_bytes: int, busy: Slot | None, spared: Sequence[Node] = ()) -> None:
        """Pages idle slots out until `target_bytes` are charged, then heads without readers but at `spared` nodes.

        Frees only spare capacity, and copies in other slots.
        """
        idle = [slot for slot in self.slots if slot is not busy and not slot.is_leased and slot.offset]
        for slot in sorted(idle, key=lambda slot: slot.tip.last_used):
            if self.ledger.charged_bytes > target_bytes:
                self.page_out(slot, 0)
        if self.ledger.charged_bytes > target_bytes:
            self.page_out_heads(spared)

    def _store_homed(self, slot: Slot, trie: PrefixTrie, keep: int) -> None:
        self.land(trie, slot.tip.path(), keep)
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
        others = [s for s in self.all_live if s is not slot and s.namespace == slot.namespace]
        return {node: other for other in others for node in other.tip.path() if node.start >= other.origin}

    def empty(self, slot: Slot) -> None:
        """Empties a slot, whose state was stored or is dropped next; there may be no memory for new layer caches."""
        if self.shared is not None and slot.is_leased:
            self.shared.drop(slot.caches)
        self.move_tip(slot, self.trie(slot.namespace).root)
        slot.caches.clear()  # the rows of a step, which are referenced until the next one, have the same list
        slot.head = None
        slot.log.truncate(0)
        slot.is_cut = False
        if slot in self.heads:
            self.heads.remove(slot)
        slot.session_id, slot.capacity, slot.reserved_tokens = None, 0, 0
        self.ledger.set_live(slot.index, 0)
        self.ledger.reserve(slot.index, 0)

    def give_up(self, slot: Slot, path: Sequence[Node]) -> None:
        """Empties a slot; drops nodes of `path` that are live only there or damaged."""
        homes = self._other_homes(slot)
        for node in path:
            if node.home is slot and node in homes:
                node.home = homes[node]
        lost = next((node for node in path if node.home is slot or _is_damaged(node)), None)
        self.empty(slot)
        if lost is not None:
            self.memory.drop_below(lost)

    def discard(self, slot: Slot) -> None:
        """Ends a lease with untrusted caches."""
        self.give_up(slot, slot.tip.path())
        slot.is_leased = False
        self.measure()

    # -- heads

    def share_head(self, slot: Slot, tip: Node, head: Slot | None) -> Slot | None:
        """Cuts a sequence's first tokens off, up to `tip` on its path: they move into a new head if `head` is None.

        Returns the head. An error loses the sequence, if it runs until its lease ends.
        """
        shared = head or self._new_head(slot.namespace)
        try:
            self.layout.split_at_head(self._separated(slot), shared.caches, tip.stop)
            held_bytes = {sharer.index: self.live_bytes(sharer) for sharer in (shared, slot)}
        except Exception:
            self.give_up(slot, slot.tip.path())
            raise
        slot.head = shared
        if head is None:
            shared.log.append(slot.log.view(0, tip.stop))
            self.heads.append(shared)
            self.move_tip(shared, tip)
        for node in tip.path():
            node.home = shared if node.home is slot else node.home
        for index, num_bytes in held_bytes.items():
            self.ledger.set_live(index, num_bytes)
        self.measure()
        return shared

    def _new_head(self, namespace: str) -> Slot:
        taken = {head.index for head in self.heads}
        index = next(index for index in itertools.count(len(self.slots)) if index not in taken)
        return Slot(index, self.make_caches(), TokenLog(), self.trie(namespace).root, namespace, is_cut=True)

    def enter_head(self, slot: Slot, head: Slot) -> None:
        """Has an empty slot begin with a head's tokens, which are not copied. Page the rest in, or give it up."""
        self.layout.put_on_head(slot.caches, head.caches)
        slot.head, slot.is_cut = head, True
        slot.log.append(head.log.view())
        self.move_tip(slot, head.tip)

    def page_out_heads(self, spared: Sequence[Node] = ()) -> None:
        """Pages out heads without readers, except those that end at `spared` nodes."""
        for head in list(self.heads):
            if head.tip not in spared and not any(slot.head is head for slot in self.slots):
                self.page_out(head, 0)

    def move_tip(self, slot: Slot, tip: Node) -> None:
        """Records that a slot's sequence ends at `tip`."""
        left, slot.tip = slot.tip, tip
        left.num_slots -= 1
        tip.num_slots += 1
        self.memory.order.changed(left)
        self.memory.order.changed(tip)

    def keep_tip(self, slot: Slot) -> None:
        """Takes a snapshot at an idle sequence's end."""
        is_whole = not slot.is_cut and slot.tip.parent is not None and slot.tip.stop == slot.offset
        if is_whole and self.layout.needs_snapshots and not is_restorable(self.layout, slot.tip):
            taken = self.snapshot(slot)
            slot.tip.kind = RestorePointKind.TURN_END
            self.trie(slot.namespace).snap(slot.tip, taken)

    def snapshot(self, slot: Slot) -> Snapshot:
        """Copies a slot's window and recurrent state."""
        offset, window = slot.offset, None
        if self.layout.window:
            first = max(0, offset - self.layout.window, self.layout.window_start(slot.caches, offset))
            reaches = first_row(self.layout, slot.tip.parent, slot.tip.start) <= first
            window = self.layout.cut_window(slot.caches, max(first, slot.tip.start) if reaches else first, offset)
        recurrent = self.layout.take_recurrent(slot.caches) if self.layout.has_recurrent else None
        return Snapshot(offset, window, recurrent)

    def measure(self, *slots: Slot) -> None:
        """Charges slots with the bytes held now, and what shared buffers hold beyond."""
        for slot in slots:
            self.ledger.set_live(slot.index, self.live_bytes(slot))
        self.ledger.set_live(PADDING, self.shared.padding_bytes if self.shared is not None else 0)

    def live_bytes(self, slot: Slot) -> int:
        """Bytes of a slot's own buffers, or of its part of shared ones."""
        num_bytes = self.layout.live_bytes(slot.caches)
        return num_bytes + (self.shared.own_bytes(slot.caches) if self.shared is not None else 0)

    def measure_running(self) -> None:
        """Charges running sequences anew, once they share buffers or no longer do."""
        self.measure(*(slot for slot in self.slots if slot.is_leased))

    def take_back_padding(self) -> None:
        """Frees what shared buffers hold beyond what was reserved, as far as there is memory for the copies."""
        if self.shared is not None and self.ledger.slot_bytes(PADDING):
            try:
                self.shared.separate_all()
                self.measure_running()
            except Exception as error:
                logger.warning("rows still share buffers: %s", error)

    def _separated(self, slot: Slot) -> list[LayerCache]:
        if self.shared is not None:
            self.shared.separate(slot.caches)
        return slot.caches

    def copy_live(self, node: Node, start: int = 0, stop: int | None = None) -> Segment:
        """Copies the rows of a live node, or those in `[start, stop)`."""
        rows = max(start, node.start), node.stop if stop is None else min(stop, node.stop)
        (segment,) = self.layout.cut_spans(self._separated(node.home), [rows])
        return segment

    def check(self) -> None:
        """Asserts the module's invariants."""
        for slot in self.all_live:
            self._check_slot(slot)
        for node in self.memory.nodes():
            assert node.home is None or node in node.home.tip.path(), f"{node} is live in a slot that left it"
            assert node.home is None or node.start >= node.home.origin, f"{node} is live in its home's head"

    def _check_slot(self, slot: Slot) -> None:
        tokens = np.concatenate([np.empty(0, np.int32), *(node.tokens for node in slot.tip.path())])
        assert np.array_equal(tokens, slot.log.view(0, len(tokens))), f"slot {slot.index} left its path"
        assert slot.is_leased or slot.offset == len(tokens), f"slot {slot.index} is idle ahead of the trie"
        offsets = set() if slot.is_leased or slot.is_cut else self.layout.offsets(slot.caches)
        assert offsets <= {slot.offset}, f"slot {slot.index} holds {offsets} tokens, its log {slot.offset}"
        assert slot.is_cut == (slot in self.heads), f"slot {slot.index} was cut and not restored"
        root = self.trie(slot.namespace).root
        assert slot.tip is root or (slot.tip.parent is not None and slot.tip.num_slots >= 1)
        self._check_head(slot)

    def _check_head(self, slot: Slot) -> None:
        head, caches = slot.head, slot.caches
        assert self.layout.origin(caches) == slot.origin, f"slot {slot.index} begins elsewhere than its head stops"
        if head is not None:
            assert head in self.heads and head.tip in slot.tip.path(), f"slot {slot.index} left its head's path"
            assert np.array_equal(slot.log.view(0, head.offset), head.log.view()), "a head holds other tokens"
        if slot in self.heads:
            assert self.layout.capacity(caches) == slot.offset == slot.tip.stop, "a head holds more than its tokens"
            assert self.ledger.slot_bytes(slot.index) == self.live_bytes(slot), "a head is not charged"


def _is_damaged(node: Node) -> bool:
    return node.span is not None and not node.span.is_whole
