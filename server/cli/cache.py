"""`mlx-serve cache list` and `mlx-serve cache rm`: the folders in which `--cache-disk` keeps conversations."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from cache.budget import DiskInUse, FolderUnusable
from cache.disk.model_folders import ModelFolder, find_all, remove
from models.short_names import size_text
from server.app.config import StartError


def show(cache_dir: str, *, as_json: bool) -> None:
    """Prints one line for each model's folder; raises FolderUnusable."""
    folder = Path(cache_dir).expanduser()
    found = _find(folder)
    if as_json:
        typer.echo(json.dumps([_record(entry) for entry in found], indent=2))
    elif not found:
        typer.echo(f"Nothing is kept in {folder}. `mlx-serve serve --cache-disk 20GB` keeps conversations there.")
    else:
        _print_table(found)


def remove_folders(names: Sequence[str], cache_dir: str, *, everything: bool) -> None:
    """Deletes the folders of `names`, or all. Raises StartError for an unknown name or one in use, and then
    deletes none.

    A name is the folder's, or the model's where only one folder belongs to that model.
    """
    found = _find(Path(cache_dir).expanduser())
    chosen = found if everything else [_named(name, found) for name in names]
    busy = next((entry for entry in chosen if entry.is_in_use), None)
    if busy is not None:
        raise StartError(f"{busy.path.name} is in use by a running server; stop that first")
    for entry in dict.fromkeys(chosen):
        _remove(entry)
    if everything and not chosen:
        typer.echo("There is nothing to remove.")


def _find(folder: Path) -> list[ModelFolder]:
    try:
        return find_all(folder)
    except OSError as error:
        raise FolderUnusable(folder, error) from error


def _remove(entry: ModelFolder) -> None:
    try:
        is_gone = remove(entry)
    except DiskInUse as error:
        raise StartError(f"{entry.path.name} is in use by a running server; stop that first") from error
    except OSError as error:
        raise FolderUnusable(entry.path, error) from error
    rest = "" if is_gone else "; files that mlx-serve did not write stay in it"
    typer.echo(f"Removed {entry.path.name}, {size_text(entry.num_bytes)}{rest}.")


def _named(name: str, found: Sequence[ModelFolder]) -> ModelFolder:
    matches = [entry for entry in found if name in (entry.path.name, entry.model)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise StartError(f"{name} has several folders: " + ", ".join(entry.path.name for entry in matches))
    raise StartError(f"there is no folder {name!r}; mlx-serve cache list shows those that are there")


def _print_table(found: Sequence[ModelFolder]) -> None:
    console = Console(markup=False, highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("FOLDER", overflow="fold")
    for heading in ("SIZE", "LAST USED"):
        table.add_column(heading, no_wrap=True)
    table.add_column("", no_wrap=True)
    for entry in found:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_used)) if entry.last_used else "never"
        table.add_row(entry.path.name, size_text(entry.num_bytes), used, "in use" if entry.is_in_use else "")
    console.print(table)


def _record(entry: ModelFolder) -> dict[str, object]:
    return {
        "folder": entry.path.name,
        "path": str(entry.path),
        "model": entry.model,
        "bytes": entry.num_bytes,
        "last_used": int(entry.last_used) or None,
        "in_use": entry.is_in_use,
    }
