"""Follows one generation for its dialect: pieces of output, counts, times, errors, and the log line at its end.

Knows events and the clock, but no dialect. Used on the event loop.
"""

import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import TypeAlias

from server.api.context import EnginePort
from server.api.dialect import Exchange, OutputEvent
from server.api.errors import as_api_error
from server.api.session_records import TurnRecord
from server.api.turn_account import TurnAccount
from server.diagnosis.conversations import Conversations, Name
from server.engine.diagnosis import Miss
from server.engine.errors import EngineStopped
from server.engine.events import Delta, Event, Failed, Finished, FinishReason, Progress, Started, Timings
from server.log_events import MissFigures, PrefillProgress, RequestEnded

logger = logging.getLogger(__name__)

OnTurn: TypeAlias = Callable[[Name, TurnRecord], int]
"""Takes the conversation and its turn; returns the number of the turn there, from 1."""

LONG_PREFILL_SECONDS = 3.0
"""A prompt that takes longer shows in the log how far it is."""
PROGRESS_SECONDS = 2.0
"""Time between two such entries of one request."""


class Answer:
    """One request from the moment it was received to its last event."""

    def __init__(
        self,
        engine: EnginePort,
        exchange: Exchange,
        received: float,
        on_turn: OnTurn | None = None,
        conversations: Conversations | None = None,
    ) -> None:
        """Submits the request; raises QueueFull or EngineStopped at once. `received` is `time.monotonic()`.

        `on_turn` is called once for each request that got a slot, however it ended. `conversations` are those that it
        may go on from.
        """
        self.request = exchange.request
        self._exchange = exchange
        self._on_turn = on_turn
        self._account = TurnAccount(conversations if conversations is not None else Conversations(), exchange)
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._received = received
        self._generation = engine.submit(exchange.request)
        self._started: Started | None = None
        self._started_at = 0.0
        self._num_evaluated = 0
        self._account_open = True
        self._prompt_ms: float | None = None
        self._num_predicted = 0
        self._first_text: float | None = None
        self._outcome: str | None = None
        self._is_closed = False
        self._progress = "waiting"
        self._turn_record: TurnRecord | None = None
        self._turn_number: int | None = None
        self._timings: Timings | None = None
        self._error: Exception | None = None
        self._next_note = 0.0
        self._num_notes = 0

    async def events(self) -> AsyncIterator[OutputEvent]:
        """Yields the output and its end; raises the engine's error where the request failed or was stopped."""
        parser = self._exchange.parser
        async for event in self._generation:
            if isinstance(event, Started):
                event = await self._account.explained(event)
            if isinstance(event, Finished):
                event = replace(event, started=self._started)
            self._observe(event)
            match event:
                case Delta(text):
                    for piece in parser.feed(text):
                        yield piece
                case Finished(FinishReason.CANCELLED):
                    # The client is still there, so it was not the client who cancelled.
                    raise EngineStopped("the server stopped before the answer was complete")
                case Finished(reason):
                    for piece in parser.finish(is_complete=reason is FinishReason.STOP):
                        yield piece
                    self._keep_turn(event)
                    yield event
                case Failed(error):
                    raise error

    @property
    def is_complete(self) -> bool:
        """Whether the model ended the answer by itself."""
        return self._outcome == FinishReason.STOP.value

    @property
    def has_ended(self) -> bool:
        """Whether the answer was given to its end or limit, neither cancelled nor failed."""
        return self._outcome in (FinishReason.STOP.value, FinishReason.LENGTH.value)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the text so far."""
        return tuple(self._token_ids)

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
        if self._account_open and self._started is not None and self._error is None:
            self._keep_turn(None)
        self._report_turn()
        if logger.isEnabledFor(logging.INFO):
            logger.info(self._entry())

    def _keep_turn(self, finished: Finished | None) -> None:
        """Keeps what was evaluated, for the next turn to be compared with, once; nothing of a failed request."""
        account, self._account_open = self._account, False
        num_evaluated = (self._started.hit_tokens if self._started else 0) + self._num_evaluated
        # The last token of an answer that was cut off is not evaluated.
        is_cut = finished is None or finished.reason is not FinishReason.STOP or finished.stop_text is not None
        ids = self._token_ids[:-1] if is_cut else self._token_ids
        account.record(num_evaluated, ids, "".join(self._texts) if finished is not None else None)

    def _report_turn(self) -> None:
        """Calls `on_turn` once: at the last event, or when the client left before it."""
        if self._started is None or self._turn_record is not None:
            return
        self._turn_record = self._turn(self._started)
        if self._on_turn is not None and self._account.name is not None:
            self._turn_number = self._on_turn(self._account.name, self._turn_record)

    def _turn(self, started: Started) -> TurnRecord:
        prompt_ms = self._prompt_ms
        if prompt_ms is None:
            # The client left before the last event, which holds the engine's own measurement.
            prompt_ms = 1000 * ((self._first_text or time.monotonic()) - self._started_at)
        return TurnRecord(
            request_id=self.request.request_id,
            model_id=self._exchange.model.id,
            ended=time.time(),
            finish=self._outcome or "cancelled",
            prompt_tokens=len(self.request.tokens),
            cached_tokens=started.hit_tokens,
            evaluated_tokens=self._num_evaluated,
            predicted_tokens=self._num_predicted,
            prompt_ms=prompt_ms,
            tier=started.tier,
            kept=started.reuse.kept,
            lost_tokens=min(started.reuse.lost_tokens, self._num_evaluated),
            misses=started.reuse.misses or _one(started.reuse.miss),
        )

    def _observe(self, event: Event) -> None:
        match event:
            case Started():
                self._started, self._started_at = event, time.monotonic()
                self._next_note = self._started_at + LONG_PREFILL_SECONDS
                self._progress = f"prefill {event.hit_tokens} of {event.prompt_tokens}"
            case Progress():
                self._num_evaluated = event.evaluated - (self._started.hit_tokens if self._started else 0)
                self._progress = f"prefill {event.evaluated} of {event.total}"
                self._note_progress(event)
            case Delta():
                self._progress = "generating"
                self._texts.append(event.text)
                self._token_ids.extend(event.token_ids)
                self._num_predicted += len(event.token_ids)
                self._first_text = self._first_text or time.monotonic()
            case Finished():
                if event.reason is not FinishReason.CANCELLED:
                    self._num_evaluated, self._prompt_ms = event.timings.evaluated_tokens, event.timings.prompt_ms
                self._num_predicted = event.timings.predicted_tokens
                self._outcome, self._timings = event.reason.value, event.timings
                self._remember_reply(event)
                self._report_turn()
            case Failed():
                self._outcome, self._error = f"failed ({type(event.error).__name__})", event.error
                self._report_turn()

    def _remember_reply(self, finished: Finished) -> None:
        """Tells the renderer with which tokens the model answered.

        An answer that a stop string or a limit cut off may end within a token, so it is left out.
        """
        is_whole = finished.reason is FinishReason.STOP and finished.stop_text is None
        if is_whole and self._exchange.conversation is not None:
            renderer = self._exchange.model.renderer
            renderer.remember_reply(self._exchange.prompt, "".join(self._texts), self._token_ids)

    # ------------------------------------------------------------------------------------------------ the log

    @property
    def _session_id(self) -> str | None:
        """What the conversation is called, by the client or by the server."""
        name = self._account.name
        return name.id if name is not None else self.request.session_id

    def _note_progress(self, progress: Progress) -> None:
        """Logs how far a long prompt is, every few seconds."""
        now = time.monotonic()
        if now < self._next_note or progress.evaluated >= progress.total - 1 or not logger.isEnabledFor(logging.INFO):
            return
        entry = PrefillProgress(
            request_id=self.request.request_id,
            session_id=self._session_id,
            evaluated_tokens=progress.evaluated,
            prompt_tokens=progress.total,
            tokens_per_second=self._num_evaluated / (now - self._started_at),
            number=self._num_notes,
        )
        self._next_note, self._num_notes = now + PROGRESS_SECONDS, self._num_notes + 1
        logger.info(entry)

    def _entry(self) -> RequestEnded:
        turn, started, timings = self._turn_record, self._started, self._timings
        return RequestEnded(
            request_id=self.request.request_id,
            session_id=self._session_id,
            model=self._exchange.model.id,
            turn=self._turn_number,
            prompt_tokens=len(self.request.tokens),
            cached_tokens=started.hit_tokens if started else 0,
            evaluated_tokens=self._num_evaluated,
            predicted_tokens=self._num_predicted,
            first_token_ms=None if self._first_text is None else round(1000 * (self._first_text - self._received), 1),
            total_ms=round(1000 * (time.monotonic() - self._received), 1),
            tokens_per_second=_speed_of(timings) if timings else None,
            finish=self._outcome or "cancelled",
            error=_reason_of(self._error) if self._error else None,
            kept=turn.kept if turn else None,
            tier=turn.tier if turn else None,
            miss=_miss_of(turn) if turn else None,
        )


def _one(miss: Miss | None) -> tuple[Miss, ...]:
    return () if miss is None else (miss,)


def _speed_of(timings: Timings) -> float | None:
    """Returns tokens per second. The time runs from the first token to the last, so one token fewer counts."""
    seconds = timings.predicted_ms / 1000
    return (
        round((timings.predicted_tokens - 1) / seconds, 2) if seconds > 0 and timings.predicted_tokens > 1 else None
    )


def _reason_of(error: Exception) -> str:
    known = as_api_error(error)
    return known.message if known else type(error).__name__


def _miss_of(turn: TurnRecord) -> MissFigures | None:
    """Returns why and where, without the words that changed: they are the prompt's, which may be private."""
    miss = turn.miss
    if miss is None:
        return None
    seconds = round(turn.lost_seconds, 3)
    return MissFigures(miss.reason.value, miss.message_index, miss.role, miss.token, turn.lost_tokens, seconds)
