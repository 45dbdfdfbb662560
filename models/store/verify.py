"""Whether the files of a model are there, whole, and what the hub gave.

A file of Hugging Face's cache is a link to a blob that is named for its hash: SHA-256 of large files, Git's SHA-1 of
others. Files that lie elsewhere have no hash to be compared with; of those only the length of weights is known.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.errors import reason
from models.names import missing_files

_BLOCK_BYTES = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT_SHA1 = re.compile(r"[0-9a-f]{40}")
_WEIGHTS = ".safetensors"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""As the format has it."""


@dataclass(frozen=True)
class FileFault:
    """What is wrong with one file."""

    name: str
    fault: str
    """`missing`, `truncated: …`, `damaged: …` or why it cannot be read."""


@dataclass(frozen=True)
class Verification:
    """What was found out about a model's files."""

    num_files: int
    num_compared: int
    """Files whose hash was compared with the hub's."""
    faults: tuple[FileFault, ...]


def verify(folder: Path, tell: Callable[[str], object] = lambda name: None) -> Verification:
    """Reads all files of a model; `tell` is told the name of each before. Blocks for about a second a gigabyte."""
    files = sorted(path for path in folder.iterdir() if not path.is_dir())
    faults = [FileFault(name, "missing") for name in missing_files(folder)]
    num_compared = 0
    for file in files:
        if file.name in [fault.name for fault in faults]:
            continue
        tell(file.name)
        expected = _expected_hash(file)
        num_compared += expected is not None
        faults += [FileFault(file.name, fault) for fault in _fault(file, expected)]
    return Verification(len(files), num_compared, tuple(sorted(faults, key=lambda fault: fault.name)))


def _expected_hash(file: Path) -> str | None:
    """Returns the hash that the hub gave for a file of the cache; None for any other file."""
    name = file.readlink().name if file.is_symlink() else ""
    return name if _SHA256.fullmatch(name) or _GIT_SHA1.fullmatch(name) else None


def _fault(file: Path, expected: str | None) -> Iterator[str]:
    """Yields what is wrong with a file, if anything is."""
    if not file.exists():
        yield "missing"
        return
    try:
        shortened = _shortened(file) if file.suffix == _WEIGHTS else None
        if shortened is not None:
            yield shortened
        elif expected is not None and _hash(file, expected) != expected:
            yield "damaged: its hash is not the hub's"
    except OSError as error:
        yield f"not readable: {reason(error)}"


def _shortened(file: Path) -> str | None:
    """Returns what is wrong with the length of weights, by their header; None if nothing is."""
    size_bytes = file.stat().st_size
    with file.open("rb") as source:
        header_bytes = int.from_bytes(source.read(_LENGTH_BYTES), "little")
        if size_bytes < _LENGTH_BYTES or header_bytes > _MAX_HEADER_BYTES:
            return "damaged: it does not begin as weights do"
        if size_bytes < _LENGTH_BYTES + header_bytes:
            return f"truncated: it ends after {size_bytes} bytes, within its header"
        try:
            entries: Any = json.loads(source.read(header_bytes))
            stops = [one["data_offsets"][1] for name, one in entries.items() if name != "__metadata__"]
            whole_bytes = _LENGTH_BYTES + header_bytes + max(stops, default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            return "damaged: its header cannot be read"
    if size_bytes < whole_bytes:
        return f"truncated: {size_bytes} of {whole_bytes} bytes are there"
    return None


def _hash(file: Path, expected: str) -> str:
    """Returns the hash of a file, of the kind that `expected` is."""
    is_sha256 = len(expected) == hashlib.sha256().digest_size * 2
    # Git hashes a file behind its kind and size.
    digest = hashlib.sha256() if is_sha256 else hashlib.sha1(f"blob {file.stat().st_size}\0".encode())
    with file.open("rb") as source:
        while block := source.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
