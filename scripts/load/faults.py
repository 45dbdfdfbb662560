"""Each evaluation of one traffic fails once, and many pairs of them do: the test of that, without its sampling."""

import argparse
import subprocess
import sys


def run(options: argparse.Namespace) -> bool:
    """Runs the proof; whether it holds."""
    print("faults: every evaluation fails once, on each kind of model and in each way", flush=True)
    tests = "tests/server/engine/test_memory_faults.py"
    command = [sys.executable, "-m", "pytest", "-q", "--all-faults", "-p", "no:cacheprovider", tests]
    return subprocess.run(command, check=False, timeout=options.seconds * 8).returncode == 0
