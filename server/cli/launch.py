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
from pathlib import Path
from typing import Annotated, Any

import typer

from server.app import memory_budget
from server.app.config import ConfigError, StartError
from server.cli import recipes
from server.cli.ask import AskedServer, find_served, known_urls
from server.cli.at_login import own_program
from server.cli.config import load_model_config
from server.cli.keys import handling, leave
from server.cli.options import USUAL_MODEL, Key
from server.cli.recipes import RECIPES, Recipe, Served

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
        if url and AskedServer(url, None, ASK_SECONDS).find("GET", "/health") is not None:
            return url
        time.sleep(POLL_SECONDS)
    log.seek(0)
    lines = [line.strip() for line in log if line.strip()]
    raise StartError((lines[-1] if lines else "it said nothing").removeprefix("mlx-serve: "))


def read_totals(served: Served) -> Mapping[str, float]:
    """Sums of the server's requests so far; none where the server does not tell them."""
    try:
        totals: Mapping[str, float] = AskedServer(served.url, served.key, ASK_SECONDS).get("/v1/stats")["totals"]
    except (StartError, KeyError, TypeError):
        return {}
    return totals


def launch(
    client: Annotated[str, typer.Argument(autocompletion=lambda: list(RECIPES))],
    arguments: Annotated[list[str] | None, typer.Argument()] = None,
    model: Annotated[str | None, typer.Option(**USUAL_MODEL)] = None,
    show: Annotated[bool, typer.Option("--show")] = False,
    api_key: Key = None,
) -> None:
    """Runs the agent; its exit status is ours. Raises ConfigError, ModelError or StartError."""
    recipe = RECIPES.get(client)
    if recipe is None:
        raise ConfigError(f"there is no client {client!r}; there are {', '.join(RECIPES)}")
    config, urls = load_model_config({"models": model and [model]}, os.environ), known_urls()
    name, key = config.models[0], api_key or config.api_key
    if not show and shutil.which(recipe.program) is None:
        raise StartError(f"{recipe.title} is not installed: there is no {recipe.program}; {recipe.advice}")
    # A closed terminal, or SIGTERM, also ends the agent and its server.
    with handling(leave, signal.SIGTERM, signal.SIGHUP), contextlib.ExitStack() as stack:
        served = find_served(name, urls, key)
        if show:
            target = served or Served(urls[-1], name, key=key or "")
            typer.echo(recipes.as_shell(recipe, target, arguments or ()))
            return
        if served is None:
            _tell(f"Starting a server with {name} …")
            command = [*own_program(sys.argv[0]), "serve", name, "--port", "0"]
            url = stack.enter_context(started_server(command, memory_budget.runtime_folder(os.environ), _tell))
            served = find_served(name, [url], key) or Served(url, name, key=key or "")
        else:
            _tell(f"Asking the server at {served.url}.")
        raise typer.Exit(_run(recipe, served, arguments or ()))


def _run(recipe: Recipe, served: Served, arguments: Sequence[str]) -> int:
    before = read_totals(served)
    command, seen = recipes.command_of(recipe, served, arguments), recipes.environment_of(recipe, served, os.environ)
    # Ctrl-C is left to the agent, by a handler: the agent would inherit an ignored signal.
    with handling(lambda *_: None, signal.SIGINT):
        status = subprocess.run(command, env=seen, check=False).returncode
    _tell(recipes.savings_between(before, read_totals(served)))
    # The shell's exit status of a program ended by a signal.
    return status if status >= 0 else 128 - status


def _tell(text: str) -> None:
    # Standard output is the agent's.
    typer.echo(text, err=True)
