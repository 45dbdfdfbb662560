"""The command line: its commands and errors.

A command's file is imported once the command is named, so that `--help` is quick. An error that a person can mend is
one line on standard error: exit status 2 for wrong arguments, 1 for the rest.
"""

import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.completion import completion_init  # type: ignore[attr-defined]
from typer.core import TyperGroup

from cache.budget import FolderError
from models.errors import ModelError
from server.app.config import ConfigError, DoctorError, StartError
from server.cli.options import COMPLETE_VARIABLE, command_group

_COMMANDS = """\
serve (start) Serve a model over HTTP to clients of OpenAI, Anthropic and Ollama.
    mlx-serve serve qwen3:8b --cache-disk 20GB
    mlx-serve serve demo --port 0 --log-format json
run (start) Chat with a model in the terminal, or ask it one question.
    mlx-serve run qwen3:4b
    cat notes.txt | mlx-serve run demo "Summarise this."
list (models) List the models on this machine.
    mlx-serve list --json
show (stored) Show what a model is: weights, context, parameters, files.
    mlx-serve show qwen3:8b
    mlx-serve show writer --modelfile > Modelfile
cp (stored) Give a model another name; its weights are shared.
    mlx-serve cp qwen3:8b writer
tag (stored) Give a name of your own another tag. The tag stays as it is when the name changes.
    mlx-serve tag writer v1
rm (stored) Remove a name of your own, or a repository that no name uses.
    mlx-serve rm writer:v1
    mlx-serve rm mlx-community/Qwen3-4B-4bit
verify (stored) Compare a model's files with the hub's hashes. The exit status is 1 if one is missing or damaged.
    mlx-serve verify qwen3:8b
create (stored) Make a model of your own from another, by a Modelfile. It may have a system prompt and parameters.
    mlx-serve create writer -f Modelfile
ps (ask) List the models that servers on this machine have loaded.
    mlx-serve ps --json
top (top) Watch what a server does: slots, queue, memory, what was saved.
    mlx-serve top
    mlx-serve top --once --json
stop (ask) Unload a model. Its conversations are found again when it is loaded again.
    mlx-serve stop qwen3:8b
pull (pull) Download a model into the Hugging Face cache, or resume doing so.
    mlx-serve pull qwen3:0.6b
    mlx-serve pull mlx-community/Qwen3-4B-4bit
convert (pull) Make MLX weights of a repository or a folder, quantized or not.
    mlx-serve convert Qwen/Qwen3-4B --quantize 4
    mlx-serve convert ./my-finetune writer --quantize 8
doctor (ask) Say which text keeps prompts from being reused, and how to mend it.
    mlx-serve doctor
    mlx-serve doctor --file requests.jsonl --model qwen3:8b
bench (bench) Measure what this machine does, beside mlx-lm. In three minutes at most, as a table to send.
    mlx-serve bench
    mlx-serve bench qwen3:4b --markdown > result.md
launch (launch) Start a coding agent that asks this server. The server is started too if none runs.
    mlx-serve launch claude
    mlx-serve launch codex --model qwen3:30b -- exec 'Explain this folder.'
config (config) Show the settings of `serve`, and where each comes from. A flag, a variable, the file or the default.
    mlx-serve config --port 9000
    mlx-serve config --template > ~/.config/mlx-serve/config.toml
completion (options) Print a script by which a shell completes commands and models.
    mlx-serve completion bash > ~/.local/share/bash-completion/completions/mlx-serve
    mlx-serve completion fish > ~/.config/fish/completions/mlx-serve.fish
cache (cache) Show a server's prefix tree, or what --cache-disk keeps. Without a command: `tree`.
    mlx-serve cache
cache list (cache) List each model's folder, its size, and whether a server has it open.
    mlx-serve cache list --json
cache tree (cache) Show the prefix tree of a running server. What is shared, where it lies, and how large it is.
    mlx-serve cache tree --depth 3
cache rm (cache) Delete the conversations of a model from the disk.
    mlx-serve cache rm --all
service (at_login) Have a server start when you log in. systemd or launchd starts it, with the settings of the file.
service install (at_login) Start a server now and at each login. Type it again after a change of settings.
    mlx-serve service install
service status (at_login) Say whether the server runs. The exit status is 1 if not.
    mlx-serve service status --json
service logs (at_login) Show the last 100 lines of the server's log.
    mlx-serve service logs --follow
service remove (at_login) End the server, and have it start no more.
    mlx-serve service remove
"""
"""One command a line: words, file, help; examples follow below."""

