"""Requests: while one runs, the record once one has ended, and the costs as dialects write them.

An `OpenRequest` follows one choice's engine request; one `RequestRecord` is made of all at the end, however they end.
Knows no dialect and no conversation. Event loop only.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NotRequired

from typing_extensions import TypedDict

from server.api.errors import as_api_error
from server.api.sessions import TokenCounts, TurnRecord
from server.api.wire import body_of
from server.app.log_events import MissFigures, PrefillProgress, RequestEnded
from server.diagnosis.account import EvaluatedTurn, Name
from server.diagnosis.causes import Healed, Miss, Reuse
from server.diagnosis.prompt import Prompt, RepeatedCall
from server.engine.request import Delta, Event, Failed, Finished, GenerationRequest, Progress, Started, Timings

logger = logging.getLogger(__name__)


CANCELLED = "cancelled"
"""The outcome of a request whose client left, or whose server stopped."""
LONG_PREFILL_SECONDS = 3.0
"""The log shows the progress of longer prompts."""
PROGRESS_SECONDS = 2.0


@dataclass(frozen=True)
class Arrival:
    """How and when a client's request came."""

    endpoint: str
    received: float
    """`time.monotonic()`."""
    key_name: str | None = None
    trace_parent: str | None = None
    client: str = ""
    """The first word of its `User-Agent`."""


@dataclass(eq=False)
class OpenRequest:
    """One engine request so far."""

    request: GenerationRequest
    model_id: str
    arrival: Arrival
    is_first: bool = True
    repeats_prompt: bool = False
    """Whether the previous choice counts the same prompt."""
    asked: Prompt | None = None
    """None without a conversation or text."""
    name: Name | None = None
    """The conversation's; None before the request holds a slot, or without one."""
    previous_id: str | None = None
    """The request of the conversation's last turn."""
    started: Started | None = None
    started_at: float = 0.0
    """`time.monotonic()` at its slot."""
    first_text_at: float | None = None
    evaluated_tokens: int = 0
    """Prompt tokens evaluated, without restored ones."""
    predicted_tokens: int = 0
    timings: Timings | None = None
    """The times of an answer that reached its end or limit."""
    outcome: str | None = None
    """How the request ended; None before that."""
    error: Exception | None = None
    tool_calls: tuple[str, Mapping[str, int]] = ("", {})
    """The format of the answer's calls, and how many there were, by outcome."""
    repeated_call: RepeatedCall | None = None
    """In the conversation and this answer."""
    _log_due: float = 0.0
    """When a long prompt's next progress entry is, and the number of those before."""
    _num_logged: int = 0
    _logged: tuple[float, int] = (0.0, 0)
    """When the latest entry was, or the start, and the tokens evaluated until then."""

    @property
    def who(self) -> dict[str, str | None]:
        """Which request, and whose."""
        fields = {"id": self.request.request_id, "model": self.model_id, "namespace": self.request.namespace}
        return {**fields, "key": self.arrival.key_name, "session_id": self.session_id}

    @property
    def turn_so_far(self) -> EvaluatedTurn | None:
        """The prompt as a turn; None if nobody has said what it is made of."""
        if self.asked is None:
            return None
        request, tokens = self.request, self.request.tokens
        turn = EvaluatedTurn(self.asked, tokens=tokens, num_prompt_tokens=len(tokens))
        return replace(turn, outline=request.outline, head_tokens=request.head_tokens)

    @property
    def session_id(self) -> str | None:
        return self.request.session_id if self.name is None else self.name.id

    @property
    def prompt_tokens(self) -> int:
        """With the questions of a request that scores options, once it has ended."""
        return len(self.request.tokens) if self.timings is None else self.cached_tokens + self.evaluated_tokens

    @property
    def cached_tokens(self) -> int:
        restored = 0 if self.started is None else self.started.hit_tokens
        return restored if self.timings is None else self.timings.cache_tokens

    @property
    def tier(self) -> str | None:
        return None if self.started is None else self.started.tier

    @property
    def has_ended(self) -> bool:
        """Neither cancelled nor failed."""
        return self.timings is not None

    @property
    def failure(self) -> str | None:
        return None if self.error is None else type(self.error).__name__

    @property
    def first_text_ms(self) -> float | None:
        """From the arrival."""
        return None if self.first_text_at is None else round(1000 * (self.first_text_at - self.arrival.received), 1)

    @property
    def phase(self) -> str:
        """`waiting`, `prefill` or `decode`."""
        if self.started is None:
            return "waiting"
        return "prefill" if self.first_text_at is None else "decode"

    @property
    def progress(self) -> str:
        prefill = f"prefill {self.cached_tokens + self.evaluated_tokens} of {len(self.request.tokens)}"
        return {"waiting": "waiting", "prefill": prefill, "decode": "generating"}[self.phase]

    def observe(self, event: Event) -> None:
        """Counts an event."""
        match event:
            case Delta():
                self.predicted_tokens += len(event.token_ids)
                self.first_text_at = self.first_text_at or time.monotonic()
            case Started():
                self.started, self.started_at = event, time.monotonic()
                self._logged = self.started_at, 0
                self._log_due = self.started_at + LONG_PREFILL_SECONDS
            case Progress():
                self.evaluated_tokens = event.evaluated - self.cached_tokens
                if self.is_first and logger.isEnabledFor(logging.INFO):
                    self._log_progress(event)
            case Finished(reason, timings=timings):
                self.predicted_tokens, self.outcome = timings.predicted_tokens, reason.value
                if self.outcome != CANCELLED:
                    self.evaluated_tokens, self.timings = timings.evaluated_tokens, timings
            case Failed():
                self.error = event.error
                self.outcome = f"failed ({self.failure})"

    def _log_progress(self, progress: Progress) -> None:
        now = time.monotonic()
        if now < self._log_due or progress.evaluated >= progress.total - 1:
            return
        # Tokens cost more the further they are in: the speed of late tells more of the time to go.
        logged_at, num_tokens = self._logged
        tokens = (progress.evaluated, progress.total, (self.evaluated_tokens - num_tokens) / (now - logged_at))
        logger.info(PrefillProgress(self.request.request_id, self.session_id, *tokens, self._num_logged))
        self._log_due, self._num_logged = now + PROGRESS_SECONDS, self._num_logged + 1
        self._logged = now, self.evaluated_tokens


