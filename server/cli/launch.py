"""`mlx-serve launch`: finds or starts a server, runs an agent against it, and says what was saved.

A server that is started for the agent ends with the agent.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn
from urllib.parse import quote

import httpx2
import typer

from server.app import memory_budget
from server.app.config import ConfigError, StartError
from server.cli.ask import AskedServer, KeyNeeded, Served, find_served, known_urls
from server.cli.at_login import own_program
from server.cli.config import load_model_config
from server.cli.options import MODEL_HELP, Key, command_group, model_names
from server.cli.recipes import (
    RECIPES,
    LaunchTarget,
    Recipe,
    SessionCounts,
    as_shell,
    changed,
    command_of,
    count_sessions,
    environment_of,
    prompt_speed,
    savings_between,
)

app = command_group()

ASK_SECONDS = 10.0
POLL_SECONDS = 0.2
STOP_SECONDS = 60.0
"""For writing state to the disk."""


def find_running(model: str, urls: Sequence[str], key: str | None) -> Served | None:
    """Finds a server with the model loaded. Raises StartError where one asks for a key."""
    try:
        return find_served(model, urls, key)
    except KeyNeeded as error:
        raise StartError(f"the server at {error} asks for a key; give it with --api-key") from error


@contextlib.contextmanager
def started_server(command: Sequence[str], runtime: Path, tell: Callable[[str], object]) -> Iterator[str]:
    """Yields the address of a started server, and ends it. Raises StartError with the server's own words.

    `runtime` is the folder of claims.
    """
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
    """Returns the model as an agent must see it."""
    models = (_get(served.url, "/v1/models", key) or {}).get("data", [])
    found: dict[str, Any] = next((model for model in models if model.get("id") == served.model), {})
    return LaunchTarget(served.url, served.model, int(found.get("context_length") or 0), key or "")


def look_at_sessions(target: LaunchTarget) -> SessionCounts:
    """Returns the server's counts; none where the server does not say."""
    try:
        return count_sessions((_get(target.url, "/v1/sessions", target.key) or {})["data"])
    except (KeyError, TypeError):
        return {}


def measure_speed(target: LaunchTarget, before: SessionCounts, after: SessionCounts) -> float:
    """Returns the prompt tokens per second of sessions with new requests."""
    turns: list[Any] = []
    for namespace, name in changed(before, after):
        query = httpx2.QueryParams({"namespace": namespace} if namespace and not target.key else {})
        session = _get(target.url, f"/v1/sessions/{quote(name, safe='')}?{query}", target.key)
        turns += (session or {}).get("turns") or []
    try:
        return prompt_speed(turns)
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
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help=f"{MODEL_HELP} Default: the one that `serve` has.",
            autocompletion=model_names,
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Show the command, and start nothing.")] = False,
    api_key: Key = None,
) -> None:
    asked = Launch(client, model, api_key, arguments or (), show)
    raise typer.Exit(launch(asked, known_urls(), memory_budget.runtime_folder(os.environ), os.environ))


def launch(asked: Launch, urls: Sequence[str], runtime: Path, environment: Mapping[str, str]) -> int:
    """Runs the agent and returns its exit status. Raises ConfigError, ModelError or StartError.

    `urls` are the servers to ask, `runtime` the folder of claims.
    """
    recipe = RECIPES.get(asked.client)
    if recipe is None:
        raise ConfigError(f"there is no client {asked.client!r}; there are {', '.join(RECIPES)}")
    config = load_model_config({"models": asked.model and [asked.model]}, environment)
    asked = replace(asked, model=config.models[0], api_key=asked.api_key or config.api_key)
    if asked.is_shown:
        typer.echo(as_shell(recipe, _likely_target(asked, urls), asked.arguments))
        return 0
    if shutil.which(recipe.program, path=environment.get("PATH")) is None:
        raise StartError(f"{recipe.title} is not installed: there is no {recipe.program}; {recipe.advice}")
    with _ended_in_order(), _server(asked, urls, runtime) as target:
        return _run(recipe, target, asked.arguments, environment)


def _likely_target(asked: Launch, urls: Sequence[str]) -> LaunchTarget:
    served = find_running(asked.model or "", urls, asked.api_key)
    if served is not None:
        return describe_target(served, asked.api_key)
    return LaunchTarget(urls[-1], asked.model or "", 0, asked.api_key or "")


@contextlib.contextmanager
def _server(asked: Launch, urls: Sequence[str], runtime: Path) -> Iterator[LaunchTarget]:
    model = asked.model or ""
    served = find_running(model, urls, asked.api_key)
    if served is not None:
        _tell(f"Asking the server at {served.url}.")
        yield describe_target(served, asked.api_key)
        return
    _tell(f"Starting a server with {model} …")
    command = [*own_program(sys.argv[0]), "serve", model, "--port", "0"]
    with started_server(command, runtime, _tell) as url:
        found = find_running(model, [url], asked.api_key) or Served(url, model)
        yield describe_target(found, asked.api_key)


def _run(recipe: Recipe, target: LaunchTarget, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    before = look_at_sessions(target)
    with _interrupts_left_to_the_agent():
        status = subprocess.run(
            command_of(recipe, target, arguments), env=environment_of(recipe, target, environment), check=False
        ).returncode
    after = look_at_sessions(target)
    _tell(savings_between(before, after, measure_speed(target, before, after)).describe())
    # The shell's exit status of a program ended by a signal.
    return status if status >= 0 else 128 - status


@contextlib.contextmanager
def _interrupts_left_to_the_agent() -> Iterator[None]:
    """By a handler: the agent would inherit an ignored signal."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """Makes a closed terminal, or SIGTERM, also end the agent and its server."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, _leave) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _leave(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def _tell(text: str) -> None:
    # Standard output is the agent's.
    typer.echo(text, err=True)
