"""`mlx-serve list` as a person sees it."""

import json
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime

import typer
from rich.cells import cell_len

from models.names import InstalledModel, installed
from models.texts import size_text
from server.cli.options import Json, command_group

app = command_group()

HEADINGS = ("NAME", "SIZE", "WEIGHTS", "ARCHITECTURE", "MODIFIED")


@app.command("list")
def show_installed(as_json: Json = False) -> None:
    """Prints the models that `serve` and `run` find by name."""
    models = installed()
    if as_json:
        typer.echo(json.dumps([_figures(model) for model in models], indent=2, ensure_ascii=False))
        return
    typer.echo(plain_table([HEADINGS, *map(_cells, models)]))
    if sys.stdout.isatty() and not any("/" in model.name for model in models):
        typer.echo("\nMore models: mlx-serve pull qwen3:0.6b, or any repository of MLX weights.")


def _figures(model: InstalledModel) -> dict[str, str | int | None]:
    return {
        "name": model.name,
        "short_name": model.short_name or None,
        "size_bytes": model.size_bytes,
        "architecture": model.architecture,
        "quantization": model.quantization or None,
        "path": str(model.path),
        "modified": datetime.fromtimestamp(_modified(model), UTC).isoformat(timespec="seconds"),
        "from": None if model.stored is None else str(model.stored.weights),
    }


def _cells(model: InstalledModel) -> tuple[str, ...]:
    size, age = size_text(model.size_bytes), age_text(time.time() - _modified(model))
    return model.short_name or model.name, size, model.quantization, model.architecture, age


def _modified(model: InstalledModel) -> float:
    return model.path.stat().st_mtime if model.stored is None else model.stored.modified.timestamp()


def age_text(seconds: float) -> str:
    """A time in the past such as `3 days ago`."""
    for unit, length in (("year", 31_536_000), ("month", 2_592_000), ("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}{'s' if seconds >= 2 * length else ''} ago"
    return "just now"


def plain_table(rows: Sequence[tuple[str, ...]]) -> str:
    """One line per row, however long; columns as wide as their longest cell."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
