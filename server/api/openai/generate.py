"""`POST /v1/chat/completions` and `/v1/completions`: bodies, answers, and what the choices of one share."""

import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NotRequired, TypeAlias, get_args

import numpy as np
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from models.errors import PromptTooLong
from models.inference.sampling_params import MAX_TOP_LOGPROBS
from models.output import pieces
from models.output.pieces import Piece, TokenLogprob
from models.prompt.chat_template import plain_text
from models.prompt.shapes import Message
from server.api import PRODUCT
from server.api.answer import Answer, Exchange, Question
from server.api.binding import ForcedCalls
from server.api.bodies import parse_body
from server.api.call import generate
from server.api.dialect import ApiContext, Endpoint, ErrorObject, Operation, error_object
from server.api.errors import explain, wrong
from server.api.generation import (
    BACKGROUND_TIER,
    IN_TEXT,
    GenerationBody,
    LimitOrZero,
    StreamOptions,
    read_params,
    refuse_going_on,
    refuse_lone_stream_options,
)
from server.api.openai.chat import IN_CHAT, ChatBody, ChatMessage, read_conversation, template_message
from server.api.params import Incoming, ask, question_of, text_prompt
from server.api.record import AnswerCosts, CostsAtEnd, ProgressTold, costs_of, progress_of
from server.api.wire import Payload, sse_event
from server.app.config import ServerConfig
from server.engine.request import LOOP_GUARD, Delta, Failed, Finished, FinishReason, Priority, TokenArray
from server.pool.served import ServedModel

LEAST = -9999.0
"""Stands for a log-probability of minus infinity."""


class AnswerHead(TypedDict):
    """The head of answers and chunks."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: NotRequired[str]


Spent: TypeAlias = Literal["reasoning_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens"]


class Usage(TypedDict):
    """OpenAI's token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[Literal["cached_tokens"], int]
    completion_tokens_details: NotRequired[dict[Spent, int]]
    """Only if the model's reasoning is told apart, or with a `prediction`: of it, the answer has the accepted."""


class PromptIds(TypedDict, total=False):
    """The prompt's tokens, if requested."""

    prompt_token_ids: list[int]


class ChoiceEnd(TypedDict):
    """A choice's index, requested tokens and end; vLLM and SGLang have `stop_reason`."""

    index: int
    finish_reason: str | None
    token_ids: NotRequired[list[int]]
    stop_reason: NotRequired[str | int | None]
    """None for an end of turn or a limit; `repetition_detected` for a loop."""
    matched_stop: NotRequired[str | int | None]
    """As `stop_reason`, or the token of the end of turn."""
    error: NotRequired[ErrorObject]


class LikelyToken(TypedDict):
    """A token that was, or might have been, put out."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(LikelyToken):
    """A token, and the likeliest in its place."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a chat's answer or chunk."""

    content: list[TokenLogprobs]
    refusal: None


