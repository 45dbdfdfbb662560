"""Follows the generation of one answer, from submission to its last event, whatever ends it.

An `Answer` is one engine request and one turn of its conversation. `AnswerInParts` runs several requests one after
the other, `ChoicesAnswer` several side by side. Only the first choice has the session, the conversation's turn and
the log entry. A choice that fails does not end the others; if all fail, the request fails.

Event loop only. Knows no dialect.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from server.api.dialect import Exchange, OutputEvent, Payload
from server.api.live.activity import Arrival
from server.api.record import AnswerFigures, AnswerLog
from server.api.sessions import TurnRecord
from server.diagnosis.account import Conversations, EvaluatedTurn, Name, Rendered, declined, explain
from server.diagnosis.compare import Turn
from server.diagnosis.prompt import PLAIN, Part, part_of
from server.engine.diagnosis import Reuse
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
from server.pool.served import EnginePort

logger = logging.getLogger(__name__)


class TurnAccount:
    """Compares a request with its conversation's last turn, and keeps it for the next one to be compared with."""

    def __init__(self, conversations: Conversations, exchange: Exchange) -> None:
        self._conversations = conversations
        self._exchange = exchange
        self.name: Name | None = None
        """The conversation; None before the request holds a slot, and for an unnamed request that never became a
        turn.
        """
        self.previous_id: str | None = None
        """The earlier request that this one was compared with; None if there was none."""
        self._is_recorded = False

    async def explained(self, started: Started) -> Started:
        """Returns the event with the reasons for misses. Long texts are compared on another thread."""
        request = self._exchange.request
        rendered = Rendered(self._exchange.asked, request.tokens, request.outline)
        if request.is_prefix_only:
            self.name = Name(request.namespace, request.session_id) if request.session_id is not None else None
            return started
        self.name, previous = self._conversations.find(request.session_id, rendered, request.request_id)
        self.previous_id = previous.request_id if previous is not None else None
        if not request.cache_prompt:
            return _with_reuse(started, declined(previous, rendered))
        match, hit = started.match_tokens, started.hit_tokens
        if previous is None or hit >= min(len(previous.tokens), len(request.tokens) - 1):
            return _with_reuse(started, explain(previous, rendered, match=match, hit=hit))
        reuse = await asyncio.to_thread(explain, previous, rendered, match=match, hit=hit)
        return _with_reuse(started, reuse)

    def record(self, num_evaluated: int, reply_ids: Sequence[int], reply: str | None) -> None:
        """Keeps the turn, once: the first `num_evaluated` prompt tokens, then `reply_ids`.

        `reply` is the text of a complete answer, None if the answer was broken off.
        """
        request = self._exchange.request
        if self._is_recorded or self.name is None or request.is_prefix_only or not request.cache_prompt:
            return
        self._is_recorded = True
        tokens = request.tokens[:num_evaluated]
        if num_evaluated == len(request.tokens):
            tokens = np.concatenate([tokens, np.array(reply_ids, np.int32)])
        turn = Turn(self._exchange.asked, None if reply is None else self._reply_part(reply))
        evaluated = EvaluatedTurn(turn, tokens, len(request.tokens), request_id=request.request_id)
        self._conversations.record(self.name, evaluated)

    def _reply_part(self, text: str) -> Part:
        messages = self._exchange.reply_messages()
        return part_of(messages[0]) if messages else Part(PLAIN, text)


def _with_reuse(started: Started, reuse: Reuse) -> Started:
    """Returns the event with `reuse`, unless the engine gave a reason itself."""
    return started if started.reuse.miss is not None else replace(started, reuse=reuse)


