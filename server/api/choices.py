"""Several requests of the engine that are one request to the client: each makes one choice of its answer.

Choices run side by side, and the first of them speaks for all: it has the session, the turn of the conversation and
the entry in the log. A choice that fails does not end the others; where all fail, the request does.

Used on the event loop.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from server.api.answer import Answer
from server.api.arrival import Arrival
from server.api.context import EnginePort
from server.api.dialect import Exchange, OutputEvent, Payload
from server.engine.request import Finished

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChoiceFailed:
    """The last event of a choice that could not be completed, while others may be."""

    error: Exception


@dataclass(frozen=True)
class AllEnded:
    """The last event of all: every choice has ended, at least one of them well."""

    finished: Finished
    """The first choice that ended well, with the tokens of all: those of a prompt count once."""


ChoiceEvent: TypeAlias = tuple[int, OutputEvent | ChoiceFailed] | AllEnded
"""What a choice, named by its index, has put out; or the end of all."""


class Choices(ABC):
    """Exchanges that are one to the client, and how the answer is written. Used once, like an exchange.

    Invariant: all have one model and one way of writing. Exchanges of the same prompt follow each other.
    """

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        assert exchanges, "a request has at least one choice"
        self.exchanges = tuple(exchanges)

    @property
    def first(self) -> Exchange:
        """The choice that speaks for all."""
        return self.exchanges[0]

    @property
    def is_streamed(self) -> bool:
        """Whether the answer is."""
        return self.first.is_streamed

    def repeats_prompt(self, index: int) -> bool:
        """Whether the choice before has the same prompt."""
        return index > 0 and self.exchanges[index].prompt is self.exchanges[index - 1].prompt

    @abstractmethod
    def frames(self, events: AsyncIterator[ChoiceEvent]) -> AsyncIterator[bytes]:
        """Yields the stream, its proper end included."""

    @abstractmethod
    async def body(self, events: AsyncIterator[ChoiceEvent]) -> Payload:
        """Returns the body of an answer that is not streamed."""


class ChoicesAnswer:
    """All choices of one request from the moment it was received to the last event."""

    def __init__(self, engine: EnginePort, choices: Choices, arrival: Arrival) -> None:
        """Submits all requests, or none: raises QueueFull or EngineStopped at once. See `Answer`."""
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
        """Yields what the choices put out as it comes; raises the first error where none of them ends well."""
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
        """Whether one of the requests holds a slot, or did."""
        return any(answer.has_started for answer in self._answers)

    @property
    def num_predicted(self) -> int:
        """Tokens of all answers so far."""
        return sum(len(answer.token_ids) for answer in self._answers)

    def progress(self) -> str:
        """Returns in a few words what the request is waiting for."""
        return self.first.progress()

    def leave_log(self) -> None:
        """Has `close` log nothing; see `Answer.leave_log`."""
        for answer in self._answers:
            answer.leave_log()

    def close(self) -> None:
        """Cancels what still runs and logs the request, once; call it on every way out."""
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
    """Passes on what one choice puts out. The queue is short, so that a slow reader is noticed by the engine."""
    try:
        async for event in answer.events():
            await queue.put((index, event))
    except Exception as error:  # whatever it is, it is told of this choice, and the others go on
        await queue.put((index, ChoiceFailed(error)))
