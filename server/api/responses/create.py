"""`POST /v1/responses`: reads a body and its history, answers, and stores the response.

Unlike in other dialects, an unknown field is refused. Every event and the store show the same response object. A
planning thread waits for the store.
"""

import asyncio
import hashlib
import json
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NotRequired

from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from models.prompt.chat_template import Message
from server.api.answer import Answer, Exchange, OutputEvent, Question
from server.api.call import generate, inspect
from server.api.context import ApiContext
from server.api.conversation import Conversation
from server.api.dialect import Body, Payload, Rules, parse_body, validated
from server.api.errors import ApiError, Code, explain
from server.api.guard import namespace_of
from server.api.openai.params import read_params
from server.api.openai.types import GenerationBody
from server.api.params import (
    AnswerGrammar,
    ForcedCalls,
    Incoming,
    answer_or_calls,
    build_request,
    calls_in_text,
    can_forbid_calls,
    forced_calls,
)
from server.api.record import CacheBody, TimingsBody, costs_of
from server.api.responses.items import Item, check_items, read_messages, search_outputs
from server.api.responses.output import AnswerOutput, Event, ItemBody, ThoughtStyle, ToolSet
from server.api.responses.store import ResponseStore, StoredResponse, store_of
from server.api.responses.types import (
    ENCRYPTED_THOUGHTS,
    IN_COUNT,
    IN_RESPONSES,
    InputBody,
    ReasoningWish,
    ResponsesBody,
    read_tools,
)
from server.api.wire import MAX_MESSAGES, sse_event
from server.engine.request import Finished, FinishReason, GenerationRequest, Started
from server.pool.served import ServedModel

logger = logging.getLogger(__name__)


class InputTokensDetails(TypedDict):
    """Where the prompt's tokens came from."""

    cached_tokens: int
    cache_write_tokens: int
    """Prompt tokens evaluated and kept for reuse."""


class AnswerTokensDetails(TypedDict):
    """What the answer's tokens were spent on."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """Token counts of one request, as this API names them."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: AnswerTokensDetails
    total_tokens: int


class ResponseError(TypedDict):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(TypedDict):
    """Why a response ended early."""

    reason: Literal["max_output_tokens"]


class ConversationName(TypedDict):
    """The conversation that a response belongs to."""

    id: str


class ReasoningBody(TypedDict):
    """What was asked of the model's thoughts."""

    effort: str | None
    summary: str | None


class ResponseBody(TypedDict):
    """One response, finished or not."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: Sequence[ItemBody]
    parallel_tool_calls: bool
    previous_response_id: str | None
    conversation: ConversationName | None
    prompt_cache_key: str | None
    reasoning: ReasoningBody
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
    timings: NotRequired[TimingsBody]
    cache: NotRequired[CacheBody | None]


def usage_of(finished: Finished) -> ResponseUsage:
    """Returns a finished request's token counts."""
    timings = finished.timings
    return {
        "input_tokens": finished.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": timings.cache_tokens,
            "cache_write_tokens": timings.evaluated_tokens,
        },
        "output_tokens": timings.predicted_tokens,
        "output_tokens_details": {"reasoning_tokens": finished.reasoning_tokens or 0},
        "total_tokens": finished.prompt_tokens + timings.predicted_tokens,
    }


def error_of(error: ApiError) -> ResponseError:
    """Returns a failed response's error."""
    if error.status == 429:
        return {"code": "rate_limit_exceeded", "message": error.message}
    kept = "context_length_exceeded", "server_error"
    return {"code": kept[0] if error.code.value == kept[0] else kept[1], "message": error.message}


def begun_response(
    body: ResponsesBody, fields: Mapping[str, Any], request: GenerationRequest, model: str
) -> ResponseBody:
    """Returns a response before its first token; `fields` are the body's as sent."""
    wish = body.reasoning or ReasoningWish()
    return {
        "id": request.request_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "conversation": {"id": body.conversation} if body.conversation is not None else None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": wish.effort, "summary": wish.summary or wish.generate_summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": body.service_tier or "default",
        "store": body.is_stored,
        "temperature": request.sampling.temperature,
        "text": {"format": {"type": "text"}, **(fields.get("text") or {})},
        "tool_choice": fields.get("tool_choice") or "auto",
        "tools": fields.get("tools") or [],
        "top_logprobs": 0,
        "top_p": request.sampling.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }


_ID_PREFIX = "in"


