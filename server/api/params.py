"""Turns a body's wishes, in no dialect's names, into the engine's request and a grammar.

Grammars that force, forbid or restrict tool calls follow the model's own format. Fields of sampling that dialects
share are here too: all are optional, null means absent, a seed below 0 is none, `top_k` outside the vocabulary keeps
all tokens, and a nucleus of 0 is greedy. Runs off the event loop.
"""

import contextlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import numpy as np
from pydantic import AfterValidator, Field
from starlette.requests import Request

from models.errors import GrammarFailed, InvalidGrammar, TokenizerFailed
from models.inference.sampling_params import MAX_WINDOW, SamplingParams, check, settled
from models.output.call_formats import HARMONY, MISTRAL, CallFormat
from models.output.call_grammar import ANY_OBJECT as ANY_ARGUMENTS
from models.output.call_grammar import BoundTool, CallGrammar
from models.output.grammar import (
    JSON_KINDS,
    JSON_STYLE,
    CallOpener,
    Grammar,
    GrammarKind,
    OutputGrammar,
    close_objects,
    describes_members,
)
from models.prompt.chat_template import RenderedPrompt
from models.store.stored_model import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS, WITHOUT_EFFECT
from server.api.answer import Question
from server.api.bodies import BodyModel, Whole
from server.api.conversation import Conversation
from server.api.dialect import context_of, namespace_of
from server.api.errors import ApiError, Code, ContextExceeded, wrong
from server.api.healing import OwnCalls, own_calls_of
from server.api.sessions import resolve_line
from server.engine.request import LOOP_GUARD, GenerationOptions, GenerationRequest, TokenArray
from server.pool.served import ServedModel

if TYPE_CHECKING:
    from models.inference.grammar import GrammarCompiler

logger = logging.getLogger(__name__)

ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}


@dataclass(frozen=True)
class AnswerGrammar:
    """What binds an answer, and the body's field."""

    param: str
    grammar: Grammar
    begun: str = ""
    """The answer's beginning, if the prompt holds it."""
    forces_calls: bool = False
    opener: CallOpener | None = None
    """Set if each call is bound from there on, and nothing else."""


def json_grammar(schema: Mapping[str, Any] | bool, *, is_strict: bool = False) -> Grammar:
    """The grammar of a JSON schema; unless strict, unknown keywords bind nothing."""
    kind = GrammarKind.JSON_SCHEMA if is_strict else GrammarKind.LENIENT_JSON_SCHEMA
    # `true` allows every value, as the empty schema does.
    return Grammar(kind, json.dumps({} if schema is True else close_objects(schema)))


def choice_grammar(texts: Sequence[str]) -> Grammar:
    """A grammar that allows one of `texts`."""
    return Grammar(GrammarKind.CHOICE, json.dumps(texts))


def bind(model: ServedModel, wanted: AnswerGrammar, prompt: RenderedPrompt) -> OutputGrammar | None:
    """The compiled grammar; raises ApiError (400). None for calls that nothing forces and nothing can bind."""
    if wanted.opener is not None and model.grammars is not None:
        if not model.grammars.accepts("calls", wanted.grammar):
            return None
        return OutputGrammar(model.grammars.compile(wanted.grammar), begun=prompt.begun, opener=wanted.opener)
    if model.grammars is None or model.call_format is HARMONY:
        why = f"the answers of the model {model.id!r} cannot be bound to a grammar"
        raise wrong(wanted.param, why, Code.UNSUPPORTED_PARAMETER)
    try:
        compiled = model.grammars.compile(wanted.grammar)
    except InvalidGrammar as error:
        raise wrong(wanted.param, str(error)) from error
    if wanted.begun:
        matcher = compiled.begin()
        matcher.accept_text(wanted.begun)
        try:
            matcher.mask()
        except GrammarFailed as error:
            why = "no answer that is allowed begins with the text that is to be continued"
            raise wrong(wanted.param, why) from error
    return OutputGrammar(compiled, _reasoning_start(model, prompt), wanted.begun, wanted.forces_calls)


def _reasoning_start(model: ServedModel, prompt: RenderedPrompt) -> int | None:
    """None for a model without reasoning, and for plain prompts."""
    markers = model.reasoning_format
    if markers is None or not prompt.text or prompt.begun or model.opens_reasoning:
        return None
    is_closed = prompt.text.rstrip().endswith(markers.end)  # the answer has no reasoning then
    return None if is_closed or markers.is_opened_by(prompt.text) else markers.start_id


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
    def own_calls(self) -> OwnCalls | None:
        return context_of(self.http).kept(own_calls_of)


