"""What answers of chat and completions share."""

import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NotRequired, Self

from typing_extensions import TypedDict

from models.output.pieces import Piece, TokenLogprob
from server.api import PRODUCT
from server.api.answer import Answer, Exchange, Question
from server.api.dialect import ErrorObject, error_object
from server.api.errors import explain, wrong
from server.api.openai.types import BACKGROUND_TIER, DEFAULT_TIER, GenerationBody, StreamOptions
from server.api.record import costs_of
from server.api.wire import Payload, body_of, sse_event
from server.app.config import ServerConfig
from server.engine.request import Delta, Failed, Finished, FinishReason, GenerationRequest, Priority, Started
from server.pool.served import TokenReader

FAILED = "error"
"""Finish reason of a failed choice, if others succeeded."""
MAX_SEED = 2**63
DONE = b"data: [DONE]\n\n"
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
    """Only if the request names one."""


class PromptTokensDetails(TypedDict):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict, total=False):
    """What the answer's tokens were spent on."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    """This and the next field with a `prediction` only."""
    rejected_prediction_tokens: int
    """Tokens of the prediction that the answer lacks."""


class Usage(TypedDict):
    """OpenAI's token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]
    """Only if the model's reasoning is told apart, or with a prediction."""


class PromptIds(TypedDict, total=False):
    """The prompt's tokens, if requested."""

    prompt_token_ids: list[int]


class ChoiceHead(TypedDict):
    """Which choice, and how it ended, if it has."""

    index: int
    finish_reason: str | None


class ChoiceEnd(ChoiceHead, total=False):
    """A choice's tokens if requested, and its end, in vLLM's and SGLang's words."""

    token_ids: list[int]
    stop_reason: str | int | None
    """None for an end of turn or a limit."""
    matched_stop: str | int | None
    """As `stop_reason`, or the token of the end of turn."""
    error: ErrorObject


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


@dataclass(frozen=True)
class TokenNames:
    """Names the tokens of one answer."""

    texts: TokenReader
    are_ids: bool = False
    """`token_id:42` instead of texts."""

    def name(self, token: int) -> str:
        """A token's text, or the bytes of a part of a character."""
        if self.are_ids:
            return f"token_id:{token}"
        piece = self.texts.piece(token)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def likely(self, token: int, logprob: float) -> LikelyToken:
        """A token's entry in chat."""
        return {"token": self.name(token), "logprob": max(logprob, LEAST), "bytes": list(self.texts.piece(token))}


