"""A conversation in the terminal, and how it is saved. Pure.

Knows neither who answers nor how text reaches the terminal.
"""

import contextlib
import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from models.inference.sampling_params import NUMBERS, SamplingParams, check
from models.output.pieces import Reasoning, Text
from models.prompt.shapes import Message
from server.engine.request import Timings

AnswerPart: TypeAlias = Text | Reasoning | Timings
"""A part of an answer; its timings come last."""


class TextPart(TypedDict):
    """What a message says beside images."""

    type: Literal["text"]
    text: str


class ImagePart(TypedDict):
    """An image, as OpenAI's API has it."""

    type: Literal["image_url"]
    image_url: dict[Literal["url"], str]


MessageContent: TypeAlias = str | list[TextPart | ImagePart]
"""What a message says and shows."""


def describe_timings(timings: Timings) -> str:
    """Two lines, of prompt and answer."""
    prompt_tokens = timings.cache_tokens + timings.evaluated_tokens
    share = timings.cache_tokens / prompt_tokens if prompt_tokens else 0
    # The time runs from the first token to the last, so one token fewer was made in it.
    seconds = timings.predicted_ms / 1000
    speed = (
        f", {(timings.predicted_tokens - 1) / seconds:.1f} tokens/s" if seconds and timings.predicted_tokens else ""
    )
    return (
        f"prompt: {prompt_tokens} tokens, {timings.cache_tokens} cached ({share:.0%}), "
        f"{timings.evaluated_tokens} evaluated in {timings.prompt_ms:.0f} ms\n"
        f"answer: {timings.predicted_tokens} tokens{speed}"
    )


class ChatError(Exception):
    """What a person asked for failed; the message is one sentence."""


MAX_TOKENS, THINK = "max_tokens", "think"
SAMPLING = {name: kind for name, kind in NUMBERS.items() if not name.startswith("dry_")}
"""DRY needs breakers too."""
_KINDS: Mapping[str, type] = {**SAMPLING, MAX_TOKENS: int, THINK: bool}
_IN_WORDS = {float: "a number", int: "a whole number", bool: "on or off"}
_SWITCH = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}


def parse_parameter(name: str, text: str) -> Any:
    """Reads what a person typed; raises ChatError and InvalidParameter."""
    check_name(name)
    kind = _KINDS[name]
    try:
        value: Any = _SWITCH[text.lower()] if kind is bool else kind(text)
        if name in SAMPLING:
            check(replace(SamplingParams(), **{name: value}), vocab_size=1)
    except (ValueError, KeyError):
        raise ChatError(f"{name} is {_IN_WORDS[kind]}, not {text!r}") from None
    if name == MAX_TOKENS and value < 1:
        raise ChatError(f"max_tokens is a whole number above 0, not {value!r}")
    return value


def check_name(name: str) -> None:
    """Raises ChatError."""
    if name not in _KINDS:
        hint = nearest(name, _KINDS, f"there are {', '.join(_KINDS)}")
        raise ChatError(f"there is no parameter {name!r}; {hint}")


def nearest(name: str, names: Iterable[str], otherwise: str) -> str:
    """A question for the name that a person may have meant; `otherwise` where none is near."""
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}?" if near else otherwise


def describe(parameters: Mapping[str, Any]) -> str:
    """One line for each parameter."""
    lines = (f"{name} {_shown(value)}" for name, value in sorted(parameters.items()))
    return "\n".join(lines) or "Nothing is set: the model's own recommendations hold."


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def template_arguments(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters for the chat template."""
    return {"enable_thinking": parameters[THINK]} if THINK in parameters else {}


@dataclass
class Dialogue:
    """The messages so far, and how to answer."""

    system: str = ""
    turns: list[Message] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    number: int = 1
    """Number by which a server tells this conversation from earlier ones."""
    timings: Timings | None = None
    unanswered: MessageContent = ""
    """The last message, if it has no answer."""

    def prompt(self) -> list[Message]:
        """All messages, the system message first."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def start_anew(self) -> None:
        """Keeps the system message and the parameters."""
        self.turns.clear()
        self.timings, self.unanswered = None, ""
        self.number += 1

    def take_back(self) -> MessageContent:
        """The last message, to be asked again; empty if there is none. Forgets its answer."""
        roles = [turn["role"] for turn in self.turns[-2:]]
        last = -1 if roles[-1:] == ["user"] else -2
        if not self.unanswered and roles[last:][:1] == ["user"]:
            self.unanswered = self.turns[last]["content"]
            del self.turns[last:]
        return self.unanswered

    def dump(self, model: str) -> str:
        """A file's text."""
        about = {"format": "mlx-serve conversation 1", "model": model, "system": self.system}
        record = {**about, "parameters": self.parameters, "messages": self.turns}
        return json.dumps(record, indent=2, ensure_ascii=False) + "\n"

    def load(self, text: str) -> str:
        """Continues a saved conversation; returns its model. Raises as `parse_parameter`, changing nothing then."""
        if (record := read_record(text)) is None:
            raise ChatError("it is no conversation that /save wrote, or it is damaged")
        parameters = {name: parse_parameter(name, str(value)) for name, value in record["parameters"].items()}
        self.start_anew()
        self.system, self.parameters = record["system"], parameters
        self.turns.extend(record["messages"])
        return record["model"]


class _Turn(TypedDict):
    role: Literal["user", "assistant"]
    content: MessageContent


class _Saved(TypedDict):
    # Without it a file is never overwritten.
    format: Literal["mlx-serve conversation 1"]
    model: str
    system: str
    parameters: dict[str, Any]
    messages: list[_Turn]


def read_record(text: str) -> _Saved | None:
    """What `/save` wrote; None for anything else."""
    with contextlib.suppress(ValidationError):
        return TypeAdapter(_Saved).validate_json(text)
    return None
