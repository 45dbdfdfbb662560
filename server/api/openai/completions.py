"""`POST /v1/completions`: OpenAI's plain completions, streamed or whole."""

from collections.abc import Sequence
from typing import Annotated, Any, NotRequired, cast

import numpy as np
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from cache.restore_points import RestorePoint, RestorePointKind
from models.errors import PromptTooLong
from models.inference.sampling_params import MAX_TOP_LOGPROBS
from models.output.pieces import Piece, Text
from models.prompt.chat_template import RenderedPrompt
from server.api.auth import namespace_of
from server.api.context import ApiContext, ServedModel
from server.api.endpoint import generate
from server.api.errors import ApiError, Code
from server.api.openai.choices import ChoiceExchange, SeveralChoices, num_choices, request_of_choice
from server.api.openai.errors import ErrorObject
from server.api.openai.fields import IN_TEXT
from server.api.openai.generation_body import GenerationBody
from server.api.openai.logprobs import TextLogprobs, TextLogprobsWriter
from server.api.openai.params import read_params, refuse_lone_stream_options
from server.api.openai.usage import AnswerHead, PromptIds, TokenIds, Usage, finish_reason
from server.api.params import Incoming, build_request
from server.api.typed_body import parse_body
from server.api.usage import CacheBody, TimingsBody
from server.engine.events import Finished
from server.engine.request import GenerationRequest


def _prompts(value: Any) -> Any:
    """Takes a text, a list of token ids, or a list of either; returns a list of prompts."""
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
    """A text, a list of token ids, or a list of several of either; once checked, a list."""
    echo: bool | None = None
    """Begin the answer with the prompt."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """How many of the likeliest tokens are told with each token of the answer."""

    def num_top_logprobs(self) -> int | None:
        """Returns that number; None where nothing is to be told."""
        return self.logprobs


class TextChoice(TokenIds, PromptIds):
    """One choice of an answer, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[str | int | None]
    matched_stop: NotRequired[str | int | None]
    """What ended the choice, where it has ended well: see `StopFound`."""
    error: NotRequired[ErrorObject]
    """What went wrong with this choice, where others were completed."""


class TextCompletion(AnswerHead):
    """The body of an answer, and each `data:` line of a stream."""

    choices: list[TextChoice]
    usage: NotRequired[Usage | None]
    timings: NotRequired[TimingsBody]
    cache: NotRequired[CacheBody | None]


async def create_completion(request: Request) -> Response:
    """Continues a text."""
    return await generate(request, "cmpl-", open_completion)


def open_completion(context: ApiContext, incoming: Incoming) -> ChoiceExchange | SeveralChoices:
    """Returns the checked request; raises ApiError."""
    body = parse_body(CompletionBody, dict(incoming.fields), IN_TEXT)
    refuse_lone_stream_options(body)
    if body.echo and body.logprobs is not None:
        raise ApiError(Code.INVALID_VALUE, "echo: logprobs are told of the answer only, not of the prompt", "echo")
    model = context.find_model(body.model)
    params = read_params(body, model)
    namespace = namespace_of(incoming.http, body.cache_salt)
    count = num_choices(body, len(body.prompt), context.config)
    exchanges: list[ChoiceExchange] = []
    for place, written in _places(body.prompt):
        prompt = text_prompt(written, model, place)
        request = build_request(
            incoming,
            params,
            prompt,
            prompt_param=place,
            namespace=namespace,
            model=model,
            config=context.config,
        )
        for number in range(count):
            index = len(exchanges)
            own = request_of_choice(request, index, number)
            repeated = _as_text(written, model) if body.echo else ""
            exchanges.append(CompletionExchange(body, model, own, prompt, index, repeated))
    return SeveralChoices(exchanges) if len(exchanges) > 1 else exchanges[0]


def _places(prompts: Sequence[str | list[int]]) -> list[tuple[str, str | list[int]]]:
    """Returns each prompt with the name of its place in the body."""
    if len(prompts) == 1:
        return [("prompt", prompts[0])]
    return [(f"prompt[{index}]", prompt) for index, prompt in enumerate(prompts)]


def text_prompt(prompt: str | list[int], model: ServedModel, place: str = "prompt") -> RenderedPrompt:
    """Returns the tokens of a plain prompt; raises ApiError for a number that is no token.

    `place` is where the prompt stands in the body, for errors.
    """
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

    def __init__(
        self,
        body: CompletionBody,
        model: ServedModel,
        request: GenerationRequest,
        prompt: RenderedPrompt,
        index: int = 0,
        repeated: str = "",
    ) -> None:
        """`repeated` is what the answer begins with, before what the model says."""
        super().__init__(body, model, request, prompt, index=index)
        self._texts = [repeated]
        self._told_prompt = False
        """Whether a chunk has told the tokens of the prompt."""
        count = body.num_top_logprobs()
        self._logprobs = TextLogprobsWriter(self.names, count) if count is not None else None

    def opening(self) -> list[TextCompletion]:
        """Returns the prompt where it is repeated; else nothing: a completion begins with its text."""
        return [self._body(text, None) for text in self._texts if text]

    def take(self, piece: Piece) -> list[TextCompletion]:
        """Keeps more of the text, and returns the chunk that tells of it."""
        assert isinstance(piece, Text), "a plain completion is text"
        self._texts.append(piece.text)
        return [self._body(piece.text, None)]

    def reason(self, finished: Finished) -> str:
        """Returns OpenAI's word for why the choice ended."""
        return finish_reason(finished)

    def end_chunk(self, reason: str) -> TextCompletion:
        """Returns the last chunk of the choice."""
        return self._body("", reason)

    def empty_chunk(self) -> TextCompletion:
        """Returns a chunk without choices."""
        return {**self._body("", None), "choices": []}

    def choice(self, reason: str) -> TextChoice:
        """Returns the choice of an answer that is not streamed."""
        text = "".join(self._texts)
        told = self._logprobs.again().write(self.told) if self._logprobs is not None else None
        choice: TextChoice = {"index": self.index, "text": text, "logprobs": told, "finish_reason": reason}
        return cast(TextChoice, {**choice, **self.prompt_ids(), **self.whole_ids()})

    def answer(self, choices: list[TextChoice]) -> TextCompletion:
        """Returns an answer that is not streamed, without its costs."""
        return {**self._body("", None), "choices": choices}

    def _untold(self) -> TextLogprobs | None:
        """Returns what is told of the tokens since the last chunk; None where nothing is."""
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
