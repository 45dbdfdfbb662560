"""`mlx-serve bench`: measures, in three minutes at most, and prints a table to paste."""

import contextlib
import json
import os
import platform
import re
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Annotated, Any

import typer

from models.texts import grouped, size_text
from server.app.config import ConfigError, ServerConfig, StartError
from server.app.memory_budget import Claim, read_machine, running, runtime_folder
from server.cli.config import load_model_config
from server.cli.keys import INTERRUPTED, handling, interruptible, leave, loading, scratch_folder
from server.cli.options import USUAL_MODEL, Force, Json

LIMIT_SECONDS = 165.0
"""From the start of the command; one call of the model may exceed it."""


def bench(
    model: Annotated[str | None, typer.Argument(**USUAL_MODEL)] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown")] = False,
    as_json: Json = False,
    is_forced: Force = False,
) -> None:
    """Measures and prints. Raises ConfigError, StartError and ModelError."""
    until = time.perf_counter() + LIMIT_SECONDS
    if as_json and as_markdown:
        raise ConfigError("give --json or --markdown, not both")
    config = load_model_config({"models": model and [model]}, os.environ)
    others = running(runtime_folder(os.environ))
    if others and not is_forced:
        raise StartError(f"{_beside(others)}, which would distort the figures: stop it, or say --force")
    with loading(config.models[0]) as fast_blas:
        import server.measure  # noqa: F401 - mlx-lm comes with it, and takes seconds

        facts = machine()
    if platform.system() == "Linux":
        facts["blas"] = fast_blas or "MLX's own"
    if others:
        facts["beside"] = _beside(others)
    # The scratch folder is to be deleted.
    with handling(leave, signal.SIGTERM):
        result = _measure(config, facts, until)
    typer.echo(result.as_json() if as_json else result.as_markdown() if as_markdown else result.as_text())
    raise typer.Exit(INTERRUPTED if result.is_stopped else 0)


def _beside(others: Sequence[Claim]) -> str:
    servers = ", ".join(f"{claim.model or 'no model yet'}, process {claim.pid}" for claim in others)
    return f"a server of yours is running ({servers})"


def _measure(config: ServerConfig, facts: dict[str, str], until: float) -> "BenchResult":
    """Adds the model to the facts."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from models.inference.runner import Runner
    from server.app.service import open_service
    from server.measure import Bench, Subject

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("of at most 3 minutes")
    console, begun, is_stopped = Console(stderr=True), until - LIMIT_SECONDS, False
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        console.show_cursor(True)  # Ctrl-C ends loading at once
        task = progress.add_task("loading the model", total=LIMIT_SECONDS)
        with interruptible():
            service = open_service(config, running(runtime_folder(os.environ)))
            model, memory, loaded = service.model, service.memory, service.loaded
            runner = Runner(loaded.model, vocab_size=loaded.vocab_size, adapters=loaded.adapters)
        size = f"{model.facts.num_parameters / 1e6:,.0f} million parameters, {size_text(memory.weights_bytes)}"
        facts["model"] = f"{service.asked_for.id}, {size} ({loaded.precision.value})"
        subject = Subject(loaded.model, runner, loaded.vocab_size, config.chunk_tokens)
        with _scratch_folder(config) as folder:
            bench = Bench(subject, until, model.context_tokens, memory.budget_bytes, folder)
            try:
                for name in bench.run():
                    progress.update(task, description=name, completed=time.perf_counter() - begun)
            except KeyboardInterrupt:
                is_stopped = True
    return BenchResult(facts, bench.rows, config.models[0], time.perf_counter() - begun, is_stopped)


@contextlib.contextmanager
def _scratch_folder(config: ServerConfig) -> Iterator[Path | None]:
    """A folder on the disk of `--cache-dir`, deleted at the end, if possible."""
    wanted = Path(config.cache_dir).expanduser()
    parent = next(path for path in (wanted, *wanted.parents) if path.is_dir())
    with contextlib.ExitStack() as stack:
        folder = None
        with contextlib.suppress(OSError):
            folder = stack.enter_context(scratch_folder(parent, "mlx-serve-bench-"))
        yield folder


# ----------------------------------------------------------------------------------------------------- the machine


def machine() -> dict[str, str]:
    """The machine's facts."""
    import mlx.core as mx

    info, is_metal = mx.device_info(), mx.metal.is_available()
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "chip": f"{info.get('device_name', platform.machine())}, {os.cpu_count()} cores",
        "memory": size_text(read_machine(info).memory_bytes),
        "system": f"macOS {platform.mac_ver()[0]}" if is_metal else f"{platform.system()} {platform.machine()}",
        "load": f"{os.getloadavg()[0]:.1f} in the minute before",
        "backend": "CPU" if mx.default_device() == mx.Device(mx.cpu) else "Metal" if is_metal else "CUDA",
        **({"kernels": kernels_text()} if is_metal else {}),
    }
    versions = {name: version(name) for name in ("mlx", "mlx-lm", "mlx-serve")}
    return {**facts, **versions, "python": platform.python_version()}


