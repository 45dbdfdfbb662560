"""Where restore points belong: pure decisions over token offsets.

A *restore point* is an offset at which every layer of a model can be restored. Models whose state is
sliceable per token can be restored anywhere; the others only where a snapshot was taken, so the choice of
offsets decides how much of the next prompt must be evaluated again. This module knows offsets and their
reasons only: no tokens, no arrays, no clock.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class RestorePointKind(StrEnum):
    """Why an offset is worth restoring to."""

    SYSTEM_END = "system_end"
    USER_START = "user_start"
    PROMPT_END = "prompt_end"
    TURN_END = "turn_end"
    BRANCH = "branch"
    EXPLICIT = "explicit"


@dataclass(frozen=True, order=True)
class RestorePoint:
    """`offset` tokens from the start of the sequence are worth being restorable, because of `kind`."""

    offset: int
    kind: RestorePointKind


def plan(wanted: Iterable[RestorePoint], *, start: int, stop: int) -> tuple[RestorePoint, ...]:
    """Returns the points to capture while `[start, stop)` is evaluated, ascending, one per offset.

    Offsets at or before `start` are already behind; offsets beyond `stop` are never reached. Where two
    kinds meet at one offset, an explicit point wins, since it is never merged away.
    """
    chosen: dict[int, RestorePoint] = {}
    for point in wanted:
        if not start < point.offset <= stop:
            continue
        held = chosen.get(point.offset)
        if held is None or point.kind is RestorePointKind.EXPLICIT:
            chosen[point.offset] = point
    return tuple(sorted(chosen.values()))
