"""`POST /v1/chat/completions` and `/v1/completions`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, NotRequired

import numpy as np
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from cache.snapshots import RestorePoint, RestorePointKind
from models.errors import PromptTooLong
from models.inference.sampling_params import MAX_TOP_LOGPROBS
from models.output import pieces
from models.output.pieces import Piece, TokenLogprob
from models.prompt.chat_template import RenderedPrompt, plain_text
from models.prompt.shapes import Message
from server.api.answer import Question
from server.api.bodies import parse_body, refuse_fields
from server.api.call import generate
from server.api.conversation import Conversation, check_continuable, check_template_arguments
from server.api.dialect import ApiContext, Endpoint, Operation, namespace_of
from server.api.errors import wrong
from server.api.openai.choices import (
    AnswerHead,
    ChatLogprobs,
    ChoiceEnd,
    ChoiceExchange,
    PromptIds,
    TextLogprobs,
    TextLogprobsWriter,
    Usage,
    chat_logprobs,
    num_choices,
    request_of_choice,
)
from server.api.openai.fields import IN_CHAT, IN_MESSAGE, IN_TEXT
from server.api.openai.types import (
    ChatBody,
    ChatMessage,
    GenerationBody,
    as_limit,
    read_params,
    refuse_going_on,
    refuse_lone_stream_options,
    template_message,
)
from server.api.params import AnswerGrammar, Incoming, answer_grammar, build_request, check_token_ids, shows_tools
from server.api.record import Costs, CostsAtEnd
from server.api.wire import Payload
from server.app.config import ServerConfig
from server.engine.request import Failed, Finished, TokenArray
from server.pool.served import ServedModel

MAX_EXPLICIT_POINTS = 16


class FunctionBody(TypedDict):
    """A call's name and arguments."""

    name: str
    arguments: str


class ToolCallBody(TypedDict):
    """A complete tool call."""

    id: str
    type: str
    function: FunctionBody


class FunctionDelta(TypedDict):
    """The name comes first, then the arguments in parts."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """`id` and `type` come first."""

    index: int
    id: NotRequired[str]
    type: NotRequired[str]
    function: FunctionDelta


class DeltaBody(TypedDict, total=False):
    """What a chunk adds to the message."""

    role: str
    content: str
    reasoning_content: str
    reasoning: str
    """Same as `reasoning_content`."""
    refusal: str | None
    tool_calls: list[ToolCallDelta]


class MessageBody(TypedDict):
    """The assistant's message."""

    role: str
    content: str | None
    refusal: str | None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    """Same as `reasoning_content`."""
    tool_calls: NotRequired[list[ToolCallBody]]


class ChunkChoice(ChoiceEnd):
    """What a chunk adds to one choice."""

    delta: DeltaBody
    logprobs: ChatLogprobs | None


class ChatChoice(ChoiceEnd):
    """One choice of an answer."""

    message: MessageBody
    logprobs: ChatLogprobs | None


class ChatChunk(AnswerHead, PromptIds, CostsAtEnd):
    """One `data:` line of a stream."""

    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]


class ChatCompletion(AnswerHead, PromptIds, Costs):
    """The body of a whole answer."""

    choices: list[ChatChoice]
    usage: Usage


@generate("chatcmpl-")
def create_chat_completion(context: ApiContext, incoming: Incoming) -> ChoiceExchange:
    """Answers the last message of a conversation."""
    body = parse_body(ChatBody, dict(incoming.fields), IN_CHAT)
    refuse_lone_stream_options(body)
    model = context.find_model(body.model)
    namespace = namespace_of(incoming.http, body.cache_salt)
    conversation = read_conversation(body, incoming, model, context.config, namespace)
    prompt = conversation.render()
    params = read_params(body, model)
    params = replace(
        params,
        max_thinking_tokens=body.thinking_wish().max_tokens,
        is_single_call=body.wants_one_call and bool(conversation.callable_tools),
        grammar=_grammar(body, params.grammar, conversation, model),
        prediction=_predicted(body, model),
    )
    request = build_request(incoming, model, prompt, params, namespace)
    first, *others = [
        ChatExchange(body, Question(model, request_of_choice(request, index, index), prompt, conversation), index)
        for index in range(num_choices(body, 1, context.config))
    ]
    return first.with_others(others)


