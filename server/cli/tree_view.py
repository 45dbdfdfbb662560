"""The prefix tree as `mlx-serve cache tree` shows it, from the object of `/v1/cache`."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from models.short_names import size_text
from server.cli.top_view import clean, count

STYLES = {"live": "green", "memory": "blue", "disk": "yellow"}
_Edge = Mapping[str, Any]


def tree_lines(cache: Mapping[str, Any], max_depth: int | None = None) -> Iterator[Text]:
    """Yields the tree of what memory holds, then that of what is on disk only, and sums."""
    yield Text.assemble((clean(cache["model"]), "bold"), f"  {_sums(cache)}")
    nodes: Sequence[_Edge] = cache["nodes"]
    yield from _branches(nodes, max_depth, lambda edge: _said(edge, edge["tier"]))
    on_disk = [edge for edge in cache["disk_nodes"] if edge["memory_tokens"] < edge["tokens"]]
    if on_disk:
        yield Text("on disk only", "bold")
        yield from _branches(_rooted(on_disk), max_depth, lambda edge: _said(edge, "disk"))
    if not nodes and not on_disk:
        yield Text("nothing is held")
    if cache["truncated"]:
        yield Text("there is more: --limit shows up to 10000 edges", "dim")


def _sums(cache: Mapping[str, Any]) -> str:
    held = cache["bytes"]
    memory = size_text(held["span"] + held["window"] + held["point"] + held["live"])
    disk = f", {size_text(held['disk'])} on disk" if held["disk"] else ""
    return f"{count(cache['num_tokens'])} tokens on {count(cache['num_nodes'])} edges, {memory} in memory{disk}"


def _rooted(edges: Sequence[_Edge]) -> list[_Edge]:
    """Returns edges of which those whose parent is not among them begin a tree."""
    ids = {edge["id"] for edge in edges}
    return [{**edge, "parent": edge["parent"] if edge["parent"] in ids else None} for edge in edges]


def _branches(edges: Sequence[_Edge], max_depth: int | None, said: Any) -> Iterator[Text]:
    below: defaultdict[int | None, list[_Edge]] = defaultdict(list)
    for edge in edges:
        below[edge["parent"]].append(edge)
    waiting = [(edge, "", edge is below[None][-1]) for edge in reversed(below[None])]
    while waiting:
        edge, indent, is_last = waiting.pop()
        yield Text.assemble((indent + ("└ " if is_last else "├ "), "dim"), said(edge))
        inner = indent + ("  " if is_last else "│ ")
        children = below[edge["id"]]
        if max_depth is not None and len(inner) // 2 >= max_depth:
            if children:
                yield Text(f"{inner}… {count(_num_below(edge, below))} more", "dim")
            continue
        waiting += [(child, inner, child is children[-1]) for child in reversed(children)]


def _num_below(edge: _Edge, below: Mapping[int | None, list[_Edge]]) -> int:
    found = [edge]
    for one in found:
        found += below.get(one["id"], [])
    return len(found) - 1


def _said(edge: _Edge, tier: str) -> Text:
    size = "" if tier == "live" else f" {size_text(edge['bytes'])}"
    marks = [
        f"restored {edge['uses']}×" if edge.get("uses") else "",
        edge.get("restore_point") or "",
        "pinned" if edge.get("pinned") else "",
        "on disk too" if edge.get("disk_tokens", 0) >= edge["tokens"] else "",
    ]
    told = ", ".join(mark.replace("_", " ") for mark in marks if mark)
    words = clean(edge["preview"].replace("\n", " "))
    return Text.assemble(
        (f"{count(edge['tokens'])} {tier}{size}", STYLES[tier]), f"  {words}", (f"  ({told})" if told else "", "dim")
    )
