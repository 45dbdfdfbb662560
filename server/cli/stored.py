"""`mlx-serve list`, `show`, `cp`, `tag`, `rm`, `create` and `verify`."""

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from models import names
from models.errors import ModelfileError, ModelNotFound, StoreError, told_as
from models.store import library
from models.store.stored_model import WITHOUT_EFFECT, ModelDefaults, Modelfile, StoredModel, WeightsPlace
from models.texts import grouped, size_text
from server.app.config import StartError
from server.app.memory_budget import find_user
from server.cli.options import AnyModel, Force, Json, OwnName, plain_table, tell

LIST_HEADINGS = ("NAME", "SIZE", "WEIGHTS", "ARCHITECTURE", "MODIFIED")


def show_installed(as_json: Json = False) -> None:
    """Prints the models that `serve` and `run` find by name."""
    models = names.installed()
    tell([_figures(model) for model in models], plain_table([LIST_HEADINGS, *map(_cells, models)]), as_json)
    if not as_json and sys.stdout.isatty() and not any("/" in model.name for model in models):
        typer.echo("\nMore models: mlx-serve pull qwen3:0.6b, or any repository of MLX weights.")


def _figures(model: names.InstalledModel) -> dict[str, str | int | None]:
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


def _cells(model: names.InstalledModel) -> tuple[str, ...]:
    size, age = size_text(model.size_bytes), age_text(time.time() - _modified(model))
    return model.short_name or model.name, size, model.quantization, model.architecture, age


def _modified(model: names.InstalledModel) -> float:
    return model.path.stat().st_mtime if model.stored is None else model.stored.modified.timestamp()


