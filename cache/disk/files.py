"""Files of the disk tier: safetensors with checksums, written once, read in parts.

A row is one token's state: any range of rows is one read. Every `block_rows` rows have a checksum in the last tensor,
`checksums`. A `Receipt`'s digest covers header and checksums: it proves that a file is unchanged. Nothing here knows
what the tensors mean.
"""

import fcntl
import hashlib
import itertools
import json
import os
import sqlite3
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cache.budget import DiskFault

NumpyArray: TypeAlias = NDArray[Any]

CHECKSUM_BYTES = 16
_CHECKSUMS = "checksums"

_TYPES = "BOOL:? U8:<u1 I8:<i1 U16:<u2 I16:<i2 U32:<u4 I32:<i4 U64:<u8 I64:<i8 F16:<f2 F32:<f4 F64:<f8 C64:<c8"
NUMPY_TYPES: Mapping[str, str] = dict(pair.split(":") for pair in _TYPES.split()) | {"BF16": "<u2"}
"""Types that hold the bits; numpy has no bfloat16."""


def as_owner(path: str, flags: int) -> int:
    """For `open`: only the owner reads a new file; follows no link, waits for no pipe."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


class FileSystem:
    """What the tier asks of the system. Any call may raise OSError. Any thread."""

    num_writes = 0
    """Blocks that this process has written: a sign of progress."""

    def make_folder(self, path: Path) -> None:
        """Creates a missing folder that only its owner can enter."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def owner_and_mode(self, path: Path) -> tuple[int, int]:
        """A folder's owner ID and permissions."""
        status = path.stat()
        return status.st_uid, stat.S_IMODE(status.st_mode)

    def lock(self, path: Path) -> BinaryIO:
        """Opens and locks a file until it is closed; raises BlockingIOError if another process has it."""
        file = open(path, "ab", opener=as_owner)  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise
        return file

    def create(self, path: Path) -> BinaryIO:
        """Opens a new file; replaces an old one."""
        return open(path, "wb", opener=as_owner)

    def open(self, path: Path) -> BinaryIO:
        """Opens for reading."""
        return open(path, "rb", opener=as_owner)

    def sync(self, file: BinaryIO) -> None:
        """Waits until what was written is on disk."""
        file.flush()
        os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """Waits until a folder's names are on disk."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Gives a file its final name."""
        source.rename(target)

    def remove(self, path: Path) -> None:
        """Deletes a file, if any."""
        path.unlink(missing_ok=True)

    def sizes(self, folder: Path) -> dict[str, int]:
        """Sizes of a folder's regular files; -1 for anything else."""
        sizes = {}
        with os.scandir(folder) as entries:
            for entry in entries:
                is_file = entry.is_file(follow_symlinks=False)
                sizes[entry.name] = entry.stat(follow_symlinks=False).st_size if is_file else -1
        return sizes

    def connect(self, path: Path) -> sqlite3.Connection:
        """Opens a SQLite database for one thread at a time; syncs commits, overwrites deletions."""
        database = sqlite3.connect(path, check_same_thread=False)
        database.execute("PRAGMA journal_mode = WAL").fetchone()
        database.execute("PRAGMA synchronous = FULL")
        database.execute("PRAGMA secure_delete = ON")
        return database


def read_exactly(file: BinaryIO, num_bytes: int, offset: int) -> bytes:
    """Raises DiskFault if fewer than `num_bytes` follow `offset`."""
    file.seek(offset)
    data = file.read(num_bytes)
    if len(data) < num_bytes:
        raise DiskFault(f"the file ends {num_bytes - len(data)} bytes early")
    return data


def _checksum(*parts: bytes | bytearray | memoryview) -> bytes:
    digest = hashlib.sha256()  # processors have instructions for it
    for part in parts:
        digest.update(part)
    return digest.digest()[:CHECKSUM_BYTES]


# ----------------------------------------------------------------------------------------------------- tensors


@dataclass(frozen=True)
class Tensor:
    """Bits to write in `rows`, with any strides, in blocks of `block_rows`."""

    name: str
    dtype: str
    """A key of NUMPY_TYPES."""
    rows: NumpyArray
    block_rows: int


@dataclass(frozen=True)
class Receipt:
    """Size and digest that verify a file."""

    num_bytes: int
    header_bytes: int
    checksums_bytes: int
    digest: bytes
    """The digest of header and checksums."""


