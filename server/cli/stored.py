"""`mlx-serve pull`, `show`, `cp`, `tag`, `rm`, `create` and `verify`: models of this machine, and names of one's
own.

A family's name stands for the largest of its models that this machine has memory for.
"""

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from models.errors import ModelfileError, ModelNotFound, StoreError, reason
from models.hub import PullChecking, PullEvent, PullPlanned, PullProgress
from models.names import (
    BUILT_IN,
    InstalledModel,
    cache_folder,
    describe,
    files_of,
    find_stored,
    folder_of,
    identity_of,
    parse_repository,
    place_of,
    resolve,
    shorten,
)
from models.short_names import ShortName, find_family, find_short_name, largest, size_text
from models.store import library
from models.store.library import FileFault, Making, verify
from models.store.modelfile import WITHOUT_EFFECT, modelfile_of, parameters_of, parse_modelfile
from models.store.stored_model import StoredModel, WeightsPlace
from server.app.config import StartError
from server.app.memory_budget import Machine, comfortable_weights_bytes, largest_weights_bytes, read_machine

STANDARD_INPUT = "-"


def show(name: str, *, as_modelfile: bool, as_json: bool) -> None:
    """Prints what a model is; raises ModelError."""
    place, stored = place_of(name), find_stored(name)
    if as_modelfile:
        if stored is None:
            raise StoreError(f"{name} is no name of your own, and has no Modelfile; make one with mlx-serve create")
        typer.echo(modelfile_of(stored))
        return
    folder = folder_of(place)
    model = describe(name if stored is None else stored.short_name, folder)
    if as_json:
        typer.echo(json.dumps(_record(model, place, stored), indent=2, ensure_ascii=False))
    else:
        for label, text in _facts(model, place, stored):
            first, *others = text.splitlines() or [""]
            typer.echo("\n".join([f"{label:<12} {first}".rstrip(), *(f"{'':<12} {line}" for line in others)]))


def copy(source: str, name: str, *, replaces: bool, as_json: bool) -> None:
    """Gives a model another name. Raises ModelError."""
    made = library.create(name, place_of(source), source, Making(replaces=replaces))
    _tell({"name": made.short_name, "from": source}, f"{made.short_name} stands for {made.weights}.", as_json)


def tag(name: str, tag_name: str, *, replaces: bool, as_json: bool) -> None:
    """Gives a name of one's own another tag. Raises ModelError."""
    stored = find_stored(name)
    if stored is None:
        raise StoreError(f"{name} is no name of your own; give it one first: mlx-serve cp {name} NAME")
    family = stored.name.partition(":")[0]
    copy(stored.name, f"{family}:{tag_name.removeprefix(f'{family}:')}", replaces=replaces, as_json=as_json)


def create(name: str, file: str, *, as_json: bool) -> None:
    """Makes a model from a Modelfile; raises ModelError and StartError."""
    text, folder = _read(file)
    try:
        told = parse_modelfile(text)
        base = _base(told.base, folder)
        making = Making(told.parameters, told.system, told.messages, told.license)
        made = library.create(name, place_of(base), base, making)
    except ModelfileError as error:
        raise ModelfileError(f"{file}: {error}") from error
    idle = sorted({key for key, _ in told.parameters if key.lower() in WITHOUT_EFFECT})
    note = f" {', '.join(idle)} {'have' if len(idle) > 1 else 'has'} no effect here." if idle else ""
    record = {"name": made.short_name, "from": str(made.weights), "without_effect": idle}
    _tell(
        record,
        f"{made.short_name} is made from {made.weights}.{note}\nTry it: mlx-serve run {made.short_name}",
        as_json,
    )


def remove(name: str, *, is_forced: bool, as_json: bool) -> None:
    """Removes a name of one's own, or the files of a repository, after a question. Raises ModelError and
    StartError.
    """
    if name in BUILT_IN:
        raise StoreError(f"{name} comes with mlx-serve and cannot be removed")
    stored = find_stored(name)
    if stored is not None:
        _remove_name(stored, is_forced=is_forced, as_json=as_json)
    elif parse_repository(name) is None:
        raise ModelNotFound(f"There is no model {name!r} to be removed; mlx-serve list shows those that are there.")
    else:
        _remove_weights(name, is_forced=is_forced, as_json=as_json)


