"""`POST /api/chat`: Ollama's chat, streamed unless the request says otherwise."""

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, NotRequired, TypedDict

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from models.output.pieces import Reasoning, Text, ToolArguments, ToolCallEnded, ToolCallFailed, ToolCallStarted
from models.prompt.chat_template import Message, RenderedPrompt
from models.texts import well_formed_json
from server.api.auth import namespace_of
from server.api.context import ApiContext, ServedModel
from server.api.conversation import Conversation, can_continue, open_conversation
from server.api.dialect import Exchange, ModelReady, OutputEvent, Payload
from server.api.endpoint import generate
from server.api.field_rules import refuse_fields
from server.api.ollama.answers import OllamaEnd, OllamaHead, end_of, head_of, loaded
from server.api.ollama.body import (
    OllamaBody,
    answer_loading,
    find_model,
    offered_tools,
    read_params,
    template_arguments,
)
from server.api.ollama.dialect import line
from server.api.ollama.fields import IN_CHAT, IN_MESSAGE
from server.api.params import Incoming, build_request
from server.api.structured_output import AnswerGrammar
from server.api.tool_grammar import answer_or_calls
from server.api.typed_body import BodyModel, parse_body
from server.config import ServerConfig
from server.engine.request import Finished, GenerationRequest
from server.prompt_hygiene import with_constant_headers


class CalledFunction(BodyModel):
    """A function that the assistant called earlier."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class CallEntry(BodyModel):
    """One entry of a message's `tool_calls`."""

    id: str | None = None
    function: CalledFunction


class OllamaMessage(BodyModel):
    """One message of the conversation."""

    role: Annotated[str, Field(min_length=1)]
    """`system`, `user`, `assistant`, `tool`, or what else the model's template knows."""
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[CallEntry] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OfferedFunction(BodyModel):
    """What a tool does and takes, as the model is shown it."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OfferedTool(BodyModel):
    """One tool that the model may call."""

    type: str | None = None
    function: OfferedFunction


class OllamaChatBody(OllamaBody):
    """Body of `POST /api/chat`."""

    messages: list[OllamaMessage] | None = None
    tools: list[OfferedTool] | None = None


class FunctionResult(TypedDict):
    """A call's function."""

    index: int
    name: str
    arguments: Mapping[str, Any]


class CallResult(TypedDict):
    """A complete tool call."""

    id: str
    function: FunctionResult


class SaidMessage(TypedDict):
    """The assistant's message, or a part of it."""

    role: str
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[CallResult]]


class OllamaChatAnswer(OllamaHead, OllamaEnd):
    """The answer, and each line of a stream."""

    message: SaidMessage


async def chat(request: Request) -> Response:
    """Answers the last message of a conversation."""
    return await generate(request, "ollama-", open_chat)


def open_chat(context: ApiContext, incoming: Incoming) -> Exchange | ModelReady | Payload:
    """Returns the checked request, or the answer to one without messages; raises what `generate` knows."""
    began = time.monotonic()
    body = parse_body(OllamaChatBody, dict(incoming.fields), IN_CHAT)
    if not body.messages:
        answer = _answer(body.model or "", {"role": "assistant", "content": ""}, loaded(body.keep_alive_seconds))
        return answer_loading(context, body, answer)
    model = find_model(context, body.model)
    namespace = namespace_of(incoming.http, None)
    tools = offered_tools(incoming.fields.get("tools"), model)
    conversation = open_conversation(
        model,
        messages=_messages(body.messages, context.config),
        tools=tools,
        template_arguments=template_arguments(body, model),
        namespace=namespace,
        continues=_continues(body.messages, model),
    )
    prompt = conversation.render()
    params = read_params(body, model)
    request = build_request(
        incoming,
        replace(params, grammar=_grammar(params.grammar, conversation, model)),
        prompt,
        prompt_param="messages",
        namespace=namespace,
        model=model,
        config=context.config,
    )
    return OllamaChatExchange(body, model, request, prompt, conversation, began)


def _grammar(wanted: AnswerGrammar | None, conversation: Conversation, model: ServedModel) -> AnswerGrammar | None:
    if wanted is None:
        return None
    bound = answer_or_calls(model, conversation.tools, wanted) if conversation.tools else wanted
    return replace(bound, begun=conversation.begun)


