"""`mlx-serve serve`, from its flags to the import of MLX, which `run` shares.

MLX and transformers are imported only here, once the model of a command is known to be there.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import typer
from rich.console import Console

from models.fast_blas import find_compiler, load_fast_blas
from models.names import resolve, settle
from server.app.memory_budget import runtime_folder
from server.cli.config import load_model_config, with_settings
from server.cli.keys import held_back, interruptible
from server.cli.options import command_group

app = command_group()


@app.command()
@with_settings()
def serve(**given: Any) -> None:
    """Serves until asked to stop; raises ConfigError, StartError, ModelError and FolderError."""
    config = load_model_config(given, os.environ)
    config = replace(config, models=tuple(map(settle, config.models)))
    for name in config.models[1:]:
        resolve(name)
    with loading(config.models[0]) as fast_blas:
        from server.cli.serve import serve as run_server

    raise typer.Exit(run_server(config, runtime_folder(os.environ), fast_blas))


@contextmanager
def loading(model: str) -> Iterator[str | None]:
    """Says that MLX is being imported; raises ModelError at once.

    Yields the name of the fast BLAS that was loaded for MLX, if there is one.
    """
    # Else transformers advises to install PyTorch; it reads this when it is imported.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    resolve(model)
    console = Console()
    with interruptible():
        # Before any other thread exists: it could take a Ctrl-C that is held back.
        with held_back():
            fast_blas = load_fast_blas()
        find_compiler(held_back)
        with console.status(f"Loading {model} …") if console.is_terminal else nullcontext():
            # Ctrl-C would leave the terminal without a cursor.
            console.show_cursor(True)
            yield fast_blas
