"""One conversation's losses, added up by cause. Pure.

Only later turns show what a change of earlier messages was. If later turns continue the version before the change,
the changed request was one beside the conversation; if they continue only the changed version, the conversation began
anew.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from server.diagnosis.causes import TOOLS, UNBLAMED, UNTOLD, Cause, Miss, MissReason, advice

NEGLIGIBLE_TOKENS = 128
"""Up to so many lost tokens need no cure, since state is kept at some offsets only."""
_OF_STATE = frozenset({Cause.NOT_RESTORABLE, Cause.EVICTED, Cause.UNLOADED, Cause.RESTARTED, Cause.SIDE_REQUEST})
_SMALL = _OF_STATE | {Cause.NOTE}
"""Reported only above `NEGLIGIBLE_TOKENS`."""
_PLACELESS = _OF_STATE | {Cause.CLEARED, Cause.DECLINED}


@dataclass(frozen=True)
class Loss:
    """Tokens evaluated although the turn before had them, and why."""

    turn: int
    """From 1."""
    cause: Cause
    place: str | None
    """The role of the message, or `TOOLS`."""
    where: str
    """The place in words: `system message`."""
    tokens: int
    seconds: float | None = None
    """None where no speed is known."""
    before: str = ""
    after: str = ""
    is_hidden: bool = False
    """The loss comes after another change, so it cost nothing by itself."""
    missing_bytes: int | None = None

    @property
    def is_mendable(self) -> bool:
        return self.cause not in UNBLAMED


@dataclass(frozen=True)
class Finding:
    """One cause at one place, and its cost."""

    losses: Sequence[Loss]

    @property
    def cause(self) -> Cause:
        return self.losses[0].cause

    @property
    def cure(self) -> str:
        missing = [loss.missing_bytes for loss in self.losses if loss.missing_bytes is not None]
        return advice(self.cause, self.losses[0].place, max(missing, default=None))

    @property
    def example(self) -> Loss:
        return next((loss for loss in reversed(self.losses) if loss.before or loss.after), self.losses[-1])

    @property
    def num_turns(self) -> int:
        return len({loss.turn for loss in self.losses})

    @property
    def tokens(self) -> int:
        return sum(loss.tokens for loss in self.losses)

    @property
    def seconds(self) -> float | None:
        known = [loss.seconds for loss in self.losses if loss.seconds is not None]
        return sum(known) if known else None

    @property
    def is_hidden(self) -> bool:
        return all(loss.is_hidden for loss in self.losses)


@dataclass(frozen=True)
class Checkup:
    """One session and its losses."""

    name: str
    num_turns: int
    kept: float | None
    """Average share of the prompt before that was reused, 0 to 1; None for a single turn."""
    losses: tuple[Loss, ...]
    num_seen: int | None = None
    """Number of all turns, if not all are kept."""
    began: float | None = None
    """Seconds since 1970, like `ended`."""
    ended: float | None = None

    @property
    def mendable(self) -> Sequence[Loss]:
        return [loss for loss in self.losses if loss.is_mendable]

    @property
    def tokens(self) -> int:
        return sum(loss.tokens for loss in self.mendable)

    @property
    def seconds(self) -> float:
        return sum(loss.seconds or 0.0 for loss in self.mendable)


@dataclass(frozen=True)
class Savings:
    """What all cures would save. Seconds are None where unknown."""

    tokens: int
    turns: int
    seconds: float | None
    seconds_per_turn: float | None
    within_seconds: float | None
    """From the first turn to the last."""


def savings_of(checkups: Sequence[Checkup]) -> Savings:
    """The savings of all conversations together."""
    num_turns = sum(one.num_turns if one.num_seen is None else one.num_seen for one in checkups)
    has_speed = any(loss.seconds is not None for one in checkups for loss in one.losses)
    seconds = sum(one.seconds for one in checkups) if has_speed else None
    began = [one.began for one in checkups if one.began is not None]
    ended = [one.ended for one in checkups if one.ended is not None]
    took = max(ended) - min(began) if began and ended else None
    per_turn = None if seconds is None else seconds / max(1, num_turns)
    return Savings(sum(one.tokens for one in checkups), num_turns, seconds, per_turn, took)


def findings_of(losses: Iterable[Loss]) -> list[Finding]:
    """Losses added up by cause and role, the costliest first."""
    groups: dict[tuple[Cause, str | None], list[Loss]] = {}
    for loss in losses:
        groups.setdefault((loss.cause, loss.place), []).append(loss)
    return sorted(map(Finding, groups.values()), key=lambda finding: (finding.is_hidden, -finding.tokens))


def losses_of(
    turn: int, misses: Iterable[Miss], tokens_of: Callable[[int], int], seconds_per_token: float | None = None
) -> tuple[Loss, ...]:
    """The losses to tell of; `tokens_of` turns `lost_tokens` into tokens."""
    found = list[Loss]()
    for miss in misses:
        tokens, is_hidden = tokens_of(miss.lost_tokens), miss.lost_tokens == 0
        limit = NEGLIGIBLE_TOKENS if miss.cause in _SMALL else 0
        is_small = tokens <= limit and (not is_hidden or miss.cause is Cause.SIDE_REQUEST)
        if miss.cause in UNTOLD or is_small:
            continue
        is_of_tools = miss.reason is MissReason.TOOLS_CHANGED
        place = TOOLS if is_of_tools else None if miss.cause in _PLACELESS else miss.role
        where = TOOLS if place == TOOLS else place_name(miss.message_index, place)
        seconds = None if seconds_per_token is None else tokens * seconds_per_token
        words = (miss.before, miss.after)
        found.append(Loss(turn, miss.cause, place, where, tokens, seconds, *words, is_hidden, miss.missing_bytes))
    return tuple(found)


def place_name(index: int | None, role: str | None) -> str:
    """A message's place in words."""
    if role is None or index is None:
        return ""
    return "system message" if role == "system" and index == 0 else f"message {index} ({role})"


