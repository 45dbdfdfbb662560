"""What binds an answer: a format that a body's fields ask for, and calls that it forces, forbids or restricts.

Grammars of calls follow the model's own format.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from models.errors import GrammarFailed, InvalidGrammar
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
from models.texts import read_object
from server.api.bodies import BodyModel, FormatBody
from server.api.conversation import Conversation
from server.api.errors import ApiError, Code, wrong
from server.pool.served import ServedModel

if TYPE_CHECKING:
    from models.inference.grammar import GrammarCompiler

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
            why = "the text to be continued begins no answer that is allowed"
            raise wrong(wanted.param, why) from error
    return OutputGrammar(compiled, _reasoning_start(model, prompt), wanted.begun, wanted.forces_calls)


def _reasoning_start(model: ServedModel, prompt: RenderedPrompt) -> int | None:
    """None for a model without reasoning, and for plain prompts."""
    markers = model.reasoning_format
    if markers is None or not prompt.text or prompt.begun or model.opens_reasoning:
        return None
    is_closed = prompt.text.rstrip().endswith(markers.end)  # the answer has no reasoning then
    return None if is_closed or markers.is_opened_by(prompt.text) else markers.start_id


def _read_schema(value: Any) -> Any:
    """Takes JSON text too, and an empty text for none."""
    if value in (None, ""):
        return None
    schema = read_object(value) if isinstance(value, str) else value
    if isinstance(schema, dict):
        return schema
    raise PydanticCustomError("schema_type", "Input should be a JSON schema, an object")


Schema = Annotated[dict[str, Any] | None, BeforeValidator(_read_schema)]
_Json = Annotated[Schema, AfterValidator(lambda schema: None if schema is None else json_grammar(schema))]
Format = Annotated[_Json, BeforeValidator(lambda value: dict(ANY_OBJECT) if value == "json" else value)]
_AnyObject = Annotated[bool | None, AfterValidator(lambda on: json_grammar(ANY_OBJECT) if on else None)]
_Regex = Annotated[str | None, AfterValidator(lambda text: Grammar(GrammarKind.REGEX, text) if text else None)]
_Gbnf = Annotated[str | None, AfterValidator(lambda text: Grammar(GrammarKind.GBNF_OR_LARK, text) if text else None)]
_Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1), AfterValidator(choice_grammar)]


def format_grammar(param: str, kind: str, schema: Any, strict: bool | None = None) -> AnswerGrammar | None:
    """The grammar of the format `param`, whose type is `kind`."""
    if kind == "text":
        return None
    if kind == "json_object":
        return AnswerGrammar(param, json_grammar(schema or ANY_OBJECT))
    return AnswerGrammar(f"{param}.schema", json_grammar(schema or {}, is_strict=strict is True))


class ResponseFormat(FormatBody):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: Annotated[Schema, Field(alias="schema")] = None
    """With `json_object` too, as in llama.cpp."""
    strict: bool | None = None
    """True: an unknown keyword is an error; else it binds nothing."""

    def answer_grammar(self) -> AnswerGrammar | None:
        """The grammar; raises ApiError without the schema that the type needs."""
        if self.type != "json_schema":
            return format_grammar("response_format", self.type, self.schema_)
        if self.schema_ is None:
            raise wrong("response_format.json_schema", "Field required with this type", Code.MISSING_PARAMETER)
        return format_grammar("response_format.json_schema", self.type, self.schema_, self.strict)


class StructuredOutputs(BodyModel):
    """`structured_outputs`, as vLLM has it."""

    json_: Annotated[_Json, Field(alias="json")] = None
    regex: _Regex = None
    choice: _Choices | None = None
    grammar: _Gbnf = None
    json_object: _AnyObject = None
    structural_tag: None = None


class BoundBody(BodyModel):
    """The fields that bind an answer, of which at most one may be given."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: _Json = None
    guided_json: _Json = None
    format: Format = None
    guided_regex: _Regex = None
    regex: _Regex = None
    guided_choice: _Choices | None = None
    guided_grammar: _Gbnf = None
    grammar: _Gbnf = None
    ebnf: _Gbnf = None

    def answer_grammar(self) -> AnswerGrammar | None:
        """The answer's grammar; raises ApiError if several fields bind it."""
        fields = [*(("structured_outputs", value) for _, value in self.structured_outputs or ()), *self]
        made = [AnswerGrammar(name, value) for name, value in fields if isinstance(value, Grammar)]
        formatted = self.response_format and self.response_format.answer_grammar()
        wanted = [formatted, *made] if formatted else made
        if len(wanted) > 1:
            first, second = wanted[0].param, wanted[1].param
            raise wrong(second, f"an answer is bound by one field only, and {first} is given too")
        return wanted[0] if wanted else None


class NamedTool(BodyModel):
    """What all tools have that the client names."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None


class FunctionSpec(NamedTool):
    """A tool as the model is shown it."""

    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Whether unforced calls follow the schema, too."""


class CallingBody(BodyModel):
    """Which calls are wanted, and how many."""

    tool_choice: Any = None
    """As `tool_choice_reader` returns it."""
    parallel_tool_calls: bool | None = None

    @property
    def forbids_calls(self) -> bool:
        return bool(self.tool_choice == "none")

    def calls(self) -> dict[str, Any]:
        """The parameters of calls."""
        is_single, forced = self.parallel_tool_calls is False, self.tool_choice
        if isinstance(forced, ForcedCalls):
            return {"grammar": replace(forced, is_single=forced.is_single or is_single), "is_single_call": is_single}
        return {"is_single_call": is_single}


