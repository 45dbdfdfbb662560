"""`mlx-serve cache export` and `cache import`: conversations with their state in one file.

A running server is asked; where none runs, the folder of `--cache-disk` is read or written.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from models.errors import told_as
from models.store.manifest import as_owner
from models.texts import grouped, size_text
from server.app.config import ConfigError, StartError
from server.app.keys import namespace_of_key
from server.cli.ask import AskedServer, NoServer, asking
from server.cli.keys import INTERRUPTED
from server.cli.options import Address, Json, tell

TAR = "application/x-tar"


@asking(Address)
def export_bundle(
    server: AskedServer,
    names: Annotated[list[str], typer.Argument(metavar="[SESSION] FILE")],
    everything: Annotated[bool, typer.Option("--all")] = False,
    model: str | None = None,
    namespace: str | None = None,
    cache_dir: str | None = None,
    as_json: Json = False,
) -> None:
    """Writes a bundle; raises ConfigError and StartError, and then leaves no file, as after Ctrl-C."""
    if len(names) != (1 if everything else 2):
        raise ConfigError("give a session and a file, or --all and a file")
    path, session = Path(names[-1]).expanduser(), None if everything else names[0]
    if path.exists():
        raise StartError(f"{path} is there already; name another file")
    part, left_out = path.with_name(f"{path.name}.part"), 0
    try:
        with (
            _stoppable("no file is left"),
            told_as(StartError, f"{path} cannot be written"),
            open(part, "wb", opener=as_owner) as file,
        ):
            try:
                query = {"session": session, "model": model, "namespace": namespace}
                left_out = int(server.download("/v1/cache/export", query, file).get("X-Left-Out-Tokens", "0"))
            except NoServer as error:
                if server.is_named or session is not None:
                    raise StartError(f"{error}; without one, --all exports what --cache-disk keeps") from error
                from server.cli.moving_folders import export_folder  # with MLX, which asking a server needs not

                export_folder(cache_dir, model, _wanted(namespace, server), file)
            num_bytes = file.tell()
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)
    rest = f"; the state of {grouped(left_out)} tokens of requests with store: false is left out" if left_out else ""
    text = f"Wrote {path}, {size_text(num_bytes)}{rest}. It holds prompts and answers: keep it as safe as these."
    tell({"file": str(path), "bytes": num_bytes, "left_out_tokens": left_out}, text, as_json)


@asking(Address)
def import_bundle(
    server: AskedServer,
    file: Annotated[str, typer.Argument(metavar="FILE")],
    model: str | None = None,
    namespace: str | None = None,
    cache_dir: str | None = None,
    as_json: Json = False,
) -> None:
    """Takes a bundle in; raises StartError, which says what of it is kept."""
    cannot, stopped = told_as(StartError, f"{file} cannot be read"), _stoppable("what was taken in so far is kept")
    with stopped, cannot, Path(file).expanduser().open("rb") as opened:
        try:
            query, place = {"model": model, "namespace": namespace}, server.url
            headers = {"Content-Type": TAR, "Content-Length": str(os.fstat(opened.fileno()).st_size)}
            kept = server.upload("/v1/cache/import", query, opened, headers)
        except NoServer:
            if server.is_named:
                raise
            opened.seek(0)
            from server.cli.moving_folders import import_folder

            kept, place = import_folder(cache_dir, _wanted(namespace, server), opened)
    counts = f"conversations: {kept['conversations']}, tokens: {grouped(kept['tokens'])}"
    done = "Taken in by" if kept["new_bytes"] else "Nothing is new to"
    tell({**kept, "place": place}, f"{done} {kept['model']} at {place}; {counts}.", as_json)


@contextlib.contextmanager
def _stoppable(left: str) -> Iterator[None]:
    """Says after Ctrl-C what is left."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"\nmlx-serve: stopped; {left}", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _wanted(namespace: str | None, server: AskedServer) -> str:
    own = namespace_of_key(server.api_key) if server.api_key else ""
    return own if namespace is None else namespace
