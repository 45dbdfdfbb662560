"""`mlx-serve pull` and `convert`, and the offer of `run` to pull."""

import json
import logging
import math
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from models import names
from models.errors import ModelNotFound, StoreError, told_as
from models.hub import PullChecking, PullEvent, PullPlanned, PullProgress, TellPull, find_mtp, mtp_of, pull, pull_mtp
from models.store.library import create, parse_free_name
from models.store.manifest import data_folder
from models.store.stored_model import Modelfile, WeightsPlace
from models.texts import size_text
from models.weights import find_weight_files, read_header, read_json, total_bytes
from server.app.config import ConfigError, StartError
from server.app.memory_budget import comfortable_weights_bytes, largest_weights_bytes, this_machine
from server.cli.keys import INTERRUPTED, handling, leave, loading, scratch_folder
from server.cli.options import Force, Json

LINE_SHARE = 0.1
"""Without a bar, progress is told for each such part, or after some seconds."""
LINE_SECONDS = 15.0
JSON_SECONDS = 0.5


def pull_for_person(
    name: str, as_json: Json = False, is_forced: Force = False, mtp: Annotated[str | None, typer.Option()] = None
) -> None:
    """Downloads a model. Raises ModelError. Ctrl-C ends the process and says how to go on."""
    console = Console(markup=False, highlight=False)
    machine = this_machine()
    chosen = choose(name, comfortable_weights_bytes(machine))
    name = names.shorten(name) if chosen is None else chosen.name
    if chosen is not None and not as_json:
        console.print(f"{name} ({_about(chosen)}) is the largest of its family that fits here.", soft_wrap=True)
    limit_bytes = None if is_forced else largest_weights_bytes(machine)
    # During retries the bar stands still; if all fail, the error has the sentence.
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    again = name if mtp is None else f"{name} --mtp {mtp}"
    with handling(lambda *_: _stop_pull(again), signal.SIGINT):
        module = None if mtp is None else mtp_of(mtp)
        with _reporting(console, name, as_json=as_json) as tell:
            folder = pull(name, tell, max_weights_bytes=limit_bytes)
        if module is not None:
            with loading(str(folder)):
                from models.loader import check_mtp
            with _reporting(console, str(module.repository), as_json=as_json) as tell:
                pull_mtp(folder, module, partial(check_mtp, folder, name), tell)
    if as_json:
        console.out(json.dumps({"status": "success", "name": name, "path": str(folder)}, ensure_ascii=False))
        return
    console.print(f"{name} is here: {folder}", soft_wrap=True)
    if mtp is None and (repository := find_mtp(name, folder)) is not None:
        console.print(f"To draft with its MTP module: mlx-serve pull {name} --mtp {repository}", soft_wrap=True)
    console.print(f"Try it: mlx-serve run {name}", soft_wrap=True)


BITS = ("2", "3", "4", "5", "6", "8")


def convert(name: str, own: Annotated[str | None, typer.Argument()] = None, quantize: str | None = None) -> None:
    """Makes MLX weights. Raises ConfigError, ModelError and StartError."""
    if quantize not in (None, *BITS):
        raise ConfigError(f"--quantize is {quantize!r}; it must be one of {', '.join(BITS)}")
    bits = None if quantize is None else int(quantize)
    usual = re.sub(r"[^a-z0-9._-]+", "-", _last_part(name).lower())
    full = parse_free_name(own or usual + ("" if bits is None else f"-{bits}bit"))
    short = full.removesuffix(":latest")
    target = data_folder(os.environ) / "converted" / short.replace(":", "-")
    if target.exists() or names.find_stored(full) is not None:
        raise StoreError(f"there is a {short} already; choose another NAME")
    folder = _source(name)
    _check_result(name, folder, bits, target)
    with loading(str(folder)):
        from models.loader import convert_weights
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with (
            # MLX's own error for a file that cannot be written is a RuntimeError.
            told_as(StartError, f"{target} cannot be written", RuntimeError),
            handling(leave, signal.SIGTERM),
            scratch_folder(target.parent, ".part-") as part,
            _bar(Console(markup=False, highlight=False), f"converting {name}") as update,
        ):
            convert_weights(
                folder, name, part / "model", bits, lambda done, total: update(completed=done, total=total)
            )
            # Weights without a name would be in the way of the next time.
            with handling(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM):
                (part / "model").rename(target)
                create(full, WeightsPlace("folder", str(target)), Modelfile(str(target)))
    except KeyboardInterrupt:
        typer.echo(f"\nmlx-serve: stopped; nothing was made of {name}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    typer.echo(f"{short} is here: {target}\nTry it: mlx-serve run {short}")


def _last_part(name: str) -> str:
    path = Path(name).expanduser()
    return path.resolve().name if path.is_dir() else names.shorten(name).partition("@")[0].rpartition("/")[2]


def _source(name: str) -> Path:
    try:
        return names.resolve(name)
    except ModelNotFound:
        if Path(name).expanduser().exists() or names.parse_repository(name) is None:
            raise
    console = Console(markup=False, highlight=False)
    with handling(lambda *_: _stop_pull(name), signal.SIGINT), _reporting(console, name) as tell:
        return pull(name, tell)


def _check_result(name: str, folder: Path, bits: int | None, target: Path) -> None:
    """Raises StartError where neither memory nor disk can hold the result."""
    tensors = [tensor for file in find_weight_files(folder) for tensor in read_header(file).values()]
    if bits is not None and read_json(folder / "config.json").get("quantization"):
        raise StartError(f"{name} is quantized already; convert the weights that it was made from")
    # A scale and a bias of 16 bits for 64 weights.
    quantized_bytes = int(sum(math.prod(tensor["shape"]) for tensor in tensors) * ((bits or 4) + 0.5) / 8)
    needed_bytes = total_bytes(folder) if bits is None else quantized_bytes
    limit_bytes = largest_weights_bytes(this_machine())
    if needed_bytes > limit_bytes:
        hint = "; --quantize 4 takes " + size_text(quantized_bytes) if bits is None else ""
        fits = f"this machine has memory for {size_text(max(limit_bytes, 0))}"
        raise StartError(f"the weights made of {name} would take {size_text(needed_bytes)}, and {fits}{hint}")
    place = next(parent for parent in target.parents if parent.exists())
    free_bytes = shutil.disk_usage(place).free
    if needed_bytes > free_bytes:
        raise StartError(f"{name} needs {size_text(needed_bytes)}, and {place} has {size_text(free_bytes)} left")


@contextmanager
def _bar(console: Console, label: str) -> Iterator[Callable[..., None]]:
    """Yields what changes the bar, which a terminal alone shows: `completed`, `total` and `description`."""
    figures = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), *figures)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield partial(progress.update, progress.add_task(label, total=None))