class TextLogprobs(TypedDict):
    """Log-probabilities of a completion or chunk, in lists by token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class _ChoiceExchange(Exchange):
    """Writes one choice; the first choice also writes the answer of all."""

    kind: ClassVar[str]
    """The answer's `object`."""
    chunk_kind: ClassVar[str]
    part: ClassVar[str]
    """The field of a chunk's choice that holds what the chunk adds."""
    nothing: ClassVar[Any]
    """What a choice's last chunk adds."""
    opening: Any = None
    """What the stream's first chunk adds, if it comes before any output."""
    others: "Sequence[_ChoiceExchange]" = ()
    """Set by who makes the first choice."""
    calls_reason = "tool_calls"
    """The `finish_reason` of an answer that ends with calls."""

    def __init__(self, body: GenerationBody, question: Question) -> None:
        super().__init__(question)
        self._body, self.tells_progress = body, body.stream is True and body.return_progress is True
        self._streaming = body.stream_options or StreamOptions()
        self._logprobs: list[TokenLogprob] = []
        self._token_ids: list[int] = []
        tokens = self.request.pictures.in_words(self.request.tokens)
        self._prompt_ids: PromptIds = {"prompt_token_ids": tokens.tolist()} if body.return_token_ids else {}
        self._head: AnswerHead = {
            "id": self.request.request_id,
            "object": self.chunk_kind if body.stream else self.kind,
            "created": int(time.time()),
            "model": self.model.id,
            "system_fingerprint": PRODUCT,
        }
        if body.service_tier is not None:
            is_background = self.request.priority is Priority.BACKGROUND
            self._head["service_tier"] = BACKGROUND_TIER if is_background else "default"

    @abstractmethod
    def _take(self, piece: Piece) -> Any:
        """Keeps a piece; returns what it adds to a chunk; None for nothing."""

    @abstractmethod
    def _whole(self, end: Finished | Failed) -> Payload:
        """What a whole answer's choice holds."""

    @abstractmethod
    def _written(self, logprobs: Sequence[TokenLogprob]) -> Any:
        """The log-probabilities of the next tokens."""

    def _token_name(self, token: int) -> str:
        """A token's text, or the bytes of a part of a character; its number if requested."""
        if self._body.return_tokens_as_token_ids:
            return f"token_id:{token}"
        piece = self.model.token_texts.piece(token)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def take_tokens(self, delta: Delta, stop_token: int | None = None) -> None:
        """Keeps the tokens for the next chunk.

        A log-probability of the token that ended the answer is told only beside token ids: both lists have the same
        length.
        """
        self._token_ids.extend(delta.token_ids)
        logprobs = delta.logprobs
        if logprobs and logprobs[-1].token_id == stop_token and not self._body.return_token_ids:
            logprobs = logprobs[:-1]
        self._logprobs.extend(logprobs)

    def _told_prompt(self) -> PromptIds:
        """Once, if requested."""
        fields, self._prompt_ids = self._prompt_ids, {}
        return fields

    def _told_ids(self) -> Payload:
        ids, self._token_ids = self._token_ids, []
        return {"token_ids": ids} if self._body.return_token_ids else {}

    @property
    def choices(self) -> "Sequence[_ChoiceExchange]":
        return (self, *self.others)

    async def frames(self, answer: Answer) -> AsyncIterator[bytes]:
        end = None
        for index, choice in enumerate(self.choices):
            if choice.opening is not None:
                yield sse_event({**self.chunk(answer, index, choice.opening), **choice._told_prompt()})
        async for index, event in answer.choice_events():
            choice = self.choices[index]
            if isinstance(event, Finished | Failed):
                # The last choice's end has the costs of all.
                if end is not None:
                    yield sse_event(end)
                end = self.chunk(answer, index, choice.nothing, event)
            elif not isinstance(event, Piece):
                if self.tells_progress:
                    progress = {"prompt_progress": progress_of(answer.runs[index])}
                    yield sse_event({**self.chunk(answer, index, choice.nothing), **progress})
            elif (added := choice._take(event)) is not None:
                yield sse_event(self.chunk(answer, index, added))
        assert end is not None, "an answer ends"
        if self._streaming.include_usage:
            yield sse_event(end)
            end = {**self._head, "choices": [], "usage": _usage_of(answer.finished)}
        yield sse_event({**end, **costs_of(answer.finished, self.request.session_id)})
        yield b"data: [DONE]\n\n"

    async def body(self, answer: Answer) -> Payload:
        ended = dict[int, Payload]()
        async for index, event in answer.choice_events():
            choice = self.choices[index]
            if isinstance(event, Finished | Failed):
                ended[index] = choice._entry(index, choice._whole(event), event)
            elif isinstance(event, Piece):
                choice._take(event)
        return {
            **self._head,
            **self._told_prompt(),
            "choices": [ended[index] for index in sorted(ended)],
            "usage": _usage_of(answer.finished),
            **costs_of(answer.finished, self.request.session_id),
        }

    def chunk(self, answer: Answer, index: int, added: Any, end: Finished | Failed | None = None) -> Payload:
        """What choice `index` adds to the stream, or its end."""
        choice, run = self.choices[index], answer.runs[index]
        entry = choice._entry(index, {self.part: added, "logprobs": choice._next_logprobs()}, end)
        chunk = {**self._head, "choices": [entry]}
        if self._streaming.include_usage:
            so_far = _counts(len(run.request.tokens), run.cached_tokens, run.predicted_tokens)
            chunk["usage"] = so_far if self._streaming.continuous_usage_stats else None
        return chunk

    def _next_logprobs(self) -> Any:
        logprobs, self._logprobs = self._logprobs, []
        return self._written(logprobs) if logprobs else None

    def _entry(self, index: int, content: Payload, end: Finished | Failed | None) -> Payload:
        reason, fields = (None, {}) if end is None else self._end(end)
        return {"index": index, **content, "finish_reason": reason, **self._told_ids(), **fields}

    def _end(self, end: Finished | Failed) -> tuple[str, Payload]:
        if isinstance(end, Failed):
            return "error", {"error": error_object(explain(end.error, self.request.request_id))}
        token, text = end.stop_token, end.stop_text
        asked = token if token in self.request.stop_token_ids else None
        if end.is_loop:
            reason = "length" if self.request.loops == LOOP_GUARD else "repetition"
            return reason, {"stop_reason": "repetition_detected", "matched_stop": None}
        is_calls = self.parser.made_calls and end.reason is FinishReason.STOP
        fields = {"stop_reason": asked if text is None else text, "matched_stop": token if text is None else text}
        return self.calls_reason if is_calls else end.reason.value, fields


