"""Scripts by which a shell completes our command line. Pure.

They hold every word themselves: only the names of models are asked of the program, which takes half a second.
"""

from collections.abc import Callable, Iterable, Mapping

from server.cli.shell.outline import PROGRAM, ArgumentOutline, CommandOutline, OptionOutline, ValueKind

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
    r"""Returns a text in single quotes, without `'\''`, which fish would not understand."""
    return "'" + text.replace("'", "’") + "'"
