"""One conversation's losses, added up by cause. Pure.

Only later turns show what a change of earlier messages was. If later turns continue the version before the change,
the changed request was one beside the conversation; if they continue only the changed version, the conversation began
anew.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from server.diagnosis.causes import TOOLS, UNBLAMED, UNTOLD, Cause, Miss, MissReason, advice
from server.diagnosis.prompt import RepeatedCall

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
    miss: Miss
    tokens: int
    """0 after another change."""
    seconds: float | None = None
    """None where no speed is known."""


@dataclass(frozen=True)
class Finding:
    """One cause at one place, and its cost. `doctor --json` has these fields."""

    cause: Cause
    where: str
    turns: int
    tokens: int
    """0 after another change, which costs all that follows."""
    seconds: float | None
    before: str
    after: str
    cure: str


@dataclass(frozen=True)
class Checkup:
    """One session and its losses."""

    name: str
    num_turns: int
    num_seen: int
    """Number of the turns that are still kept."""
    kept: float | None
    """Average share of the prompt before that was reused, 0 to 1; None for a single turn."""
    losses: tuple[Loss, ...]
    times: tuple[float, float] | None = None
    """First and last, in seconds since 1970."""
    healed_tokens: int = 0
    """Restored since the prompt was shown otherwise than sent."""
    rounded_tokens: int = 0
    """Restored from state in 8 bits."""
    repeated_call: RepeatedCall | None = None

    @property
    def mendable(self) -> Sequence[Loss]:
        return [loss for loss in self.losses if loss.miss.cause not in UNBLAMED]

    @property
    def is_ailing(self) -> bool:
        return bool(self.mendable) or self.repeated_call is not None

    @property
    def tokens(self) -> int:
        return sum(loss.tokens for loss in self.mendable)


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
    num_turns, tokens = sum(checkup.num_seen for checkup in checkups), sum(checkup.tokens for checkup in checkups)
    has_speed = any(loss.seconds is not None for checkup in checkups for loss in checkup.losses)
    seconds = sum(loss.seconds or 0.0 for checkup in checkups for loss in checkup.mendable) if has_speed else None
    times = [checkup.times for checkup in checkups if checkup.times is not None]
    took = max(last for _, last in times) - min(first for first, _ in times) if times else None
    return Savings(tokens, num_turns, seconds, None if seconds is None else seconds / max(1, num_turns), took)


def findings_of(losses: Iterable[Loss]) -> list[Finding]:
    """Losses added up by cause and role, the costliest first."""
    groups: dict[tuple[Cause, str | None], list[Loss]] = {}
    for loss in losses:
        groups.setdefault((loss.miss.cause, _place_of(loss.miss)), []).append(loss)
    findings = (_added_up(cause, place, group) for (cause, place), group in groups.items())
    return sorted(findings, key=lambda finding: -finding.tokens)


def _added_up(cause: Cause, place: str | None, losses: Sequence[Loss]) -> Finding:
    misses = [loss.miss for loss in losses]
    example = next((miss for miss in reversed(misses) if miss.before or miss.after), misses[-1])
    num_turns, tokens = len({loss.turn for loss in losses}), sum(loss.tokens for loss in losses)
    seconds = [loss.seconds for loss in losses if loss.seconds is not None]
    cost = (num_turns, tokens, sum(seconds) if seconds else None)
    missing_bytes = max((miss.missing_bytes for miss in misses if miss.missing_bytes is not None), default=None)
    cure = advice(cause, place, missing_bytes)
    return Finding(cause, place_name(example), *cost, example.before, example.after, cure)


def losses_of(
    turn: int, misses: Iterable[Miss], tokens_of: Callable[[int], int], seconds_per_token: float | None = None
) -> tuple[Loss, ...]:
    """The losses to tell of; `tokens_of` turns `lost_tokens` into tokens."""
    losses = list[Loss]()
    for miss in misses:
        tokens = tokens_of(miss.lost_tokens)
        limit = NEGLIGIBLE_TOKENS if miss.cause in _SMALL else 0
        is_small = tokens <= limit and (miss.lost_tokens or miss.cause is Cause.SIDE_REQUEST)
        if miss.cause not in UNTOLD and not is_small:
            losses.append(Loss(turn, miss, tokens, None if seconds_per_token is None else tokens * seconds_per_token))
    return tuple(losses)


def _place_of(miss: Miss) -> str | None:
    """The role of the message, or `TOOLS`."""
    if miss.cause in _PLACELESS:
        return None
    return TOOLS if miss.reason is MissReason.TOOLS_CHANGED else miss.role


def place_name(miss: Miss) -> str:
    """A miss's place in words."""
    place, index = _place_of(miss), miss.message_index
    if place is None or place == TOOLS or index is None:
        return TOOLS if place == TOOLS else ""
    return "system message" if place == "system" and index == 0 else f"message {index} ({place})"


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