def _counts(num_prompt: int, num_cached: int, num_predicted: int) -> Usage:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_predicted,
        "total_tokens": num_prompt + num_predicted,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def _usage_of(finished: Finished) -> Usage:
    timings = finished.timings
    usage = _counts(finished.prompt_tokens, timings.cache_tokens, timings.predicted_tokens)
    spent = {name: count for name in get_args(Spent) if (count := getattr(finished, name)) is not None}
    return {**usage, "completion_tokens_details": spent} if spent else usage


def _num_choices(body: GenerationBody, num_prompts: int, config: ServerConfig) -> int:
    """The number of answers to each prompt; raises ApiError for more than may run and wait."""
    count, limit = body.n or 1, config.slots + config.max_waiting
    if count * num_prompts > limit:
        asked = f"{count} answers" if num_prompts == 1 else f"{num_prompts} prompts with {count} answers each"
        message = f"{asked} are more than the {limit} that may run (--slots) and wait (--max-waiting) here at once"
        raise wrong("n" if count > 1 else "prompt", message)
    return count


def _choice_of(question: Question, index: int, number: int) -> Question:
    """The question for choice `index`, answer `number` to its prompt, both from 0.

    Seeds differ; the first answer is that of a single request.
    """
    if index == 0:
        return question
    request, sampling = question.request, question.request.sampling
    if sampling.seed is not None:
        sampling = replace(sampling, seed=(sampling.seed + number) % 2**63)
    request_id = f"{request.request_id}-{index}"
    return replace(question, request=replace(request, request_id=request_id, session_id=None, sampling=sampling))


class ToolCallBody(TypedDict):
    """A complete tool call."""

    id: str
    type: str
    function: dict[Literal["name", "arguments"], str]


class MessageBody(TypedDict):
    """The assistant's message."""

    role: str
    content: str | None
    refusal: str | None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    """Same as `reasoning_content`."""
    tool_calls: NotRequired[list[ToolCallBody]]
    function_call: NotRequired[dict[Literal["name", "arguments"], str]]
    """To a request with `functions`, in place of `tool_calls`."""


class ChunkChoice(ChoiceEnd):
    """What a chunk adds to one choice."""

    delta: dict[str, Any]
    """As `message`, in parts."""
    logprobs: ChatLogprobs | None


class ChatChoice(ChoiceEnd):
    """One choice of an answer."""

    message: MessageBody
    logprobs: ChatLogprobs | None