def check_files(name: str, *, removes_damaged: bool, as_json: bool) -> int:
    """Prints the faults of a model's files, and returns the exit status. Raises ModelError.

    On request, damaged files of the cache are removed, so that they are pulled anew.
    """
    place, folder = files_of(name)
    found = verify(folder)
    removed = [] if not removes_damaged or place.kind != "repository" else list(_remove_files(folder, found.faults))
    if as_json:
        faults = [{"file": one.name, "fault": one.fault} for one in found.faults]
        record = {
            "name": name,
            "files": found.num_files,
            "compared": found.num_compared,
            "faults": faults,
            "removed": removed,
        }
        typer.echo(json.dumps(record, indent=2))
    elif found.faults:
        typer.echo("\n".join(f"{one.name}: {one.fault}" for one in found.faults))
        typer.echo(f"mlx-serve: {_advice(name, place, are_removed=bool(removed))}", err=True)
    else:
        rest = found.num_files - found.num_compared
        unknown = f"; of {rest} no hash is known" if rest else ""
        typer.echo(f"{name} is whole: {found.num_compared} files have the hub's hash{unknown}.")
    return 1 if found.faults else 0


def _remove_files(folder: Path, faults: Sequence[FileFault]) -> Iterator[str]:
    for fault in faults:
        file = folder / fault.name
        if file.exists():
            file.resolve().unlink()
            yield fault.name


def _advice(name: str, place: WeightsPlace, *, are_removed: bool) -> str:
    if place.kind == "repository":
        first = "" if are_removed else f"mlx-serve verify --remove-damaged {name}, then "
        return f"mend it: {first}mlx-serve pull {place}"
    return "reinstall mlx-serve" if place.kind == "built-in" else f"copy the files of {name} into the folder again"


def _record(model: InstalledModel, place: WeightsPlace, stored: StoredModel | None) -> dict[str, Any]:
    defaults = None if stored is None else stored.defaults
    return {
        "name": model.name,
        "id": identity_of(place),
        "source": {"kind": place.kind, "name": place.name, "commit": place.commit or None},
        "path": str(model.path),
        "size_bytes": model.size_bytes,
        "architecture": model.architecture,
        "quantization": model.quantization or None,
        "context_tokens": _context(model, stored),
        "parameters": [] if defaults is None else [list(pair) for pair in parameters_of(defaults)],
        "system": None if defaults is None else defaults.system,
        "messages": [] if defaults is None else [[one.role, one.content] for one in defaults.messages],
        "license": None if stored is None else stored.license,
        "files": _files(model.path),
        "created": None if stored is None else stored.created.isoformat(),
        "modified": None if stored is None else stored.modified.isoformat(),
    }


def _facts(model: InstalledModel, place: WeightsPlace, stored: StoredModel | None) -> Sequence[tuple[str, str]]:
    context = _context(model, stored)
    facts = [
        ("name", model.name),
        ("from", f"{place}" if place.kind != "built-in" else f"{place}, which comes with mlx-serve"),
        ("folder", str(model.path)),
        ("size", size_text(model.size_bytes)),
        ("architecture", model.architecture),
        ("weights", model.quantization or "not quantized"),
        ("context", f"{context} tokens"),
    ]
    if stored is not None:
        defaults = stored.defaults
        facts.append(("parameters", "\n".join(f"{key} {value}" for key, value in parameters_of(defaults)) or "none"))
        facts.append(("system", defaults.system or "none"))
        facts += [(f"message {one.role}"[:12], one.content) for one in defaults.messages]
        if stored.license:
            facts.append(("license", stored.license))
    return [*facts, ("template", _template(model.path)), ("files", "\n".join(_files(model.path)))]


def _context(model: InstalledModel, stored: StoredModel | None) -> int:
    # Imports MLX.
    from models.loader import read_config

    own = read_config(model.path)[1]
    limit = stored.defaults.context_tokens if stored is not None else None
    return min(own, limit or own)


def _template(folder: Path) -> str:
    if (folder / "chat_template.jinja").is_file():
        return "chat_template.jinja"
    try:
        has_one = b'"chat_template"' in (folder / "tokenizer_config.json").read_bytes()
    except OSError:
        has_one = False
    return "in tokenizer_config.json" if has_one else "none"


def _files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def _read(file: str) -> tuple[str, Path]:
    """Returns a Modelfile and the folder of its relative paths. Raises StartError."""
    try:
        if file == STANDARD_INPUT:
            return sys.stdin.read(), Path.cwd()
        path = Path(file).expanduser()
        return path.read_text(encoding="utf-8"), path.parent
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"{file} cannot be read: {reason(error)}") from error


def _base(name: str, folder: Path) -> str:
    """Returns the value of FROM; a path is relative to the Modelfile's folder."""
    return str(folder / name) if name.startswith(("./", "../")) or name in (".", "..") else name