def counts_of(choices: Sequence[OpenRequest]) -> TokenCounts:
    """The tokens so far."""
    prompts = [one for one in choices if one is choices[0] or not one.repeats_prompt]
    return TokenCounts(
        prompt_tokens=sum(one.prompt_tokens for one in prompts),
        cached_tokens=sum(one.cached_tokens for one in prompts),
        evaluated_tokens=sum(one.evaluated_tokens for one in prompts),
        completion_tokens=sum(one.predicted_tokens for one in choices),
    )


@dataclass(frozen=True, eq=False)
class RequestRecord:
    """A request that has ended in any way. Immutable."""

    choices: tuple[OpenRequest, ...]
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

    @property
    def total_seconds(self) -> float:
        return self.ended - self.first.arrival.received

    @property
    def failure(self) -> str | None:
        """The failure's name for programs; None for an answer that reached its end or limit."""
        return None if self.first.has_ended else self.first.failure or CANCELLED

    @cached_property
    def turn(self) -> TurnRecord:
        """What the request cost: a turn of its session, if the request held a slot."""
        first, counts = self.first, counts_of(self.choices)
        reuse = first.started.reuse if first.started is not None else Reuse()
        lost_tokens = min(reuse.lost_tokens, first.evaluated_tokens)
        # For an answer that was cut off, the time so far.
        prompt_ms = 1000 * ((first.first_text_at or self.ended) - (first.started_at or self.ended))
        if first.timings is not None:
            prompt_ms = first.timings.prompt_ms
        return TurnRecord(
            id=first.request.request_id,
            previous=first.previous_id,
            model=first.model_id,
            ended=self.ended_at,
            finish=first.outcome or CANCELLED,
            **vars(counts),
            prompt_ms=prompt_ms,
            tier=first.tier,
            rounded_tokens=0 if first.started is None else first.started.rounded_tokens,
            kept=reuse.kept,
            lost_tokens=lost_tokens,
            lost_seconds=prompt_ms / 1000 * min(1.0, lost_tokens / max(counts.evaluated_tokens, 1)),
            miss=reuse.miss,
            misses=list(reuse.misses),
            healed=reuse.healed,
        )


_LOGGED = ("model", "prompt_tokens", "cached_tokens", "evaluated_tokens", "finish", "kept", "tier")


def log_end(record: RequestRecord) -> None:
    """Logs the request's entry, unless the client got an error only."""
    if not record.is_refused and logger.isEnabledFor(logging.INFO):
        logger.info(ended_entry(record))


