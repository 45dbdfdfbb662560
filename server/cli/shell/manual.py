"""The manual page, made of what `--help` is made of. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import Field
from typing import Any

from server.cli.examples import EXAMPLES
from server.cli.shell.outline import PROGRAM, CommandOutline, OptionOutline
from server.settings import FILE_VARIABLE, SETTINGS, key_of, variable_of

EXIT_STATUSES: Mapping[int, str] = {
    0: "All went well; a server ended because it was asked to.",
    1: "It did not: a model, a server or a file is not there, or cannot be used; there is no answer.",
    2: "Wrong arguments, or settings that cannot be used.",
    130: "Ctrl-C.",
}
FILES: Mapping[str, str] = {
    "~/.config/mlx-serve/config.toml": f"Settings; under $XDG_CONFIG_HOME, or where {FILE_VARIABLE} says.",
    "~/.cache/mlx-serve": "Conversations that --cache-disk keeps.",
    "~/.local/share/mlx-serve/models.json": "Names of your own for models; under $XDG_DATA_HOME where that is set.",
    "~/.local/state/mlx-serve/history": "What was typed in mlx-serve run; under $XDG_STATE_HOME where that is set.",
    "~/.cache/huggingface": "Models that were pulled; $HF_HOME names another folder.",
}


def manual(root: CommandOutline, version: str) -> str:
    """Returns the page mlx-serve(1), in the language of man(7)."""
    return "\n".join(_lines(root, version)) + "\n"


def _lines(root: CommandOutline, version: str) -> Iterator[str]:
    yield f'.TH MLX-SERVE 1 "" "mlx-serve {_roff(version)}" "User commands"'
    yield from (".SH NAME", rf"{_roff(PROGRAM)} \- {_roff(root.summary)}")
    yield ".SH SYNOPSIS"
    for command in root.walk():
        if not command.commands:
            yield from _usage(command)
    yield from (".SH DESCRIPTION", _roff(root.text))
    yield ".SH OPTIONS"
    for option in root.options:
        yield from (".TP", _flags(option), _roff(option.text))
    yield ".SH COMMANDS"
    for command in root.walk():
        if command.words:
            yield from _section(command)
    yield from (".SH ENVIRONMENT", ".TP", rf"\fB{FILE_VARIABLE}\fR", "Names the file of settings.")
    for setting in SETTINGS.values():
        yield from _variable(setting)
    yield ".SH FILES"
    yield from _terms(FILES.items())
    yield ".SH EXIT STATUS"
    yield from _terms((str(status), text) for status, text in EXIT_STATUSES.items())


def _usage(command: CommandOutline) -> Sequence[str]:
    words = " ".join(argument.usage for argument in command.arguments)
    return [rf"\fB{_roff(f'{PROGRAM} {command.name}')}\fR [\fIOPTION\fR…] {_roff(words)}", ".br"]


def _section(command: CommandOutline) -> Iterator[str]:
    yield f".SS {_roff(f'{PROGRAM} {command.name}')}"
    yield _roff(command.text)
    yield from _terms((argument.metavar, argument.text) for argument in command.arguments if argument.text)
    for option in command.options:
        yield from (".TP", _flags(option), _roff(option.text))
    examples = EXAMPLES.get(command.name, ())
    if examples:
        yield from (".PP", "For example:", ".PP", ".nf", *(f"    {_roff(example)}" for example in examples), ".fi")


def _flags(option: OptionOutline) -> str:
    flags = ", ".join(rf"\fB{_roff(flag)}\fR" for flag in option.flags)
    return rf"{flags} \fI{_roff(option.metavar)}\fR" if option.metavar else flags


def _variable(setting: "Field[Any]") -> Sequence[str]:
    said = rf"As \fB{_roff(setting.metadata['flag'])}\fR of serve; \fB{key_of(setting)}\fR in the file."
    return [".TP", rf"\fB{variable_of(setting)}\fR", said]


def _terms(terms: Iterable[tuple[str, str]]) -> Iterator[str]:
    for term, text in terms:
        yield from (".TP", rf"\fB{_roff(term)}\fR", _roff(text))


def _roff(text: str) -> str:
    """Returns a text of which roff takes nothing for a command."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped
