"""Conversations that leave a prefix cache, and enter another one, a piece of state at a time.

State leaves from wherever it is: stored, live in a slot, or on disk. The cache stays in use meanwhile; what is
evicted between two pieces ends its conversation's part early. State enters the disk tier, or memory without one, as
this cache's own. What takes a cache is for its worker thread; `Departure` and `Intake` are for one that may wait.
"""

import contextlib
import io
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any, TypeAlias

import numpy as np

from cache.budget import DiskFault
from cache.disk.bundle import BundleError, BundleHead, BundlePiece, BundleReader, bundled
from cache.disk.codec import BLOCK_TOKENS, LoadedState, StateImage, Unstorable, read_state, read_tensors
from cache.disk.connector import stored_snapshot
from cache.disk.files import Tensor, TensorFile, write_to
from cache.disk.tree import START, DiskPlace, DiskTree, FilePart, Target, written_stop
from cache.prefix_cache import PrefixCache
from cache.snapshots import is_restorable
from cache.trie import Node, Snapshot, TokenNode, TokenTrie
from cache.types import TokenArray

logger = logging.getLogger(__name__)

PIECE_BYTES = 32 << 20
"""Rows of one piece, about: the worker copies them between two steps."""

CacheCall: TypeAlias = Callable[..., Any]
"""`call(function, *given)` has the worker thread call a function with a cache, and waits."""


@dataclass(frozen=True, eq=False)
class MovingText:
    """A text whose state may leave."""

    namespace: str
    session_id: str | None
    tokens: TokenArray


@dataclass(eq=False)
class LeavingPiece:
    """Rows of `[start, stop)`, or a snapshot at `stop`."""

    of: MovingText
    start: int
    stop: int
    is_snapshot: bool
    read: Callable[[], tuple[list[Tensor], Mapping[str, str]]]
    """What no change of the cache reaches. For any thread; raises DiskFault."""
    is_lost: bool = False


def conversations(cache: PrefixCache, is_wanted: Callable[[str], bool]) -> Iterator[MovingText]:
    """Texts of the wanted namespaces: of state in memory, the last used first, then of state on disk."""
    sources: list[Iterator[Any]] = [cache.memory.nodes()]
    if (disk := cache.memory.disk) is not None:
        sources.append(disk.tier.tree.nodes())
    for nodes in sources:
        leaves = [node for node in nodes if not node.children and is_wanted(node.trie.namespace)]
        for leaf in sorted(leaves, key=lambda leaf: leaf.last_used, reverse=True):
            if leaf.parent is not None:
                tokens = np.concatenate([step.tokens for step in leaf.path()])
                yield MovingText(leaf.trie.namespace, getattr(leaf, "session_id", None), tokens)


class Departure:
    """Bundles of one cache's conversations: a later one has only what came since.

    Each piece leaves once: what several conversations begin with leaves with the first.
    """

    def __init__(self, call: CacheCall) -> None:
        self._call = call
        self._gone = defaultdict[str, TokenTrie[TokenNode]](partial(TokenTrie, TokenNode))
        self.num_conversations = self.num_tokens = self.num_bytes = 0

    def blocks(
        self, head: BundleHead, texts: Iterator[MovingText], may_go_on: Callable[[], bool] = lambda: True
    ) -> Iterator[bytes]:
        """Yields a bundle, with no further piece once `may_go_on` returns False; nothing if nothing leaves.

        Raises what `call` raises.
        """
        return bundled(head, self._packed(texts, may_go_on))

    def _packed(
        self, texts: Iterator[MovingText], may_go_on: Callable[[], bool]
    ) -> Iterator[tuple[BundlePiece, bytes]]:
        pieces, before = self._call(self._pieces, texts), None
        while may_go_on() and (piece := self._call(lambda cache: next(pieces, None))) is not None:
            file, of = io.BytesIO(), piece.of
            try:
                receipt = write_to(file, *piece.read())
            except DiskFault as fault:
                logger.warning("what follows of a conversation stays here: %s", fault)
                piece.is_lost = True
                continue
            self.num_conversations += before is not of
            self.num_tokens += 0 if piece.is_snapshot else piece.stop - piece.start
            self.num_bytes += file.tell()
            before, tokens = of, of.tokens[: piece.stop]
            packed = BundlePiece(of.namespace, of.session_id, tokens, piece.start, piece.is_snapshot, receipt)
            yield packed, file.getvalue()

    def _pieces(self, cache: PrefixCache, texts: Iterator[MovingText]) -> Iterator[LeavingPiece]:
        for text in texts:
            gone, state = self._gone[text.namespace], _State(cache, text)
            done = gone.match(text.tokens).length
            for stop in [offset for offset in state.ends() if offset > done]:
                while done < stop and (rows := state.rows(done, stop)) is not None:
                    yield rows
                    if rows.is_lost:
                        break
                    done = rows.stop
                    gone.extend(gone.root, text.tokens[:done])
                if done < stop:
                    break
                if (snapshot := state.snapshot(stop)) is not None:
                    yield snapshot

    def num_left(self, cache: PrefixCache) -> int:
        """How many conversations have state that has not left, which now counts as gone. Worker thread only."""
        lacking = 0
        for text in conversations(cache, lambda name: True):
            gone, stop = self._gone[text.namespace], max(_State(cache, text).ends(), default=0)
            lacking += stop > gone.match(text.tokens).length
            gone.extend(gone.root, text.tokens[:stop])
        return lacking


