"""`POST /v1/responses`.

Unlike in other dialects, an unknown field is refused. Every event and the store show the same response object. A
planning thread waits for the store.
"""

import asyncio
import hashlib
import json
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from typing_extensions import TypedDict

from models.prompt.shapes import Message
from server.api.answer import Answer, Exchange, Question
from server.api.bodies import Body, Rules, parse_body, validated
from server.api.call import generate, inspect
from server.api.conversation import Conversation, can_continue
from server.api.dialect import ApiContext, Endpoint, Operation, namespace_of
from server.api.errors import ApiError, Code, explain, wrong
from server.api.openai.types import GenerationBody, read_params
from server.api.params import Incoming, ask, shows_tools
from server.api.record import CostsAtEnd, costs_of
from server.api.responses.background import BackgroundRun, BackgroundRuns
from server.api.responses.items import Item, check_items, read_messages, search_outputs
from server.api.responses.output import AnswerOutput, ToolSet
from server.api.responses.store import ResponseStore, StoredResponse, store_of
from server.api.responses.types import IN_INPUT, IN_RESPONSES, KNOWN, InputBody, ResponsesBody, read_tools
from server.api.wire import MAX_MESSAGES, Payload, body_of, sse_event
from server.engine.request import Finished, FinishReason, GenerationRequest, Started
from server.pool.served import ServedModel

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
    incomplete_details: dict[Literal["reason"], Literal["max_output_tokens"]] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: Sequence[Item]
    parallel_tool_calls: bool
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


def usage_of(finished: Finished) -> ResponseUsage:
    """A finished request's token counts."""
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


def _failure(error: ApiError) -> str:
    if error.status == 429:
        return "rate_limit_exceeded"
    return "context_length_exceeded" if error.code is Code.CONTEXT_EXCEEDED else "server_error"


def begun_response(body: ResponsesBody, fields: Payload, request: GenerationRequest, model: str) -> ResponseBody:
    """A response before its first token; `fields` are as sent."""
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
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        conversation=None if body.conversation is None else {"id": body.conversation},
        reasoning=body.effort_and_summary,
        service_tier=body.service_tier or "default",
        store=body.is_stored,
        temperature=request.sampling.temperature,
        text={"format": {"type": "text"}, **(fields.get("text") or {})},
        tool_choice=fields.get("tool_choice") or "auto",
        tools=fields.get("tools") or [],
        top_logprobs=0,
        top_p=request.sampling.top_p,
        truncation=body.truncation or "disabled",
        metadata=body.metadata or {},
    )


ID_PREFIX = "resp_"
UNFINISHED = ("queued", "in_progress")
UNFINISHED_ITEMS = ("incomplete", "in_progress")


@dataclass(frozen=True)
class ReadInput:
    """The source of a body's prompt."""

    new: Sequence[Item]
    """With ids; references are resolved."""
    session: str | None
    """The chain's name; None at its beginning."""
    tools: ToolSet
    conversation: Conversation


def parse_known(kind: type[Body], fields: Mapping[str, Any], rules: Rules, known: Set[str] = frozenset()) -> Body:
    """Raises ApiError (400), also for a field that is neither the type's nor `known`."""
    if unknown := sorted(fields.keys() - known - kind.model_fields.keys()):
        name = unknown[0][:200]
        raise ApiError(Code.UNSUPPORTED_PARAMETER, f"{name} is not known here", name)
    return parse_body(kind, fields, rules)


def with_ids(items: Sequence[Item], name: str) -> list[Item]:
    """Items as stored: ids made of `name`, a message's text as a part."""
    return [_as_kept(item, f"in_{name}_{index}") for index, item in enumerate(items)]


def _as_kept(item: Item, item_id: str) -> Item:
    given = item.get("id")
    kept = {**item, "id": given if isinstance(given, str) and given else item_id}
    if item["type"] == "message" and isinstance(item["content"], str):
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        part = {"type": kind, "text": item["content"]}
        return {"status": "completed", **kept, "content": [{**part, "annotations": []} if kind[0] == "o" else part]}
    return kept


def read_given(context: ApiContext, body: InputBody, model: ServedModel, namespace: str, name: str) -> ReadInput:
    """A prompt's source; `name` is the base of new ids. Raises ApiError. Waits for the store."""
    store = context.kept(store_of)
    before, session = _history(body, store, namespace)
    if len(before) + len(body.input) > MAX_MESSAGES:
        raise wrong("input", f"at most {MAX_MESSAGES} items make a prompt")
    checked = enumerate(check_items(body.input))
    new = with_ids([_resolved(item, index, before, store, namespace) for index, item in checked], name)
    items = [*before, *new]
    given = read_tools(body.tools or ())
    offered = given if shows_tools(model, given.shown, forbids_calls=body.forbids_calls) else ToolSet()
    tools, found = _found_tools(offered, items, model, namespace)
    instructions = {"type": "message", "role": "system", "content": body.instructions}
    messages = read_messages([instructions, *items] if body.instructions else items, found)
    if not messages:
        raise wrong("input", "Field required", Code.MISSING_PARAMETER)
    last = new[-1] if new else {}
    conversation = Conversation(
        model.renderer,
        messages=messages,
        tools=tools.shown,
        changed_tools=tools.callable_tools,
        forbids_calls=body.forbids_calls,
        template_arguments=body.thinking_wish().template_arguments(),
        namespace=namespace,
        # The last item may be an answer that was cut off.
        continues=last.get("role") == "assistant" and last.get("status") in UNFINISHED_ITEMS and can_continue(model),
    ).prepared_for(model, hygiene=context.config.prompt_hygiene)
    return ReadInput(new, session, tools, conversation)


