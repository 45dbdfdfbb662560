"""Grammars of answers that are tool calls, in the model's own format. For formats whose calls are JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from models.errors import InvalidGrammar
from models.output.grammar import JSON_STYLE, Grammar, GrammarKind
from models.output.json_schema import close_objects
from models.output.tool_format import ToolFormat
from server.api.context import ServedModel
from server.api.errors import ApiError, Code
from server.api.structured_output import AnswerGrammar

_NO_ARGUMENTS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}
_TAIL: Final = "}\n"
"""What stands between the arguments of a call and its end marker."""
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
    lines = [f"start: {_calls(is_single=forced.is_single)}", *_call_rules(model, syntax, allowed)]
    return AnswerGrammar("tool_choice", Grammar(GrammarKind.LARK, "\n".join(lines)))


def answer_or_calls(model: ServedModel, tools: Sequence[Mapping[str, Any]], wanted: AnswerGrammar) -> AnswerGrammar:
    """Returns what binds an answer that may be calls in place of what is `wanted`; raises ApiError (400)."""
    if wanted.grammar.kind not in _JSON_KINDS:
        message = f"{wanted.param}: beside tools only JSON can be asked for; else set tool_choice to none"
        raise ApiError(Code.UNSUPPORTED_PARAMETER, message, wanted.param)
    syntax = _json_format(model, wanted.param, "an answer cannot be bound beside tools with")
    is_lenient = wanted.grammar.kind is GrammarKind.LENIENT_JSON_SCHEMA
    answer = f"answer: %json {_schema(json.loads(wanted.grammar.text), is_lenient=is_lenient)}"
    functions = [tool["function"] for tool in tools]
    lines = [f"start: answer | {_calls(is_single=False)}", answer, *_call_rules(model, syntax, functions)]
    return AnswerGrammar(wanted.param, Grammar(GrammarKind.LARK, "\n".join(lines)))


def _json_format(model: ServedModel, param: str, what: str) -> ToolFormat:
    syntax = model.tool_syntax
    if isinstance(syntax, ToolFormat) and syntax.writes_json and model.grammars is not None:
        return syntax
    message = f"{param}: {what} the model {model.id!r}, whose calls are not written as JSON between markers"
    raise ApiError(Code.UNSUPPORTED_PARAMETER, message, param)


def _calls(*, is_single: bool) -> str:
    return "call" if is_single else r'call ("\n" call)*'


def _call_rules(model: ServedModel, syntax: ToolFormat, functions: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the rule `call`, and one for each function."""
    rules = [f"call: {' | '.join(f'call_{number}' for number in range(len(functions)))}"]
    start, end = _markers(model, syntax)
    for number, function in enumerate(functions):
        head = _literal(f'\n{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": ')
        schema = {"type": "object", **(function.get("parameters") or _NO_ARGUMENTS)}
        arguments = _schema(schema, is_lenient=function.get("strict") is not True)
        rules.append(f"call_{number}: {start} {head} %json {arguments} {_literal(_TAIL)} {end}")
    return rules


def _markers(model: ServedModel, syntax: ToolFormat) -> tuple[str, str]:
    """Returns how a grammar names what stands around a call."""
    assert model.grammars is not None
    try:
        return model.grammars.spell(syntax.start), model.grammars.spell(syntax.end)
    except InvalidGrammar as error:
        raise ApiError(Code.UNSUPPORTED_PARAMETER, f"tool_choice: {error}", "tool_choice") from error


def _schema(schema: Mapping[str, Any], *, is_lenient: bool) -> str:
    return json.dumps({**close_objects(schema), "x-guidance": {**JSON_STYLE, "lenient": is_lenient}})


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
