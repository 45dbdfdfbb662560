"""What later turns show of a loss: which version of a conversation went on. Pure.

When a request changes what was said before, nobody can know whether the conversation goes on from it. If the next
turns go on from the version before it, it was a request beside the conversation. If they go on from what seemed to be
beside it, and never again from the version before, the conversation began anew.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from server.doctor.findings import NEGLIGIBLE_TOKENS, Loss
from server.engine.diagnosis import Cause

_VERSIONS = frozenset(
    {
        Cause.EDITED,
        Cause.TOOLS,
        Cause.TRIMMED,
        Cause.SUMMARISED,
        Cause.REMOVED,
        Cause.MERGED,
        Cause.INSERTED,
        Cause.TEMPLATE_ARGUMENTS,
    }
)
"""Changes that make another version of a conversation."""


@dataclass(frozen=True)
class LinkedTurn:
    """One turn with its losses, and the turn that it was compared with."""

    id: str
    previous: str | None
    """None where there was none, or nobody knows."""
    losses: tuple[Loss, ...]


def in_hindsight(turns: Sequence[LinkedTurn]) -> list[Loss]:
    """Returns the losses of all turns, each called what the later turns show it to be."""
    return [loss for index, turn in enumerate(turns) for loss in _with_later(turn, turns[index + 1 :])]


def _with_later(turn: LinkedTurn, later: Sequence[LinkedTurn]) -> Iterator[Loss]:
    origins = {one.previous for one in later if all(loss.cause is not Cause.SIDE_REQUEST for loss in one.losses)}
    went_on, other_went_on = turn.id in origins, turn.previous is not None and turn.previous in origins
    if other_went_on and not went_on and any(loss.cause in _VERSIONS for loss in turn.losses):
        yield from _as_aside(turn)
    elif went_on and not other_went_on:
        yield from (loss for loss in turn.losses if loss.cause is not Cause.SIDE_REQUEST)
    else:
        yield from turn.losses


def _as_aside(turn: LinkedTurn) -> Iterator[Loss]:
    """Yields the losses with those of another version as one: that of a request beside the conversation."""
    versions = [loss for loss in turn.losses if loss.cause in _VERSIONS]
    yield from (loss for loss in turn.losses if loss.cause not in _VERSIONS)
    costliest = max(versions, key=lambda loss: loss.tokens)
    if costliest.tokens > NEGLIGIBLE_TOKENS:
        yield replace(costliest, cause=Cause.SIDE_REQUEST, place=None, where="", is_hidden=False)
