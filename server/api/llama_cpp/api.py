"""llama.cpp's dialect.

`/apply-template` and `/v1/chat/completions/input_tokens` take the body of a chat completion. `/slots` and `/props`
show nothing of any request: whoever asks may not be its sender.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, Literal, NotRequired, TypeAlias

from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from models.inference.sampling_params import NUMBERS, SamplingParams
from models.output.pieces import Text
from models.prompt.chat_template import RenderedPrompt
from server.api import PRODUCT
from server.api.answer import Answer, Exchange, Question, Run
from server.api.bodies import BodyModel, Rules, parse_body, refused
from server.api.call import generate, inspect
from server.api.dialect import ApiContext, Dialect, Endpoint, Operation, context_of, with_and_without_v1
from server.api.errors import ApiError, Code, retry_later
from server.api.generation import IN_TEXT, Bias, GenerationBody, LimitOrZero, read_params
from server.api.openai.chat import IN_CHAT, ChatBody, read_conversation
from server.api.params import Incoming, check_token_ids, question_of, text_prompt
from server.api.record import CostsAtEnd, ProgressTold, costs_of, progress_of
from server.api.wire import JsonBody, Payload, body_of, sse_event
from server.engine.commands import describe_slots
from server.engine.request import Delta, Finished, FinishReason, Progress, Started
from server.pool.served import ServedModel

ERRORS: Final[Mapping[int, str]] = {401: "authentication", 403: "permission", 404: "not_found", 503: "unavailable"}


class LlamaCppError(TypedDict):
    """The inner object of an error body."""

    code: int
    message: str
    type: str


class _LlamaCppDialect(Dialect):
    """llama.cpp's endpoints beside those of OpenAI."""

    error_type = dict[Literal["error"], LlamaCppError]
    own_paths = ("/slots", "/infill", "/lora-adapters", "/embedding")

    def error_body(self, error: ApiError) -> Payload:
        kind = ERRORS.get(error.status, "server" if error.status >= 500 else "invalid_request")
        return {"error": {"code": error.status, "message": error.message, "type": f"{kind}_error"}}


class SlotBody(TypedDict):
    """One slot."""

    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool


DefaultParams: TypeAlias = dict[str, float | list[str]]
"""A request's sampling, or the default, under llama.cpp's names."""
_SHOWN = NUMBERS.keys() - {"seed", "repetition_penalty", "repeat_last_n"}


class PropsBody(TypedDict):
    """The server and its model."""

    default_generation_settings: dict[Literal["n_ctx", "params"], Any]
    """The settings that requests get by default."""
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: dict[str, bool]
    """What a prompt may hold beside text."""
    build_info: str


async def slots(request: Request) -> Response:
    """Lists the slots; with `?fail_on_no_slot=1` answers 503 while none is free."""
    context, model = context_of(request), _model_asked(request)
    engine = context.running_engine(model)
    are_busy: list[bool] = await engine.execute(describe_slots)
    if request.query_params.get("fail_on_no_slot") == "1" and all(are_busy):
        raise retry_later(Code.NO_FREE_SLOT, "no slot is free", 1)
    fields = {"n_ctx": model.context_tokens, "speculative": engine.stats().drafts is not None}
    return JsonBody([{"id": index, **fields, "is_processing": is_leased} for index, is_leased in enumerate(are_busy)])


async def props(request: Request) -> Response:
    """Describes the server."""
    model = _model_asked(request)
    body = body_of(
        PropsBody,
        model.facts,
        default_generation_settings={"n_ctx": model.context_tokens, "params": _params_body(model.sampling)},
        total_slots=context_of(request).config.slots,
        model_alias=model.id,
        model_path=model.id,
        modalities={"vision": "vision" in model.capabilities, "audio": False},
        build_info=PRODUCT,
    )
    return JsonBody(body)


def _model_asked(request: Request) -> ServedModel:
    return context_of(request).pool.find(request.query_params.get("model"))


def _params_body(sampling: SamplingParams, n_predict: int = -1, stop: Sequence[str] = ()) -> DefaultParams:
    shown = {name: getattr(sampling, name) for name in _SHOWN}
    return {**shown, "n_predict": n_predict, "repeat_penalty": sampling.repetition_penalty, "stop": list(stop)}


@inspect
def apply_template(context: ApiContext, incoming: Incoming) -> Payload:
    """Answers with a conversation's prompt."""
    return {"prompt": _rendered(context, incoming).text}


