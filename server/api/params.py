"""From what a body asks for, in no dialect's names, to the engine's request. Runs off the event loop."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from models.inference.sampling_params import SamplingParams
from models.output.tool_calls import CallMarkers, ToolFormat
from models.prompt.chat_template import RenderedPrompt
from server.api.context import ServedModel
from server.api.dialect import dialect_of
from server.api.errors import ApiError, Code, context_exceeded
from server.api.structured_output import AnswerGrammar, bind
from server.config import ServerConfig
from server.engine.request import GenerationRequest, Priority


@dataclass(frozen=True, eq=False)
class Incoming:
    """A request whose body has been decoded but not checked."""

    http: Request
    """Its headers and its dialect; the body has been read."""
    fields: Mapping[str, Any]
    """The body's JSON object."""
    request_id: str
    """As the answer will name the request."""


@dataclass(frozen=True)
class GenerationParams:
    """What a request asks for besides its prompt; each field is valid by itself."""

    sampling: SamplingParams
    max_tokens: int | None = None
    """None: as many as the server allows. 0 only evaluates the prompt."""
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    keeps_stop: bool = False
    """Whether the stop string or stop token that ends the answer is part of it."""
    cache_prompt: bool = True
    is_volatile: bool = False
    priority: Priority = Priority.INTERACTIVE
    ignore_eos: bool = False
    max_thinking_tokens: int | None = None
    """The thought is closed after so many tokens; None: when the model closes it."""
    is_single_call: bool = False
    """Whether the answer ends with its first tool call, where the model's calls stand between markers."""
    grammar: AnswerGrammar | None = None
    """What the answer is bound to."""


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises ApiError (400) for a number that is no token; `param` is the field that holds them."""
    for index, token in enumerate(token_ids):
        if not 0 <= token < vocab_size:
            place = f"{param}[{index}]"
            message = f"{place}: {str(token)[:40]} is no token id from 0 to {vocab_size - 1}"
            raise ApiError(Code.INVALID_VALUE, message, place)


def build_request(
    incoming: Incoming,
    params: GenerationParams,
    prompt: RenderedPrompt,
    *,
    prompt_param: str,
    namespace: str,
    model: ServedModel,
    config: ServerConfig,
) -> GenerationRequest:
    """Returns a request whose every field is valid; raises ApiError or SessionIdError.

    `prompt_param` is the field that the prompt came from, for errors.
    """
    return GenerationRequest(
        request_id=incoming.request_id,
        tokens=prompt.tokens,
        max_tokens=_fitting_max_tokens(len(prompt.tokens), params.max_tokens, prompt_param, model, config),
        sampling=params.sampling,
        stop=params.stop or model.defaults.stop,
        stop_token_ids=params.stop_token_ids,
        keeps_stop=params.keeps_stop,
        session_id=dialect_of(incoming.http).session_id(incoming.fields, incoming.http.headers),
        namespace=namespace,
        adapter=model.adapter,
        cache_prompt=params.cache_prompt,
        is_volatile=params.is_volatile,
        priority=params.priority,
        restore_points=prompt.restore_points,
        outline=prompt.outline,
        ignore_eos=params.ignore_eos,
        thinking=model.thinking(prompt.text, params.max_thinking_tokens, prompt.begun) if prompt.text else None,
        single_call=_call_markers(model) if params.is_single_call else None,
        grammar=bind(model, params.grammar, prompt) if params.grammar is not None else None,
    )


def _call_markers(model: ServedModel) -> CallMarkers | None:
    syntax = model.tool_syntax
    if not isinstance(syntax, ToolFormat) or not syntax.start or not syntax.end:
        return None
    return CallMarkers(syntax.start, syntax.end)


def _fitting_max_tokens(
    num_prompt: int, requested: int | None, prompt_param: str, model: ServedModel, config: ServerConfig
) -> int:
    """Returns how many tokens are generated at most; raises ApiError for a prompt that leaves space for none."""
    if num_prompt == 0:
        raise ApiError(Code.EMPTY_PROMPT, f"{prompt_param}: the prompt is empty", prompt_param)
    requested = model.defaults.max_tokens if requested is None else requested
    num_left = model.context_tokens - num_prompt
    if num_left < 1:
        raise context_exceeded(num_prompt, model.context_tokens - 1, prompt_param)
    wanted = requested if requested is not None else config.default_max_tokens or num_left
    return min(wanted, num_left)