class ChatChunk(AnswerHead, PromptIds, ProgressTold, CostsAtEnd):
    """One `data:` line of a stream."""

    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]


class ChatCompletion(AnswerHead, PromptIds, AnswerCosts):
    """The body of a whole answer."""

    choices: list[ChatChoice]
    usage: Usage


@generate("chatcmpl-")
def create_chat_completion(context: ApiContext, incoming: Incoming) -> _ChoiceExchange:
    """Answers the last message of a conversation."""
    body = parse_body(ChatBody, incoming.fields, IN_CHAT)
    refuse_lone_stream_options(body)
    model = context.pool.find(body.model)
    conversation = read_conversation(body, incoming, model)
    if isinstance(body.tool_choice, ForcedCalls):
        refuse_going_on(body, "an answer ends with the calls that are forced")
    params = replace(read_params(body, model), prediction=_predicted(body, model), **body.calls())
    params = replace(params, max_thinking_tokens=body.thinking_wish().max_tokens)
    question, count = ask(incoming, model, conversation, params), _num_choices(body, 1, context.config)
    first, *first.others = [ChatExchange(body, _choice_of(question, index, index)) for index in range(count)]
    return first


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


class ChatExchange(_ChoiceExchange):
    """Writes the answer to one request for chat."""

    kind, chunk_kind, part = "chat.completion", "chat.completion.chunk", "delta"
    nothing: ClassVar[Payload] = {}

    def __init__(self, body: ChatBody, question: Question) -> None:
        super().__init__(body, question)
        self.opening = {"role": "assistant", "content": "", "refusal": None}
        if body.functions:
            self.calls_reason = "function_call"
        self._said = ""
        self._reasoning = ""
        self._calls: list[ToolCallBody] = []

    def _whole(self, end: Finished | Failed) -> Payload:
        return {"message": self._message, "logprobs": self._next_logprobs()}

    def _written(self, logprobs: Sequence[TokenLogprob]) -> ChatLogprobs:
        content: list[TokenLogprobs] = []
        for logprob in logprobs:
            top = [self._likely(*other) for other in logprob.top]
            content.append({**self._likely(logprob.token_id, logprob.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _likely(self, token: int, logprob: float) -> LikelyToken:
        piece = list(self.model.token_texts.piece(token))
        return {"token": self._token_name(token), "logprob": max(logprob, LEAST), "bytes": piece}

    def reply_messages(self) -> list[Message]:
        """The answer as clients send it back."""
        return [template_message(ChatMessage.model_validate(self._message))]

    def _take(self, piece: Piece) -> Payload | None:
        match piece:
            case pieces.Text(text):
                self._said += text
                return {"content": text}
            case pieces.Reasoning(text):
                self._reasoning += text
                return {"reasoning_content": text, "reasoning": text}
            case pieces.ToolCallStarted(call_id, name):
                call: ToolCallBody = {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
                self._calls.append(call)
                return self._part_of_call({**call})
            case pieces.ToolArguments(text):
                self._calls[-1]["function"]["arguments"] += text
                return self._part_of_call({"function": {"arguments": text}})
            case pieces.ToolCallEnded() | pieces.ToolCallCut():
                return None

    def _part_of_call(self, part: Payload) -> Payload | None:
        """What a stream tells of a call; nothing of a second one in the older form."""
        if self.calls_reason == "tool_calls":
            return {"tool_calls": [{"index": len(self._calls) - 1, **part}]}
        return {"function_call": part["function"]} if len(self._calls) == 1 else None

    @property
    def _message(self) -> MessageBody:
        content = self._said or (None if self._calls else "")
        message: MessageBody = {"role": "assistant", "content": content, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = message["reasoning"] = self._reasoning
        if self._calls and self.calls_reason == "tool_calls":
            message["tool_calls"] = self._calls
        elif self._calls:
            message["function_call"] = self._calls[0]["function"]
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
    max_tokens: LimitOrZero = None
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


class TextCompletion(AnswerHead, ProgressTold, CostsAtEnd):
    """The body of an answer, and each `data:` line of a stream."""

    choices: list[TextChoice]
    usage: NotRequired[Usage | None]


@generate("cmpl-")
def create_completion(context: ApiContext, incoming: Incoming) -> _ChoiceExchange:
    """Continues a text."""
    body = parse_body(CompletionBody, incoming.fields, IN_TEXT)
    refuse_lone_stream_options(body)
    num_scored = body.num_prompt_logprobs()
    model = context.pool.find(body.model)
    params, namespace = read_params(body, model), incoming.namespace(body.cache_salt)
    if num_scored is not None:
        params = replace(params, prompt_logprobs=num_scored, cache_prompt=False)
    count = _num_choices(body, len(body.prompt), context.config)
    exchanges: list[_ChoiceExchange] = []
    for at, written in enumerate(body.prompt):
        place = "prompt" if len(body.prompt) == 1 else f"prompt[{at}]"
        prompt = text_prompt(written, model, place)
        question = question_of(incoming, model, prompt, replace(params, prompt_param=place), namespace)
        repeated = (written if isinstance(written, str) else model.token_texts.text(written)) if body.echo else ""
        for number in range(count):
            exchanges.append(CompletionExchange(body, _choice_of(question, len(exchanges), number), repeated))
    first, *first.others = exchanges
    return first


class CompletionExchange(_ChoiceExchange):
    """Writes the continuation of one prompt."""

    kind = chunk_kind = "text_completion"
    part, nothing = "text", ""

    def __init__(self, body: CompletionBody, question: Question, repeated: str) -> None:
        super().__init__(body, question)
        self.opening = repeated or None
        self._texts = [repeated]
        self._before = b""
        """Bytes of the tokens written so far; offsets count their characters."""

    def _take(self, piece: Piece) -> str:
        assert isinstance(piece, pieces.Text), "a plain completion is text"
        self._texts.append(piece.text)
        return piece.text

    def _whole(self, end: Finished | Failed) -> Payload:
        logprobs = None
        if isinstance(end, Finished) and self.request.prompt_logprobs is not None:
            logprobs = self._with_prompt(end.scored)
        elif self.request.sampling.top_logprobs is not None:
            logprobs = self._written(self._logprobs)
        return {"text": "".join(self._texts), "logprobs": logprobs}

    def _written(self, logprobs: Sequence[TokenLogprob]) -> TextLogprobs:
        top = [{self._token_name(token): max(value, LEAST) for token, value in entry.top} for entry in logprobs]
        offsets = []
        for entry in logprobs:
            offsets.append(len(self._before.decode(errors="ignore")))
            self._before += self.model.token_texts.piece(entry.token_id)
        return {
            "tokens": [self._token_name(entry.token_id) for entry in logprobs],
            "token_logprobs": [max(entry.logprob, LEAST) for entry in logprobs],
            "top_logprobs": [*top] if self.request.sampling.top_logprobs else None,
            "text_offset": offsets,
        }

    def _with_prompt(self, scored: Sequence[TokenLogprob]) -> TextLogprobs:
        """The first token has no log-probability, and the tokenizer's prefix is not echoed."""
        prompt = self.request.tokens.tolist()
        logprobs = self._written([TokenLogprob(prompt[0], 0.0), *scored])
        logprobs["token_logprobs"][0] = None
        if logprobs["top_logprobs"] is not None:
            logprobs["top_logprobs"][0] = None
        num_hidden = len(self.model.token_texts.text(prompt)) - len(self._texts[0])
        logprobs["text_offset"] = [max(0, offset - num_hidden) for offset in logprobs["text_offset"]]
        return logprobs

    def _told_ids(self) -> Payload:
        return {**self._told_prompt(), **super()._told_ids()}


ROUTES = (
    Endpoint("/chat/completions", create_chat_completion, Operation(ChatBody, ChatCompletion, ChatChunk)),
    Endpoint("/completions", create_completion, Operation(CompletionBody, TextCompletion, TextCompletion)),
)
