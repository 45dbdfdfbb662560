"""`POST /v1/responses`: the answer, and the runs of answers in the background.

Every event and the store show the same response object. A planning thread waits for the store. Runs are bounded in
number by namespace, in bytes together, and in time. Event loop only.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal, TypeAlias

from typing_extensions import TypedDict

from models.output.pieces import PartStatus
from models.prompt.shapes import Message
from server.api.answer import Answer, Exchange, Question
from server.api.binding import ForcedCalls
from server.api.call import generate, inspect
from server.api.conversation import check_new_media
from server.api.dialect import ApiContext, Endpoint, Operation
from server.api.errors import ApiError, Code, explain, retry_later, wrong
from server.api.generation import GenerationBody, SamplingBody, read_params
from server.api.params import Incoming, ask
from server.api.record import CostsAtEnd, costs_of
from server.api.responses import conversation
from server.api.responses.conversation import ID_PREFIX, UNFINISHED, ReadInput, ResponsesBody, parse_known
from server.api.responses.output import AnswerOutput, Item
from server.api.responses.store import Held, StoredResponse, choose_evictions, holder_of, store_of
from server.api.wire import Payload, body_of, sse_event
from server.app.config import ServerConfig
from server.engine.request import Finished, FinishReason, GenerationRequest, Progress, Started

logger = logging.getLogger(__name__)


class ResponseUsage(TypedDict):
    """Token counts in this API's names."""

    input_tokens: int
    input_tokens_details: dict[Literal["cached_tokens", "cache_write_tokens"], int]
    """`cache_write_tokens` were evaluated and kept for reuse."""
    output_tokens: int
    output_tokens_details: dict[Literal["reasoning_tokens"], int]
    total_tokens: int


class ResponseBody(CostsAtEnd):
    """One response, finished or not."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: dict[Literal["code", "message"], str] | None
    frequency_penalty: float
    incomplete_details: dict[Literal["reason"], Literal["max_output_tokens"]] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: Sequence[Item]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    conversation: dict[Literal["id"], str] | None
    prompt_cache_key: str | None
    reasoning: dict[Literal["effort", "summary"], str | None]
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: Mapping[str, Any]
    tool_choice: Any
    tools: Sequence[Any]
    top_logprobs: Literal[0]
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    user: str | None
    metadata: Mapping[str, str]


def _usage_of(finished: Finished) -> ResponseUsage:
    num_prompt, timings = finished.prompt_tokens, finished.timings
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {
            "cached_tokens": timings.cache_tokens,
            "cache_write_tokens": timings.evaluated_tokens,
        },
        "output_tokens": timings.predicted_tokens,
        "output_tokens_details": {"reasoning_tokens": finished.reasoning_tokens or 0},
        "total_tokens": num_prompt + timings.predicted_tokens,
    }


InputTokenCount: TypeAlias = dict[Literal["object", "input_tokens"], str | int]


_SAMPLING: Final = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
_UNSAID: Final[Payload] = {"description": None, "parameters": None, "strict": False}
"""What holds for a function that does not say, which clients look for."""


def _begun_response(body: ResponsesBody, fields: Payload, request: GenerationRequest, model: str) -> ResponseBody:
    """A response before its first token; `fields` are as sent."""
    wish = body.reasoning or conversation.ReasoningWish()
    return body_of(
        ResponseBody,
        body,
        id=request.request_id,
        object="response",
        created_at=int(time.time()),
        status="queued" if body.background else "in_progress",
        background=body.background is True,
        **dict.fromkeys(("completed_at", "error", "incomplete_details", "usage")),
        model=model,
        max_output_tokens=body.limit().tokens,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        conversation=None if body.conversation is None else {"id": body.conversation},
        reasoning={"effort": wish.effort, "summary": wish.summary or wish.generate_summary},
        service_tier=body.service_tier or "default",
        store=body.store is not False,
        **{name: getattr(request.sampling, name) for name in _SAMPLING},
        text={"format": {"type": "text"}, **(fields.get("text") or {})},
        tool_choice=fields.get("tool_choice") or "auto",
        tools=[_UNSAID | tool if tool.get("type") == "function" else tool for tool in fields.get("tools") or ()],
        top_logprobs=0,
        truncation=body.truncation or "disabled",
        metadata=body.metadata or {},
    )


MAX_RUNNING: Final = 16
MAX_RUNS: Final = 256
"""The most runs of all namespaces, ended ones included."""
MAX_EVENT_BYTES: Final = 1 << 26
"""The most bytes of all runs' events; beyond that, the first events of the oldest run are dropped."""
MAX_SECONDS: Final = 7200
KEPT_SECONDS: Final = 600
"""How long the events of a run that has ended are kept."""


