"""The command line: `mlx-serve serve`, `run`, `list`, `pull` and `doctor`.

The flags of `serve` are made from the fields of `ServerConfig`, so there is nothing here to keep in step with it.
What a person can mend is told in one line on standard error: exit status 2 for wrong arguments, 1 for the rest.
MLX and transformers are imported only by the commands that need them: `--help`, `--version` and `list` are quick.
"""

import inspect
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from cache.errors import FolderUnsafe
from models.errors import ModelError
from models.names import resolve
from server.config import GIGABYTE, ConfigError, ServerConfig
from server.errors import DoctorError, StartError

app = typer.Typer(
    help="A local inference server on MLX that does not evaluate a token twice if it can be helped.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

MODEL_HELP = "'demo', a folder, a Hugging Face repository that was pulled, or a short name such as qwen3:0.6b."

_UNIT_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def main() -> NoReturn:
    """Runs the command that the process was started with, and ends the process."""
    status = execute(sys.argv[1:])
    sys.stdout.flush()
    if "mlx.core" in sys.modules:
        # A thread that used a compiled MLX function takes the GIL once more when it dies, which may be after
        # `join` returned. If the interpreter is being torn down then, the process aborts: so nothing is torn down.
        logging.shutdown()
        os._exit(status)
    sys.exit(status)


def execute(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit status; what went wrong is told on standard error."""
    try:
        return int(app(list(arguments), "mlx-serve", standalone_mode=False) or 0)
    except typer.TyperException as error:
        return _tell(_usage_message(error), error.exit_code)
    except ConfigError as error:
        return _tell(str(error), 2)
    except (ModelError, StartError, DoctorError, FolderUnsafe) as error:
        return _tell(str(error), 1)


def parse_size(text: str) -> int:
    """Returns a number of bytes from `8GB`, `512 MiB`, `1.5g` or `4096`; raises ConfigError.

    GB is 10^9 bytes and GiB is 2^30, and so on for the other units.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower(), re.ASCII)
    if match is None or match[2] not in _UNIT_BYTES:
        raise ConfigError(f"{text!r} is not a size; write it like 8GB, 512MB or 2GiB")
    return int(float(match[1]) * _UNIT_BYTES[match[2]])


def parse_size_per_day(text: str) -> int | None:
    """Returns a number of bytes from `200GB/day`, None from `none`; raises ConfigError."""
    if text.strip().lower() == "none":
        return None
    size, slash, unit = text.partition("/")
    try:
        if slash and unit.strip().lower() == "day":
            return parse_size(size)
    except ConfigError:
        pass
    raise ConfigError(f"{text!r} is not a size per day; write it like 200GB/day, or none for no limit")


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as version_of

        typer.echo(f"mlx-serve {version_of('mlx-serve')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _serve(**given: Any) -> None:
    """Serve a model over HTTP, with an OpenAI-compatible API."""
    config = config_from(given)
    if len(config.models) > 1:
        raise ConfigError(f"{len(config.models)} models were named; one model at a time for now")
    with _loading(config.models[0]):
        from server.cli.serve import serve

    raise typer.Exit(serve(config))


@app.command()
def run(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = "demo",
    system: Annotated[str, typer.Option(metavar="TEXT", help="A system message to start with.")] = "",
    context: Annotated[int | None, typer.Option(metavar="TOKENS", help="Longest conversation.")] = None,
    cache_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory for the conversation's state.")
    ] = None,
) -> None:
    """Chat with a model in the terminal."""
    config = config_from({"models": [model], "context_tokens": context, "cache_memory_bytes": cache_memory})
    with _loading(config.models[0]):
        from server.cli.chat import chat

    raise typer.Exit(chat(config, system))


@app.command("list")
def list_models() -> None:
    """List the models on this machine."""
    from server.cli.models import show_installed

    show_installed()


@app.command()
def pull(
    model: Annotated[str, typer.Argument(metavar="org/name[@revision]", help="Or a short name such as qwen3:0.6b.")],
) -> None:
    """Download a model into the Hugging Face cache, or resume doing so."""
    from server.cli.models import pull_with_progress

    pull_with_progress(model)


@app.command()
def doctor(
    url: Annotated[
        str | None, typer.Argument(metavar="URL", help="Address of a running server. Default: http://127.0.0.1:8080.")
    ] = None,
    file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Read recorded requests from JSON lines, without a server.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The key that the client sends: a key sees its own sessions.")
    ] = None,
    cache_salt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The cache_salt that the client sends, if it does.")
    ] = None,
    speed: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="With --file: prompt tokens per second, to tell seconds.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the same as JSON, for a program.")] = False,
) -> None:
    """Say which text keeps prompts from being reused, and how to mend it."""
    from server.doctor.fetch import DEFAULT_URL
    from server.doctor.report import examine_file, examine_server

    if speed is not None and not 0 < speed < math.inf:
        raise ConfigError(f"--speed is {speed}; it must be above 0")
    if file is None:
        examine_server(url or DEFAULT_URL, api_key, cache_salt, as_json=json)
    elif url is not None:
        raise ConfigError("give the address of a server or --file, not both")
    else:
        examine_file(Path(file), speed, as_json=json)


