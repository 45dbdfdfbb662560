"""The disk space of the tier's files: bytes by namespace, the time of each file's last use, and eviction.

When the budget is full, the least recently used files go first; the tree knows which files others depend on. Nothing
here reads or writes: deletions go through the write queue. Worker thread only.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable

from cache.disk.files import Receipt
from cache.disk.spans import FileState, StoredFile
from cache.disk.tree import DiskPlace, DiskTree
from cache.disk.write_queue import WriteQueue
from cache.journal import Journal

_LOW_WATERMARK = 0.95
"""Eviction goes on until the budget is full to this part, so that not every write has to evict.

Where files are small it stops earlier, after `tree.MAX_SPARE_FILES`.
"""


class DiskSpace:
    """Counts the files of a tier and keeps them within a budget."""

    def __init__(self, tree: DiskTree, queue: WriteQueue, budget_bytes: int, journal: Journal) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        """Bytes of all files, those that wait to be written included."""
        self.num_gone = 0
        """Files deleted since the tier was opened: evicted, damaged, cleared, or replaced by one that holds more."""
        self._tree = tree
        self._queue = queue
        self._journal = journal
        self._namespace_bytes: defaultdict[str, int] = defaultdict(int)
        self._now = 0
        """The last reading of the clock of use, which counts uses."""
        self._touched: set[StoredFile] = set()
        """Files whose last use the index does not know yet."""

    def bytes_of(self, namespace: str) -> int:
        """Returns the bytes of a namespace's files, those that wait to be written included."""
        return self._namespace_bytes.get(namespace, 0)

    # ------------------------------------------------------------------------------------------- files come and go

    def adopt(self, files: Collection[StoredFile]) -> None:
        """Counts the files that were in the folder when it was opened; evicts some if the budget is smaller now."""
        for file in files:
            self.add(file)
        self._now = max((file.last_used for file in files), default=0) + 1
        self.evict_for(0, self._now)

    def add(self, file: StoredFile) -> None:
        """Counts a file that was added to the tree."""
        self._count(file, file.num_bytes)

    def complete(self, file: StoredFile, receipt: Receipt) -> None:
        """Records that a file is written, unless it is gone meanwhile."""
        if file.state is FileState.PENDING:
            file.state, file.receipt = FileState.WRITTEN, receipt
            self._count(file, receipt.num_bytes - file.num_bytes)
            file.num_bytes = receipt.num_bytes

    def drop(self, files: Iterable[StoredFile]) -> None:
        """Deletes files, after those before them in the queue are written."""
        gone = [file for file in files if file.state is not FileState.GONE]
        for file in gone:
            file.state = FileState.GONE
            self._count(file, -file.num_bytes)
            self._touched.discard(file)
        self.num_gone += len(gone)
        if gone:
            self._tree.prune(gone)
            self._queue.delete(gone)

    def evict_for(self, num_bytes: int, newest: int) -> bool:
        """Deletes files so that `num_bytes` more fit; those last used at `newest` or later stay.

        Returns False, and deletes nothing, if that is not enough.
        """
        excess = self.used_bytes + num_bytes - self.budget_bytes
        if excess <= 0:
            return True
        spare = int(self.budget_bytes * (1 - _LOW_WATERMARK))
        victims = self._tree.victims(excess, spare, newest)
        if sum(file.num_bytes for file in victims) < excess:
            return False
        self._note_deleted(victims)
        self.drop(victims)
        return True

    def _note_deleted(self, victims: Collection[StoredFile]) -> None:
        num_files, num_bytes = Counter[str](), Counter[str]()
        for file in victims:
            num_files[file.namespace] += 1
            num_bytes[file.namespace] += file.num_bytes
        for namespace, count in num_files.items():
            self._journal.deleted(namespace, count, num_bytes[namespace])

    def _count(self, file: StoredFile, num_bytes: int) -> None:
        self.used_bytes += num_bytes
        self._namespace_bytes[file.namespace] += num_bytes
        if not self._namespace_bytes[file.namespace]:
            del self._namespace_bytes[file.namespace]

    # ---------------------------------------------------------------------------------------------------- recency

    def times_of_use(self, count: int) -> list[int]:
        """Returns `count` new readings of the clock of use, the latest first."""
        self._now += count
        return list(range(self._now, self._now - count, -1))

    def touch(self, place: DiskPlace, stop: int, used_at: int | None = None) -> int:
        """Records a use of the files that are needed to restore at `stop` on the way to a place; returns its time.

        The use counts at `used_at`, or now. A file that was used later keeps its later time.
        """
        used_at = used_at if used_at is not None else self.times_of_use(1)[0]
        for file in self._tree.on_path(place, stop):
            if file.last_used < used_at:
                file.last_used = used_at
                self._touched.add(file)
        return used_at

    def save_recency(self) -> None:
        """Has the index record the uses since the last call."""
        if self._touched:
            self._queue.save_recency(self._touched)
            self._touched = set()

    def check(self) -> None:
        """Asserts that the counts are right."""
        expected: defaultdict[str, int] = defaultdict(int)
        for file in self._tree.files():
            expected[file.namespace] += file.num_bytes
        assert expected == self._namespace_bytes, f"{expected} bytes on disk, {self._namespace_bytes} counted"
        assert sum(expected.values()) == self.used_bytes, f"{self.used_bytes} bytes counted"