@dataclass(frozen=True)
class History:
    """The items before a request's new items."""

    items: Sequence[Item] = ()
    session: str | None = None
    """The name of the chain of responses; None at its beginning."""


@dataclass(frozen=True)
class RequestItems:
    """All items of one request."""

    history: History
    new: Sequence[Item]
    """With ids; references are resolved."""


def read_request_items(body: InputBody, store: ResponseStore, namespace: str, name: str) -> RequestItems:
    """Returns a body's items; `name` is the base of new ids. Raises ApiError (400, 404)."""
    if body.previous_response_id is not None and body.conversation is not None:
        message = "conversation: it cannot be given with previous_response_id"
        raise ApiError(Code.INVALID_VALUE, message, "conversation")
    history = History()
    if body.previous_response_id is not None:
        history = _chain(store, namespace, body.previous_response_id)
    elif body.conversation is not None:
        history = _conversation(store, namespace, body.conversation)
    if len(history.items) + len(body.input) > MAX_MESSAGES:
        raise ApiError(Code.INVALID_VALUE, f"input: at most {MAX_MESSAGES} items make a prompt", "input")
    checked = check_items(body.input)
    found = [_resolved(item, index, history, store, namespace) for index, item in enumerate(checked)]
    return RequestItems(history, with_ids(found, name))


def with_ids(items: Sequence[Item], name: str) -> list[Item]:
    """Returns checked items as stored: with ids, a message's text as a part."""
    return [_as_kept(item, f"{_ID_PREFIX}_{name}_{index}") for index, item in enumerate(items)]


def _as_kept(item: Item, item_id: str) -> Item:
    given = item.get("id")
    kept = {**item, "id": given if isinstance(given, str) and given else item_id}
    if item["type"] == "message" and isinstance(item["content"], str):
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        part = {"type": kind, "text": item["content"]}
        return {"status": "completed", **kept, "content": [{**part, "annotations": []} if kind[0] == "o" else part]}
    return kept


def _chain(store: ResponseStore, namespace: str, response_id: str) -> History:
    chain = store.chain(namespace, response_id).result()
    if not chain:
        raise _not_found(f"there is no stored response {response_id[:200]!r}", "previous_response_id")
    if chain[0].parent is not None:
        message = f"the response {chain[0].parent!r}, which it goes on from, is not stored any more"
        raise _not_found(message, "previous_response_id")
    items = [item for response in chain for item in (*response.input, *response.body["output"])]
    return History(items, chain[0].session)


def _conversation(store: ResponseStore, namespace: str, conversation_id: str) -> History:
    if store.find_conversation(namespace, conversation_id).result() is None:
        raise _not_found(f"there is no conversation {conversation_id[:200]!r}", "conversation")
    return History(store.items(namespace, conversation_id).result(), conversation_id)


def _resolved(item: Item, index: int, history: History, store: ResponseStore, namespace: str) -> Item:
    if item["type"] != "item_reference":
        return item
    wanted = item["id"]
    of_history = (one for one in history.items if one.get("id") == wanted)
    found = next(of_history, None) or _kept_item(store, namespace, wanted)
    if found is None:
        place = f"input[{index}].id"
        raise _not_found(f"there is no stored item {wanted[:200]!r}", place)
    return found


def _kept_item(store: ResponseStore, namespace: str, item_id: str) -> Item | None:
    response = store.find(namespace, f"resp_{item_id.split('_')[1]}").result() if item_id.count("_") == 2 else None
    kept = [*response.input, *response.body["output"]] if response is not None else []
    return next((item for item in kept if item.get("id") == item_id), None)


def _not_found(message: str, param: str) -> ApiError:
    return ApiError(Code.RESPONSE_NOT_FOUND, f"{param}: {message}", param)


def parse_known(kind: type[Body], fields: Mapping[str, Any], rules: Rules) -> Body:
    """Returns the checked body; raises ApiError (400), also for an unknown field."""
    unknown = sorted(fields.keys() - rules.keys() - kind.model_fields.keys())
    if unknown:
        message = f"{unknown[0][:200]} is not known here"
        raise ApiError(Code.UNSUPPORTED_PARAMETER, message, unknown[0][:200])
    return parse_body(kind, dict(fields), rules)


ID_PREFIX = "resp_"


class ResponseTokensBody(TypedDict):
    """The length of a prompt."""

    object: str
    input_tokens: int


@dataclass(frozen=True)
class ReadInput:
    """The source of a body's prompt."""

    items: RequestItems
    tools: ToolSet
    conversation: Conversation


