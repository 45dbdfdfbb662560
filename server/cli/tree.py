"""`mlx-serve cache tree`: asks a server for its prefix tree, and prints it."""

import json

import typer
from rich.console import Console

from server.cli.asking import AskedServer
from server.cli.tree_view import tree_lines


def show_tree(
    url: str, api_key: str | None, query: dict[str, str | int], max_depth: int | None, *, as_json: bool
) -> None:
    """Prints the tree, a line for each edge; raises StartError where the server does not show it."""
    cache = AskedServer(url, api_key).get("/v1/cache", query)
    if as_json:
        typer.echo(json.dumps(cache, indent=2, ensure_ascii=False))
        return
    console = Console(highlight=False)
    for line in tree_lines(cache, max_depth):
        if console.is_terminal:
            line.truncate(console.width, overflow="ellipsis")
        console.print(line, soft_wrap=True)
