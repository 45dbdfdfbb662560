"""`POST /v1/chat/completions`: OpenAI's chat dialect, streamed or whole."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

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
from models.prompt.chat_template import Message
from server.api.answer import Question
from server.api.call import generate
from server.api.context import ApiContext
from server.api.conversation import Conversation, check_continuable, check_template_arguments
from server.api.dialect import parse_body, refuse_fields
from server.api.errors import ApiError, Code
from server.api.guard import namespace_of
from server.api.openai.choices import ChoiceExchange, num_choices, request_of_choice
from server.api.openai.fields import IN_CHAT, IN_MESSAGE
from server.api.openai.params import read_params, refuse_going_on, refuse_lone_stream_options
from server.api.openai.types import (
    ChatAnswer,
    ChatBody,
    ChatChoice,
    ChatChunk,
    ChatMessage,
    ChunkChoice,
    DeltaBody,
    FunctionDelta,
    MessageBody,
    ToolCallBody,
    template_messages,
)
from server.api.openai.usage import ChatLogprobs, chat_logprobs, finish_reason
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
from server.app.config import ServerConfig
from server.engine.request import Finished
from server.pool.served import ServedModel

MAX_EXPLICIT_POINTS = 16


async def create_chat_completion(request: Request) -> Response:
    """Answers the last message of a conversation."""
    return await generate(request, "chatcmpl-", open_chat)


def open_chat(context: ApiContext, incoming: Incoming) -> ChoiceExchange:
    """Returns the checked request; raises ApiError."""
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
        is_single_call=body.parallel_tool_calls is False and bool(conversation.callable_tools),
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
    return Conversation(
        model.renderer,
        tools=_offered_tools(body, incoming, model),
        forbids_calls=body.forbids_calls,
        messages=_messages(body),
        template_arguments=_template_arguments(body),
        namespace=namespace,
        continues=continues,
    ).prepared_for(model, hygiene=config.prompt_hygiene)


def _offered_tools(body: ChatBody, incoming: Incoming, model: ServedModel) -> list[Mapping[str, Any]]:
    if not body.tools or (body.forbids_calls and not can_forbid_calls(model)):
        return []
    if not model.renderer.reads_tools:
        raise ApiError(Code.UNSUPPORTED_PARAMETER, f"tools: the model {model.id!r} takes none", "tools")
    return list(incoming.fields["tools"])


def _grammar(
    body: ChatBody, wanted: AnswerGrammar | None, conversation: Conversation, model: ServedModel
) -> AnswerGrammar | None:
    choice, tools = body.tool_choice, conversation.callable_tools
    if choice is not None and choice.mode == "required":
        refuse_going_on(body, "an answer ends with the calls that are forced")
        is_single = choice.is_named or body.parallel_tool_calls is False
        return forced_calls(model, tools, ForcedCalls(choice.names, is_single))
    if wanted is None:
        # A request that only measures continues after the end of turn, where no grammar applies.
        return None if body.ignore_eos else calls_in_text(model, conversation)
    return replace(answer_or_calls(model, tools, wanted) if tools else wanted, begun=conversation.begun)


def _messages(body: ChatBody) -> list[Message]:
    for index, message in enumerate(body.messages):
        refuse_fields(message.model_extra or {}, IN_MESSAGE, f"messages[{index}].")
    messages = template_messages(body.messages)
    if body.num_explicit_points() > MAX_EXPLICIT_POINTS:
        reason = f"messages: at most {MAX_EXPLICIT_POINTS} may carry cache_control"
        raise ApiError(Code.INVALID_VALUE, reason, "messages")
    return messages


def _template_arguments(body: ChatBody) -> dict[str, Any]:
    arguments = dict(body.chat_template_kwargs or {})
    check_template_arguments(arguments, "chat_template_kwargs")
    return {**arguments, **body.thinking_wish().template_arguments()}


class ChatExchange(ChoiceExchange):
    """Writes the answer to one request for chat."""

    def __init__(self, body: ChatBody, question: Question, index: int = 0) -> None:
        super().__init__(body, question, index)
        self._said = ""
        self._thought = ""
        self._calls: list[ToolCallBody] = []
        self._num_streamed = 0
        """Failed calls included."""

    def opening(self) -> list[ChatChunk]:
        """Returns the chunk with the role."""
        return [{**self._chunk({"role": "assistant", "content": "", "refusal": None}), **self.prompt_ids()}]

    def take(self, piece: Piece) -> list[ChatChunk]:
        """Keeps a piece; returns its chunk, if any."""
        self._keep(piece)
        delta = self._delta(piece)
        return [] if delta is None else [self._chunk(delta)]

    def reason(self, finished: Finished) -> str:
        """Returns why the choice ended."""
        return finish_reason(finished, made_calls=self.parser.made_calls)

    def end_chunk(self, reason: str) -> ChatChunk:
        """Returns the choice's last chunk."""
        return self._chunk({}, reason)

    def empty_chunk(self) -> ChatChunk:
        """Returns a chunk without choices."""
        return self._chunk(None)

    def choice(self, reason: str) -> ChatChoice:
        """Returns a whole answer's choice."""
        choice: ChatChoice = {
            "index": self.index,
            "message": self._message,
            "logprobs": self._logprobs(self.told),
            "finish_reason": reason,
        }
        return cast(ChatChoice, {**choice, **self.whole_ids()})

    def reply_messages(self) -> list[Message]:
        """Returns the answer as clients send it back."""
        (said,) = template_messages([ChatMessage.model_validate(self._message)])
        return [said if self.conversation is None else self.conversation.whole(said)]

    def _keep(self, piece: Piece) -> None:
        match piece:
            case Text(text):
                self._said += text
            case Reasoning(text):
                self._thought += text
            case ToolCallStarted(call_id, name):
                self._calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}})
            case ToolArguments(text):
                self._calls[-1]["function"]["arguments"] += text
            case ToolCallFailed(text):
                self._calls.pop()
                self._said += text
            case ToolCallEnded() | ToolCallCut():
                pass

    def _delta(self, piece: Piece) -> DeltaBody | None:
        match piece:
            case Text(text) | ToolCallFailed(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text, "reasoning": text}
            case ToolCallStarted(call_id, name):
                self._num_streamed += 1
                first: FunctionDelta = {"name": name, "arguments": ""}
                index = self._num_streamed - 1
                return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": first}]}
            case ToolArguments(text):
                return {"tool_calls": [{"index": self._num_streamed - 1, "function": {"arguments": text}}]}
            case ToolCallEnded() | ToolCallCut():
                return None

    def _chunk(self, delta: DeltaBody | None, reason: str | None = None) -> ChatChunk:
        choices: list[ChunkChoice] = []
        if delta is not None:
            choice: ChunkChoice = {
                "index": self.index,
                "delta": delta,
                "logprobs": self._logprobs(self.untold()),
                "finish_reason": reason,
            }
            choices = [cast(ChunkChoice, {**choice, **self.untold_ids()})]
        chunk = cast(ChatChunk, {**self.head("chat.completion.chunk"), "choices": choices})
        if self.wants_usage:
            chunk["usage"] = self.usage_so_far()
        return chunk

    def _logprobs(self, told: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        return chat_logprobs(told, self.names) if told else None

    @property
    def _message(self) -> MessageBody:
        message: MessageBody = {
            "role": "assistant",
            "content": self._said if self._said or not self._calls else None,
            "refusal": None,
        }
        if self._thought:
            message["reasoning_content"] = message["reasoning"] = self._thought
        if self._calls:
            message["tool_calls"] = self._calls
        return message

    def answer(self, choices: list[ChatChoice]) -> ChatAnswer:
        """Returns a whole answer, without costs."""
        return {**self.head("chat.completion"), **self.prompt_ids(), "choices": choices}