@dataclass(frozen=True)
class Keeping:
    """Where a response is stored."""

    store: ResponseStore
    given: ReadInput
    session: str


async def create_response(request: Request) -> Response:
    """Answers items, and those that they go on from."""
    return await generate(request, ID_PREFIX, open_response)


async def count_input_tokens(request: Request) -> Response:
    """Counts the tokens of a prompt, those of the template included."""
    return await inspect(request, _count)


def open_response(context: ApiContext, incoming: Incoming) -> Exchange:
    """Returns the checked request; raises ApiError."""
    body = parse_known(ResponsesBody, incoming.fields, IN_RESPONSES)
    model = context.find_model(body.model)
    namespace = namespace_of(incoming.http, body.cache_salt)
    name = incoming.request_id.removeprefix(ID_PREFIX)
    given = read_given(context, body, model, namespace, name)
    prompt = given.conversation.render()
    generation = validated(GenerationBody, body.generation())
    params = read_params(generation, model)
    session = given.items.history.session
    params = replace(
        params,
        grammar=_grammar(body, given, model),
        is_single_call=_is_single_call(body, given),
        prompt_param="input",
    )
    request = build_request(_in_chain(incoming, session), model, prompt, params, namespace)
    store = context.kept(store_of) if body.is_stored else None
    keeping = Keeping(store, given, session or incoming.request_id) if store is not None else None
    question = Question(model, request, prompt, given.conversation)
    return ResponseExchange(body, incoming.fields, question, given, keeping)


def read_given(context: ApiContext, body: InputBody, model: ServedModel, namespace: str, name: str) -> ReadInput:
    """Returns a prompt's source; raises ApiError. Waits for the store."""
    items = read_request_items(body, context.kept(store_of), namespace, name)
    tools, found = _found_tools(_offered_tools(body, model), items, model, namespace)
    conversation = Conversation(
        model.renderer,
        messages=_messages(body, items, found),
        tools=tools.shown,
        changed_tools=tools.callable_tools,
        forbids_calls=body.forbids_calls,
        template_arguments=body.thinking_wish().template_arguments(),
        namespace=namespace,
    ).prepared_for(model, hygiene=context.config.prompt_hygiene)
    return ReadInput(items, tools, conversation)


def _count(context: ApiContext, incoming: Incoming) -> Payload:
    body = parse_known(InputBody, incoming.fields, IN_COUNT)
    model = context.find_model(body.model)
    given = read_given(context, body, model, namespace_of(incoming.http, None), "count")
    count: ResponseTokensBody = {
        "object": "response.input_tokens",
        "input_tokens": len(given.conversation.render().tokens),
    }
    return count


def _offered_tools(body: InputBody, model: ServedModel) -> ToolSet:
    tools = read_tools(body.tools or ())
    if not tools.shown or (body.forbids_calls and not can_forbid_calls(model)):
        return ToolSet()
    if not model.renderer.reads_tools:
        raise ApiError(Code.UNSUPPORTED_PARAMETER, f"tools: the model {model.id!r} takes none", "tools")
    return tools


def _found_tools(
    tools: ToolSet, items: RequestItems, model: ServedModel, namespace: str
) -> tuple[ToolSet, dict[str, str]]:
    """With the tools that searches found; their definitions by call id."""
    definitions: dict[str, str] = {}
    all_items = [*items.history.items, *items.new]
    for item in search_outputs(all_items):
        found = read_tools(item["tools"], "input.tools", defers=False)
        shown = {tool["function"]["name"]: tool for tool in found.shown}
        first = json.dumps(next((one.get("content") for one in all_items if one.get("role") == "user"), None))
        place = (namespace, hashlib.sha256(first.encode()).digest(), item["call_id"])
        text = model.renderer.tool_definitions(list(shown), shown, place) if shown else "No tool was found."
        definitions[item["call_id"]] = text
        tools = tools.with_found(found)
    return tools, definitions


def _messages(body: InputBody, items: RequestItems, found: Mapping[str, str]) -> list[Message]:
    messages = read_messages([*_instructions(body), *items.history.items, *items.new], found)
    if not messages:
        raise ApiError(Code.MISSING_PARAMETER, "input: Field required", "input")
    return messages


def _instructions(body: InputBody) -> list[dict[str, Any]]:
    if not body.instructions:
        return []
    return [{"type": "message", "role": "system", "content": body.instructions}]


def _in_chain(incoming: Incoming, session: str | None) -> Incoming:
    """With the session of the chain's first response."""
    if session is None:
        return incoming
    return replace(incoming, fields={**incoming.fields, "previous_response_id": session})


