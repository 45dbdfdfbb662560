"""What is counted and timed of one answer, from its events. Knows the clock, but no dialect and no conversation."""

import time

from server.api.session_records import TurnRecord
from server.engine.diagnosis import Miss
from server.engine.events import Delta, Event, Failed, Finished, FinishReason, Progress, Started, Timings
from server.engine.request import GenerationRequest


class AnswerFigures:
    """One answer so far. Used on the event loop."""

    def __init__(self) -> None:
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
        reuse = started.reuse
        return TurnRecord(
            request_id=request.request_id,
            model_id=model_id,
            ended=time.time(),
            finish=self.outcome or "cancelled",
            prompt_tokens=len(request.tokens),
            cached_tokens=started.hit_tokens,
            evaluated_tokens=self.num_evaluated,
            predicted_tokens=self.num_predicted,
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
