"""Ollama's conventions, and `/api/generate`, `/api/chat`, `/api/embed` and the older `/api/embeddings`.

`_follow_up` continues `context`, the tokens that `/api/generate` returned. `context` ends with the model's reply and
lacks the template's text after a reply; the next message is therefore rendered after a sample reply.
"""

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, NotRequired, TypeAlias, TypeVar

import numpy as np
from pydantic import BeforeValidator, Field, ValidationInfo
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from cache.snapshots import RestorePoint, RestorePointKind
from models.formats import Vector
from models.output.call_formats import HARMONY
from models.output.pieces import Reasoning, Text, ToolArguments, ToolCallCut, ToolCallEnded, ToolCallStarted
from models.prompt.chat_template import RenderedPrompt
from models.prompt.shapes import Message
from models.texts import well_formed_json
from server.api import bodies
from server.api.answer import Answer, Exchange, OutputEvent, Question, Run
from server.api.binding import AnswerGrammar, Format, FunctionSpec, shows_tools
from server.api.bodies import BodyModel, Rules, Whole, parse_body, refused
from server.api.call import generate, planned
from server.api.conversation import Conversation, ThinkingWish, can_continue, first_unanswered
from server.api.dialect import ApiContext, Dialect, Endpoint, ModelReady, Operation
from server.api.embedding import MAX_TEXTS, EmbeddingWork, TextReader, object_json, shortened, vector_json
from server.api.errors import ApiError, Code, wrong
from server.api.generation import Options, options_sampling
from server.api.images import MediaPlace, image_part
from server.api.params import GenerationParams, Incoming, ask, check_token_ids, question_of
from server.api.record import CacheBody, cache_of
from server.api.wire import Payload, json_text
from server.engine.request import Finished
from server.pool.names import ModelNotLoaded, ModelUnknown, parse_keep_alive
from server.pool.served import ServedModel

Found = TypeVar("Found")


class OllamaDialect(Dialect):
    """Ollama's endpoints."""

    error_type = dict[Literal["error"], str]
    own_paths = ("/api",)
    stream_media_type = "application/x-ndjson"
    takes_any_content_type = True  # Ollama's own examples use `curl -d` without a type.

    def wants_stream(self, fields: Mapping[str, Any]) -> bool:
        """Returns True unless `stream` is false."""
        return fields.get("stream") is not False

    def error_body(self, error: ApiError) -> Payload:
        """The error's text."""
        return {"error": error.message}

    def error_frame(self, error: ApiError) -> bytes:
        """A line with the error's text."""
        return line(self.error_body(error))

    def heartbeat(self, progress: str, *, has_begun: bool = True) -> bytes:
        """Nothing: clients read each line as an answer."""
        return b""


def line(payload: Mapping[str, Any]) -> bytes:
    """A line of a stream."""
    return json_text(payload).encode() + b"\n"


KeepAlive = Annotated[float | None, BeforeValidator(lambda value: None if value is None else parse_keep_alive(value))]
"""Seconds, infinite for "for ever", in any form that clients write; None if the request does not say."""


_Think: TypeAlias = Literal[True, False, "high", "medium", "low", "max"]


def _think(value: Any) -> Any:
    if value is None or isinstance(value, bool) or value in ("high", "medium", "low", "max"):
        return value
    raise PydanticCustomError("think", 'Input should be true, false, "high", "medium", "low" or "max"')


class OllamaBody(BodyModel):
    """Fields of a request for text."""

    model: str | None = None
    stream: bool | None = None
    """Streamed unless false."""
    format: Format = None
    """"json" allows any object."""
    think: Annotated[bool | str | None, BeforeValidator(_think, json_schema_input_type=_Think | None)] = None
    options: Options | None = None
    keep_alive: KeepAlive = None


def find_named(find: Callable[[str], Found], name: str | None) -> Found:
    """What the pool finds by name; raises ApiError (400, 404) in words that clients look for, and PoolError."""
    if not name:
        raise ApiError(Code.MISSING_PARAMETER, "model is required", "model")
    try:
        return find(name)
    except ModelUnknown as error:
        raise ApiError(Code.MODEL_NOT_FOUND, f"model {name[:200]!r} not found: {error.instead}", "model") from error


def _template_arguments(body: OllamaBody, model: ServedModel) -> Mapping[str, Any]:
    if body.think and not model.thinks:
        raise wrong("think", f"{model.id!r} does not support thinking", Code.UNSUPPORTED_PARAMETER)
    effort = body.think if isinstance(body.think, str) else None
    if model.call_format is HARMONY:
        effort = "high" if effort == "max" else effort
    return ThinkingWish(None if body.think is None else bool(body.think), effort).template_arguments()


