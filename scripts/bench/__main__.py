"""Runs the benchmarks one after another, each in a process of its own; `make bench` does this.

Usage: python -m scripts.bench [NAME]…      (all of them if none is named)

Each prints its tables and writes results/NAME.json. They run with OpenBLAS where it is installed: the BLAS that MLX's
CPU build brings is some thirty times slower, and would hide everything else.
"""

import subprocess
import sys

from scripts.bench.common import ROOT, fast_blas_environment

NAMES = ("decode", "speculate", "serving", "decisions", "memory", "trie", "disk_full")


def main(names: list[str]) -> int:
    """Returns 0 if every benchmark ended well."""
    present = [name for name in NAMES if (ROOT / "scripts" / "bench" / f"{name}.py").exists()]
    unknown = set(names) - set(present)
    if unknown:
        print(f"there is no benchmark {', '.join(sorted(unknown))}; there are {', '.join(present)}", file=sys.stderr)
        return 2
    environment = fast_blas_environment()
    print(
        f"BLAS: {environment.get('LD_PRELOAD') or 'the one in the MLX wheel (OpenBLAS is not installed)'}", flush=True
    )
    failed = []
    for name in names or present:
        command = [sys.executable, "-m", f"scripts.bench.{name}", "--json", f"results/{name}.json"]
        print(f"\n## {name}\n", flush=True)
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
            failed.append(name)
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
