"""The tokens with state on disk: one prefix trie per namespace, with files on its nodes. Worker thread only.

A file is written once and never changed. An edge's rows are in one file, or missing: edges end where files do. No two
files cover the same tokens of the same prefix. A snapshot is on the node that ends at its offset. A file depends on
the one with the tokens right before, which counts as used no earlier. Reads and writes nothing, knows no budget.
"""

import hashlib
import heapq
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from cache.disk.files import Receipt
from cache.trie import Place, TokenNode, TokenTrie
from cache.types import TokenArray


@dataclass(eq=False)
class StoredFile:
    """Rows of the tokens `[start, stop)`. A snapshot: window rows before `stop`, recurrent state there, or both."""

    namespace: str
    start: int
    stop: int
    num_bytes: int
    """Bytes on disk; an estimate until written."""
    is_snapshot: bool = False
    has_recurrent: bool = False
    name: str = ""
    """Empty until being written."""
    receipt: Receipt | None = None
    """Once the file is complete, synced and indexed."""
    last_used: int = 0
    is_gone: bool = False
    """Deleted, or never to be written."""

    @property
    def is_written(self) -> bool:
        return self.receipt is not None and not self.is_gone

    @property
    def parent_offset(self) -> int:
        """Where the tokens end on whose state this one depends."""
        return self.stop if self.is_snapshot else self.start

    @property
    def whole(self) -> "FilePart":
        return FilePart(self, self.start, self.stop)


@dataclass(frozen=True)
class FilePart:
    """Rows `[start, stop)` of a file, in offsets of the sequence, and all its recurrent state."""

    file: StoredFile
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        if self.file.is_snapshot:
            return self.file.num_bytes
        return self.file.num_bytes * (self.stop - self.start) // (self.file.stop - self.file.start)


def written_stop(parts: Iterable[FilePart], start: int) -> int:
    """The end of rows on disk without a gap from `start` on; `parts` ascend."""
    for part in parts:
        if part.start > start or not part.file.is_written:
            break
        start = part.stop
    return start