def _read_params(body: OllamaBody, model: ServedModel) -> GenerationParams:
    options = body.options or Options()
    wanted: Any = body.format
    sampling, stop = options_sampling(options, model), tuple(options.stop or ())
    grammar = None if wanted is None else AnswerGrammar("format", wanted)
    return GenerationParams(sampling=sampling, limit=options.limit(), stop=stop, grammar=grammar)


_REPLY: Final = "zq-the-reply-before-qz"


def _messages(*said: tuple[str, str | None]) -> list[Message]:
    return [{"role": role, "content": [{"text": text}]} for role, text in said if text]


_SAMPLE: Final = _messages(("user", "a"), ("assistant", _REPLY))


def _follow_up(model: ServedModel, context: Sequence[int], asked: Conversation) -> RenderedPrompt:
    """The prompt of the messages `asked` after the tokens `context`; raises ApiError (400)."""
    check_token_ids(context, model.vocab_size, "context")
    text = replace(asked, messages=[*_SAMPLE, *asked.messages]).render().text
    _, marker, following = text.partition(_REPLY)
    if not marker:
        message = "context: the model's chat template shows no earlier answers; send /api/chat the messages instead"
        raise ApiError(Code.UNSUPPORTED_PARAMETER, message, "context")
    tokens = np.array([*context, *model.renderer.tokenize(following)], dtype=np.int32)
    end = RestorePoint(len(tokens), RestorePointKind.PROMPT_END)
    return RenderedPrompt(tokens, (end,), model.token_texts.text(context) + following)


IN_BOTH: Rules = refused("""
    answers hold text, without data on single tokens: logprobs=false top_logprobs=0
    a prompt is only shown with an answer to it: _debug_render_only=false
    its name here is tools: functions=[] function_call="none"
""")

IN_GENERATE: Rules = (
    IN_BOTH
    | refused("images are taken by /api/chat only: images=[]")
    | refused("""
    no model here fills in what stands before a text: suffix=""
    prompts are made by the model's own template; send a whole prompt with raw: template=""
""")
)


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