class _State:
    """The state of one conversation, wherever it is now."""

    def __init__(self, cache: PrefixCache, of: MovingText) -> None:
        self._cache, self._layout, self._of = cache, cache.layout, of
        self._tree = cache.memory.disk.tier.tree if cache.memory.disk is not None else DiskTree()

    def _edges(self) -> list[tuple[Node, int]]:
        """The edges in memory that may leave, and where the conversation's own tokens end on each."""
        match = self._cache.memory.find_trie(self._of.namespace).match(self._of.tokens)
        path = takewhile(lambda node: not node.is_volatile, match.node.path())
        return [(node, min(node.stop, match.length)) for node in path]

    @contextlib.contextmanager
    def _points(self) -> Iterator[dict[int, Node]]:
        """The nodes of memory with a whole snapshot, by offset; an idle sequence has one at its end meanwhile."""
        whole = [node for node, stop in self._edges() if stop == node.stop and self._layout.needs_snapshots]
        with self._cache.idle_ends(whole):
            yield {node.stop: node for node in whole if is_restorable(self._layout, node)}

    def _rows_on_disk(self, start: int) -> list[FilePart]:
        return self._tree.covered(self._place(), start, len(self._of.tokens))

    def _snapshots_on_disk(self) -> dict[int, FilePart]:
        return {file.stop: file.whole for file in self._tree.snapshots(self._place()) if file.is_written}

    def _place(self) -> DiskPlace:
        return self._tree.follow(self._of.namespace, START, self._of.tokens)

    def ends(self) -> list[int]:
        """Where rows end, ascending: at each snapshot, or, where none are needed, with the state."""
        with self._points() as points:
            ends = {*self._snapshots_on_disk(), *points}
        if not self._layout.needs_snapshots:
            stop = max((stop for _, stop in self._edges()), default=0)
            ends.add(written_stop(self._rows_on_disk(stop), stop))
        return sorted(ends)

    def rows(self, start: int, stop: int) -> LeavingPiece | None:
        """The rows from `start` on, up to `stop`, or as many as a piece may have."""
        for node, end in self._edges():
            if node.start <= start < end:
                stop = _piece_stop(start, min(stop, end), self._layout.bytes_per_token)
                span, copy = node.span, self._cache.pager.copy_live
                rows = copy(node, start, stop) if span is None else span.between(start, stop)
                return self._of_memory(start, stop, False, self._layout.rounded(rows))
        part = next(iter(self._rows_on_disk(start)), None)
        if part is None or part.start > start or not part.file.is_written:
            return None
        stop = _piece_stop(start, min(stop, part.stop), part.num_bytes / (part.stop - start))
        return self._of_disk(FilePart(part.file, start, stop))

    def snapshot(self, offset: int) -> LeavingPiece | None:
        """The snapshot at `offset`, if any that can be stored."""
        with self._points() as points, contextlib.suppress(Unstorable):
            if offset in points:
                window, recurrent = stored_snapshot(self._layout, points[offset])
                return self._of_memory(offset if window is None else window.start, offset, True, window, recurrent)
        part = self._snapshots_on_disk().get(offset)
        return self._of_disk(part) if part is not None else None

    def _of_memory(self, start: int, stop: int, is_snapshot: bool, *state: Any) -> LeavingPiece:
        """Raises Unstorable."""
        image = StateImage(*state)
        tensors = image.tensors(start, stop), image.metadata()
        return LeavingPiece(self._of, start, stop, is_snapshot, lambda: tensors)

    def _of_disk(self, part: FilePart) -> LeavingPiece:
        disk = self._cache.memory.disk
        assert disk is not None, "the part is on disk"
        read = partial(disk.tier.store.read, part, read_tensors)
        return LeavingPiece(self._of, part.start, part.stop, part.file.is_snapshot, read)


