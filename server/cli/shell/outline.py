"""The commands with their options and arguments, as completion and the manual need them. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

PROGRAM = "mlx-serve"

_FILE_METAVARS = ("FILE", "PATH", "FOLDER")
_FILE_ENDINGS = ("-dir", "-file")
_MODEL_METAVARS = ("MODEL", "NAME")


class ValueKind(StrEnum):
    """What may stand behind an option, or as an argument."""

    NOTHING = "nothing"
    TEXT = "text"
    CHOICE = "choice"
    FILE = "file"
    MODEL = "model"


@dataclass(frozen=True)
class OptionOutline:
    """One option of a command."""

    flags: tuple[str, ...]
    metavar: str
    """Empty for a switch."""
    text: str
    variable: str = ""
    """Of the environment, that says the same."""

    @property
    def kind(self) -> ValueKind:
        """What stands behind it."""
        if not self.metavar:
            return ValueKind.NOTHING
        if self.choices:
            return ValueKind.CHOICE
        is_file = self.metavar in _FILE_METAVARS or self.flags[0].endswith(_FILE_ENDINGS)
        return ValueKind.FILE if is_file else ValueKind.TEXT

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that may stand behind it, if only some may."""
        return _choices(self.metavar)


@dataclass(frozen=True)
class ArgumentOutline:
    """A word of a command that is no option."""

    metavar: str
    text: str
    is_needed: bool
    is_repeated: bool

    @property
    def kind(self) -> ValueKind:
        """What it is."""
        if self.choices:
            return ValueKind.CHOICE
        if self.metavar in _MODEL_METAVARS:
            return ValueKind.MODEL
        return ValueKind.FILE if self.metavar in _FILE_METAVARS else ValueKind.TEXT

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that it may be, if only some may."""
        return _choices(self.metavar)

    @property
    def usage(self) -> str:
        """How it is shown in a line of usage."""
        shown = f"{self.metavar}…" if self.is_repeated else self.metavar
        return shown if self.is_needed else f"[{shown}]"


@dataclass(frozen=True)
class CommandOutline:
    """A command, or a group of them."""

    words: tuple[str, ...]
    """Behind the name of the program; none for the program itself."""
    text: str
    options: Sequence[OptionOutline]
    arguments: Sequence[ArgumentOutline]
    commands: "Sequence[CommandOutline]"

    @property
    def name(self) -> str:
        """The words as one text."""
        return " ".join(self.words)

    @property
    def summary(self) -> str:
        """The first sentence, without its full stop."""
        return self.text.partition(". ")[0].rstrip(".")

    def walk(self) -> "Iterator[CommandOutline]":
        """Yields itself and everything below."""
        yield self
        for command in self.commands:
            yield from command.walk()


HELP = OptionOutline(("-h", "--help"), "", "Show this message and exit.")


def outline(command: Any, words: tuple[str, ...] = ()) -> CommandOutline:
    """Returns what a command of typer's says of itself."""
    options = [_option(one) for one in command.params if one.param_type_name == "option" and not one.hidden]
    arguments = [_argument(one) for one in command.params if one.param_type_name == "argument" and not one.hidden]
    below = getattr(command, "commands", {})
    commands = [outline(one, (*words, name)) for name, one in below.items() if not one.hidden]
    return CommandOutline(words, " ".join((command.help or "").split()), [*options, HELP], arguments, commands)


def _option(option: Any) -> OptionOutline:
    metavar = "" if option.is_flag else option.metavar or "TEXT"
    variable = option.envvar if isinstance(option.envvar, str) else ""
    return OptionOutline((*option.opts, *option.secondary_opts), metavar, option.help or "", variable)


def _argument(argument: Any) -> ArgumentOutline:
    return ArgumentOutline(
        argument.metavar or argument.name.upper(), argument.help or "", bool(argument.required), argument.nargs == -1
    )


def _choices(metavar: str) -> tuple[str, ...]:
    return tuple(metavar.split("|")) if "|" in metavar else ()
