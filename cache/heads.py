"""Which running sequences hold their first tokens once, and when.

A head holds the first tokens of the sequences that read it; see `layers/headed.py`. Heads are made where the runner
measured that steps become faster, and, much shorter ones, wherever memory is short: before anything is paged out,
evicted or made to wait. A sequence reads one head at most, and a head reads none.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cache.layers.layout import SequenceSizes
from cache.pager import Pager
from cache.slots import LookupResult, Slot
from cache.trie import Node

MIN_HEAD_TOKENS = 256
"""Where memory is short; a shorter head saves less than a buffer grows by, and costs every step."""


@dataclass(frozen=True, eq=False)
class Heads:
    """Has sequences share heads. Worker thread only."""

    pager: Pager
    sizes: SequenceSizes

    def _least_tokens(self, *, is_short: bool) -> float:
        """Tokens from which a head pays; inf if none does."""
        fast = self.pager.shared.head_tokens if self.pager.shared is not None else None
        if fast is None or not self.pager.layout.can_share_heads:
            return math.inf
        return min(fast, MIN_HEAD_TOKENS) if is_short else fast

    def head_of(self, slot: Slot, path: Sequence[Node], offset: int) -> Slot | None:
        """The head that a request will read once `slot` has restored it at `offset` on `path`."""
        if is_in_place(slot, path, offset):
            return slot.head
        fitting = [head for head in self.pager.heads if head.offset <= offset and head.tip in path]
        return slot.head if slot.head in fitting else max(fitting, key=lambda head: head.offset, default=None)

    def invite(self, slot: Slot, found: LookupResult, *, is_short: bool) -> bool:
        """Makes a head of what running sequences share with a request to be restored in `slot`, if that saves most.

        Returns whether it did; then `found` is no longer valid. An error loses a running sequence.
        """
        offset, least = found.restorable_in(slot), self._least_tokens(is_short=is_short)
        if least == math.inf or is_in_place(slot, found.path, offset):
            return False
        shared = [min(found.shared[other.index], offset) for other in self._loose(None)]
        saved = {num: num * sum(other >= num for other in shared) for num in shared if num >= least}
        head = self.head_of(slot, found.path, offset)
        if not saved or (head is not None and head.offset >= max(saved.values())):
            return False
        length = max(saved, key=lambda num: (saved[num], num))
        source = next(other for other in self._loose(None) if found.shared[other.index] >= length)
        self._share(self.pager.land(self.pager.trie(source.namespace), found.path, length), None)
        return True

    def gather(self, *, is_short: bool, target_bytes: float = -1, also: Slot | None = None) -> None:
        """Has running sequences, and `also`, share the heads that save most, until `target_bytes` are charged.

        An error loses a running sequence.
        """
        least = self._least_tokens(is_short=is_short)
        while least < math.inf and self.pager.ledger.charged_bytes > target_bytes:
            tip = self._best(least, also)
            if tip is None:
                return
            self._share(tip, also)

    def _loose(self, also: Slot | None) -> list[Slot]:
        running = (slot for slot in self.pager.slots if slot.is_leased or slot is also)
        return [slot for slot in running if slot.head is None and slot.tip.parent is not None]

    def _best(self, least: float, also: Slot | None) -> Node | None:
        """The end of the head, there already or not, that saves most."""
        made = {head.tip for head in self.pager.heads}
        counts = Counter(node for slot in self._loose(also) for node in slot.tip.path() if node.stop >= least)
        saved = {tip: tip.stop * (num - (tip not in made)) for tip, num in counts.items()}
        best = max(saved, key=lambda tip: (saved[tip], tip.stop), default=None)
        return best if best is not None and saved[best] > 0 else None

    def _share(self, tip: Node, also: Slot | None) -> None:
        head = next((head for head in self.pager.heads if head.tip is tip), None)
        for slot in self._loose(also):
            if tip in slot.tip.path():
                head = self.pager.share_head(slot, tip, head)
                if slot.is_leased and not slot.is_lost:
                    reserved = self.sizes.bytes_for(slot.reserved_tokens, slot.origin)
                    self.pager.ledger.reserve(slot.index, reserved)


def is_in_place(slot: Slot, path: Sequence[Node], offset: int) -> bool:
    """Whether a request to be restored at `offset` on `path` continues where `slot` is."""
    return slot.offset == offset and (not offset or slot.tip in path)
