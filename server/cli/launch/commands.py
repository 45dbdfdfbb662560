"""`mlx-serve launch`: finds or starts a server, runs an agent against it, and says what was saved."""

import contextlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import typer

from server.cli.config import load_model_config
from server.cli.launch.recipes import RECIPES, LaunchTarget, Recipe, as_shell, command_of, environment_of
from server.cli.launch.savings import savings_between
from server.cli.launch.servers import describe_target, find_running, look_at_sessions, measure_speed, started_server
from server.cli.repl.joined import Served
from server.cli.service.commands import own_program
from server.config import ConfigError
from server.errors import StartError


@dataclass(frozen=True)
class Launch:
    """What a person asked for."""

    client: str
    model: str | None
    api_key: str | None
    arguments: Sequence[str]
    """For the agent."""
    is_shown: bool = False
    """Whether the command is only shown."""


def launch(asked: Launch, urls: Sequence[str], runtime: Path, environment: Mapping[str, str]) -> int:
    """Runs the agent and returns its exit status; raises ConfigError, ModelError or StartError.

    `urls` are the servers that may be asked, `runtime` the folder in which they tell each other what they do.
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
    # As shells say it that a signal ended a program.
    return status if status >= 0 else 128 - status


@contextlib.contextmanager
def _interrupts_left_to_the_agent() -> Iterator[None]:
    """Has Ctrl-C reach the agent only. A handler, for what is ignored would be ignored by the agent as well."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """Has a closed terminal, or SIGTERM, end the agent and the server that was started for it as well."""
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
