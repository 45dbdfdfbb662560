"""`POST /v1/completions`: OpenAI's plain completions, streamed or whole."""

import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, NotRequired, TypedDict

import numpy as np
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from cache.restore_points import RestorePoint, RestorePointKind
from models.errors import PromptTooLong
from models.inference.sampling_params import MAX_TOP_LOGPROBS
from models.output.pieces import Text
from models.output.token_logprob import TokenLogprob
from models.prompt.chat_template import RenderedPrompt
from server.api.auth import namespace_of
from server.api.context import ApiContext, ServedModel
from server.api.dialect import Exchange, OutputEvent, Payload
from server.api.endpoint import generate
from server.api.errors import ApiError, Code
from server.api.openai.dialect import DONE, SYSTEM_FINGERPRINT
from server.api.openai.fields import IN_TEXT
from server.api.openai.generation_body import GenerationBody
from server.api.openai.logprobs import TextLogprobs, TextLogprobsWriter
from server.api.openai.params import read_params
from server.api.openai.usage import AnswerHead, Usage, finish_reason, usage_of
from server.api.params import Incoming, build_request
from server.api.sse import sse_event
from server.api.typed_body import parse_body
from server.api.usage import CacheBody, TimingsBody, costs_of
from server.engine.events import Finished
from server.engine.request import GenerationRequest


def _one_prompt(value: Any) -> Any:
    """Takes a text, a list of token ids, or a list that holds one of them."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise PydanticCustomError("one_prompt", "a request may hold one prompt only")
        value = value[0]
    if isinstance(value, str) or (isinstance(value, list) and all(type(entry) is int for entry in value)):
        return value
    raise PydanticCustomError("prompt_type", "Input should be a text or a list of token ids")


class CompletionBody(GenerationBody):
    """Body of `POST /v1/completions`."""

    prompt: Annotated[Any, BeforeValidator(_one_prompt), Field()]
    """A text, a list of token ids, or a list that holds one of them."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """How many of the likeliest tokens are told with each token of the answer."""

    def num_top_logprobs(self) -> int | None:
        """Returns that number; None where nothing is to be told."""
        return self.logprobs


class TextChoice(TypedDict):
    """The only choice of a chunk or an answer."""

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


def open_completion(context: ApiContext, incoming: Incoming) -> Exchange:
    """Returns the checked request; raises ApiError."""
    body = parse_body(CompletionBody, dict(incoming.fields), IN_TEXT)
    model = context.find_model(body.model)
    prompt = text_prompt(body.prompt, model)
    request = build_request(
        incoming,
        read_params(body, incoming.fields, IN_TEXT, model),
        prompt,
        prompt_param="prompt",
        namespace=namespace_of(incoming.http, body.cache_salt),
        model=model,
        config=context.config,
    )
    return CompletionExchange(body, model, request, prompt)


def text_prompt(prompt: str | list[int], model: ServedModel) -> RenderedPrompt:
    """Returns the tokens of a plain prompt; raises ApiError for a number that is no token."""
    if isinstance(prompt, str):
        return model.renderer.encode(prompt)
    if len(prompt) >= model.context_tokens:
        error = PromptTooLong(len(prompt), model.context_tokens - 1)
        error.param = "prompt"
        raise error
    for index, token in enumerate(prompt):
        if not 0 <= token < model.vocab_size:
            message = f"prompt[{index}]: {str(token)[:40]} is no token id from 0 to {model.vocab_size - 1}"
            raise ApiError(Code.INVALID_VALUE, message, f"prompt[{index}]")
    end = RestorePoint(len(prompt), RestorePointKind.PROMPT_END)
    return RenderedPrompt(np.array(prompt, dtype=np.int32), (end,) if prompt else ())


class CompletionExchange(Exchange):
    """Writes the continuation of one prompt."""

    def __init__(
        self, body: CompletionBody, model: ServedModel, request: GenerationRequest, prompt: RenderedPrompt
    ) -> None:
        super().__init__(model, request, prompt, is_streamed=body.stream is True)
        self._created = int(time.time())
        self._wants_usage = body.wants_usage()
        self._told: list[TokenLogprob] = []
        """Of the tokens that were not written yet."""
        count = body.num_top_logprobs()
        self._logprobs = TextLogprobsWriter(model.token_texts, count) if count is not None else None

    def take_logprobs(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Keeps them for the next text."""
        self._told.extend(logprobs)

    async def frames(self, events: AsyncIterator[OutputEvent]) -> AsyncIterator[bytes]:
        """Yields text, why it ended, and the usage where asked for."""
        async for event in events:
            match event:
                case Text(text):
                    yield sse_event(self._body(text, None))
                case Finished():
                    for chunk in self._last_chunks(event):
                        yield sse_event(chunk)
        yield DONE

    async def body(self, events: AsyncIterator[OutputEvent]) -> Payload:
        """Returns the body of an answer that is not streamed."""
        texts: list[str] = []
        async for event in events:
            match event:
                case Text(text):
                    texts.append(text)
                case Finished():
                    return self._completion("".join(texts), event)
        raise AssertionError("the events of a request end with Finished")

    def _completion(self, text: str, finished: Finished) -> TextCompletion:
        body = self._body(text, finish_reason(finished))
        body["usage"] = usage_of(finished)
        body.update(costs_of(finished, self.request.session_id))  # type: ignore[typeddict-item]
        return body

    def _last_chunks(self, finished: Finished) -> list[TextCompletion]:
        end = self._body("", finish_reason(finished))
        last = end
        if self._wants_usage:
            last = self._body("", None)
            last["choices"], last["usage"] = [], usage_of(finished)
        last.update(costs_of(finished, self.request.session_id))  # type: ignore[typeddict-item]
        return [end] if last is end else [end, last]

    def _written(self) -> TextLogprobs | None:
        """Returns what is told of the tokens since the last time; None where nothing is."""
        told, self._told = self._told, []
        return self._logprobs.write(told) if self._logprobs is not None and told else None

    def _body(self, text: str, reason: str | None) -> TextCompletion:
        choice: TextChoice = {"index": 0, "text": text, "logprobs": self._written(), "finish_reason": reason}
        body: TextCompletion = {
            "id": self.request.request_id,
            "object": "text_completion",
            "created": self._created,
            "model": self.model.id,
            "system_fingerprint": SYSTEM_FINGERPRINT,
            "choices": [choice],
        }
        if self._wants_usage:
            body["usage"] = None
        return body
