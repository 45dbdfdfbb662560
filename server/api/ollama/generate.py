"""`/api/generate`, `/api/chat`, `/api/embed` and the older `/api/embeddings`. Times are in nanoseconds."""

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, NotRequired

from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from models.output.pieces import Reasoning, Text, ToolArguments, ToolCallEnded, ToolCallFailed, ToolCallStarted
from models.prompt.chat_template import Message, RenderedPrompt
from models.texts import well_formed_json
from server.api.answer import Answer, Exchange, OutputEvent, Question
from server.api.call import compute, generate
from server.api.context import ApiContext
from server.api.conversation import Conversation, can_continue
from server.api.dialect import BodyModel, ModelReady, Payload, Whole, parse_body, refuse_fields
from server.api.embedding import MAX_TEXTS, EmbeddingWork, TextReader, object_json, shortened, vector_json
from server.api.errors import ApiError, Code
from server.api.guard import namespace_of
from server.api.ollama.dialect import (
    IN_CHAT,
    IN_EMBED,
    IN_EMBEDDING,
    IN_GENERATE,
    IN_MESSAGE,
    KeepAlive,
    OllamaBody,
    answer_loading,
    find_model,
    follow_up,
    keep_alive_seconds,
    line,
    offered_tools,
    read_params,
    template_arguments,
)
from server.api.params import AnswerGrammar, Incoming, answer_or_calls, build_request
from server.api.record import CacheBody, costs_of
from server.engine.embeddings import Vector
from server.engine.request import Finished
from server.pool.served import ServedModel

_NANOSECONDS_PER_MILLISECOND = 1_000_000


class OllamaHead(TypedDict):
    """How every object of an answer begins."""

    model: str
    """As the request gave it."""
    created_at: str


class OllamaEnd(TypedDict):
    """What the last object of an answer adds."""

    done: bool
    done_reason: NotRequired[str]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    """Restored tokens included."""
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]
    cache: NotRequired[CacheBody | None]


