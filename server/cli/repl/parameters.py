"""What a person may set of how a model answers: `/set temperature 0.2`. Pure."""

import difflib
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from models.errors import InvalidParameter
from models.inference.sampling_params import SamplingParams, check

_FOR_PROGRAMS = ("logit_bias", "allowed_token_ids", "bad_words", "top_logprobs", "dry_")
"""Beginnings of the names that are no numbers, or of use only beside such ones."""
SAMPLING = tuple(field.name for field in fields(SamplingParams) if not field.name.startswith(_FOR_PROGRAMS))
MAX_TOKENS, THINK = "max_tokens", "think"
NAMES = (*SAMPLING, MAX_TOKENS, THINK)

_WHOLE = ("top_k", "seed", "repeat_last_n", MAX_TOKENS)
_SWITCH = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}


class ParameterError(ValueError):
    """There is no such parameter, or it cannot be so; the message is one sentence."""


def parse_parameter(name: str, text: str) -> Any:
    """Returns the value that a person typed; raises ParameterError."""
    check_name(name)
    if name == THINK:
        if text.lower() not in _SWITCH:
            raise ParameterError(f"think is on or off, not {text!r}")
        return _SWITCH[text.lower()]
    try:
        value = int(text) if name in _WHOLE else float(text)
    except ValueError:
        raise ParameterError(f"{name} is a {'whole ' if name in _WHOLE else ''}number, not {text!r}") from None
    check_value(name, value)
    return value


def check_value(name: str, value: Any) -> None:
    """Raises ParameterError for a value that is out of range, or of another kind."""
    check_name(name)
    if name == THINK and not isinstance(value, bool):
        raise ParameterError(f"think is true or false, not {value!r}")
    if name == MAX_TOKENS and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ParameterError(f"max_tokens is a whole number above 0, not {value!r}")
    if name in SAMPLING:
        try:
            check(replace(SamplingParams(), **{name: value}), vocab_size=1)
        except InvalidParameter as error:
            raise ParameterError(str(error)) from error


def check_name(name: str) -> None:
    """Raises ParameterError for a name that no parameter has."""
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(NAMES)}"
        raise ParameterError(f"there is no parameter {name!r}; {hint}")


def describe(parameters: Mapping[str, Any]) -> str:
    """Returns one line for each parameter that was set."""
    if not parameters:
        return "Nothing is set: the model's own recommendations hold."
    return "\n".join(f"{name} {_text(value)}" for name, value in sorted(parameters.items()))


def body_fields(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a chat completion that say the same."""
    fields_said = {name: value for name, value in parameters.items() if name != THINK}
    return fields_said | template_fields(parameters)


def template_fields(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a chat template is told besides the messages, as the field of a body; empty if nothing."""
    return {"chat_template_kwargs": {"enable_thinking": parameters[THINK]}} if THINK in parameters else {}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
