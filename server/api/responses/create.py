"""`POST /v1/responses`: the answer to items, streamed or whole."""

import asyncio
import hashlib
import json
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from starlette.requests import Request
from starlette.responses import Response

from models.prompt.chat_template import Message, RenderedPrompt
from server.api.auth import namespace_of
from server.api.context import ApiContext, ServedModel
from server.api.conversation import Conversation, open_conversation
from server.api.dialect import Exchange, OutputEvent, Payload
from server.api.endpoint import generate, inspect
from server.api.errors import ApiError, Code, explain
from server.api.openai.generation_body import GenerationBody
from server.api.openai.params import read_params
from server.api.params import Incoming, build_request
from server.api.responses.body_types import ENCRYPTED_THOUGHTS, InputBody, ResponsesBody
from server.api.responses.client_tools import ToolSet
from server.api.responses.fields import IN_COUNT, IN_RESPONSES
from server.api.responses.history import RequestItems, read_request_items
from server.api.responses.items import read_messages, search_outputs
from server.api.responses.known_body import parse_known
from server.api.responses.output import AnswerOutput, Event, ThoughtStyle
from server.api.responses.response_body import ResponseBody, begun_response, error_of, usage_of
from server.api.responses.store import ResponseStore, StoredResponse, store_of
from server.api.responses.tools import read_tools
from server.api.sse import sse_event
from server.api.structured_output import AnswerGrammar
from server.api.tool_grammar import ForcedCalls, answer_or_calls, calls_in_text, can_forbid_calls, forced_calls
from server.api.typed_body import validated
from server.api.usage import costs_of
from server.config import ServerConfig
from server.engine.request import Finished, FinishReason, GenerationRequest, Started
from server.prompt_hygiene import with_constant_headers

logger = logging.getLogger(__name__)

ID_PREFIX = "resp_"


class ResponseTokensBody(TypedDict):
    """The length of a prompt."""

    object: str
    input_tokens: int


@dataclass(frozen=True)
class ReadInput:
    """What a body's prompt is made of."""

    items: RequestItems
    tools: ToolSet
    conversation: Conversation


@dataclass(frozen=True)
class Keeping:
    """Where a response is kept."""

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
    """Returns the checked request; raises ApiError and the renderer's errors."""
    body = parse_known(ResponsesBody, incoming.fields, IN_RESPONSES)
    model = context.find_model(body.model)
    namespace = namespace_of(incoming.http, body.cache_salt)
    name = incoming.request_id.removeprefix(ID_PREFIX)
    given = read_given(context, body, model, namespace, name)
    prompt = given.conversation.render()
    generation = validated(GenerationBody, body.generation())
    params = read_params(generation, model)
    session = given.items.history.session
    request = build_request(
        _in_chain(incoming, session),
        replace(params, grammar=_grammar(body, given, model), is_single_call=_is_single_call(body, given)),
        prompt,
        prompt_param="input",
        namespace=namespace,
        model=model,
        config=context.config,
    )
    store = context.kept(store_of) if body.is_stored else None
    keeping = Keeping(store, given, session or incoming.request_id) if store is not None else None
    return ResponseExchange(body, incoming.fields, model, request, prompt, given, keeping)


def read_given(context: ApiContext, body: InputBody, model: ServedModel, namespace: str, name: str) -> ReadInput:
    """Returns what a prompt is made of; raises ApiError. Waits for the store."""
    items = read_request_items(body, context.kept(store_of), namespace, name)
    tools, found = _found_tools(_offered_tools(body, model), items, model, namespace)
    conversation = open_conversation(
        model,
        messages=_messages(body, items, found, context.config),
        tools=tools.shown,
        changed_tools=tools.callable_tools,
        forbids_calls=body.forbids_calls,
        template_arguments=body.thinking_wish().template_arguments(),
        namespace=namespace,
    )
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
    """Returns the tools with those that searches have found, and the definitions of these by the call's id."""
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


def _messages(body: InputBody, items: RequestItems, found: Mapping[str, str], config: ServerConfig) -> list[Message]:
    messages = read_messages([*_instructions(body), *items.history.items, *items.new], found)
    if not messages:
        raise ApiError(Code.MISSING_PARAMETER, "input: Field required", "input")
    return with_constant_headers(messages) if config.prompt_hygiene else messages


def _instructions(body: InputBody) -> list[dict[str, Any]]:
    if not body.instructions:
        return []
    return [{"type": "message", "role": "system", "content": body.instructions}]


def _in_chain(incoming: Incoming, session: str | None) -> Incoming:
    """Returns the request as if it named the first response of its chain: a chain is one session."""
    if session is None:
        return incoming
    return replace(incoming, fields={**incoming.fields, "previous_response_id": session})


def _grammar(body: ResponsesBody, given: ReadInput, model: ServedModel) -> AnswerGrammar | None:
    """Returns what binds the answer: the calls that are forced, or the format of its text."""
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
    """Returns the names that the model is shown for tools that the client names by its own."""
    shown = {tool.name: name for name, tool in (tools.by_name or {}).items()}
    return tuple(shown.get(name, name) for name in names)


class ResponseExchange(Exchange):
    """Writes the answer to one request for a response, and has it kept."""

    def __init__(
        self,
        body: ResponsesBody,
        fields: Mapping[str, Any],
        model: ServedModel,
        request: GenerationRequest,
        prompt: RenderedPrompt,
        given: ReadInput,
        keeping: Keeping | None,
    ) -> None:
        super().__init__(model, request, prompt, is_streamed=body.stream is True, conversation=given.conversation)
        self._keeping = keeping
        self._conversation_id = body.conversation
        style = ThoughtStyle(is_summary=body.wants_summary, is_enclosed=ENCRYPTED_THOUGHTS in (body.include or ()))
        self._output = AnswerOutput(request.request_id.removeprefix(ID_PREFIX), given.tools, style)
        self._response = begun_response(
            body,
            fields,
            response_id=request.request_id,
            model=model.id,
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
        )

    async def frames(self, events: AsyncIterator[OutputEvent]) -> AsyncIterator[bytes]:
        """Yields each event with its number; the last one holds the whole response, failed ones too."""
        number = 0
        async for event in self._told(events):
            yield sse_event({"type": event["type"], "sequence_number": number, **event}, event["type"])
            number += 1

    async def body(self, events: AsyncIterator[OutputEvent]) -> Payload:
        """Returns the body of an answer that is not streamed."""
        async for event in events:
            if isinstance(event, Finished):
                self._output.close(_item_status(event))
                return await self._ended(event)
            if not isinstance(event, Started):
                self._output.add(event)
        raise AssertionError("the events of a request end with Finished")

    def reply_messages(self) -> list[Message]:
        """Returns the answer as clients send it back."""
        return read_messages(self._output.items)

    async def _told(self, events: AsyncIterator[OutputEvent]) -> AsyncIterator[Event]:
        for kind in ("created", "in_progress"):
            yield {"type": f"response.{kind}", "response": self._response}
        try:
            async for event in events:
                for told in self._told_of(event):
                    yield told
                if isinstance(event, Finished):
                    response = await self._ended(event)
                    yield {"type": f"response.{response['status']}", "response": response}
        except Exception as error:  # the status was sent, so the stream must tell
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
        """Returns the whole response, once it is kept."""
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
