"""Reads and writes Ollama's Modelfile, and maps its names of parameters. Pure.

One instruction a line, in any case: `FROM`, `PARAMETER`, `SYSTEM`, `MESSAGE`, `LICENSE`. Three quotes allow several
lines; `#` begins a comment.
"""

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from models.errors import InvalidParameter, ModelfileError
from models.inference.sampling_params import settled
from models.store.stored_model import SAMPLING_DEFAULTS, WITHOUT_EFFECT, ExampleMessage, ModelDefaults, StoredModel
from models.texts import read_object

_SAMPLING = {
    "repeat_penalty" if name == "repetition_penalty" else name: (name, kind)
    for name, kind in SAMPLING_DEFAULTS.items()
}
"""Ollama's names, and those of `SamplingParams` with their kind."""
_LIMITS = {"num_ctx": "context_tokens", "num_predict": "max_tokens"}
_STOP, _TEMPLATE_ARGUMENTS = "stop", "chat_template_kwargs"
PARAMETERS = (*_SAMPLING, *_LIMITS, _STOP, _TEMPLATE_ARGUMENTS)


def with_parameters(defaults: ModelDefaults, told: Iterable[tuple[str, Any]]) -> ModelDefaults:
    """Defaults changed by pairs of name and value, a Modelfile's text or a JSON value.

    Raises ModelfileError for an unknown parameter or invalid value.
    """
    changes: dict[str, Any] = {"sampling": dict(defaults.sampling)}
    for name, value in told:
        _take_parameter(changes, name.lower(), value)
    sampling = {name: value for name, value in settled(changes["sampling"]).items() if value is not None}
    changed = replace(defaults, **{**changes, "sampling": sampling})
    try:
        changed.check()
    except InvalidParameter as error:
        raise ModelfileError(str(error).replace("repetition_penalty", "repeat_penalty")) from error
    return changed


def parameters_of(defaults: ModelDefaults) -> Iterable[tuple[str, str]]:
    """Yields parameters as a Modelfile writes them."""
    for name, (ours, _) in _SAMPLING.items():
        if ours in defaults.sampling:
            value = defaults.sampling[ours]
            yield name, f"{value:g}" if isinstance(value, float) else str(value)
    for name, limit in _LIMITS.items():
        if (number := getattr(defaults, limit)) is not None:
            yield name, str(number)
    for text in defaults.stop:
        yield _STOP, json.dumps(text, ensure_ascii=False)
    if defaults.template_arguments:
        yield _TEMPLATE_ARGUMENTS, json.dumps(defaults.template_arguments, ensure_ascii=False)


def _take_parameter(changes: dict[str, Any], name: str, value: Any) -> None:
    if name in _SAMPLING:
        ours, kind = _SAMPLING[name]
        changes["sampling"][ours] = _number(name, value, kind)
    elif name in _LIMITS:
        number = _number(name, value, int)
        # Ollama writes -1 for an answer without a limit.
        changes[_LIMITS[name]] = None if name == "num_predict" and number < 1 else number
    elif name == _STOP:
        texts = value if isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in texts):
            raise ModelfileError("stop is a text, or a list of texts")
        if texts:
            changes["stop"] = (*changes.get("stop", ()), *texts)
    elif name == _TEMPLATE_ARGUMENTS:
        changes["template_arguments"] = _object(value)
    elif name not in WITHOUT_EFFECT:
        near = difflib.get_close_matches(name, PARAMETERS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(PARAMETERS)}"
        raise ModelfileError(f"there is no parameter {name[:60]!r}; {hint}")


def _number(name: str, value: Any, kind: type) -> Any:
    is_number = isinstance(value, str | int | float) and not isinstance(value, bool)
    with suppress(ValueError, OverflowError):
        if is_number and (isinstance(value, str) or kind(value) == value):
            return kind(value)
    whole = "whole " if kind is int else ""
    raise ModelfileError(f"{name} is a {whole}number, not {str(value)[:60]!r}")


def _object(value: Any) -> Mapping[str, Any]:
    found = read_object(value) if isinstance(value, str) else value
    if not isinstance(found, dict):
        raise ModelfileError(f'{_TEMPLATE_ARGUMENTS} is an object in JSON, such as {{"enable_thinking": false}}')
    return found


