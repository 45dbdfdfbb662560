"""A model under a local name: the place of its weights, default parameters of requests, and the text as a Modelfile.

A Modelfile has one instruction a line, in any case: `FROM`, `PARAMETER`, `SYSTEM`, `MESSAGE`, `LICENSE`. Three quotes
allow several lines; `#` begins a comment. Pure.
"""

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal

from models.errors import InvalidParameter, ModelfileError, StoreError, told_as
from models.inference.sampling_params import NUMBERS, SamplingParams, check, settled
from models.texts import read_object

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "repeat_last_n")
SAMPLING_DEFAULTS: Mapping[str, type] = {
    name: NUMBERS[name] for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", *_PENALTIES)
}
_SAMPLING = {name.replace("repetition", "repeat"): (name, kind) for name, kind in SAMPLING_DEFAULTS.items()}
"""Ollama's names, and those of `SamplingParams` with their kind."""
_LIMITS = {"num_ctx": "context_tokens", "num_predict": "max_tokens"}
_STOP, _TEMPLATE_ARGUMENTS = "stop", "chat_template_kwargs"
PARAMETERS = (*_SAMPLING, *_LIMITS, _STOP, _TEMPLATE_ARGUMENTS)
_OF_LOADING = (
    "num_batch num_gpu main_gpu num_thread num_keep use_mmap use_mlock numa low_vram f16_kv logits_all vocab_only "
    "embedding_only tfs_z mirostat mirostat_tau mirostat_eta penalize_newline draft_num_predict"
)
WITHOUT_EFFECT = frozenset(_OF_LOADING.split())
"""Ollama's parameters that take none here."""
MIN_CONTEXT_TOKENS = 16
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
_ANY_VOCABULARY = 2**31
_SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True)
class ExampleMessage:
    """A message before each conversation's own."""

    role: str
    content: str