def _remove_name(stored: StoredModel, *, is_forced: bool, as_json: bool) -> None:
    others = [name for name in library.names_with(stored.weights) if name != stored.short_name]
    kept = f"The weights of {stored.weights} stay" + (
        f"; {', '.join(others)} {'uses' if len(others) == 1 else 'use'} them, too." if others else "."
    )
    _confirm(f"Remove the name {stored.short_name}? {kept}", is_forced=is_forced)
    library.remove(stored.name)
    if stored.weights.kind == "repository" and not others:
        kept += f" To remove them: mlx-serve rm {stored.weights}"
    record = {"name": stored.short_name, "removed": "name", "weights": str(stored.weights), "others": others}
    _tell(record, f"{stored.short_name} is removed. {kept}", as_json)


def _remove_weights(name: str, *, is_forced: bool, as_json: bool) -> None:
    from huggingface_hub import scan_cache_dir

    place = place_of(name)
    others = library.names_with(place)
    if others:
        raise StoreError(
            f"{', '.join(others)} would have no weights; remove these names first: mlx-serve rm {others[0]}"
        )
    strategy = scan_cache_dir(cache_folder()).delete_revisions(place.commit)
    _confirm(
        f"Delete {place}, {strategy.expected_freed_size_str}, from Hugging Face's cache? Other programs share it.",
        is_forced=is_forced,
    )
    strategy.execute()
    record = {"name": name, "removed": "weights", "weights": str(place), "freed_bytes": strategy.expected_freed_size}
    _tell(record, f"{place} is deleted, {strategy.expected_freed_size_str} are free.", as_json)


def _confirm(question: str, *, is_forced: bool) -> None:
    """Asks, unless already confirmed. Raises StartError where nobody can be asked, or the answer is no."""
    if is_forced:
        return
    if not sys.stdin.isatty():
        raise StartError("nothing is removed without being asked for at a terminal; --force removes it at once")
    if not typer.confirm(question, err=True):
        raise StartError("nothing was removed")


def _tell(record: dict[str, Any], sentence: str, as_json: bool) -> None:
    typer.echo(json.dumps(record, indent=2) if as_json else sentence)


LINE_SHARE = 0.1
"""Without a terminal, a line is printed for each further part of this size."""
LINE_SECONDS = 15.0
"""Seconds after which a line is printed anyway, if there is progress."""
JSON_SECONDS = 0.5


def pull_for_person(name: str, *, as_json: bool = False, is_forced: bool = False) -> None:
    """Downloads a model with progress. Raises ModelError. Ctrl-C ends the process and says how to go on.

    A family stands for the largest of its models that fits this machine's memory. `is_forced` also fetches a model
    that does not fit.
    """
    from models.hub import pull

    console = Console(markup=False, highlight=False)
    machine = this_machine()
    chosen = choose(name, comfortable_weights_bytes(machine))
    name = shorten(name) if chosen is None else chosen.name
    if chosen is not None and not as_json:
        console.print(f"{name} ({about(chosen)}) is the largest of its family that fits here.", soft_wrap=True)
    limit_bytes = None if is_forced else largest_weights_bytes(machine)
    # During retries the bar stands still; if they fail, the error has the sentence.
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    before = signal.signal(signal.SIGINT, _stop_pull(name))
    try:
        with _reporter(console, name, as_json=as_json) as reporter:
            folder = pull(name, reporter.tell, max_weights_bytes=limit_bytes)
    finally:
        signal.signal(signal.SIGINT, before)
    if as_json:
        console.out(json.dumps({"status": "success", "name": name, "path": str(folder)}, ensure_ascii=False))
        return
    console.print(f"{name} is here: {folder}", soft_wrap=True)
    console.print(f"Try it: mlx-serve run {name}", soft_wrap=True)


def choose(name: str, limit_bytes: int) -> ShortName | None:
    """Returns the largest model of a family that fits a machine; None for a name that is no family's.

    Raises ModelNotFound where none fits.
    """
    family = find_family(name) if not Path(name).expanduser().is_dir() else ()
    if not family:
        return None
    found = largest(family, limit_bytes)
    if found is None:
        smallest = family[0]
        raise ModelNotFound(
            f"The smallest of {name}, {smallest.name}, takes {about(smallest)}, and this machine has memory for "
            f"{size_text(max(limit_bytes, 0))} of weights"
        )
    return found


def offer(name: str) -> str | None:
    """Asks at a terminal whether to download a missing model; returns its name once it is here.

    None for a model that is here, or one that cannot be downloaded. Raises ModelError.
    """
    if _is_here(name):
        return None
    limit_bytes = comfortable_weights_bytes(this_machine())
    chosen = choose(name, limit_bytes) or find_short_name(name)
    wanted = shorten(name) if chosen is None else chosen.name
    if parse_repository(wanted) is None or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return None
    size = "" if chosen is None else f" ({about(chosen)}{_fit(chosen, limit_bytes)})"
    console = Console(markup=False, highlight=False)
    answer = console.input(f"{wanted} is not on this machine. Pull it{size}? [Y/n] ").strip().lower()
    if answer not in ("", "y", "yes"):
        return None
    pull_for_person(wanted)
    return wanted


