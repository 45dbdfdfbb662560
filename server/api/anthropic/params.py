"""What a body of the Messages API asks for besides its prompt, in the engine's terms."""

from dataclasses import replace
from typing import Any

from models.inference.sampling_params import SamplingParams, check
from server.api.anthropic.body_types import MessagesBody
from server.api.context import ApiContext, ServedModel
from server.api.conversation import Conversation
from server.api.errors import ApiError, Code
from server.api.params import GenerationParams
from server.api.structured_output import AnswerGrammar, json_grammar
from server.api.tool_grammar import ForcedCalls, answer_or_calls, calls_in_text, forced_calls

_OWN_NAMES = "claude-"
"""What the names of Anthropic's own models begin with."""


def find_model(context: ApiContext, name: str | None) -> ServedModel:
    """Returns the model that a body names; raises ApiError (404, 400).

    Clients name Anthropic's models without being told to, so these names stand for the model of requests that name
    none, unless one is called so or an alias says otherwise.
    """
    try:
        return context.find_model(name)
    except ApiError:
        if name is None or not name.startswith(_OWN_NAMES):
            raise
        return context.find_model(None)


def read_params(body: MessagesBody, conversation: Conversation, model: ServedModel) -> GenerationParams:
    """Returns what a checked body, whose prompt is `conversation`, asks for of `model`.

    Raises ApiError or InvalidParameter.
    """
    sampling = _sampling(body, model)
    check(sampling, model.vocab_size)
    return GenerationParams(
        sampling,
        body.max_tokens,
        stop=tuple(body.stop_sequences or ()),
        max_thinking_tokens=body.thinking_wish().max_tokens,
        is_single_call=bool(conversation.callable_tools)
        and body.tool_choice is not None
        and body.tool_choice.is_single,
        grammar=_grammar(body, conversation, model),
    )


def _sampling(body: MessagesBody, model: ServedModel) -> SamplingParams:
    """Returns the model's sampling defaults with what the request says about them."""
    names = ("temperature", "top_p", "top_k")
    given: dict[str, Any] = {name: getattr(body, name) for name in names if getattr(body, name) is not None}
    if given.get("top_k", 0) >= model.vocab_size:
        given["top_k"] = 0
    if given.get("top_p") == 0:
        # No mass at all is the likeliest token alone.
        given |= {"top_p": 1.0, "top_k": 1}
    return replace(model.sampling, **given)


def _grammar(body: MessagesBody, conversation: Conversation, model: ServedModel) -> AnswerGrammar | None:
    """Returns what binds the answer: the calls that are forced, or the schema of its text."""
    choice, tools = body.tool_choice, conversation.callable_tools
    if choice is not None and choice.type in ("any", "tool"):
        name = choice.name if choice.type == "tool" else None
        return forced_calls(model, tools, ForcedCalls(None if name is None else (name,), choice.is_single))
    wanted = _output_format(body)
    if wanted is None:
        return calls_in_text(model, conversation)
    return replace(answer_or_calls(model, tools, wanted) if tools else wanted, begun=conversation.begun)


def _output_format(body: MessagesBody) -> AnswerGrammar | None:
    newer = body.output_config.format if body.output_config is not None else None
    if newer is not None and body.output_format is not None:
        message = "output_format: it is another name of output_config.format, which is given too"
        raise ApiError(Code.INVALID_VALUE, message, "output_format")
    if newer is not None:
        return AnswerGrammar("output_config.format.schema", json_grammar(newer.schema_))
    if body.output_format is not None:
        return AnswerGrammar("output_format.schema", json_grammar(body.output_format.schema_))
    return None
