"""`POST /v1/completions`: OpenAI's plain completions, streamed or whole."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, NotRequired, cast

import numpy as np
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from cache.snapshots import RestorePoint, RestorePointKind
from models.errors import PromptTooLong
from models.inference.sampling_params import MAX_TOP_LOGPROBS
from models.output.pieces import Piece, Text, TokenLogprob
from models.prompt.chat_template import RenderedPrompt
from server.api.answer import Question
from server.api.call import generate
from server.api.context import ApiContext
from server.api.dialect import parse_body
from server.api.errors import ApiError, Code
from server.api.guard import namespace_of
from server.api.openai.choices import ChoiceExchange, num_choices, request_of_choice
from server.api.openai.fields import IN_TEXT
from server.api.openai.params import read_params, refuse_lone_stream_options
from server.api.openai.types import GenerationBody, as_limit
from server.api.openai.usage import (
    AnswerHead,
    ChoiceEnd,
    PromptIds,
    TextLogprobs,
    TextLogprobsWriter,
    Usage,
    finish_reason,
)
from server.api.params import Incoming, build_request
from server.api.record import CacheBody, TimingsBody
from server.engine.request import Failed, Finished
from server.pool.served import ServedModel


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
        """Returns how many likeliest tokens to send, if any."""
        return self.logprobs

    def num_prompt_logprobs(self) -> int | None:
        """Returns the same for prompt tokens; raises ApiError for excluding fields."""
        is_scored = self.echo is True and self.logprobs is not None
        if self.max_tokens == 0 and not is_scored:
            raise ApiError(Code.INVALID_VALUE, "max_tokens: 0 is taken with echo and logprobs only", "max_tokens")
        if is_scored and (self.stream or (self.n or 1) > 1):
            param = "stream" if self.stream else "n"
            message = (
                f"{param}: log-probabilities of the prompt (echo) come with one answer to it, which is not streamed"
            )
            raise ApiError(Code.INVALID_VALUE, message, param)
        return self.logprobs if is_scored else None


class TextChoice(ChoiceEnd, PromptIds):
    """One choice of an answer, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None


class TextCompletion(AnswerHead):
    """The body of an answer, and each `data:` line of a stream."""

    choices: list[TextChoice]
    usage: NotRequired[Usage | None]
    timings: NotRequired[TimingsBody]
    cache: NotRequired[CacheBody | None]


async def create_completion(request: Request) -> Response:
    """Continues a text."""
    return await generate(request, "cmpl-", open_completion)


def open_completion(context: ApiContext, incoming: Incoming) -> ChoiceExchange:
    """Returns the checked request; raises ApiError."""
    body = parse_body(CompletionBody, dict(incoming.fields), IN_TEXT)
    refuse_lone_stream_options(body)
    num_scored = body.num_prompt_logprobs()
    model = context.find_model(body.model)
    params = read_params(body, model)
    namespace = namespace_of(incoming.http, body.cache_salt)
    count = num_choices(body, len(body.prompt), context.config)
    exchanges: list[ChoiceExchange] = []
    for place, written in _places(body.prompt):
        prompt = text_prompt(written, model, place)
        request = build_request(incoming, model, prompt, replace(params, prompt_param=place), namespace)
        if num_scored is not None:
            request = replace(request, prompt_logprobs=num_scored, cache_prompt=False)
        for number in range(count):
            index = len(exchanges)
            question = Question(model, request_of_choice(request, index, number), prompt)
            repeated = _as_text(written, model) if body.echo else ""
            exchanges.append(CompletionExchange(body, question, index, repeated))
    return exchanges[0].with_others(exchanges[1:])


def _places(prompts: Sequence[str | list[int]]) -> list[tuple[str, str | list[int]]]:
    if len(prompts) == 1:
        return [("prompt", prompts[0])]
    return [(f"prompt[{index}]", prompt) for index, prompt in enumerate(prompts)]


