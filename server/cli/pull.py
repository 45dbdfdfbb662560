"""`mlx-serve pull`, and the offer of `run` to pull: a download as a person or a program sees it."""

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from models.errors import ModelNotFound
from models.hub import PullChecking, PullEvent, PullPlanned, PullProgress, TellPull, pull
from models.names import parse_repository, resolve, shorten
from models.short_names import ShortName, find_family, find_short_name, largest, size_text
from server.app.memory_budget import comfortable_weights_bytes, largest_weights_bytes, this_machine
from server.cli.keys import handling
from server.cli.options import command_group

app = command_group()

LINE_SHARE = 0.1
"""Without a terminal, a line is printed for each such part, and after `LINE_SECONDS`."""
LINE_SECONDS = 15.0
JSON_SECONDS = 0.5


@app.command("pull")
def pull_for_person(
    name: Annotated[
        str,
        typer.Argument(
            metavar="org/name[@revision]",
            help="Or its address on the hub, or a short name such as qwen3:0.6b, or a family such as qwen3.",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for each step, for programs.")] = False,
    is_forced: Annotated[
        bool, typer.Option("--force", help="Download even what this machine has no memory for.")
    ] = False,
) -> None:
    """Downloads a model with progress. Raises ModelError. Ctrl-C ends the process and says how to go on.

    A family stands for the largest of its models that fits this machine's memory.
    """
    console = Console(markup=False, highlight=False)
    machine = this_machine()
    chosen = choose(name, comfortable_weights_bytes(machine))
    name = shorten(name) if chosen is None else chosen.name
    if chosen is not None and not as_json:
        console.print(f"{name} ({about(chosen)}) is the largest of its family that fits here.", soft_wrap=True)
    limit_bytes = None if is_forced else largest_weights_bytes(machine)
    # During retries the bar stands still; if they fail, the error has the sentence.
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    with handling(lambda *_: _stop_pull(name), signal.SIGINT), _reporting(console, name, as_json=as_json) as tell:
        folder = pull(name, tell, max_weights_bytes=limit_bytes)
    if as_json:
        console.out(json.dumps({"status": "success", "name": name, "path": str(folder)}, ensure_ascii=False))
        return
    console.print(f"{name} is here: {folder}", soft_wrap=True)
    console.print(f"Try it: mlx-serve run {name}", soft_wrap=True)


def choose(name: str, limit_bytes: int) -> ShortName | None:
    """Returns the largest model of a family that fits, None for no family; raises ModelNotFound."""
    family = find_family(name) if not Path(name).expanduser().is_dir() else ()
    if not family:
        return None
    found = largest(family, limit_bytes)
    if found is None:
        smallest, room = family[0], size_text(max(limit_bytes, 0))
        takes = f"The smallest of {name}, {smallest.name}, takes {about(smallest)}"
        raise ModelNotFound(f"{takes}, and this machine has memory for {room} of weights")
    return found


def offer(name: str) -> str | None:
    """Offers a person what can be pulled; returns its name once it is here. Raises ModelError."""
    with suppress(ModelNotFound):
        resolve(name)
        return None
    limit_bytes = comfortable_weights_bytes(this_machine())
    chosen = choose(name, limit_bytes) or find_short_name(name)
    wanted = shorten(name) if chosen is None else chosen.name
    if parse_repository(wanted) is None or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return None
    size = ""
    if chosen is not None:
        fits = chosen.num_bytes <= limit_bytes
        size = f" ({about(chosen)}; {'fits this machine' if fits else 'more than this machine has memory for'})"
    console = Console(markup=False, highlight=False)
    answer = console.input(f"{wanted} is not on this machine. Pull it{size}? [Y/n] ").strip().lower()
    if answer not in ("", "y", "yes"):
        return None
    pull_for_person(wanted)
    return wanted


def about(model: ShortName) -> str:
    """Returns a model's approximate size."""
    return f"about {size_text(model.num_bytes)}"


def _on_bars(progress: Progress, name: str) -> TellPull:
    """One bar for all files, one for the file being fetched."""
    whole = progress.add_task(name, total=None)
    part = progress.add_task("", visible=False)
    num_files, shown_file = 1, ""

    def tell(event: PullEvent) -> None:
        nonlocal num_files, shown_file
        match event:
            case PullPlanned(files=files):
                num_files = sum(bool(file.digest) for file in files)
            case PullProgress(file=file, file_bytes=here, done_bytes=done, total_bytes=total):
                progress.update(whole, completed=done, total=total)
                if file is not None and num_files > 1:
                    if shown_file != file.name:
                        shown_file = file.name
                        progress.reset(part, description=file.name, total=file.num_bytes, visible=True)
                    progress.update(part, completed=here)
            case PullChecking(file=file):
                shown = part if progress.tasks[part].visible else whole
                progress.update(shown, description=f"checking {file.name}")

    return tell


def _in_lines(console: Console, name: str) -> TellPull:
    told_share, told_at = 0.0, time.monotonic()

    def tell(event: PullEvent) -> None:
        nonlocal told_share, told_at
        if not isinstance(event, PullProgress) or not event.total_bytes:
            return
        share, now = event.done_bytes / event.total_bytes, time.monotonic()
        more = share - told_share
        if more >= LINE_SHARE or (more > 0 and now - told_at >= LINE_SECONDS):
            told_share, told_at = share, now
            here, total = size_text(event.done_bytes), size_text(event.total_bytes)
            console.print(f"{name}: {share:.0%}, {here} of {total}", soft_wrap=True)

    return tell


def _as_json(console: Console) -> TellPull:
    told_at = 0.0

    def tell(event: PullEvent) -> None:
        nonlocal told_at
        figures: dict[str, object]
        match event:
            case PullPlanned(repository=repository, files=files):
                listed = [{"name": file.name, "bytes": file.num_bytes} for file in files]
                figures = {"status": "planned", "repository": repository, "files": listed}
            case PullProgress(file=file, file_bytes=here, done_bytes=done, total_bytes=total):
                now = time.monotonic()
                if done < total and now - told_at < JSON_SECONDS:
                    return
                told_at = now
                part = {} if file is None else {"file": file.name, "file_bytes": here, "file_total": file.num_bytes}
                figures = {"status": "downloading", "completed": done, "total": total, **part}
            case PullChecking(file=file):
                figures = {"status": "checking", "file": file.name}
        console.out(json.dumps(figures, ensure_ascii=False))

    return tell


@contextmanager
def _reporting(console: Console, name: str, *, as_json: bool) -> Iterator[TellPull]:
    if as_json:
        yield _as_json(console)
    elif not console.is_terminal:
        yield _in_lines(console, name)
    else:
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(TextColumn("{task.description}"), *columns, console=console, transient=True) as progress:
            yield _on_bars(progress, name)


def _stop_pull(name: str) -> NoReturn:
    # Downloads run in threads that would otherwise be waited for; what they wrote is kept for the next time.
    note = f"\nmlx-serve: stopped; go on where it stopped with: mlx-serve pull {name}\n"
    os.write(sys.stderr.fileno(), note.encode())
    os._exit(1)