@inspect
def count_input_tokens(context: ApiContext, incoming: Incoming) -> Payload:
    """Answers with the length of a conversation's prompt."""
    return {"input_tokens": len(_rendered(context, incoming).tokens)}


def _rendered(context: ApiContext, incoming: Incoming, kind: type[ChatBody] = ChatBody) -> RenderedPrompt:
    body = parse_body(kind, dict(incoming.fields), IN_CHAT)
    return read_conversation(body, incoming, context.pool.find(body.model)).render()


class TokenizeBody(BodyModel):
    """Body of `POST /tokenize`."""

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    """vLLM's `content`."""
    add_special_tokens: bool | None = None
    """vLLM's name for `add_special`, true by default with `prompt`."""
    add_special: bool | None = None
    """Adds the tokens that begin a prompt."""
    parse_special: bool | None = None
    """False: names of special tokens are text."""
    with_pieces: bool | None = None


class TokenizedChatBody(ChatBody):
    """Body of `POST /tokenize` with messages."""

    with_pieces: bool | None = None


class DetokenizeBody(BodyModel):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[int] | None = None


class TokenPiece(TypedDict):
    """A token and its text, or its bytes."""

    id: int
    piece: str | list[int]


class TokensBody(TypedDict):
    """Tokens, in llama.cpp's and vLLM's form."""

    tokens: list[int] | list[TokenPiece]
    count: NotRequired[int]
    max_model_len: NotRequired[int]


@inspect
def tokenize(context: ApiContext, incoming: Incoming) -> Payload:
    """Answers with the tokens of a text, or of a conversation."""
    fields = incoming.fields
    if is_chat := "messages" in fields:
        rendered = _rendered(context, incoming, TokenizedChatBody)
        tokens = rendered.pictures.in_words(rendered.tokens).tolist()
        model = context.pool.find(fields.get("model"))
    else:
        body = parse_body(TokenizeBody, fields)
        model, text = context.pool.find(body.model), body.content or body.prompt or ""
        wishes = (body.add_special, body.add_special_tokens)
        adds = True in wishes or (body.prompt is not None and False not in wishes)
        tokens = model.renderer.tokenize(text, add_special=adds, parse_special=body.parse_special is not False)
    answer: TokensBody = {"tokens": tokens}
    if is_chat or fields.get("prompt") is not None:
        answer |= {"count": len(tokens), "max_model_len": model.context_tokens}
    if fields.get("with_pieces"):
        answer["tokens"] = [_piece(token, model.token_texts.piece(token)) for token in tokens]
    return answer


@inspect
def detokenize(context: ApiContext, incoming: Incoming) -> Payload:
    """Answers with the text of tokens."""
    body = parse_body(DetokenizeBody, incoming.fields)
    model = context.pool.find(body.model)
    check_token_ids(body.tokens or (), model.vocab_size, "tokens")
    text = model.token_texts.text(body.tokens or ())
    return {"content": text, "prompt": text}


def _piece(token: int, piece: bytes) -> TokenPiece:
    try:
        return {"id": token, "piece": piece.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(piece)}


NEVER = -100.0
"""The bias of `false`, which excludes a token."""
STOP_TYPES = {FinishReason.STOP: "eos", FinishReason.LENGTH: "limit", FinishReason.CANCELLED: "none"}

IN_COMPLETION: Rules = {name: rule for name, rule in IN_TEXT.items() if name != "return_tokens"} | refused("""
    there is one answer to one prompt; /v1/completions gives several: n=1
    its name here is return_tokens: return_token_ids=false
    an answer has the text after the prompt, and its tokens: echo=false logprobs
    a plain prompt is text only: image_data=[]
""")


def _one_prompt(value: Any) -> Any:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    parts = value if isinstance(value, list) else [0, value]
    if all(isinstance(part, str) or type(part) is int for part in parts) and any(type(part) is int for part in parts):
        return value
    raise ValueError("Input should be a text, or a list of token ids and texts; /v1/completions takes several")


def _bias_object(value: Any) -> Any:
    """Pairs of token and bias as OpenAI's object; other entries are refused later."""
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        return value
    return {str(token): NEVER if bias is False else bias for token, bias in value}


class LlamaCompletionBody(GenerationBody):
    """Body of `POST /completion`."""

    prompt: Annotated[Any, BeforeValidator(_one_prompt), Field()]
    n_predict: LimitOrZero = None
    """0 only evaluates the prompt."""
    logit_bias: Annotated[dict[str, Bias] | None, BeforeValidator(_bias_object)] = None
    """Also pairs of a token id and its bias; `false` excludes the token."""
    return_tokens: bool | None = None