def _continues(messages: Sequence[OllamaMessage], model: ServedModel) -> bool:
    """Whether the answer goes on with the last message, as Ollama has it; one that cannot be is answered."""
    last = messages[-1]
    return last.role == "assistant" and bool(last.content) and not last.tool_calls and can_continue(model)


def _messages(messages: Sequence[OllamaMessage], config: ServerConfig) -> list[Message]:
    """Returns the messages as the template takes them; raises ApiError for what no message may ask for."""
    for index, message in enumerate(messages):
        refuse_fields(message.model_extra or {}, IN_MESSAGE, f"messages[{index}].")
    shown = [_template_message(message) for message in messages]
    return with_constant_headers(shown) if config.prompt_hygiene else shown


def _template_message(message: OllamaMessage) -> Message:
    fields: dict[str, Any] = {
        "name": message.tool_name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.thinking or None,
        "tool_calls": [_template_call(call) for call in message.tool_calls or ()] or None,
    }
    said = [{"text": message.content}] if message.content else []
    given = {name: value for name, value in fields.items() if value is not None}
    return {"role": message.role, "content": said, **given}


def _template_call(call: CallEntry) -> Mapping[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    named = {} if call.id is None else {"id": call.id}
    return {**named, "type": "function", "function": function}


class OllamaChatExchange(Exchange):
    """Writes the answer to one request for chat."""

    def __init__(
        self,
        body: OllamaChatBody,
        model: ServedModel,
        request: GenerationRequest,
        prompt: RenderedPrompt,
        conversation: Conversation,
        began: float,
    ) -> None:
        super().__init__(model, request, prompt, is_streamed=body.is_streamed, conversation=conversation)
        self.keep_alive_seconds = body.keep_alive_seconds
        self._name = body.model or model.id
        self._began = began
        self._said = ""
        self._thought = ""
        self._calls: list[CallResult] = []
        self._open_call: ToolCallStarted | None = None
        self._arguments = ""

    async def frames(self, events: AsyncIterator[OutputEvent]) -> AsyncIterator[bytes]:
        """Yields what the model says, calls when they are complete, and at the end why and what it cost."""
        async for event in events:
            if isinstance(event, Finished):
                yield line(_answer(self._name, {"role": "assistant", "content": ""}, self._end(event)))
                continue
            said = self._keep(event)
            if said is not None:
                yield line(_answer(self._name, said, {"done": False}))

    async def body(self, events: AsyncIterator[OutputEvent]) -> Payload:
        """Returns the body of an answer that is not streamed."""
        async for event in events:
            if isinstance(event, Finished):
                return _answer(self._name, self._message, self._end(event))
            self._keep(event)
        raise AssertionError("the events of a request end with Finished")

    def reply_messages(self) -> list[Message]:
        """Returns the answer as clients send it back: without the ids of its calls, which they have no field for."""
        calls = [{"function": call["function"]} for call in self._calls]
        said = _template_message(OllamaMessage.model_validate({**self._message, "tool_calls": calls}))
        return [said if self.conversation is None else self.conversation.whole(said)]

    def _keep(self, event: OutputEvent) -> SaidMessage | None:
        """Takes a piece of the answer; returns what the client is told of it now."""
        match event:
            case Text(text) | ToolCallFailed(text):
                self._said += text
                return {"role": "assistant", "content": text}
            case Reasoning(text):
                self._thought += text
                return {"role": "assistant", "content": "", "thinking": text}
            case ToolCallStarted():
                self._open_call, self._arguments = event, ""
            case ToolArguments(text):
                self._arguments += text
            case ToolCallEnded():
                return {"role": "assistant", "content": "", "tool_calls": [self._close_call()]}
        return None

    def _close_call(self) -> CallResult:
        assert self._open_call is not None
        arguments = json.loads(well_formed_json(self._arguments))
        function: FunctionResult = {"index": len(self._calls), "name": self._open_call.name, "arguments": arguments}
        call: CallResult = {"id": self._open_call.id, "function": function}
        self._calls.append(call)
        return call

    def _end(self, finished: Finished) -> OllamaEnd:
        return end_of(finished, self._began, self.request.session_id)

    @property
    def _message(self) -> SaidMessage:
        message: SaidMessage = {"role": "assistant", "content": self._said}
        if self._thought:
            message["thinking"] = self._thought
        if self._calls:
            message["tool_calls"] = self._calls
        return message


def _answer(name: str, message: SaidMessage, end: OllamaEnd) -> OllamaChatAnswer:
    return {**head_of(name), "message": message, **end}
