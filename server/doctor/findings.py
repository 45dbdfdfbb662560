"""The losses of one session's turns, added up by cause, alike for a server and for recorded requests. Pure.

Reads a session's JSON values as of `/v1/sessions/{id}`, and asks nobody. When a request changes earlier messages,
only later turns show what the change was. If they continue the version before it, it was a request beside the
conversation. If they continue the changed version, and never again the one before, the conversation began anew.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from server.diagnosis.advice import TOOLS, advice
from server.engine.diagnosis import UNBLAMED, Cause, MissReason

NEGLIGIBLE_TOKENS = 128
"""Up to so many lost tokens need no cure: state is kept at some offsets only, and requests may share a name."""
SECONDS_PER_DAY = 86_400
SHORTEST_SECONDS = 60.0
"""Turns within a shorter time give no rate per day."""
_SMALL = frozenset({Cause.NOT_RESTORABLE, Cause.EVICTED, Cause.SIDE_REQUEST})
"""Causes that are reported only above `NEGLIGIBLE_TOKENS`."""
_PLACELESS = _SMALL | {Cause.CLEARED, Cause.UNLOADED, Cause.DECLINED}
"""Causes that no single message has."""


@dataclass(frozen=True)
class Loss:
    """Tokens of one turn evaluated although the turn before had them, and the text that caused it."""

    turn: int
    """From 1."""
    cause: Cause
    place: str | None
    """The role of the message, or `TOOLS`."""
    where: str
    """The place in the prompt, for a person: `system message`."""
    tokens: int
    seconds: float | None = None
    """None where no speed is known."""
    before: str = ""
    after: str = ""
    is_hidden: bool = False
    """Whether it changed behind another change of the same turn, so it cost nothing by itself."""


@dataclass(frozen=True)
class Checkup:
    """One session and its losses."""

    name: str
    num_turns: int
    kept: float | None
    """Average share of the prompt before that a turn reused, 0 to 1; None for a single turn."""
    losses: tuple[Loss, ...]
    num_seen: int | None = None
    """Turns considered, where not all are kept."""
    began: float | None = None
    """Seconds since 1970, like `ended`; None where no time is known."""
    ended: float | None = None

    @property
    def tokens(self) -> int:
        return sum(loss.tokens for loss in self.losses)

    @property
    def seconds(self) -> float:
        return sum(loss.seconds or 0.0 for loss in self.losses)


@dataclass(frozen=True)
class Finding:
    """One cause at one place, and its cost in all the turns concerned."""

    losses: tuple[Loss, ...]

    @property
    def cause(self) -> Cause:
        return self.losses[0].cause

    @property
    def cure(self) -> str:
        return advice(self.cause, self.losses[0].place)

    @property
    def example(self) -> Loss:
        """The last loss with words to show, else the last one."""
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
        """Whether it cost nothing because another change was always before it."""
        return all(loss.is_hidden for loss in self.losses)


@dataclass(frozen=True)
class Refused:
    """Requests that a server answered with the same error."""

    path: str
    session_id: str | None
    status: int
    code: str
    message: str
    count: int


@dataclass(frozen=True)
class Savings:
    """What all cures together would save."""

    tokens: int
    num_turns: int
    """Turns considered, good ones too."""
    seconds: float | None
    """None where no speed is known."""
    seconds_per_day: float | None
    """At the rate of the turns; None where they took less than a minute, or no time is known."""

    @property
    def seconds_per_turn(self) -> float | None:
        return None if self.seconds is None else self.seconds / max(1, self.num_turns)


def savings_of(checkups: Sequence[Checkup]) -> Savings:
    """Returns the savings of all conversations together."""
    num_turns = sum(one.num_turns if one.num_seen is None else one.num_seen for one in checkups)
    has_speed = any(loss.seconds is not None for one in checkups for loss in one.losses)
    seconds = sum(one.seconds for one in checkups) if has_speed else None
    days = _days(checkups)
    per_day = seconds / days if seconds is not None and days is not None else None
    return Savings(sum(one.tokens for one in checkups), num_turns, seconds, per_day)


def _days(checkups: Sequence[Checkup]) -> float | None:
    began = [one.began for one in checkups if one.began is not None]
    ended = [one.ended for one in checkups if one.ended is not None]
    took = max(ended) - min(began) if began and ended else 0.0
    return took / SECONDS_PER_DAY if took >= SHORTEST_SECONDS else None


def findings_of(losses: Iterable[Loss]) -> list[Finding]:
    """Returns the losses by cause and role, the costliest first.

    A change at another message in each turn, as of replies, is one finding.
    """
    groups: dict[tuple[Cause, str | None], list[Loss]] = {}
    for loss in losses:
        groups.setdefault((loss.cause, loss.place), []).append(loss)
    findings = [Finding(tuple(group)) for group in groups.values()]
    return sorted(findings, key=lambda finding: (finding.is_hidden, -finding.tokens))


def loss_of(
    turn: int,
    *,
    reason: MissReason,
    cause: Cause,
    index: int | None,
    role: str | None,
    tokens: int,
    seconds: float | None,
    before: str,
    after: str,
    is_hidden: bool,
) -> Loss | None:
    """Returns the loss of a turn, or None where there is nothing to mend."""
    limit = NEGLIGIBLE_TOKENS if cause in _SMALL else 0
    if cause in UNBLAMED or (tokens <= limit and not is_hidden):
        return None
    place = TOOLS if reason is MissReason.TOOLS_CHANGED else None if cause in _PLACELESS else role
    where = TOOLS if place == TOOLS else place_name(index, place)
    return Loss(turn, cause, place, where, tokens, seconds, before, after, is_hidden)


def place_name(index: int | None, role: str | None) -> str:
    """Returns a message's place in words; empty for none."""
    if role is None or index is None:
        return ""
    return "system message" if role == "system" and index == 0 else f"message {index} ({role})"


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
    """Returns the losses of all turns, with causes corrected by the later turns."""
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
    """Yields the losses, with those of another version combined into one of a request beside the conversation."""
    versions = [loss for loss in turn.losses if loss.cause in _VERSIONS]
    yield from (loss for loss in turn.losses if loss.cause not in _VERSIONS)
    costliest = max(versions, key=lambda loss: loss.tokens)
    if costliest.tokens > NEGLIGIBLE_TOKENS:
        yield replace(costliest, cause=Cause.SIDE_REQUEST, place=None, where="", is_hidden=False)


