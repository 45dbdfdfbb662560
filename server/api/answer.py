"""Follows one generation for its dialect: counts, times, errors, and the log line at its end.

Knows events and the clock, but no dialect's chunks. Used on the event loop.
"""

import logging
import time
from collections.abc import AsyncIterator
from typing import TypeAlias, TypedDict

from server.api.served import EnginePort
from server.engine.errors import EngineStopped
from server.engine.events import Delta, Event, Failed, Finished, FinishReason, Progress, Started, Timings
from server.engine.request import GenerationRequest

logger = logging.getLogger(__name__)

OutputEvent: TypeAlias = Delta | Finished


class PromptTokensDetails(TypedDict):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class Usage(TypedDict):
    """Token counts of one request, as OpenAI names them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


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


class Answer:
    """One request from the moment it was received to its last event."""

    def __init__(self, engine: EnginePort, model_id: str, request: GenerationRequest, received: float) -> None:
        """Submits the request; raises QueueFull or EngineStopped at once. `received` is `time.monotonic()`."""
        self.request = request
        self._model_id = model_id
        self._received = received
        self._generation = engine.submit(request)
        self._num_cached = 0
        self._num_predicted = 0
        self._first_text: float | None = None
        self._outcome: str | None = None
        self._is_closed = False
        self._progress = "waiting"

    async def events(self) -> AsyncIterator[OutputEvent]:
        """Yields text and the end; raises the engine's error where the request failed or was stopped."""
        async for event in self._generation:
            self._observe(event)
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished) and event.reason is FinishReason.CANCELLED:
                # The client is still there, so it was not the client who cancelled.
                raise EngineStopped("the server stopped before the answer was complete")
            if isinstance(event, OutputEvent):
                yield event

    def progress(self) -> str:
        """Returns in a few words what the request is waiting for."""
        return self._progress

    def close(self) -> None:
        """Cancels what still runs and logs the request, once; call it on every way out."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._outcome is None:
            self._generation.cancel()
        self._log(self._outcome or "cancelled")

    def _observe(self, event: Event) -> None:
        match event:
            case Started():
                self._num_cached = event.hit_tokens
                self._progress = f"prefill {event.hit_tokens} of {event.prompt_tokens}"
            case Progress():
                self._progress = f"prefill {event.evaluated} of {event.total}"
            case Delta():
                self._progress = "generating"
                self._num_predicted += len(event.token_ids)
                self._first_text = self._first_text or time.monotonic()
            case Finished():
                self._num_cached = event.timings.cache_tokens
                self._num_predicted = event.timings.predicted_tokens
                self._outcome = event.reason.value
            case Failed():
                self._outcome = f"failed ({type(event.error).__name__})"

    def _log(self, outcome: str) -> None:
        first_ms = None if self._first_text is None else round((self._first_text - self._received) * 1000)
        logger.info(
            "%s session=%s model=%s prompt=%d cached=%d predicted=%d ttft_ms=%s total_ms=%d finish=%s",
            self.request.request_id,
            self.request.session_id or "-",
            self._model_id,
            len(self.request.tokens),
            self._num_cached,
            self._num_predicted,
            "-" if first_ms is None else first_ms,
            round((time.monotonic() - self._received) * 1000),
            outcome,
        )


def usage_of(finished: Finished) -> Usage:
    """Returns the token counts of a finished request."""
    predicted = finished.timings.predicted_tokens
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": predicted,
        "total_tokens": finished.prompt_tokens + predicted,
        "prompt_tokens_details": {"cached_tokens": finished.timings.cache_tokens},
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


def finish_reason(finished: Finished, *, made_calls: bool = False) -> str:
    """Returns OpenAI's word for why the answer ended."""
    if made_calls and finished.reason is FinishReason.STOP:
        return "tool_calls"
    return finished.reason.value
