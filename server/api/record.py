"""Counts, times and logs one answer from its events, and writes its costs for every dialect.

Knows the clock, but no dialect and no conversation. Event loop only.
"""

import logging
import time
from dataclasses import dataclass

from typing_extensions import TypedDict

from server.api.errors import as_api_error
from server.api.sessions import TurnRecord
from server.app.log_events import MissFigures, PrefillProgress, RequestEnded
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
class TokenCounts:
    """Tokens of a request with all of its choices; a shared prompt counts once."""

    prompt: int
    cached: int
    evaluated: int
    predicted: int


class AnswerFigures:
    """The figures of one answer so far. Event loop only."""

    def __init__(self, num_prompt: int) -> None:
        """`num_prompt` is the number of prompt tokens."""
        self.others: list[AnswerFigures] = []
        """The figures of the request's other choices, if this is the first choice."""
        self.repeats_prompt = False
        """Whether another choice already counts the prompt's tokens."""
        self._num_prompt = num_prompt
        self.started: Started | None = None
        self.started_at = 0.0
        """`time.monotonic()` when the request got a slot."""
        self.first_text_at: float | None = None
        self.num_evaluated = 0
        """Prompt tokens evaluated, without restored ones."""
        self.num_predicted = 0
        self.timings: Timings | None = None
        """The engine's measurement; None until the last event."""
        self.outcome: str | None = None
        """Why the answer ended; None before its end."""
        self.error: Exception | None = None
        self.progress = "waiting"
        """A few words on what the request is waiting for."""

    @property
    def is_complete(self) -> bool:
        """Whether the model ended the answer by itself."""
        return self.outcome == FinishReason.STOP.value

    @property
    def has_ended(self) -> bool:
        """Whether the answer reached its end or limit: neither cancelled nor failed."""
        return self.outcome in (FinishReason.STOP.value, FinishReason.LENGTH.value)

    @property
    def counts(self) -> TokenCounts:
        """The tokens so far, including the other choices."""
        every = [self, *self.others]
        prompts = [one for one in every if not one.repeats_prompt]
        return TokenCounts(
            prompt=sum(one._num_prompt for one in prompts),
            cached=sum(one.started.hit_tokens for one in prompts if one.started is not None),
            evaluated=sum(one.num_evaluated for one in prompts),
            predicted=sum(one.num_predicted for one in every),
        )

    def observe(self, event: Event) -> None:
        """Counts an event."""
        match event:
            case Started():
                self.started, self.started_at = event, time.monotonic()
                self.progress = f"prefill {event.hit_tokens} of {event.prompt_tokens}"
            case Progress():
                self.num_evaluated = event.evaluated - (self.started.hit_tokens if self.started else 0)
                self.progress = f"prefill {event.evaluated} of {event.total}"
            case Delta():
                self.progress = "generating"
                self.num_predicted += len(event.token_ids)
                self.first_text_at = self.first_text_at or time.monotonic()
            case Finished():
                if event.reason is not FinishReason.CANCELLED:
                    self.num_evaluated = event.timings.evaluated_tokens
                self.num_predicted = event.timings.predicted_tokens
                self.outcome, self.timings = event.reason.value, event.timings
            case Failed():
                self.outcome, self.error = f"failed ({type(event.error).__name__})", event.error

    def turn(
        self, request: GenerationRequest, model_id: str, started: Started, previous_id: str | None = None
    ) -> TurnRecord:
        """Returns the request's turn, as far as it has come."""
        reuse, counts = started.reuse, self.counts
        return TurnRecord(
            request_id=request.request_id,
            model_id=model_id,
            ended=time.time(),
            finish=self.outcome or "cancelled",
            prompt_tokens=counts.prompt,
            cached_tokens=counts.cached,
            evaluated_tokens=counts.evaluated,
            predicted_tokens=counts.predicted,
            prompt_ms=self._prompt_ms(),
            tier=started.tier,
            kept=reuse.kept,
            lost_tokens=min(reuse.lost_tokens, self.num_evaluated),
            previous_id=previous_id,
            misses=reuse.misses or _one(reuse.miss),
        )

    def _prompt_ms(self) -> float:
        """Returns the time for the prompt: the engine's measurement, or the time so far if the answer was cut off."""
        if self.timings is not None and self.has_ended:
            return self.timings.prompt_ms
        return 1000 * ((self.first_text_at or time.monotonic()) - self.started_at)