def _history(body: InputBody, store: ResponseStore, namespace: str) -> tuple[list[Item], str | None]:
    """Earlier items, and their chain's name."""
    name, conversation = body.previous_response_id, body.conversation
    if name is not None and conversation is not None:
        raise wrong("conversation", "it cannot be given with previous_response_id")
    if conversation is not None:
        if store.find_conversation(namespace, conversation) is None:
            raise _not_found("conversation", f"there is no conversation {conversation[:200]!r}")
        return store.items(namespace, conversation), conversation
    if name is None:
        return [], None
    chain = store.chain(namespace, name)
    if not chain:
        raise _not_found("previous_response_id", f"there is no stored response {name[:200]!r}")
    if chain[0].parent is not None:
        why = f"the response {chain[0].parent!r}, which it goes on from, is not stored any more"
        raise _not_found("previous_response_id", why)
    if chain[-1].body.get("status") in UNFINISHED:
        raise wrong("previous_response_id", f"the response {name!r} has not reached its end")
    return [item for response in chain for item in response.items], chain[0].session


def _resolved(item: Item, index: int, before: Sequence[Item], store: ResponseStore, namespace: str) -> Item:
    if item["type"] != "item_reference":
        return item
    wanted = item["id"]
    found = next((one for one in before if one.get("id") == wanted), None)
    if found is None and wanted.count("_") == 2:
        response = store.find(namespace, f"resp_{wanted.split('_')[1]}")
        found = next((one for one in response.items if one.get("id") == wanted), None) if response else None
    if found is None:
        raise _not_found(f"input[{index}].id", f"there is no stored item {wanted[:200]!r}")
    return found


def _not_found(param: str, why: str) -> ApiError:
    return wrong(param, why, Code.RESPONSE_NOT_FOUND)


def _found_tools(
    tools: ToolSet, items: Sequence[Item], model: ServedModel, namespace: str
) -> tuple[ToolSet, dict[str, str]]:
    """The tools, found ones included, and definitions of found tools by call id."""
    definitions: dict[str, str] = {}
    for item in search_outputs(items):
        found = read_tools(item["tools"], "input.tools", defers=False)
        shown = {tool["function"]["name"]: tool for tool in found.shown}
        first = json.dumps(next((one.get("content") for one in items if one.get("role") == "user"), None))
        place = (namespace, hashlib.sha256(first.encode()).digest(), item["call_id"])
        text = model.renderer.definitions.block(list(shown), shown, place) if shown else "No tool was found."
        definitions[item["call_id"]] = text
        tools = tools.with_found(found)
    return tools, definitions


@inspect
def count_input_tokens(context: ApiContext, incoming: Incoming) -> Payload:
    """Counts the tokens of a prompt, those of the template included."""
    body = parse_known(InputBody, incoming.fields, IN_INPUT, KNOWN)
    given = read_given(context, body, context.pool.find(body.model), namespace_of(incoming.http, None), "count")
    return {"object": "response.input_tokens", "input_tokens": len(given.conversation.render().tokens)}


@generate(ID_PREFIX)
def create_response(context: ApiContext, incoming: Incoming) -> Exchange:
    """Answers items, and those that they go on from."""
    body = parse_known(ResponsesBody, incoming.fields, IN_RESPONSES, KNOWN)
    if body.background and not body.is_stored:
        raise wrong("background", "a response that is made in the background is stored; leave store out")
    model = context.pool.find(body.model)
    namespace = namespace_of(incoming.http, body.cache_salt)
    given = read_given(context, body, model, namespace, incoming.request_id.removeprefix(ID_PREFIX))
    params = read_params(validated(GenerationBody, body.generation()), model)
    params = replace(params, grammar=body.answer_grammar(), prompt_param="input", **body.calls())
    if params.forced is not None:
        params = replace(params, forced=replace(params.forced, names=given.tools.shown_names(params.forced.names)))
    if given.session is not None:
        # The session is that of the chain's first response.
        incoming = replace(incoming, fields={**incoming.fields, "previous_response_id": given.session})
    question = ask(incoming, model, given.conversation, params)
    return ResponseExchange(body, incoming.fields, question, given, context if body.is_stored else None)