@dataclass(frozen=True, eq=False, kw_only=True)
class GenerationParams(GenerationOptions):
    """All but the prompt; each field is valid by itself."""

    max_tokens: int | None = None
    """None: as many as the server allows. 0 only evaluates the prompt."""
    max_thinking_tokens: int | None = None
    """None: no limit."""
    is_single_call: bool = False
    """The answer ends with its first tool call, if calls have markers."""
    forced: "ForcedCalls | None" = None
    grammar: AnswerGrammar | None = None
    """What the client wants the answer to be; `ask` adds what calls need."""
    prompt_param: str = "messages"


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises ApiError (400) for a number that is no token."""
    for index, token in enumerate(token_ids):
        if not 0 <= token < vocab_size:
            raise wrong(f"{param}[{index}]", f"{str(token)[:40]} is no token id from 0 to {vocab_size - 1}")


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
        max_tokens=_fitting_max_tokens(len(prompt.tokens), params, model, incoming),
        **options,
        session_id=resolve_line(incoming.fields, incoming.http.headers),
        namespace=namespace,
        adapter=model.adapter,
        restore_points=prompt.restore_points,
        outline=prompt.outline,
        quotable=_quotable(prompt, params, model),
        thinking=model.thinking(prompt.text, params.max_thinking_tokens, prompt.begun) if prompt.text else None,
        grammar=bind(model, params.grammar, prompt) if params.grammar is not None else None,
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
_NAMES_OF_LIMITS = ("max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens", "n_predict")


def _fitting_max_tokens(num_prompt: int, params: GenerationParams, model: ServedModel, incoming: Incoming) -> int:
    """Raises ApiError for a prompt that leaves no space, or a limit far beyond the context."""
    asked = params.max_tokens or 0
    if asked > max(MOST_TOKENS, model.context_tokens):
        named = (name for name in _NAMES_OF_LIMITS if incoming.fields.get(name) == asked)
        why = (
            f"is far beyond this model's context of {model.context_tokens} tokens; leave it out for as many as fit"
            " (capability_rejected: max_tokens_context_overflow)"
        )
        raise wrong(next(named, "options.num_predict"), f"{str(asked)[:40]} {why}")
    if num_prompt == 0:
        raise wrong(params.prompt_param, "the prompt is empty", Code.EMPTY_PROMPT)
    num_left = model.context_tokens - num_prompt
    if num_left < 1:
        raise ContextExceeded(num_prompt, model.context_tokens - 1, params.prompt_param)
    wanted = model.defaults.max_tokens if params.max_tokens is None else params.max_tokens
    if wanted is None:
        wanted = context_of(incoming.http).config.default_max_tokens or num_left
    return min(wanted, num_left)


_NO_ARGUMENTS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}
_BARE_CALLS: Final = (
    r'\{\s*("type"\s*:\s*"function"|"name"\s*:\s*"[^"]*"\s*,\s*"(parameters|arguments)")',
    r"\[\s*[A-Za-z_][A-Za-z0-9_.]*\s*\(",
)
"""How calls without markers begin an answer."""


@dataclass(frozen=True)
class ForcedCalls:
    """The calls that a request forces."""

    names: tuple[str, ...] | None = None
    """None for all."""
    is_single: bool = False


Functions: TypeAlias = Sequence[Mapping[str, Any]]


def forced_calls(model: ServedModel, functions: Functions, forced: ForcedCalls) -> AnswerGrammar:
    """The grammar of an answer that must call `functions`; raises ApiError (400)."""
    names, wanted = {function["name"] for function in functions}, forced.names and frozenset(forced.names)
    missing = [name for name in forced.names or () if name not in names]
    if not functions or missing:
        reason = f"there is no tool {missing[0]!r}" if missing else "there are no tools to be called"
        raise wrong("tool_choice", reason)
    allowed = [function for function in functions if wanted is None or function["name"] in wanted]
    rules = _calls(model, allowed, "tool_choice").forced(is_single=forced.is_single)
    return replace(_lark("tool_choice", "start: calls", *rules), forces_calls=True)


def ask(incoming: Incoming, model: ServedModel, conversation: Conversation, params: GenerationParams) -> Question:
    """The request for a conversation's answer; raises ApiError, InvalidParameter and the renderer's errors."""
    prompt, tools, call_format = conversation.render(), conversation.callable_tools, model.call_format
    binds = context_of(incoming.http).config.bind_calls
    params = replace(params, grammar=answer_grammar(model, conversation, params, binds))
    question = question_of(incoming, model, prompt, params, conversation.namespace)
    if params.is_single_call and tools and call_format is not None and call_format.call_end:
        question.request = replace(question.request, single_call=(call_format, tools))
    return replace(question, conversation=conversation)


def answer_grammar(
    model: ServedModel, conversation: Conversation, params: GenerationParams, binds: str = "strict"
) -> AnswerGrammar | None:
    """What binds an answer: forced calls; else what is wanted, or calls; else the rest. Raises ApiError (400)."""
    functions, wanted = [tool["function"] for tool in conversation.callable_tools], params.grammar
    if params.forced is not None:
        return forced_calls(model, functions, params.forced)
    if wanted is not None:
        return replace(answer_or_calls(model, functions, wanted) if functions else wanted, begun=conversation.begun)
    if params.ignore_eos:
        return None  # a request that only measures continues after the end of turn, where no grammar applies
    if conversation.forbids_calls:
        return _no_calls(model.call_format) if model.call_format is not None and can_forbid_calls(model) else None
    return bound_calls(model, functions, binds)


def shows_tools(model: ServedModel, tools: Sequence[Any] | None, *, forbids_calls: bool) -> bool:
    """Whether the prompt has tools; raises ApiError (400) for a model that takes none."""
    if not tools or (forbids_calls and not can_forbid_calls(model)):
        return False
    if not model.renderer.reads_tools:
        raise wrong("tools", f"{model.id!r} does not support tools", Code.UNSUPPORTED_PARAMETER)
    return True


def can_forbid_calls(model: ServedModel) -> bool:
    """Whether calls of shown tools can be forbidden; if not, the prompt omits the tools."""
    return model.call_format is not HARMONY and (model.call_format is None or model.grammars is not None)


def _no_calls(call_format: CallFormat) -> AnswerGrammar:
    excluded = [f"(?s:.*)({'|'.join(map(re.escape, call_format.openers))})(?s:.*)"]
    if call_format.is_bare:
        excluded += [rf"\s*{start}(?s:.*)" for start in _BARE_CALLS]
    terminal = " & ".join(["/(?s:.*)/", *(f"~/{pattern.replace('/', chr(92) + '/')}/" for pattern in excluded)])
    return _lark("tool_choice", "start: TEXT", f"TEXT: {terminal}")


def answer_or_calls(model: ServedModel, functions: Functions, wanted: AnswerGrammar) -> AnswerGrammar:
    """The grammar of calls or an answer as `wanted`; raises ApiError (400)."""
    if wanted.grammar.kind not in JSON_KINDS:
        why = "beside tools only JSON can be asked for; else set tool_choice to none"
        raise wrong(wanted.param, why, Code.UNSUPPORTED_PARAMETER)
    rules = _calls(model, functions, wanted.param).forced(is_single=False)
    is_lenient = wanted.grammar.kind is GrammarKind.LENIENT_JSON_SCHEMA
    answer = f"answer: %json {_schema(json.loads(wanted.grammar.text), is_lenient=is_lenient)}"
    return _lark(wanted.param, "start: answer | calls", answer, *rules)


def bound_calls(model: ServedModel, functions: Functions, binds: str) -> AnswerGrammar | None:
    """The grammar of each call in an answer, where calls are bound and can be.

    `binds` is `on`; `strict` for the arguments of strict functions, if there are any; or `off`.
    """
    form = model.call_format
    binds_all, any_strict = binds == "on", any(map(_is_strict, functions))
    if form is None or form is HARMONY or form.is_bare or not functions:
        return None
    if not (binds_all or (binds == "strict" and any_strict)):
        return None
    free = {"parameters": ANY_ARGUMENTS}
    bound = [function if binds_all or _is_strict(function) else {**function, **free} for function in functions]
    try:
        calls = _calls(model, bound, "tools")
    except ApiError:
        return None
    return replace(_lark("tools", *calls.lazy()), opener=_opener(model, form, *calls.opener()))


def _opener(model: ServedModel, form: CallFormat, text: str, letter: str) -> CallOpener:
    """One in quotes is of the text; one that is no token is followed by what begins a call."""
    token = None if model.grammars is None else model.grammars.token_of(text)
    spellings = "|".join(re.escape(one) for one in (text, *(alias for alias, _ in form.aliases)))
    behind = "()" if token is not None else rf"(\s*{re.escape(letter)}.*)"
    return CallOpener(re.compile(rf"(?<!['\"`])(?:{spellings}){behind}", re.DOTALL), token)


def _lark(param: str, *lines: str) -> AnswerGrammar:
    return AnswerGrammar(param, Grammar(GrammarKind.LARK, "\n".join(lines)))


def _calls(model: ServedModel, functions: Functions, param: str) -> CallGrammar:
    """The grammars of calls to functions; raises ApiError (400) for a model whose calls nothing binds."""
    form, grammars = model.call_format, model.grammars
    try:
        # Asked of all, so that a tokenizer that cannot be read is told here.
        if (
            form is not None
            and grammars is not None
            and (grammars.token_of("[ARGS]") is not None or form is not MISTRAL)
        ):
            return grammars.remember(_call_grammar, form, json.dumps(functions))
        why = f"no grammar binds the calls of the model {model.id!r}"
    except InvalidGrammar as error:
        why = str(error)
    raise wrong(param, why, Code.UNSUPPORTED_PARAMETER)


def _call_grammar(grammars: "GrammarCompiler", form: CallFormat, functions: str) -> CallGrammar:
    return CallGrammar(form, [_tool(grammars, function) for function in json.loads(functions)], grammars.spell)


def _tool(grammars: "GrammarCompiler", function: Mapping[str, Any]) -> BoundTool:
    """With its schema if that can be bound, else with any object."""
    schema, is_strict = close_objects(_parameters(function)), _is_strict(function)
    for strictly in (True, False) if is_strict else (False,):
        kind = GrammarKind.JSON_SCHEMA if strictly else GrammarKind.LENIENT_JSON_SCHEMA
        if grammars.accepts(f"the schema of the tool {function['name']!r}", Grammar(kind, json.dumps(schema))):
            return BoundTool(function["name"], schema, strictly)
    return BoundTool(function["name"], ANY_ARGUMENTS)


def _is_strict(function: Mapping[str, Any]) -> bool:
    return function.get("strict") is True


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a function's arguments; undescribed ones are none."""
    schema = {"type": "object", **(function.get("parameters") or _NO_ARGUMENTS)}
    return schema if describes_members(schema) else {**schema, **_NO_ARGUMENTS}