def head_of(name: str) -> OllamaHead:
    """Returns the head of an object made now."""
    return {"model": name, "created_at": datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")}


def end_of(finished: Finished, began: float, session_id: str | None) -> OllamaEnd:
    """Returns an answer's end; `began` is `time.monotonic()` at its opening."""
    timings = finished.timings
    return {
        "done": True,
        "done_reason": finished.reason.value,
        "total_duration": _whole_nanoseconds(1000 * (time.monotonic() - began)),
        "load_duration": 0,
        "prompt_eval_count": finished.prompt_tokens,
        "prompt_eval_duration": _whole_nanoseconds(timings.prompt_ms),
        "eval_count": timings.predicted_tokens,
        "eval_duration": _whole_nanoseconds(timings.predicted_ms),
        "cache": costs_of(finished, session_id)["cache"],
    }


def loaded(keep_alive_seconds: float | None) -> OllamaEnd:
    """Returns the end of an answer to a request without a prompt."""
    return {"done": True, "done_reason": "unload" if keep_alive_seconds == 0 else "load"}


def _whole_nanoseconds(milliseconds: float) -> int:
    """At least 1, since clients divide by it."""
    return max(1, round(milliseconds * _NANOSECONDS_PER_MILLISECOND))


class OllamaGenerateBody(OllamaBody):
    """Body of `POST /api/generate`."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    """Without the model's template."""
    context: list[int] | None = None


class OllamaGenerateAnswer(OllamaHead, OllamaEnd):
    """The answer, and each line of a stream."""

    response: str
    thinking: NotRequired[str]
    context: NotRequired[list[int]]


class _Said(TypedDict):
    response: str
    thinking: NotRequired[str]
    context: NotRequired[list[int]]


async def generate_text(request: Request) -> Response:
    """Answers one prompt."""
    return await generate(request, "ollama-", open_generate)


def open_generate(context: ApiContext, incoming: Incoming) -> Exchange | ModelReady:
    """Returns the request, or the answer without a prompt; raises ApiError."""
    began = time.monotonic()
    body = parse_body(OllamaGenerateBody, dict(incoming.fields), IN_GENERATE)
    if not body.prompt:
        answer = _generate_answer(body.model or "", {"response": ""}, loaded(body.keep_alive_seconds))
        return answer_loading(context, body, answer)
    model = find_model(context, body.model)
    namespace = namespace_of(incoming.http, None)
    conversation = None if body.raw else _conversation(body, model, namespace)
    prompt = _prompt(body, model, conversation)
    params = replace(read_params(body, model), prompt_param="prompt")
    request = build_request(incoming, model, prompt, params, namespace)
    # A prompt that continues tokens is no conversation, so its next prompt cannot be foreseen.
    known = None if body.context else conversation
    return OllamaGenerateExchange(body, Question(model, request, prompt, known), began)


def _conversation(body: OllamaGenerateBody, model: ServedModel, namespace: str) -> Conversation:
    said = (("system", body.system), ("user", body.prompt))
    messages: list[Message] = [{"role": role, "content": [{"text": text}]} for role, text in said if text]
    conversation = Conversation(model.renderer, messages, (), template_arguments(body, model), namespace)
    # Tokens to be continued already hold the model's system prompt.
    return conversation if body.context else conversation.prepared_for(model)


def _prompt(body: OllamaGenerateBody, model: ServedModel, conversation: Conversation | None) -> RenderedPrompt:
    if conversation is not None:
        return follow_up(model, body.context, conversation) if body.context else conversation.render()
    if body.system or body.context:
        message = "raw mode does not support template, system, or context"
        raise ApiError(Code.UNSUPPORTED_PARAMETER, message, "raw")
    return model.renderer.encode(body.prompt or "")


class OllamaGenerateExchange(Exchange):
    """Writes the answer to one prompt."""

    def __init__(self, body: OllamaGenerateBody, question: Question, began: float) -> None:
        super().__init__(question, is_streamed=body.is_streamed)
        if not body.raw:
            self.parser = self.model.output_parser((), self.prompt.text)
        self.keep_alive_seconds = body.keep_alive_seconds
        self._name = body.model or self.model.id
        self._began = began
        self._is_raw = body.raw is True
        self._said = ""
        self._thought = ""

    async def frames(self, answer: Answer) -> AsyncIterator[bytes]:
        """Yields text and thoughts, then the end."""
        async for event in answer.events():
            match event:
                case Text(text):
                    yield line(_generate_answer(self._name, {"response": text}, {"done": False}))
                case Reasoning(text):
                    yield line(_generate_answer(self._name, {"response": "", "thinking": text}, {"done": False}))
                case Finished():
                    yield line(self._last(event, {"response": ""}))

    async def body(self, answer: Answer) -> Payload:
        """Returns the whole answer."""
        async for event in answer.events():
            match event:
                case Text(text):
                    self._said += text
                case Reasoning(text):
                    self._thought += text
                case Finished():
                    said: _Said = {"response": self._said}
                    if self._thought:
                        said["thinking"] = self._thought
                    return self._last(event, said)
        raise AssertionError("the events of a request end with Finished")

    def _last(self, finished: Finished, said: _Said) -> OllamaGenerateAnswer:
        if not self._is_raw:
            said["context"] = [*self.request.tokens.tolist(), *finished.token_ids]
        return _generate_answer(self._name, said, end_of(finished, self._began, self.request.session_id))


def _generate_answer(name: str, said: _Said, end: OllamaEnd) -> OllamaGenerateAnswer:
    return {**head_of(name), **said, **end}


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


def open_chat(context: ApiContext, incoming: Incoming) -> Exchange | ModelReady:
    """Returns the request, or the answer without messages; raises ApiError."""
    began = time.monotonic()
    body = parse_body(OllamaChatBody, dict(incoming.fields), IN_CHAT)
    if not body.messages:
        answer = _chat_answer(body.model or "", {"role": "assistant", "content": ""}, loaded(body.keep_alive_seconds))
        return answer_loading(context, body, answer)
    model = find_model(context, body.model)
    namespace = namespace_of(incoming.http, None)
    tools = offered_tools(incoming.fields.get("tools"), model)
    conversation = Conversation(
        model.renderer,
        messages=_messages(body.messages),
        tools=tools,
        template_arguments=template_arguments(body, model),
        namespace=namespace,
        continues=_continues(body.messages, model),
    ).prepared_for(model, hygiene=context.config.prompt_hygiene)
    prompt = conversation.render()
    params = read_params(body, model)
    params = replace(params, grammar=_grammar(params.grammar, conversation, model))
    request = build_request(incoming, model, prompt, params, namespace)
    return OllamaChatExchange(body, Question(model, request, prompt, conversation), began)


def _grammar(wanted: AnswerGrammar | None, conversation: Conversation, model: ServedModel) -> AnswerGrammar | None:
    if wanted is None:
        return None
    bound = answer_or_calls(model, conversation.tools, wanted) if conversation.tools else wanted
    return replace(bound, begun=conversation.begun)


def _continues(messages: Sequence[OllamaMessage], model: ServedModel) -> bool:
    """A last message that cannot be continued is answered."""
    last = messages[-1]
    return last.role == "assistant" and bool(last.content) and not last.tool_calls and can_continue(model)


def _messages(messages: Sequence[OllamaMessage]) -> list[Message]:
    for index, message in enumerate(messages):
        refuse_fields(message.model_extra or {}, IN_MESSAGE, f"messages[{index}].")
    return [_template_message(message) for message in messages]


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

    def __init__(self, body: OllamaChatBody, question: Question, began: float) -> None:
        super().__init__(question, is_streamed=body.is_streamed)
        self.keep_alive_seconds = body.keep_alive_seconds
        self._name = body.model or self.model.id
        self._began = began
        self._said = ""
        self._thought = ""
        self._calls: list[CallResult] = []
        self._open_call: ToolCallStarted | None = None
        self._arguments = ""

    async def frames(self, answer: Answer) -> AsyncIterator[bytes]:
        """Yields text, complete calls, then the end."""
        async for event in answer.events():
            if isinstance(event, Finished):
                yield line(_chat_answer(self._name, {"role": "assistant", "content": ""}, self._end(event)))
                continue
            said = self._keep(event)
            if said is not None:
                yield line(_chat_answer(self._name, said, {"done": False}))

    async def body(self, answer: Answer) -> Payload:
        """Returns the whole answer."""
        async for event in answer.events():
            if isinstance(event, Finished):
                return _chat_answer(self._name, self._message, self._end(event))
            self._keep(event)
        raise AssertionError("the events of a request end with Finished")

    def reply_messages(self) -> list[Message]:
        """Returns the answer as clients send it back: without ids of calls."""
        calls = [{"function": call["function"]} for call in self._calls]
        said = _template_message(OllamaMessage.model_validate({**self._message, "tool_calls": calls}))
        return [said if self.conversation is None else self.conversation.whole(said)]

    def _keep(self, event: OutputEvent) -> SaidMessage | None:
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


def _chat_answer(name: str, message: SaidMessage, end: OllamaEnd) -> OllamaChatAnswer:
    return {**head_of(name), "message": message, **end}


_NANOSECONDS_PER_SECOND = 1_000_000_000


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class _VectorsBody(BodyModel):
    model: str | None = None
    keep_alive: KeepAlive = None


class EmbedBody(_VectorsBody):
    """Body of `POST /api/embed`."""

    input: Annotated[
        list[str],
        Field(max_length=MAX_TEXTS),
        BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
    ]
    truncate: bool | None = None
    """False: a long text is an error."""
    dimensions: Annotated[Whole, Field(ge=1)] | None = None


class EmbeddingPromptBody(_VectorsBody):
    """Body of `POST /api/embeddings`."""

    prompt: str | None = None


class EmbedAnswer(TypedDict):
    """The vectors of all texts, and what they took."""

    model: str
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    embeddings: list[list[float]]


class EmbeddingAnswer(TypedDict):
    """The vector of one text; an empty one of an empty text."""

    embedding: list[float]


async def embed(request: Request) -> Response:
    """Answers with the vectors of texts."""
    return await compute(request, open_embed)


async def embed_prompt(request: Request) -> Response:
    """Answers with the vector of one text."""
    return await compute(request, open_embedding)


def open_embed(context: ApiContext, incoming: Incoming) -> EmbeddingWork:
    """Returns the checked texts; raises ApiError."""
    began = time.monotonic()
    body = parse_body(EmbedBody, dict(incoming.fields), IN_EMBED)
    reader = TextReader(find_model(context, body.model), cuts=body.truncate is not False)
    texts = [reader.read(text, f"input[{place}]") for place, text in enumerate(body.input)]
    write = partial(_written, body, reader.num_tokens, began)
    return EmbeddingWork(reader.model, texts, write, keep_alive_seconds(body.keep_alive))


def open_embedding(context: ApiContext, incoming: Incoming) -> EmbeddingWork:
    """Returns the checked text; raises ApiError."""
    body = parse_body(EmbeddingPromptBody, dict(incoming.fields), IN_EMBEDDING)
    reader = TextReader(find_model(context, body.model), cuts=True)
    texts = [reader.read(body.prompt, "prompt")] if body.prompt else []
    return EmbeddingWork(reader.model, texts, _written_alone, keep_alive_seconds(body.keep_alive))


def _written(body: EmbedBody, num_tokens: int, began: float, vectors: Sequence[Vector]) -> str:
    rows = [vector_json(vector) for vector in shortened(vectors, body.dimensions)]
    head = {
        "model": body.model,
        "total_duration": int((time.monotonic() - began) * _NANOSECONDS_PER_SECOND),
        "load_duration": 0,
        "prompt_eval_count": num_tokens,
    }
    return object_json(head, "embeddings", rows)


def _written_alone(vectors: Sequence[Vector]) -> str:
    return f'{{"embedding":{vector_json(vectors[0]) if vectors else "[]"}}}'
