"""What Ollama's endpoints share.

`follow_up` continues the tokens that `/api/generate` returned as `context`. These tokens end with the model's reply,
without the template's text after it, so the next message is rendered after a sample reply.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final

import numpy as np
from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from cache.snapshots import RestorePoint, RestorePointKind
from models.inference.sampling_params import check
from models.output.tool_formats import HarmonyFormat
from models.prompt.chat_template import RenderedPrompt
from models.prompt.shapes import Message
from server.api.conversation import Conversation, ThinkingWish
from server.api.dialect import ApiContext, BodyModel, Dialect, Rules, honoured, no_effect, read_by, refused
from server.api.errors import ApiError, Code, wrong
from server.api.params import (
    ANY_OBJECT,
    AnswerGrammar,
    GenerationParams,
    Options,
    check_token_ids,
    json_grammar,
    options_sampling,
)
from server.api.wire import json_text
from server.pool.names import ModelUnknown, parse_keep_alive
from server.pool.served import ServedModel

logger = logging.getLogger(__name__)


class ErrorText(TypedDict):
    """An error's body, and the last line of a broken stream."""

    error: str


class OllamaDialect(Dialect):
    """Ollama's endpoints."""

    error_type = ErrorText
    own_paths = ("/api",)
    stream_media_type = "application/x-ndjson"
    takes_any_content_type = True  # Ollama's own examples use `curl -d` without a type.

    def wants_stream(self, fields: Mapping[str, Any]) -> bool:
        """Returns True unless `stream` is false."""
        return fields.get("stream") is not False

    def error_body(self, error: ApiError) -> ErrorText:
        """The error's text."""
        return {"error": error.message}

    def error_frame(self, error: ApiError) -> bytes:
        """A line with the error's text."""
        return line(self.error_body(error))

    def heartbeat(self, progress: str) -> bytes:
        """Nothing: clients read each line as an answer."""
        return b""


def line(payload: Mapping[str, Any]) -> bytes:
    """A line of a stream."""
    return json_text(payload).encode() + b"\n"


HIGHEST_EFFORT = "max"
EFFORTS = ("high", "medium", "low", HIGHEST_EFFORT)


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
        return None if value is None else parse_keep_alive(value)
    except ValueError as error:
        raise PydanticCustomError("keep_alive", "{reason}", {"reason": str(error)}) from error


KeepAlive = Annotated[float | None, BeforeValidator(_keep_alive)]
"""Seconds, infinite for "for ever", in any form that clients write; None if the request does not say."""


class OllamaBody(BodyModel):
    """Fields of a request for text."""

    model: str | None = None
    stream: bool | None = None
    """Streamed unless false."""
    format: Annotated[dict[str, Any] | None, BeforeValidator(_format)] = None
    """"json" allows any object."""
    think: Annotated[bool | str | None, BeforeValidator(_think)] = None
    options: Options | None = None
    keep_alive: KeepAlive = None


def find_model(context: ApiContext, name: str | None) -> ServedModel:
    """The named model; raises ApiError (400, 404) in words that clients look for."""
    if not name:
        raise ApiError(Code.MISSING_PARAMETER, "model is required", "model")
    try:
        return context.find_model(name)
    except ModelUnknown as error:
        raise ApiError(Code.MODEL_NOT_FOUND, f"model {name[:200]!r} not found: {error.instead}", "model") from error


def thinks(model: ServedModel) -> bool:
    """Whether reasoning is told apart."""
    return model.reasoning_format is not None or isinstance(model.tool_syntax, HarmonyFormat)


def template_arguments(body: OllamaBody, model: ServedModel) -> Mapping[str, Any]:
    """Raises ApiError (400) for a model without reasoning."""
    if body.think and not thinks(model):
        raise wrong("think", f"{model.id!r} does not support thinking", Code.UNSUPPORTED_PARAMETER)
    effort = body.think if isinstance(body.think, str) else None
    if effort == HIGHEST_EFFORT and isinstance(model.tool_syntax, HarmonyFormat):
        effort = EFFORTS[0]
    is_enabled = None if body.think is None else bool(body.think)
    return ThinkingWish(is_enabled, effort).template_arguments()


def read_params(body: OllamaBody, model: ServedModel) -> GenerationParams:
    """A checked body's parameters; raises ApiError or InvalidParameter."""
    options = body.options or Options()
    sampling = options_sampling(options, model)
    check(sampling, model.vocab_size)
    grammar = None if body.format is None else AnswerGrammar("format", json_grammar(body.format))
    return GenerationParams(sampling=sampling, max_tokens=options.limit, stop=options.stops, grammar=grammar)


def offered_tools(tools: Sequence[Mapping[str, Any]] | None, model: ServedModel) -> Sequence[Mapping[str, Any]]:
    """The tools unchanged; raises ApiError (400) if the template takes none."""
    if tools and not model.renderer.reads_tools:
        raise wrong("tools", f"{model.id!r} does not support tools", Code.UNSUPPORTED_PARAMETER)
    return list(tools or ())


_REPLY: Final = "zq-the-reply-before-qz"
_SAMPLE: Final[Sequence[Message]] = (
    {"role": "user", "content": [{"text": "a"}]},
    {"role": "assistant", "content": [{"text": _REPLY}]},
)


def follow_up(model: ServedModel, context: Sequence[int], asked: Conversation) -> RenderedPrompt:
    """The prompt of the messages `asked` behind the tokens `context`; raises ApiError (400)."""
    check_token_ids(context, model.vocab_size, "context")
    text = replace(asked, messages=[*_SAMPLE, *asked.messages]).render().text
    _, found, following = text.partition(_REPLY)
    if not found:
        message = "context: the model's chat template shows no earlier answers; send /api/chat the messages instead"
        raise ApiError(Code.UNSUPPORTED_PARAMETER, message, "context")
    tokens = np.array([*context, *model.renderer.tokenize(following)], dtype=np.int32)
    end = RestorePoint(len(tokens), RestorePointKind.PROMPT_END)
    return RenderedPrompt(tokens, (end,), model.token_texts.text(context) + following)


IN_BOTH: Rules = {
    **read_by(OllamaBody),
    **no_effect("a prompt that is too long is answered with an error, never cut", "truncate shift"),
    **no_effect("models here write text", "width height steps"),
    **refused("answers hold text, without data on single tokens", "logprobs=false top_logprobs=0"),
    **refused("a prompt is only shown with an answer to it", "_debug_render_only=false"),
}

_OF_VECTORS: Rules = {
    **honoured("model keep_alive"),
    **no_effect("options are about answers, and vectors are none", "options"),
}

IN_EMBED: Rules = {**_OF_VECTORS, **honoured("input truncate dimensions")}

IN_EMBEDDING: Rules = {**_OF_VECTORS, **honoured("prompt")}

IN_CHAT: Rules = {**IN_BOTH, **honoured("messages tools")}

IN_GENERATE: Rules = {
    **IN_BOTH,
    **honoured("prompt system raw context"),
    **refused("no model here takes images, only text", "images=[]"),
    **refused("no model here fills in what stands before a text", 'suffix=""'),
    **refused("prompts are made by the model's own template; send a whole prompt with raw", 'template=""'),
}

IN_MESSAGE: Rules = {
    **honoured("role content thinking tool_calls tool_name tool_call_id"),
    **refused("no model here takes images, only text", "images=[]"),
}