def _schema(schema: Mapping[str, Any], *, is_lenient: bool) -> str:
    return json.dumps({**close_objects(schema), "x-guidance": {**JSON_STYLE, "lenient": is_lenient}})


MAX_NAMED_OPTIONS = 500

_FEW = Field(max_length=MAX_STOP_STRINGS)
_WITHOUT_EMPTY = AfterValidator(lambda texts: [text for text in texts if text])
StopStrings = Annotated[list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]], _FEW]
_Limit = Annotated[Whole | None, AfterValidator(lambda number: number if number and number > 0 else None)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
PenaltyValue = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
RepetitionPenalty = Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)]
Window = Annotated[Whole, Field(ge=-1, le=MAX_WINDOW)]
CacheSalt = Annotated[str, Field(max_length=256)]
"""Only requests with the same salt share state."""

PLAIN_FIELDS = {field.name for field in fields(SamplingParams)} - {
    *("logit_bias", "allowed_token_ids", "bad_words", "dry_breakers", "min_tokens", "top_logprobs")
}
"""Fields that need no conversion."""


class SampledBody(BodyModel):
    """Fields of OpenAI's bodies and Ollama's options."""

    temperature: Temperature | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: PenaltyValue | None = None
    frequency_penalty: PenaltyValue | None = None
    repeat_last_n: Window | None = None
    """Tokens that the penalties look at; -1 is all, 0 none."""


