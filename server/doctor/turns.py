"""From a session as `/v1/sessions/{id}` tells it to a checkup. Pure: reads JSON values, asks nobody."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from server.doctor.findings import Checkup, Loss, Refused, loss_of
from server.doctor.hindsight import LinkedTurn, in_hindsight
from server.engine.diagnosis import Cause, MissReason

_Turn = Mapping[str, Any]


def checkup_of(session: Mapping[str, Any]) -> Checkup:
    """Returns what is wrong with a session. Raises KeyError, TypeError or ValueError for what is no session."""
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
    """Returns what was refused. Raises KeyError, TypeError or ValueError for what is no refusal."""
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
