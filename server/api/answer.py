"""Follows one generation for its dialect: pieces of output, the turn that it is, and its end however it ends.

Knows events, but no dialect. Used on the event loop.
"""

from collections.abc import AsyncIterator
from dataclasses import replace

from server.api.answer_figures import AnswerFigures
from server.api.answer_log import AnswerLog
from server.api.arrival import Arrival
from server.api.context import EnginePort
from server.api.dialect import Exchange, OutputEvent
from server.api.session_records import TurnRecord
from server.api.turn_account import TurnAccount
from server.diagnosis.account import Conversations
from server.engine.request import (
    Delta,
    EngineError,
    EngineStopped,
    Event,
    Failed,
    Finished,
    FinishReason,
    Progress,
    Started,
)


class Answer:
    """One request from the moment it was received to its last event."""

    def __init__(
        self,
        engine: EnginePort,
        exchange: Exchange,
        arrival: Arrival,
        *,
        speaks: bool = True,
    ) -> None:
        """Submits the request; raises QueueFull or EngineStopped at once.

        One that does not speak is another choice of the same request: the first one tells of both, in the log and in
        the conversation.
        """
        self._exchange = exchange
        self._arrival = arrival
        self._account = TurnAccount(arrival.conversations if speaks else Conversations(), exchange)
        self.figures = AnswerFigures(len(exchange.request.tokens))
        self._has_turn = self._speaks = speaks
        self._log = AnswerLog(exchange.request, exchange.model.id, arrival.received, self.figures, arrival.key_name)
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._reported: tuple[TurnRecord, int | None] | None = None
        """The turn and its number in the conversation, once they were reported."""
        self._is_closed = False
        self._generation = engine.submit(exchange.request)
        self._open = arrival.begin(exchange.request, exchange.model.id, self.figures)

    async def events(self) -> AsyncIterator[OutputEvent]:
        """Yields the start, the output and the end; raises the engine's error where the request failed or stopped."""
        parser = self._exchange.parser
        async for event in self._generation:
            if isinstance(event, Started):
                event = await self._account.explained(event)
            if isinstance(event, Finished):
                event = replace(event, started=self.figures.started, token_ids=self.token_ids)
            self._observe(event)
            match event:
                case Started():
                    yield event
                case Delta(text):
                    self._exchange.take_tokens(event)
                    for piece in parser.feed(text):
                        yield piece
                case Finished(FinishReason.CANCELLED):
                    # The client is still there, so it was not the client who cancelled.
                    raise EngineStopped("the server stopped before the answer was complete")
                case Finished(reason):
                    self._exchange.take_tokens(event.rest)
                    for piece in parser.finish(is_complete=reason is FinishReason.STOP):
                        yield piece
                    self._keep_turn(event)
                    yield event
                case Failed(error):
                    raise error

    @property
    def has_started(self) -> bool:
        """Whether the request holds a slot, or did."""
        return self.figures.started is not None

    @property
    def is_complete(self) -> bool:
        """Whether the model ended the answer by itself."""
        return self.figures.is_complete

    @property
    def has_ended(self) -> bool:
        """Whether the answer was given to its end or limit, neither cancelled nor failed."""
        return self.figures.has_ended

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the text so far."""
        return tuple(self._token_ids)

    def progress(self) -> str:
        """Returns in a few words what the request is waiting for."""
        return self.figures.progress

    def close(self) -> None:
        """Cancels what still runs and logs the request, once; call it on every way out."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.figures.outcome is None:
            self._generation.cancel()
        if self.figures.started is not None and self.figures.error is None:
            self._keep_turn(None)
        self.report_turn()
        turn, number = self._reported or (None, None)
        self._arrival.activity.end(self._open, turn)
        if self._speaks:
            self._log.end(self._session_id, turn, number)

    def leave_log(self) -> None:
        """Has `close` log nothing: the request is refused, and the line that says so says why."""
        self._speaks = False

    def withdraw(self) -> None:
        """Cancels the request without a word: it is refused after all."""
        self._is_closed = True
        self._arrival.activity.withdraw(self._open)
        self._generation.cancel()

    @property
    def turn(self) -> TurnRecord | None:
        """The turn that it was, once it was reported; None for a request that never held a slot."""
        return None if self._reported is None else self._reported[0]

    @property
    def _session_id(self) -> str | None:
        """What the conversation is called, by the client or by the server."""
        name = self._account.name
        return name.id if name is not None else self._exchange.request.session_id

    def _observe(self, event: Event) -> None:
        self.figures.observe(event)
        self._open.observe(event, self._session_id)
        match event:
            case Progress():
                if self._speaks:
                    self._log.note_progress(event, self._session_id)
            case Delta(text, token_ids):
                self._texts.append(text)
                self._token_ids.extend(token_ids)
            case Finished():
                self._remember_reply(event)
                self._report_if_last()
            case Failed():
                self._report_if_last()

    def _keep_turn(self, finished: Finished | None) -> None:
        """Keeps what was evaluated, so that the next turn can be compared with it; only the first call counts."""
        figures = self.figures
        num_evaluated = (figures.started.hit_tokens if figures.started else 0) + figures.num_evaluated
        # The last token of an answer that was cut off is not evaluated.
        is_cut = finished is None or finished.reason is not FinishReason.STOP or finished.stop_text is not None
        ids = self._token_ids[:-1] if is_cut else self._token_ids
        self._account.record(num_evaluated, ids, "".join(self._texts) if finished is not None else None)

    def _report_if_last(self) -> None:
        if not any(other.outcome is None for other in self.figures.others):
            self.report_turn()

    def report_turn(self) -> None:
        """Calls `on_turn` once: at the last event of all choices, or when the client left before it."""
        started, request = self.figures.started, self._exchange.request
        if started is None or self._reported is not None:
            return
        turn, number = self.figures.turn(request, self._exchange.model.id, started, self._account.previous_id), None
        if self._has_turn and self._account.name is not None:
            number = self._arrival.on_turn(self._account.name, turn)
        self._reported = turn, number

    def _remember_reply(self, finished: Finished) -> None:
        """Tells the renderer with which tokens the model answered.

        An answer that a stop string or a limit cut off may end within a token, so it is left out.
        """
        is_whole = finished.reason is FinishReason.STOP and finished.stop_text is None
        if is_whole and self._exchange.conversation is not None:
            renderer = self._exchange.model.renderer
            renderer.remember_reply(self._exchange.prompt, "".join(self._texts), self._token_ids)