def write_tensors(files: FileSystem, path: Path, tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> Receipt:
    """Writes a safetensors file, synced. Raises OSError."""
    with files.create(path) as file:
        receipt = write_to(file, tensors, metadata)
        files.sync(file)
    return receipt


def write_to(file: BinaryIO, tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> Receipt:
    """Writes what `TensorFile` reads. Raises OSError."""
    header = _header(tensors, metadata)
    checksums, num_bytes = bytearray(), len(header)
    file.write(header)
    for tensor in tensors:
        for start in range(0, len(tensor.rows), tensor.block_rows):
            block = np.ascontiguousarray(tensor.rows[start : start + tensor.block_rows])
            file.write(block.data)
            FileSystem.num_writes += 1
            checksums += _checksum(block.data)
            num_bytes += block.nbytes
    file.write(checksums)
    return Receipt(num_bytes + len(checksums), len(header), len(checksums), _checksum(header, checksums))


def _header(tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> bytes:
    """The length of a JSON text, and the text, padded to eight bytes."""
    block_rows = json.dumps({tensor.name: tensor.block_rows for tensor in tensors})
    num_blocks = sum(_num_blocks(len(tensor.rows), tensor.block_rows) for tensor in tensors)
    entries = [(tensor.name, tensor.dtype, tensor.rows.shape, tensor.rows.nbytes) for tensor in tensors]
    entries.append((_CHECKSUMS, "U8", (num_blocks, CHECKSUM_BYTES), num_blocks * CHECKSUM_BYTES))
    fields, offset = dict[str, Any](__metadata__={**metadata, "block_rows": block_rows}), 0
    for name, dtype, shape, num_bytes in entries:
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _num_blocks(num_rows: int, block_rows: int) -> int:
    return -(-num_rows // block_rows)


class TensorFile:
    """A file open for reading, its header and checksums verified."""

    def __init__(self, file: BinaryIO, receipt: Receipt) -> None:
        """Raises DiskFault if `receipt` does not match, and OSError."""
        self._file = file
        self._data_start = receipt.header_bytes
        num_bytes = file.seek(0, os.SEEK_END)
        if num_bytes != receipt.num_bytes:
            raise DiskFault(f"the file has {num_bytes} bytes, {receipt.num_bytes} were written")
        checksums_start = num_bytes - receipt.checksums_bytes
        if not 8 < receipt.header_bytes <= checksums_start <= num_bytes:
            raise DiskFault("the index and the file disagree")
        header = read_exactly(file, receipt.header_bytes, 0)
        self._checksums = read_exactly(file, receipt.checksums_bytes, checksums_start)
        if _checksum(header, self._checksums) != receipt.digest:
            raise DiskFault("the header is damaged")
        self._tensors: dict[str, Any] = json.loads(header[8:])
        del self._tensors[_CHECKSUMS]
        self.metadata: dict[str, str] = self._tensors.pop("__metadata__")
        self.block_rows: dict[str, int] = json.loads(self.metadata["block_rows"])
        """Rows of a block by the tensor's name."""
        nums = [_num_blocks(fields["shape"][0], self.block_rows[name]) for name, fields in self._tensors.items()]
        self._first_block = dict(zip(self._tensors, itertools.accumulate(nums, initial=0), strict=False))

    def dtype(self, name: str) -> str:
        """Safetensors name of a tensor's type."""
        return str(self._tensors[name]["dtype"])

    def read(self, name: str, start: int = 0, stop: int | None = None) -> NumpyArray:
        """Rows `[start, stop)`, verified; by default all. Raises DiskFault."""
        shape, block_rows = self._tensors[name]["shape"], self.block_rows[name]
        stop = shape[0] if stop is None else stop
        if not 0 <= start <= stop <= shape[0]:
            raise DiskFault(f"rows [{start}, {stop}) are asked of a file of {shape[0]}")
        block = start // block_rows
        first, last = block * block_rows, min(_num_blocks(stop, block_rows) * block_rows, shape[0])
        carrier = np.dtype(NUMPY_TYPES[self.dtype(name)])
        row_bytes = carrier.itemsize * prod(shape[1:])
        offset = self._data_start + self._tensors[name]["data_offsets"][0] + first * row_bytes
        data = read_exactly(self._file, (last - first) * row_bytes, offset)
        self._verify(self._first_block[name] + block, memoryview(data), block_rows * row_bytes)
        rows = np.frombuffer(data, carrier).reshape(last - first, *shape[1:])
        return rows[start - first : stop - first]

    def _verify(self, block: int, data: memoryview, block_bytes: int) -> None:
        for number, start in enumerate(range(0, len(data), max(1, block_bytes)), block):
            expected = self._checksums[number * CHECKSUM_BYTES : (number + 1) * CHECKSUM_BYTES]
            if _checksum(data[start : start + block_bytes]) != expected:
                raise DiskFault("the data are damaged")
