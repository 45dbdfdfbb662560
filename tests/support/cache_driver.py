"""Runs requests through a prefix cache with a fake or real model, the way the engine does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cache.lease import Lease
from cache.prefix_cache import PrefixCache
from cache.slots import CacheRequest, Lookup
from cache.snapshots import RestorePoint, RestorePointKind
from cache.types import LayerCache, TokenArray
from tests.support import fake_model

CHUNK_TOKENS = 16
"""Prompt tokens evaluated in one call."""

Evaluate = Callable[[Sequence[LayerCache], TokenArray], None]


@dataclass(frozen=True)
class Outcome:
    """What one request cost: prompt tokens evaluated, and tokens found in the trie."""

    left: int
    match: int
    hit: int
    slot: int


def run(
    prefix_cache: PrefixCache,
    prompt: Sequence[int],
    generated: Sequence[int] = (),
    *,
    explicit: Sequence[int] = (),
    session_id: str | None = None,
    namespace: str = "",
    reuse: bool = True,
    is_background: bool = False,
    is_volatile: bool = False,
    evaluate: Evaluate = fake_model.evaluate,
    stop_at: int | None = None,
    inspect: Callable[[Lease], None] = lambda lease: None,
) -> Outcome:
    """Runs one request to its end, or cancels it once `stop_at` prompt tokens are evaluated.

    `inspect` sees the lease just before it closes. Invariants are checked before and after.
    """
    points = [RestorePoint(offset, RestorePointKind.EXPLICIT) for offset in explicit]
    tokens = np.array(prompt, np.int32)
    lease = prefix_cache.begin(
        CacheRequest(
            Lookup(tokens, namespace=namespace, reuse=reuse),
            session_id=session_id,
            restore_points=points,
            is_background=is_background,
            is_volatile=is_volatile,
        )
    )
    assert lease is not None, "all slots are leased"
    prefix_cache.check()
    outcome = Outcome(len(prompt) - lease.hit_tokens, lease.match_tokens, lease.hit_tokens, lease.slot_index)
    prefill(lease, tokens, evaluate, stop_at=stop_at)
    if stop_at is None:
        for token in [prompt[-1], *generated]:
            evaluate(lease.caches, np.array([token], np.int32))
            lease.append(token)
    inspect(lease)
    lease.close()
    prefix_cache.check()
    return outcome


def prefill(
    lease: Lease,
    tokens: TokenArray,
    evaluate: Evaluate,
    *,
    stop_at: int | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> None:
    """Evaluates all but the last prompt token in chunks, recording each."""
    limit = len(tokens) - 1
    while lease.offset < limit and (stop_at is None or lease.offset < stop_at):
        stop = lease.chunk_stop(chunk_tokens, limit)
        evaluate(lease.caches, tokens[lease.offset : stop])
        lease.advance(tokens[lease.offset : stop])