class BackgroundRun:
    """One response, unfinished or ended, and its events, for clients that come back."""

    def __init__(
        self, forget: Callable[[], None], response: "_ResponseExchange", answer: Answer, stack: ExitStack
    ) -> None:
        self.forget = forget
        self.now: Callable[[], Payload] = response.now
        self.progress: Callable[[], str] = lambda: answer.progress
        self.resources = stack.pop_all()
        """The permit, the model and the slot of the request."""
        self.is_cancelled = self.has_ended = False
        self.events: list[bytes] = []
        self.num_bytes = self.num_forgotten = 0
        """Bytes of the events; how many of the first ones were dropped."""
        self._grown = asyncio.Event()
        self._task: asyncio.Task[Any] | None = None

    async def wait(self) -> None:
        """Returns at the next event, or at the end."""
        await self._grown.wait()

    async def cancel(self) -> None:
        """Ends the run, unless the response has ended; returns when the run has ended."""
        assert self._task is not None, "a run is found once it is made"
        if self.now()["status"] in UNFINISHED:
            self.is_cancelled = True
            self._task.cancel()
        await asyncio.wait((self._task,))

    async def follow(self, number: int = 0) -> AsyncIterator[bytes]:
        """Yields the events from `number` on, future ones included; raises ApiError (400) for dropped ones."""
        while True:
            while number < self.num_forgotten + len(self.events):
                if number < self.num_forgotten:
                    why = f"the first {self.num_forgotten} events are not kept any more"
                    raise wrong("starting_after", f"{why}; leave stream out to get the response")
                yield self.events[number - self.num_forgotten]
                number += 1
            if self.has_ended:
                return
            await self.wait()

    async def make(self, events: AsyncIterator[bytes], note_bytes: Callable[[int], None]) -> None:
        """Keeps all events; closes `held`."""
        self._task = asyncio.current_task()
        try:
            with self.resources:
                async for event in events:
                    self.events.append(event)
                    self.num_bytes += len(event)
                    note_bytes(len(event))
                    self._wake()
        finally:
            response, self.has_ended = self.now(), True
            # What made the response goes, and the prompt with it.
            self.now, self.progress = (lambda: response), (lambda: "ended")
            self._wake()
            asyncio.get_running_loop().call_later(KEPT_SECONDS, self.forget)

    def forget_half(self) -> int:
        """Drops the first half of the events; returns their bytes."""
        num_gone = (len(self.events) + 1) // 2
        num_bytes = sum(map(len, self.events[:num_gone]))
        del self.events[:num_gone]
        self.num_forgotten += num_gone
        self.num_bytes -= num_bytes
        return num_bytes

    def _wake(self) -> None:
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()


class BackgroundRuns:
    """All runs, the oldest first, by namespace and id of the response."""

    def __init__(self, config: ServerConfig) -> None:
        self._runs: dict[tuple[str, str], BackgroundRun] = {}
        self._num_bytes = 0

    def find(self, namespace: str, name: str) -> BackgroundRun | None:
        """A run that is kept."""
        return self._runs.get((namespace, name))

    def add(self, response: "_ResponseExchange", answer: Answer, stack: ExitStack) -> BackgroundRun:
        """A new run, to be made, which takes over `stack`; raises ApiError (429), which refuses the answer."""
        place = response.request.namespace, response.request.request_id
        running = [holder_of(space) for (space, _), run in self._runs.items() if not run.has_ended]
        # Of what is left, nobody takes the last: a key that comes later finds some.
        most = min(MAX_RUNNING, MAX_RUNS - len(running))
        kept = {place, *(one for one, run in self._runs.items() if not run.has_ended)}
        all_held = [Held(one, holder_of(one[0]), (1,)) for one in (*self._runs, place)]
        victims = choose_evictions(all_held, kept, (MAX_RUNS,))
        if running.count(holder_of(place[0])) >= most or victims is None:
            answer.is_refused = True
            why = f"{len(running)} responses are made in the background; wait for one, or cancel one"
            raise retry_later(Code.QUEUE_FULL, why, 5)
        for gone in victims:
            self._forget(gone)
        run = self._runs[place] = BackgroundRun(partial(self._forget, place), response, answer, stack)
        return run

    def note_bytes(self, num_bytes: int) -> None:
        """Counts a new event; while all are too many, the oldest run of a key over its share loses the first half."""
        self._num_bytes += num_bytes
        while self._num_bytes > MAX_EVENT_BYTES:
            sums = Counter[str]()
            for (space, _), run in self._runs.items():
                sums[holder_of(space)] += run.num_bytes
            share = MAX_EVENT_BYTES / len(+sums)
            over = (run for (space, _), run in self._runs.items() if run.events and sums[holder_of(space)] > share)
            self._num_bytes -= next(over).forget_half()

    def _forget(self, place: tuple[str, str]) -> None:
        if (run := self._runs.pop(place, None)) is not None:
            self._num_bytes -= run.num_bytes


