"""Runs the tests that touch mlx-lm against each version of it that this project allows.

Usage: python -m scripts.compat [VERSION]…

Each version gets an environment of its own in a temporary folder, with everything else as locked, mlx too. Exits with
status 1 where a version fails.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements-dev.lock"
VERSIONS = ("0.32.0", "0.32.1", "0.32.2")
"""The oldest that `pyproject.toml` allows to the newest, which is the locked one."""
TESTS = (
    "tests/models",
    "tests/cache/layers",
    "tests/cache/test_restored_equals_cold.py",
    "tests/cache/test_window_rows.py",
    "tests/scripts/test_architectures.py",
)


def locked_version(package: str, lock: str) -> str:
    """Returns the version of a package in the text of a lock file; raises LookupError."""
    match = re.search(rf"^{re.escape(package)}==([^\s;\\]+)", lock, re.MULTILINE)
    if match is None:
        raise LookupError(f"{package} is not locked")
    return match[1]


def without(package: str, lock: str) -> str:
    """Returns the text of a lock file without one package; its hashes go on over indented lines."""
    return re.sub(rf"^{re.escape(package)}==.*\n(?:[ \t].*\n)*", "", lock, flags=re.MULTILINE)


def try_version(version: str, folder: Path) -> bool:
    """Whether the tests pass with a version of mlx-lm, in an environment made in `folder`."""
    python = folder / "bin" / "python"
    rest = folder.with_suffix(".txt")
    rest.write_text(without("mlx-lm", LOCK.read_text(encoding="utf-8")), encoding="utf-8")
    uv = [sys.executable, "-m", "uv", "--quiet"]
    _run([*uv, "venv", "--python", sys.executable, str(folder)])
    _run([*uv, "pip", "install", "--python", str(python), "--no-deps", "--requirement", str(rest)])
    _run([*uv, "pip", "install", "--python", str(python), "--no-deps", f"mlx-lm=={version}"])
    tests = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(tests, cwd=ROOT, env=environment, check=False).returncode == 0


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True)


def main() -> int:
    """Runs the program; returns its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="of mlx-lm; else all that are allowed")
    versions = parser.parse_args().versions or VERSIONS
    failed = []
    with tempfile.TemporaryDirectory(prefix="compat-") as folder:
        for version in versions:
            print(f"mlx-lm {version}", flush=True)
            if not try_version(version, Path(folder) / version.replace(".", "_")):
                failed.append(version)
    print(f"fails with mlx-lm {', '.join(failed)}" if failed else f"passes with mlx-lm {', '.join(versions)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
