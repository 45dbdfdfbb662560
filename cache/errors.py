"""Errors of the cache.

CacheError
├── BudgetExceeded     a sequence does not fit the budget even with everything else evicted
├── PinnedFull         a sequence does not fit as long as other state is pinned
├── PinLimit           a pin would leave too little of the budget for everything else
├── FolderError        the folder for state on disk cannot be used
│   ├── DiskInUse          another process keeps its state in it
│   ├── FolderUnsafe       it belongs to another user, or others can write into it
│   └── FolderUnusable     it cannot be made, entered or written to
└── DiskFault          stored state cannot be read back; it is gone, and evaluated again
"""

from pathlib import Path


class CacheError(Exception):
    """Base of all errors the cache raises for a caller's or the machine's fault."""


class BudgetExceeded(CacheError):
    """The state of one sequence is larger than the whole budget."""

    def __init__(self, needed_bytes: int, budget_bytes: int) -> None:
        super().__init__(
            f"the conversation needs about {needed_bytes / 1e6:.1f} MB of cache memory, "
            f"the budget is {budget_bytes / 1e6:.1f} MB"
        )
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes


class PinnedFull(CacheError):
    """What is pinned leaves too little memory for a sequence."""

    def __init__(self, missing_bytes: int) -> None:
        super().__init__(
            f"about {missing_bytes / 1e6:.1f} MB of cache memory are missing, and what is left of it is pinned; "
            f"unpin a session"
        )
        self.missing_bytes = missing_bytes


class PinLimit(CacheError):
    """Pins may take half of the budget at most."""

    def __init__(self, pinned_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"with this pin, {pinned_bytes / 1e6:.1f} MB would be pinned; "
            f"at most {limit_bytes / 1e6:.1f} MB may be, half of the cache memory"
        )
        self.pinned_bytes = pinned_bytes
        self.limit_bytes = limit_bytes


class FolderError(CacheError):
    """The folder of the disk tier cannot be used. The message is one sentence for a person."""


class FolderUnusable(FolderError):
    """The folder of the disk tier cannot be made, entered or written to."""

    def __init__(self, folder: Path, cause: Exception) -> None:
        words = getattr(cause, "strerror", None) or str(cause)
        super().__init__(f"the cache folder {folder} cannot be used: {words[:1].lower()}{words[1:]}")
        self.folder = folder


class DiskInUse(FolderError):
    """Another process holds the folder of the disk tier."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"the cache folder {folder} is in use by another process; give each its own")
        self.folder = folder


class FolderUnsafe(FolderError):
    """The folder of the disk tier is not this user's alone to change."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(f"the cache folder {folder} {reason}; it holds people's conversations, so it is not used")
        self.folder = folder


class DiskFault(CacheError):
    """State on disk cannot be read: its file is gone, foreign or damaged, or the disk fails."""
