"""What is known of a request while it runs, its record once ended, and what dialects write of its costs.

An `OpenRequest` follows one choice's engine request; one `RequestRecord` is made of all at the end, however they end.
Subscribers are told each `Moment` and the record. Knows no dialect and no conversation. Event loop only.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from typing_extensions import TypedDict

from server.api.errors import as_api_error
from server.api.sessions import TurnRecord
from server.app.log_events import MissFigures, PrefillProgress, RequestEnded
from server.diagnosis.account import Name
from server.diagnosis.advice import TOOLS, advice
from server.engine.diagnosis import Miss, MissReason
from server.engine.request import (
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    Progress,
    Started,
    Timings,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arrival:
    """How and when a client's request came."""

    endpoint: str
    received: float
    """`time.monotonic()`."""
    key_name: str | None = None
    trace_parent: str | None = None


@dataclass(eq=False)
class OpenRequest:
    """One engine request so far; only `observe` changes it."""

    request: GenerationRequest
    model_id: str
    arrival: Arrival
    is_first: bool = True
    """Whether it reports for all choices."""
    repeats_prompt: bool = False
    """Whether the choice before counts the same prompt."""
    session_id: str | None = None
    received_at: float = field(default_factory=time.time)
    """Seconds since 1970."""
    started: Started | None = None
    started_at: float = 0.0
    """`time.monotonic()` at its slot."""
    first_text_at: float | None = None
    num_evaluated: int = 0
    """Without restored tokens."""
    num_predicted: int = 0
    timings: Timings | None = None
    """None until the last event."""
    outcome: str | None = None
    """None before its end."""
    error: Exception | None = None

    @property
    def num_cached(self) -> int:
        return 0 if self.started is None else self.started.hit_tokens

    @property
    def tier(self) -> str | None:
        return None if self.started is None else self.started.tier

    @property
    def is_complete(self) -> bool:
        """Whether the model ended the answer by itself."""
        return self.outcome == FinishReason.STOP.value

    @property
    def has_ended(self) -> bool:
        """Neither cancelled nor failed."""
        return self.outcome in (FinishReason.STOP.value, FinishReason.LENGTH.value)

    @property
    def phase(self) -> str:
        """`waiting`, `prefill` or `decode`."""
        if self.started is None:
            return "waiting"
        return "prefill" if self.first_text_at is None else "decode"

    @property
    def progress(self) -> str:
        if self.started is None:
            return "waiting"
        if self.first_text_at is not None:
            return "generating"
        return f"prefill {self.num_cached + self.num_evaluated} of {self.started.prompt_tokens}"

    def observe(self, event: Event) -> None:
        """Counts an event."""
        match event:
            case Delta():
                self.num_predicted += len(event.token_ids)
                self.first_text_at = self.first_text_at or time.monotonic()
            case Started():
                self.started, self.started_at = event, time.monotonic()
            case Progress():
                self.num_evaluated = event.evaluated - self.num_cached
            case Finished():
                if event.reason is not FinishReason.CANCELLED:
                    self.num_evaluated = event.timings.evaluated_tokens
                self.num_predicted = event.timings.predicted_tokens
                self.outcome, self.timings = event.reason.value, event.timings
            case Failed():
                self.outcome, self.error = f"failed ({type(event.error).__name__})", event.error


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of all choices; a shared prompt counts once."""

    prompt: int
    cached: int
    evaluated: int
    predicted: int

    @classmethod
    def of(cls, choices: Sequence[OpenRequest]) -> "TokenCounts":
        """Returns the tokens so far."""
        prompts = [one for one in choices if not one.repeats_prompt]
        return cls(
            prompt=sum(len(one.request.tokens) for one in prompts),
            cached=sum(one.num_cached for one in prompts),
            evaluated=sum(one.num_evaluated for one in prompts),
            predicted=sum(one.num_predicted for one in choices),
        )


@dataclass(frozen=True, eq=False)
class RequestRecord:
    """A client's request that has ended in any way; never changes."""

    choices: tuple[OpenRequest, ...]
    name: Name | None = None
    """Set if a turn of one was evaluated."""
    previous_id: str | None = None
    turn_number: int | None = None
    """From 1."""
    saved_seconds: float = 0.0
    """Time that evaluating the restored tokens would have taken."""
    is_refused: bool = False
    """The client gets an error only, with a log entry of its own."""
    ended: float = field(default_factory=time.monotonic)
    ended_at: float = field(default_factory=time.time)
    """Seconds since 1970."""

    @property
    def first(self) -> OpenRequest:
        return self.choices[0]

    @cached_property
    def counts(self) -> TokenCounts:
        """Of all choices."""
        return TokenCounts.of(self.choices)

    @property
    def total_seconds(self) -> float:
        return self.ended - self.first.arrival.received

    @property
    def failure(self) -> str | None:
        """For programs; None for an answer that reached its end or limit."""
        if self.first.has_ended:
            return None
        return type(self.first.error).__name__ if self.first.error is not None else "cancelled"

    @cached_property
    def turn(self) -> TurnRecord | None:
        """None for a request that never held a slot."""
        first, counts = self.first, self.counts
        if first.started is None:
            return None
        reuse = first.started.reuse
        return TurnRecord(
            request_id=first.request.request_id,
            model_id=first.model_id,
            ended=self.ended_at,
            finish=first.outcome or "cancelled",
            prompt_tokens=counts.prompt,
            cached_tokens=counts.cached,
            evaluated_tokens=counts.evaluated,
            predicted_tokens=counts.predicted,
            prompt_ms=self._prompt_ms(),
            tier=first.tier,
            kept=reuse.kept,
            lost_tokens=min(reuse.lost_tokens, first.num_evaluated),
            previous_id=self.previous_id,
            misses=reuse.misses or (() if reuse.miss is None else (reuse.miss,)),
        )

    def _prompt_ms(self) -> float:
        """For an answer that was cut off, the time so far."""
        first = self.first
        if first.timings is not None and first.has_ended:
            return first.timings.prompt_ms
        return 1000 * ((first.first_text_at or self.ended) - first.started_at)


