"""A bundle: conversations with their state, in one tar file. Pure.

The first member says of which model the state is. Of each piece of state two members follow: what it is, with the
size and digest of the second, and the tensors. So everything is known, and refused, before it is read, and damage
costs what lies after it. Members have one fixed name each, and nothing is unpacked. Digests find what transport
changed; they do not make a sender right.
"""

import contextlib
import json
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from cache.budget import CacheError
from cache.disk.files import Receipt
from cache.types import TokenArray, common_prefix_length

BUNDLE_FORMAT = 1
HEAD = "bundle.json"
END = bytes(2 * tarfile.BLOCKSIZE)
MAX_TEXT_BYTES = 16 << 20
MAX_PIECE_BYTES = 1 << 30
"""A piece is held in memory while it moves."""


class BundleError(CacheError):
    """A bundle cannot be used, or not further; the message is one sentence for a person."""


class BundleTooLarge(BundleError):
    """A bundle has more bytes than may be taken in."""


@dataclass(frozen=True)
class BundleHead:
    """What a bundle says of all its state."""

    model: str
    fingerprint: str
    """Of weights, tokenizer, types and library versions."""
    left_out_tokens: int = 0
    """Tokens of requests with `store: false`, whose state stays where it is."""
    format: int = BUNDLE_FORMAT


@dataclass(frozen=True, eq=False)
class BundlePiece:
    """Rows of the tokens from `start` on; or a snapshot right after `tokens`, its window rows from `start` on."""

    namespace: str
    session_id: str | None
    tokens: TokenArray
    """From the sequence's start to where the state ends."""
    start: int
    is_snapshot: bool
    receipt: Receipt

    def __post_init__(self) -> None:
        """Raises ValueError for offsets that contradict each other."""
        if not 0 <= self.start <= len(self.tokens) - (not self.is_snapshot):
            raise ValueError(f"state of the tokens [{self.start}, {len(self.tokens)})")

    def renamed(self, namespace: str) -> "BundlePiece":
        """The piece in another namespace."""
        return replace(self, namespace=namespace)

    def begins(self, other: "BundlePiece") -> bool:
        """Whether another piece goes on with the conversation."""
        length = common_prefix_length(self.tokens, other.tokens)
        return self.namespace == other.namespace and length == len(self.tokens)


class BundleWriter:
    """Makes a bundle's bytes, in order."""

    def __init__(self) -> None:
        self._tokens: TokenArray = np.empty(0, np.int32)
        self.num_pieces = 0

    def head(self, head: BundleHead) -> bytes:
        """The first bytes."""
        return b"".join(_member(HEAD, _text(asdict(head))))

    def piece(self, piece: BundlePiece, data: bytes) -> list[bytes]:
        """The bytes of a piece, which has only those tokens that the one before lacks."""
        kept = common_prefix_length(piece.tokens, self._tokens)
        fields = {
            **{name: getattr(piece, name) for name in ("namespace", "session_id", "start", "is_snapshot")},
            "kept": kept,
            "tokens": piece.tokens[kept:].tolist(),
            "receipt": {**asdict(piece.receipt), "digest": piece.receipt.digest.hex()},
        }
        text_name, data_name = _names(self.num_pieces)
        self.num_pieces += 1
        self._tokens = piece.tokens
        return [*_member(text_name, _text(fields)), *_member(data_name, data)]


def _names(number: int) -> tuple[str, str]:
    return f"{number:06}.json", f"{number:06}.safetensors"


def _text(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def _member(name: str, data: bytes) -> list[bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o600
    return [info.tobuf(tarfile.USTAR_FORMAT), data, bytes(-len(data) % tarfile.BLOCKSIZE)]


class BundleReader:
    """Reads a bundle from its start. Every method raises BundleError, and what `blocks` raise."""

    def __init__(self, blocks: Iterator[bytes], max_bytes: int) -> None:
        """`blocks` are the bundle, cut anywhere; `max_bytes` bounds the whole."""
        self._blocks, self._max_bytes, self._left, self._unread = blocks, max_bytes, max_bytes, bytearray()
        self._fault = "this is no bundle"
        with self._checking():
            self.head = BundleHead(**json.loads(self._member(HEAD, MAX_TEXT_BYTES) or b""))
            if not isinstance(self.head.fingerprint, str) or not isinstance(self.head.model, str):
                raise TypeError("a name is no text")
        if self.head.format != BUNDLE_FORMAT:
            raise BundleError(f"the bundle has the format {self.head.format}, this version reads {BUNDLE_FORMAT}")
        self._fault = "the bundle is damaged"

    def pieces(self) -> Iterator[tuple[BundlePiece, bytes]]:
        """Yields each piece with its bytes, whose digest the caller checks."""
        tokens: TokenArray = np.empty(0, np.int32)
        number = 0
        while (text := self._member(_names(number)[0], MAX_TEXT_BYTES)) is not None:
            with self._checking():
                piece = _piece(json.loads(text), tokens)
            tokens = piece.tokens
            data = self._member(_names(number)[1], MAX_PIECE_BYTES, piece.receipt.num_bytes)
            if data is None:
                raise BundleError(f"{self._fault}: a piece is missing")
            yield piece, data
            number += 1

    @contextlib.contextmanager
    def _checking(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError, tarfile.HeaderError) as error:
            raise BundleError(f"{self._fault}: {error}") from error

    def _member(self, name: str, most_bytes: int, expected_bytes: int | None = None) -> bytes | None:
        """A member's bytes; None at the end."""
        with self._checking():
            try:
                info = tarfile.TarInfo.frombuf(self._exactly(tarfile.BLOCKSIZE), "utf-8", "strict")
            except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
                return None
        if info.name != name or not info.isreg() or expected_bytes not in (None, info.size):
            raise BundleError(f"{self._fault}: {info.name[:40]!r} stands where {name} is expected")
        if info.size > min(most_bytes, self._left):
            limit = min(most_bytes, self._max_bytes)
            raise BundleTooLarge(f"the bundle holds more than the {limit} bytes that can be taken in")
        self._left -= info.size
        return self._exactly(info.size + -info.size % tarfile.BLOCKSIZE)[: info.size]

    def _exactly(self, num_bytes: int) -> bytes:
        while (missing := num_bytes - len(self._unread)) > 0:
            if not (block := next(self._blocks, b"")):
                raise BundleError(f"the bundle is cut off: {missing} bytes more were expected")
            self._unread += block
        data = bytes(self._unread[:num_bytes])
        del self._unread[:num_bytes]
        return data


def _piece(fields: dict[str, Any], before: TokenArray) -> BundlePiece:
    """Raises KeyError, TypeError, ValueError or OverflowError."""
    receipt, kept, new, session_id = fields["receipt"], fields["kept"], fields["tokens"], fields["session_id"]
    numbers = [kept, fields["start"], *(receipt[name] for name in ("num_bytes", "header_bytes", "checksums_bytes"))]
    if not all(type(number) is int and number >= 0 for number in numbers) or kept > len(before):
        raise ValueError("a number is no count")
    if not all(type(token) is int for token in new) or type(fields["is_snapshot"]) is not bool:
        raise TypeError("a token is no number")
    if not isinstance(fields["namespace"], str) or not isinstance(session_id, str | None):
        raise TypeError("a name is no text")
    tokens = np.concatenate([before[:kept], np.array(new, np.int32)])
    sizes = receipt["num_bytes"], receipt["header_bytes"], receipt["checksums_bytes"]
    receipt = Receipt(*sizes, bytes.fromhex(receipt["digest"]))
    return BundlePiece(fields["namespace"], session_id, tokens, fields["start"], fields["is_snapshot"], receipt)