class AnswerInParts:
    """An answer, and those with which it goes on by itself: each is a request of the engine and a line of the log."""

    def __init__(self, engine: EnginePort, exchange: Exchange, arrival: Arrival) -> None:
        """Submits the first request; raises QueueFull or EngineStopped at once."""
        self._engine = engine
        self._arrival = arrival
        self.parts = [(exchange, Answer(engine, exchange, arrival))]

    @property
    def last(self) -> Answer:
        """The part that runs, or ran last."""
        return self.parts[-1][1]

    @property
    def has_started(self) -> bool:
        """Whether its first request holds a slot, or did."""
        return self.parts[0][1].has_started

    def progress(self) -> str:
        """Returns in a few words what it is waiting for."""
        return self.last.progress()

    def leave_log(self) -> None:
        """Has `close` log nothing of the part that runs."""
        self.last.leave_log()

    async def events(self) -> AsyncIterator[OutputEvent]:
        """Yields the events of all parts as those of one answer."""
        following: Exchange | None = self.parts[0][0]
        while following is not None:
            following = None
            async for event in self.last.events():
                if isinstance(event, Finished):
                    following = await self._next_part(event)
                if following is None and not (isinstance(event, Started) and len(self.parts) > 1):
                    yield event

    async def _next_part(self, finished: Finished) -> Exchange | None:
        """Submits the next part and returns it; None where the answer ends, be it that the engine takes no more."""
        following = await self.parts[0][0].next_part(finished)
        if following is None:
            return None
        self.last.close()
        try:
            self.parts.append((following, Answer(self._engine, following, self._arrival)))
        except EngineError:
            return None
        return following

    def close(self) -> None:
        """Cancels what still runs and logs it, once; call it on every way out."""
        self.last.close()