def _head_of(name: str) -> OllamaHead:
    return {"model": name, "created_at": datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")}


def _answer_loading(context: ApiContext, body: OllamaBody, said: Mapping[str, Any]) -> ModelReady:
    """Answers a request that only loads or unloads a model; raises as `find_named`."""
    is_unloading = body.keep_alive == 0
    end: OllamaEnd = {"done": True, "done_reason": "unload" if is_unloading else "load"}
    answer = {**_head_of(body.model or ""), **said, **end}
    try:
        return ModelReady(find_named(context.pool.find, body.model), answer, body.keep_alive)
    except ModelNotLoaded:
        if not is_unloading:
            raise
        return ModelReady(None, answer)


def _whole_nanoseconds(milliseconds: float) -> int:
    """At least 1, since clients divide by it."""
    return max(1, round(milliseconds * 1_000_000))


_MESSAGE: Final = {"role": "assistant", "content": ""}


class _ChatExchange(Exchange):
    """Writes the answer to one request for chat."""

    def __init__(self, body: OllamaBody, question: Question) -> None:
        super().__init__(question)
        self.keep_alive_seconds = body.keep_alive
        self._name = body.model or self.model.id
        self._said: dict[str, Any] = {"content": "", "thinking": "", "tool_calls": []}
        self._call: dict[str, Any] = {}
        self._arguments = ""
        """The arguments of the open call, `_call`."""

    async def frames(self, answer: Answer) -> AsyncIterator[bytes]:
        async for event in answer.events():
            if isinstance(event, Finished):
                yield line(self._last({}, answer.runs[0], event))
            elif said := self._keep(event):
                yield line({**_head_of(self._name), **self.content(said), "done": False})

    async def body(self, answer: Answer) -> Payload:
        async for event in answer.events():  # as they come: the turn is kept at the end
            if not isinstance(event, Finished):
                self._keep(event)
        return self._last(self._whole(), answer.runs[0], answer.finished)

    def reply_messages(self) -> list[Message]:
        """Clients send no ids of calls."""
        calls = [{"function": call["function"]} for call in self._said["tool_calls"]]
        return [_template_message(OllamaMessage.model_validate({**_MESSAGE, **self._whole(), "tool_calls": calls}))]

    def _keep(self, event: OutputEvent) -> Payload:
        """Adds an event. Returns what a stream sends: text, a complete call, or the text of a call that was cut."""
        said: dict[str, Any] = {}
        match event:
            case Text(text) | ToolCallCut(text):
                said["content"] = text
            case Reasoning(text):
                said["thinking"] = text
            case ToolCallStarted(call_id, name):
                index = len(self._said["tool_calls"])
                self._call = {"id": call_id, "function": {"index": index, "name": name}}
                self._arguments = ""
            case ToolArguments(text):
                self._arguments += text
            case ToolCallEnded():
                self._call["function"]["arguments"] = json.loads(well_formed_json(self._arguments))
                said["tool_calls"] = [self._call]
        for name, value in said.items():
            self._said[name] += value
        return said

    def _whole(self) -> Payload:
        return {name: value for name, value in self._said.items() if value}

    def content(self, said: Payload, run: Run | None = None) -> Payload:
        """What was said; with what the last object adds, of the ended `run`."""
        return {"message": {**_MESSAGE, **said}}

    def _last(self, said: Payload, run: Run, finished: Finished) -> Payload:
        timings = finished.timings
        return {
            **_head_of(self._name),
            **self.content(said, run),
            "done": True,
            "done_reason": finished.reason.value,
            "total_duration": _whole_nanoseconds(1000 * (time.monotonic() - run.arrival.received)),
            "load_duration": 0,
            "prompt_eval_count": finished.prompt_tokens,
            "prompt_eval_duration": _whole_nanoseconds(timings.prompt_ms),
            "eval_count": timings.predicted_tokens,
            "eval_duration": _whole_nanoseconds(timings.predicted_ms),
            "cache": cache_of(finished.started, self.request.session_id),
        }


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


@generate("ollama-")
def generate_text(context: ApiContext, incoming: Incoming) -> Exchange | ModelReady:
    """Answers one prompt."""
    body = parse_body(OllamaGenerateBody, incoming.fields, IN_GENERATE)
    if not body.prompt:
        return _answer_loading(context, body, {"response": ""})
    model, namespace = find_named(context.pool.find, body.model), incoming.namespace()
    wishes = replace(_read_params(body, model), prompt_param="prompt")
    if body.raw and (body.system or body.context):
        message = "raw mode does not support template, system, or context"
        raise ApiError(Code.UNSUPPORTED_PARAMETER, message, "raw")
    if body.raw:
        prompt = model.renderer.encode(body.prompt)
    else:
        messages = _messages(("system", body.system), ("user", body.prompt))
        asked = Conversation(model.renderer, messages, (), _template_arguments(body, model), namespace)
        if not body.context:
            return _GenerateExchange(body, ask(incoming, model, asked.prepared_for(model), wishes))
        # Tokens to be continued already hold the model's system prompt.
        prompt = _follow_up(model, body.context, asked)
    # No conversation, so the next prompt cannot be foreseen.
    return _GenerateExchange(body, question_of(incoming, model, prompt, wishes, namespace))


class _GenerateExchange(_ChatExchange):
    """Writes the answer to one prompt."""

    def __init__(self, body: OllamaGenerateBody, question: Question) -> None:
        super().__init__(body, question)
        self._is_raw = body.raw is True
        if not self._is_raw:
            self.parser = self.model.output_parser((), self.prompt.text)

    def reply_messages(self) -> list[Message]:
        """Nothing: the next prompt holds the tokens of the answer, if it holds any of it."""
        return []

    def content(self, said: Payload, run: Run | None = None) -> Payload:
        fields: dict[str, Any] = {"response": said.get("content", "")}
        if "thinking" in said:
            fields["thinking"] = said["thinking"]
        if run is not None and not self._is_raw:
            fields["context"] = [*self.request.tokens.tolist(), *run.token_ids]
        return fields


class CalledFunction(BodyModel, extra="ignore"):
    """A function that the assistant called."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class CallEntry(BodyModel, extra="ignore"):
    """One entry of a message's `tool_calls`."""

    id: str | None = None
    type: Annotated[str, BeforeValidator(lambda value: "function")] = "function"
    function: CalledFunction


def _content(value: Any, info: ValidationInfo) -> Any:
    """A tool's result in any form as one text."""
    text = bodies.tool_result(value) if info.data.get("role") == "tool" else None
    texts = [bodies.part_text(part) for part in text] if isinstance(text, list) else [text]
    return value if None in texts else "\n".join(filter(None, texts))


class OllamaMessage(BodyModel):
    """One message of the conversation, or of an answer."""

    role: Annotated[str, Field(min_length=1)]
    content: Annotated[str | None, BeforeValidator(_content)] = None
    thinking: str | None = Field(default=None, serialization_alias="reasoning_content")
    tool_calls: list[CallEntry] | None = None
    tool_name: str | None = Field(default=None, serialization_alias="name")
    tool_call_id: str | None = None
    images: list[str] | None = None


class OfferedTool(BodyModel):
    """One tool that the model may call."""

    type: str | None = None
    function: FunctionSpec


class OllamaChatBody(OllamaBody):
    """Body of `POST /api/chat`."""

    messages: list[OllamaMessage] | None = None
    tools: list[OfferedTool] | None = None


class OllamaChatAnswer(OllamaHead, OllamaEnd):
    """The answer, and each line of a stream."""

    message: OllamaMessage


@generate("ollama-")
def chat(context: ApiContext, incoming: Incoming) -> Exchange | ModelReady:
    """Answers the last message of a conversation."""
    body = parse_body(OllamaChatBody, incoming.fields, IN_BOTH)
    if not body.messages:
        return _answer_loading(context, body, {"message": _MESSAGE})
    model = find_named(context.pool.find, body.model)
    shows = shows_tools(model, body.tools, forbids_calls=False)
    first_new = first_unanswered(incoming.fields["messages"])
    last = body.messages[-1]
    conversation = Conversation(
        model.renderer,
        messages=[_template_message(one, index, first_new) for index, one in enumerate(body.messages)],
        tools=incoming.fields["tools"] if shows else (),
        template_arguments=_template_arguments(body, model),
        namespace=incoming.namespace(),
        # A last message that cannot be continued is answered.
        continues=last.role == "assistant" and bool(last.content) and not last.tool_calls and can_continue(model),
    ).prepared_for(model, incoming.healed)
    return _ChatExchange(body, ask(incoming, model, conversation, _read_params(body, model)))


def _template_message(message: OllamaMessage, index: int = 0, first_new: int = 1) -> Message:
    shown = {"tool_name", "tool_call_id", "thinking", "tool_calls"}
    given = message.model_dump(include=shown, exclude_none=True, by_alias=True)
    is_new = index >= first_new and message.role == "user"
    images = [
        image_part({"data": image}, MediaPlace("messages", index, number, "images") if is_new else None)
        for number, image in enumerate(message.images or ())
    ]
    said = [*([{"text": message.content}] if message.content else []), *images]
    return {"role": message.role, "content": said, **{name: value for name, value in given.items() if value}}


_ONE_OR_MORE: Final = BeforeValidator(
    lambda value: [value] if isinstance(value, str) else value, json_schema_input_type=str | list[str]
)


class _VectorsBody(BodyModel):
    model: str | None = None
    keep_alive: KeepAlive = None


class EmbedBody(_VectorsBody):
    """Body of `POST /api/embed`."""

    input: Annotated[list[str], Field(max_length=MAX_TEXTS), _ONE_OR_MORE]
    truncate: bool | None = None
    """False: a long text is an error."""
    dimensions: Annotated[Whole, Field(ge=1)] | None = None


class EmbeddingPromptBody(_VectorsBody):
    """Body of `POST /api/embeddings`."""

    prompt: str | None = None


class EmbedAnswer(TypedDict):
    """Vectors of all texts, and costs."""

    model: str
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    embeddings: list[list[float]]


@planned
def embed(context: ApiContext, incoming: Incoming) -> EmbeddingWork:
    """Answers with the vectors of texts."""
    began = time.monotonic()
    body = parse_body(EmbedBody, incoming.fields)
    reader = TextReader(find_named(context.pool.find, body.model), cuts=body.truncate is not False)
    texts = [reader.read(text, f"input[{place}]") for place, text in enumerate(body.input)]

    def write(vectors: Sequence[Vector]) -> str:
        rows = [vector_json(vector) for vector in shortened(vectors, body.dimensions)]
        spent = {"total_duration": int((time.monotonic() - began) * 1_000_000_000), "load_duration": 0}
        head = {"model": body.model, **spent, "prompt_eval_count": reader.num_tokens}
        return object_json(head, "embeddings", rows)

    return EmbeddingWork(reader.model, texts, write, body.keep_alive)


@planned
def embed_prompt(context: ApiContext, incoming: Incoming) -> EmbeddingWork:
    """Answers with the vector of one text."""
    body = parse_body(EmbeddingPromptBody, incoming.fields)
    reader = TextReader(find_named(context.pool.find, body.model), cuts=True)
    texts = [reader.read(body.prompt, "prompt")] if body.prompt else []

    def write(vectors: Sequence[Vector]) -> str:
        return f'{{"embedding":{vector_json(vectors[0]) if vectors else "[]"}}}'

    return EmbeddingWork(reader.model, texts, write, body.keep_alive)


_GENERATION = Operation(OllamaGenerateBody, OllamaGenerateAnswer, OllamaGenerateAnswer)
_EMBEDDING = Operation(EmbeddingPromptBody, dict[Literal["embedding"], list[float]])
ROUTES = (
    Endpoint("/api/chat", chat, Operation(OllamaChatBody, OllamaChatAnswer, OllamaChatAnswer)),
    Endpoint("/api/generate", generate_text, _GENERATION),
    Endpoint("/api/embed", embed, Operation(EmbedBody, EmbedAnswer)),
    Endpoint("/api/embeddings", embed_prompt, _EMBEDDING),
)
