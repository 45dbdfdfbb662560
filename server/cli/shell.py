"""Shell completion, examples and the manual page, all made from the commands' own definitions. Pure.

The completion scripts contain every word; they run the program, which takes half a second, only for the names of
models.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass
from enum import StrEnum
from typing import Any

from server.app.config import FILE_VARIABLE, SETTINGS, key_of, variable_of

PROGRAM = "mlx-serve"

_FILE_METAVARS = ("FILE", "PATH", "FOLDER")
_FILE_ENDINGS = ("-dir", "-file")
_MODEL_METAVARS = ("MODEL", "NAME")


class ValueKind(StrEnum):
    """Kinds of values of an option or an argument."""

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

    @property
    def kind(self) -> ValueKind:
        if not self.metavar:
            return ValueKind.NOTHING
        if self.choices:
            return ValueKind.CHOICE
        is_file = self.metavar in _FILE_METAVARS or self.flags[0].endswith(_FILE_ENDINGS)
        return ValueKind.FILE if is_file else ValueKind.TEXT

    @property
    def choices(self) -> tuple[str, ...]:
        """The possible words, if there are only some."""
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
        if self.choices:
            return ValueKind.CHOICE
        if self.metavar in _MODEL_METAVARS:
            return ValueKind.MODEL
        return ValueKind.FILE if self.metavar in _FILE_METAVARS else ValueKind.TEXT

    @property
    def choices(self) -> tuple[str, ...]:
        """The possible words, if there are only some."""
        return _choices(self.metavar)

    @property
    def usage(self) -> str:
        shown = f"{self.metavar}…" if self.is_repeated else self.metavar
        return shown if self.is_needed else f"[{shown}]"


@dataclass(frozen=True)
class CommandOutline:
    """A command, or a group of them."""

    words: tuple[str, ...]
    """Words behind the name of the program; none for the program itself."""
    text: str
    options: Sequence[OptionOutline]
    arguments: Sequence[ArgumentOutline]
    commands: "Sequence[CommandOutline]"

    @property
    def name(self) -> str:
        return " ".join(self.words)

    @property
    def summary(self) -> str:
        """The first sentence, without its full stop."""
        return self.text.partition(". ")[0].rstrip(".")

    def walk(self) -> "Iterator[CommandOutline]":
        """Yields this command and all commands below it."""
        yield self
        for command in self.commands:
            yield from command.walk()


HELP = OptionOutline(("-h", "--help"), "", "Show this message and exit.")


def outline(command: Any, words: tuple[str, ...] = ()) -> CommandOutline:
    """Returns the outline of a typer command."""
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


LIST_MODELS = f"{PROGRAM} list 2>/dev/null | awk 'NR > 1 {{print $1}}'"
"""The first column of a table with headings."""


def bash_script(root: CommandOutline) -> str:
    """Returns a script for bash 3.2 or newer, with or without the package bash-completion."""
    return _BASH.format(
        program=PROGRAM,
        steps="\n".join(_bash_step(one) for one in root.walk() if one.words),
        values="\n".join(filter(None, (_bash_values(one) for one in root.walk()))),
        commands="\n".join(_bash_command(one) for one in root.walk()),
        models=LIST_MODELS,
    )


def zsh_script(root: CommandOutline) -> str:
    """Returns a script for zsh, to be sourced or to lie in a folder of `fpath` as `_mlx-serve`."""
    functions = "\n".join(_zsh_function(one) for one in root.walk())
    return _ZSH.format(program=PROGRAM, functions=functions, name=_function(root), models=LIST_MODELS)


def fish_script(root: CommandOutline) -> str:
    """Returns a script for fish."""
    groups = " ".join(_quote(one.name) for one in root.walk() if one.words)
    lines = [line for one in root.walk() for line in _fish_lines(one)]
    return _FISH.format(program=PROGRAM, names=groups, lines="\n".join(lines), models=LIST_MODELS)


SCRIPTS: Mapping[str, Callable[[CommandOutline], str]] = {
    "bash": bash_script,
    "zsh": zsh_script,
    "fish": fish_script,
}

# ---------------------------------------------------------------------------------------------------------- bash

_BASH = """\
# Completion of {program} for bash. Load it with: source <({program} completion bash)
_mlx_serve() {{
    local line="${{COMP_LINE:0:COMP_POINT}}" current="" before="" command="" words="" files="" index count
    local -a typed
    read -r -a typed <<< "$line"
    count=${{#typed[@]}}
    if [[ "$line" != *[[:space:]] ]]; then
        count=$((count - 1))
        current="${{typed[$count]}}"
    fi
    for ((index = 1; index < count; index++)); do
        case "${{command:+$command }}${{typed[$index]}}" in
{steps}
        esac
    done
    ((count > 0)) && before="${{typed[$((count - 1))]}}"
    case "$command:$before" in
{values}
        *)
            case "$command" in
{commands}
            esac
            ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    [[ -z "$files" ]] || COMPREPLY+=($(compgen -f -- "$current"))
    # Where a colon ends a word for readline, what stands before it is there already.
    if [[ "$current" == *:* && "$COMP_WORDBREAKS" == *:* ]]; then
        local prefix="${{current%"${{current##*:}}"}}"
        COMPREPLY=("${{COMPREPLY[@]#"$prefix"}}")
    fi
}}
_mlx_serve_models() {{
    {models}
}}
complete -o filenames -F _mlx_serve {program} 2>/dev/null || complete -F _mlx_serve {program}
"""


def _bash_step(command: CommandOutline) -> str:
    name = _quote(command.name)
    return f"            {name}) command={name} ;;"


def _bash_values(command: CommandOutline) -> str:
    lines = []
    for option in command.options:
        if option.kind is not ValueKind.NOTHING:
            pattern = "|".join(_quote(f"{command.name}:{flag}") for flag in option.flags)
            lines.append(f"        {pattern}) {_bash_value(option)} ;;")
    return "\n".join(lines)


def _bash_value(value: OptionOutline | ArgumentOutline) -> str:
    if value.kind is ValueKind.CHOICE:
        return f"words={_quote(' '.join(value.choices))}"
    actions = {ValueKind.FILE: "files=yes", ValueKind.MODEL: 'words="$(_mlx_serve_models)"; files=yes'}
    return actions.get(value.kind, ":")


def _bash_command(command: CommandOutline) -> str:
    flags = " ".join(flag for option in command.options for flag in option.flags)
    names = " ".join(one.words[-1] for one in command.commands)
    values = "; ".join(_bash_value(argument) for argument in command.arguments[:1]) or ":"
    rest = f"words={_quote(names)}" if names else values
    head = f'                {_quote(command.name)}) if [[ "$current" == -* ]]; then words={_quote(flags)}'
    return f"{head}; else {rest}; fi ;;"


# ----------------------------------------------------------------------------------------------------------- zsh

_ZSH = """\
#compdef {program}
# Completion of {program} for zsh: a file _{program} in a folder of fpath, or: source <({program} completion zsh)
{functions}
_mlx_serve_models() {{
    local -a models
    models=(${{(f)"$({models})"}})
    compadd -a models
    _files -/
}}
if [[ "$funcstack[1]" == "_{program}" ]]; then
    {name} "$@"
else
    compdef {name} {program}
fi
"""


def _zsh_function(command: CommandOutline) -> str:
    lines = [_quote(_zsh_option(option, flag)) for option in command.options for flag in option.flags]
    if not command.commands:
        lines += [_quote(_zsh_argument(argument)) for argument in command.arguments]
        arguments = " \\\n        ".join(["_arguments -S", *lines])
        return f"{_function(command)}() {{\n    {arguments}\n}}"
    names = " ".join(_quote(f"{one.words[-1]}:{one.summary}") for one in command.commands)
    cases = "\n".join(f"        {one.words[-1]}) {_function(one)} ;;" for one in command.commands)
    arguments = " \\\n        ".join(["_arguments -C", *lines, "'1: :->command'", "'*:: :->rest'"])
    return f"""\
{_function(command)}() {{
    local curcontext="$curcontext" state line
    local -a commands
    commands=({names})
    {arguments}
    case "$state" in
    command) _describe command commands ;;
    rest)
        case "$words[1]" in
{cases}
        esac
        ;;
    esac
}}"""


def _zsh_option(option: OptionOutline, flag: str) -> str:
    text = _zsh_text(option.text)
    return f"*{flag}[{text}]" + ("" if option.kind is ValueKind.NOTHING else f":{_zsh_value(option)}")


def _zsh_argument(argument: ArgumentOutline) -> str:
    return f"{'*' if argument.is_repeated else ''}:{_zsh_value(argument)}"


def _zsh_value(value: OptionOutline | ArgumentOutline) -> str:
    actions = {
        ValueKind.CHOICE: f"({' '.join(value.choices)})",
        ValueKind.FILE: "_files",
        ValueKind.MODEL: "_mlx_serve_models",
    }
    return f"{_zsh_text(value.metavar)}:{actions.get(value.kind, ' ')}"


def _zsh_text(text: str) -> str:
    for letter in "\\[]:":
        text = text.replace(letter, f"\\{letter}")
    return text


def _function(command: CommandOutline) -> str:
    return "_".join(["_mlx_serve_command", *command.words]).replace("-", "_")


# ---------------------------------------------------------------------------------------------------------- fish

_FISH = """\
# Completion of {program} for fish, a file {program}.fish in ~/.config/fish/completions
function __mlx_serve_command
    set -l command
    for word in (commandline -opc)[2..-1]
        if contains -- (string join -- ' ' $command $word) {names}
            set command (string join -- ' ' $command $word)
        end
    end
    test "$command" = "$argv"
end
function __mlx_serve_models
    {models}
end
complete -c {program} -f
{lines}
"""


def _fish_lines(command: CommandOutline) -> Iterable[str]:
    condition = _quote(" ".join(["__mlx_serve_command", *command.words]))
    start = f"complete -c {PROGRAM} -n {condition}"
    for one in command.commands:
        yield f"{start} -a {_quote(one.words[-1])} -d {_quote(one.summary)}"
    for option in command.options:
        flags = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags)
        yield f"{start} {flags} -d {_quote(option.text)}{_fish_value(option)}"
    for argument in command.arguments[:1]:
        if argument.kind is not ValueKind.TEXT:
            yield start + _fish_value(argument).replace(" -x", "").replace(" -r", "")


def _fish_value(value: OptionOutline | ArgumentOutline) -> str:
    return {
        ValueKind.NOTHING: "",
        ValueKind.CHOICE: f" -x -a {_quote(' '.join(value.choices))}",
        ValueKind.FILE: " -r -F",
        ValueKind.MODEL: " -x -a '(__mlx_serve_models)'",
    }.get(value.kind, " -x")


def _quote(text: str) -> str:
    return "'" + text.replace("'", "’") + "'"


EXAMPLES: Mapping[str, Sequence[str]] = {
    "": ("mlx-serve serve demo", "mlx-serve run demo"),
    "serve": ("mlx-serve serve qwen3:8b --cache-disk 20GB", "mlx-serve serve demo --port 0 --log-format json"),
    "run": ("mlx-serve run qwen3:4b", 'cat notes.txt | mlx-serve run demo "Summarise this."'),
    "config": ("mlx-serve config --port 9000", "mlx-serve config --template > ~/.config/mlx-serve/config.toml"),
    "list": ("mlx-serve list --json",),
    "show": ("mlx-serve show qwen3:8b", "mlx-serve show writer --modelfile > Modelfile"),
    "cp": ("mlx-serve cp qwen3:8b writer",),
    "tag": ("mlx-serve tag writer v1",),
    "rm": ("mlx-serve rm writer:v1", "mlx-serve rm mlx-community/Qwen3-4B-4bit"),
    "verify": ("mlx-serve verify qwen3:8b",),
    "create": ("mlx-serve create writer -f Modelfile",),
    "ps": ("mlx-serve ps --json",),
    "top": ("mlx-serve top", "mlx-serve top --once --json"),
    "stop": ("mlx-serve stop qwen3:8b",),
    "pull": ("mlx-serve pull qwen3:0.6b", "mlx-serve pull mlx-community/Qwen3-4B-4bit"),
    "doctor": ("mlx-serve doctor", "mlx-serve doctor --file requests.jsonl --speed 400"),
    "gateway-config": ("mlx-serve gateway-config --replica 10.0.0.1:8080 --replica 10.0.0.2:8080 > haproxy.cfg",),
    "completion": (
        "mlx-serve completion bash > ~/.local/share/bash-completion/completions/mlx-serve",
        "mlx-serve completion fish > ~/.config/fish/completions/mlx-serve.fish",
    ),
    "man": ("mlx-serve man > ~/.local/share/man/man1/mlx-serve.1",),
    "launch": ("mlx-serve launch claude", "mlx-serve launch codex --model qwen3:30b -- exec 'Explain this folder.'"),
    "service": ("mlx-serve service install",),
    "service install": ("mlx-serve service install",),
    "service status": ("mlx-serve service status --json",),
    "service logs": ("mlx-serve service logs --follow",),
    "service remove": ("mlx-serve service remove",),
    "cache": ("mlx-serve cache",),
    "cache tree": ("mlx-serve cache tree --depth 3",),
    "cache list": ("mlx-serve cache list --json",),
    "cache rm": ("mlx-serve cache rm --all",),
}
"""Examples by the words behind `mlx-serve`."""


def epilog(command: str) -> str | None:
    r"""Returns the end of a command's help; None without an example. `\b` keeps its lines."""
    examples = EXAMPLES.get(command)
    if examples is None:
        return None
    heading = "Example:" if len(examples) == 1 else "Examples:"
    return "\b\n" + "\n".join([heading, *(f"  {example}" for example in examples)])


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
    """Returns a text with roff's commands escaped."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped
