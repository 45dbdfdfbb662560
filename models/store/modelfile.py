"""Reading and writing Ollama's Modelfile. Pure.

One instruction a line, in letters of any case: `FROM`, `PARAMETER`, `SYSTEM`, `MESSAGE`, `LICENSE`. Its text ends
with the line, or stands between quotes, which may be three to reach over several lines. `#` begins a comment.
"""

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from models.errors import ModelfileError
from models.store.defaults import ExampleMessage
from models.store.parameters import parameters_of
from models.store.stored_model import StoredModel

ROLES = ("system", "user", "assistant")
NO_TEMPLATE = "TEMPLATE is not taken: a model's template comes with its files, and is written in Jinja, not in Go"
NO_ADAPTER = (
    "ADAPTER is not taken: start the server with --adapter NAME=FOLDER to serve a LoRA adapter beside a model"
)
_REFUSED = {"template": NO_TEMPLATE, "adapter": NO_ADAPTER}
_KNOWN = ("from", "parameter", "system", "message", "license", *_REFUSED)
_LONG_QUOTE = '"""'


@dataclass
class Modelfile:
    """What a Modelfile says."""

    base: str = ""
    """The model that it begins from."""
    parameters: list[tuple[str, str]] = field(default_factory=list)
    system: str | None = None
    messages: list[ExampleMessage] = field(default_factory=list)
    license: str | None = None


def parse_modelfile(text: str) -> Modelfile:
    """Returns what a Modelfile says; raises ModelfileError, which names the line."""
    found = Modelfile()
    for number, instruction, argument in _instructions(text):
        try:
            _take(found, instruction, argument)
        except ModelfileError as error:
            raise ModelfileError(f"line {number}: {error}") from error
    if not found.base:
        raise ModelfileError("there is no FROM: begin with FROM and the model that it is made from")
    return found


def modelfile_of(stored: StoredModel, base: str | None = None) -> str:
    """Returns a Modelfile that makes the same model, from `base` if that is another name of its weights."""
    defaults = stored.defaults
    lines = [
        f"FROM {base or stored.weights}",
        *(f"PARAMETER {name} {value}" for name, value in parameters_of(defaults)),
    ]
    if defaults.system:
        lines.append(f"SYSTEM {_quoted(defaults.system)}")
    lines += [f"MESSAGE {one.role} {_quoted(one.content)}" for one in defaults.messages]
    if stored.license:
        lines.append(f"LICENSE {_quoted(stored.license)}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return f"{_LONG_QUOTE}{text}{_LONG_QUOTE}"


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Yields the number of its line, its word in small letters, and its text."""
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    number = 0
    while number < len(lines):
        first, line = number + 1, lines[number].strip()
        number += 1
        if not line or line.startswith("#"):
            continue
        word, _, rest = line.partition(" ") if " " in line else line.partition("\t")
        rest = rest.strip()
        head, quote, begun = rest.partition(_LONG_QUOTE)
        # A role may stand before the text of a message.
        if quote and (not head or word.lower() == "message"):
            gathered = [begun]
            while _LONG_QUOTE not in gathered[-1]:
                if number == len(lines):
                    raise ModelfileError(f'line {first}: the text that begins with """ does not end')
                gathered.append(lines[number])
                number += 1
            gathered[-1], _, behind = gathered[-1].partition(_LONG_QUOTE)
            if behind.strip():
                raise ModelfileError(f'line {number}: nothing may stand behind the """ that ends a text')
            yield first, word.lower(), head + "\n".join(gathered)
        else:
            yield first, word.lower(), rest if word.lower() in ("message", "parameter") else _unquoted(rest)


def _unquoted(text: str) -> str:
    is_quoted = len(text) > 1 and text[0] == text[-1] == '"'
    return text[1:-1] if is_quoted else text


def _take(found: Modelfile, instruction: str, text: str) -> None:
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
    """Returns a parameter's value; a quoted stop string may hold escapes, such as a line break."""
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
