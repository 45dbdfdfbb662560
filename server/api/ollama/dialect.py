"""What all of Ollama's endpoints share: key, lines of JSON, errors as one text, common fields, and `context`.

All fields except the model are optional, and null means absent.

`follow_up` continues the tokens that `/api/generate` returned as `context`. They end with the model's reply, without
the template's text after a reply. So the next message is rendered after a sample conversation, and the text that
follows the sample's reply is used.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final

import numpy as np
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError
from starlette.responses import Response
from typing_extensions import TypedDict

from cache.snapshots import RestorePoint, RestorePointKind
from models.inference.sampling_params import MAX_WINDOW, SamplingParams, check
from models.output.tool_formats import HarmonyFormat
from models.prompt.chat_template import Message, RenderedPrompt
from server.api.context import ApiContext
from server.api.conversation import Conversation, ThinkingWish
from server.api.dialect import BodyModel, Dialect, ModelReady, Payload, Whole
from server.api.errors import ApiError, Code
from server.api.ollama.fields import IN_OPTIONS
from server.api.params import ANY_OBJECT, AnswerGrammar, GenerationParams, check_token_ids, json_grammar
from server.api.wire import JsonBody, bearer_key, json_text, wrong_bearer_key
from server.pool.errors import ModelNotLoaded, ModelUnknown
from server.pool.names import parse_keep_alive
from server.pool.served import ServedModel

logger = logging.getLogger(__name__)


class ErrorText(TypedDict):
    """The body of every answer that is not a success, and the last line of a stream that broke off."""

    error: str


class OllamaDialect(Dialect):
    """Ollama's endpoints."""

    stream_media_type = "application/x-ndjson"
    takes_any_content_type = True  # Ollama's own examples use `curl -d` without a type.

    def api_key(self, headers: Mapping[str, str]) -> str:
        """Returns the bearer token."""
        return bearer_key(headers)

    def wrong_key(self) -> ApiError:
        """Returns the error that asks for a bearer token."""
        return wrong_bearer_key()

    def wants_stream(self, fields: Mapping[str, Any]) -> bool:
        """Returns True unless a body sets `stream` to false."""
        return fields.get("stream") is not False

    def error_response(self, error: ApiError) -> Response:
        """Returns an answer with the error's text."""
        return JsonBody(_error_text(error), status_code=error.status, headers=dict(error.headers))

    def error_frame(self, error: ApiError) -> bytes:
        """Returns a line with the error's text."""
        return line(_error_text(error))

    def heartbeat(self, progress: str) -> bytes:
        """Returns nothing: clients read every line as an answer."""
        return b""


def line(payload: Mapping[str, Any]) -> bytes:
    """Returns a line of a stream."""
    return json_text(payload).encode() + b"\n"


def _error_text(error: ApiError) -> ErrorText:
    return {"error": error.message}


MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_NAMED_OPTIONS = 500
"""Characters of unknown options shown in the log."""
SAMPLING_OPTIONS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repeat_last_n",
)

HIGHEST_EFFORT = "max"
EFFORTS = ("high", "medium", "low", HIGHEST_EFFORT)
HIGHEST_OF_HARMONY = "high"


def _format(value: Any) -> Any:
    if value in (None, ""):
        return None
    if value == "json":
        return dict(ANY_OBJECT)
    if isinstance(value, dict):
        return value
    raise PydanticCustomError("format", 'Input should be "json" or a JSON schema, an object')


def _think(value: Any) -> Any:
    if value is None or isinstance(value, bool) or value in EFFORTS:
        return value
    raise PydanticCustomError("think", 'Input should be true, false, "high", "medium", "low" or "max"')


def _keep_alive(value: Any) -> Any:
    try:
        if value is not None:
            parse_keep_alive(value)
    except ValueError as error:
        raise PydanticCustomError("keep_alive", "{reason}", {"reason": str(error)}) from error
    return value


KeepAlive = Annotated[str | float | None, BeforeValidator(_keep_alive)]
"""How long a model stays loaded, in any form that clients write."""
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
_StopString = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]


def keep_alive_seconds(keep_alive: str | float | None) -> float | None:
    """Returns a checked `keep_alive` in seconds, infinite for "for ever"; None if absent."""
    return None if keep_alive is None else parse_keep_alive(keep_alive)