def _piece_stop(start: int, stop: int, bytes_per_token: float) -> int:
    num_tokens = int(PIECE_BYTES / max(bytes_per_token, 1.0))
    return min(stop, start + max(num_tokens // BLOCK_TOKENS, 1) * BLOCK_TOKENS)


# ------------------------------------------------------------------------------------------------------- arrival


def adopt(cache: PrefixCache, piece: BundlePiece, data: bytes, kept: list[Node]) -> "Future[None] | None":
    """Keeps a piece if there is room; once the future is done, on disk. Raises BundleError.

    In memory `kept` gets its node, and what is there already is not evicted.
    """
    try:
        file = TensorFile(io.BytesIO(data), piece.receipt)
        state = read_state(file, piece.start, piece.start, len(piece.tokens))
    except Exception as error:  # a right digest may cover anything
        raise BundleError(f"the bundle is damaged: {error}") from error
    if not cache.layout.fits(*state, is_snapshot=piece.is_snapshot):
        raise BundleError("the bundle holds state of other layers than this model's")
    if cache.memory.disk is None:
        _keep(cache, piece, state, kept)
        return None
    tier, target, rows = cache.memory.disk.tier, Target(piece.namespace, piece.tokens), state[0]
    if piece.is_snapshot:
        tier.write_snapshot(target, *state)
    elif rows is not None:
        tier.write_span(target, rows)
    return tier.queue.barrier()


def _keep(cache: PrefixCache, piece: BundlePiece, state: LoadedState, kept: list[Node]) -> None:
    """Keeps a piece in memory, unless what it depends on is missing."""
    num_bytes = sum(part.num_bytes for part in state if part is not None)
    match = cache.pager.trie(piece.namespace).match(piece.tokens)
    if match.length < (len(piece.tokens) if piece.is_snapshot else piece.start):
        return
    tip = match.node
    if not holds(cache, piece):
        excess_bytes, protected = cache.ledger.excess_bytes(num_bytes), [tip, *kept]
        if cache.reclaimer.free(excess_bytes, protected=protected, or_nothing=True) > 0 or match.is_gone:
            return
        rows, snapshot = state[0], Snapshot(len(piece.tokens), *state) if piece.is_snapshot else None
        rows = rows.tail(match.length) if rows is not None and snapshot is None else None
        tip = cache.attach(piece.namespace, piece.tokens, rows, snapshot)
        tip.session_id = tip.session_id or piece.session_id
        cache.memory.ended(tip)
    kept.append(tip)


def holds(cache: PrefixCache, piece: BundlePiece) -> bool:
    """Whether a piece is kept: on disk, or in memory without one."""
    stop = len(piece.tokens)
    if cache.memory.disk is None:
        match = cache.memory.find_trie(piece.namespace).match(piece.tokens)
        is_point = match.node.stop == stop and is_restorable(cache.layout, match.node)
        return match.length == stop and (is_point or not piece.is_snapshot)
    tier = cache.memory.disk.tier
    tier.notice_written()
    place = tier.tree.follow(piece.namespace, START, piece.tokens)
    if piece.is_snapshot:
        file = tier.tree.snapshot(place, stop)
        return file is not None and file.is_written
    return written_stop(tier.tree.covered(place, piece.start, stop), piece.start) == stop


class NoRoom(BundleError):
    """What follows in a bundle does not fit."""


class Intake:
    """Takes bundles in, and counts what is kept."""

    def __init__(self, call: CacheCall, namespace_of: Callable[[str], str]) -> None:
        """`namespace_of` says where to."""
        self._call, self._namespace_of = call, namespace_of
        self._nodes = list[Node]()
        self.kept = list[BundlePiece]()
        """The last piece of each conversation."""
        self.num_tokens = self.num_bytes = self.new_bytes = 0
        """Of what is kept; `new_bytes` of what was not kept before."""

    def take(self, reader: BundleReader, fingerprint: str) -> None:
        """Raises BundleError where it ends early; what came before is kept."""
        if reader.head.fingerprint != fingerprint:
            raise BundleError(
                f"the bundle is of other weights than these of {reader.head.model}, of another --speculate or "
                "--cache-bits, or of another version of mlx or mlx-lm"
            )
        for piece, data in reader.pieces():
            self._take(replace(piece, namespace=self._namespace_of(piece.namespace)), data)

    def _take(self, piece: BundlePiece, data: bytes) -> None:
        self.new_bytes += 0 if self._call(holds, piece) else len(data)
        if (written := self._call(adopt, piece, data, self._nodes)) is not None:
            written.result()
        if not self._call(holds, piece):
            raise NoRoom("no more of it fits, or the disk takes no more")
        if self.kept and self.kept[-1].begins(piece):
            self.kept.pop()
        self.kept.append(piece)
        self.num_tokens += 0 if piece.is_snapshot else len(piece.tokens) - piece.start
        self.num_bytes += len(data)
