"""`mlx-serve launch`: runs a coding agent against a server. Nothing is written into an agent's own configuration."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from models.names import BUILT_IN
from models.texts import grouped
from server.app import memory_budget
from server.app.config import ConfigError, StartError
from server.app.log_events import percent_text, seconds_text
from server.cli.ask import AskedServer, Served, find_served, known_urls
from server.cli.at_login import own_program
from server.cli.config import load_model_config
from server.cli.keys import handling, leave
from server.cli.options import USUAL_MODEL, Key

ASK_SECONDS = 10.0
POLL_SECONDS = 0.2
STOP_SECONDS = 60.0

NO_KEY = "none"
"""For agents that require a key, if the server requires none."""
CODEX_KEY = "MLX_LAUNCH_KEY"
"""Codex takes the key from this variable."""
COMPACT_FROM_TOKENS = 100_000
"""With less context Claude Code ignores `CLAUDE_CODE_AUTO_COMPACT_WINDOW`."""
LONGEST_ANSWER_TOKENS = 32_000

Variables = Mapping[str, str | None]
"""None removes the shell's variable."""

# Standard output is the agent's.
_tell = partial(typer.echo, err=True)


@dataclass(frozen=True)
class _Recipe:
    title: str
    program: str
    install: str
    start: Callable[[Served], tuple[Variables, Sequence[str]]]
    """Makes the variables, and the first arguments."""


def _claude(target: Served) -> tuple[Variables, Sequence[str]]:
    sizes = {f"ANTHROPIC_DEFAULT_{size}_MODEL": target.model for size in ("HAIKU", "SONNET", "OPUS")}
    window = str(target.context_tokens)
    variables = {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": target.key or NO_KEY,
        # A key of Anthropic's is not for this server.
        "ANTHROPIC_API_KEY": None,
        "ANTHROPIC_MODEL": target.model,
        **sizes,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        **({"CLAUDE_CODE_AUTO_COMPACT_WINDOW": window} if target.context_tokens >= COMPACT_FROM_TOKENS else {}),
    }
    return variables, ()


def _codex(target: Served) -> tuple[Variables, Sequence[str]]:
    provider = {"name": "mlx-serve", "base_url": f"{target.url}/v1", "wire_api": "responses"}
    if target.key:
        provider["env_key"] = CODEX_KEY
    # The texts of JSON are texts of TOML.
    table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in provider.items())
    settings = [f"model_providers.mlx={{{table}}}", 'model_provider="mlx"', f"model={json.dumps(target.model)}"]
    settings += [f"model_context_window={target.context_tokens}"] if target.context_tokens else []
    arguments = [part for setting in settings for part in ("-c", setting)]
    return {CODEX_KEY: target.key} if target.key else {}, arguments


