"""`mlx-serve list` as a person sees it."""

import json
from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from models.names import InstalledModel, installed
from models.short_names import size_text
from server.cli.options import Json, command_group

app = command_group()

HEADINGS = ("NAME", "SIZE", "ARCHITECTURE", "WEIGHTS", "FOLDER")


@app.command("list")
def show_installed(as_json: Json = False) -> None:
    """Prints the models that `serve` and `run` find by name: a table, or JSON for programs."""
    models = installed()
    console = Console(markup=False, highlight=False, soft_wrap=True)
    if as_json:
        console.out(json.dumps([_figures(model) for model in models], indent=2, ensure_ascii=False))
    elif console.is_terminal:
        console.print(table(HEADINGS, map(_cells, models), folded=("NAME", "FOLDER")), soft_wrap=False)
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
        "from": None if model.stored is None else str(model.stored.weights),
    }


def _cells(model: InstalledModel) -> tuple[str, ...]:
    name = f"{model.name} ({model.short_name})" if model.short_name else model.name
    return name, size_text(model.size_bytes), model.architecture, model.quantization, str(model.path)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], folded: Sequence[str]) -> Table:
    """`folded` columns may take several lines."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        made.add_column(heading, **({"overflow": "fold"} if heading in folded else {"no_wrap": True}))
    for row in rows:
        made.add_row(*row)
    return made


def plain_table(rows: Sequence[tuple[str, ...]]) -> str:
    """One line per row, however long; columns as wide as their longest cell."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