@inspect
def count_input_tokens(context: ApiContext, incoming: Incoming) -> Payload:
    """Counts the tokens of a prompt, those of the template included."""
    body = parse_known(conversation.InputBody, incoming.fields, conversation.IN_INPUT, conversation.KNOWN)
    given = conversation.read_given(incoming, body, context.pool.find(body.model), incoming.namespace(), "count")
    return {"object": "response.input_tokens", "input_tokens": len(given.conversation.render().tokens)}


@generate(ID_PREFIX)
def create_response(context: ApiContext, incoming: Incoming) -> Exchange:
    """Answers items, and those that they go on from."""
    body = parse_known(ResponsesBody, incoming.fields, conversation.IN_RESPONSES, conversation.KNOWN)
    if body.background and body.store is False:
        raise wrong("background", "a response that is made in the background is stored; leave store out")
    model = context.pool.find(body.model)
    check_new_media(body.input, "input", model)
    namespace = incoming.namespace(body.cache_salt)
    given = conversation.read_given(incoming, body, model, namespace, incoming.request_id.removeprefix(ID_PREFIX))
    shared = body.model_dump(include={*SamplingBody.model_fields})
    params = read_params(GenerationBody.model_validate(shared), model)
    calls = {"grammar": body.answer_grammar(), **body.calls()}
    params = replace(params, limit=body.limit(), prompt_param="input", **calls)
    if isinstance(forced := params.grammar, ForcedCalls):
        shown = {tool.name: name for name, tool in given.tools.by_name.items()}
        names = forced.names and tuple(shown.get(name, name) for name in forced.names)
        params = replace(params, grammar=replace(forced, names=names))
    if given.session is not None:
        # The session is that of the chain's first response.
        incoming = replace(incoming, fields={**incoming.fields, "previous_response_id": given.session})
    question = ask(incoming, model, given.conversation, params)
    return _ResponseExchange(body, incoming.fields, question, given, context if body.store is not False else None)


