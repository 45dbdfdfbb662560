"""The log of one answer: how far a long prompt is, and one entry at the end. Used on the event loop."""

import logging
import time

from server.api.answer_figures import AnswerFigures
from server.api.errors import as_api_error
from server.api.session_records import TurnRecord
from server.engine.request import GenerationRequest, Progress, Timings
from server.log_events import MissFigures, PrefillProgress, RequestEnded

logger = logging.getLogger(__name__)

LONG_PREFILL_SECONDS = 3.0
"""A prompt that takes longer shows in the log how far it is."""
PROGRESS_SECONDS = 2.0
"""Time between two such entries of one request."""


class AnswerLog:
    """Writes the entries of one request."""

    def __init__(
        self,
        request: GenerationRequest,
        model_id: str,
        received: float,
        figures: AnswerFigures,
        key_name: str | None = None,
    ) -> None:
        """`received` is `time.monotonic()` when the request came; `figures` are kept up by the caller."""
        self._key_name = key_name
        self._request = request
        self._model_id = model_id
        self._received = received
        self._figures = figures
        self._next_note_at: float | None = None
        """None until the first one."""
        self._num_notes = 0

    def note_progress(self, progress: Progress, session_id: str | None) -> None:
        """Tells how far a long prompt is, every few seconds."""
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
        """Tells how the request ended; `turn` is None for one that never held a slot."""
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
    """Returns why and where, without the words that changed: they are the prompt's, which may be private."""
    miss = turn.miss
    if miss is None:
        return None
    seconds = round(turn.lost_seconds, 3)
    return MissFigures(
        miss.reason.value, miss.cause.value, miss.message_index, miss.role, miss.token, turn.lost_tokens, seconds
    )