def chat_logprobs(told: Sequence[TokenLogprob], names: TokenNames) -> ChatLogprobs:
    """Log-probabilities for chat."""
    content: list[TokenLogprobs] = []
    for one in told:
        top = [names.likely(token, logprob) for token, logprob in one.top]
        content.append({**names.likely(one.token_id, one.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


class TextLogprobsWriter:
    """Writes one completion's log-probabilities in order."""

    def __init__(self, names: TokenNames, num_top: int) -> None:
        self._names = names
        self._num_top = num_top
        self._before = b""
        """Bytes of the text so far; offsets count its characters."""

    def write(self, told: Sequence[TokenLogprob]) -> TextLogprobs:
        """The log-probabilities of the next tokens."""
        top: list[dict[str, float] | None]
        top = [{self._names.name(token): max(logprob, LEAST) for token, logprob in one.top} for one in told]
        return {
            "tokens": [self._names.name(one.token_id) for one in told],
            "token_logprobs": [max(one.logprob, LEAST) for one in told],
            "top_logprobs": top if self._num_top else None,
            "text_offset": [self._pass(one.token_id) for one in told],
        }

    def write_all(self, prompt: Sequence[int], scored: Sequence[TokenLogprob], num_characters: int) -> TextLogprobs:
        """The log-probabilities of an echoed prompt and its answer.

        The first token has no log-probability, and the tokenizer's prefix is not echoed.
        """
        told = self.write([TokenLogprob(prompt[0], 0.0), *scored])
        told["token_logprobs"][0] = None
        if told["top_logprobs"] is not None:
            told["top_logprobs"][0] = None
        num_hidden = len(self._names.texts.text(prompt)) - num_characters
        told["text_offset"] = [max(0, offset - num_hidden) for offset in told["text_offset"]]
        return told

    def _pass(self, token: int) -> int:
        offset = len(self._before.decode(errors="ignore"))
        self._before += self._names.texts.piece(token)
        return offset


class ChoiceExchange(Exchange):
    """Writes one choice; the first choice also writes the answer of all."""

    kind: ClassVar[str]
    """The answer's `object`."""
    chunk_kind: ClassVar[str]
    nothing: ClassVar[Payload]
    """What a choice's last chunk adds."""

    def __init__(self, body: GenerationBody, question: Question, index: int = 0) -> None:
        super().__init__(question, is_streamed=body.stream is True)
        self.index = index
        self.answer_id = self.request.request_id
        self._others: Sequence[ChoiceExchange] = ()
        self.names = TokenNames(self.model.token_texts, body.return_tokens_as_token_ids is True)
        self._logprobs: list[TokenLogprob] = []
        self._token_ids: list[int] = []
        self._num_tokens = 0
        self._tells_ids = body.return_token_ids is True
        self._prompt_ids: PromptIds = {"prompt_token_ids": self.request.tokens.tolist()} if self._tells_ids else {}
        options = body.stream_options or StreamOptions()
        self._wants_usage = options.include_usage is True
        self._wants_usage_always = self._wants_usage and options.continuous_usage_stats is True
        self._says_tier = body.service_tier is not None
        self._created = int(time.time())
        self._started: Started | None = None

    @abstractmethod
    def opening(self) -> Sequence[Payload]:
        """The stream's first chunks."""

    @abstractmethod
    def take(self, piece: Piece) -> Payload | None:
        """Keeps a piece; returns what it adds to a chunk."""

    @abstractmethod
    def whole(self, end: Finished | Failed) -> Payload:
        """What a whole answer's choice holds."""

    @abstractmethod
    def logprobs(self, told: Sequence[TokenLogprob]) -> Any:
        """The next tokens' log-probabilities, if requested."""

    def take_tokens(self, delta: Delta) -> None:
        """Keeps the tokens for the next chunk.

        Tokens without text send log-probabilities only beside token ids: both lists have the same length.
        """
        self._num_tokens += len(delta.token_ids)
        self._token_ids.extend(delta.token_ids)
        if delta.text or self._tells_ids:
            self._logprobs.extend(delta.logprobs)

    def untold(self) -> Sequence[TokenLogprob]:
        """The log-probabilities not yet written."""
        told, self._logprobs = self._logprobs, []
        return told

    def prompt_ids(self) -> PromptIds:
        """The prompt's tokens, once, if requested."""
        told, self._prompt_ids = self._prompt_ids, {}
        return told

    def ids(self) -> Payload:
        """The tokens not yet written, if requested."""
        told, self._token_ids = self._token_ids, []
        return {"token_ids": told} if self._tells_ids else {}

    @property
    def choices(self) -> "Sequence[ChoiceExchange]":
        return (self, *self._others)

    def with_others(self, others: "Sequence[ChoiceExchange]") -> Self:
        """Makes this the first choice."""
        self._others = others
        for other in others:
            other.answer_id = self.answer_id
        return self

    async def frames(self, answer: Answer) -> AsyncIterator[bytes]:
        """Yields all choices' chunks as they come, then the costs."""
        choices, end = self.choices, None
        for choice in choices:
            for chunk in choice.opening():
                yield sse_event(chunk)
        async for index, event in answer.choice_events():
            choice = choices[index]
            if isinstance(event, Finished | Failed):
                # The last choice's end has the costs of all.
                if end is not None:
                    yield sse_event(end)
                reason, told = choice._end(event)
                end = choice.chunk(choice.nothing, reason)
                end["choices"][0].update(told)
            elif isinstance(event, Started):
                choice._started = event
            elif (added := choice.take(event)) is not None:
                yield sse_event(choice.chunk(added))
        assert end is not None, "an answer ends"
        if self._wants_usage:
            yield sse_event(end)
            end = {**self.chunk(None), "usage": usage_of(answer.finished)}
        yield sse_event({**end, **costs_of(answer.finished, self.request.session_id)})
        yield DONE

    async def body(self, answer: Answer) -> Payload:
        """A whole answer, its choices in order."""
        choices, ended = self.choices, dict[int, Payload]()
        async for index, event in answer.choice_events():
            choice = choices[index]
            if isinstance(event, Finished | Failed):
                reason, told = choice._end(event)
                held = {**choice.whole(event), "finish_reason": reason, **choice.ids()}
                ended[index] = {"index": choice.index, **held, **told}
            elif not isinstance(event, Started):
                choice.take(event)
        return {
            **self._head(self.kind),
            **self.prompt_ids(),
            "choices": [ended[index] for index in sorted(ended)],
            "usage": usage_of(answer.finished),
            **costs_of(answer.finished, self.request.session_id),
        }

    def chunk(self, added: Payload | None, reason: str | None = None) -> dict[str, Any]:
        """A chunk; without choices if `added` is None."""
        choices: list[Payload] = []
        if added is not None:
            told = self.untold()
            held = {**added, "logprobs": self.logprobs(told) if told else None, "finish_reason": reason}
            choices = [{"index": self.index, **held, **self.ids()}]
        chunk = {**self._head(self.chunk_kind), "choices": choices}
        if self._wants_usage:
            num_cached = self._started.hit_tokens if self._started is not None else 0
            so_far = token_counts(len(self.request.tokens), num_cached, self._num_tokens)
            chunk["usage"] = so_far if self._wants_usage_always else None
        return chunk

    def _end(self, end: Finished | Failed) -> tuple[str, Payload]:
        if isinstance(end, Failed):
            return FAILED, {"error": error_object(explain(end.error, self.request.request_id))}
        token, text = end.stop_token, end.stop_text
        asked = token if token in self.request.stop_token_ids else None
        is_calls = self.parser.made_calls and end.reason is FinishReason.STOP
        told = {"stop_reason": asked if text is None else text, "matched_stop": token if text is None else text}
        return "tool_calls" if is_calls else end.reason.value, told

    def _head(self, kind: str) -> AnswerHead:
        head: AnswerHead = {
            "id": self.answer_id,
            "object": kind,
            "created": self._created,
            "model": self.model.id,
            "system_fingerprint": PRODUCT,
        }
        if self._says_tier:
            head["service_tier"] = BACKGROUND_TIER if self.request.priority is Priority.BACKGROUND else DEFAULT_TIER
        return head


def token_counts(num_prompt: int, num_cached: int, num_predicted: int) -> Usage:
    """The counts of a request so far."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_predicted,
        "total_tokens": num_prompt + num_predicted,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def usage_of(finished: Finished) -> Usage:
    """A finished request's token counts."""
    timings = finished.timings
    usage = token_counts(finished.prompt_tokens, timings.cache_tokens, timings.predicted_tokens)
    names = CompletionTokensDetails.__annotations__
    known = {name: count for name in names if (count := getattr(finished, name)) is not None}
    if known:
        usage["completion_tokens_details"] = body_of(CompletionTokensDetails, finished, **known)
    return usage


def num_choices(body: GenerationBody, num_prompts: int, config: ServerConfig) -> int:
    """The number of answers to each prompt; raises ApiError for more than may run and wait."""
    count, limit = body.n or 1, config.slots + config.max_waiting
    if count * num_prompts > limit:
        asked = f"{count} answers" if num_prompts == 1 else f"{num_prompts} prompts with {count} answers each"
        message = f"{asked} are more than the {limit} that may run (--slots) and wait (--max-waiting) here at once"
        raise wrong("n" if count > 1 else "prompt", message)
    return count


def request_of_choice(request: GenerationRequest, index: int, number: int) -> GenerationRequest:
    """The request for choice `index`, answer `number` to its prompt, both from 0.

    Seeds differ; the first answer is that of a single request.
    """
    if index == 0:
        return request
    sampling = request.sampling
    if sampling.seed is not None:
        sampling = replace(sampling, seed=(sampling.seed + number) % MAX_SEED)
    return replace(request, request_id=f"{request.request_id}-{index}", session_id=None, sampling=sampling)