class LlamaCompletion(ProgressTold, CostsAtEnd):
    """An answer, also each event; the last has all fields."""

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


@generate("cmpl-")
def complete(context: ApiContext, incoming: Incoming) -> Exchange:
    """Continues one prompt."""
    body = parse_body(LlamaCompletionBody, dict(incoming.fields), IN_COMPLETION)
    model = context.pool.find(body.model)
    prompt = text_prompt(_joined(body.prompt, model), model)
    params = replace(read_params(body, model), prompt_param="prompt")
    namespace = incoming.namespace(body.cache_salt)
    return _CompletionExchange(body, question_of(incoming, model, prompt, params, namespace))


def _joined(prompt: str | list[int | str], model: ServedModel) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    tokens: list[int] = []
    for part in prompt:
        if isinstance(part, int):
            tokens.append(part)
        else:
            tokens += model.renderer.tokenize(part) if tokens else model.renderer.encode(part).tokens.tolist()
        if len(tokens) >= model.context_tokens:
            break  # other values are already refused
    return tokens


class _CompletionExchange(Exchange):
    """Writes the continuation of one prompt."""

    def __init__(self, body: LlamaCompletionBody, question: Question) -> None:
        super().__init__(question)
        self._tells_tokens = body.stream is True or body.return_tokens is True
        self.tells_progress = body.stream is True and body.return_progress is True
        self._tokens: list[int] = []

    def take_tokens(self, delta: Delta, stop_token: int | None = None) -> None:
        self._tokens.extend(delta.token_ids)

    async def frames(self, answer: Answer) -> AsyncIterator[bytes]:
        async for event in answer.events():
            match event:
                case Started() | Progress():
                    if self.tells_progress:
                        progress = {"prompt_progress": progress_of(answer.runs[0])}
                        yield sse_event({**self._event("", answer.runs[0]), **progress})
                case Text(text):
                    yield sse_event(self._event(text, answer.runs[0]))
                case Finished():
                    yield sse_event(self._last("", answer.runs[0], event))

    async def body(self, answer: Answer) -> Payload:
        events, finished = await answer.read()
        text = "".join(event.text for event in events if isinstance(event, Text))
        return self._last(text, answer.runs[0], finished)

    def _event(self, text: str, run: Run) -> LlamaCompletion:
        assert run.started is not None, "a request starts before its text"
        tokens, self._tokens = self._tokens, []
        return {
            "index": 0,
            "content": text,
            "tokens": tokens if self._tells_tokens else [],
            "id_slot": run.started.slot,
            "stop": False,
            "tokens_predicted": run.predicted_tokens,
            "tokens_evaluated": len(self.request.tokens),
        }

    def _last(self, text: str, run: Run, finished: Finished) -> LlamaCompletion:
        request, word = self.request, finished.stop_text
        return {
            **self._event(text, run),
            "stop": True,
            "model": self.model.id,
            "prompt": self.model.token_texts.text(request.tokens.tolist()),
            "generation_settings": _params_body(request.sampling, request.max_tokens, request.stop),
            "truncated": False,
            "stop_type": STOP_TYPES[finished.reason] if word is None else "word",
            "stopping_word": word or "",
            "tokens_cached": finished.timings.cache_tokens,
            **costs_of(finished, request.session_id),
        }


_COUNTING = Operation(ChatBody, dict[Literal["input_tokens"], int])
_ROUTES = (
    Endpoint("/tokenize", tokenize, Operation(TokenizeBody, TokensBody)),
    Endpoint("/detokenize", detokenize, Operation(DetokenizeBody, dict[Literal["content", "prompt"], str])),
    Endpoint("/apply-template", apply_template, Operation(ChatBody, dict[Literal["prompt"], str])),
    Endpoint("/completion", complete, Operation(LlamaCompletionBody, LlamaCompletion, stream=LlamaCompletion)),
    Endpoint("/slots", slots, Operation(answer=list[SlotBody], query=("model", "fail_on_no_slot"))),
    Endpoint("/props", props, Operation(answer=PropsBody, query=("model",))),
    *with_and_without_v1([Endpoint("/chat/completions/input_tokens", count_input_tokens, _COUNTING)]),
)
LLAMA_CPP = _LlamaCppDialect(_ROUTES)