@dataclass(frozen=True)
class ModelDefaults:
    """Defaults; a request's own values take precedence."""

    system: str = ""
    messages: tuple[ExampleMessage, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    """Longest answer; None: the server's limit."""
    context_tokens: int | None = None
    """Longest prompt and answer; None: the limit of model and server."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """As `chat_template_kwargs` of a request."""

    def check(self) -> None:
        """Raises InvalidParameter for the first value that cannot be honoured."""
        check(self.sampling_over(SamplingParams()), _ANY_VOCABULARY)
        if len(self.stop) > MAX_STOP_STRINGS or not all(0 < len(text) <= MAX_STOP_CHARACTERS for text in self.stop):
            message = f"stop: at most {MAX_STOP_STRINGS} texts of 1 to {MAX_STOP_CHARACTERS} characters"
            raise InvalidParameter("stop", message)
        limits = {"num_predict": (self.max_tokens, 1), "num_ctx": (self.context_tokens, MIN_CONTEXT_TOKENS)}
        for name, (value, least) in limits.items():
            if value is not None and value < least:
                raise InvalidParameter(name, f"{name} must be at least {least}, not {value}")

    def with_parameters(self, parameters: Iterable[tuple[str, Any]]) -> "ModelDefaults":
        """Defaults changed by Ollama's names and values, a Modelfile's texts or JSON's; raises ModelfileError."""
        changes: dict[str, Any] = {"sampling": dict(self.sampling)}
        for name, value in parameters:
            _take_parameter(changes, name.lower(), value)
        sampling = {name: value for name, value in settled(changes["sampling"]).items() if value is not None}
        changed = replace(self, **{**changes, "sampling": sampling})
        try:
            changed.check()
        except InvalidParameter as error:
            raise ModelfileError(str(error).replace("repetition_penalty", "repeat_penalty")) from error
        return changed

    def parameters(self) -> Iterator[tuple[str, str]]:
        """Yields parameters as a Modelfile writes them."""
        for name, (ours, _) in _SAMPLING.items():
            if ours in self.sampling:
                value = self.sampling[ours]
                yield name, f"{value:g}" if isinstance(value, float) else str(value)
        for name, limit in _LIMITS.items():
            if (number := getattr(self, limit)) is not None:
                yield name, str(number)
        for text in self.stop:
            yield _STOP, json.dumps(text, ensure_ascii=False)
        if self.template_arguments:
            yield _TEMPLATE_ARGUMENTS, json.dumps(self.template_arguments, ensure_ascii=False)

    def sampling_over(self, sampling: SamplingParams) -> SamplingParams:
        """`sampling` overridden by these defaults; raises InvalidParameter."""
        unknown = next((name for name in self.sampling if name not in SAMPLING_DEFAULTS), None)
        if unknown is not None:
            raise InvalidParameter(unknown, f"{unknown} is no parameter of sampling that a model may set")
        return replace(sampling, **self.sampling)

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Messages after the examples, with the system prompt if they have none."""
        own = messages[:1] if messages and messages[0].get("role") in _SYSTEM_ROLES else messages[:0]
        system = () if own or not self.system else (ExampleMessage("system", self.system),)
        first = (*system, *self.messages)
        shown = [{"role": message.role, "content": [{"type": "text", "text": message.content}]} for message in first]
        return [*own, *shown, *messages[len(own) :]]


LATEST = "latest"
"""The tag of a name without one. A name holds no slash, unlike paths and repositories."""
MAX_NAME_CHARACTERS = 80
_PART = rf"[a-z0-9][a-z0-9._-]{{0,{MAX_NAME_CHARACTERS - 1}}}"
_NAME = re.compile(rf"({_PART})(?::({_PART}))?")


@dataclass(frozen=True)
class WeightsPlace:
    """Where a stored model's weights are."""

    kind: Literal["built-in", "repository", "folder"]
    name: str
    commit: str = ""

    def __str__(self) -> str:
        return f"{self.name}@{self.commit}" if self.commit else self.name


@dataclass(frozen=True)
class StoredModel:
    """One name of the manifest."""

    name: str
    """`name:tag`, lower case."""
    weights: WeightsPlace
    created: datetime
    modified: datetime
    defaults: ModelDefaults = field(default_factory=ModelDefaults)
    license: str = ""

    @property
    def short_name(self) -> str:
        return self.name.removesuffix(f":{LATEST}")

    def modelfile(self, base: str | None = None) -> str:
        """A Modelfile for the same model, from `base` if given, of the same weights."""
        defaults = self.defaults
        lines = [f"FROM {base or self.weights}"]
        lines += [f"PARAMETER {name} {value}" for name, value in defaults.parameters()]
        if defaults.system:
            lines.append(f'SYSTEM """{defaults.system}"""')
        lines += [f'MESSAGE {message.role} """{message.content}"""' for message in defaults.messages]
        if self.license:
            lines.append(f'LICENSE """{self.license}"""')
        return "\n".join(lines)


def find_full_name(text: str) -> str | None:
    """`name:tag` in lower case; None for what names no stored model."""
    match = _NAME.fullmatch(text.lower()) if text.isascii() else None
    return None if match is None else f"{match[1]}:{match[2] or LATEST}"


def parse_full_name(text: str) -> str:
    """`name:tag` in lower case; raises StoreError."""
    name = find_full_name(text)
    if name is None:
        raise StoreError(
            f"{text[:MAX_NAME_CHARACTERS]!r} is no name for a model: it is letters, digits and any of . _ - with at "
            f"most {MAX_NAME_CHARACTERS} characters, and a tag after a colon if you like, such as writer:v2"
        )
    return name


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
        parsed = read_object(value) if isinstance(value, str) else value
        if not isinstance(parsed, dict):
            raise ModelfileError(f'{_TEMPLATE_ARGUMENTS} is an object in JSON, such as {{"enable_thinking": false}}')
        changes["template_arguments"] = parsed
    elif name not in WITHOUT_EFFECT:
        raise ModelfileError(f"there is no parameter {name[:60]!r}; {_hint(name, PARAMETERS)}")


def _hint(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"


def _number(name: str, value: Any, kind: type) -> Any:
    is_number = isinstance(value, str | int | float) and not isinstance(value, bool)
    with suppress(ValueError, OverflowError):
        if is_number and (isinstance(value, str) or kind(value) == value):
            return kind(value)
    whole = "whole " if kind is int else ""
    raise ModelfileError(f"{name} is a {whole}number, not {str(value)[:60]!r}")


ROLES = ("system", "user", "assistant")
_REFUSED = {
    "template": "TEMPLATE is not taken: a model's template comes with its files, and is written in Jinja, not in Go",
    "adapter": "ADAPTER is not taken: start the server with --adapter NAME=FOLDER to serve a LoRA adapter beside "
    "a model",
}
_KNOWN = ("FROM", "PARAMETER", "SYSTEM", "MESSAGE", "LICENSE", *map(str.upper, _REFUSED))
_LONG_QUOTE = '"""'


@dataclass
class Modelfile:
    """The content of a Modelfile; None keeps what the base model has."""

    base: str = ""
    parameters: list[tuple[str, Any]] = field(default_factory=list)
    system: str | None = None
    messages: list[ExampleMessage] = field(default_factory=list)
    license: str | None = None

    @classmethod
    def parse(cls, text: str) -> "Modelfile":
        """Raises ModelfileError, which names the line."""
        modelfile = cls()
        for number, instruction, argument in _instructions(text):
            with told_as(ModelfileError, f"line {number}", ModelfileError):
                _take_instruction(modelfile, instruction, argument)
        if not modelfile.base:
            raise ModelfileError("there is no FROM: begin with FROM and the model that it is made from")
        return modelfile


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
        gathered[-1], _, after = gathered[-1].partition(_LONG_QUOTE)
        if after.strip():
            raise ModelfileError(f'line {number}: nothing may follow the """ that ends a text')
        yield first, word, head + "\n".join(gathered)


def _unquoted(text: str) -> str:
    is_quoted = len(text) > 1 and text[0] == text[-1] == '"'
    return text[1:-1] if is_quoted else text


def _take_instruction(modelfile: Modelfile, instruction: str, text: str) -> None:
    match instruction:
        case "from":
            if modelfile.base:
                raise ModelfileError("there is a FROM already; a model is made from one other model")
            modelfile.base = text
        case "parameter":
            name, _, value = text.partition(" ")
            if not value.strip():
                raise ModelfileError("PARAMETER takes a name and a value, such as: PARAMETER temperature 0.2")
            modelfile.parameters.append((name, _parameter_text(name, value.strip())))
        case "system":
            modelfile.system = text
        case "message":
            modelfile.messages.append(_message(text))
        case "license":
            modelfile.license = text if modelfile.license is None else f"{modelfile.license}\n{text}"
        case refused if refused in _REFUSED:
            raise ModelfileError(_REFUSED[refused])
        case _:
            named = instruction.upper()
            raise ModelfileError(f"there is no instruction {named[:40]!r}; {_hint(named, _KNOWN)}")


def _parameter_text(name: str, value: str) -> str:
    """A quoted stop string may hold escapes."""
    if name.lower() == "stop" and value[0] == value[-1] == '"':
        with suppress(ValueError):
            return str(json.loads(value))
    return _unquoted(value)


def _message(text: str) -> ExampleMessage:
    role, _, content = text.partition(" ")
    if role.lower() not in ROLES or not content.strip():
        raise ModelfileError(f"MESSAGE takes a role ({', '.join(ROLES)}) and a text")
    return ExampleMessage(role.lower(), _unquoted(content.strip()))