def read_conversation(
    body: ChatBody, incoming: Incoming, model: ServedModel, config: ServerConfig, namespace: str
) -> Conversation:
    """The prompt's source; raises ApiError."""
    continues = body.continues()
    if continues:
        check_continuable(model)
    shows = shows_tools(model, body.tools, forbids_calls=body.forbids_calls)
    for index, message in enumerate(body.messages):
        refuse_fields(message.model_extra or {}, IN_MESSAGE, f"messages[{index}].")
    marked = (one.cache_control is not None for said in body.messages for one in (said, *(said.content or ())))
    if sum(marked) > MAX_EXPLICIT_POINTS:
        raise wrong("messages", f"at most {MAX_EXPLICIT_POINTS} may carry cache_control")
    arguments = body.chat_template_kwargs or {}
    check_template_arguments(arguments, "chat_template_kwargs")
    return Conversation(
        model.renderer,
        tools=list(incoming.fields["tools"]) if shows else [],
        forbids_calls=body.forbids_calls,
        messages=list(map(template_message, body.messages)),
        template_arguments={**arguments, **body.thinking_wish().template_arguments()},
        namespace=namespace,
        continues=continues,
    ).prepared_for(model, hygiene=config.prompt_hygiene)


def _grammar(
    body: ChatBody, wanted: AnswerGrammar | None, conversation: Conversation, model: ServedModel
) -> AnswerGrammar | None:
    forced = body.forced_calls()
    if forced is not None:
        refuse_going_on(body, "an answer ends with the calls that are forced")
    elif wanted is None and body.ignore_eos:
        return None  # a request that only measures continues after the end of turn, where no grammar applies
    return answer_grammar(model, conversation, wanted, forced)


def _predicted(body: ChatBody, model: ServedModel) -> TokenArray | None:
    """The prediction's tokens, if any. Raises ApiError beyond the context."""
    text = plain_text(body.prediction.model_dump()["content"]) if body.prediction is not None else ""
    if not text:
        return None
    try:
        ids = model.renderer.tokenize(text, parse_special=False, max_tokens=model.context_tokens)
    except PromptTooLong as error:
        why = f"it has {error.num_tokens} tokens or more, and the context only {model.context_tokens}"
        raise wrong("prediction.content", why) from error
    return np.array(ids, dtype=np.int32)


class ChatExchange(ChoiceExchange):
    """Writes the answer to one request for chat."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    nothing: ClassVar[Payload] = {"delta": {}}

    def __init__(self, body: ChatBody, question: Question, index: int = 0) -> None:
        super().__init__(body, question, index)
        self._said = ""
        self._reasoning = ""
        self._calls: list[ToolCallBody] = []
        self._num_streamed = 0
        """Failed calls included."""

    def opening(self) -> list[Payload]:
        """The chunk with the role."""
        return [{**self.chunk({"delta": {"role": "assistant", "content": "", "refusal": None}}), **self.prompt_ids()}]

    def take(self, piece: Piece) -> Payload | None:
        """Keeps a piece; returns its delta, if any."""
        delta = self._delta(piece)
        return None if delta is None else {"delta": delta}

    def whole(self, end: Finished | Failed) -> Payload:
        """The message."""
        told = self.untold()
        return {"message": self._message, "logprobs": self.logprobs(told) if told else None}

    def logprobs(self, told: Sequence[TokenLogprob]) -> ChatLogprobs:
        """The next tokens' log-probabilities."""
        return chat_logprobs(told, self.names)

    def reply_messages(self) -> list[Message]:
        """The answer as clients send it back."""
        said = template_message(ChatMessage.model_validate(self._message))
        return [said if self.conversation is None else self.conversation.whole(said)]

    def _delta(self, piece: Piece) -> DeltaBody | None:
        match piece:
            case pieces.Text(text):
                self._said += text
                return {"content": text}
            case pieces.ToolCallFailed(text):
                self._calls.pop()
                self._said += text
                return {"content": text}
            case pieces.Reasoning(text):
                self._reasoning += text
                return {"reasoning_content": text, "reasoning": text}
            case pieces.ToolCallStarted(call_id, name):
                self._calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}})
                self._num_streamed += 1
                first: FunctionDelta = {"name": name, "arguments": ""}
                index = self._num_streamed - 1
                return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": first}]}
            case pieces.ToolArguments(text):
                self._calls[-1]["function"]["arguments"] += text
                return {"tool_calls": [{"index": self._num_streamed - 1, "function": {"arguments": text}}]}
            case pieces.ToolCallEnded() | pieces.ToolCallCut():
                return None

    @property
    def _message(self) -> MessageBody:
        message: MessageBody = {
            "role": "assistant",
            "content": self._said if self._said or not self._calls else None,
            "refusal": None,
        }
        if self._reasoning:
            message["reasoning_content"] = message["reasoning"] = self._reasoning
        if self._calls:
            message["tool_calls"] = self._calls
        return message


def _prompts(value: Any) -> Any:
    if _is_prompt(value):
        return [value]
    if isinstance(value, list) and all(_is_prompt(entry) for entry in value):
        return value
    raise PydanticCustomError("prompt_type", "Input should be a text, a list of token ids, or a list of these")


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(type(entry) is int for entry in value))


