"""A conversation in the terminal, and the text of the file that `/save` makes of it. Pure."""

import json
from dataclasses import dataclass, field
from typing import Any

from server.cli.repl.parameters import ParameterError, check_value
from server.cli.repl.speech import AnswerCosts, Turn

FORMAT = "mlx-serve conversation 1"
"""Stands in every saved file, so that no other file is taken for one, or written over."""


class NotAConversation(ValueError):
    """A text is none that `/save` wrote; the message says why, without the file's name."""


@dataclass
class Dialogue:
    """What was said, and how the model is to answer."""

    system: str = ""
    turns: list[Turn] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    number: int = 1
    """Tells it from those before, so that a server knows them apart."""
    costs: AnswerCosts | None = None
    """Of the last answer."""
    last_message: str = ""
    is_answered: bool = False
    """Whether the last message and its answer are the last two turns."""

    def prompt(self) -> list[Turn]:
        """Returns all messages, the system message first."""
        system: list[Turn] = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns]

    def start_anew(self) -> None:
        """Forgets what was said; the system message and the parameters stay."""
        self.turns.clear()
        self.costs, self.last_message, self.is_answered = None, "", False
        self.number += 1

    def take_back(self) -> None:
        """Forgets the last message and its answer, if it was answered."""
        if self.is_answered:
            del self.turns[-2:]

    def dump(self, model: str) -> str:
        """Returns the text of a file that holds the conversation."""
        record = {
            "format": FORMAT,
            "model": model,
            "system": self.system,
            "parameters": self.parameters,
            "messages": self.turns,
        }
        return json.dumps(record, indent=2, ensure_ascii=False) + "\n"

    def load(self, text: str) -> str:
        """Goes on with the conversation of a file and returns the model it was with; raises NotAConversation.

        After an error it is what it was before.
        """
        record = _record(text)
        turns = [_turn(message) for message in record["messages"]]
        _check_parameters(record["parameters"])
        self.start_anew()
        self.system, self.parameters = record["system"], dict(record["parameters"])
        self.turns.extend(turns)
        self.is_answered = [turn["role"] for turn in turns[-2:]] == ["user", "assistant"]
        self.last_message = turns[-2]["content"] if self.is_answered else ""
        return str(record["model"])


def is_conversation(text: str) -> bool:
    """Returns whether a text is one that `/save` wrote."""
    try:
        _record(text)
    except NotAConversation:
        return False
    return True


def _record(text: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        raise NotAConversation("it is no conversation that /save wrote") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise NotAConversation("it is no conversation that /save wrote")
    kinds = {"model": str, "system": str, "parameters": dict, "messages": list}
    wrong = next((name for name, kind in kinds.items() if not isinstance(record.get(name), kind)), None)
    if wrong is not None:
        raise NotAConversation(f"its {wrong!r} is missing or damaged")
    return record


def _turn(message: Any) -> Turn:
    match message:
        case {"role": "user" | "assistant" as role, "content": str(content)}:
            return {"role": role, "content": content}
    raise NotAConversation("one of its messages is damaged")


def _check_parameters(parameters: dict[str, Any]) -> None:
    try:
        for name, value in parameters.items():
            check_value(name, value)
    except ParameterError as error:
        raise NotAConversation(f"its parameters cannot be used: {error}") from error
