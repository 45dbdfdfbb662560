"""A bundle: conversations with their state, in one tar file. Pure.

The first member says of which model the state is. Of each piece of state two members follow: what it is, with the
size and digest of the second, and the tensors. So everything is known, and refused, before it is read, and damage
costs what lies after it. Members have one fixed name each, and nothing is unpacked. Digests find what transport
changed; they do not make a sender right.
"""

import contextlib
import itertools
import json
import tarfile
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any

import numpy as np

from cache.budget import CacheError
from cache.disk.files import Receipt
from cache.types import TokenArray, common_prefix_length

BUNDLE_FORMAT = 1
HEAD = "bundle.json"
MAX_TEXT_BYTES = 16 << 20
MAX_PIECE_BYTES = 1 << 30
"""A piece is held in memory while it moves."""
NO_TOKENS: TokenArray = np.empty(0, np.int32)


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

    def begins(self, other: "BundlePiece") -> bool:
        """Whether another piece goes on with the conversation."""
        length = common_prefix_length(self.tokens, other.tokens)
        return self.namespace == other.namespace and length == len(self.tokens)


def bundled(head: BundleHead, pieces: Iterable[tuple[BundlePiece, bytes]]) -> Iterator[bytes]:
    """Yields the bytes of a bundle; none without pieces. A piece has only those tokens that the one before lacks."""
    before = NO_TOKENS
    for number, (piece, data) in enumerate(pieces):
        if not number:
            yield from _member(HEAD, _text(vars(head)))
        kept = common_prefix_length(piece.tokens, before)
        receipt = {**vars(piece.receipt), "digest": piece.receipt.digest.hex()}
        fields = {**vars(piece), "tokens": piece.tokens[kept:].tolist(), "receipt": receipt, "kept": kept}
        yield from _member(f"{number:06}.json", _text(fields))
        yield from _member(f"{number:06}.safetensors", data)
        before = piece.tokens
    if len(before):
        yield bytes(2 * tarfile.BLOCKSIZE)


def _text(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def _member(name: str, data: bytes) -> Iterator[bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o600
    yield info.tobuf(tarfile.USTAR_FORMAT)
    yield data + bytes(-len(data) % tarfile.BLOCKSIZE)


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
        """Yields each piece with its bytes, which the caller checks by the receipt."""
        before = NO_TOKENS
        for number in itertools.count():
            if (text := self._member(f"{number:06}.json", MAX_TEXT_BYTES)) is None:
                return
            with self._checking():
                piece = _piece(json.loads(text), before)
            before = piece.tokens
            if (data := self._member(f"{number:06}.safetensors", MAX_PIECE_BYTES)) is None:
                raise BundleError(f"{self._fault}: a piece is missing")
            yield piece, data

    @contextlib.contextmanager
    def _checking(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError, tarfile.HeaderError) as error:
            raise BundleError(f"{self._fault}: {error}") from error

    def _member(self, name: str, most_bytes: int) -> bytes | None:
        """A member's bytes; None at the end."""
        with self._checking():
            try:
                info = tarfile.TarInfo.frombuf(self._exactly(tarfile.BLOCKSIZE), "utf-8", "strict")
            except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
                return None
        if info.name != name or not info.isreg():
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
    kinds = [type(fields[name]) for name in ("start", "is_snapshot", "namespace", "kept", "session_id")]
    kept, new, receipt = fields.pop("kept"), array("i", fields["tokens"]), fields["receipt"]
    if kinds[:-1] != [int, bool, str, int] or kinds[-1] not in (str, NoneType) or not 0 <= kept <= len(before):
        raise ValueError("a field has no such value")
    tokens = np.concatenate([before[:kept], np.array(new, np.int32)])
    receipt = Receipt(**{**receipt, "digest": bytes.fromhex(receipt["digest"])})
    return BundlePiece(**{**fields, "tokens": tokens, "receipt": receipt})
