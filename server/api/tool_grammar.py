"""Grammars of answers that are or hold tool calls, in the model's own format. For formats whose calls are JSON."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from models.errors import InvalidGrammar
from models.output.grammar import JSON_STYLE, Grammar, GrammarKind, close_objects, describes_members
from models.output.tool_calls import ToolFormat
from models.output.tool_formats import BareFormat, HarmonyFormat
from server.api.context import ServedModel
from server.api.conversation import Conversation
from server.api.errors import ApiError, Code
from server.api.structured_output import AnswerGrammar

_NO_ARGUMENTS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_ARGUMENTS: Final[Mapping[str, Any]] = {"type": "object", "additionalProperties": True}
_TEXT: Final = "TEXT: /(?s:.*)/"
_TAIL: Final = "}\n"
"""What stands between the arguments of a call and its end marker."""
_CALL: Final = "call: {} body"
_JSON_KINDS: Final = (GrammarKind.JSON_SCHEMA, GrammarKind.LENIENT_JSON_SCHEMA)


@dataclass(frozen=True)
class ForcedCalls:
    """What calls a request forces."""

    names: tuple[str, ...] | None = None
    """The tools that may be called; None for all."""
    is_single: bool = False
    """Whether there may be one call only."""


def forced_calls(model: ServedModel, tools: Sequence[Mapping[str, Any]], forced: ForcedCalls) -> AnswerGrammar:
    """Returns what binds an answer to calls of `tools`; raises ApiError (400)."""
    names = [tool["function"]["name"] for tool in tools]
    missing = [name for name in forced.names or () if name not in names]
    if not tools or missing:
        reason = f"there is no tool {missing[0]!r}" if missing else "there are no tools to be called"
        raise ApiError(Code.INVALID_VALUE, f"tool_choice: {reason}", "tool_choice")
    syntax = _json_format(model, "tool_choice", "calls cannot be forced with")
    allowed = [tool["function"] for tool in tools if forced.names is None or tool["function"]["name"] in forced.names]
    markers = _markers(model, syntax)
    lines = [f"start: {_calls(is_single=forced.is_single)}", _CALL.format(markers[0]), *_call_rules(markers, allowed)]
    return AnswerGrammar("tool_choice", Grammar(GrammarKind.LARK, "\n".join(lines)), forces_calls=True)


def calls_in_text(model: ServedModel, conversation: Conversation) -> AnswerGrammar | None:
    """Returns what binds the calls within an answer of text: that there are none, or the schemas of strict tools."""
    if not conversation.forbids_calls:
        return strict_calls(model, conversation.callable_tools)
    return _no_calls(model.tool_syntax) if model.tool_syntax is not None and can_forbid_calls(model) else None


def can_forbid_calls(model: ServedModel) -> bool:
    """Whether tools may be shown that are not to be called; else they are left out of the prompt."""
    if isinstance(model.tool_syntax, HarmonyFormat):
        return False
    return model.tool_syntax is None or model.grammars is not None


def _no_calls(syntax: ToolFormat | BareFormat | HarmonyFormat) -> AnswerGrammar:
    """Returns the grammar of text without the beginning of a call. Markers that are special tokens are no text."""
    start = (syntax.start,) if isinstance(syntax, ToolFormat) else ()
    markers = "|".join(re.escape(marker) for marker in (*start, *syntax.frames))
    excluded = [f"(?s:.*)({markers})(?s:.*)"] if markers else []
    if isinstance(syntax, BareFormat):
        excluded.append(rf"\s*{syntax.call_start}(?s:.*)")
    terminal = " & ".join(["/(?s:.*)/", *(f"~/{pattern.replace('/', chr(92) + '/')}/" for pattern in excluded)])
    return AnswerGrammar("tool_choice", Grammar(GrammarKind.LARK, f"start: TEXT\nTEXT: {terminal}"))


def answer_or_calls(model: ServedModel, tools: Sequence[Mapping[str, Any]], wanted: AnswerGrammar) -> AnswerGrammar:
    """Returns what binds an answer that may be calls in place of what is `wanted`; raises ApiError (400)."""
    if wanted.grammar.kind not in _JSON_KINDS:
        message = f"{wanted.param}: beside tools only JSON can be asked for; else set tool_choice to none"
        raise ApiError(Code.UNSUPPORTED_PARAMETER, message, wanted.param)
    syntax = _json_format(model, wanted.param, "an answer cannot be bound beside tools with")
    is_lenient = wanted.grammar.kind is GrammarKind.LENIENT_JSON_SCHEMA
    answer = f"answer: %json {_schema(json.loads(wanted.grammar.text), is_lenient=is_lenient)}"
    functions = [tool["function"] for tool in tools]
    markers = _markers(model, syntax)
    call = _CALL.format(markers[0])
    lines = [f"start: answer | {_calls(is_single=False)}", answer, call, *_call_rules(markers, functions)]
    return AnswerGrammar(wanted.param, Grammar(GrammarKind.LARK, "\n".join(lines)))


def strict_calls(model: ServedModel, tools: Sequence[Mapping[str, Any]]) -> AnswerGrammar | None:
    """Returns what binds the calls of an answer in which text may stand too, to the schemas of strict tools.

    None without a strict tool, and where the model's calls cannot be bound.
    """
    functions, syntax = [tool["function"] for tool in tools], _bindable_format(model)
    if syntax is None or not any(map(_is_strict, functions)):
        return None
    try:
        start, end = _spelled(model, syntax)
    except InvalidGrammar:
        return None
    free = {"parameters": _ANY_ARGUMENTS}
    bound = [function if _is_strict(function) else {**function, **free} for function in functions]
    # A token ends a text by itself; a marker of several ends it as soon as it is complete.
    is_token = start.startswith("<[")
    lead = [f"call: TEXT {start} body"] if is_token else ["call: lead body", f"lead[lazy]: TEXT {start}"]
    lines = ["start: call* rest", "rest: TEXT", _TEXT, *lead, *_call_rules((start, end), bound)]
    return AnswerGrammar("tools", Grammar(GrammarKind.LARK, "\n".join(lines)))


def _json_format(model: ServedModel, param: str, what: str) -> ToolFormat:
    syntax = _bindable_format(model)
    if syntax is not None:
        return syntax
    message = f"{param}: {what} the model {model.id!r}, whose calls are not written as JSON between markers"
    raise ApiError(Code.UNSUPPORTED_PARAMETER, message, param)


def _bindable_format(model: ServedModel) -> ToolFormat | None:
    """Returns how the model writes calls, where these can be bound."""
    syntax = model.tool_syntax
    if isinstance(syntax, ToolFormat) and syntax.writes_json and model.grammars is not None:
        return syntax
    return None


def _is_strict(function: Mapping[str, Any]) -> bool:
    return function.get("strict") is True


def _calls(*, is_single: bool) -> str:
    return "call" if is_single else r'call ("\n" call)*'


def _call_rules(markers: tuple[str, str], functions: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the rule `body`, what follows the start marker of a call, and one for each function."""
    rules = [f"body: {' | '.join(f'call_{number}' for number in range(len(functions)))}"]
    for number, function in enumerate(functions):
        head = _literal(f'\n{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": ')
        arguments = _schema(_parameters(function), is_lenient=not _is_strict(function))
        rules.append(f"call_{number}: {head} %json {arguments} {_literal(_TAIL)} {markers[1]}")
    return rules


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the schema of a tool's arguments. One that describes none means that there are none.

    An object among the arguments is another matter: without properties, it can only be meant to hold anything.
    """
    schema = {"type": "object", **(function.get("parameters") or _NO_ARGUMENTS)}
    return schema if describes_members(schema) else {**schema, **_NO_ARGUMENTS}


def _markers(model: ServedModel, syntax: ToolFormat) -> tuple[str, str]:
    """Returns how a grammar names what stands around a call; raises ApiError (400)."""
    try:
        return _spelled(model, syntax)
    except InvalidGrammar as error:
        raise ApiError(Code.UNSUPPORTED_PARAMETER, f"tool_choice: {error}", "tool_choice") from error


def _spelled(model: ServedModel, syntax: ToolFormat) -> tuple[str, str]:
    assert model.grammars is not None
    return model.grammars.spell(syntax.start), model.grammars.spell(syntax.end)


def _schema(schema: Mapping[str, Any], *, is_lenient: bool) -> str:
    return json.dumps({**close_objects(schema), "x-guidance": {**JSON_STYLE, "lenient": is_lenient}})


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