class Options(SampledBody):
    """Ollama's `options`."""

    num_predict: _Limit = None
    """0 and below mean no limit."""
    top_k: Whole | None = None
    """0 and below keep all tokens."""
    typical_p: Share | None = None
    """0 and 1 keep all tokens."""
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**63)] | None = None
    """Below 0 means no seed."""
    stop: Annotated[list[Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]], _FEW, _WITHOUT_EMPTY] | None = None


IGNORED_OPTIONS = {"num_ctx", *WITHOUT_EFFECT}
"""Ollama's options that have no effect here."""


def options_sampling(options: Options | None, model: ServedModel) -> SamplingParams:
    """The model's defaults, changed by the options; logs unknown ones."""
    if options is None:
        return model.sampling
    unknown = sorted((options.model_extra or {}).keys() - IGNORED_OPTIONS)
    if unknown:
        logger.warning("options without meaning here: %s", repr(unknown)[:MAX_NAMED_OPTIONS])
    return changed_sampling(model.sampling, options, model.vocab_size, repetition_penalty=options.repeat_penalty)


def changed_sampling(defaults: SamplingParams, body: BodyModel, vocab_size: int, **others: Any) -> SamplingParams:
    """`defaults`, changed by a body and `others`; None changes nothing. Raises InvalidParameter."""
    wishes = {**{name: getattr(body, name) for name in PLAIN_FIELDS & type(body).model_fields.keys()}, **others}
    given = settled({name: value for name, value in wishes.items() if value is not None})
    if given.get("top_k", 0) >= vocab_size:
        given["top_k"] = 0
    if "top_n_sigma" in given:
        given["top_n_sigma"] = max(given["top_n_sigma"], 0.0)
    sampling = replace(defaults, **given)
    check(sampling, vocab_size)
    return sampling
