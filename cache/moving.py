"""Conversations that leave a prefix cache, and enter another one, a piece of state at a time.

State leaves from wherever it is: stored, live in a slot, or on disk. The cache stays in use meanwhile; what is
evicted between two pieces ends its conversation's part early. State enters the disk tier, or memory without one, as
this cache's own. What takes a cache is for its worker thread; `Intake` is for one that may wait.
"""

import io
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, TypeAlias

import numpy as np

from cache.budget import DiskFault
from cache.disk.bundle import BundleError, BundlePiece, BundleReader
from cache.disk.codec import BLOCK_TOKENS, LoadedState, StateImage, Unstorable, read_state
from cache.disk.connector import whole_window
from cache.disk.files import TensorFile, write_to
from cache.disk.tree import START, FilePart, Target, written_stop
from cache.layers.state import Segment
from cache.prefix_cache import PrefixCache
from cache.slots import Slot
from cache.snapshots import RestorePointKind, is_restorable
from cache.trie import Node, Snapshot, TokenNode, TokenTrie
from cache.types import TokenArray

PIECE_BYTES = 32 << 20
"""Rows of one piece, about: the worker copies them between two steps."""


@dataclass(frozen=True, eq=False)
class MovingText:
    """A text whose state may leave."""

    namespace: str
    session_id: str | None
    tokens: TokenArray


@dataclass(frozen=True, eq=False)
class LeavingPiece:
    """Rows of `[start, stop)`, or a snapshot at `stop`, which no change of the cache reaches."""

    of: MovingText
    start: int
    stop: int
    is_snapshot: bool
    image: StateImage

    def packed(self) -> tuple[BundlePiece, bytes]:
        """As a bundle has it. For any thread."""
        file, of = io.BytesIO(), self.of
        receipt = write_to(file, self.image.tensors(self.start, self.stop), self.image.metadata())
        piece = BundlePiece(
            of.namespace, of.session_id, of.tokens[: self.stop], self.start, self.is_snapshot, receipt
        )
        return piece, file.getvalue()


_Leaving: TypeAlias = Generator[None, None, LeavingPiece | None]
"""Yields while the disk is read; returns a piece, or None where its state is gone."""


def conversations(cache: PrefixCache, is_wanted: Callable[[str], bool]) -> Iterator[MovingText]:
    """Texts of the wanted namespaces: of state in memory, the last used first, then of state on disk."""
    leaves = [node for node in cache.memory.nodes() if not node.children and is_wanted(node.trie.namespace)]
    for leaf in sorted(leaves, key=lambda leaf: leaf.last_used, reverse=True):
        if leaf.parent is not None:
            yield MovingText(leaf.trie.namespace, leaf.session_id, _tokens_to(leaf))
    if (disk := cache.memory.disk) is not None:
        tree = disk.tier.tree
        ends = [node for name in filter(is_wanted, tree.namespaces()) for node in tree.find_trie(name).nodes()]
        used = {end: max((file.last_used for file in end.files), default=0) for end in ends if not end.children}
        for end in sorted(used, key=used.__getitem__, reverse=True):
            if end.parent is not None:
                yield MovingText(end.trie.namespace, None, _tokens_to(end))


def _tokens_to(node: TokenNode) -> TokenArray:
    return np.concatenate([step.tokens for step in node.path()])


def left_out_tokens(cache: PrefixCache, is_wanted: Callable[[str], bool]) -> int:
    """Tokens of requests with `store: false`, whose state does not leave."""
    nodes = (node for node in cache.memory.nodes() if node.is_volatile and is_wanted(node.trie.namespace))
    return sum(len(node.tokens) for node in nodes)


def left_out_of(cache: PrefixCache, text: MovingText) -> int:
    """As `left_out_tokens`, of one text."""
    match = cache.memory.find_trie(text.namespace).match(text.tokens)
    return sum(len(node.tokens) for node in match.node.path() if node.is_volatile)