def ended_entry(record: RequestRecord) -> RequestEnded:
    """The log entry of a request, without its prompt's changed words, which may be private."""
    first, turn, miss, miss_figures = record.first, record.turn, record.turn.miss, None
    if miss is not None:
        place = (miss.reason, miss.cause, miss.message_index, miss.role, miss.token)
        miss_figures = MissFigures(*place, turn.lost_tokens, round(turn.lost_seconds, 3))
    known = as_api_error(first.error) if first.error is not None else None
    timed = [one.timings for one in record.choices if one.timings is not None]
    token_ms = first.timings.token_ms if first.timings is not None else None
    return RequestEnded(
        request_id=turn.id,
        session_id=first.session_id,
        turn=record.turn_number,
        predicted_tokens=turn.completion_tokens,
        first_token_ms=first.first_text_ms,
        total_ms=round(1000 * record.total_seconds, 1),
        tokens_per_second=round(1000 / token_ms, 2) if token_ms else None,
        drafted_tokens=sum(one.drafted_tokens for one in timed),
        accepted_tokens=sum(one.accepted_tokens for one in timed),
        error=known.message if known else first.failure,
        miss=miss_figures,
        key=first.arrival.key_name,
        **{name: getattr(turn, name) for name in _LOGGED},
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
    draft_n: NotRequired[int]
    """This and the next only if anything was drafted."""
    draft_n_accepted: NotRequired[int]


class CacheBody(TypedDict):
    """How much of the prompt was reused, from where, and why not more."""

    session_id: str | None
    slot: int
    match_tokens: int
    hit_tokens: int
    tier: str | None
    restore_ms: float
    kept: float | None
    miss: Miss | None
    healed: Healed | None


class PromptProgress(TypedDict):
    """How much of a prompt is evaluated, in llama.cpp's words."""

    total: int
    cache: int
    processed: int
    """`cache` included."""
    time_ms: int
    """Since the request got its slot."""


class AnswerCosts(TypedDict):
    """What an answer cost."""

    timings: TimingsBody
    cache: CacheBody | None


class CostsAtEnd(TypedDict, total=False):
    """What an answer cost, once it has ended."""

    timings: TimingsBody
    cache: CacheBody | None


class ProgressTold(TypedDict, total=False):
    """How far the prompt is, in chunks before the first output, if requested."""

    prompt_progress: PromptProgress


def progress_of(run: OpenRequest) -> PromptProgress:
    """The progress of a request that has a slot."""
    total, cache = len(run.request.tokens), run.cached_tokens
    processed = total if run.phase == "decode" else cache + run.evaluated_tokens
    time_ms = round(1000 * (time.monotonic() - run.started_at))
    return {"total": total, "cache": cache, "processed": processed, "time_ms": time_ms}


def costs_of(finished: Finished, session_id: str | None) -> AnswerCosts:
    """Timings and reuse of a finished request."""
    return {"timings": timings_of(finished.timings), "cache": cache_of(finished.started, session_id)}


def cache_of(started: Started | None, session_id: str | None) -> CacheBody | None:
    """A prompt's reuse; None if the request never held a slot."""
    if started is None:
        return None
    reuse = started.reuse
    reasons = {"kept": reuse.kept, "miss": reuse.miss, "healed": reuse.healed}
    return body_of(CacheBody, started, session_id=session_id, **reasons)


def timings_of(timings: Timings) -> TimingsBody:
    """Costs in milliseconds and tokens per second."""
    num_prompt, num_predicted = timings.evaluated_tokens, timings.predicted_tokens
    drafts = {"draft_n": timings.drafted_tokens, "draft_n_accepted": timings.accepted_tokens}
    return body_of(
        TimingsBody,
        timings,
        cache_n=timings.cache_tokens,
        prompt_n=num_prompt,
        prompt_per_token_ms=_ratio(timings.prompt_ms, num_prompt),
        prompt_per_second=_ratio(1000 * num_prompt, timings.prompt_ms),
        predicted_n=num_predicted,
        predicted_per_token_ms=_ratio(timings.predicted_ms, num_predicted),
        predicted_per_second=_ratio(1000 * num_predicted, timings.predicted_ms),
        **drafts if timings.drafted_tokens else {},
    )


def _ratio(amount: float, of: float) -> float | None:
    return amount / of if of > 0 else None
