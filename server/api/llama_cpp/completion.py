"""`POST /completion`: llama.cpp's own continuation of one prompt, streamed or whole."""

from collections.abc import AsyncIterator
from typing import Annotated, Any, NotRequired, TypedDict

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from models.output.pieces import Text
from models.prompt.chat_template import RenderedPrompt
from server.api.auth import namespace_of
from server.api.context import ApiContext, ServedModel
from server.api.dialect import Exchange, OutputEvent, Payload
from server.api.endpoint import generate
from server.api.field_rules import Rules, honoured, no_effect, refused
from server.api.llama_cpp.state import DefaultParams, params_body
from server.api.openai.completions import text_prompt
from server.api.openai.fields import IN_TEXT
from server.api.openai.generation_body import GenerationBody, as_limit
from server.api.openai.params import read_params
from server.api.params import Incoming, build_request
from server.api.sse import sse_event
from server.api.typed_body import parse_body
from server.api.usage import CacheBody, TimingsBody, costs_of
from server.engine.request import Delta, Finished, FinishReason, GenerationRequest, Started

NEVER = -100.0
"""The bias of a token that `false` rules out."""
STOP_TYPES = {FinishReason.STOP: "eos", FinishReason.LENGTH: "limit", FinishReason.CANCELLED: "none"}

IN_COMPLETION: Rules = {
    **IN_TEXT,
    **honoured("return_tokens"),
    **no_effect("the last object of a stream has all counts", "stream_options", is_read=True),
    **no_effect("tokens are told by their ids", "return_tokens_as_token_ids", is_read=True),
    **refused("there is one answer to one prompt; /v1/completions gives several", n=(1,)),
    **refused("its name here is return_tokens", return_token_ids=(False,)),
    **refused("an answer has the text behind the prompt, and its tokens", echo=(False,), logprobs=()),
    **refused("prompts are text only", image_data=([],)),
}


def _one_prompt(value: Any) -> Any:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    parts = value if isinstance(value, list) else [0, value]
    if all(isinstance(part, str) or type(part) is int for part in parts) and any(type(part) is int for part in parts):
        return value
    reason = "Input should be a text, or a list of token ids and texts; /v1/completions takes several prompts"
    raise PydanticCustomError("prompt_type", reason)


def _bias_object(value: Any) -> Any:
    """Returns pairs of a token and its bias as OpenAI's object; what is no pair is left to be refused."""
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        return value
    return {str(token): NEVER if bias is False else bias for token, bias in value}


class LlamaCompletionBody(GenerationBody):
    """Body of `POST /completion`."""

    prompt: Annotated[Any, BeforeValidator(_one_prompt), Field()]
    """A text, or a list of token ids that may have texts among them."""
    n_predict: Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(as_limit)] = None
    """0 only evaluates the prompt."""
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]] | None, BeforeValidator(_bias_object)
    ] = None
    """Also as pairs of a token id and its bias; false rules the token out."""
    return_tokens: bool | None = None


class LlamaCompletion(TypedDict):
    """The answer, and each event of a stream; what is not required is in the last only."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool
    tokens_predicted: int
    tokens_evaluated: int
    model: NotRequired[str]
    prompt: NotRequired[str]
    generation_settings: NotRequired[DefaultParams]
    truncated: NotRequired[bool]
    stop_type: NotRequired[str]
    stopping_word: NotRequired[str]
    tokens_cached: NotRequired[int]
    timings: NotRequired[TimingsBody]
    cache: NotRequired[CacheBody | None]


async def complete(request: Request) -> Response:
    """Continues one prompt."""
    return await generate(request, "cmpl-", open_llama_completion)


def open_llama_completion(context: ApiContext, incoming: Incoming) -> Exchange:
    """Returns the checked request; raises ApiError."""
    body = parse_body(LlamaCompletionBody, dict(incoming.fields), IN_COMPLETION)
    model = context.find_model(body.model)
    prompt = text_prompt(_joined(body.prompt, model), model)
    request = build_request(
        incoming,
        read_params(body, model),
        prompt,
        prompt_param="prompt",
        namespace=namespace_of(incoming.http, body.cache_salt),
        model=model,
        config=context.config,
    )
    return LlamaCompletionExchange(body, model, request, prompt)


def _joined(prompt: str | list[int | str], model: ServedModel) -> str | list[int]:
    """Returns the tokens of a list; a text at its head begins as a prompt does."""
    if isinstance(prompt, str):
        return prompt
    tokens: list[int] = []
    for index, part in enumerate(prompt):
        if isinstance(part, int):
            tokens.append(part)
        else:
            renderer = model.renderer
            tokens.extend(renderer.tokenize(part) if index else renderer.encode(part).tokens.tolist())
        if len(tokens) >= model.context_tokens:
            break  # it is refused already
    return tokens


class LlamaCompletionExchange(Exchange):
    """Writes the continuation of one prompt."""

    def __init__(
        self, body: LlamaCompletionBody, model: ServedModel, request: GenerationRequest, prompt: RenderedPrompt
    ) -> None:
        super().__init__(model, request, prompt, is_streamed=body.stream is True)
        self._tells_tokens = self.is_streamed or body.return_tokens is True
        self._tokens: list[int] = []
        """Those that the client has not been told."""
        self._num_predicted = 0
        self._slot = 0

    def take_tokens(self, delta: Delta) -> None:
        """Keeps them for the next event, or for the answer."""
        self._tokens.extend(delta.token_ids)
        self._num_predicted += len(delta.token_ids)

    async def frames(self, events: AsyncIterator[OutputEvent]) -> AsyncIterator[bytes]:
        """Yields text as it comes, and at the end why it ended and what it cost."""
        async for event in events:
            match event:
                case Started():
                    self._slot = event.slot
                case Text(text):
                    yield sse_event(self._event(text))
                case Finished():
                    yield sse_event(self._last("", event))

    async def body(self, events: AsyncIterator[OutputEvent]) -> Payload:
        """Returns the body of an answer that is not streamed."""
        texts: list[str] = []
        async for event in events:
            match event:
                case Started():
                    self._slot = event.slot
                case Text(text):
                    texts.append(text)
                case Finished():
                    return self._last("".join(texts), event)
        raise AssertionError("the events of a request end with Finished")

    def _event(self, text: str) -> LlamaCompletion:
        told, self._tokens = self._tokens, []
        return {
            "index": 0,
            "content": text,
            "tokens": told if self._tells_tokens else [],
            "id_slot": self._slot,
            "stop": False,
            "tokens_predicted": self._num_predicted,
            "tokens_evaluated": len(self.request.tokens),
        }

    def _last(self, text: str, finished: Finished) -> LlamaCompletion:
        request, word = self.request, finished.stop_text
        return {
            **self._event(text),
            "stop": True,
            "tokens_predicted": finished.timings.predicted_tokens,
            "model": self.model.id,
            "prompt": self.model.token_texts.text(request.tokens.tolist()),
            "generation_settings": params_body(request.sampling, request.max_tokens, request.stop),
            "truncated": False,
            "stop_type": STOP_TYPES[finished.reason] if word is None else "word",
            "stopping_word": word or "",
            "tokens_cached": finished.timings.cache_tokens,
            **costs_of(finished, request.session_id),
        }