class Departure:
    """Pieces of conversations, each once: what several begin with leaves with the first."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._gone = defaultdict[str, TokenTrie[TokenNode]](partial(TokenTrie, TokenNode))

    def pieces(self, wanted: Iterator[MovingText]) -> Generator[LeavingPiece | None, None, None]:
        """Yields None while the disk is read."""
        for text in wanted:
            gone, state = self._gone[text.namespace], _State(self._cache, text)
            done = gone.match(text.tokens).length
            for stop in [offset for offset in state.ends() if offset > done]:
                while done < stop and (rows := (yield from state.rows(done, stop))) is not None:
                    yield rows
                    done = rows.stop
                    gone.extend(gone.root, text.tokens[:done])
                if done < stop:
                    break
                if (snapshot := (yield from state.snapshot(stop))) is not None:
                    yield snapshot

    def num_left(self, wanted: Iterator[MovingText]) -> int:
        """How many of `wanted` have state that has not left."""
        lacking = 0
        for text in wanted:
            gone, stop = self._gone[text.namespace], max(_State(self._cache, text).ends(), default=0)
            lacking += stop > gone.match(text.tokens).length
            gone.extend(gone.root, text.tokens[:stop])
        return lacking


class _State:
    """The state of one conversation, wherever it is now."""

    def __init__(self, cache: PrefixCache, of: MovingText) -> None:
        self._cache, self._layout, self._of = cache, cache.layout, of
        self._tier = cache.memory.disk.tier if cache.memory.disk is not None else None

    def _edges(self) -> list[tuple[Node, int]]:
        """The edges in memory that may leave, and where the conversation's own tokens end on each."""
        match = self._cache.memory.find_trie(self._of.namespace).match(self._of.tokens)
        path = takewhile(lambda node: not node.is_volatile, match.node.path())
        return [(node, min(node.stop, match.length)) for node in path]

    def _rows_on_disk(self, start: int) -> list[FilePart]:
        tokens = self._of.tokens
        if self._tier is None:
            return []
        return self._tier.tree.covered(self._tier.tree.follow(self._of.namespace, START, tokens), start, len(tokens))

    def _snapshots_on_disk(self) -> dict[int, FilePart]:
        if self._tier is None:
            return {}
        place = self._tier.tree.follow(self._of.namespace, START, self._of.tokens)
        return {file.stop: file.whole for file in self._tier.tree.snapshots(place) if file.is_written}

    def ends(self) -> list[int]:
        """Where rows end, ascending: at each snapshot, or, where none are needed, with the state."""
        edges, ends = self._edges(), set(self._snapshots_on_disk())
        if self._layout.needs_snapshots:
            whole = (node for node, stop in edges if stop == node.stop)
            return sorted(ends.union(node.stop for node in whole if self._has_snapshot(node)))
        stop = edges[-1][1] if edges else 0
        return sorted(ends | {written_stop(self._rows_on_disk(stop), stop)})

    def rows(self, start: int, stop: int) -> _Leaving:
        """The rows from `start` on, up to `stop`, or as many as a piece may have."""
        for node, end in self._edges():
            if node.start <= start < end:
                span = node.span
                per_token = self._layout.bytes_per_token if span is None else span.num_bytes / len(node.tokens)
                stop = min(stop, end, start + _piece_tokens(per_token))
                rows = self._cache.pager.copy_live(node, start, stop) if span is None else _part(span, start, stop)
                return LeavingPiece(self._of, start, stop, False, StateImage(self._layout.rounded(rows)))
        part = next(iter(self._rows_on_disk(start)), None)
        if part is None or part.start > start or not part.file.is_written:
            return None
        per_token = part.num_bytes / (part.stop - start)
        part = FilePart(part.file, start, min(stop, part.stop, start + _piece_tokens(per_token)))
        stored, _ = yield from self._read(part)
        if stored is None:
            return None
        return LeavingPiece(self._of, start, part.stop, False, StateImage(stored.between(start, part.stop)))

    def snapshot(self, offset: int) -> _Leaving:
        """The snapshot at `offset`, if any."""
        ends = (node for node, stop in self._edges() if stop == node.stop == offset)
        node = next((node for node in ends if self._layout.needs_snapshots and self._has_snapshot(node)), None)
        if node is not None:
            taken = self._snapshot_of(node)
            window = whole_window(self._layout, node, taken)
            recurrent = taken.recurrent and self._layout.rounded_recurrent(taken.recurrent)
        elif (part := self._snapshots_on_disk().get(offset)) is not None:
            window, recurrent = yield from self._read(part)
        else:
            return None
        if window is None and recurrent is None:
            return None
        try:
            image = StateImage(window, recurrent)
        except Unstorable:
            return None
        return LeavingPiece(self._of, offset if window is None else window.start, offset, True, image)

    def _read(self, part: FilePart) -> Generator[None, None, LoadedState]:
        """Nothing where the file cannot be read."""
        assert self._tier is not None, "the part is on disk"
        ahead = self._tier.reader.prefetch([part])
        try:
            while not ahead.is_done:
                yield
            return self._tier.reader.load(part)
        except DiskFault:
            return None, None
        finally:
            ahead.cancel()

    def _idle_at(self, node: Node) -> Slot | None:
        """The slot of an idle sequence that ends with the node, with its state whole."""
        idle = (slot for slot in self._cache.slots if slot.tip is node and not slot.is_leased and not slot.is_cut)
        return next((slot for slot in idle if slot.offset == node.stop), None)

    def _has_snapshot(self, node: Node) -> bool:
        return is_restorable(self._layout, node) or self._idle_at(node) is not None

    def _snapshot_of(self, node: Node) -> Snapshot:
        """What restores the end of a node that `_has_snapshot`; of an idle sequence, taken now."""
        slot = None if is_restorable(self._layout, node) else self._idle_at(node)
        snapshot = node.snapshot if slot is None else self._cache.pager.snapshot(slot)
        assert snapshot is not None, "the node has a snapshot"
        return snapshot


