"""Slots, what they and the trie hold of a prompt, the choice of one, and the clock of their age. Pure.

A slot is *leased* while a request runs and *idle* afterwards, still live: the conversation's next turn continues in
place. A *head* is a slot in which nobody decodes: it holds the first tokens of the sequences that read it. Slots know
only the trie node where their sequence ends. The clock counts requests, not seconds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cache.snapshots import RestorePoint, RestorePointKind, deepest
from cache.trie import Node, NodeMatch, Place, PrefixTrie
from cache.types import LayerCache, LayerKinds, TokenArray, TokenLog


@dataclass(eq=False)
class Slot:
    """A place for one live sequence, and what is known of the request that runs in it, or ran last.

    Between steps `log` and layer caches hold the same tokens.
    """

    index: int
    caches: list[LayerCache]
    """Empty until `enter`."""
    log: TokenLog
    tip: Node
    namespace: str = ""
    is_leased: bool = False
    is_cut: bool = False
    """Spans were truncated for a restore; other state is of the old end. A head has spans only."""
    head: "Slot | None" = None
    """Holds the sequence's first tokens; the slot's own spans begin after them."""
    capacity: int = 0
    """Tokens in live buffers, allocated or not yet."""
    reserved_tokens: int = 0
    session_id: str | None = None
    is_volatile: bool = False
    is_background: bool = False
    leaves_background: bool = False
    is_on_probation: bool = False
    """Without a session, and continues no earlier turn."""
    landing: int = 0
    """Where the turn was restored."""
    turn_start: int = 0
    """From here the next turn may render messages differently."""
    last_used: int = 0

    @property
    def offset(self) -> int:
        return len(self.log)

    @property
    def origin(self) -> int:
        return self.head.offset if self.head is not None else 0

    @property
    def is_lost(self) -> bool:
        """An error took the state of a running request, which must be evaluated again."""
        return self.is_leased and not self.caches

    def lease_to(self, request: "CacheRequest", now: int) -> None:
        """Begins a request that continues the slot's sequence."""
        tip, session_id = self.tip, request.session_id
        # A beginning that several conversations share ends no turn.
        ends_turn = tip.parent is not None and (not tip.children or tip.kind in _TURNS)
        self.leaves_background = self.is_background and (tip.session_id != session_id or tip.is_background)
        self.is_on_probation = session_id is None and not ends_turn
        self.is_leased, self.session_id, self.is_volatile = True, session_id, request.is_volatile
        ends = (point.offset for point in request.restore_points if point.kind is RestorePointKind.PROMPT_END)
        self.landing, self.turn_start = self.offset, min(ends, default=len(request.tokens) - 1)
        self.last_used = now
        tip.session_id, tip.is_on_probation = session_id or tip.session_id, False


_TURNS = (RestorePointKind.PROMPT_END, RestorePointKind.TURN_END, RestorePointKind.USER_START)


NEW_SESSION_COUNT = 200
"""A new session's client has often ended another."""
MAX_SESSIONS = 10_000
"""A forgotten session counts as new."""


class RequestClock:
    """Counts requests as they begin, and as they end: then the caller adds 1."""

    def __init__(self) -> None:
        self.now = 0
        self._sessions: dict[tuple[str, str], None] = {}

    def begin(self, namespace: str, session_id: str | None, *, is_background: bool = False) -> None:
        """Counts a request's start; an `is_background` one begins no session."""
        self.now += 1
        if session_id is None or is_background:
            return
        name = namespace, session_id
        self.now += NEW_SESSION_COUNT if name not in self._sessions else 0
        self._sessions.pop(name, None)
        self._sessions[name] = None
        if len(self._sessions) > MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]


