"""The command line: one function per command of `mlx-serve`.

The flags of `serve` are made from the fields of `ServerConfig`, so no code here must follow them. An error that a
person can mend is one line on standard error: exit status 2 for wrong arguments, 1 for the rest. Only the commands
that need MLX and transformers import them: `--help`, `--version` and `list` are quick.
"""

import inspect
import logging
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from cache.budget import FolderError
from models.errors import ModelError
from models.fast_blas import find_compiler, load_fast_blas
from models.names import resolve, settle
from server.app.config import (
    KEY_VARIABLE,
    ConfigError,
    DoctorError,
    ServerConfig,
    StartError,
    is_size,
    parse_size,
    size_literal,
)
from server.cli.config import load_config, load_model_config, show_settings, template
from server.cli.gateway import DEFAULT_ADMIN_SOCKET, DEFAULT_LISTEN, Gateway, gateway_config
from server.cli.keys import held_back, interruptible
from server.cli.recipes import RECIPES
from server.cli.shell import epilog

if TYPE_CHECKING:
    from server.cli.ask import Served
    from server.cli.chat import Opening
    from server.cli.shell import CommandOutline

app = typer.Typer(
    help="A local inference server on MLX that does not evaluate a token twice if it can be helped.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=epilog(""),
)

_MODEL_DEFAULT = "Default: the pulled model that was used last, else demo."
MODEL_HELP = "'demo', a folder, a Hugging Face repository that was pulled, or a short name such as qwen3:0.6b."


def main() -> NoReturn:
    """Runs the command of the process, and ends the process."""
    status = execute(sys.argv[1:])
    sys.stdout.flush()
    if "mlx.core" in sys.modules:
        # A thread that used a compiled MLX function takes the GIL once more when it dies, which may be after
        # `join` returned. If the interpreter is being torn down then, the process aborts: so nothing is torn down.
        logging.shutdown()
        os._exit(status)
    sys.exit(status)


