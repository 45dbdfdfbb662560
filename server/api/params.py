"""The parameters of a request for text, in no dialect's names, and the engine's request that is made of them.

Runs off the event loop.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
from starlette.requests import Request

from cache.snapshots import RestorePoint, RestorePointKind
from models.errors import TokenizerFailed
from models.prompt.chat_template import RenderedPrompt
from server.api.answer import Question
from server.api.binding import AnswerGrammar, ForcedCalls, answer_grammar, bind
from server.api.conversation import Conversation, ShownAsBefore
from server.api.dialect import context_of, namespace_of
from server.api.errors import Code, ContextExceeded, wrong
from server.api.healing import healing_of
from server.api.sessions import resolve_line
from server.engine.request import LOOP_GUARD, GenerationOptions, GenerationRequest, TokenArray
from server.pool.served import ServedModel


@dataclass(frozen=True, eq=False)
class Incoming:
    """A request with a decoded, unchecked body."""

    http: Request
    fields: Mapping[str, Any]
    request_id: str

    def namespace(self, cache_salt: str | None = None) -> str:
        """The name under which its sender's requests share state."""
        return namespace_of(self.http, cache_salt)

    @property
    def healed(self) -> ShownAsBefore | None:
        healing = context_of(self.http).kept(healing_of)
        return None if healing is None else healing.healed


class Limit(NamedTuple):
    """The most tokens of an answer, and the field that says so."""

    tokens: int | None
    """None: as many as the server allows. 0 only evaluates the prompt."""
    param: str = "max_tokens"


NO_LIMIT = Limit(None)


@dataclass(frozen=True, eq=False, kw_only=True)
class GenerationParams(GenerationOptions):
    """All but the prompt; each field is valid by itself."""

    limit: Limit = NO_LIMIT
    max_thinking_tokens: int | None = None
    """None: no limit."""
    is_single_call: bool = False
    """The answer ends with its first tool call, if calls have markers."""
    grammar: AnswerGrammar | ForcedCalls | None = None
    """What the client wants the answer to be; `ask` adds what calls need."""
    prompt_param: str = "messages"


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises ApiError (400) for a number that is no token."""
    for index, token in enumerate(token_ids):
        if not 0 <= token < vocab_size:
            raise wrong(f"{param}[{index}]", f"{str(token)[:40]} is no token id from 0 to {vocab_size - 1}")


def text_prompt(prompt: str | list[int], model: ServedModel, place: str = "prompt") -> RenderedPrompt:
    """A plain prompt's tokens; raises ApiError for a number that is no token."""
    if isinstance(prompt, str):
        return model.renderer.encode(prompt)
    if len(prompt) >= model.context_tokens:
        raise ContextExceeded(len(prompt), model.context_tokens - 1, place)
    check_token_ids(prompt, model.vocab_size, place)
    end = RestorePoint(len(prompt), RestorePointKind.PROMPT_END)
    return RenderedPrompt(np.array(prompt, dtype=np.int32), (end,) if prompt else ())


def question_of(
    incoming: Incoming, model: ServedModel, prompt: RenderedPrompt, params: GenerationParams, namespace: str
) -> Question:
    """The valid request for a prompt's continuation; raises ApiError or InvalidParameter."""
    options = {option.name: getattr(params, option.name) for option in fields(GenerationOptions)}
    loops = params.loops or (LOOP_GUARD if context_of(incoming.http).config.loop_guard else None)
    options |= {"stop": params.stop or model.defaults.stop, "loops": loops if loops and loops.max_pattern else None}
    request = GenerationRequest(
        request_id=incoming.request_id,
        tokens=prompt.tokens,
        pictures=prompt.pictures,
        max_tokens=_fitting_max_tokens(len(prompt.tokens), params, model, incoming),
        **options,
        session_id=resolve_line(incoming.fields, incoming.http.headers),
        namespace=namespace,
        adapter=model.adapter,
        restore_points=prompt.restore_points,
        outline=prompt.outline,
        quotable=_quotable(prompt, params, model),
        thinking=model.thinking(prompt.text, params.max_thinking_tokens, prompt.begun) if prompt.text else None,
        grammar=bind(model, params.grammar, prompt) if isinstance(params.grammar, AnswerGrammar) else None,
    )
    return Question(model, request, prompt)


def _quotable(prompt: RenderedPrompt, params: GenerationParams, model: ServedModel) -> tuple[TokenArray, ...]:
    if params.is_volatile or not params.cache_prompt or not params.speculates:
        return ()
    with contextlib.suppress(TokenizerFailed):
        ids = [model.renderer.tokenize(text, parse_special=False) for text in prompt.quotable]
        return tuple(np.array(one, np.int32) for one in ids)
    return ()


MOST_TOKENS = 1_000_000
"""A limit above this and above the context is a mistake."""


def _fitting_max_tokens(num_prompt: int, params: GenerationParams, model: ServedModel, incoming: Incoming) -> int:
    """Raises ApiError for a prompt that leaves no space, or a limit far beyond the context."""
    (asked, param), most = params.limit, model.context_tokens
    if asked is not None and asked > max(MOST_TOKENS, most):
        why = f"is far beyond this model's context of {most} tokens; leave it out for as many as fit"
        raise wrong(param, f"{str(asked)[:40]} {why} (capability_rejected: max_tokens_context_overflow)")
    if num_prompt == 0:
        raise wrong(params.prompt_param, "the prompt is empty", Code.EMPTY_PROMPT)
    num_left = most - num_prompt
    if num_left < 1:
        raise ContextExceeded(num_prompt, most - 1, params.prompt_param)
    wanted = model.defaults.max_tokens if asked is None else asked
    if wanted is None:
        wanted = context_of(incoming.http).config.default_max_tokens or num_left
    return min(wanted, num_left)


def ask(incoming: Incoming, model: ServedModel, conversation: Conversation, params: GenerationParams) -> Question:
    """The request for a conversation's answer; raises ApiError, InvalidParameter and the renderer's errors."""
    prompt, tools, call_format = conversation.render(), conversation.callable_tools, model.call_format
    if params.grammar is not None or not params.ignore_eos:  # what only measures goes on after the end of turn
        binds = context_of(incoming.http).config.bind_calls
        params = replace(params, grammar=answer_grammar(model, conversation, params.grammar, binds))
    question = question_of(incoming, model, prompt, params, conversation.namespace)
    if params.is_single_call and tools and call_format is not None and call_format.call_end:
        question.request = replace(question.request, single_call=(call_format, tools))
    return replace(question, conversation=conversation)