def text_prompt(prompt: str | list[int], model: ServedModel, place: str = "prompt") -> RenderedPrompt:
    """Returns a plain prompt's tokens; raises ApiError for a number that is no token. `place` is its field."""
    if isinstance(prompt, str):
        return model.renderer.encode(prompt)
    if len(prompt) >= model.context_tokens:
        error = PromptTooLong(len(prompt), model.context_tokens - 1)
        error.param = place
        raise error
    for index, token in enumerate(prompt):
        if not 0 <= token < model.vocab_size:
            message = f"{place}[{index}]: {str(token)[:40]} is no token id from 0 to {model.vocab_size - 1}"
            raise ApiError(Code.INVALID_VALUE, message, f"{place}[{index}]")
    end = RestorePoint(len(prompt), RestorePointKind.PROMPT_END)
    return RenderedPrompt(np.array(prompt, dtype=np.int32), (end,) if prompt else ())


def _as_text(prompt: str | list[int], model: ServedModel) -> str:
    return prompt if isinstance(prompt, str) else model.token_texts.text(prompt)


class CompletionExchange(ChoiceExchange):
    """Writes the continuation of one prompt."""

    def __init__(self, body: CompletionBody, question: Question, index: int = 0, repeated: str = "") -> None:
        """`repeated` is the echoed prompt."""
        super().__init__(body, question, index)
        self._texts = [repeated]
        self._told_prompt = False
        self._scored: Sequence[TokenLogprob] | None = None
        """Of prompt and answer, if the prompt's are requested."""
        count = body.num_top_logprobs()
        self._logprobs = TextLogprobsWriter(self.names, count) if count is not None else None

    def opening(self) -> list[TextCompletion]:
        """Returns the echoed prompt's chunk, if any."""
        return [self._body(text, None) for text in self._texts if text]

    def take(self, piece: Piece) -> list[TextCompletion]:
        """Keeps more text; returns its chunk."""
        assert isinstance(piece, Text), "a plain completion is text"
        self._texts.append(piece.text)
        return [self._body(piece.text, None)]

    def reason(self, finished: Finished) -> str:
        """Returns OpenAI's finish reason."""
        return finish_reason(finished)

    def ended_choice(self, end: Finished | Failed) -> Any:
        """Returns the choice, with its prompt's log-probabilities if requested."""
        if isinstance(end, Finished) and self.request.prompt_logprobs is not None:
            self._scored = end.scored
        return super().ended_choice(end)

    def end_chunk(self, reason: str) -> TextCompletion:
        """Returns the choice's last chunk."""
        return self._body("", reason)

    def empty_chunk(self) -> TextCompletion:
        """Returns a chunk without choices."""
        return {**self._body("", None), "choices": []}

    def choice(self, reason: str) -> TextChoice:
        """Returns a whole answer's choice."""
        text = "".join(self._texts)
        told = None
        if self._logprobs is not None and self._scored is not None:
            told = self._logprobs.again().write_all(self.request.tokens.tolist(), self._scored, len(self._texts[0]))
        elif self._logprobs is not None:
            told = self._logprobs.again().write(self.told)
        choice: TextChoice = {"index": self.index, "text": text, "logprobs": told, "finish_reason": reason}
        return cast(TextChoice, {**choice, **self.prompt_ids(), **self.whole_ids()})

    def answer(self, choices: list[TextChoice]) -> TextCompletion:
        """Returns a whole answer, without costs."""
        return {**self._body("", None), "choices": choices}

    def _untold(self) -> TextLogprobs | None:
        told = self.untold()
        return self._logprobs.write(told) if self._logprobs is not None and told else None

    def _body(self, text: str, reason: str | None) -> TextCompletion:
        choice: TextChoice = {"index": self.index, "text": text, "logprobs": self._untold(), "finish_reason": reason}
        ids = {**self.untold_ids(), **({} if self._told_prompt else self.prompt_ids())}
        self._told_prompt = True
        body = cast(TextCompletion, {**self.head("text_completion"), "choices": [{**choice, **ids}]})
        if self.wants_usage:
            body["usage"] = self.usage_so_far()
        return body
