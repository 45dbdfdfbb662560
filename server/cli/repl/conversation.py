"""A conversation in the terminal, and the wrapping of streamed text. Pure.

Knows neither who answers nor how text reaches the terminal.
"""

import contextlib
import difflib
import json
import unicodedata
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, TypeAlias

from rich.cells import cell_len

from models.errors import InvalidParameter
from models.inference.sampling_params import SamplingParams, check
from models.output.pieces import Reasoning, Text
from models.prompt.shapes import Message
from server.engine.request import Timings

AnswerPart: TypeAlias = Text | Reasoning | Timings
"""A part of an answer; its timings come last."""


def describe_timings(timings: Timings) -> str:
    """Two lines, of prompt and answer."""
    prompt_tokens = timings.cache_tokens + timings.evaluated_tokens
    share = timings.cache_tokens / prompt_tokens if prompt_tokens else 0
    # The time runs from the first token to the last, so one token fewer was made in it.
    seconds = timings.predicted_ms / 1000
    speed = f", {(timings.predicted_tokens - 1) / seconds:.1f} tokens/s" if seconds else ""
    return (
        f"prompt: {prompt_tokens} tokens, {timings.cache_tokens} cached ({share:.0%}), "
        f"{timings.evaluated_tokens} evaluated in {timings.prompt_ms:.0f} ms\n"
        f"answer: {timings.predicted_tokens} tokens{speed}"
    )


class ChatError(Exception):
    """What a person asked for failed; the message is one sentence."""


class ModelChoice(Protocol):
    """Models to talk to, one at a time."""

    @property
    def name(self) -> str: ...

    def answer(
        self, turns: Sequence[Message], conversation: int, parameters: Mapping[str, Any]
    ) -> AsyncGenerator[AnswerPart, None]:
        """Yields an answer; a cancel stops the model. Raises ChatError.

        Missing `parameters` are as the model recommends.
        """
        ...

    def names(self) -> Sequence[str]:
        """May read the disk, or ask a server."""
        ...

    def change(self, name: str) -> None:
        """Raises ModelError or ChatError; then the current model stays."""
        ...


_FOR_PROGRAMS = (
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "top_logprobs",
    "dry_",
    "min_tokens",
    "end_token_ids",
)
SAMPLING = tuple(field.name for field in fields(SamplingParams) if not field.name.startswith(_FOR_PROGRAMS))
MAX_TOKENS, THINK = "max_tokens", "think"
NAMES = (*SAMPLING, MAX_TOKENS, THINK)

_WHOLE = ("top_k", "seed", "repeat_last_n", MAX_TOKENS)
_SWITCH = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}


def parse_parameter(name: str, text: str) -> Any:
    """Reads what a person typed; raises ChatError."""
    check_name(name)
    if name == THINK:
        if text.lower() not in _SWITCH:
            raise ChatError(f"think is on or off, not {text!r}")
        return _SWITCH[text.lower()]
    try:
        value: Any = int(text) if name in _WHOLE else float(text)
        if name in SAMPLING:
            check(replace(SamplingParams(), **{name: value}), vocab_size=1)
    except InvalidParameter as error:
        raise ChatError(str(error)) from error
    except ValueError:
        raise ChatError(f"{name} is a {'whole ' if name in _WHOLE else ''}number, not {text!r}") from None
    if name == MAX_TOKENS and value < 1:
        raise ChatError(f"max_tokens is a whole number above 0, not {value!r}")
    return value


def check_name(name: str) -> None:
    """Raises ChatError."""
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(NAMES)}"
        raise ChatError(f"there is no parameter {name!r}; {hint}")


def describe(parameters: Mapping[str, Any]) -> str:
    """One line for each parameter."""
    if not parameters:
        return "Nothing is set: the model's own recommendations hold."
    said = dict(sorted(parameters.items()))
    if THINK in said:
        said[THINK] = "on" if said[THINK] else "off"
    return "\n".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in said.items()
    )