def age_text(seconds: float) -> str:
    """A time in the past such as `3 days ago`."""
    for unit, length in (("year", 31_536_000), ("month", 2_592_000), ("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}{'s' if seconds >= 2 * length else ''} ago"
    return "just now"


def show(
    name: AnyModel, as_modelfile: Annotated[bool, typer.Option("--modelfile")] = False, as_json: Json = False
) -> None:
    """Prints what a model is; raises ModelError."""
    place, stored = names.place_of(name), names.find_stored(name)
    if as_modelfile:
        if stored is None:
            raise StoreError(f"{name} is no name of your own, and has no Modelfile; make one with mlx-serve create")
        typer.echo(stored.modelfile())
        return
    model = names.InstalledModel(name if stored is None else stored.short_name, names.folder_of(place), stored)
    record = _record(model, place)
    lines = (f"{label:<13}{text}".replace("\n", "\n" + " " * 13) for label, text in _facts(record, place))
    tell(record, "\n".join(lines), as_json)


def copy(source: AnyModel, name: OwnName, replaces: Force = False, as_json: Json = False) -> None:
    """Gives a model another name. Raises ModelError."""
    made = library.create(name, names.place_of(source), Modelfile(source), replaces=replaces)
    tell({"name": made.short_name, "from": source}, f"{made.short_name} stands for {made.weights}.", as_json)


def tag(name: OwnName, tag_name: str, replaces: Force = False, as_json: Json = False) -> None:
    """Gives a name of one's own another tag. Raises ModelError."""
    if (stored := names.find_stored(name)) is None:
        raise StoreError(f"{name} is no name of your own; give it one first: mlx-serve cp {name} NAME")
    family = stored.name.partition(":")[0]
    copy(stored.name, f"{family}:{tag_name.removeprefix(f'{family}:')}", replaces=replaces, as_json=as_json)


def create(
    name: OwnName, file: Annotated[str, typer.Option("-f", "--file")] = "Modelfile", as_json: Json = False
) -> None:
    """Makes a model from a Modelfile; raises ModelError and StartError."""
    text, folder = _read(file)
    with told_as(ModelfileError, file, ModelfileError):
        modelfile = Modelfile.parse(text)
        # A path is relative to the Modelfile's folder.
        is_path = modelfile.base.startswith(("./", "../")) or modelfile.base in (".", "..")
        base = str(folder / modelfile.base) if is_path else modelfile.base
        made = library.create(name, names.place_of(base), modelfile)
    idle = sorted({key for key, _ in modelfile.parameters if key.lower() in WITHOUT_EFFECT})
    note = f" {', '.join(idle)} {'have' if len(idle) > 1 else 'has'} no effect here." if idle else ""
    record = {"name": made.short_name, "from": str(made.weights), "without_effect": idle}
    said = f"{made.short_name} is made from {made.weights}.{note}\nTry it: mlx-serve run {made.short_name}"
    tell(record, said, as_json)


def remove(name: AnyModel, is_forced: Force = False, as_json: Json = False) -> None:
    """Removes a name, or the files of a repository, after a question. Raises ModelError and StartError."""
    if name in names.BUILT_IN:
        raise StoreError(f"{name} comes with mlx-serve and cannot be removed")
    if stored := names.find_stored(name):
        _remove_name(stored, is_forced=is_forced, as_json=as_json)
    elif names.parse_repository(name) is None:
        raise ModelNotFound(f"There is no model {name!r} to be removed; mlx-serve list shows those that are there.")
    else:
        _remove_weights(name, is_forced=is_forced, as_json=as_json)


def check_files(
    name: AnyModel, removes_damaged: Annotated[bool, typer.Option("--remove-damaged")] = False, as_json: Json = False
) -> None:
    """Prints faults of a model's files; exit status 1 if any. Raises ModelError."""
    place = names.place_of(name)
    folder = names.files_of(place)
    fault_of, num_files, num_compared = library.verify(folder)
    damaged = [file for file in fault_of if (folder / file).exists()]
    removed = damaged if removes_damaged and place.kind == "repository" else []
    for file in removed:
        (folder / file).resolve().unlink()
    faults = [{"file": file, "fault": fault} for file, fault in fault_of.items()]
    record = {"name": name, "files": num_files, "compared": num_compared, "faults": faults, "removed": removed}
    whole = f"{name} is whole: {num_compared} files have the hub's hash."
    if unknown := num_files - num_compared:
        whole = f"{name} has its {num_files} files. No hash is known of {unknown}; the length of weights is right."
    tell(record, "\n".join(f"{file}: {fault}" for file, fault in fault_of.items()) or whole, as_json)
    if faults and not as_json:
        typer.echo(f"mlx-serve: {_advice(name, place, are_removed=bool(removed))}", err=True)
    raise typer.Exit(1 if faults else 0)


def _advice(name: str, place: WeightsPlace, *, are_removed: bool) -> str:
    if place.kind == "repository":
        first = "" if are_removed else f"mlx-serve verify --remove-damaged {name}, then "
        return f"mend it: {first}mlx-serve pull {place}"
    return "reinstall mlx-serve" if place.kind == "built-in" else f"copy the files of {name} into the folder again"


def _record(model: names.InstalledModel, place: WeightsPlace) -> dict[str, Any]:
    stored = model.stored
    defaults = ModelDefaults() if stored is None else stored.defaults
    return {
        "name": model.name,
        "id": names.identity_of(place),
        "source": {"kind": place.kind, "name": place.name, "commit": place.commit or None},
        "path": str(model.path),
        "size_bytes": model.size_bytes,
        "architecture": model.architecture,
        "quantization": model.quantization or None,
        "context_tokens": _context(model, defaults.context_tokens),
        "sees_images": _sees(model),
        "parameters": list(map(list, defaults.parameters())),
        "system": None if stored is None else defaults.system,
        "messages": [[message.role, message.content] for message in defaults.messages],
        "license": None if stored is None else stored.license,
        "files": sorted(path.name for path in model.path.iterdir() if path.is_file()),
        "created": None if stored is None else stored.created.isoformat(),
        "modified": None if stored is None else stored.modified.isoformat(),
    }


def _facts(record: Mapping[str, Any], place: WeightsPlace) -> Iterator[tuple[str, str]]:
    yield "name", record["name"]
    yield "from", f"{place}" if place.kind != "built-in" else f"{place}, which comes with mlx-serve"
    yield "folder", record["path"]
    yield "size", size_text(record["size_bytes"])
    yield "architecture", record["architecture"]
    yield "weights", record["quantization"] or "not quantized"
    yield "context", f"{grouped(record['context_tokens'])} tokens"
    yield "images", "seen" if record["sees_images"] else "not seen"
    if record["created"] is not None:
        yield "parameters", "\n".join(f"{key} {value}" for key, value in record["parameters"]) or "none"
        yield "system", record["system"] or "none"
        yield from ((f"as {role}", content) for role, content in record["messages"])
        if record["license"]:
            yield "license", record["license"]
    yield "template", _template(Path(record["path"]))
    yield "files", "\n".join(record["files"])


def _sees(model: names.InstalledModel) -> bool:
    # Imports MLX.
    from models.loader import read_config
    from models.vision.loading import find_images

    return find_images(model.path, read_config(model.path)[0], 1) is not None


def _context(model: names.InstalledModel, limit: int | None) -> int:
    # Imports MLX.
    from models.loader import read_config

    own = read_config(model.path)[1]
    return min(own, limit or own)


def _template(folder: Path) -> str:
    if (folder / "chat_template.jinja").is_file():
        return "chat_template.jinja"
    with contextlib.suppress(OSError):
        if b'"chat_template"' in (folder / "tokenizer_config.json").read_bytes():
            return "in tokenizer_config.json"
    return "none"


def _read(file: str) -> tuple[str, Path]:
    """Also returns the folder of relative paths. Raises StartError."""
    path = Path(file).expanduser()
    if file != "-" and not path.exists():
        raise StartError(f"there is no {file}; write it first: printf 'FROM demo\\nSYSTEM Be brief.\\n' > {file}")
    with told_as(StartError, f"{file} cannot be read"):
        if file == "-":
            return sys.stdin.read(), Path.cwd()
        return path.read_text(encoding="utf-8"), path.parent


def _remove_name(stored: StoredModel, *, is_forced: bool, as_json: bool) -> None:
    others = [name for name in library.names_with(stored.weights) if name != stored.short_name]
    users = f"; {', '.join(others)} {'uses' if len(others) == 1 else 'use'} them, too." if others else "."
    kept = f"The weights of {stored.weights} stay{users}"
    _confirm(f"Remove the name {stored.short_name}? {kept}", is_forced=is_forced)
    library.remove(stored.name)
    if stored.weights.kind == "repository" and not others:
        kept += f" To remove them: mlx-serve rm {stored.weights}"
    record = {"name": stored.short_name, "removed": "name", "weights": str(stored.weights), "others": others}
    tell(record, f"{stored.short_name} is removed. {kept}", as_json)


def _remove_weights(name: str, *, is_forced: bool, as_json: bool) -> None:
    place = names.place_of(name)
    if user := find_user(place):
        raise StartError(f"{name} is in use by the server at {user.url}; stop that, or unload the model, first")
    removal = library.find_removal(place)
    size, freed_bytes = removal.expected_freed_size_str, removal.expected_freed_size
    _confirm(f"Delete {place}, {size}, from Hugging Face's cache? Other programs share it.", is_forced=is_forced)
    library.delete(removal)
    record = {"name": name, "removed": "weights", "weights": str(place), "freed_bytes": freed_bytes}
    tell(record, f"{place} is deleted, {size} are free.", as_json)


def _confirm(question: str, *, is_forced: bool) -> None:
    """Raises StartError where nobody can be asked, or the answer is no."""
    if is_forced:
        return
    if not sys.stdin.isatty():
        raise StartError("nothing is removed without being asked for at a terminal; --force removes it at once")
    if not typer.confirm(question, err=True):
        raise StartError("nothing was removed")