class Lookup:
    """A prompt and its last match: only the rest is compared again. Worker thread only."""

    def __init__(
        self,
        tokens: TokenArray,
        *,
        namespace: str = "",
        reuse: bool = True,
        pictures: Sequence[tuple[int, int]] = (),
    ) -> None:
        """The last prompt token is never restored: the model needs one. Without `reuse`, none is.

        A match that would end inside one of the ranges `pictures` ends at its start.
        """
        self.namespace, self.reuse, self._pictures = namespace, reuse, pictures
        self.prompt = tokens
        self.tokens = tokens[:-1] if reuse else tokens[:0]
        self._match: NodeMatch | None = None

    def match(self, trie: PrefixTrie) -> NodeMatch:
        """Matches the prompt against its namespace's trie."""
        match = self._match
        if match is None or not match.length or match.is_gone:
            match = Place(trie.root, 0)
        match = trie.follow(match, self.tokens[match.length :])
        length = next((start for start, stop in self._pictures if start < match.length < stop), match.length)
        if length < match.length:
            match = trie.follow(Place(trie.root, 0), self.tokens[:length])
        self._match = match
        return match


@dataclass(frozen=True, eq=False)
class CacheRequest:
    """A request as the cache sees it."""

    lookup: Lookup
    session_id: str | None = None
    restore_points: Sequence[RestorePoint] = ()
    expected_tokens: int = 0
    """Tokens of the output for which memory is reserved."""
    is_volatile: bool = False
    """The state never goes to disk."""
    is_background: bool = False
    """Session ends are evicted last."""
    wants_head: bool = False
    """A short request: sharing a head with running requests saves a copy, whether steps get faster or not."""

    @property
    def tokens(self) -> TokenArray:
        return self.lookup.prompt

    @property
    def namespace(self) -> str:
        return self.lookup.namespace


@dataclass(frozen=True)
class LookupResult:
    """How much of a match is restorable; valid until the cache changes."""

    match: NodeMatch
    path: list[Node]
    """The nodes of the match."""
    stored: int
    """Tokens restorable from the trie."""
    shared: list[int]
    """For each slot, common tokens of match and sequence."""
    restorable: int
    """Tokens restorable from the trie or an idle slot."""

    def restorable_in(self, slot: Slot) -> int:
        """Tokens restorable for a request in `slot`."""
        return max(self.stored, _continued(slot, self.shared[slot.index]))


def look_up(match: NodeMatch, slots: Sequence[Slot], layout: LayerKinds) -> LookupResult:
    """How much of a match is restorable."""
    path, length = match.node.path(), match.length
    nodes, stored = set(path), deepest(layout, path, length)
    # Sequences with a common prefix share the nodes of a trie, so no tokens are compared here.
    shared = [min(slot.tip.meeting(nodes).stop, length) for slot in slots]
    live = (_continued(slot, num) for slot, num in zip(slots, shared, strict=True) if not slot.is_leased)
    return LookupResult(match, path, stored, shared, max(stored, *live, 0))


def _continued(slot: Slot, shared: int) -> int:
    return shared if shared == slot.offset else 0


def choose_slot(slots: Iterable[Slot], result: LookupResult, namespace: str, session_id: str | None) -> Slot:
    """The slot for a request; one must be idle.

    First the one that the request continues, unless the trie restores deeper; then the conversation's own; then an
    empty one; then the least recently used.
    """
    idle = [slot for slot in slots if not slot.is_leased]
    session = None if session_id is None else (namespace, session_id)
    shared, own = result.shared, {slot.index: (slot.namespace, slot.session_id) == session for slot in idle}
    continued = [slot for slot in idle if max(result.stored, 1) <= _continued(slot, shared[slot.index])]
    rewound = [slot for slot in idle if _rewinds(slot, shared[slot.index], is_own=own[slot.index])]
    if continued:
        return max(continued, key=lambda slot: (slot.offset, own[slot.index], slot.last_used))
    if rewound:
        return max(rewound, key=lambda slot: (own[slot.index], shared[slot.index], slot.last_used))
    return min(idle, key=lambda slot: (slot.offset > 0, slot.last_used, slot.index))


def _rewinds(slot: Slot, shared: int, *, is_own: bool) -> bool:
    """A retry, an edit or another rendering of the slot's conversation."""
    return shared > 0 and (shared * 2 >= slot.offset if is_own else shared >= slot.turn_start > 0)
