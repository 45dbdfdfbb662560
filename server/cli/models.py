"""`mlx-serve list` and `mlx-serve pull` as a person sees them."""

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from models.names import InstalledModel, installed, shorten
from server.sizes import size_text

HEADINGS = ("NAME", "SIZE", "ARCHITECTURE", "WEIGHTS", "FOLDER")


def show_installed(*, as_json: bool = False) -> None:
    """Prints the models that `serve` and `run` find by name: a table, or JSON for programs."""
    models = installed()
    console = Console(markup=False, highlight=False, soft_wrap=True)
    if as_json:
        console.out(json.dumps([_figures(model) for model in models], indent=2, ensure_ascii=False))
    elif console.is_terminal:
        console.print(_table(models), soft_wrap=False)
        if not any("/" in model.name for model in models):
            console.print("\nMore models: mlx-serve pull qwen3:0.6b, or any repository of MLX weights.", style="dim")
    else:
        console.out(plain_table([HEADINGS, *map(_cells, models)]))


def _figures(model: InstalledModel) -> dict[str, str | int | None]:
    return {
        "name": model.name,
        "short_name": model.short_name or None,
        "size_bytes": model.size_bytes,
        "architecture": model.architecture,
        "quantization": model.quantization or None,
        "path": str(model.path),
    }


def _cells(model: InstalledModel) -> tuple[str, ...]:
    name = f"{model.name} ({model.short_name})" if model.short_name else model.name
    return name, size_text(model.size_bytes), model.architecture, model.quantization, str(model.path)


def _table(models: Sequence[InstalledModel]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in HEADINGS:
        table.add_column(heading, **({"overflow": "fold"} if heading in ("NAME", "FOLDER") else {"no_wrap": True}))
    for model in models:
        table.add_row(*_cells(model))
    return table


def plain_table(rows: Sequence[tuple[str, ...]]) -> str:
    """Returns one line per row, however long, with columns as wide as their longest cell."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def pull_with_progress(name: str) -> None:
    """Downloads a model with a progress bar; raises ModelError. Ctrl-C ends the process and says how to go on."""
    from models.hub import pull

    name = shorten(name)
    # Retries show in the bar standing still; the sentence comes from the error if they are in vain.
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    console = Console(markup=False, highlight=False)
    before = signal.signal(signal.SIGINT, _stop_pull(name))
    try:
        with _progress(console) as progress:
            task = progress.add_task(name, total=None)
            folder = pull(name, lambda done, total: progress.update(task, completed=done, total=total))
    finally:
        signal.signal(signal.SIGINT, before)
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