def gaps(parts: Iterable[FilePart], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yields the ranges of `[start, stop)` between ascending `parts`."""
    for part in parts:
        if start < part.start:
            yield start, part.start
        start = part.stop
    if start < stop:
        yield start, stop


@dataclass(frozen=True)
class FileRow:
    """A written file, and its tokens."""

    file: StoredFile
    parent_key: bytes
    """Key of the prefix before `start`; for a snapshot, `key`."""
    key: bytes
    """Key of the prefix before `stop`."""
    tokens: TokenArray
    """Empty for a snapshot."""


MIN_GARBAGE = 1024
"""Files that are gone and may stay in the heap."""


class LruOrder:
    """Files in a heap, least recently used first; of files used together what depends on others comes first.

    `pop` notices outdated entries, of files used again or gone: a use only moves a file back.
    """

    def __init__(self) -> None:
        self._count = itertools.count()
        self._heap: list[tuple[int, int, int, StoredFile]] = []

    def push(self, file: StoredFile) -> None:
        """Adds a file not in the order."""
        heapq.heappush(self._heap, (file.last_used, -file.parent_offset, next(self._count), file))

    def pop(self) -> StoredFile | None:
        """Removes and returns the first file, if any."""
        while self._heap:
            last_used, _, _, file = heapq.heappop(self._heap)
            if file.is_gone:
                continue
            if file.last_used == last_used:
                return file
            self.push(file)
        return None

    def compact(self, num_files: int) -> None:
        """Removes files that are gone if they outnumber the `num_files` others."""
        if len(self._heap) > 2 * num_files + MIN_GARBAGE:
            self._heap = [entry for entry in self._heap if not entry[-1].is_gone]
            heapq.heapify(self._heap)

    def files(self) -> set[StoredFile]:
        """The files not gone."""
        return {entry[-1] for entry in self._heap if not entry[-1].is_gone}


MAX_VISITED = 4096
"""Edges visited for one listing, during which the worker waits."""
MAX_READ_EDGES = 16_384
"""Edges that are looked at for a namespace's texts, during which the worker waits."""
MAX_SPARE_FILES = 16
"""Files evicted at once beyond need, since the worker waits."""


def extended(hasher: "hashlib.blake2b", tokens: TokenArray) -> "hashlib.blake2b":
    """The hasher of a namespace's prefix extended by `tokens`; its digest is the prefix's key."""
    hasher = hasher.copy()
    hasher.update(np.ascontiguousarray(tokens, np.int32).data)
    return hasher


@dataclass(slots=True, eq=False, repr=False)
class DiskNode(TokenNode):
    """One edge, and the files with its state."""

    trie: "DiskTrie" = field(init=False)
    rows: StoredFile | None = None
    snapshot: StoredFile | None = None

    @property
    def files(self) -> list[StoredFile]:
        return [file for file in (self.rows, self.snapshot) if file is not None]

    @property
    def last_used(self) -> int:
        return max((file.last_used for file in self.files), default=0)

    @property
    def num_bytes(self) -> int:
        rows = FilePart(self.rows, self.start, self.stop).num_bytes if self.rows is not None else 0
        return rows + (self.snapshot.num_bytes if self.snapshot is not None else 0)

    def divide_state(self, upper: "DiskNode", offset: int) -> None:
        """The snapshot stays at the edge's end."""
        upper.rows = self.rows

    def drop_state(self) -> None:
        """Releases the files."""
        self.rows = self.snapshot = None

    def check(self) -> None:
        """Asserts that rows and snapshot belong to this edge."""
        rows = self.rows
        assert rows is None or rows.start <= self.start < self.stop <= rows.stop, f"{self} holds foreign rows"
        assert self.snapshot is None or self.snapshot.stop == self.stop, f"{self} holds a foreign snapshot"
        assert not any(file.is_gone for file in self.files), f"{self} holds a file that is gone"


START = Place(DiskNode(None, np.empty(0, np.int32), 0), 0)
"""Before the first token, in any namespace."""


class DiskTrie(TokenTrie[DiskNode]):
    """One namespace's edges."""

    num_bytes = 0
    """Bytes of its files, unwritten ones too."""


DiskPlace: TypeAlias = Place[DiskNode]


@dataclass(frozen=True, eq=False)
class Target:
    """Tokens from a sequence's start on, after which state is written."""

    namespace: str
    tokens: TokenArray
    near: DiskPlace = START
    """A place on the way, which saves comparing."""
    used_at: int | None = None
    """One of the tier's `ticks`; None for now."""


class DiskTree:
    """Files by the tokens whose state they hold."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Bytes of all files, unwritten ones too."""
        self._empty = DiskTrie(DiskNode)
        self._tries: dict[str, DiskTrie] = {}
        self._ends: dict[StoredFile, DiskPlace] = {}
        self._order = LruOrder()

    # ---------------------------------------------------------------------------------------------- questions

    def find_trie(self, namespace: str) -> DiskTrie:
        """A namespace's edges. A look-up makes no namespace: a client may name a new one with each request."""
        return self._tries.get(namespace, self._empty)

    def follow(self, namespace: str, place: DiskPlace, tokens: TokenArray) -> DiskPlace:
        """Where the match of `tokens` ends; they follow `place`, `START` or one not gone."""
        trie = self.find_trie(namespace)
        return trie.follow(place if place.length else Place(trie.root, 0), tokens)

    def covered(self, place: DiskPlace, start: int, stop: int) -> list[FilePart]:
        """Rows of `[start, stop)` in files on the way, ascending; may have gaps."""
        parts = list[FilePart]()
        for node in reversed(list(place.edges(start, stop))):
            if node.rows is not None:
                first, last = max(start, node.start), min(stop, node.stop, place.length)
                if parts and parts[-1].file is node.rows and parts[-1].stop == first:
                    first = parts.pop().start
                parts.append(FilePart(node.rows, first, last))
        return parts

    def snapshots(self, place: DiskPlace) -> Iterator[StoredFile]:
        """Snapshots on the way to a place, deepest first."""
        for node in place.edges(0, place.length):
            if node.snapshot is not None and node.stop <= place.length:
                yield node.snapshot

    def snapshot(self, place: DiskPlace, offset: int) -> StoredFile | None:
        """The snapshot at `offset`, if any."""
        ends = (node for node in place.edges(offset - 1, offset) if node.stop == offset <= place.length)
        return next((node.snapshot for node in ends), None)

    def goes_on(self, place: DiskPlace, num_tokens: int) -> bool:
        """Whether files hold tokens after `num_tokens`, all covered."""
        last = next(place.edges(num_tokens - 1, num_tokens), None)
        return last is not None and place.length == num_tokens and (last.stop > num_tokens or bool(last.children))

    def on_path(self, place: DiskPlace, stop: int) -> list[StoredFile]:
        """Files on the way that restoring at `stop` needs."""
        files = [node.rows for node in place.edges(0, stop) if node.rows is not None]
        snapshot = self.snapshot(place, stop)
        return [*files, snapshot] if snapshot is not None else files

    def listing(self, namespace: str, max_edges: int) -> tuple[list[DiskNode], bool]:
        """Up to `max_edges` written edges of a namespace, depth first; whether there may be more."""
        trie, nodes, num_visited = self.find_trie(namespace), list[DiskNode](), 0
        waiting = [iter(trie.root.children.values())]
        while waiting and len(nodes) <= max_edges and num_visited < MAX_VISITED:
            node = next(waiting[-1], None)
            if node is None:
                waiting.pop()
                continue
            num_visited += 1
            if node.rows is not None and node.rows.is_written:
                nodes.append(node)
                waiting.append(iter(node.children.values()))
        return nodes[:max_edges], len(nodes) > max_edges or trie.num_nodes > MAX_VISITED

    def nodes(self) -> Iterator[DiskNode]:
        """Every edge, parents first."""
        return (node for trie in self._tries.values() for node in trie.nodes())

    def namespaces(self) -> list[str]:
        """The namespaces with files."""
        return list(self._tries)

    def texts(self, namespace: str, max_tokens: int) -> list[TokenArray]:
        """Texts of the conversations used last, the latest at the end; a shared beginning is in one only."""
        nodes = itertools.islice(self.find_trie(namespace).nodes(), MAX_READ_EDGES)
        leaves = [node for node in nodes if not node.children]
        leaves.sort(key=lambda leaf: leaf.last_used, reverse=True)
        texts, seen = list[TokenArray](), set[DiskNode]()
        for leaf in leaves:
            new = [node for node in leaf.path() if node not in seen]
            seen.update(new)
            texts.append(np.concatenate([node.tokens for node in new])[-max_tokens:])
            max_tokens -= len(texts[-1])
            if max_tokens <= 0:
                break
        return texts[::-1]

    def files(self, namespace: str | None = None) -> list[StoredFile]:
        """All files, or one namespace's."""
        if namespace is None:
            return list(self._ends)
        return list(dict.fromkeys(file for node in self.find_trie(namespace).nodes() for file in node.files))

    def check(self) -> None:
        """Asserts the module's invariants."""
        for trie in self._tries.values():
            trie.check()
            held_bytes = sum(file.num_bytes for file in self.files(trie.namespace))
            assert held_bytes == trie.num_bytes, f"{held_bytes} bytes on disk, {trie.num_bytes} counted"
        assert self.num_bytes == sum(trie.num_bytes for trie in self._tries.values())
        files = {file for node in self.nodes() for file in node.files}
        assert files == set(self._ends) == self._order.files(), "a file is missing from tree, ends or LRU order"
        for file in files:
            assert any(file in node.files for node in self._nodes_of(file)), f"{file} is not on its nodes"

    # ------------------------------------------------------------------------------------------------ changes

    def add(self, tokens: TokenArray, file: StoredFile, near: DiskPlace) -> None:
        """Adds a file, of rows that no other holds or of a snapshot, that stops at `len(tokens)`.

        `tokens` begin at the sequence's start; `near` is a place on the way.
        """
        trie, offset = self._trie(file.namespace), file.parent_offset
        length = min(near.length, offset)
        node = next((node for node in near.edges(0, length) if node.stop <= length), trie.root)
        self._add(trie.extend(node, tokens[node.stop : offset]), tokens[offset:], file)

    def resize(self, file: StoredFile, difference_bytes: int) -> None:
        """Counts bytes by which a file grows."""
        file.num_bytes += difference_bytes
        self._count(file, difference_bytes)

    def _count(self, file: StoredFile, num_bytes: int) -> None:
        self._tries[file.namespace].num_bytes += num_bytes
        self.num_bytes += num_bytes

    def _trie(self, namespace: str) -> DiskTrie:
        return self._tries.setdefault(namespace, DiskTrie(DiskNode, namespace))

    def _add(self, node: DiskNode, tokens: TokenArray, file: StoredFile) -> None:
        last = node.trie.extend(node, tokens)
        self._ends[file] = end = Place(last, file.stop)
        if file.is_snapshot:
            last.snapshot = file
        else:
            new = list(end.edges(file.start, file.stop))
            for step in new:
                step.rows = step.rows or file
            below = [child for step in new for child in step.children.values()]
            file.last_used = max(other.last_used for step in (*new, *below) for other in step.files)
        # Before a file that is used as late are only such files.
        before = (step.rows for step in end.edges(0, file.parent_offset) if step.rows is not None)
        for older in list(itertools.takewhile(lambda other: other.last_used < file.last_used, before)):
            older.last_used = file.last_used
        self._count(file, file.num_bytes)
        self._order.push(file)

    def prune(self, gone: Iterable[StoredFile]) -> None:
        """Removes `gone` files, then edges without files on or below them."""
        nodes: dict[DiskNode, None] = {}
        for file in gone:
            nodes.update(dict.fromkeys(self._nodes_of(file)))
            self._count(file, -file.num_bytes)
            del self._ends[file]
        for node in nodes:
            node.rows = None if node.rows is None or node.rows.is_gone else node.rows
            node.snapshot = None if node.snapshot is None or node.snapshot.is_gone else node.snapshot
        for node in nodes:
            _remove_empty(node)
            if not node.trie.num_nodes:
                self._tries.pop(node.trie.namespace, None)
        self._order.compact(len(self._ends))

    # ----------------------------------------------------------------------------------------------- eviction

    def victims(self, excess_bytes: int, spare_bytes: int, newest: int) -> list[StoredFile]:
        """Files to evict, least recently used first, so what depends on others before them.

        The files free `excess_bytes`, and `spare_bytes` more if few files do. None was used at `newest` or later.
        """
        popped, chosen = list[StoredFile](), list[StoredFile]()
        while not _is_enough(excess_bytes, spare_bytes, len(chosen)) and (file := self._order.pop()) is not None:
            popped.append(file)
            if file.last_used >= newest:
                break
            chosen.append(file)
            excess_bytes -= file.num_bytes
        for file in popped:
            self._order.push(file)
        return chosen

    def _nodes_of(self, file: StoredFile) -> Iterator[DiskNode]:
        start = file.stop - 1 if file.is_snapshot else file.start
        return self._ends[file].edges(start, file.stop)

    # ------------------------------------------------------------------------------------------------ opening

    def attach(self, rows: Sequence[FileRow], hasher_of: Callable[[str], "hashlib.blake2b"]) -> None:
        """Adds an index's files from the root down; leaves out a row with a wrong key, and all that depend on it."""
        wanted = {row.parent_key for row in rows}
        cuts = sorted({row.file.parent_offset for row in rows})
        ends: dict[bytes, tuple[DiskNode, hashlib.blake2b]] = {}
        for trie in map(self._trie, {row.file.namespace for row in rows}):
            hasher = hasher_of(trie.namespace)
            ends[hasher.digest()] = trie.root, hasher
        for row in sorted(rows, key=lambda row: row.file.parent_offset):
            if row.parent_key not in ends:
                continue
            node, hasher = ends[row.parent_key]
            prefixes = _prefixes(row, hasher, cuts)
            follows = row.file.namespace == node.trie.namespace and row.file.parent_offset == node.stop
            if follows and prefixes[-1][1].digest() == row.key:
                self._add(node, row.tokens, row.file)
                for length, hasher in prefixes:
                    if (key := hasher.digest()) in wanted:
                        ends.setdefault(key, (node.trie.extend(node, row.tokens[:length]), hasher))


def _prefixes(row: FileRow, hasher: "hashlib.blake2b", cuts: Sequence[int]) -> "list[tuple[int, hashlib.blake2b]]":
    """The lengths of a row's tokens up to each cut and its end, with the hasher there."""
    start, stop = row.file.parent_offset, row.file.stop
    prefixes, done = list[tuple[int, "hashlib.blake2b"]](), 0
    for cut in [*cuts[bisect_right(cuts, start) : bisect_left(cuts, stop)], stop]:
        hasher = extended(hasher, row.tokens[done : cut - start])
        done = cut - start
        prefixes.append((done, hasher))
    return prefixes


def _is_enough(excess_bytes: int, spare_bytes: int, num_chosen: int) -> bool:
    """Spare bytes do not count once `MAX_SPARE_FILES` are chosen."""
    return excess_bytes <= 0 and (excess_bytes <= -spare_bytes or num_chosen >= MAX_SPARE_FILES)


def _remove_empty(node: DiskNode) -> None:
    while node.parent is not None and not node.children and not node.files:
        above = node.parent
        node.trie.remove(node)
        node = above
