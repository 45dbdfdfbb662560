"""Bundles in memory: packed from one cache, taken in by another."""

from collections.abc import Callable, Iterator
from typing import Any

from cache import moving
from cache.disk.bundle import END, BundleHead, BundleReader, BundleWriter
from cache.moving import Departure, Intake, LeavingPiece, MovingText
from cache.prefix_cache import PrefixCache

FINGERPRINT = "f"


def packed(pieces: Iterator[LeavingPiece | None], *, fingerprint: str = FINGERPRINT) -> bytes:
    """A bundle of pieces."""
    writer = BundleWriter()
    blocks = [writer.head(BundleHead("m", fingerprint))]
    for piece in pieces:
        if piece is not None:
            blocks += writer.piece(*piece.packed())
    return b"".join([*blocks, END])


def bundle_of(cache: PrefixCache, is_wanted: Callable[[str], bool] = lambda name: True) -> bytes:
    """All conversations of some namespaces."""
    return packed(Departure(cache).pieces(moving.conversations(cache, is_wanted)))


def bundle_of_text(cache: PrefixCache, conversation: MovingText) -> bytes:
    """One conversation."""
    return packed(Departure(cache).pieces(iter([conversation])))


def reader_of(data: bytes, max_bytes: int = 1 << 40) -> BundleReader:
    return BundleReader(iter([data]), max_bytes)


def arrive(
    cache: PrefixCache,
    data: bytes,
    *,
    namespace_of: Callable[[str], str] = lambda name: name,
    max_bytes: int = 1 << 40,
) -> Intake:
    """Takes a bundle in; what came before an error is kept."""
    intake = intake_at(cache, namespace_of)
    intake.take(reader_of(data, max_bytes), FINGERPRINT)
    return intake


def intake_at(cache: PrefixCache, namespace_of: Callable[[str], str] = lambda name: name) -> Intake:
    def call(function: Callable[..., Any], *given: object) -> Any:
        return function(cache, *given)

    return Intake(call, namespace_of)
