"""What is counted and timed of one answer, from its events. Knows the clock, but no dialect and no conversation."""

import time
from dataclasses import dataclass

from server.api.session_records import TurnRecord
from server.engine.diagnosis import Miss
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


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of a request with all of its choices; those of a prompt that several choices have count once."""

    prompt: int
    cached: int
    evaluated: int
    predicted: int


class AnswerFigures:
    """One answer so far. Used on the event loop."""

    def __init__(self, num_prompt: int) -> None:
        """`num_prompt` is the number of the prompt's tokens."""
        self.others: list[AnswerFigures] = []
        """Those of the request's other choices, for the one that tells of all."""
        self.repeats_prompt = False
        """Whether the prompt's tokens are counted with another choice."""
        self._num_prompt = num_prompt
        self.started: Started | None = None
        self.started_at = 0.0
        """`time.monotonic()` when the request got a slot."""
        self.first_text_at: float | None = None
        self.num_evaluated = 0
        """Prompt tokens evaluated, restored ones left out."""
        self.num_predicted = 0
        self.timings: Timings | None = None
        """The engine's own measurement; None until the last event."""
        self.outcome: str | None = None
        """Why the answer ended; None until it does."""
        self.error: Exception | None = None
        self.progress = "waiting"
        """In a few words, what the request is waiting for."""

    @property
    def is_complete(self) -> bool:
        """Whether the model ended the answer by itself."""
        return self.outcome == FinishReason.STOP.value

    @property
    def has_ended(self) -> bool:
        """Whether the answer was given to its end or limit, neither cancelled nor failed."""
        return self.outcome in (FinishReason.STOP.value, FinishReason.LENGTH.value)

    @property
    def counts(self) -> TokenCounts:
        """The tokens so far, those of the other choices included."""
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
        """Returns the turn that the request was, as far as it has come."""
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
        """Returns the time for the prompt: as the engine measured it, or so far where the answer was cut off."""
        if self.timings is not None and self.has_ended:
            return self.timings.prompt_ms
        return 1000 * ((self.first_text_at or time.monotonic()) - self.started_at)


def _one(miss: Miss | None) -> tuple[Miss, ...]:
    return () if miss is None else (miss,)
