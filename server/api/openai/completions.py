"""`POST /v1/completions`: OpenAI's plain completions, streamed or whole."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, NotRequired

import numpy as np
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from cache.snapshots import RestorePoint, RestorePointKind
from models.errors import PromptTooLong
from models.inference.sampling_params import MAX_TOP_LOGPROBS
from models.output.pieces import Piece, Text, TokenLogprob
from models.prompt.chat_template import RenderedPrompt
from server.api.answer import Question
from server.api.call import generate
from server.api.context import ApiContext
from server.api.dialect import Payload, parse_body
from server.api.errors import wrong
from server.api.guard import namespace_of
from server.api.openai.choices import (
    AnswerHead,
    ChoiceEnd,
    ChoiceExchange,
    PromptIds,
    TextLogprobs,
    TextLogprobsWriter,
    Usage,
    num_choices,
    request_of_choice,
)
from server.api.openai.fields import IN_TEXT
from server.api.openai.params import read_params, refuse_lone_stream_options
from server.api.openai.types import GenerationBody, as_limit
from server.api.params import Incoming, build_request, check_token_ids
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
            raise wrong("max_tokens", "0 is taken with echo and logprobs only")
        if is_scored and (self.stream or (self.n or 1) > 1):
            why = "log-probabilities of the prompt (echo) come with one answer to it, which is not streamed"
            raise wrong("stream" if self.stream else "n", why)
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
    """Returns a plain prompt's tokens; raises ApiError for a number that is no token. `place` is its field."""
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
        """`repeated` is the echoed prompt."""
        super().__init__(body, question, index)
        self._texts = [repeated]
        count = body.num_top_logprobs()
        self._writer = TextLogprobsWriter(self.names, count) if count is not None else None

    def opening(self) -> list[Payload]:
        """Returns the echoed prompt's chunk, if any."""
        return [self.chunk({"text": text}) for text in self._texts if text]

    def take(self, piece: Piece) -> Payload:
        """Keeps more text; returns it."""
        assert isinstance(piece, Text), "a plain completion is text"
        self._texts.append(piece.text)
        return {"text": piece.text}

    def whole(self, end: Finished | Failed) -> Payload:
        """Returns the text, with its prompt's log-probabilities if requested."""
        told: TextLogprobs | None
        if self._writer is not None and isinstance(end, Finished) and self.request.prompt_logprobs is not None:
            told = self._writer.write_all(self.request.tokens.tolist(), end.scored, len(self._texts[0]))
        else:
            told = self.logprobs(self.untold())
        return {"text": "".join(self._texts), "logprobs": told}

    def logprobs(self, told: Sequence[TokenLogprob]) -> TextLogprobs | None:
        """Returns the next tokens' log-probabilities, if requested."""
        return self._writer.write(told) if self._writer is not None else None

    def ids(self) -> Payload:
        """Returns the tokens not yet written, if requested; first the prompt's."""
        return {**self.prompt_ids(), **super().ids()}
