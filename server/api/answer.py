"""An exchange, and its answer.

An `Exchange` is one checked request; a dialect's subclass writes its answer. An `Answer` has a `Run` for each choice,
side by side, or one after the other if a dialect goes on by itself. Only the first choice has session, turn and log
entry. One record is made of all choices, and one of each later part. Event loop only. Knows no dialect.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from models.output.pieces import OutputParser, Piece
from models.prompt.chat_template import RenderedPrompt
from models.prompt.shapes import Message
from server.api.conversation import Conversation, next_turn_requests
from server.api.dialect import ApiContext
from server.api.healing import healing_of
from server.api.record import Arrival, OpenRequest, RequestRecord, counts_of
from server.api.wire import Payload
from server.diagnosis import account
from server.diagnosis.causes import Cause, Reuse
from server.diagnosis.compare import find_moved_note, keeps_question
from server.diagnosis.prompt import PLAIN, Part, Prompt, part_of, repeated_call
from server.engine.commands import pin_turn
from server.engine.engine import Engine
from server.engine.request import (
    Delta,
    EngineError,
    EngineStopped,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    Progress,
    Started,
    Timings,
)
from server.pool.served import ServedModel

logger = logging.getLogger(__name__)

OutputEvent: TypeAlias = Started | Progress | Piece | Finished
_TOTALS = ("reasoning_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens")
_OF_ALL: dict[str, Any] = {"prompt_ms": max, "predicted_ms": max, "drafted_tokens": sum, "accepted_tokens": sum}
"""How the timings of choices side by side become those of all."""


@dataclass(eq=False)
class Question:
    """A prompt, the engine's request for it, and its conversation, if any."""

    model: ServedModel
    request: GenerationRequest
    prompt: RenderedPrompt
    conversation: Conversation | None = None


class Exchange(Question, ABC):
    """One checked request; writes its answer once."""

    keep_alive_seconds: float | None = None
    """How long the model stays loaded after its last request; None: as before."""
    tells_progress = False
    """Whether `Answer` yields `Progress`, the last one before the first output."""

    def __init__(self, question: Question) -> None:
        """`asked` are the parts that requests are compared by. Without a conversation all of the answer is text."""
        super().__init__(**vars(question))
        model, source, prompt, grammar = self.model, self.conversation, self.prompt, self.request.grammar
        if source is None:
            self.parser = OutputParser()
            self.asked = Prompt((Part(PLAIN, prompt.text),), model=model.id, namespace=self.request.namespace)
        else:
            is_forced = grammar is not None and grammar.forces_calls
            self.parser = model.output_parser(source.callable_tools, prompt.text, prompt.begun, is_forced=is_forced)
            self.asked = source.parts(model.id)

    @property
    def choices(self) -> "Sequence[Exchange]":
        """The exchanges answered side by side, itself first; all of one model, equal prompts neighbours."""
        return (self,)

    def begun(self, answer: "Answer", stack: ExitStack) -> None:
        """Called once the engine has the request; may take over `stack`. Raises ApiError (429)."""

    def frames(self, answer: "Answer") -> AsyncIterator[bytes]:
        """Yields the stream, its proper end included. Never called where no answer is streamed."""
        raise NotImplementedError

    @abstractmethod
    async def body(self, answer: "Answer") -> Payload:
        """The body of a whole answer."""

    def take_tokens(self, delta: Delta, stop_token: int | None = None) -> None:
        """Takes the next output tokens, before their pieces. The last have no text, such as `stop_token`."""

    def reply_messages(self) -> list[Message]:
        """The answer as clients send it back, without what it continues. Not on the event loop."""
        return []

    def whole_reply(self) -> list[Message]:
        """The answer as clients send it back. Not on the event loop."""
        reply = self.reply_messages()
        return reply if self.conversation is None else [*map(self.conversation.whole, reply[:1]), *reply[1:]]


def _is_whole(finished: Finished | None) -> bool:
    """An answer that was cut off may end within a token, and its last token is not evaluated."""
    return finished is not None and finished.reason is FinishReason.STOP and finished.stop_text is None