def about(model: ShortName) -> str:
    """Returns the approximate size of a model."""
    return f"about {size_text(model.num_bytes)}"


def this_machine() -> Machine:
    """Returns the machine's memory in bytes."""
    # Asking the device takes a moment.
    import mlx.core as mx

    return read_machine(mx.device_info())


def _fit(model: ShortName, limit_bytes: int) -> str:
    return "; fits this machine" if model.num_bytes <= limit_bytes else "; more than this machine has memory for"


def _is_here(name: str) -> bool:
    try:
        resolve(name)
    except ModelNotFound:
        return False
    return True


class _Reporter:
    """Shows a download. A context manager."""

    def __enter__(self) -> "_Reporter":
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves nothing behind."""

    def tell(self, event: PullEvent) -> None:
        """Shows one step."""
        raise NotImplementedError


class _Bars(_Reporter):
    """Bars at a terminal: one for all files, one for the file being fetched."""

    def __init__(self, console: Console, name: str) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console, transient=True)
        self._whole = self._progress.add_task(name, total=None)
        self._part: TaskID | None = None
        self._file = ""
        self._num_files = 1

    def __enter__(self) -> "_Bars":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def tell(self, event: PullEvent) -> None:
        match event:
            case PullPlanned(files=files):
                self._num_files = sum(bool(file.digest) for file in files)
            case PullProgress(file=file, file_bytes=here, done_bytes=done, total_bytes=total):
                self._progress.update(self._whole, completed=done, total=total)
                if file is not None and self._num_files > 1:
                    self._show(file.name, here, file.num_bytes)
            case PullChecking(file=file):
                self._progress.update(self._part or self._whole, description=f"checking {file.name}")

    def _show(self, name: str, here: int, total: int) -> None:
        if name != self._file or self._part is None:
            if self._part is not None:
                self._progress.remove_task(self._part)
            self._file, self._part = name, self._progress.add_task(name, total=total, completed=here)
        self._progress.update(self._part, completed=here)


class _Lines(_Reporter):
    def __init__(self, console: Console, name: str) -> None:
        self._console = console
        self._name = name
        self._told_share = 0.0
        self._told_at = time.monotonic()

    def tell(self, event: PullEvent) -> None:
        if not isinstance(event, PullProgress) or not event.total_bytes:
            return
        share, now = event.done_bytes / event.total_bytes, time.monotonic()
        more = share - self._told_share
        if more >= LINE_SHARE or (more > 0 and now - self._told_at >= LINE_SECONDS):
            self._told_share, self._told_at = share, now
            here, total = size_text(event.done_bytes), size_text(event.total_bytes)
            self._console.print(f"{self._name}: {share:.0%}, {here} of {total}", soft_wrap=True)


class _Json(_Reporter):
    def __init__(self, console: Console) -> None:
        self._console = console
        self._told_at = 0.0

    def tell(self, event: PullEvent) -> None:
        match event:
            case PullPlanned(repository=repository, files=files):
                listed = [{"name": file.name, "bytes": file.num_bytes} for file in files]
                self._print({"status": "planned", "repository": repository, "files": listed})
            case PullProgress(file=file, file_bytes=here, done_bytes=done, total_bytes=total):
                now = time.monotonic()
                if done < total and now - self._told_at < JSON_SECONDS:
                    return
                self._told_at = now
                part = {} if file is None else {"file": file.name, "file_bytes": here, "file_total": file.num_bytes}
                self._print({"status": "downloading", "completed": done, "total": total, **part})
            case PullChecking(file=file):
                self._print({"status": "checking", "file": file.name})

    def _print(self, figures: dict[str, object]) -> None:
        self._console.out(json.dumps(figures, ensure_ascii=False))


def _reporter(console: Console, name: str, *, as_json: bool) -> _Reporter:
    if as_json:
        return _Json(console)
    return _Bars(console, name) if console.is_terminal else _Lines(console, name)


def _stop_pull(name: str) -> Callable[[int, FrameType | None], None]:
    def stop(_signal: int, _frame: FrameType | None) -> None:
        # Downloads run in threads that would otherwise be waited for; what they wrote is kept for the next time.
        note = f"\nmlx-serve: stopped; go on where it stopped with: mlx-serve pull {name}\n"
        os.write(sys.stderr.fileno(), note.encode())
        os._exit(1)

    return stop