def template_arguments(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters for the chat template."""
    return {"enable_thinking": parameters[THINK]} if THINK in parameters else {}


FORMAT = "mlx-serve conversation 1"
"""A file that does not begin so is never overwritten."""


@dataclass
class Dialogue:
    """The messages so far, and how to answer."""

    system: str = ""
    turns: list[Message] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    number: int = 1
    """Number by which a server tells this conversation from earlier ones."""
    timings: Timings | None = None
    last_message: str = ""
    is_answered: bool = False

    def prompt(self) -> list[Message]:
        """All messages, the system message first."""
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns]

    def start_anew(self) -> None:
        """Keeps the system message and the parameters."""
        self.turns.clear()
        self.timings, self.last_message, self.is_answered = None, "", False
        self.number += 1

    def dump(self, model: str) -> str:
        """A file's text."""
        about = {"format": FORMAT, "model": model, "system": self.system}
        record = {**about, "parameters": self.parameters, "messages": self.turns}
        return json.dumps(record, indent=2, ensure_ascii=False) + "\n"

    def load(self, text: str) -> str:
        """Continues a saved conversation; returns its model. Raises ChatError, and changes nothing then."""
        record = _record(text)
        turns = [_message(message) for message in record["messages"]]
        parameters = {name: parse_parameter(name, str(value)) for name, value in record["parameters"].items()}
        self.start_anew()
        self.system, self.parameters = record["system"], parameters
        self.turns.extend(turns)
        self.is_answered = [turn["role"] for turn in turns[-2:]] == ["user", "assistant"]
        self.last_message = turns[-2]["content"] if self.is_answered else ""
        return str(record["model"])


def is_conversation(text: str) -> bool:
    """Whether `/save` wrote a text."""
    try:
        _record(text)
    except ChatError:
        return False
    return True


def _record(text: str) -> dict[str, Any]:
    record = None
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(text)
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ChatError("it is no conversation that /save wrote")
    kinds = {"model": str, "system": str, "parameters": dict, "messages": list}
    wrong = next((name for name, kind in kinds.items() if not isinstance(record.get(name), kind)), None)
    if wrong is not None:
        raise ChatError(f"its {wrong!r} is missing or damaged")
    return record


def _message(message: Any) -> Message:
    match message:
        case {"role": "user" | "assistant" as role, "content": str(content)}:
            return {"role": role, "content": content}
    raise ChatError("one of its messages is damaged")


FENCE = "```"

_JOINER = "\u200d"
_CLOSING = frozenset("、。，．！？：；）」』】〉》〕〗…ー々っッゃゅょャュョ")
"""Wide letters that begin no line."""
_TAB = " " * 4


class WordWrap:
    """Breaks text at words while it streams in.

    A word is shown once it is complete, so that it never has to move. Lines are broken at spaces, and beside wide
    letters such as Chinese ones. A word wider than the terminal is left to the terminal. Text between lines of ``` is
    unchanged, since people copy it.
    """

    def __init__(self) -> None:
        self._column = 0
        self._spaces = ""
        self._word = ""
        self._is_verbatim = False
        self._is_fence = False

    def feed(self, text: str, width: int) -> str:
        """What can be shown now."""
        # No model may move the cursor or change the title.
        shown = (letter for letter in text if letter in "\n\t" or unicodedata.category(letter) != "Cc")
        return "".join(self._take(letter, width) for letter in shown)

    def finish(self, width: int) -> str:
        """The text held back."""
        return self._end_word(width)

    @property
    def is_at_start(self) -> bool:
        return self._column == 0 and not self._word and not self._spaces

    def _take(self, letter: str, width: int) -> str:
        if letter == "\n":
            return self._end_line(width)
        if letter in " \t":
            shown = self._end_word(width)
            self._spaces += " " if letter == " " else _TAB
            return shown
        shown = self._end_word(width) if self._may_break_before(letter) else ""
        self._word += letter
        if self._column == 0 and self._word == FENCE:
            self._is_fence = True
        return shown

    def _may_break_before(self, letter: str) -> bool:
        if not self._word or _is_joined(self._word[-1], letter) or letter in _CLOSING:
            return False
        base = next((one for one in reversed(self._word) if cell_len(one)), "")
        return cell_len(letter) > 1 or cell_len(base) > 1

    def _end_word(self, width: int) -> str:
        spaces, word = self._spaces, self._word
        if not word:
            return ""
        self._spaces = self._word = ""
        needed = cell_len(spaces) + cell_len(word)
        if self._column and self._column + needed > width and not self._is_verbatim:
            self._column = cell_len(word) % width if cell_len(word) > width else cell_len(word)
            return "\n" + word
        column = self._column + needed
        self._column = (column - 1) % width + 1 if column > width else column
        return spaces + word

    def _end_line(self, width: int) -> str:
        shown = self._end_word(width)
        self._is_verbatim ^= self._is_fence
        self._is_fence, self._spaces, self._column = False, "", 0
        return shown + "\n"


def _is_joined(before: str, letter: str) -> bool:
    """Whether two letters are one sign: accents, emoji of several parts, skin tones, flags."""
    if _JOINER in (before, letter) or cell_len(letter) == 0 or "\U0001f3fb" <= letter <= "\U0001f3ff":
        return True
    return all("\U0001f1e6" <= one <= "\U0001f1ff" for one in (before, letter))