ROLES = ("system", "user", "assistant")
_REFUSED = {
    "template": "TEMPLATE is not taken: a model's template comes with its files, and is written in Jinja, not in Go",
    "adapter": "ADAPTER is not taken: start the server with --adapter NAME=FOLDER to serve a LoRA adapter beside "
    "a model",
}
_KNOWN = ("from", "parameter", "system", "message", "license", *_REFUSED)
_LONG_QUOTE = '"""'


@dataclass
class Modelfile:
    """The content of a Modelfile; None keeps what the base model has."""

    base: str = ""
    parameters: list[tuple[str, Any]] = field(default_factory=list)
    system: str | None = None
    messages: list[ExampleMessage] = field(default_factory=list)
    license: str | None = None


def parse_modelfile(text: str) -> Modelfile:
    """Raises ModelfileError, which names the line."""
    found = Modelfile()
    for number, instruction, argument in _instructions(text):
        try:
            _take_instruction(found, instruction, argument)
        except ModelfileError as error:
            raise ModelfileError(f"line {number}: {error}") from error
    if not found.base:
        raise ModelfileError("there is no FROM: begin with FROM and the model that it is made from")
    return found


def modelfile_of(stored: StoredModel, base: str | None = None) -> str:
    """A Modelfile for the same model, from `base` if given, of the same weights."""
    defaults = stored.defaults
    lines = [f"FROM {base or stored.weights}"]
    lines += [f"PARAMETER {name} {value}" for name, value in parameters_of(defaults)]
    if defaults.system:
        lines.append(f'SYSTEM """{defaults.system}"""')
    lines += [f'MESSAGE {one.role} """{one.content}"""' for one in defaults.messages]
    if stored.license:
        lines.append(f'LICENSE """{stored.license}"""')
    return "\n".join(lines)


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    lines = enumerate(text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n"), 1)
    for first, raw in lines:
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        word, _, rest = line.partition(" ") if " " in line else line.partition("\t")
        word, rest = word.lower(), rest.strip()
        head, quote, _ = rest.partition(_LONG_QUOTE)
        # A role may precede the text of a message.
        if not quote or (head and word != "message"):
            yield first, word, rest if word in ("message", "parameter") else _unquoted(rest)
            continue
        number, gathered = first, [raw.partition(_LONG_QUOTE)[2]]  # with the white space at the line's end
        while _LONG_QUOTE not in gathered[-1]:
            number, more = next(lines, (0, ""))
            if not number:
                raise ModelfileError(f'line {first}: the text that begins with """ does not end')
            gathered.append(more)
        gathered[-1], _, behind = gathered[-1].partition(_LONG_QUOTE)
        if behind.strip():
            raise ModelfileError(f'line {number}: nothing may stand behind the """ that ends a text')
        yield first, word, head + "\n".join(gathered)


def _unquoted(text: str) -> str:
    is_quoted = len(text) > 1 and text[0] == text[-1] == '"'
    return text[1:-1] if is_quoted else text


def _take_instruction(found: Modelfile, instruction: str, text: str) -> None:
    match instruction:
        case "from":
            if found.base:
                raise ModelfileError("there is a FROM already; a model is made from one other")
            found.base = text
        case "parameter":
            name, _, value = text.partition(" ")
            if not value.strip():
                raise ModelfileError("PARAMETER takes a name and a value, such as: PARAMETER temperature 0.2")
            found.parameters.append((name, _parameter_text(name, value.strip())))
        case "system":
            found.system = text
        case "message":
            found.messages.append(_message(text))
        case "license":
            found.license = text if found.license is None else f"{found.license}\n{text}"
        case refused if refused in _REFUSED:
            raise ModelfileError(_REFUSED[refused])
        case _:
            near = difflib.get_close_matches(instruction, _KNOWN, n=1)
            hint = f"did you mean {near[0].upper()}?" if near else f"there are {', '.join(_KNOWN).upper()}"
            raise ModelfileError(f"there is no instruction {instruction[:40].upper()!r}; {hint}")


def _parameter_text(name: str, value: str) -> str:
    """A quoted stop string may hold escapes."""
    if name.lower() != "stop" or not (len(value) > 1 and value[0] == value[-1] == '"'):
        return _unquoted(value)
    try:
        return str(json.loads(value))
    except ValueError:
        return _unquoted(value)


def _message(text: str) -> ExampleMessage:
    role, _, content = text.partition(" ")
    if role.lower() not in ROLES or not content.strip():
        raise ModelfileError(f"MESSAGE takes a role ({', '.join(ROLES)}) and a text")
    return ExampleMessage(role.lower(), _unquoted(content.strip()))