def _part(rows: Segment, start: int, stop: int) -> Segment:
    """Views of the rows `[start, stop)`."""
    first, last = start - rows.start, stop - rows.start
    return Segment(start, stop, [pack.of_each(lambda array: array[:, :, first:last]) for pack in rows.packs])


def _piece_tokens(bytes_per_token: float) -> int:
    num_tokens = int(PIECE_BYTES / max(bytes_per_token, 1.0))
    return max(num_tokens // BLOCK_TOKENS, 1) * BLOCK_TOKENS


# ------------------------------------------------------------------------------------------------------- arrival


def adopt(
    cache: PrefixCache, piece: BundlePiece, data: bytes, before: Sequence[BundlePiece]
) -> "Future[None] | None":
    """Keeps a piece, if there is room beside those `before`; once the future is done, on disk. Raises BundleError."""
    try:
        file = TensorFile(io.BytesIO(data), piece.receipt)
        rows, recurrent = read_state(file, piece.start, piece.start, len(piece.tokens))
    except Exception as error:  # a right digest may cover anything
        raise BundleError(f"the bundle is damaged: {error}") from error
    if not cache.layout.fits(rows, recurrent, is_snapshot=piece.is_snapshot):
        raise BundleError("the bundle holds state of other layers than this model's")
    if cache.memory.disk is None:
        _keep(cache, piece, (rows, recurrent), before)
        return None
    tier, target = cache.memory.disk.tier, Target(piece.namespace, piece.tokens)
    if piece.is_snapshot:
        tier.write_snapshot(target, rows, recurrent)
    elif rows is not None:
        tier.write_span(target, rows)
    return tier.queue.barrier()


def _keep(cache: PrefixCache, piece: BundlePiece, state: LoadedState, before: Sequence[BundlePiece]) -> None:
    """Keeps a piece in memory, unless what it depends on is missing. Evicts other state, but none of `before`."""
    trie, rows, num_tokens = cache.pager.trie(piece.namespace), state[0], len(piece.tokens)
    match = trie.match(piece.tokens)
    if match.length < (num_tokens if piece.is_snapshot else piece.start) or holds(cache, piece):
        return
    num_bytes = sum(part.num_bytes for part in state if part is not None)
    # All that came before is looked up only where something must go.
    if (excess_bytes := cache.ledger.excess_bytes(num_bytes)) > 0:
        spared = [match, *(cache.memory.find_trie(one.namespace).match(one.tokens) for one in before)]
        nodes = [place.node for place in spared if place.length]
        if cache.reclaimer.free(excess_bytes, protected=nodes, or_nothing=True) > 0 or match.is_gone:
            return
    tip = trie.extend(trie.root, piece.tokens)
    for node in tip.path():
        node.is_volatile = False  # the state is of ordinary requests
    if piece.is_snapshot:
        tip.kind = RestorePointKind.TURN_END
        trie.snap(tip, Snapshot(num_tokens, *state))
    elif rows is not None:
        trie.store(tip, rows.tail(match.length))
    tip.session_id = tip.session_id or piece.session_id
    cache.memory.ended(tip)


def holds(cache: PrefixCache, piece: BundlePiece) -> bool:
    """Whether a piece is kept: on disk, or in memory without one."""
    stop = len(piece.tokens)
    if cache.memory.disk is None:
        match = cache.memory.find_trie(piece.namespace).match(piece.tokens)
        is_there = match.length == stop and (not piece.is_snapshot or match.node.stop == stop)
        return is_there and (not piece.is_snapshot or is_restorable(cache.layout, match.node))
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

    def __init__(self, call: Callable[..., Any], namespace_of: Callable[[str], str]) -> None:
        """`call(function, *given)` calls a function of this module with the cache; `namespace_of` says where to."""
        self._call, self._namespace_of = call, namespace_of
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
            self._take(piece.renamed(self._namespace_of(piece.namespace)), data)

    def _take(self, piece: BundlePiece, data: bytes) -> None:
        self.new_bytes += 0 if self._call(holds, piece) else len(data)
        if (written := self._call(adopt, piece, data, self.kept)) is not None:
            written.result()
        if not self._call(holds, piece):
            raise NoRoom("no more of it fits, or the disk takes no more")
        if self.kept and self.kept[-1].begins(piece):
            self.kept.pop()
        self.kept.append(piece)
        self.num_tokens += 0 if piece.is_snapshot else len(piece.tokens) - piece.start
        self.num_bytes += len(data)
