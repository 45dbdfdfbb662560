"""From a session as `/v1/sessions/{id}` tells it to a checkup. Pure: reads JSON values, asks nobody."""

from collections.abc import Mapping, Sequence
from typing import Any

from server.doctor.causes import Cause, classify_text
from server.doctor.findings import Checkup, Loss, is_negligible, place_name

RESUMED_WITHIN = 4
"""Turns after a side request within which the conversation that it stood beside goes on."""

_BY_REASON = {
    "evicted": Cause.EVICTED,
    "no_restore_point": Cause.NOT_RESTORABLE,
    "disabled": Cause.DECLINED,
}

_Turn = Mapping[str, Any]


def checkup_of(session: Mapping[str, Any]) -> Checkup:
    """Returns what is wrong with a session. Raises KeyError or TypeError for what is no session."""
    turns: Sequence[_Turn] = session["turns"]
    first = int(session["num_turns"]) - len(turns) + 1
    losses = [loss for index in range(len(turns)) if (loss := _loss(turns, index, first + index)) is not None]
    kept = [turn["kept"] for turn in turns if turn["kept"] is not None]
    return Checkup(
        name=str(session["id"]),
        num_turns=int(session["num_turns"]),
        kept=sum(kept) / len(kept) if kept else None,
        losses=tuple(losses),
    )


def _loss(turns: Sequence[_Turn], index: int, number: int) -> Loss | None:
    turn = turns[index]
    miss = turn["miss"]
    if miss is None or miss["reason"] == "cold":
        return None
    tokens, seconds = int(turn["lost_tokens"]), float(turn["lost_seconds"])
    if miss["reason"] == "disabled":
        # Nothing was looked for, so nothing says how much would have been found.
        tokens, seconds = int(turn["evaluated_tokens"]), float(turn["prompt_ms"]) / 1000
    if is_negligible(miss["role"], tokens):
        return None
    cause = _cause(turns, index)
    where = "tools" if miss["reason"] == "tools_changed" else place_name(miss["message_index"], miss["role"])
    if cause in (Cause.SIDE_REQUEST, Cause.TRIMMED, Cause.EVICTED, Cause.NOT_RESTORABLE, Cause.DECLINED):
        where = ""
    return Loss(number, cause, where, tokens, seconds, miss["before"], miss["after"])


def _cause(turns: Sequence[_Turn], index: int) -> Cause:
    miss = turns[index]["miss"]
    if miss["reason"] in _BY_REASON:
        return _BY_REASON[miss["reason"]]
    if miss["reason"] == "tools_changed":
        return Cause.REORDERED if miss["reordered"] else Cause.TOOLS
    if miss["dropped_tokens"]:
        return Cause.TRIMMED
    cause = classify_text(miss["before"], miss["after"])
    return Cause.SIDE_REQUEST if cause is Cause.EDITED and _is_aside(turns, index) else cause


def _is_aside(turns: Sequence[_Turn], index: int) -> bool:
    """Whether a soon following turn goes on from more than this one had, hence from an earlier one."""
    own = turns[index]["prompt_tokens"] + turns[index]["completion_tokens"]
    return any(turn["cached_tokens"] > own for turn in turns[index + 1 : index + 1 + RESUMED_WITHIN])