def choose(name: str, limit_bytes: int) -> names.ShortName | None:
    """The largest model of a family that fits, None for no family; raises ModelNotFound."""
    family = () if Path(name).expanduser().is_dir() else names.find_family(name)
    size = names.largest(family, limit_bytes)
    if family and size is None:
        takes = f"The smallest of {name}, {family[0].name}, takes {_about(family[0])}"
        room = f"this machine has memory for {size_text(max(limit_bytes, 0))} of weights"
        raise ModelNotFound(f"{takes}, and {room}")
    return size


def offer(name: str) -> str | None:
    """Offers a person what can be pulled; returns its name once it is here. Raises ModelError."""
    with suppress(ModelNotFound):
        names.resolve(name)
        return None
    limit_bytes = comfortable_weights_bytes(this_machine())
    chosen = choose(name, limit_bytes) or names.SHORT_NAMES.get(name.lower())
    wanted = names.shorten(name) if chosen is None else chosen.name
    if names.parse_repository(wanted) is None or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return None
    size = ""
    if chosen is not None:
        is_small = chosen.num_bytes <= limit_bytes
        size = f" ({_about(chosen)}; {'fits this machine' if is_small else 'more than this machine has memory for'})"
    question = f"{wanted} is not on this machine. Pull it{size}? [Y/n] "
    if Console(markup=False, highlight=False).input(question).strip().lower() not in ("", "y", "yes"):
        return None
    pull_for_person(wanted)
    return wanted


def _about(model: names.ShortName) -> str:
    return f"about {size_text(model.num_bytes)}"


def _show_on_bar(console: Console, update: Callable[..., None], name: str, event: PullEvent) -> None:
    match event:
        case PullPlanned():
            _print_needs(console, event)
        case PullProgress(done_bytes=done, total_bytes=total):
            update(description=name, completed=done, total=total)
        case PullChecking():
            update(description=f"checking {name}")


def _print_needs(console: Console, event: PullPlanned) -> None:
    if event.needs:
        console.print(event.needs, soft_wrap=True)


def _print_line(console: Console, name: str, event: PullEvent) -> None:
    if isinstance(event, PullPlanned):
        _print_needs(console, event)
    if isinstance(event, PullProgress) and event.total_bytes:
        share, here = event.done_bytes / event.total_bytes, size_text(event.done_bytes)
        console.print(f"{name}: {share:.0%}, {here} of {size_text(event.total_bytes)}", soft_wrap=True)


def _figures(event: PullEvent) -> dict[str, object]:
    match event:
        case PullPlanned(repository=repository, files=files, needs=needs):
            listed = [{"name": file.name, "bytes": file.num_bytes} for file in files]
            further = {"needs": needs} if needs else {}
            return {"status": "planned", "repository": repository, "files": listed, **further}
        case PullProgress(file=file, file_bytes=here, done_bytes=done, total_bytes=total):
            part = {} if file is None else {"file": file.name, "file_bytes": here, "file_total": file.num_bytes}
            return {"status": "downloading", "completed": done, "total": total, **part}
        case PullChecking(file=file):
            return {"status": "checking", "file": file.name}


def _paced(tell: TellPull, seconds: float) -> TellPull:
    """Passes on steps, and progress where it is a tenth more, the end, or some more after `seconds`."""
    told_share, told_at = 0.0, time.monotonic()

    def pass_on(event: PullEvent) -> None:
        nonlocal told_share, told_at
        if isinstance(event, PullProgress):
            share, now = event.done_bytes / max(event.total_bytes, 1), time.monotonic()
            is_due = share == 1 or now - told_at >= seconds or share - told_share >= LINE_SHARE
            if share <= told_share or not is_due:
                return
            told_share, told_at = share, now
        tell(event)

    return pass_on


@contextmanager
def _reporting(console: Console, name: str, *, as_json: bool = False) -> Iterator[TellPull]:
    if as_json:
        yield _paced(lambda event: console.out(json.dumps(_figures(event), ensure_ascii=False)), JSON_SECONDS)
    elif not console.is_terminal:
        yield _paced(partial(_print_line, console, name), LINE_SECONDS)
    else:
        with _bar(console, name) as update:
            yield partial(_show_on_bar, console, update, name)


def _stop_pull(name: str) -> NoReturn:
    # The process would otherwise wait for downloading threads; the bytes written are kept for the next time.
    note = f"\nmlx-serve: stopped; go on where it stopped with: mlx-serve pull {name}\n"
    os.write(sys.stderr.fileno(), note.encode())
    os._exit(INTERRUPTED)