class ResponseExchange(Exchange):
    """Writes and stores one response."""

    def __init__(
        self, body: ResponsesBody, fields: Payload, question: Question, given: ReadInput, keeper: ApiContext | None
    ) -> None:
        """`keeper` has the store; None: nothing is stored."""
        super().__init__(question, is_streamed=body.stream is True)
        self._given = given
        self._keeper = keeper
        self._conversation_id = body.conversation
        self._response = begun_response(body, fields, self.request, self.model.id)
        is_summary = self._response["reasoning"]["summary"] not in (None, "", "none")
        is_enclosed = "reasoning.encrypted_content" in (body.include or ())
        name = self.request.request_id.removeprefix(ID_PREFIX)
        self._output = AnswerOutput(name, given.tools, is_summary=is_summary, is_enclosed=is_enclosed)
        self._run: BackgroundRun | None = None
        self._num_events = 0

    def begun(self, answer: Answer, held: ExitStack) -> None:
        """Begins a response in the background; raises ApiError (429)."""
        if self._keeper is not None and self._response["background"]:
            self._run = self._keeper.kept(BackgroundRuns).add(self, answer)
            self._keeper.in_background(self._run.make(held.pop_all()))

    def frames(self, answer: Answer) -> AsyncIterator[bytes]:
        """Yields numbered events; the last holds the whole response."""
        return self.written(answer) if self._run is None else self._run.events()

    async def written(self, answer: Answer) -> AsyncIterator[bytes]:
        """Yields numbered events, whoever reads them."""
        async for event in self._told(answer):
            yield self._numbered(event)

    async def body(self, answer: Answer) -> Payload:
        """The whole response; in the background, as it is once it is stored."""
        if self._run is not None:
            await self._run.wait()
            return self.now()
        async for _ in self._events(answer):
            pass
        return self.now()

    def reply_messages(self) -> list[Message]:
        """The answer as clients send it back."""
        messages = read_messages(self._output.so_far)
        if self.conversation is None or not messages:
            return messages
        return [self.conversation.whole(messages[0]), *messages[1:]]

    def now(self) -> ResponseBody:
        """The response so far."""
        is_open = self._response["status"] in UNFINISHED
        return {**self._response, "output": self._output.so_far} if is_open else self._response

    async def broken_off(self, error: ApiError | None) -> bytes:
        """As `Written.broken_off`."""
        return self._numbered(await self._cut("cancelled" if error is None else "failed", error))

    def _numbered(self, event: Payload) -> bytes:
        self._num_events += 1
        return sse_event({"type": event["type"], "sequence_number": self._num_events - 1, **event}, event["type"])

    async def _told(self, answer: Answer) -> AsyncIterator[Payload]:
        if self._run is not None:
            await self._keep()
        yield {"type": "response.created", "response": self._response}
        yield {"type": f"response.{self._response['status']}", "response": self._response}
        try:
            async for event in self._events(answer):
                yield event
        except Exception as error:  # the status is sent, so the stream must report the error
            yield await self._cut("failed", explain(error, self.request.request_id))

    async def _cut(self, status: Literal["failed", "cancelled"], error: ApiError | None) -> Payload:
        """The last event of a cut-off response."""
        self._output.close("incomplete")
        self._response = {**self._response, "status": status, "output": self._output.ended}
        if error is not None:
            self._response["error"] = {"code": _failure(error), "message": error.message}
        if self._run is not None:
            await self._keep()
        return {"type": f"response.{status}", "response": self._response}

    async def _events(self, answer: Answer) -> AsyncIterator[Payload]:
        async for event in answer.events():
            match event:
                case Started():
                    if self._response["status"] == "queued":
                        self._response = {**self._response, "status": "in_progress"}
                        yield {"type": "response.in_progress", "response": self._response}
                case Finished(reason):
                    for told in self._output.close("incomplete" if reason is FinishReason.LENGTH else "completed"):
                        yield told
                    self._response = self._ended(event)
                    await self._keep(self._conversation_id)
                    yield {"type": f"response.{self._response['status']}", "response": self._response}
                case _:
                    for told in self._output.add(event):
                        yield told

    def _ended(self, finished: Finished) -> ResponseBody:
        is_cut = finished.reason is FinishReason.LENGTH
        return {
            **self._response,
            "status": "incomplete" if is_cut else "completed",
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output.ended,
            "usage": usage_of(finished),
            **costs_of(finished, self.request.session_id),
        }

    async def _keep(self, conversation_id: str | None = None) -> None:
        if self._keeper is None:
            return
        name, parent = self._response["id"], self._response["previous_response_id"]
        kept = StoredResponse(name, dict(self._response), self._given.new, parent, self._given.session or name)
        try:
            store = self._keeper.kept(store_of)
            await asyncio.to_thread(store.save, self.request.namespace, kept, conversation_id)
        except sqlite3.Error as error:  # the answer itself is complete
            logger.warning("%s: the response is not kept: %s", name, error)


ROUTES = (
    Endpoint("/responses", create_response, Operation(ResponsesBody, ResponseBody, dict[str, Any])),
    Endpoint("/responses/input_tokens", count_input_tokens, Operation(InputBody, InputTokenCount)),
)
