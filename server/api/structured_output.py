"""Makes what a request binds its answer to into a grammar, in no dialect's names. Runs off the event loop."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from models.errors import GrammarFailed, InvalidGrammar
from models.output.grammar import CompiledGrammar, Grammar, GrammarKind, OutputGrammar, close_objects
from models.output.tool_formats import HarmonyFormat
from models.prompt.chat_template import RenderedPrompt
from server.api.context import ServedModel
from server.api.errors import ApiError, Code

ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}


@dataclass(frozen=True)
class AnswerGrammar:
    """What a request binds its answer to, and the field that says so."""

    param: str
    grammar: Grammar
    begun: str = ""
    """The beginning of the answer, where the prompt holds it already."""
    forces_calls: bool = False


def json_grammar(schema: Mapping[str, Any] | bool, *, is_strict: bool = False) -> Grammar:
    """Returns the grammar of JSON of a schema. If it is not strict, keywords that are not known bind nothing."""
    kind = GrammarKind.JSON_SCHEMA if is_strict else GrammarKind.LENIENT_JSON_SCHEMA
    # `true` allows every value, and the empty schema says the same.
    return Grammar(kind, json.dumps({} if schema is True else close_objects(schema)))


def choice_grammar(texts: Sequence[str]) -> Grammar:
    """Returns the grammar of one of some texts."""
    return Grammar(GrammarKind.CHOICE, json.dumps(texts))


def bind(model: ServedModel, wanted: AnswerGrammar, prompt: RenderedPrompt) -> OutputGrammar:
    """Returns the compiled grammar of an answer to a prompt; raises ApiError (400)."""
    if model.grammars is None or isinstance(model.tool_syntax, HarmonyFormat):
        message = f"{wanted.param}: the answers of the model {model.id!r} cannot be bound to a grammar"
        raise ApiError(Code.UNSUPPORTED_PARAMETER, message, wanted.param)
    try:
        compiled = model.grammars.compile(wanted.grammar)
    except InvalidGrammar as error:
        raise ApiError(Code.INVALID_VALUE, f"{wanted.param}: {error}", wanted.param) from error
    if wanted.begun:
        _check_beginning(compiled, wanted)
    return OutputGrammar(compiled, _thought_start(model, prompt), wanted.begun, wanted.forces_calls)


def _check_beginning(compiled: CompiledGrammar, wanted: AnswerGrammar) -> None:
    matcher = compiled.begin()
    matcher.accept_text(wanted.begun)
    try:
        matcher.mask()
    except GrammarFailed as error:
        message = f"{wanted.param}: no answer that is allowed begins with the text that is to be continued"
        raise ApiError(Code.INVALID_VALUE, message, wanted.param) from error


def _thought_start(model: ServedModel, prompt: RenderedPrompt) -> int | None:
    """Returns the token with which the model may begin a thought; none behind a prompt without messages."""
    markers = model.reasoning_format
    if markers is None or not prompt.text or prompt.begun or model.opens_thoughts:
        return None
    if markers.is_opened_by(prompt.text) or markers.is_closed_by(prompt.text):
        return None
    return markers.start_id