class Run(OpenRequest):
    """One engine request of an answer, followed to its last event, and compared with its conversation's last turn."""

    def __init__(self, answer: "Answer", exchange: Exchange, before: "Run | None" = None) -> None:
        """Submits the request; `before` is the choice before. Raises QueueFull, EngineStopped."""
        repeats = before is not None and exchange.prompt is before.exchange.prompt
        super().__init__(exchange.request, exchange.model.id, answer.arrival, before is None, repeats)
        self.exchange: Exchange = exchange
        self.asked = exchange.asked
        self.token_ids: list[int] = []
        self.finished: Finished | None = None
        """None unless the run ended well."""
        self._context = answer.context
        self._conversations = answer.context.conversations if self.is_first else account.Conversations()
        self.moved_note: tuple[int, str] | None = None
        """As of `find_moved_note`."""
        self.kept_note: tuple[int, str] | None = None
        """What moved when the question came that is still being answered."""
        self._generation = answer.engine.submit(exchange.request)
        self._texts: list[str] = []

    async def events(self) -> AsyncIterator[OutputEvent]:
        """Yields start, output and end; raises the engine's error."""
        exchange, parser = self.exchange, self.exchange.parser
        async for event in self._generation:
            if isinstance(event, Started):
                event = await self._explained(event)
            if isinstance(event, Finished):
                event = replace(event, started=self.started)
            progress = self._noted(event)
            if progress is not None and exchange.tells_progress:
                yield progress
            match event:
                case Started():
                    yield event
                case Delta(text, token_ids):
                    self._texts.append(text)
                    self.token_ids.extend(token_ids)
                    exchange.take_tokens(event)
                    for piece in parser.feed(text):
                        yield piece
                case Finished(FinishReason.CANCELLED):
                    # The client is still connected, so the engine cancelled the request.
                    raise EngineStopped("the server stopped before the answer was complete")
                case Finished():
                    self._remember_reply(event)  # before the last pieces, at which a client may leave
                    exchange.take_tokens(event.rest, event.stop_token)
                    for piece in parser.finish(is_complete=self._is_complete(event)):
                        yield piece
                    self._remember_calls()
                    self._keep_turn(event)
                    call_format = exchange.model.call_format
                    self.tool_calls = "" if call_format is None else call_format.name, parser.call_counts
                    self.finished = self._as_told(event)
                    yield self.finished
                case Failed(error):
                    raise error

    def _noted(self, event: Event) -> Progress | None:
        """Counts an event; returns what it says of the prompt, whose last token is evaluated for the first text."""
        had_text, num_prompt = self.first_text_at is not None, len(self.request.tokens)
        self.observe(event)
        if not isinstance(event, Started | Progress) and (had_text or not isinstance(event, Delta)):
            return None
        self._context.activity.note(self, event)
        if isinstance(event, Delta):
            return Progress(num_prompt, num_prompt)
        return event if isinstance(event, Progress) and event.evaluated < num_prompt - 1 else None

    def _is_complete(self, finished: Finished) -> bool:
        """Whether the model ended the answer, or a client's stop string that stands for a marker after calls."""
        call_format, text = self.exchange.model.call_format, finished.stop_text
        is_marker = call_format is not None and bool(text) and text in (call_format.close, call_format.end.strip())
        return finished.reason is FinishReason.STOP and (text is None or is_marker)

    def _as_told(self, finished: Finished) -> Finished:
        """An answer whose call broke ends like one that was cut off."""
        if self.exchange.parser.is_cut and finished.reason is FinishReason.STOP and finished.stop_text is None:
            finished = replace(finished, reason=FinishReason.LENGTH)
            self.observe(finished)
        return finished

    def give_up(self) -> None:
        """Cancels a running request, and keeps the turn of a broken answer."""
        if self.outcome is None:
            self._generation.cancel()
        if self.started is not None and self.error is None and self.finished is None:
            self._keep_turn(None)

    async def _explained(self, started: Started) -> Started:
        """The event with reasons for misses; the engine's reason stays."""
        request = self.request
        if request.is_prefix_only:
            if request.session_id is not None:
                self.name = account.Name(request.namespace, request.session_id)
            return started
        source = self.exchange.conversation
        rendered = account.Rendered(
            self.exchange.asked, request.tokens, request.outline, () if source is None else source.heals
        )
        self.name, previous = self._conversations.find(request.session_id, rendered, request.request_id)
        if previous is not None:
            self.previous_id = previous.request_id
            if keeps_question(previous.prompt, rendered.prompt):
                self.kept_note = previous.note
            else:
                self.moved_note = await asyncio.to_thread(find_moved_note, previous.prompt, rendered.prompt)
        if started.reuse.misses:
            return started
        is_asked = request.cache_prompt
        reuse = await self._reuse(started, previous, rendered) if is_asked else account.declined(previous, rendered)
        if is_asked and rendered.heals:
            reuse = replace(reuse, healed=account.healed(previous, rendered, started.hit_tokens))
        return replace(started, reuse=reuse)

    async def _reuse(
        self, started: Started, previous: account.EvaluatedTurn | None, rendered: account.Rendered
    ) -> Reuse:
        """Compares long texts on another thread."""
        match, hit = started.match_tokens, started.hit_tokens
        is_unseen = self._conversations.is_unseen(rendered)
        why = partial(account.explain, previous, rendered, match=match, hit=hit, is_unseen=is_unseen)
        if previous is None or hit >= min(len(previous.tokens), len(rendered.tokens) - 1):
            return why()
        reuse = await asyncio.to_thread(why)
        engine = self._context.pool.engines.get(self.exchange.model.base_id)
        if engine is None or self.name is None or not any(miss.cause is Cause.EVICTED for miss in reuse.misses):
            return reuse
        cache = engine.stats().cache
        needed = self._conversations.num_tokens_since(self.name, rendered) * cache.stored_bytes_per_token
        return account.with_missing_bytes(reuse, int(needed) - cache.budget_bytes)

    def _remember_reply(self, finished: Finished) -> None:
        exchange = self.exchange
        if _is_whole(finished) and exchange.conversation is not None:
            exchange.model.renderer.remember_reply(exchange.prompt, "".join(self._texts), self.token_ids)

    def _remember_calls(self) -> None:
        source, healing = self.exchange.conversation, self._context.kept(healing_of)
        if healing is None or source is None or not self.exchange.parser.made_calls:
            return
        of, is_kept = (source.namespace, self.session_id), not self.request.is_volatile
        calls = healing.calls.remember(*of, self.exchange.reply_messages(), source.declared_tools, is_kept=is_kept)
        if calls:
            self._context.in_background(asyncio.to_thread(healing.calls.write, calls))

    def _keep_turn(self, finished: Finished | None) -> None:
        """Keeps the turn; None: the answer broke off."""
        request, exchange = self.request, self.exchange
        if self.name is None or request.is_prefix_only or not request.cache_prompt:
            return
        num_evaluated, num_prompt = self.cached_tokens + self.evaluated_tokens, len(request.tokens)
        tokens = request.tokens[:num_evaluated]
        if num_evaluated == num_prompt:
            reply_ids = self.token_ids if _is_whole(finished) else self.token_ids[:-1]
            tokens = np.concatenate([tokens, np.array(reply_ids, np.int32)])
        said = None
        if finished is not None:
            messages = exchange.whole_reply()
            said = part_of(messages[0]) if messages else Part(PLAIN, "".join(self._texts))
            self.repeated_call = repeated_call((*exchange.asked.parts, said))
        turn = account.EvaluatedTurn(
            exchange.asked,
            said,
            tokens=tokens,
            num_prompt_tokens=num_prompt,
            request_id=request.request_id,
            outline=request.outline,
            head_tokens=request.head_tokens,
            note=self.moved_note or self.kept_note,
        )
        self._conversations.record(self.name, turn)


