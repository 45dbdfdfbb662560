"""What the benchmarks share: the environment that both sides get, figures, tables, JSON.

Figures of a busy machine are only worth something side by side: a benchmark takes both sides in turns within one
run, reports medians, and compares by ratio.
"""

import ctypes.util
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from server.cli import bench
from server.cli.bench import markdown_table

ROOT = Path(__file__).resolve().parents[2]
_BLAS = "openblas"


@dataclass(frozen=True)
class Target:
    """A figure that was set out to be reached."""

    value: float
    is_ceiling: bool = True
    """Whether the measured figure is to stay at or below `value`, rather than at or above it."""

    def is_met(self, measured: float) -> bool:
        """Returns whether a measured figure reaches the target."""
        return measured <= self.value if self.is_ceiling else measured >= self.value

    def __str__(self) -> str:
        return f"{'<=' if self.is_ceiling else '>='} {self.value:g}"


@dataclass
class Report:
    """What one scenario found: rows for people, figures for programs, and targets with what was reached."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    verdicts: list[tuple[str, float, Target]] = field(default_factory=list)

    def add_verdict(self, name: str, measured: float, target: Target) -> None:
        """Sets a measured figure against its target."""
        self.verdicts.append((name, measured, target))

    def text(self) -> str:
        """Returns the table and the verdicts as Markdown."""
        lines = [f"### {self.title}", "", *markdown_table(self.columns, self.rows), ""]
        for name, measured, target in self.verdicts:
            word = "reached" if target.is_met(measured) else "MISSED"
            lines.append(f"- {name}: {measured:.3g} (target {target}) {word}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Returns everything in plain types."""
        verdicts = [
            {"name": name, "measured": measured, "target": asdict(target), "reached": target.is_met(measured)}
            for name, measured, target in self.verdicts
        ]
        return {"title": self.title, "figures": self.figures, "targets": verdicts}


def median(values: Sequence[float]) -> float:
    """Returns the median; not a number when there are no values."""
    return statistics.median(values) if values else float("nan")


def fast_blas_environment() -> dict[str, str]:
    """Returns this process's environment with OpenBLAS preloaded where it is installed.

    The CPU build of MLX comes with a slow BLAS. One thread, because two would fight with the other side's.
    """
    environment = dict(os.environ)
    library = ctypes.util.find_library(_BLAS)
    if library is not None:
        environment |= {"LD_PRELOAD": library, "OPENBLAS_NUM_THREADS": "1"}
    return environment


def machine() -> dict[str, str]:
    """Returns what the figures were measured on."""
    return {**bench.machine(), "blas": ctypes.util.find_library(_BLAS) or "the one in the MLX wheel"}


def write_json(path: Path, command: str, reports: Sequence[Report]) -> None:
    """Writes the reports of one run, with the machine and the command that made them."""
    content = {"command": command, "machine": machine(), "reports": [report.as_json() for report in reports]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