class Answer:
    """One engine request, from its arrival to its last event."""

    def __init__(
        self,
        engine: EnginePort,
        exchange: Exchange,
        arrival: Arrival,
        *,
        speaks: bool = True,
    ) -> None:
        """Submits the request; raises QueueFull or EngineStopped at once.

        `speaks` is False for every choice but the first, which reports for all in the log and in the conversation.
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
        """The turn and its number in the conversation, once reported."""
        self._is_closed = False
        self._generation = engine.submit(exchange.request)
        self._open = arrival.begin(exchange.request, exchange.model.id, self.figures)

    async def events(self) -> AsyncIterator[OutputEvent]:
        """Yields start, output and end; raises the engine's error if the request failed or the engine stopped."""
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
                    # The client is still connected, so the engine cancelled the request.
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
        """Whether the request holds or held a slot."""
        return self.figures.started is not None

    @property
    def is_complete(self) -> bool:
        """Whether the model ended the answer by itself."""
        return self.figures.is_complete

    @property
    def has_ended(self) -> bool:
        """Whether the answer reached its end or limit: neither cancelled nor failed."""
        return self.figures.has_ended

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self._token_ids)

    def progress(self) -> str:
        """Returns a few words on what the request is waiting for."""
        return self.figures.progress

    def close(self) -> None:
        """Cancels the request if it still runs, and logs it, once; call it on every way out."""
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
        """Makes `close` log nothing: the request is refused, and the refusal's own log line gives the reason."""
        self._speaks = False

    def withdraw(self) -> None:
        """Cancels the request without a log entry: it is refused after all."""
        self._is_closed = True
        self._arrival.activity.withdraw(self._open)
        self._generation.cancel()

    @property
    def turn(self) -> TurnRecord | None:
        """The reported turn; None for a request that never held a slot."""
        return None if self._reported is None else self._reported[0]

    @property
    def _session_id(self) -> str | None:
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
        """Keeps the evaluated tokens for comparison with the next turn; only the first call counts."""
        figures = self.figures
        num_evaluated = (figures.started.hit_tokens if figures.started else 0) + figures.num_evaluated
        # The last token of a cut-off answer is not evaluated.
        is_cut = finished is None or finished.reason is not FinishReason.STOP or finished.stop_text is not None
        ids = self._token_ids[:-1] if is_cut else self._token_ids
        self._account.record(num_evaluated, ids, "".join(self._texts) if finished is not None else None)

    def _report_if_last(self) -> None:
        if not any(other.outcome is None for other in self.figures.others):
            self.report_turn()

    def report_turn(self) -> None:
        """Calls `on_turn` once: at the last event of all choices, or when the client left earlier."""
        started, request = self.figures.started, self._exchange.request
        if started is None or self._reported is not None:
            return
        turn, number = self.figures.turn(request, self._exchange.model.id, started, self._account.previous_id), None
        if self._has_turn and self._account.name is not None:
            number = self._arrival.on_turn(self._account.name, turn)
        self._reported = turn, number

    def _remember_reply(self, finished: Finished) -> None:
        """Tells the renderer the tokens of the reply.

        A reply cut off by a stop string or a limit may end within a token, so it is left out.
        """
        is_whole = finished.reason is FinishReason.STOP and finished.stop_text is None
        if is_whole and self._exchange.conversation is not None:
            renderer = self._exchange.model.renderer
            renderer.remember_reply(self._exchange.prompt, "".join(self._texts), self._token_ids)


class AnswerInParts:
    """An answer that may continue by itself: each part is one engine request and one line of the log."""

    def __init__(self, engine: EnginePort, exchange: Exchange, arrival: Arrival) -> None:
        """Submits the first request; raises QueueFull or EngineStopped at once."""
        self._engine = engine
        self._arrival = arrival
        self.parts = [(exchange, Answer(engine, exchange, arrival))]

    @property
    def last(self) -> Answer:
        """The part that runs, or the last one that ran."""
        return self.parts[-1][1]

    @property
    def has_started(self) -> bool:
        """Whether the first request holds or held a slot."""
        return self.parts[0][1].has_started

    def progress(self) -> str:
        """Returns a few words on what the answer is waiting for."""
        return self.last.progress()

    def leave_log(self) -> None:
        """Makes `close` log nothing for the running part."""
        self.last.leave_log()

    async def events(self) -> AsyncIterator[OutputEvent]:
        """Yields the events of all parts as the events of one answer."""
        following: Exchange | None = self.parts[0][0]
        while following is not None:
            following = None
            async for event in self.last.events():
                if isinstance(event, Finished):
                    following = await self._next_part(event)
                if following is None and not (isinstance(event, Started) and len(self.parts) > 1):
                    yield event

    async def _next_part(self, finished: Finished) -> Exchange | None:
        """Submits the next part and returns it; None if the answer ends here, or if the engine accepts no more
        requests.
        """
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
        """Cancels the part that still runs and logs it, once; call it on every way out."""
        self.last.close()


@dataclass(frozen=True)
class ChoiceFailed:
    """The last event of a choice that failed while others may succeed."""

    error: Exception


@dataclass(frozen=True)
class AllEnded:
    """The last event of all: every choice has ended, and at least one succeeded."""

    finished: Finished
    """The end of the first choice that succeeded, with the token counts of all choices; a shared prompt counts
    once.
    """


ChoiceEvent: TypeAlias = tuple[int, OutputEvent | ChoiceFailed] | AllEnded
"""An event with the index of its choice, or the end of all choices."""