def _one(miss: Miss | None) -> tuple[Miss, ...]:
    return () if miss is None else (miss,)


LONG_PREFILL_SECONDS = 3.0
"""The log shows the progress of prompts that take longer."""
PROGRESS_SECONDS = 2.0
"""Time between two progress entries of one request."""


class AnswerLog:
    """Logs one request: the progress of a long prompt, and one entry at the end."""

    def __init__(
        self,
        request: GenerationRequest,
        model_id: str,
        received: float,
        figures: AnswerFigures,
        key_name: str | None = None,
    ) -> None:
        """`received` is `time.monotonic()` when the request came; the caller updates `figures`."""
        self._key_name = key_name
        self._request = request
        self._model_id = model_id
        self._received = received
        self._figures = figures
        self._next_note_at: float | None = None
        """None until the first entry."""
        self._num_notes = 0

    def note_progress(self, progress: Progress, session_id: str | None) -> None:
        """Logs the progress of a long prompt, every few seconds."""
        now = time.monotonic()
        began = self._figures.started_at
        is_due = now >= (began + LONG_PREFILL_SECONDS if self._next_note_at is None else self._next_note_at)
        if not is_due or progress.evaluated >= progress.total - 1 or not logger.isEnabledFor(logging.INFO):
            return
        entry = PrefillProgress(
            request_id=self._request.request_id,
            session_id=session_id,
            evaluated_tokens=progress.evaluated,
            prompt_tokens=progress.total,
            tokens_per_second=self._figures.num_evaluated / (now - began),
            number=self._num_notes,
        )
        self._next_note_at, self._num_notes = now + PROGRESS_SECONDS, self._num_notes + 1
        logger.info(entry)

    def end(self, session_id: str | None, turn: TurnRecord | None, turn_number: int | None) -> None:
        """Logs how the request ended; `turn` is None for a request that never held a slot."""
        if not logger.isEnabledFor(logging.INFO):
            return
        figures, counts = self._figures, self._figures.counts
        first = figures.first_text_at
        entry = RequestEnded(
            request_id=self._request.request_id,
            session_id=session_id,
            model=self._model_id,
            turn=turn_number,
            prompt_tokens=counts.prompt,
            cached_tokens=counts.cached,
            evaluated_tokens=counts.evaluated,
            predicted_tokens=counts.predicted,
            first_token_ms=None if first is None else round(1000 * (first - self._received), 1),
            total_ms=round(1000 * (time.monotonic() - self._received), 1),
            tokens_per_second=_speed_of(figures.timings) if figures.timings else None,
            finish=figures.outcome or "cancelled",
            error=_reason_of(figures.error) if figures.error else None,
            kept=turn.kept if turn else None,
            tier=turn.tier if turn else None,
            miss=_miss_of(turn) if turn else None,
            key=self._key_name,
        )
        logger.info(entry)


def _speed_of(timings: Timings) -> float | None:
    """Returns tokens per second. The time runs from the first token to the last, so one token fewer counts."""
    seconds, num_later = timings.predicted_ms / 1000, timings.predicted_tokens - 1
    return round(num_later / seconds, 2) if seconds > 0 and num_later > 0 else None


def _reason_of(error: Exception) -> str:
    known = as_api_error(error)
    return known.message if known else type(error).__name__


def _miss_of(turn: TurnRecord) -> MissFigures | None:
    """Returns reason and place of a miss, without the prompt's changed words, which may be private."""
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
    """Returns how much of a prompt was reused; None for a request cancelled before it started."""
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