def _grammar(body: ResponsesBody, given: ReadInput, model: ServedModel) -> AnswerGrammar | None:
    wanted, choice, tools = body.answer_grammar(), body.tool_choice, given.conversation.callable_tools
    if choice is not None and choice.mode == "required":
        is_single = choice.is_named or body.parallel_tool_calls is False
        names = _shown_names(given.tools, choice.names) if choice.names is not None else None
        return forced_calls(model, tools, ForcedCalls(names, is_single))
    if wanted is None:
        return calls_in_text(model, given.conversation)
    return answer_or_calls(model, tools, wanted) if tools else wanted


def _is_single_call(body: ResponsesBody, given: ReadInput) -> bool:
    return body.parallel_tool_calls is False and bool(given.conversation.callable_tools)


def _shown_names(tools: ToolSet, names: Sequence[str]) -> tuple[str, ...]:
    shown = {tool.name: name for name, tool in (tools.by_name or {}).items()}
    return tuple(shown.get(name, name) for name in names)


class ResponseExchange(Exchange):
    """Writes and stores one response."""

    def __init__(
        self,
        body: ResponsesBody,
        fields: Mapping[str, Any],
        question: Question,
        given: ReadInput,
        keeping: Keeping | None,
    ) -> None:
        super().__init__(question, is_streamed=body.stream is True)
        self._keeping = keeping
        self._conversation_id = body.conversation
        style = ThoughtStyle(is_summary=body.wants_summary, is_enclosed=ENCRYPTED_THOUGHTS in (body.include or ()))
        self._output = AnswerOutput(self.request.request_id.removeprefix(ID_PREFIX), given.tools, style)
        self._response = begun_response(body, fields, self.request, self.model.id)

    async def frames(self, answer: Answer) -> AsyncIterator[bytes]:
        """Yields each event with its number; the last holds the whole response."""
        number = 0
        async for event in self._told(answer):
            yield sse_event({"type": event["type"], "sequence_number": number, **event}, event["type"])
            number += 1

    async def body(self, answer: Answer) -> Payload:
        """Returns the whole response."""
        async for event in answer.events():
            if isinstance(event, Finished):
                self._output.close(_item_status(event))
                return await self._ended(event)
            if not isinstance(event, Started):
                self._output.add(event)
        raise AssertionError("the events of a request end with Finished")

    def reply_messages(self) -> list[Message]:
        """Returns the answer as clients send it back."""
        return read_messages(self._output.items)

    async def _told(self, answer: Answer) -> AsyncIterator[Event]:
        for kind in ("created", "in_progress"):
            yield {"type": f"response.{kind}", "response": self._response}
        try:
            async for event in answer.events():
                for told in self._told_of(event):
                    yield told
                if isinstance(event, Finished):
                    response = await self._ended(event)
                    yield {"type": f"response.{response['status']}", "response": response}
        except Exception as error:  # the status is sent, so the stream must report the error
            known = explain(error, self.request.request_id)
            failed = {**self._response, "status": "failed", "error": error_of(known), "output": self._output.items}
            yield {"type": "response.failed", "response": failed}

    def _told_of(self, event: OutputEvent) -> Iterator[Event]:
        match event:
            case Started():
                return
            case Finished():
                yield from self._output.close(_item_status(event))
            case _:
                yield from self._output.add(event)

    async def _ended(self, finished: Finished) -> ResponseBody:
        is_cut = finished.reason is FinishReason.LENGTH
        response: ResponseBody = {
            **self._response,
            "status": "incomplete" if is_cut else "completed",
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output.items,
            "usage": usage_of(finished),
            **costs_of(finished, self.request.session_id),
        }
        if self._keeping is not None:
            await self._keep(self._keeping, response)
        return response

    async def _keep(self, keeping: Keeping, response: ResponseBody) -> None:
        stored = StoredResponse(
            id=response["id"],
            body=dict(response),
            input=keeping.given.items.new,
            parent=response["previous_response_id"],
            session=keeping.session,
        )
        try:
            saved = keeping.store.save(self.request.namespace, stored, self._conversation_id)
            await asyncio.wrap_future(saved)
        except sqlite3.Error as error:  # the answer itself is good
            logger.warning("%s: the response is not kept: %s", response["id"], error)


def _item_status(finished: Finished) -> Any:
    return "incomplete" if finished.reason is FinishReason.LENGTH else "completed"
