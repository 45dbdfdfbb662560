"""`mlx-serve launch`: runs an agent against a server, and says what was saved."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer

from server.app import memory_budget
from server.app.config import ConfigError, StartError
from server.cli import recipes
from server.cli.ask import AskedServer, Served, find_served, known_urls
from server.cli.at_login import own_program
from server.cli.config import load_model_config
from server.cli.keys import handling, leave
from server.cli.options import USUAL_MODEL, Key, command_group
from server.cli.recipes import RECIPES, LaunchTarget, Recipe, SessionCounts

app = command_group()

ASK_SECONDS = 10.0
POLL_SECONDS = 0.2
STOP_SECONDS = 60.0


@contextlib.contextmanager
def started_server(command: Sequence[str], runtime: Path, tell: Callable[[str], object]) -> Iterator[str]:
    """Yields the address of a started server, and ends it. Raises StartError with the server's own words."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        # The server gets its own session, so that Ctrl-C reaches the agent alone.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        try:
            yield _wait_for(process, runtime, log)
        finally:
            tell("Ending the server …")
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            process.kill()
            process.wait()


def _wait_for(process: "subprocess.Popen[bytes]", runtime: Path, log: Any) -> str:
    while process.poll() is None:
        url = next((claim.url for claim in memory_budget.running(runtime) if claim.pid == process.pid), "")
        if url and _get(url, "/health", None) is not None:
            return url
        time.sleep(POLL_SECONDS)
    log.seek(0)
    lines = [line.strip() for line in log if line.strip()]
    raise StartError((lines[-1] if lines else "it said nothing").removeprefix("mlx-serve: "))


def _get(url: str, path: str, key: str | None) -> dict[str, Any] | None:
    try:
        found = AskedServer(url, key, ASK_SECONDS).get(path)
    except StartError:
        return None
    return found if isinstance(found, dict) else None


def describe_target(served: Served, key: str | None) -> LaunchTarget:
    """The model as an agent must see it."""
    models = (_get(served.url, "/v1/models", key) or {}).get("data", [])
    found: dict[str, Any] = next((model for model in models if model.get("id") == served.model), {})
    return LaunchTarget(served.url, served.model, int(found.get("context_length") or 0), key or "")


def look_at_sessions(target: LaunchTarget) -> SessionCounts:
    """The sessions' counts, if the server gives them."""
    try:
        return recipes.count_sessions((_get(target.url, "/v1/sessions", target.key) or {})["data"])
    except (KeyError, TypeError):
        return {}


def measure_speed(target: LaunchTarget, before: SessionCounts, after: SessionCounts) -> float:
    """Prompt tokens per second of sessions with new requests."""
    turns: list[Any] = []
    for namespace, name in recipes.changed(before, after):
        query = urlencode({"namespace": namespace} if namespace and not target.key else {})
        session = _get(target.url, f"/v1/sessions/{quote(name, safe='')}?{query}", target.key)
        turns += (session or {}).get("turns") or []
    try:
        return recipes.prompt_speed(turns)
    except (KeyError, TypeError):
        return 0.0


@dataclass(frozen=True)
class Launch:
    """What a person asked for."""

    client: str
    model: str | None
    api_key: str | None
    arguments: Sequence[str]
    is_shown: bool = False


@app.command("launch", context_settings={"ignore_unknown_options": True})
def _launch(
    client: Annotated[
        str,
        typer.Argument(metavar="|".join(RECIPES), help="The agent to start.", autocompletion=lambda: list(RECIPES)),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGUMENTS", help="For the agent; behind -- if they begin with -."),
    ] = None,
    model: Annotated[str | None, typer.Option(**USUAL_MODEL)] = None,
    show: Annotated[bool, typer.Option("--show", help="Show the command, and start nothing.")] = False,
    api_key: Key = None,
) -> None:
    asked = Launch(client, model, api_key, arguments or (), show)
    raise typer.Exit(launch(asked, known_urls(), memory_budget.runtime_folder(os.environ), os.environ))


def launch(asked: Launch, urls: Sequence[str], runtime: Path, environment: Mapping[str, str]) -> int:
    """Runs the agent and returns its exit status. Raises ConfigError, ModelError or StartError."""
    recipe = RECIPES.get(asked.client)
    if recipe is None:
        raise ConfigError(f"there is no client {asked.client!r}; there are {', '.join(RECIPES)}")
    config = load_model_config({"models": asked.model and [asked.model]}, environment)
    model, key = config.models[0], asked.api_key or config.api_key
    if not asked.is_shown and shutil.which(recipe.program, path=environment.get("PATH")) is None:
        raise StartError(f"{recipe.title} is not installed: there is no {recipe.program}; {recipe.advice}")
    # A closed terminal, or SIGTERM, also ends the agent and its server.
    with handling(leave, signal.SIGTERM, signal.SIGHUP), contextlib.ExitStack() as stack:
        served = find_served(model, urls, key)
        if asked.is_shown:
            target = describe_target(served, key) if served else LaunchTarget(urls[-1], model, key=key or "")
            typer.echo(recipes.as_shell(recipe, target, asked.arguments))
            return 0
        if served is None:
            _tell(f"Starting a server with {model} …")
            command = [*own_program(sys.argv[0]), "serve", model, "--port", "0"]
            url = stack.enter_context(started_server(command, runtime, _tell))
            served = find_served(model, [url], key) or Served(url, model)
        else:
            _tell(f"Asking the server at {served.url}.")
        return _run(recipe, describe_target(served, key), asked.arguments, environment)


def _run(recipe: Recipe, target: LaunchTarget, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    before = look_at_sessions(target)
    command, seen = recipes.command_of(recipe, target, arguments), recipes.environment_of(recipe, target, environment)
    # Ctrl-C is left to the agent, by a handler: the agent would inherit an ignored signal.
    with handling(lambda *_: None, signal.SIGINT):
        status = subprocess.run(command, env=seen, check=False).returncode
    after = look_at_sessions(target)
    _tell(recipes.savings_between(before, after, measure_speed(target, before, after)).describe())
    # The shell's exit status of a program ended by a signal.
    return status if status >= 0 else 128 - status


def _tell(text: str) -> None:
    # Standard output is the agent's.
    typer.echo(text, err=True)
