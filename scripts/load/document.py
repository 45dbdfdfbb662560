"""schemathesis over the whole of `/openapi.json`: no answer is a 5xx, and each is as the document says."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from scripts.load.served import serving

FOLDER = Path(".cache/load/schemathesis")
SERVER = ("--context", "512", "--default-max-tokens", "8", "--cache-memory", "400MB", "--client-timeout", "30")
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def _install() -> Path:
    """Returns the program, installed by uv in an environment of its own where it is not there yet."""
    if not (FOLDER / "ready").exists():
        uv = [sys.executable, "-m", "uv", "--quiet"]
        subprocess.run([*uv, "venv", "--clear", str(FOLDER)], check=True)
        python = FOLDER / "bin" / "python"
        subprocess.run([*uv, "pip", "install", "--python", str(python), "schemathesis"], check=True)
        (FOLDER / "ready").touch()
    return FOLDER / "bin" / "schemathesis"


def run(options: argparse.Namespace) -> bool:
    """Runs the proof; whether it holds."""
    print(f"document: {options.examples} examples for each operation, --seed {options.seed}", flush=True)
    program = _install().absolute()
    # Its packages are not ours.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LD_"))}
    with serving(*SERVER) as served:
        command = [str(program), "run", f"{served.url}/openapi.json", "--checks", CHECKS, "--no-color"]
        command += ["--max-examples", str(options.examples), "--seed", str(options.seed), "--workers", "4"]
        done = subprocess.run(command, env=environment, timeout=options.seconds, check=False, cwd=program.parent)
        faults = served.faults()
    for fault in faults:
        print(f"  WRONG in the log: {fault}")
    return done.returncode == 0 and not faults