class Choices(ABC):
    """Exchanges that are one request to the client, and how their answer is written. Used once, like an exchange.

    Invariant: all have the same model and answer format. Exchanges with the same prompt are neighbours.
    """

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        assert exchanges, "a request has at least one choice"
        self.exchanges = tuple(exchanges)

    @property
    def first(self) -> Exchange:
        """The choice that reports for all."""
        return self.exchanges[0]

    @property
    def is_streamed(self) -> bool:
        return self.first.is_streamed

    def repeats_prompt(self, index: int) -> bool:
        """Whether choice `index` has the same prompt as the choice before it."""
        return index > 0 and self.exchanges[index].prompt is self.exchanges[index - 1].prompt

    @abstractmethod
    def frames(self, events: AsyncIterator[ChoiceEvent]) -> AsyncIterator[bytes]:
        """Yields the stream, its proper end included."""

    @abstractmethod
    async def body(self, events: AsyncIterator[ChoiceEvent]) -> Payload:
        """Returns the body of an answer that is not streamed."""


class ChoicesAnswer:
    """All choices of one request, from its arrival to the last event."""

    def __init__(self, engine: EnginePort, choices: Choices, arrival: Arrival) -> None:
        """Submits all requests, or none: raises QueueFull or EngineStopped at once."""
        self.first = Answer(engine, choices.first, arrival)
        self._answers = [self.first]
        try:
            for exchange in choices.exchanges[1:]:
                self._answers.append(Answer(engine, exchange, arrival, speaks=False))
        except BaseException:
            for answer in self._answers:
                answer.withdraw()
            raise
        for index, answer in enumerate(self._answers):
            answer.figures.repeats_prompt = choices.repeats_prompt(index)
        self.first.figures.others = [answer.figures for answer in self._answers[1:]]
        self._request_id = choices.first.request.request_id

    async def events(self) -> AsyncIterator[ChoiceEvent]:
        """Yields each choice's events as they come; raises the first error if no choice succeeds."""
        queue: asyncio.Queue[tuple[int, OutputEvent | ChoiceFailed]] = asyncio.Queue(maxsize=1)
        followers = [asyncio.create_task(_follow(i, one, queue)) for i, one in enumerate(self._answers)]
        ends: dict[int, Finished | ChoiceFailed] = {}
        try:
            while len(ends) < len(followers):
                index, event = await queue.get()
                if isinstance(event, Finished | ChoiceFailed):
                    ends[index] = event
                yield self._told(index, event)
            self.first.report_turn()
            yield AllEnded(self._joined(ends))
        finally:
            for follower in followers:
                follower.cancel()
            await asyncio.gather(*followers, return_exceptions=True)

    @property
    def has_started(self) -> bool:
        """Whether one of the requests holds or held a slot."""
        return any(answer.has_started for answer in self._answers)

    @property
    def num_predicted(self) -> int:
        """Number of tokens in all answers so far."""
        return sum(len(answer.token_ids) for answer in self._answers)

    def progress(self) -> str:
        """Returns a few words on what the request is waiting for."""
        return self.first.progress()

    def leave_log(self) -> None:
        """Makes `close` log nothing; see `Answer.leave_log`."""
        for answer in self._answers:
            answer.leave_log()

    def close(self) -> None:
        """Cancels the requests that still run and logs once; call it on every way out."""
        for answer in reversed(self._answers):
            answer.close()

    def _told(self, index: int, event: OutputEvent | ChoiceFailed) -> tuple[int, OutputEvent | ChoiceFailed]:
        if isinstance(event, ChoiceFailed):
            logger.warning("%s: choice %d failed: %s", self._request_id, index, event.error)
        return index, event

    def _joined(self, ends: dict[int, Finished | ChoiceFailed]) -> Finished:
        well = [end for _, end in sorted(ends.items()) if isinstance(end, Finished)]
        if not well:
            raise next(end.error for _, end in sorted(ends.items()) if isinstance(end, ChoiceFailed))
        counts = self.first.figures.counts
        timings = replace(
            well[0].timings,
            cache_tokens=counts.cached,
            evaluated_tokens=counts.evaluated,
            predicted_tokens=counts.predicted,
            prompt_ms=max(end.timings.prompt_ms for end in well),
            predicted_ms=max(end.timings.predicted_ms for end in well),
        )
        thoughts = [end.reasoning_tokens for end in well if end.reasoning_tokens is not None]
        reasoning_tokens = sum(thoughts) if thoughts else None
        return replace(well[0], prompt_tokens=counts.prompt, timings=timings, reasoning_tokens=reasoning_tokens)


async def _follow(index: int, answer: Answer, queue: "asyncio.Queue[tuple[int, OutputEvent | ChoiceFailed]]") -> None:
    """Queues one choice's events. The queue is short, so that the engine notices a slow reader."""
    try:
        async for event in answer.events():
            await queue.put((index, event))
    except Exception as error:  # any error is reported for this choice only; the other choices go on
        await queue.put((index, ChoiceFailed(error)))