def _opencode(target: Served) -> tuple[Variables, Sequence[str]]:
    context = target.context_tokens
    limit = {"limit": {"context": context, "output": min(LONGEST_ANSWER_TOKENS, context // 4)}} if context else {}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "mlx-serve",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": target.key or NO_KEY},
        "models": {target.model: limit},
    }
    model = f"mlx/{target.model}"
    config = {"provider": {"mlx": provider}, "model": model, "small_model": model}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}, ()


def _aider(target: Served) -> tuple[Variables, Sequence[str]]:
    variables = {"OPENAI_API_BASE": f"{target.url}/v1", "OPENAI_API_KEY": target.key or NO_KEY}
    # aider warns about a model without a known price, and asks whether to open a page about it.
    return variables, ("--model", f"openai/{target.model}", "--no-show-model-warnings")


NODE = " (npm comes with Node.js)"
RECIPES: Mapping[str, _Recipe] = {
    "claude": _Recipe("Claude Code", "claude", f"npm install -g @anthropic-ai/claude-code{NODE}", _claude),
    "codex": _Recipe("Codex", "codex", f"npm install -g @openai/codex{NODE}", _codex),
    "opencode": _Recipe("opencode", "opencode", f"npm install -g opencode-ai{NODE}", _opencode),
    "aider": _Recipe("aider", "aider", "uv tool install aider-chat, or pipx install aider-chat", _aider),
}


def environment_of(recipe: _Recipe, target: Served, environment: Mapping[str, str]) -> dict[str, str]:
    """The agent's environment, given the shell's."""
    return {name: value for name, value in {**environment, **recipe.start(target)[0]}.items() if value is not None}


def command_of(recipe: _Recipe, target: Served, rest: Sequence[str]) -> list[str]:
    """The command line; a person adds `rest`."""
    return [recipe.program, *recipe.start(target)[1], *rest]


def as_shell(recipe: _Recipe, target: Served, rest: Sequence[str]) -> str:
    """A shell line that starts the agent in the same way."""
    variables, _ = recipe.start(target)
    unset = [f"-u {name}" for name, value in variables.items() if value is None]
    words = [f"{name}={shlex.quote(value)}" for name, value in variables.items() if value is not None]
    start = ["env", *unset, *words] if words or unset else []
    return " ".join([*start, shlex.join(command_of(recipe, target, rest))])


def savings_between(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """One line on what was reused between two `totals` of `/v1/stats`."""
    names = ("cached_tokens", "evaluated_tokens", "saved_seconds")
    cached, evaluated, seconds = (max(after.get(name, 0) - before.get(name, 0), 0) for name in names)
    total = int(cached + evaluated)
    if not total:
        return "Nothing was asked of the server."
    saved = f", which saved about {seconds_text(seconds)}" if seconds >= 1 else ""
    share = f"{grouped(int(cached))} of {grouped(total)} prompt tokens ({percent_text(int(cached), total)})"
    return f"{share} were reused{saved}; {grouped(int(evaluated))} were evaluated."


# ------------------------------------------------------------------------------------------------ an agent at work


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


def _read_totals(served: Served) -> Mapping[str, float]:
    """Empty where the server does not tell them."""
    with contextlib.suppress(StartError, KeyError, TypeError):
        return dict(AskedServer(served.url, served.key, ASK_SECONDS).get("/v1/stats")["totals"])
    return {}


def launch(
    client: Annotated[str, typer.Argument(autocompletion=lambda: list(RECIPES))],
    arguments: Annotated[list[str] | None, typer.Argument()] = None,
    model: Annotated[str | None, typer.Option(**USUAL_MODEL)] = None,
    show: Annotated[bool, typer.Option("--show")] = False,
    api_key: Key = None,
) -> None:
    """Runs the agent; its exit status is ours. Raises ConfigError, ModelError or StartError."""
    if (recipe := RECIPES.get(client)) is None:
        raise ConfigError(f"there is no client {client!r}; there are {', '.join(RECIPES)}")
    config, urls = load_model_config({"models": model and [model]}, os.environ), known_urls()
    name, key = config.models[0], api_key or config.api_key
    if name in BUILT_IN:
        _tell(f"{name} is for trying the server and cannot work as an agent; first: mlx-serve pull qwen3")
    if not show and shutil.which(recipe.program) is None:
        raise StartError(f"{recipe.title} is not installed, there is no {recipe.program}: {recipe.install}")
    # A closed terminal, or SIGTERM, also ends the agent and its server.
    with handling(leave, signal.SIGTERM, signal.SIGHUP), contextlib.ExitStack() as stack:
        served = find_served(name, urls, key)
        if show:
            typer.echo(as_shell(recipe, served or Served(urls[-1], name, key=key or ""), arguments or ()))
            return
        if served is None:
            _tell(f"Starting a server with {name} …")
            command = [*own_program(sys.argv[0]), "serve", name, "--port", "0"]
            url = stack.enter_context(started_server(command, memory_budget.runtime_folder(os.environ), _tell))
            served = find_served(name, [url], key) or Served(url, name, key=key or "")
        else:
            _tell(f"Asking the server at {served.url}.")
        raise typer.Exit(_run(recipe, served, arguments or ()))


def _run(recipe: _Recipe, served: Served, arguments: Sequence[str]) -> int:
    before = _read_totals(served)
    command, seen = command_of(recipe, served, arguments), environment_of(recipe, served, os.environ)
    # Ctrl-C is left to the agent, by a handler: the agent would inherit an ignored signal.
    with handling(lambda *_: None, signal.SIGINT):
        status = subprocess.run(command, env=seen, check=False).returncode
    _tell(savings_between(before, _read_totals(served)))
    # The shell's exit status of a program ended by a signal.
    return status if status >= 0 else 128 - status