_Turn = Mapping[str, Any]


def checkup_of(session: Mapping[str, Any]) -> Checkup:
    """Returns the losses of a session. Raises KeyError, TypeError or ValueError for what is no session."""
    turns: Sequence[_Turn] = session["turns"]
    first = int(session["num_turns"]) - len(turns) + 1
    linked = [
        LinkedTurn(str(turn.get("id")), turn.get("previous"), tuple(_losses(turn, number)))
        for number, turn in enumerate(turns, first)
    ]
    kept = [turn["kept"] for turn in turns if turn["kept"] is not None]
    return Checkup(
        name=str(session["id"]),
        num_turns=int(session["num_turns"]),
        kept=sum(kept) / len(kept) if kept else None,
        losses=tuple(in_hindsight(linked)),
        num_seen=len(turns),
        began=float(session["created"]),
        ended=float(session["last_used"]),
    )


def refused_of(refusal: Mapping[str, Any]) -> Refused:
    """Returns a refused request. Raises KeyError, TypeError or ValueError for what is no refusal."""
    session_id = refusal["session_id"]
    return Refused(
        str(refusal["path"]),
        None if session_id is None else str(session_id),
        int(refusal["status"]),
        str(refusal["code"]),
        str(refusal["message"]),
        int(refusal["count"]),
    )


def _losses(turn: _Turn, number: int) -> Iterator[Loss]:
    evaluated = int(turn["evaluated_tokens"])
    seconds_per_token = float(turn["prompt_ms"]) / 1000 / evaluated if evaluated else 0.0
    for miss in turn["misses"]:
        tokens = min(int(miss["lost_tokens"]), evaluated)
        loss = loss_of(
            number,
            reason=MissReason(miss["reason"]),
            cause=Cause(miss["cause"]),
            index=miss["message_index"],
            role=miss["role"],
            tokens=tokens,
            seconds=tokens * seconds_per_token,
            before=miss["before"],
            after=miss["after"],
            is_hidden=not miss["lost_tokens"],
        )
        if loss is not None:
            yield loss