def config_from(given: dict[str, Any]) -> ServerConfig:
    """Returns the checked settings for what was given, by field name; None means not given. Raises ConfigError."""
    settings = {setting.name: setting for setting in fields(ServerConfig)}
    values = {name: _value(settings[name], value) for name, value in given.items() if value not in (None, [], ())}
    config = ServerConfig(**values)
    try:
        config.check()
    except ConfigError as error:
        raise ConfigError(_with_flag(str(error), settings)) from error
    return config


def _value(setting: "Field[Any]", value: Any) -> Any:
    if isinstance(value, str) and _is_size(setting):
        try:
            return parse_size(value) if setting.metadata["unit"] == "bytes" else parse_size_per_day(value)
        except ConfigError as error:
            raise ConfigError(f"{setting.metadata['flag']}: {error}") from error
    if setting.type is bool:
        # A switch is given to get what is not the default.
        return not setting.default
    return tuple(value) if isinstance(value, list) else value


def _with_flag(message: str, settings: "dict[str, Field[Any]]") -> str:
    """Returns a message about a field as one about the flag that sets it."""
    name, _, rest = message.partition(" ")
    return f"{settings[name].metadata['flag']} {rest}" if name in settings else message


def _parameter(setting: "Field[Any]") -> inspect.Parameter:
    """Returns what typer needs to know about one setting."""
    metadata = setting.metadata
    if metadata["flag"] == "MODEL":
        info: Any = typer.Argument(metavar="MODEL", help=f"{metadata['help']} Default: demo.")
        kind: Any = list[str] | None
    else:
        metavar = None if setting.type is bool else _metavar(setting)
        info = typer.Option(metadata["flag"], help=metadata["help"] + _default(setting), metavar=metavar)
        kind = setting.type if not _is_size(setting) else str
        kind = kind | None
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, info]
    )


def _is_size(setting: "Field[Any]") -> bool:
    return setting.metadata["unit"] in ("bytes", "bytes/day")


def _default(setting: "Field[Any]") -> str:
    """Returns what to add to the help text; that of a switch, or with a default of None, says itself what happens."""
    default: Any = setting.default
    if default is None or setting.type is bool:
        return ""
    if setting.metadata["unit"] == "bytes/day":
        shown = f"{default // GIGABYTE}GB/day"
    else:
        shown = f"{default // 2**20}MiB" if _is_size(setting) else default
    return f" Default: {shown}."


def _metavar(setting: "Field[Any]") -> str:
    if setting.metadata["choices"]:
        return "|".join(setting.metadata["choices"])
    if _is_size(setting):
        return "SIZE" if setting.metadata["unit"] == "bytes" else "SIZE/day"
    return (setting.metadata["unit"] or ("TEXT" if setting.type in (str, str | None) else "NUMBER")).upper()


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Gives `command` one parameter per setting, as typer reads them from a signature."""
    parameters = [_parameter(setting) for setting in fields(ServerConfig)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _usage_message(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "mlx-serve"
    message = " ".join(error.format_message().split()).rstrip(".")
    return f"{message}; see {command} --help"


@contextmanager
def _loading(model: str) -> Iterator[None]:
    """Tells a person at a terminal that something happens while MLX and transformers are imported."""
    from rich.console import Console

    # Else transformers advises to install PyTorch; it reads this when it is imported.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # A name that stands for nothing is told at once.
    resolve(model)
    console = Console()
    with console.status(f"Loading {model} …") if console.is_terminal else nullcontext():
        yield


def _tell(message: str, status: int) -> int:
    typer.echo(f"mlx-serve: {message}", err=True)
    return status


# Made last, because its flags need the functions above; listed first, because it is what most people want.
app.command("serve")(_with_settings(_serve))
app.registered_commands.insert(0, app.registered_commands.pop())