M5_MACOS = 26
"""MLX's wheel for this macOS and later has kernels for the matrix units of the M5; wheels for others do not."""


def kernels_text() -> str:
    """The macOS that the installed MLX was made for, by the tag of its wheel."""
    wheel = ""
    with contextlib.suppress(PackageNotFoundError):
        wheel = distribution("mlx-metal").read_text("WHEEL") or ""
    if (tag := re.search(r"^Tag: .*-macosx_(\d+)_", wheel, re.MULTILINE)) is None:
        return "of an MLX that was not installed from a wheel"
    rest = "with" if int(tag[1]) >= M5_MACOS else f"without what only MLX for macOS {M5_MACOS} has:"
    return f"of MLX for macOS {tag[1]}, {rest} those of the M5"


# ------------------------------------------------------------------------------------------------------ the result

TITLES = {
    "decode": "Tokens per second of rows together; ratio: the median of neighbouring blocks",
    "prefill": "Prefill by chunk",
    "turns": "First token of a turn with 64 new tokens, and moves of its state, in ms",
}


@dataclass(frozen=True)
class BenchResult:
    """Results, and the machine that they are from."""

    facts: Mapping[str, str]
    rows: Mapping[str, list[Any]]
    """As in `Bench`."""
    model: str
    seconds: float
    is_stopped: bool = False

    def as_json(self) -> str:
        """Everything for programs."""
        result = {"machine": self.facts, **self.rows, "seconds": self.seconds, "is_stopped": self.is_stopped}
        return json.dumps(result, indent=1, ensure_ascii=False)

    def as_text(self) -> str:
        """Tables for a terminal."""
        facts = "\n".join(f"{name:<9}  {value}" for name, value in self.facts.items())
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
        notes = "\n".join(textwrap.fill(note, width, subsequent_indent="  ") for note in self._notes().splitlines())
        tables = (
            "\n".join([title, *(line.strip("| ").replace(" | ", "  ") for line in [lines[0], *lines[2:]])])
            for title, lines in self._tables()
        )
        send = f"To send it: mlx-serve bench {self.model} --markdown; docs/benchmarks.md says where to."
        return "\n\n".join([facts, *tables, notes, send])

    def as_markdown(self) -> str:
        """The tables in Markdown."""
        facts = ", ".join(f"{name} {value}" for name, value in self.facts.items())
        tables = ("\n".join([f"{title}:", "", *lines]) for title, lines in self._tables())
        return "\n\n".join([facts, *tables, self._notes()])

    def _tables(self) -> Iterator[tuple[str, list[str]]]:
        for name, title in TITLES.items():
            if rows := self.rows[name]:
                columns = list(dict.fromkeys(key for row in rows for key in row))
                headings = [column.removesuffix("_ms").replace("_", " ") for column in columns]
                yield title, markdown_table(headings, [[_cell(row.get(key)) for key in columns] for row in rows])

    def _notes(self) -> str:
        ended = f"Stopped by Ctrl-C after {self.seconds:.0f} s." if self.is_stopped else f"Took {self.seconds:.0f} s."
        return "\n".join([*(f"Left out: {name}." for name in self.rows["left_out"]), ended])


def _cell(value: str | float | None) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    return f"{value:.2f}" if value < 10 else grouped(round(value))


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table, padded for a terminal."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return [line(columns), line(rule), *(line(row) for row in rows)]
