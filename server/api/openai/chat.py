"""`POST /v1/chat/completions`: OpenAI's chat dialect, streamed or whole."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, NotRequired

from typing_extensions import TypedDict

from models.output.pieces import (
    Piece,
    Reasoning,
    Text,
    TokenLogprob,
    ToolArguments,
    ToolCallCut,
    ToolCallEnded,
    ToolCallFailed,
    ToolCallStarted,
)
from models.prompt.shapes import Message
from server.api.answer import Question
from server.api.call import generate
from server.api.context import ApiContext
from server.api.conversation import Conversation, check_continuable, check_template_arguments
from server.api.dialect import Payload, parse_body, refuse_fields
from server.api.errors import wrong
from server.api.guard import namespace_of
from server.api.openai.choices import (
    AnswerHead,
    ChatLogprobs,
    ChoiceEnd,
    ChoiceExchange,
    PromptIds,
    Usage,
    chat_logprobs,
    num_choices,
    request_of_choice,
)
from server.api.openai.fields import IN_CHAT, IN_MESSAGE
from server.api.openai.params import read_params, refuse_going_on, refuse_lone_stream_options
from server.api.openai.types import ChatBody, ChatMessage, template_messages
from server.api.params import AnswerGrammar, Incoming, answer_grammar, build_request, shows_tools
from server.api.record import CacheBody, TimingsBody
from server.app.config import ServerConfig
from server.engine.request import Failed, Finished
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
    """What a chunk adds to a call; `id` and `type` come first."""

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

    index: int
    delta: DeltaBody
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatChoice(ChoiceEnd):
    """One choice of an answer."""

    index: int
    message: MessageBody
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatChunk(AnswerHead, PromptIds):
    """One `data:` line of a stream."""

    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]
    timings: NotRequired[TimingsBody]
    cache: NotRequired[CacheBody | None]


class ChatCompletion(AnswerHead, PromptIds):
    """The body of a whole answer."""

    choices: list[ChatChoice]
    usage: Usage
    timings: TimingsBody
    cache: CacheBody | None


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
    """Returns the prompt's source; raises ApiError."""
    continues = body.continues()
    if continues:
        check_continuable(model)
    shows = shows_tools(model, body.tools, forbids_calls=body.forbids_calls)
    for index, message in enumerate(body.messages):
        refuse_fields(message.model_extra or {}, IN_MESSAGE, f"messages[{index}].")
    messages = template_messages(body.messages)
    if body.num_explicit_points() > MAX_EXPLICIT_POINTS:
        raise wrong("messages", f"at most {MAX_EXPLICIT_POINTS} may carry cache_control")
    arguments = body.chat_template_kwargs or {}
    check_template_arguments(arguments, "chat_template_kwargs")
    return Conversation(
        model.renderer,
        tools=list(incoming.fields["tools"]) if shows else [],
        forbids_calls=body.forbids_calls,
        messages=messages,
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
        """Returns the chunk with the role."""
        return [{**self.chunk({"delta": {"role": "assistant", "content": "", "refusal": None}}), **self.prompt_ids()}]

    def take(self, piece: Piece) -> Payload | None:
        """Keeps a piece; returns its delta, if any."""
        delta = self._delta(piece)
        return None if delta is None else {"delta": delta}

    def whole(self, end: Finished | Failed) -> Payload:
        """Returns the message."""
        told = self.untold()
        return {"message": self._message, "logprobs": self.logprobs(told) if told else None}

    def logprobs(self, told: Sequence[TokenLogprob]) -> ChatLogprobs:
        """Returns the next tokens' log-probabilities."""
        return chat_logprobs(told, self.names)

    def reply_messages(self) -> list[Message]:
        """Returns the answer as clients send it back."""
        (said,) = template_messages([ChatMessage.model_validate(self._message)])
        return [said if self.conversation is None else self.conversation.whole(said)]

    def _delta(self, piece: Piece) -> DeltaBody | None:
        match piece:
            case Text(text):
                self._said += text
                return {"content": text}
            case ToolCallFailed(text):
                self._calls.pop()
                self._said += text
                return {"content": text}
            case Reasoning(text):
                self._reasoning += text
                return {"reasoning_content": text, "reasoning": text}
            case ToolCallStarted(call_id, name):
                self._calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}})
                self._num_streamed += 1
                first: FunctionDelta = {"name": name, "arguments": ""}
                index = self._num_streamed - 1
                return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": first}]}
            case ToolArguments(text):
                self._calls[-1]["function"]["arguments"] += text
                return {"tool_calls": [{"index": self._num_streamed - 1, "function": {"arguments": text}}]}
            case ToolCallEnded() | ToolCallCut():
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