@dataclass(frozen=True, eq=False)
class Moment:
    """Something that happened to a request while it runs."""

    of: OpenRequest
    event: Started | Progress | Delta | None = None
    """None: the request waits for a slot. A delta is the first."""


Told: TypeAlias = Moment | RequestRecord
Subscriber: TypeAlias = Callable[[Told], None]

LONG_PREFILL_SECONDS = 3.0
"""The log shows the progress of longer prompts."""
PROGRESS_SECONDS = 2.0
"""Between progress entries of one request."""


class RequestLog:
    """Logs the progress of long prompts, and one entry per request."""

    def __init__(self) -> None:
        self._noted: dict[OpenRequest, tuple[float, int]] = {}
        """When the next progress entry is due, and their number."""

    def tell(self, told: Told) -> None:
        """Logs what is due."""
        if isinstance(told, RequestRecord):
            self._noted.pop(told.first, None)
            if not told.is_refused and logger.isEnabledFor(logging.INFO):
                logger.info(ended_entry(told))
        elif isinstance(told.event, Progress) and told.of.is_first:
            self._note_progress(told.of, told.event)

    def _note_progress(self, one: OpenRequest, progress: Progress) -> None:
        now = time.monotonic()
        due, number = self._noted.get(one, (one.started_at + LONG_PREFILL_SECONDS, 0))
        if now < due or progress.evaluated >= progress.total - 1 or not logger.isEnabledFor(logging.INFO):
            return
        self._noted[one] = now + PROGRESS_SECONDS, number + 1
        entry = PrefillProgress(
            request_id=one.request.request_id,
            session_id=one.session_id,
            evaluated_tokens=progress.evaluated,
            prompt_tokens=progress.total,
            tokens_per_second=one.num_evaluated / (now - one.started_at),
            number=number,
        )
        logger.info(entry)


def ended_entry(record: RequestRecord) -> RequestEnded:
    """Returns the log entry of a request."""
    first, counts, turn = record.first, record.counts, record.turn
    received, first_text_at = first.arrival.received, first.first_text_at
    return RequestEnded(
        request_id=first.request.request_id,
        session_id=first.session_id,
        model=first.model_id,
        turn=record.turn_number,
        prompt_tokens=counts.prompt,
        cached_tokens=counts.cached,
        evaluated_tokens=counts.evaluated,
        predicted_tokens=counts.predicted,
        first_token_ms=None if first_text_at is None else round(1000 * (first_text_at - received), 1),
        total_ms=round(1000 * record.total_seconds, 1),
        tokens_per_second=_speed_of(first.timings) if first.timings else None,
        finish=first.outcome or "cancelled",
        error=_reason_of(first.error) if first.error else None,
        kept=turn.kept if turn else None,
        tier=turn.tier if turn else None,
        miss=_miss_of(turn) if turn else None,
        key=first.arrival.key_name,
    )


def _speed_of(timings: Timings) -> float | None:
    """Tokens per second, from the first token to the last."""
    seconds, num_later = timings.predicted_ms / 1000, timings.predicted_tokens - 1
    return round(num_later / seconds, 2) if seconds > 0 and num_later > 0 else None


def _reason_of(error: Exception) -> str:
    known = as_api_error(error)
    return known.message if known else type(error).__name__


def _miss_of(turn: TurnRecord) -> MissFigures | None:
    """Leaves out the prompt's changed words, which may be private."""
    miss = turn.miss
    if miss is None:
        return None
    seconds = round(turn.lost_seconds, 3)
    return MissFigures(
        miss.reason.value, miss.cause.value, miss.message_index, miss.role, miss.token, turn.lost_tokens, seconds
    )


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
    """Returns a prompt's reuse; None if it never held a slot."""
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
    """Returns a miss in the form of answers; None for None."""
    return None if miss is None else miss_body(miss)


def miss_body(miss: Miss) -> MissBody:
    """Returns a miss in the form of answers."""
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
    """Returns a finished request's costs in milliseconds and tokens per second."""
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