class _ResponseExchange(Exchange):
    """Writes and stores one response."""

    def __init__(
        self, body: ResponsesBody, fields: Payload, question: Question, given: ReadInput, keeper: ApiContext | None
    ) -> None:
        """`keeper` has the store; None: nothing is stored."""
        super().__init__(question)
        self._given = given
        self._keeper = keeper
        self._response: Payload = _begun_response(body, fields, self.request, self.model.id)
        is_summary = self._response["reasoning"]["summary"] not in (None, "", "none")
        is_enclosed = "reasoning.encrypted_content" in (body.include or ())
        name = self.request.request_id.removeprefix(ID_PREFIX)
        self._output = AnswerOutput(name, given.tools, is_summary=is_summary, is_enclosed=is_enclosed)
        self._run: BackgroundRun | None = None
        # Events of a response in the background are kept, and this one holds the whole response.
        self.tells_progress = body.stream is True and not body.background

    def begun(self, answer: Answer, stack: ExitStack) -> None:
        if self._keeper is not None and self._response["background"]:
            runs = self._keeper.kept(BackgroundRuns)
            self._run = runs.add(self, answer, stack)
            self._keeper.in_background(self._run.make(self._written(answer), runs.note_bytes))

    def frames(self, answer: Answer) -> AsyncIterator[bytes]:
        return self._written(answer) if self._run is None else self._run.follow()

    async def body(self, answer: Answer) -> Payload:
        """The whole response; in the background, as it is once it is stored."""
        if self._run is not None:
            await self._run.wait()
        else:
            async for _ in self._events(answer):
                pass
        return self.now()

    def reply_messages(self) -> list[Message]:
        return conversation.read_messages(self._output.so_far)

    def now(self) -> Payload:
        is_open = self._response["status"] in UNFINISHED
        return {**self._response, "output": self._output.so_far} if is_open else self._response

    async def _written(self, answer: Answer) -> AsyncIterator[bytes]:
        number = 0
        async for event in self._told(answer):
            yield sse_event({"type": event["type"], "sequence_number": number, **event}, event["type"])
            number += 1

    async def _told(self, answer: Answer) -> AsyncIterator[Payload]:
        limit = asyncio.timeout(None if self._run is None else MAX_SECONDS)
        try:
            async with limit:
                if self._run is not None:
                    await self._save()
                yield {"type": "response.created", "response": self._response}
                yield self._told_status()
                async for event in self._events(answer):
                    yield event
        except asyncio.CancelledError:
            if self._run is None or not self._run.is_cancelled:
                raise
            yield await self._cut("cancelled")
        except Exception as error:  # the status is sent, so the stream must report the error
            late = ApiError(Code.REQUEST_TIMEOUT, f"a response in the background may take {MAX_SECONDS} s")
            yield await self._cut("failed", late if limit.expired() else explain(error, self.request.request_id))

    async def _cut(self, status: Literal["failed", "cancelled"], error: ApiError | None = None) -> Payload:
        self._output.close("incomplete")
        code = "context_length_exceeded" if error and error.code is Code.CONTEXT_EXCEEDED else "server_error"
        self._become(status, error=error and {"code": code, "message": error.message})
        if self._run is not None:
            self._run.resources.close()
            await self._keep()
        return self._told_status()

    async def _events(self, answer: Answer) -> AsyncIterator[Payload]:
        async for event in answer.events():
            match event:
                case Started():
                    if self._response["status"] == "queued":
                        self._become("in_progress")
                        yield self._told_status()
                case Progress(evaluated, total):
                    if evaluated < total:
                        yield {"type": "response.in_progress", "response": self._response}
                case Finished(reason):
                    status: PartStatus = "incomplete" if reason is FinishReason.LENGTH else "completed"
                    for body in self._output.close(status):
                        yield body
                    self._become(status, usage=_usage_of(event), **costs_of(event, self.request.session_id))
                    kept_in = self._response["conversation"]
                    await self._keep(kept_in and kept_in["id"])
                    yield self._told_status()
                case _:
                    for body in self._output.add(event):
                        yield body

    def _become(self, status: str, **changes: Any) -> None:
        if status == "completed":
            changes["completed_at"] = int(time.time())
        elif status == "incomplete":
            changes["incomplete_details"] = {"reason": "max_output_tokens"}
        self._response = {**self._response, "status": status, "output": self._output.ended, **changes}

    def _told_status(self) -> Payload:
        return {"type": f"response.{self._response['status']}", "response": self._response}

    async def _keep(self, conversation_id: str | None = None) -> None:
        """Stores the response. A response that is not stored, or whose conversation is gone, says so."""
        try:
            if not await self._save(conversation_id):
                self._response = {**self._response, "conversation": None}
        except ApiError as error:  # the answer itself is complete
            logger.warning("%s: the response is not kept: %s", self._response["id"], error.message)
            self._response = {**self._response, "store": False}

    async def _save(self, conversation_id: str | None = None) -> bool:
        """Returns whether the conversation, if any, is there; raises ApiError (507)."""
        if self._keeper is None:
            return True
        keeper, space = self._keeper, self.request.namespace
        name, parent = self._response["id"], self._response["previous_response_id"]
        kept = StoredResponse(name, dict(self._response), self._given.new, parent, self._given.session or name)
        save = partial(keeper.kept(store_of).save, space, kept, conversation_id)
        return await keeper.storing.run(holder_of(space), save)


ROUTES = (
    Endpoint("/responses", create_response, Operation(ResponsesBody, ResponseBody, dict[str, Any])),
    Endpoint("/responses/input_tokens", count_input_tokens, Operation(conversation.InputBody, InputTokenCount)),
)