def checkup_from(name: str, turns: Sequence[LinkedTurn], repeated_call: RepeatedCall | None = None) -> Checkup:
    """The losses of a conversation, with causes that later turns correct."""
    kept = [turn.kept for turn in turns if turn.kept is not None]
    losses = tuple(loss for number, turn in enumerate(turns, 1) for loss in _with_later(turn, turns[number:]))
    average = sum(kept) / len(kept) if kept else None
    return Checkup(name, len(turns), len(turns), average, losses, repeated_call=repeated_call)


def _with_later(turn: LinkedTurn, later: Sequence[LinkedTurn]) -> Iterator[Loss]:
    origins = {turn.previous for turn in later if Cause.SIDE_REQUEST not in (loss.miss.cause for loss in turn.losses)}
    went_on, other_went_on = turn.id in origins, turn.previous is not None and turn.previous in origins
    versions = [loss for loss in turn.losses if loss.miss.cause in _VERSIONS]
    if other_went_on and not went_on and versions:
        # Its losses by another version are one by a request beside the conversation.
        yield from (loss for loss in turn.losses if loss.miss.cause not in _VERSIONS)
        costliest = max(versions, key=lambda loss: loss.tokens)
        if costliest.tokens > NEGLIGIBLE_TOKENS:
            yield replace(costliest, miss=replace(costliest.miss, cause=Cause.SIDE_REQUEST))
    elif went_on and not other_went_on:
        yield from (loss for loss in turn.losses if loss.miss.cause is not Cause.SIDE_REQUEST)
    else:
        yield from turn.losses


def checkup_of(session: Mapping[str, Any]) -> Checkup:
    """A session's losses. Raises KeyError, TypeError or ValueError for what is no session."""
    turns, num_turns = session["turns"], int(session["num_turns"])
    linked = [_linked(turn, number) for number, turn in enumerate(turns, num_turns - len(turns) + 1)]
    times = float(session["created"]), float(session["last_used"])
    repeated = RepeatedCall(**call) if (call := session.get("repeated_call")) else None
    checkup = replace(checkup_from(str(session["id"]), linked, repeated), num_turns=num_turns, times=times)
    healed_tokens, rounded_tokens = (int(session.get(name, 0)) for name in ("healed_tokens", "rounded_tokens"))
    return replace(checkup, healed_tokens=healed_tokens, rounded_tokens=rounded_tokens)


def _linked(turn: Mapping[str, Any], number: int) -> LinkedTurn:
    evaluated = int(turn["evaluated_tokens"])
    seconds_per_token = float(turn["prompt_ms"]) / 1000 / evaluated if evaluated else 0.0
    losses = losses_of(number, map(_miss, turn["misses"]), lambda lost: min(lost, evaluated), seconds_per_token)
    return LinkedTurn(str(turn.get("id")), turn.get("previous"), losses, turn["kept"])


def _miss(record: Mapping[str, Any]) -> Miss:
    known = {field.name: record[field.name] for field in fields(Miss) if field.init and field.name in record}
    return Miss(**{**known, "reason": MissReason(record["reason"]), "cause": Cause(record["cause"])})
