"""Serving compared with `mlx_lm.server`: both over HTTP, both as their users start them, on the same model folders.

Usage: python -m scripts.bench.serving [--scenario NAME]… [--json FILE]

Prints one table per scenario, with each target and what was reached. Takes under ten minutes on two cores. The
models are random weights of real architectures (`bench_serving_models`): speed and reuse do not depend on sense.
"""

import argparse
import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from scripts.bench import serving_cache, serving_latency, serving_overhead, serving_restart, serving_throughput
from scripts.bench.common import ROOT, Report, machine, write_json
from scripts.bench.serving_client import AnswerFailed
from scripts.bench.serving_servers import ServerDied

Scenario = Callable[[Path, Path], Awaitable[Report]]

SCENARIOS: dict[str, Scenario] = {
    "interleaved": serving_cache.interleaved,
    "newcomer": serving_latency.newcomer,
    "gap": serving_latency.gap,
    "chunks": serving_latency.chunk_sizes,
    "four_at_once": serving_latency.four_at_once,
    "matrix": serving_cache.matrix,
    "streams": serving_throughput.four_streams,
    "restart": serving_restart.restart,
    "overhead": serving_overhead.overhead,
    "sampling": serving_throughput.sampling,
}


def main() -> None:
    """Runs the chosen scenarios; the exit status is 1 if one could not be measured."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, _end)
    print(", ".join(f"{key} {value}" for key, value in machine().items()), flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-serving-") as folder:
        work = Path(folder)
        _write_models(work / "models")
        reports, failed = asyncio.run(_run(arguments.scenario or list(SCENARIOS), work))
    if arguments.json is not None:
        write_json(arguments.json, f"python -m scripts.bench.serving {' '.join(sys.argv[1:])}".strip(), reports)
    sys.exit(f"not measured: {', '.join(failed)}" if failed else 0)


def _end(_signal: int, _frame: object) -> None:
    # As an exception, so that the servers are ended on the way out.
    raise SystemExit(143)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare serving with mlx_lm.server.")
    parser.add_argument("--scenario", action="append", choices=list(SCENARIOS), help="may be repeated; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    return parser.parse_args()


def _write_models(folder: Path) -> None:
    # A process of its own: what it needs of MLX would only lie about in this one.
    subprocess.run(
        [sys.executable, "-m", "scripts.bench.serving_models", str(folder)],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )


async def _run(names: list[str], work: Path) -> tuple[list[Report], list[str]]:
    reports, failed = list[Report](), list[str]()
    for name in names:
        started = time.monotonic()
        try:
            report = await SCENARIOS[name](work / "models", work)
        except (AnswerFailed, ServerDied) as error:
            print(f"\n{name}: {error}", file=sys.stderr, flush=True)
            failed.append(name)
            continue
        reports.append(report)
        print(f"\n{report.text()}\n\n({name}: {time.monotonic() - started:.0f} s)", flush=True)
    return reports, failed


if __name__ == "__main__":
    main()
