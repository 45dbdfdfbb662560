"""The command line: its commands and errors.

A command's file is imported once the command is named, so that `--help` is quick. An error that a person can mend is
one line on standard error: exit status 2 for wrong arguments, 1 for the rest.
"""

import logging
import os
import signal
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.completion import completion_init  # type: ignore[attr-defined]
from typer.core import TyperGroup

from cache.budget import FolderError
from models.errors import ModelError
from server.app.config import ConfigError, StartError
from server.cli.options import COMPLETE_VARIABLE

COMMANDS: Mapping[str, Mapping[str, Any]] = tomllib.loads(
    Path(__file__).with_name("commands.toml").read_text(encoding="utf-8")
)
"""By its words; a command below another one has no group."""


_PLAIN: Mapping[str, Any] = {"add_completion": False, "rich_markup_mode": None}
"""Help is plain text."""


class _Commands(TyperGroup):
    """Shows the first sentence of each command's help, and imports a command once it is named."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for heading in dict.fromkeys(texts["group"] for texts in COMMANDS.values() if "group" in texts):
            with formatter.section(heading):
                names = [name for name, texts in COMMANDS.items() if texts.get("group") == heading]
                formatter.write_dl([(name, _first_sentence(name)) for name in names])

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        command = command and load(command.name or "")
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on a command decides
        return name, command, rest


class _Group(TyperGroup):
    """Commands below one. What names none of them is for the default one, if there is one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Without arguments and a default: the help."""
        default = COMMANDS[self.name or ""].get("default")
        is_ours = ctx.resilient_parsing or (args and (args[0] in ("-h", "--help") or args[0].isidentifier()))
        if default and not is_ours:
            args = [default, *args]
        return super().parse_args(ctx, args)


def load(name: str) -> Any:
    """A command of `COMMANDS`; one with commands below it is a group of those."""
    below = [words for words in COMMANDS if words.startswith(f"{name} ")] or [name]
    loaded = typer.Typer(
        cls=_Group, name=name, callback=_show_help, invoke_without_command=True, **_PLAIN, **_texts(name)
    )
    for words in below:
        file, _, function = COMMANDS[words]["function"].partition(".")
        own = getattr(import_module(f"server.cli.{file}"), function)
        loaded.command(words.rpartition(" ")[2], context_settings=COMMANDS[words].get("settings"), **_texts(words))(
            own
        )
    group: Any = typer.main.get_group(loaded)
    for words in below:
        parameters = {parameter.name: parameter for parameter in group.commands[words.rpartition(" ")[2]].params}
        for own, (metavar, help_text) in COMMANDS[words].get("parameters", {}).items():
            parameters[own].metavar, parameters[own].help = metavar or None, help_text
    return group.commands[name] if below == [name] else group


def _show_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _texts(words: str) -> dict[str, Any]:
    texts = COMMANDS[words]
    return {"help": texts["help"], "short_help": _first_sentence(words), "epilog": _epilog(texts["examples"])}


def _first_sentence(words: str) -> str:
    return str(COMMANDS[words]["help"]).partition(".")[0]


def _epilog(examples: Sequence[str]) -> str:
    r"""`\b` keeps the lines of the examples."""
    return "\n  ".join(["\b\nExample:" if len(examples) == 1 else "\b\nExamples:", *examples])


app = typer.Typer(
    cls=_Commands,
    **_PLAIN,
    help="A local inference server on MLX that does not evaluate a token twice if it can be helped.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_epilog(("mlx-serve serve demo", "mlx-serve run demo")),
)
for _name, _texts_of_command in COMMANDS.items():
    if "group" in _texts_of_command:
        app.command(_name, help=_texts_of_command["help"])(lambda: None)


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
    # Else transformers advises to install PyTorch; it reads this when it is imported.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    if COMPLETE_VARIABLE in os.environ:
        completion_init()
    try:
        return int(app(list(arguments), "mlx-serve", standalone_mode=False) or 0)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        message = " ".join(error.format_message().split()).rstrip(".")
        command = context.command_path if context else f"mlx-serve{_named(arguments)}"
        text, status = f"{message}; see {command} --help", error.exit_code
    except (ConfigError, ModelError, StartError, FolderError) as error:
        text, status = str(error), 2 if isinstance(error, ConfigError) else 1
    typer.echo(f"mlx-serve: {text}", err=True)
    return status


def _named(arguments: Sequence[str]) -> str:
    """The command that arguments begin with, after a space. A flag without its value does not say it."""
    commands = (" ".join(arguments[:number]) for number in (2, 1))
    return next((f" {words}" for words in commands if words in COMMANDS), "")
