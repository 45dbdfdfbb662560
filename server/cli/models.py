"""`mlx-serve list` and `mlx-serve pull` as a person sees them."""

import logging
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from models.names import installed
from server.sizes import size_text


def show_installed() -> None:
    """Prints a table of the models that `serve` and `run` find by name."""
    console = Console(markup=False, highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("NAME", overflow="fold")
    for heading in ("SIZE", "ARCHITECTURE", "WEIGHTS"):
        table.add_column(heading, no_wrap=True)
    table.add_column("FOLDER", overflow="fold")
    models = installed()
    for model in models:
        name = f"{model.name} ({model.short_name})" if model.short_name else model.name
        table.add_row(name, size_text(model.size_bytes), model.architecture, model.quantization, str(model.path))
    console.print(table)
    if not any("/" in model.name for model in models):
        console.print("\nMore models: mlx-serve pull qwen3:0.6b, or any repository of MLX weights.", style="dim")


def pull_with_progress(name: str) -> None:
    """Downloads a model with a progress bar; raises ModelError. Ctrl-C ends the process and says how to go on."""
    from models.hub import pull

    # Retries show in the bar standing still; the sentence comes from the error if they are in vain.
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    signal.signal(signal.SIGINT, _stop_pull(name))
    console = Console(markup=False, highlight=False)
    with _progress(console) as progress:
        task = progress.add_task(name, total=None)
        folder = pull(name, lambda done, total: progress.update(task, completed=done, total=total))
    console.print(f"{name} is here: {folder}", soft_wrap=True)
    console.print(f"Try it: mlx-serve run {name}", soft_wrap=True)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _stop_pull(name: str) -> Callable[[int, FrameType | None], None]:
    def stop(_signal: int, _frame: FrameType | None) -> None:
        # Downloads run in threads that would otherwise be waited for; what they wrote is kept for the next time.
        note = f"\nmlx-serve: stopped; go on where it stopped with: mlx-serve pull {name}\n"
        os.write(sys.stderr.fileno(), note.encode())
        os._exit(1)

    return stop
