"""Checks the architectures of the installed mlx-lm and writes what each can do here as a page of the docs.

Usage: python -m scripts.architectures [NAME]… [--provider] [--out FILE] [--jobs N] [--no-shards]

Each architecture is built tiny, with seeded weights, and tried in a process of its own. Exits with status 1 where
fewer than `--at-least` pass every check.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from models import providers
from scripts.architectures.configs import NOT_BUILT, names
from scripts.architectures.report import Result, page, vlm_page
from scripts.architectures.vlm_configs import VLM_CONFIGS

SECONDS_FOR_ONE = 600.0


def check(name: str, *, with_shards: bool) -> Result:
    """Returns what one architecture can do; a process that ends early or takes too long is a result, too."""
    output = _run([sys.executable, "-m", "scripts.architectures.one", name])
    try:
        result = Result(**json.loads(output.splitlines()[-1]))
    except (IndexError, ValueError):
        return Result(name, reasons={"build": f"its process ended: {output[-160:]}"})
    if result.shards and with_shards:
        result.told_of_shards = _shard(name)
    return result


def _shard(name: str) -> str:
    launch = str(Path(sys.executable).with_name("mlx.launch"))
    lines = _run([launch, "-n", "2", "--backend", "ring", sys.executable, "-m", "scripts.architectures.shard", name])
    return next(
        (line for line in reversed(lines.splitlines()) if line == "yes" or line.startswith("the logits")), "no"
    )


def _run(command: Sequence[str]) -> str:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_FOR_ONE, check=False)
    except subprocess.TimeoutExpired:
        return f"it took more than {SECONDS_FOR_ONE:g} s"
    return ended.stdout if ended.returncode == 0 else ended.stderr


def main() -> int:
    """Runs the program; returns its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="all, where none is named")
    parser.add_argument("--out", type=Path, help="write the page there")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--no-shards", action="store_true", help="do not split models over two processes")
    parser.add_argument("--at-least", type=int, default=0, metavar="N", help="so many must pass every check")
    parser.add_argument("--provider", action="store_true", help="try what mlx-vlm has and mlx-lm lacks")
    options = parser.parse_args()
    if options.provider and (need := providers.need_of(min(providers.VLM_TYPES))):
        parser.error(need)
    every = sorted(VLM_CONFIGS) if options.provider else [name for name in names() if name not in NOT_BUILT]
    chosen = options.names or every
    results = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(lambda name: check(name, with_shards=not options.no_shards), chosen):
            print(result.line(), flush=True)
            results.append(result)
    num_passed = sum(result.is_passed for result in results)
    print(f"{num_passed} of {len(results)} pass every check")
    if options.out is not None:
        options.out.write_text(vlm_page(results) if options.provider else page(results), encoding="utf-8")
    return 0 if num_passed >= options.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
