"""What to give up when memory is short: pure choices over candidates.

A candidate is an idle slot, a whole leaf, or one snapshot. Idle slots go first, since paging one out loses nothing:
it frees unused room in its buffers and the second copy of a prefix that others hold too. Then the policy is least
recently used, deepest first among equals, and never a victim that frees nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Candidate:
    """Something that can be given up. `key` is the caller's handle and means nothing here."""

    key: Any
    num_bytes: int
    last_used: int
    offset: int
    """Where the state ends, in tokens: of two equally old, the deeper goes first."""
    is_explicit: bool = False
    """Asked for by name, so it goes after everything else."""
    is_lossless: bool = False
    """Nothing has to be evaluated again for it."""


def choose(candidates: Iterable[Candidate], needed_bytes: int) -> list[Candidate]:
    """Returns victims in order, enough to free `needed_bytes` if the candidates have as much."""
    ranked = sorted(
        (candidate for candidate in candidates if candidate.num_bytes > 0),
        key=lambda c: (not c.is_lossless, c.is_explicit, c.last_used, -c.offset),
    )
    victims: list[Candidate] = []
    for candidate in ranked:
        if needed_bytes <= 0:
            break
        victims.append(candidate)
        needed_bytes -= candidate.num_bytes
    return victims