def execute(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit status; errors go to standard error."""
    try:
        return int(app(list(arguments), "mlx-serve", standalone_mode=False) or 0)
    except typer.TyperException as error:
        return _tell(_usage_message(error), error.exit_code)
    except ConfigError as error:
        return _tell(str(error), 2)
    except (ModelError, StartError, DoctorError, FolderError) as error:
        return _tell(str(error), 1)


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
    """Serve a model over HTTP to clients of OpenAI, Anthropic and Ollama."""
    config = load_model_config(given, os.environ)
    config = replace(config, models=tuple(map(settle, config.models)))
    for name in config.models[1:]:
        resolve(name)
    with _loading(config.models[0]) as fast_blas:
        from server.cli.serve import serve

    raise typer.Exit(serve(config, runtime_folder(os.environ, tempfile.gettempdir()), fast_blas))


def _config(*, as_json: bool, as_template: bool, **given: Any) -> None:
    """Show the settings of `serve`, and whether a flag, a variable or the file says so."""
    if as_template:
        typer.echo(template(), nl=False)
    else:
        show_settings(given, os.environ, as_json=as_json)


@app.command()
def run(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help=f"{MODEL_HELP} Default: the one that `serve` has.")
    ] = None,
    question: Annotated[
        list[str] | None,
        typer.Argument(metavar="QUESTION", help="Answer this and end; what comes through a pipe is added to it."),
    ] = None,
    system: Annotated[str, typer.Option(metavar="TEXT", help="A system message to start with.")] = "",
    context: Annotated[int | None, typer.Option(metavar="TOKENS", help="Longest conversation.")] = None,
    cache_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory for the conversation's state.")
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Load the model here, even if a server on this machine has it loaded.")
    ] = False,
    api_key: Annotated[
        str | None,
        typer.Option(metavar="TEXT", envvar=KEY_VARIABLE, help="The key of a server that has the model."),
    ] = None,
    no_history: Annotated[
        bool, typer.Option("--no-history", help="Do not keep what is typed for the arrow keys of the next time.")
    ] = False,
) -> None:
    """Chat with a model in the terminal, or ask it one question."""
    from server.cli.keys import keys_unseen

    # From the start: keys that come while the model is loaded are read at the first prompt.
    with nullcontext() if question else keys_unseen():
        given = {"models": model and [model], "context_tokens": context, "cache_memory_bytes": cache_memory}
        status = _run(given, " ".join(question or ()), system, api_key, is_local=local, keeps_history=not no_history)
    raise typer.Exit(status)


def _run(
    given: dict[str, Any], question: str, system: str, api_key: str | None, *, is_local: bool, keeps_history: bool
) -> int:
    from server.cli.chat import Opening
    from server.cli.repl.terminal import history_file

    config = load_model_config(given, os.environ)
    name = config.models[0]
    opening = Opening(system, question, history_file(os.environ) if keeps_history else None)
    # Only a model loaded here has these limits, and a server may have another model by a folder's name.
    limits = (given["context_tokens"], given["cache_memory_bytes"])
    wants_own = is_local or any(limit is not None for limit in limits) or Path(name).expanduser().is_dir()
    return _talk(config, None if wants_own else _find_served(name, api_key), api_key, opening)


def _talk(config: ServerConfig, served: "Served | None", api_key: str | None, opening: "Opening") -> int:
    """Talks with a model of a server, or with one loaded here, and returns the exit status."""
    from server.cli.chat import chat

    if served is not None:
        from server.cli.ask import JoinedModels

        return chat(JoinedModels(served, api_key), opening, f" · joined the server at {served.url}")
    from server.cli.stored import offer

    name = offer(config.models[0]) or settle(config.models[0])
    config = replace(config, models=(name, *config.models[1:]))
    with _loading(name):
        from server.cli.repl.local import LocalModels
    with LocalModels(config) as models:
        return chat(models, opening)


def _known_urls() -> list[str]:
    from server.app.memory_budget import running
    from server.doctor.report import DEFAULT_URL

    # A server of another user, or in a container, is known by the usual address only.
    known = [claim.url for claim in running(runtime_folder(os.environ, tempfile.gettempdir())) if claim.url]
    return list(dict.fromkeys([*known, DEFAULT_URL]))


def _usual_url() -> str:
    """Returns the usual address or, where this user's servers run only at others, the first of these."""
    *own, usual = _known_urls()
    return own[0] if own else usual


def _find_served(model: str, api_key: str | None) -> "Served | None":
    """Returns the model as a server on this machine has it loaded, if one has. Names a server that refuses the
    key.
    """
    from server.cli.ask import KeyNeeded, find_served

    try:
        return find_served(model, _known_urls(), api_key)
    except KeyNeeded as error:
        typer.echo(f"The server at {error} asks for a key; give it with --api-key to join it.", err=True)
        return None


@app.command("list")
def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """List the models on this machine."""
    from server.cli.models import show_installed

    show_installed(as_json=as_json)


_Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
_Force = Annotated[bool, typer.Option("--force", help="Without asking, and in place of what has the name.")]
_OwnName = Annotated[str, typer.Argument(metavar="NAME", help="A name of your own, such as writer or writer:v2.")]
_AnyModel = Annotated[str, typer.Argument(metavar="MODEL", help=f"{MODEL_HELP} Or a name of your own.")]


@app.command()
def show(
    model: _AnyModel,
    as_modelfile: Annotated[bool, typer.Option("--modelfile", help="Print a Modelfile that makes it.")] = False,
    as_json: _Json = False,
) -> None:
    """Show what a model is: weights, context, parameters, files."""
    from server.cli.stored import show as tell

    # Else transformers advises to install PyTorch; it reads this when it is imported.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    tell(model, as_modelfile=as_modelfile, as_json=as_json)


@app.command()
def cp(source: _AnyModel, name: _OwnName, force: _Force = False, as_json: _Json = False) -> None:
    """Give a model another name; its weights are shared."""
    from server.cli.stored import copy

    copy(source, name, replaces=force, as_json=as_json)


@app.command()
def tag(
    name: _OwnName,
    tag_name: Annotated[str, typer.Argument(metavar="TAG", help="What stands behind the colon, such as v2.")],
    force: _Force = False,
    as_json: _Json = False,
) -> None:
    """Give a name of your own another tag, which stays as it is when the name changes."""
    from server.cli.stored import tag as add

    add(name, tag_name, replaces=force, as_json=as_json)


@app.command()
def rm(model: _AnyModel, force: _Force = False, as_json: _Json = False) -> None:
    """Remove a name of your own, or the files of a repository that no name uses."""
    from server.cli.stored import remove

    remove(model, is_forced=force, as_json=as_json)


@app.command()
def verify(
    model: _AnyModel,
    remove_damaged: Annotated[
        bool, typer.Option("--remove-damaged", help="Remove what is damaged from the cache, to be pulled again.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Compare every file of a model with the hub's hash; the exit status is 1 if one is missing or damaged."""
    from server.cli.stored import check_files

    raise typer.Exit(check_files(model, removes_damaged=remove_damaged, as_json=as_json))


@app.command()
def create(
    name: _OwnName,
    file: Annotated[
        str,
        typer.Option("-f", "--file", metavar="FILE", help="A Modelfile, as Ollama has them; - is standard input."),
    ] = "Modelfile",
    as_json: _Json = False,
) -> None:
    """Make a model with a system prompt and parameters of your own from another, by a Modelfile."""
    from server.cli.stored import create as make

    make(name, file, as_json=as_json)


_Key = Annotated[
    str | None,
    typer.Option(metavar="TEXT", envvar=KEY_VARIABLE, help="The key of a server that asks for one."),
]


@app.command()
def ps(
    api_key: _Key = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """List the models that servers on this machine have loaded."""
    from server.cli.ask import show_loaded

    show_loaded(_known_urls(), api_key, as_json=as_json)


@app.command()
def top(
    url: Annotated[
        str | None,
        typer.Argument(metavar="URL", help="Address of a running server. Default: yours, or http://127.0.0.1:8080."),
    ] = None,
    api_key: _Key = None,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.2, max=3600, help="Time between two looks.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print what it does now, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: print the object of /v1/stats.")] = False,
) -> None:
    """Watch what a server does: slots, queue, memory, what was saved."""
    from server.cli.top import show_once, watch

    address = url or _usual_url()
    if once or as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        show_once(address, api_key, as_json=as_json)
    else:
        watch(address, api_key, interval)


@app.command()
def stop(
    model: Annotated[str, typer.Argument(metavar="NAME", help="A loaded model, as `mlx-serve ps` shows it.")],
    api_key: _Key = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Unload a model; its conversations are found again when it is loaded again."""
    from server.cli.ask import unload

    unload(model, _known_urls(), api_key, as_json=as_json)


@app.command()
def pull(
    model: Annotated[
        str,
        typer.Argument(
            metavar="org/name[@revision]",
            help="Or its address on the hub, or a short name such as qwen3:0.6b, or a family such as qwen3.",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for each step, for programs.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Download even what this machine has no memory for.")
    ] = False,
) -> None:
    """Download a model into the Hugging Face cache, or resume doing so."""
    from server.cli.stored import pull_for_person

    pull_for_person(model, as_json=as_json, is_forced=force)


@app.command()
def doctor(
    url: Annotated[
        str | None,
        typer.Argument(metavar="URL", help="Address of a running server. Default: yours, or http://127.0.0.1:8080."),
    ] = None,
    file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Read recorded requests from a file of JSON lines instead.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            envvar=KEY_VARIABLE,
            help="The key that the client sends: a key sees its own sessions.",
        ),
    ] = None,
    cache_salt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The cache_salt that the client sends, if it does.")
    ] = None,
    speed: Annotated[
        float | None,
        typer.Option(metavar="NUMBER", help="With --file: prompt tokens per second, to show seconds too."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the same as JSON, for a program.")] = False,
) -> None:
    """Say which text keeps prompts from being reused, and how to mend it."""
    from server.doctor.report import examine_file, examine_server

    if speed is not None and not 0 < speed < math.inf:
        raise ConfigError(f"--speed is {speed}; it must be above 0")
    if file is None:
        examine_server(url or _usual_url(), api_key, cache_salt, as_json=json)
    elif url is not None:
        raise ConfigError("give the address of a server or --file, not both")
    else:
        examine_file(Path(file), speed, as_json=json)


@app.command("gateway-config")
def print_gateway_config(
    replica: Annotated[
        list[str] | None, typer.Option(metavar="HOST:PORT", help="Address of a server; give this once for each.")
    ] = None,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address that clients use.")] = DEFAULT_LISTEN,
    certificate: Annotated[
        str | None, typer.Option(metavar="FILE", help="PEM file of certificate and key, to serve HTTPS.")
    ] = None,
    buffer: Annotated[
        str, typer.Option(metavar="SIZE", help="How much of a body HAProxy keeps to look for the session.")
    ] = "1MiB",
    admin_socket: Annotated[
        str, typer.Option(metavar="PATH", help="Socket for commands to HAProxy, such as to add a server.")
    ] = DEFAULT_ADMIN_SOCKET,
) -> None:
    """Print the configuration for HAProxy in front of several servers."""
    gateway = Gateway(tuple(replica or ()), listen, admin_socket, parse_size(buffer), certificate)
    typer.echo(gateway_config(gateway), nl=False)


cache_app = typer.Typer(
    help="Show the prefix tree of a running server, or what --cache-disk keeps. Without a command: `tree`.",
    invoke_without_command=True,
    epilog=epilog("cache"),
)
app.add_typer(cache_app, name="cache")

_CacheDir = Annotated[str | None, typer.Option(metavar="TEXT", help="The folder that servers have as --cache-dir.")]


@cache_app.callback()
def _cache(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        show_cache_tree()


@cache_app.command("list")
def list_cache(
    cache_dir: _CacheDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List each model's folder, its size, and whether a server has it open."""
    from server.cli.cache import show

    show(_cache_folder(cache_dir), as_json=as_json)


@cache_app.command("tree")
def show_cache_tree(
    url: Annotated[
        str | None,
        typer.Argument(metavar="URL", help="Address of a running server. Default: yours, or http://127.0.0.1:8080."),
    ] = None,
    api_key: _Key = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Where several models are loaded.")] = None,
    namespace: Annotated[str | None, typer.Option(metavar="TEXT", help="Another one, for the owner.")] = None,
    depth: Annotated[int | None, typer.Option(metavar="NUMBER", min=1, help="How many edges deep to go.")] = None,
    limit: Annotated[int, typer.Option(metavar="NUMBER", min=1, max=10_000, help="The most edges to list.")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print the object of /v1/cache.")] = False,
) -> None:
    """Show the prefix tree of a running server: what is shared, where it lies, and how large it is."""
    from server.cli.top import show_tree

    query: dict[str, str | int] = {"limit": limit}
    query |= {name: value for name, value in (("model", model), ("namespace", namespace)) if value is not None}
    show_tree(url or _usual_url(), api_key, query, depth, as_json=as_json)


@cache_app.command("rm")
def remove_cache(
    folders: Annotated[list[str] | None, typer.Argument(metavar="FOLDER", help="As `cache list` names it.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Delete every folder.")] = False,
    cache_dir: _CacheDir = None,
) -> None:
    """Delete the conversations of a model from the disk."""
    from server.cli.cache import remove_folders

    if bool(folders) == everything:
        raise ConfigError("give the folders to remove, or --all")
    remove_folders(folders or [], _cache_folder(cache_dir), everything=everything)


@app.command(context_settings={"ignore_unknown_options": True})
def launch(
    client: Annotated[str, typer.Argument(metavar="|".join(RECIPES), help="The agent to start.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGUMENTS", help="For the agent; behind -- if they begin with -."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help=f"{MODEL_HELP} Default: the one that `serve` has.")
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Show the command, and start nothing.")] = False,
    api_key: _Key = None,
) -> None:
    """Start a coding agent that asks this server, which is started too if none runs."""
    from server.cli.launch import Launch
    from server.cli.launch import launch as start

    asked = Launch(client, model, api_key, arguments or (), show)
    runtime = runtime_folder(os.environ, tempfile.gettempdir())
    raise typer.Exit(start(asked, _known_urls(), runtime, os.environ))


service_app = typer.Typer(
    help="Have a server start when you log in, by systemd or launchd, with the settings of the file.",
    invoke_without_command=True,
    epilog=epilog("service"),
)
app.add_typer(service_app, name="service")


@service_app.callback()
def _service(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@service_app.command("install")
def install_service() -> None:
    """Start a server now and at each login; again after a change of settings."""
    from server.cli.at_login import install

    install(os.environ)


@service_app.command("status")
def show_service(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Say whether the server runs; the exit status is 1 if not."""
    from server.cli.at_login import show_state

    raise typer.Exit(show_state(os.environ, as_json=as_json))


@service_app.command("logs")
def show_service_log(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
) -> None:
    """Show the last 100 lines of the server's log."""
    from server.cli.at_login import show_log

    raise typer.Exit(show_log(os.environ, follow=follow))


@service_app.command("remove")
def remove_service() -> None:
    """End the server, and have it start no more."""
    from server.cli.at_login import remove

    remove(os.environ)


def _cache_folder(cache_dir: str | None) -> str:
    return load_config({"cache_dir": cache_dir}, os.environ).cache_dir


def runtime_folder(environment: Mapping[str, str], temporary: str) -> Path:
    """Returns this user's folder for the claims of running servers; it need not exist."""
    runtime = environment.get("XDG_RUNTIME_DIR", "")
    return Path(runtime) / "mlx-serve" if runtime else Path(temporary) / f"mlx-serve-{os.geteuid()}"


def _parameter(setting: "Field[Any]") -> inspect.Parameter:
    metadata = setting.metadata
    if metadata["flag"] == "MODEL":
        info: Any = typer.Argument(metavar="MODEL", help=f"{metadata['help']} {_MODEL_DEFAULT}")
        kind: Any = list[str] | None
    else:
        metavar = None if setting.type is bool else _metavar(setting)
        info = typer.Option(metadata["flag"], help=metadata["help"] + _default(setting), metavar=metavar)
        kind = _option_type(setting) | None
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, info]
    )


def _option_type(setting: "Field[Any]") -> Any:
    if setting.type == tuple[str, ...]:
        return list[str]
    return str if is_size(setting) else setting.type


def _default(setting: "Field[Any]") -> str:
    """Returns what to add to the help text; nothing for a switch or a default of None, whose own text says it."""
    default: Any = setting.default
    if default is None or default == () or setting.type is bool:
        return ""
    shown = size_literal(setting, default) if is_size(setting) else default
    return f" Default: {shown}."


def _metavar(setting: "Field[Any]") -> str:
    if setting.metadata["choices"]:
        return "|".join(setting.metadata["choices"])
    if is_size(setting):
        return "SIZE" if setting.metadata["unit"] == "bytes" else "SIZE/day"
    return (setting.metadata["unit"] or ("TEXT" if setting.type in (str, str | None) else "NUMBER")).upper()


def _with_settings(command: Callable[..., None], *others: inspect.Parameter) -> Callable[..., None]:
    """Gives `command` one parameter per setting, and `others`, in the signature that typer reads."""
    parameters = [*(_parameter(setting) for setting in fields(ServerConfig)), *others]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _switch(name: str, flag: str, help_text: str) -> inspect.Parameter:
    annotation = Annotated[bool, typer.Option(flag, help=help_text)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)


def _usage_message(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "mlx-serve"
    message = " ".join(error.format_message().split()).rstrip(".")
    return f"{message}; see {command} --help"


@contextmanager
def _loading(model: str) -> Iterator[str | None]:
    """Tells a person at a terminal that MLX and transformers are being imported.

    Yields the name of the fast BLAS that was loaded for MLX, if there is one.
    """
    from rich.console import Console

    # Else transformers advises to install PyTorch; it reads this when it is imported.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # Report an unknown name at once.
    resolve(model)
    console = Console()
    with interruptible():
        # Before any other thread exists: it could take a Ctrl-C that is held back.
        fast_blas = _prepare_mlx()
        with console.status(f"Loading {model} …") if console.is_terminal else nullcontext():
            # Ctrl-C would leave the terminal without a cursor.
            console.show_cursor(True)
            yield fast_blas


def _prepare_mlx() -> str | None:
    """Imports MLX without losing a Ctrl-C; returns the name of its fast BLAS, if any."""
    with held_back():
        fast_blas = load_fast_blas()
    find_compiler(held_back)
    return fast_blas


def _tell(message: str, status: int) -> int:
    typer.echo(f"mlx-serve: {message}", err=True)
    return status


# Made last, because their flags need the functions above; listed first, because `serve` is what most people want.
app.command("serve")(_with_settings(_serve))
app.registered_commands.insert(0, app.registered_commands.pop())
app.command("config")(
    _with_settings(
        _config,
        _switch("as_json", "--json", "Print JSON, for programs."),
        _switch("as_template", "--template", "Print a file of all settings, to be edited."),
    )
)


@app.command()
def completion(shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="The shell to be told.")]) -> None:
    """Print a script by which a shell completes commands, flags and models."""
    from server.cli.shell import SCRIPTS

    if shell not in SCRIPTS:
        raise ConfigError(f"there is no completion for {shell!r}; there is one for {', '.join(SCRIPTS)}")
    typer.echo(SCRIPTS[shell](_outline()), nl=False)


@app.command()
def man() -> None:
    """Print the manual page, for `man`."""
    from importlib.metadata import version as version_of

    from server.cli.shell import manual

    typer.echo(manual(_outline(), version_of("mlx-serve")), nl=False)


def _outline() -> "CommandOutline":
    from server.cli.shell import outline

    return outline(typer.main.get_command(app))


def _add_examples(group: typer.Typer, prefix: str = "") -> None:
    for command in group.registered_commands:
        assert command.name is not None or command.callback is not None
        name = command.name or getattr(command.callback, "__name__", "")
        command.epilog = epilog(f"{prefix}{name}")


_add_examples(app)
_add_examples(cache_app, "cache ")
_add_examples(service_app, "service ")
