"""Errors of the cache.

CacheError
├── BudgetExceeded     a sequence does not fit the budget even with everything else evicted
├── DiskInUse          another process keeps its state in the folder
└── DiskFault          stored state cannot be read back; it is gone, and evaluated again
"""

from pathlib import Path


class CacheError(Exception):
    """Base of all errors the cache raises for a caller's or the machine's fault."""


class BudgetExceeded(CacheError):
    """The state of one sequence is larger than the whole budget."""

    def __init__(self, needed_bytes: int, budget_bytes: int) -> None:
        super().__init__(
            f"the conversation needs about {needed_bytes / 1e6:.0f} MB of cache memory, "
            f"the budget is {budget_bytes / 1e6:.0f} MB"
        )
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes


class DiskInUse(CacheError):
    """Another process holds the folder of the disk tier."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"the cache folder {folder} is in use by another process; give each its own")
        self.folder = folder


class DiskFault(CacheError):
    """State on disk cannot be read: its file is gone, foreign or damaged, or the disk fails."""
