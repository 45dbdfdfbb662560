"""What a download tells while it goes on. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class PlannedFile:
    """One file of a model."""

    name: str
    num_bytes: int
    digest: str
    """Its SHA-256 in hexadecimal; empty for a small file."""


@dataclass(frozen=True)
class PullPlanned:
    """What is to be fetched is known, and that there is space for it."""

    repository: str
    files: tuple[PlannedFile, ...]


@dataclass(frozen=True)
class PullProgress:
    """How far it is."""

    file: PlannedFile | None
    """The one that is being fetched; None for the small ones together, and at the beginning and the end."""
    file_bytes: int
    """What of it is here."""
    done_bytes: int
    """What of all files is here, those that were before included."""
    total_bytes: int


@dataclass(frozen=True)
class PullChecking:
    """A file is all here, and its contents are compared with its digest."""

    file: PlannedFile


PullEvent: TypeAlias = PullPlanned | PullProgress | PullChecking
TellPull: TypeAlias = Callable[[PullEvent], None]
"""Called on the thread that downloads; what it raises ends the download, and what was fetched is kept."""
