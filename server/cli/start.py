"""The flags of `serve` and `run`. What takes long to import is imported in functions."""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from models.names import resolve
from server.app.memory_budget import runtime_folder
from server.cli.config import load_model_config, with_settings
from server.cli.keys import keys_unseen, loading
from server.cli.options import USUAL_MODEL, Key


@with_settings
def serve(**given: Any) -> None:
    """Serves until asked to stop; raises ConfigError, StartError, ModelError and FolderError."""
    config = load_model_config(given, os.environ)
    for name in config.models[1:]:
        resolve(name)
    with loading(config.models[0]) as fast_blas:
        from server.cli.ranks import joined
        from server.cli.serve import serve as run_server

    with joined(config, os.environ) as (config, team):
        if team.ranks.rank:
            team.follow(config)
            raise typer.Exit
        status = run_server(config, runtime_folder(os.environ), fast_blas, team)
    raise typer.Exit(status)


def is_question(text: str) -> bool:
    """Whether a text in the place of a MODEL is a question: only a folder's name has blanks."""
    # `Path.is_dir` raises for a long text.
    return len(text.split()) > 1 and not os.path.isdir(os.path.expanduser(text))  # noqa: PTH111, PTH112


def run(
    model: Annotated[str | None, typer.Argument(**USUAL_MODEL)] = None,
    question: Annotated[list[str] | None, typer.Argument()] = None,
    system: str = "",
    context: str | None = None,
    cache_memory: str | None = None,
    local: Annotated[bool, typer.Option("--local")] = False,
    api_key: Key = None,
    no_history: Annotated[bool, typer.Option("--no-history")] = False,
) -> None:
    """Talks with a model; raises ConfigError and ModelError."""
    from server.cli.chat import Opening, chat_somewhere
    from server.cli.repl.terminal import history_file

    if model is not None and is_question(model):
        question, model = [model, *(question or ())], None
    opening = Opening(system, " ".join(question or ()), None if no_history else history_file(os.environ))
    limits = {"context_tokens": context, "cache_memory_bytes": cache_memory}
    # From the start: keys that come while the model is loaded are read at the first prompt.
    with nullcontext() if question else keys_unseen():
        config = load_model_config({"models": model and [model], **limits}, os.environ)
        # Only a model loaded here has these limits, and a server may have another model by a folder's name.
        is_local = local or context is not None or cache_memory is not None
        is_local = is_local or Path(config.models[0]).expanduser().is_dir()
        raise typer.Exit(chat_somewhere(config, opening, api_key, is_local=is_local))
