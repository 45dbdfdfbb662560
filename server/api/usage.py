"""What answers of every dialect say of their costs: times, what was reused, and why not more."""

from typing import TypedDict

from server.diagnosis.advice import TOOLS, advice
from server.engine.diagnosis import Miss, MissReason
from server.engine.request import Finished, Started, Timings


class TimingsBody(TypedDict):
    """What the answer cost; `cache_n + prompt_n` = prompt tokens. Rates are null where nothing was timed."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float | None
    predicted_per_second: float | None


class MissBody(TypedDict):
    """One thing that was lost of what the conversation's last turn left, and what to do about it."""

    reason: str
    cause: str
    message_index: int | None
    role: str | None
    token: int | None
    before: str
    after: str
    lost_tokens: int
    cure: str


class CacheBody(TypedDict):
    """What of the prompt was reused, from where, and why not more."""

    session_id: str | None
    slot: int
    match_tokens: int
    hit_tokens: int
    tier: str | None
    restore_ms: float
    kept: float | None
    miss: MissBody | None


class Costs(TypedDict):
    """What an answer cost."""

    timings: TimingsBody
    cache: CacheBody | None


def costs_of(finished: Finished, session_id: str | None) -> Costs:
    """Returns timings and reuse of a finished request."""
    return {"timings": timings_of(finished.timings), "cache": cache_of(finished.started, session_id)}


def cache_of(started: Started | None, session_id: str | None) -> CacheBody | None:
    """Returns what of a prompt was reused; None for a request that was cancelled before it started."""
    if started is None:
        return None
    return {
        "session_id": session_id,
        "slot": started.slot,
        "match_tokens": started.match_tokens,
        "hit_tokens": started.hit_tokens,
        "tier": started.tier,
        "restore_ms": started.restore_ms,
        "kept": started.reuse.kept,
        "miss": miss_of(started.reuse.miss),
    }


def miss_of(miss: Miss | None) -> MissBody | None:
    """Returns a miss as answers hold it."""
    return None if miss is None else miss_body(miss)


def miss_body(miss: Miss) -> MissBody:
    """Returns a miss as answers hold it."""
    return {
        "reason": miss.reason.value,
        "cause": miss.cause.value,
        "message_index": miss.message_index,
        "role": miss.role,
        "token": miss.token,
        "before": miss.before,
        "after": miss.after,
        "lost_tokens": miss.lost_tokens,
        "cure": advice(miss.cause, TOOLS if miss.reason is MissReason.TOOLS_CHANGED else miss.role),
    }


def timings_of(timings: Timings) -> TimingsBody:
    """Returns the costs of a finished request in milliseconds and tokens per second."""
    prompt_per_token, prompt_rate = _rates(timings.evaluated_tokens, timings.prompt_ms)
    predicted_per_token, predicted_rate = _rates(timings.predicted_tokens, timings.predicted_ms)
    return {
        "cache_n": timings.cache_tokens,
        "prompt_n": timings.evaluated_tokens,
        "prompt_ms": timings.prompt_ms,
        "prompt_per_token_ms": prompt_per_token,
        "prompt_per_second": prompt_rate,
        "predicted_n": timings.predicted_tokens,
        "predicted_ms": timings.predicted_ms,
        "predicted_per_token_ms": predicted_per_token,
        "predicted_per_second": predicted_rate,
    }


def _rates(num_tokens: int, milliseconds: float) -> tuple[float | None, float | None]:
    per_token = milliseconds / num_tokens if num_tokens else None
    per_second = 1000 * num_tokens / milliseconds if milliseconds > 0 else None
    return per_token, per_second