COMMANDS: Mapping[str, tuple[str, str, Sequence[str]]] = {
    words: (file, told, examples.split("\n    ")[1:])
    for words, file, told, examples in re.findall(r"^(\w.*?) \((\w+)\) (.*)((?:\n    .*)*)", _COMMANDS, re.MULTILINE)
}


_GROUPS = {
    "Talk and serve": "run serve pull list ps stop launch",
    "Look inside": "doctor top cache bench",
    "Models": "show create convert cp tag rm verify",
    "Set up": "config service completion",
}


class LazyCommands(TyperGroup):
    """The commands, each imported when it is named."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the first sentence of each command's help, which fits 80 columns."""
        for heading, names in _GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, _first_sentence(name)) for name in names.split()])

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Raises typer's error for an unknown name."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and load(command.name or ""), rest


def load(name: str) -> Any:
    """A command of `COMMANDS`, with its help and its examples."""
    group = typer.main.get_group(import_module(f"server.cli.{COMMANDS[name][0]}").app)
    command = group.commands[name]
    for below in [command, *getattr(command, "commands", {}).values()]:
        words = name if below is command else f"{name} {below.name}"
        below.help, below.epilog = COMMANDS[words][1], _epilog(examples_of(words))
        below.short_help = _first_sentence(words)
    return command


def _first_sentence(words: str) -> str:
    return COMMANDS[words][1].partition(".")[0]


def examples_of(name: str) -> Sequence[str]:
    """A command's examples; of a bare group, its first command's."""
    return COMMANDS[name][2] or examples_of(next(other for other in COMMANDS if other.startswith(f"{name} ")))


def _epilog(examples: Sequence[str]) -> str:
    r"""`\b` keeps the lines of the examples."""
    return "\n  ".join(["\b\nExample:" if len(examples) == 1 else "\b\nExamples:", *examples])


app = command_group(
    cls=LazyCommands,
    help="A local inference server on MLX that does not evaluate a token twice if it can be helped.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_epilog(("mlx-serve serve demo", "mlx-serve run demo")),
)
for _name, _told in COMMANDS.items():
    if " " not in _name:
        app.command(_name, help=_told[1])(lambda: None)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as version_of

        typer.echo(f"mlx-serve {version_of('mlx-serve')}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())
    else:
        return
    raise typer.Exit


def main() -> NoReturn:
    """Runs a command, and ends the process."""
    status = execute(sys.argv[1:])
    sys.stdout.flush()
    if "mlx.core" in sys.modules:
        # A thread that used a compiled MLX function takes the GIL once more when it dies, which may be after
        # `join` returned. If the interpreter is being torn down then, the process aborts: so nothing is torn down.
        logging.shutdown()
        os._exit(status)
    sys.exit(status)


def execute(arguments: Sequence[str]) -> int:
    """Runs one command; errors go to standard error."""
    if COMPLETE_VARIABLE in os.environ:
        completion_init()
    try:
        return int(app(list(arguments), "mlx-serve", standalone_mode=False) or 0)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        message = " ".join(error.format_message().split()).rstrip(".")
        command = context.command_path if context else f"mlx-serve{_named(arguments)}"
        told, status = f"{message}; see {command} --help", error.exit_code
    except (ConfigError, ModelError, StartError, DoctorError, FolderError) as error:
        told, status = str(error), 2 if isinstance(error, ConfigError) else 1
    typer.echo(f"mlx-serve: {told}", err=True)
    return status


def _named(arguments: Sequence[str]) -> str:
    """The command that arguments begin with, behind a space. A flag without its value does not say it."""
    found = (" ".join(arguments[:number]) for number in (2, 1))
    return next((f" {words}" for words in found if words in COMMANDS), "")