class CompletionBody(GenerationBody):
    """Body of `POST /v1/completions`."""

    prompt: Annotated[Any, BeforeValidator(_prompts), Field()]
    """A text, token ids, or several of either."""
    echo: bool | None = None
    max_tokens: Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(as_limit)] = None
    """0 only with the prompt's log-probabilities."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    def num_top_logprobs(self) -> int | None:
        """How many likeliest tokens to send, if any."""
        return self.logprobs

    def num_prompt_logprobs(self) -> int | None:
        """Raises ApiError for excluding fields."""
        is_scored = self.echo is True and self.logprobs is not None
        if self.max_tokens == 0 and not is_scored:
            raise wrong("max_tokens", "0 is taken with echo and logprobs only")
        if is_scored and (self.stream or (self.n or 1) > 1):
            why = "log-probabilities of the prompt (echo) come with one answer to it, which is not streamed"
            raise wrong("stream" if self.stream else "n", why)
        return self.logprobs if is_scored else None


class TextChoice(ChoiceEnd, PromptIds):
    """One choice, or a chunk of it."""

    text: str
    logprobs: TextLogprobs | None


class TextCompletion(AnswerHead, CostsAtEnd):
    """The body of an answer, and each `data:` line of a stream."""

    choices: list[TextChoice]
    usage: NotRequired[Usage | None]


@generate("cmpl-")
def create_completion(context: ApiContext, incoming: Incoming) -> ChoiceExchange:
    """Continues a text."""
    body = parse_body(CompletionBody, dict(incoming.fields), IN_TEXT)
    refuse_lone_stream_options(body)
    num_scored = body.num_prompt_logprobs()
    model = context.find_model(body.model)
    params = read_params(body, model)
    namespace = namespace_of(incoming.http, body.cache_salt)
    count = num_choices(body, len(body.prompt), context.config)
    exchanges: list[ChoiceExchange] = []
    for at, written in enumerate(body.prompt):
        place = "prompt" if len(body.prompt) == 1 else f"prompt[{at}]"
        prompt = text_prompt(written, model, place)
        request = build_request(incoming, model, prompt, replace(params, prompt_param=place), namespace)
        if num_scored is not None:
            request = replace(request, prompt_logprobs=num_scored, cache_prompt=False)
        repeated = (written if isinstance(written, str) else model.token_texts.text(written)) if body.echo else ""
        for number in range(count):
            index = len(exchanges)
            question = Question(model, request_of_choice(request, index, number), prompt)
            exchanges.append(CompletionExchange(body, question, index, repeated))
    return exchanges[0].with_others(exchanges[1:])


def text_prompt(prompt: str | list[int], model: ServedModel, place: str = "prompt") -> RenderedPrompt:
    """A plain prompt's tokens; raises ApiError for a number that is no token."""
    if isinstance(prompt, str):
        return model.renderer.encode(prompt)
    if len(prompt) >= model.context_tokens:
        error = PromptTooLong(len(prompt), model.context_tokens - 1)
        error.param = place
        raise error
    check_token_ids(prompt, model.vocab_size, place)
    end = RestorePoint(len(prompt), RestorePointKind.PROMPT_END)
    return RenderedPrompt(np.array(prompt, dtype=np.int32), (end,) if prompt else ())


class CompletionExchange(ChoiceExchange):
    """Writes the continuation of one prompt."""

    kind = chunk_kind = "text_completion"
    nothing: ClassVar[Payload] = {"text": ""}

    def __init__(self, body: CompletionBody, question: Question, index: int = 0, repeated: str = "") -> None:
        super().__init__(body, question, index)
        self._texts = [repeated]
        count = body.num_top_logprobs()
        self._writer = TextLogprobsWriter(self.names, count) if count is not None else None

    def opening(self) -> list[Payload]:
        """The echoed prompt's chunk, if any."""
        return [self.chunk({"text": text}) for text in self._texts if text]

    def take(self, piece: Piece) -> Payload:
        """Keeps more text; returns it."""
        assert isinstance(piece, pieces.Text), "a plain completion is text"
        self._texts.append(piece.text)
        return {"text": piece.text}

    def whole(self, end: Finished | Failed) -> Payload:
        """The text, with its prompt's log-probabilities if requested."""
        told: TextLogprobs | None
        if self._writer is not None and isinstance(end, Finished) and self.request.prompt_logprobs is not None:
            told = self._writer.write_all(self.request.tokens.tolist(), end.scored, len(self._texts[0]))
        else:
            told = self.logprobs(self.untold())
        return {"text": "".join(self._texts), "logprobs": told}

    def logprobs(self, told: Sequence[TokenLogprob]) -> TextLogprobs | None:
        """The next tokens' log-probabilities, if requested."""
        return self._writer.write(told) if self._writer is not None else None

    def ids(self) -> Payload:
        """Tokens not yet written, if requested."""
        return {**self.prompt_ids(), **super().ids()}


ROUTES = (
    Endpoint("/chat/completions", create_chat_completion, Operation(ChatBody, ChatCompletion, ChatChunk)),
    Endpoint("/completions", create_completion, Operation(CompletionBody, TextCompletion, TextCompletion)),
)