class Options(BodyModel):
    """`options`: how the answer is sampled and where it ends."""

    num_predict: Whole | None = None
    """0 and below mean no limit."""
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_k: Whole | None = None
    """0 and below keep all tokens."""
    top_p: _Share | None = None
    min_p: _Share | None = None
    typical_p: _Share | None = None
    """0 and 1 keep all tokens."""
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**63)] | None = None
    """Below 0 means no seed."""
    stop: Annotated[list[_StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repeat_last_n: Annotated[Whole, Field(ge=-1, le=MAX_WINDOW)] | None = None
    """How many of the last tokens the penalties look at; -1 is all, 0 none."""

    @property
    def limit(self) -> int | None:
        return self.num_predict if self.num_predict is not None and self.num_predict > 0 else None

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(text for text in self.stop or () if text)


class OllamaBody(BodyModel):
    """Fields of a request for text, whatever the prompt looks like."""

    model: str | None = None
    stream: bool | None = None
    """Streamed unless false."""
    format: Annotated[dict[str, Any] | None, BeforeValidator(_format)] = None
    """The JSON schema of the answer; "json" allows any object."""
    think: Annotated[bool | str | None, BeforeValidator(_think)] = None
    options: Options | None = None
    keep_alive: KeepAlive = None
    """How long the model stays loaded after its last request."""

    @property
    def is_streamed(self) -> bool:
        return self.stream is not False

    @property
    def keep_alive_seconds(self) -> float | None:
        """Seconds that the model stays loaded after its last request; None if the request does not say."""
        return keep_alive_seconds(self.keep_alive)

    def answer_grammar(self) -> AnswerGrammar | None:
        """Returns the grammar of the answer, if the request has one."""
        return None if self.format is None else AnswerGrammar("format", json_grammar(self.format))


def find_model(context: ApiContext, name: str | None) -> ServedModel:
    """Returns the model of that name; raises ApiError (400, 404) in words that Ollama's clients look for."""
    if not name:
        raise ApiError(Code.MISSING_PARAMETER, "model is required", "model")
    try:
        return context.find_model(name)
    except ModelUnknown as error:
        raise ApiError(Code.MODEL_NOT_FOUND, f"model {name[:200]!r} not found: {error.instead}", "model") from error


def answer_loading(context: ApiContext, body: OllamaBody, answer: Payload) -> ModelReady:
    """Returns the answer to a request without a prompt, which is sent after the model is loaded or unloaded.

    Raises as `find_model` does. A model that is not loaded is not loaded in order to be unloaded.
    """
    try:
        return ModelReady(find_model(context, body.model), answer, body.keep_alive_seconds)
    except ModelNotLoaded:
        if body.keep_alive_seconds != 0:
            raise
        return ModelReady(None, answer)


def thinks(model: ServedModel) -> bool:
    """Whether thoughts are separated from the model's answers."""
    return model.reasoning_format is not None or isinstance(model.tool_syntax, HarmonyFormat)


def template_arguments(body: OllamaBody, model: ServedModel) -> Mapping[str, Any]:
    """Returns the template's arguments for thinking; raises ApiError (400) for a model without thoughts."""
    if body.think and not thinks(model):
        raise ApiError(Code.UNSUPPORTED_PARAMETER, f"think: {model.id!r} does not support thinking", "think")
    if not isinstance(body.think, str):
        return ThinkingWish(is_enabled=body.think).template_arguments()
    is_beyond = body.think == HIGHEST_EFFORT and isinstance(model.tool_syntax, HarmonyFormat)
    effort = HIGHEST_OF_HARMONY if is_beyond else body.think
    return ThinkingWish(is_enabled=True, effort=effort).template_arguments()


def read_params(body: OllamaBody, model: ServedModel) -> GenerationParams:
    """Returns the generation parameters of a checked body; raises ApiError or InvalidParameter."""
    options = body.options or Options()
    sampling = options_sampling(options, model)
    check(sampling, model.vocab_size)
    return GenerationParams(sampling, options.limit, stop=options.stops, grammar=body.answer_grammar())


def options_sampling(options: Options, model: ServedModel) -> SamplingParams:
    """Returns the model's sampling defaults, changed by the options; logs unknown options."""
    unknown = sorted((options.model_extra or {}).keys() - IN_OPTIONS.keys())
    if unknown:
        logger.warning("options without meaning here: %s", repr(unknown)[:MAX_NAMED_OPTIONS])
    given: dict[str, Any] = {
        name: getattr(options, name) for name in SAMPLING_OPTIONS if getattr(options, name) is not None
    }
    if options.repeat_penalty is not None:
        given["repetition_penalty"] = options.repeat_penalty
    if given.get("seed", 0) < 0:
        given["seed"] = None
    if "top_k" in given and not 0 < given["top_k"] < model.vocab_size:
        given["top_k"] = 0
    if given.get("top_p") == 0:
        # A mass of 0 leaves only the likeliest token.
        given |= {"top_p": 1.0, "top_k": 1}
    if given.get("typical_p") == 0:
        given["typical_p"] = 1.0
    return replace(model.sampling, **given)


def offered_tools(tools: Sequence[Mapping[str, Any]] | None, model: ServedModel) -> Sequence[Mapping[str, Any]]:
    """Returns the tools as the client wrote them; raises ApiError (400) if the model's template takes none."""
    if tools and not model.renderer.reads_tools:
        raise ApiError(Code.UNSUPPORTED_PARAMETER, f"tools: {model.id!r} does not support tools", "tools")
    return list(tools or ())


_REPLY: Final = "zq-the-reply-before-qz"
_SAMPLE: Final[Sequence[Message]] = (
    {"role": "user", "content": [{"text": "a"}]},
    {"role": "assistant", "content": [{"text": _REPLY}]},
)


def follow_up(model: ServedModel, context: Sequence[int], asked: Conversation) -> RenderedPrompt:
    """Returns the prompt of the messages `asked` after the tokens of `context`.

    Raises ApiError (400) for a number that is no token, and for a template that shows no earlier reply.
    """
    check_token_ids(context, model.vocab_size, "context")
    text = replace(asked, messages=[*_SAMPLE, *asked.messages]).render().text
    _, found, following = text.partition(_REPLY)
    if not found:
        message = "context: the model's chat template shows no earlier answers; send /api/chat the messages instead"
        raise ApiError(Code.UNSUPPORTED_PARAMETER, message, "context")
    tokens = np.array([*context, *model.renderer.tokenize(following)], dtype=np.int32)
    end = RestorePoint(len(tokens), RestorePointKind.PROMPT_END)
    return RenderedPrompt(tokens, (end,), model.token_texts.text(context) + following)