def tool_choice_reader(*kinds: str | None) -> BeforeValidator:
    """Reads a mode; or a tool of `kinds`, or several of `allowed_tools`, as calls that are forced.

    A name may stand beside the type or in a field of its own, as the two APIs have it.
    """

    def inner(value: Any, field: str) -> dict[str, Any]:
        choice = value.get(field, value) if isinstance(value, dict) else value
        return choice if isinstance(choice, dict) else {}

    def read(value: Any) -> Any:
        if value in (None, "auto", "none"):
            return value
        if value in ("required", "any"):
            return ForcedCalls()
        kind = value.get("type") if isinstance(value, dict) else None
        tools: Any = [value] if kind in kinds else None
        if kind == "allowed_tools" and inner(value, kind).get("mode") == "required":
            tools = inner(value, kind).get("tools")
        names: list[Any] = [inner(tool, "function").get("name") for tool in tools] if isinstance(tools, list) else []
        if names and all(isinstance(name, str) for name in names):
            return ForcedCalls(tuple(names), is_single=kind in kinds)
        why = 'Input should be "auto", "required", "none", a named tool, or allowed_tools with the mode "required"'
        raise PydanticCustomError("tool_choice", why)

    return BeforeValidator(read)


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


def answer_grammar(
    model: ServedModel, conversation: Conversation, wanted: AnswerGrammar | ForcedCalls | None, binds: str = "strict"
) -> AnswerGrammar | None:
    """What binds an answer: what is wanted, or calls; else what forbids or binds calls. Raises ApiError (400)."""
    functions = [tool["function"] for tool in conversation.callable_tools]
    if isinstance(wanted, ForcedCalls):
        return forced_calls(model, functions, wanted)
    if wanted is not None:
        return replace(_answer_or_calls(model, functions, wanted) if functions else wanted, begun=conversation.begun)
    return _no_calls(model) if conversation.forbids_calls else bound_calls(model, functions, binds)


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


def shows_tools(model: ServedModel, tools: Sequence[Any] | None, *, forbids_calls: bool) -> bool:
    """Whether the prompt has tools; raises ApiError (400) for a model that takes none."""
    if not tools or (forbids_calls and not model.can_forbid_calls):
        return False
    if not model.renderer.reads_tools:
        raise wrong("tools", f"{model.id!r} does not support tools", Code.UNSUPPORTED_PARAMETER)
    return True


def _no_calls(model: ServedModel) -> AnswerGrammar | None:
    """The grammar of an answer without calls; None for a model that cannot be bound to one."""
    call_format = model.call_format
    if call_format is None or not model.can_forbid_calls:
        return None
    excluded = [f"(?s:.*)({'|'.join(map(re.escape, call_format.openers))})(?s:.*)"]
    if call_format.is_bare:
        excluded += [rf"\s*{start}(?s:.*)" for start in _BARE_CALLS]
    terminal = " & ".join(["/(?s:.*)/", *(f"~/{pattern.replace('/', chr(92) + '/')}/" for pattern in excluded)])
    return _lark("tool_choice", "start: TEXT", f"TEXT: {terminal}")


def _answer_or_calls(model: ServedModel, functions: Functions, wanted: AnswerGrammar) -> AnswerGrammar:
    if wanted.grammar.kind not in JSON_KINDS:
        why = "beside tools only JSON can be asked for; else set tool_choice to none"
        raise wrong(wanted.param, why, Code.UNSUPPORTED_PARAMETER)
    rules = _calls(model, functions, wanted.param).forced(is_single=False)
    is_lenient = wanted.grammar.kind is GrammarKind.LENIENT_JSON_SCHEMA
    guidance = {**JSON_STYLE, "lenient": is_lenient}
    schema = json.dumps({**close_objects(json.loads(wanted.grammar.text)), "x-guidance": guidance})
    return _lark(wanted.param, "start: answer | calls", f"answer: %json {schema}", *rules)


def bound_calls(model: ServedModel, functions: Functions, binds: str) -> AnswerGrammar | None:
    """The grammar of each call in an answer, where calls are bound and can be.

    `binds` is `on`; `strict` for the arguments of strict functions, if there are any; or `off`.
    """
    form = model.call_format
    binds_all, any_strict = binds == "on", any(map(_is_strict, functions))
    is_asked = binds_all or (binds == "strict" and any_strict)
    if not is_asked or not functions or form is None or form.is_bare:
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
    after = "()" if token is not None else rf"(\s*{re.escape(letter)}.*)"
    return CallOpener(re.compile(rf"(?<!['\"`])(?:{spellings}){after}", re.DOTALL), token)


def _lark(param: str, *lines: str) -> AnswerGrammar:
    return AnswerGrammar(param, Grammar(GrammarKind.LARK, "\n".join(lines)))


def _calls(model: ServedModel, functions: Functions, param: str) -> CallGrammar:
    """The grammars of calls to functions; raises ApiError (400) for a model whose calls nothing binds."""
    form, grammars = model.call_format, model.grammars
    try:
        # Asked of all, so that a tokenizer that cannot be read is told here.
        arguments_token = None if form is None or grammars is None else grammars.token_of("[ARGS]")
        if form is not None and grammars is not None and (arguments_token is not None or form is not MISTRAL):
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
