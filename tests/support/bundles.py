"""Bundles in memory: packed from one cache, taken in by another."""

from collections.abc import Callable, Iterator
from typing import Any

from cache import moving
from cache.disk.bundle import BundleHead, BundleReader
from cache.moving import CacheCall, Departure, Intake, MovingText
from cache.prefix_cache import PrefixCache

FINGERPRINT = "f"


def calling(cache: PrefixCache) -> CacheCall:
    """Calls functions with a cache on this thread."""

    def call(function: Callable[..., Any], *given: object) -> Any:
        return function(cache, *given)

    return call


def packed(departure: Departure, texts: Iterator[MovingText], *, fingerprint: str = FINGERPRINT) -> bytes:
    """A bundle."""
    return b"".join(departure.blocks(BundleHead("m", fingerprint), texts))


def bundle_of(cache: PrefixCache, is_wanted: Callable[[str], bool] = lambda name: True, **given: Any) -> bytes:
    """All conversations of some namespaces."""
    return packed(Departure(calling(cache)), moving.conversations(cache, is_wanted), **given)


def bundle_of_text(cache: PrefixCache, conversation: MovingText) -> bytes:
    """One conversation."""
    return packed(Departure(calling(cache)), iter([conversation]))


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
    intake = Intake(calling(cache), namespace_of)
    intake.take(reader_of(data, max_bytes), FINGERPRINT)
    return intake


def intake_at(cache: PrefixCache) -> Intake:
    return Intake(calling(cache), lambda name: name)
