"""`mlx-serve cache`: the prefix tree of a running server, and the folders of `--cache-disk`."""

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from cache.disk.model_folders import ModelFolder, find_all, remove
from models.errors import told_as
from models.texts import grouped, size_text
from server.app.config import ConfigError, StartError
from server.app.log_events import printable
from server.cli.ask import AskedServer, asking
from server.cli.config import load_config
from server.cli.options import Json, plain_table, print_json, tell


def show_folders(cache_dir: str | None = None, as_json: Json = False) -> None:
    """Prints one line for each model's folder; raises ConfigError and StartError."""
    folder, folders = find_folders(cache_dir)
    text = plain_table([("FOLDER", "SIZE", "LAST USED", ""), *map(_row, folders)])
    if not folders:
        text = f"Nothing is kept in {folder}. `mlx-serve serve --cache-disk 20GB` keeps conversations there."
    tell([_record(entry) for entry in folders], text, as_json)


def remove_folders(
    names: Annotated[list[str] | None, typer.Argument()] = None,
    everything: Annotated[bool, typer.Option("--all")] = False,
    cache_dir: str | None = None,
) -> None:
    """Deletes folders, by name or model; none if one is unknown or in use. Raises ConfigError and StartError."""
    if bool(names) == everything:
        raise ConfigError("give the folders to remove, or --all")
    _, folders = find_folders(cache_dir)
    chosen = [named_folder(name, folders) for name in names] if names else folders
    for entry in chosen:
        if entry.is_in_use:
            raise StartError(f"{entry.path.name} is in use by a running server; stop that first")
    for entry in dict.fromkeys(chosen):
        with told_as(StartError, f"the cache folder {entry.path} cannot be used"):
            is_gone = remove(entry)
        rest = "" if is_gone else "; files that mlx-serve did not write stay in it"
        typer.echo(f"Removed {entry.path.name}, {size_text(entry.num_bytes)}{rest}.")
    if everything and not chosen:
        typer.echo("There is nothing to remove.")


def find_folders(cache_dir: str | None) -> tuple[Path, list[ModelFolder]]:
    """The directory of all, and each model's folder in it. Raises ConfigError and StartError."""
    folder = Path(load_config({"cache_dir": cache_dir}, os.environ).cache_dir).expanduser()
    with told_as(StartError, f"the cache folder {folder} cannot be used"):
        return folder, find_all(folder)


def named_folder(name: str, folders: Sequence[ModelFolder]) -> ModelFolder:
    """The one of that name or model. Raises StartError."""
    matches = [entry for entry in folders if name in (entry.path.name, entry.model)]
    if not matches:
        raise StartError(f"there is no folder {name!r}; mlx-serve cache list shows those that are there")
    if len(matches) > 1:
        raise StartError(f"{name} has several folders: " + ", ".join(entry.path.name for entry in matches))
    return matches[0]


def _row(entry: ModelFolder) -> tuple[str, ...]:
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_used)) if entry.last_used else "never"
    return entry.path.name, size_text(entry.num_bytes), used, "in use" if entry.is_in_use else ""


def _record(entry: ModelFolder) -> dict[str, object]:
    return {
        "folder": entry.path.name,
        "path": str(entry.path),
        "model": entry.model,
        "bytes": entry.num_bytes,
        "last_used": int(entry.last_used) or None,
        "in_use": entry.is_in_use,
    }


STYLES = {"live": "green", "memory": "blue", "disk": "yellow"}
_Edge = Mapping[str, Any]


def tree_lines(cache: Mapping[str, Any], max_depth: int | None = None) -> Iterator[Text]:
    """Yields the tree in memory, then on disk only, and sums."""
    sizes = cache["bytes"]
    memory = size_text(sizes["span"] + sizes["window"] + sizes["point"] + sizes["live"])
    disk = f", {size_text(sizes['disk'])} on disk" if sizes["disk"] else ""
    sums = f"{grouped(cache['num_tokens'])} tokens on {grouped(cache['num_nodes'])} edges, {memory} in memory{disk}"
    yield Text.assemble((printable(cache["model"]), "bold"), f"  {sums}")
    yield from _branches(cache["nodes"], max_depth)
    on_disk = [{**edge, "tier": "disk"} for edge in cache["disk_nodes"] if edge["memory_tokens"] < edge["tokens"]]
    if on_disk:
        yield Text("on disk only", "bold")
        yield from _branches(on_disk, max_depth)
    if not cache["nodes"] and not on_disk:
        yield Text("nothing is held")
    if cache["truncated"]:
        yield Text("there is more: --limit shows up to 10000 edges", "dim")
    others = [entry for entry in cache["namespaces"] or () if entry["namespace"] != cache["namespace"]]
    if others:
        names = (f"{entry['namespace'] or '(no key)'}, {grouped(entry['num_tokens'])} tokens" for entry in others[:8])
        more = f"; and {len(others) - 8} more" if len(others) > 8 else ""
        yield Text(f"other namespaces, for --namespace: {printable('; '.join(names))}{more}", "dim")


def _branches(edges: Sequence[_Edge], max_depth: int | None) -> Iterator[Text]:
    below, ids = defaultdict[int | None, list[_Edge]](list), {edge["id"] for edge in edges}
    for edge in edges:
        below[edge["parent"] if edge["parent"] in ids else None].append(edge)
    waiting = [(edge, "", edge is below[None][-1]) for edge in reversed(below[None])]
    while waiting:
        edge, indent, is_last = waiting.pop()
        yield Text.assemble((indent + ("└ " if is_last else "├ "), "dim"), _said(edge))
        inner, children = indent + ("  " if is_last else "│ "), below[edge["id"]]
        if max_depth is None or len(inner) // 2 < max_depth:
            waiting += [(child, inner, child is children[-1]) for child in reversed(children)]
        elif children:
            yield Text(f"{inner}… {grouped(_num_below(edge, below))} more", "dim")


def _num_below(edge: _Edge, below: Mapping[int | None, list[_Edge]]) -> int:
    edges = [edge]
    for above in edges:
        edges += below.get(above["id"], [])
    return len(edges) - 1


def _said(edge: _Edge) -> Text:
    tier = edge["tier"]
    size = "" if tier == "live" else f" {size_text(edge['bytes'])}"
    marks = [
        f"restored {edge['uses']}×" if edge.get("uses") else "",
        (edge.get("restore_point") or "").replace("_", " "),
        "pinned" if edge.get("pinned") else "",
        "on disk too" if edge.get("disk_tokens", 0) >= edge["tokens"] else "",
    ]
    text = ", ".join(filter(None, marks))
    about, words = f"{grouped(edge['tokens'])} {tier}{size}", printable(edge["preview"].replace("\n", " "))
    return Text.assemble((about, STYLES[tier]), f"  {words}", (f"  ({text})" if text else "", "dim"))


@asking()
def show_tree(
    server: AskedServer,
    model: str | None = None,
    namespace: str | None = None,
    depth: Annotated[int | None, typer.Option(min=1)] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000)] = 256,
    as_json: Json = False,
) -> None:
    """Prints a line for each edge. Raises StartError."""
    query = {"model": model, "namespace": namespace, "limit": limit}
    cache = server.get("/v1/cache", query)
    if as_json:
        print_json(cache)
        return
    console = Console(highlight=False)
    for line in tree_lines(cache, depth):
        if console.is_terminal:
            line.truncate(console.width, overflow="ellipsis")
        console.print(line, soft_wrap=True)