_VERSIONS = frozenset({Cause.EDITED, Cause.TOOLS, Cause.TRIMMED, Cause.SUMMARISED, Cause.COMPACTED, Cause.REMOVED})
_VERSIONS |= {Cause.MERGED, Cause.INSERTED, Cause.TEMPLATE_ARGUMENTS}
"""Changes that make another version of a conversation."""


@dataclass(frozen=True)
class LinkedTurn:
    """One turn, and the turn that it was compared with."""

    id: str
    previous: str | None
    """None if there was none, or if unknown."""
    losses: tuple[Loss, ...]
    kept: float | None = None
    """Part of the previous prompt that was reused, 0 to 1."""


def checkup_from(name: str, turns: Sequence[LinkedTurn]) -> Checkup:
    """The losses of a conversation."""
    kept = [turn.kept for turn in turns if turn.kept is not None]
    return Checkup(name, len(turns), sum(kept) / len(kept) if kept else None, tuple(in_hindsight(turns)))


def in_hindsight(turns: Sequence[LinkedTurn]) -> list[Loss]:
    """All losses, with causes that later turns correct."""
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
    """Joins losses by another version into one by a request beside the conversation."""
    versions = [loss for loss in turn.losses if loss.cause in _VERSIONS]
    yield from (loss for loss in turn.losses if loss.cause not in _VERSIONS)
    costliest = max(versions, key=lambda loss: loss.tokens)
    if costliest.tokens > NEGLIGIBLE_TOKENS:
        yield replace(costliest, cause=Cause.SIDE_REQUEST, place=None, where="", is_hidden=False)


def checkup_of(session: Mapping[str, Any]) -> Checkup:
    """A session's losses. Raises KeyError, TypeError or ValueError for what is no session."""
    turns, num_turns = session["turns"], int(session["num_turns"])
    linked = [_linked(turn, number) for number, turn in enumerate(turns, num_turns - len(turns) + 1)]
    return replace(
        checkup_from(str(session["id"]), linked),
        num_turns=num_turns,
        num_seen=len(turns),
        began=float(session["created"]),
        ended=float(session["last_used"]),
    )


def _linked(turn: Mapping[str, Any], number: int) -> LinkedTurn:
    evaluated = int(turn["evaluated_tokens"])
    seconds_per_token = float(turn["prompt_ms"]) / 1000 / evaluated if evaluated else 0.0
    misses = map(_miss, turn["misses"])
    losses = losses_of(number, misses, lambda lost: min(lost, evaluated), seconds_per_token)
    return LinkedTurn(str(turn.get("id")), turn.get("previous"), losses, turn["kept"])


def _miss(told: Mapping[str, Any]) -> Miss:
    known = {one.name: told[one.name] for one in fields(Miss) if one.init and one.name in told}
    return Miss(**{**known, "reason": MissReason(told["reason"]), "cause": Cause(told["cause"])})