class Answer:
    """The runs of all choices, or of an only choice's parts."""

    def __init__(self, context: ApiContext, arrival: Arrival, exchange: Exchange) -> None:
        """Submits all choices or none; raises QueueFull, EngineStopped, ApiError (503)."""
        self.context = context
        self.runs: list[Run] = []
        self.is_refused = False
        """The client gets an error only. Set before `close`."""
        self.engine = context.running_engine(exchange.model)
        self.arrival = arrival
        self._num_choices = len(exchange.choices)
        self._num_recorded = 0
        try:
            for choice in exchange.choices:
                self._submit(choice)
        except BaseException:
            for run in self.runs:
                run.give_up()
                context.activity.forget(run)
            raise

    def _submit(self, exchange: Exchange) -> None:
        self.runs.append(Run(self, exchange, self.runs[-1] if 0 < len(self.runs) < self._num_choices else None))
        self.context.activity.note(self.runs[-1])

    async def events(self) -> AsyncIterator[OutputEvent]:
        """Yields an only choice's events; raises its error."""
        for run in self.runs:  # to which `go_on` adds
            async for event in run.events():
                if isinstance(event, Finished):
                    self._note_end()
                yield event

    async def read(self) -> tuple[list[OutputEvent], Finished]:
        """An only choice's events, the last apart; raises its error."""
        *events, finished = [event async for event in self.events()]
        assert isinstance(finished, Finished), "the events of a request end with Finished"
        return events, finished

    async def choice_events(self) -> AsyncIterator[tuple[int, OutputEvent | Failed]]:
        """Yields each choice's index and event as they come.

        One of several choices that fails ends with `Failed`; the first error is raised if none succeeds.
        """
        if self._num_choices == 1:
            async for event in self.events():
                yield 0, event
            return
        errors: dict[int, Exception] = {}
        async for index, either in _merged(self.runs):
            if isinstance(either, Failed):
                logger.warning("%s: choice %d failed: %s", self.runs[0].request.request_id, index, either.error)
                errors[index] = either.error
            if isinstance(either, Failed | Finished):
                self._note_end()
            yield index, either
        if len(errors) == self._num_choices:
            raise errors[min(errors)]

    def go_on(self, exchange: Exchange) -> bool:
        """Submits an only choice's next part; False if the engine is full."""
        assert self._num_choices == 1, "only the answer of one choice goes on"
        try:
            self._submit(exchange)
        except EngineError:
            return False
        return True

    @property
    def finished(self) -> Finished:
        """The last part's or first successful choice's end, with the counts of all."""
        well = [run.finished for run in self.runs if run.finished is not None]
        if self._num_choices == 1:
            return well[-1]
        counts = counts_of(self.runs)
        sums = {name: join([getattr(end.timings, name) for end in well]) for name, join in _OF_ALL.items()}
        prompt = {"cache_tokens": counts.cached_tokens, "evaluated_tokens": counts.evaluated_tokens}
        timings = Timings(**prompt, predicted_tokens=counts.completion_tokens, **sums)
        totals: dict[str, Any] = {name: _total(getattr(end, name) for end in well) for name in _TOTALS}
        return replace(well[0], prompt_tokens=counts.prompt_tokens, timings=timings, **totals)

    @property
    def progress(self) -> str:
        return self._lead.progress

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts and output so far; a shared prompt counts once."""
        counts = counts_of(self.runs)
        return counts.prompt_tokens + sum(len(run.token_ids) for run in self.runs)

    @property
    def _lead(self) -> Run:
        return self.runs[0 if self._num_choices > 1 else -1]

    def _note_end(self) -> None:
        latest = self.runs[self._num_recorded :]
        if all(one.outcome is not None for one in latest) and any(one.has_ended for one in latest):
            self._record()

    def close(self) -> None:
        """Cancels what runs, makes the record, prepares the next turn. Call it once."""
        try:
            for run in reversed(self.runs):
                run.give_up()
            self._record()
            self._prepare_next_turn()
        finally:
            for run in self.runs:
                self.context.activity.forget(run)

    def _record(self) -> None:
        runs = tuple(self.runs[self._num_recorded :])
        self._num_recorded = len(self.runs)
        if not runs:
            return
        first, activity, number = runs[0], self.context.activity, None
        if first.timings is not None:
            activity.note_pace(first.model_id, first.timings)
        if first.name is not None:
            session = self.context.sessions.find(first.name.namespace, first.name.id)
            number = 1 if session is None else session.num_turns + 1
        saved_seconds = activity.seconds_for(first.model_id, counts_of(runs).cached_tokens) or 0.0
        record = RequestRecord(runs, number, saved_seconds, self.is_refused)
        for tell in self.context.subscribers:
            tell(record)

    def _prepare_next_turn(self) -> None:
        """Evaluates the turn ahead; holds the state of an answer that calls tools until they have answered."""
        run, exchange = self._lead, self._lead.exchange
        request, reply_ids = exchange.request, tuple(run.token_ids)
        is_answered = run.has_ended and not request.is_prefix_only
        if is_answered and exchange.conversation is not None and request.cache_prompt:
            self.context.in_background(_evaluate_ahead(self.engine, run, exchange.conversation, reply_ids))
        if run.outcome == FinishReason.STOP and exchange.parser.made_calls:
            label = request.session_id or request.request_id
            turn = request.state_namespace, label, request.tokens, reply_ids
            self.engine.execute_later(pin_turn, *turn, time.monotonic())


async def _evaluate_ahead(engine: Engine, run: Run, conversation: Conversation, reply_ids: Sequence[int]) -> None:
    exchange = run.exchange

    def requests() -> list[GenerationRequest]:
        # Agents leave a note in its place until they have an answer, or move it with each result of a tool.
        note = run.moved_note or (None if exchange.parser.made_calls else run.kept_note)
        histories = [conversation, *([conversation.without_note(*note)] if note is not None else [])]
        return next_turn_requests(histories, exchange.request, reply_ids, exchange.whole_reply())

    try:
        for request in await asyncio.to_thread(requests):
            async for _ in engine.submit(request):
                pass
    except Exception as error:  # no client waits for this, and the next turn evaluates missing tokens itself
        logger.debug("%s: the next turn was not evaluated ahead: %s", exchange.request.request_id, error)


def _total(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


async def _merged(runs: Sequence[Run]) -> AsyncIterator[tuple[int, OutputEvent | Failed]]:
    """The queue is short, so that the engine notices a slow reader."""
    queue: asyncio.Queue[tuple[int, OutputEvent | Failed]] = asyncio.Queue(maxsize=1)

    async def follow(index: int, run: Run) -> None:
        try:
            async for event in run.events():
                await queue.put((index, event))
        except Exception as error:  # any error is reported for this choice only; the other choices go on
            await queue.put((index, Failed(error)))

    followers = [asyncio.create_task(follow(index, run)) for index, run in enumerate(runs)]
    num_left = len(runs)
    try:
        while num_left:
            index, event = await queue.get()
            num_left -= isinstance(event, Finished | Failed)
            yield index, event
    finally:
        for follower in followers:
            follower.cancel()
        await asyncio.gather(*followers, return_exceptions=True)
