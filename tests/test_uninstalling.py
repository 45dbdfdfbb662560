"""Uninstalling as docs/upgrading.md says it leaves nothing in the home of a user who used everything."""

import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest

from server.app.keys import SHARED
from server.cli.main import COMMANDS
from server.cli.repl.terminal import history_file, open_history
from tests.support.server_process import Process
from tests.support.tiny_models import write

ROOT = Path(__file__).parents[1]
DOCS = (ROOT / "docs" / "upgrading.md").read_text(encoding="utf-8")
EXAMPLES = {name: command["examples"] for name, command in COMMANDS.items()}
PROGRAMS = {
    "mlx-serve": f'cd "{ROOT}" && exec "{sys.executable}" mlx_serve.py "$@"',
    # The machine's own services and tools are not for a test to touch.
    "systemctl": "exit 0",
    "launchctl": "exit 0",
    "uv": 'test "$*" = "tool uninstall mlx-serve"',
}


@pytest.fixture
def environment(tmp_path: Path) -> Mapping[str, str]:
    """A user's, whose programs are ours."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, script in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    home = tmp_path / "home"
    for folder in (".local/share/bash-completion/completions", ".config/fish/completions"):
        (home / folder).mkdir(parents=True)
    (home / ".config" / "mlx-serve").mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    return {**kept, "HOME": str(home), "PATH": f"{programs}:{os.environ['PATH']}"}


def sh(script: str, environment: Mapping[str, str]) -> None:
    ended = subprocess.run(
        ["sh", "-e", "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_nothing_is_left(environment: Mapping[str, str], tmp_path: Path) -> None:
    home = Path(environment["HOME"])
    used_commands = [*EXAMPLES["completion"], EXAMPLES["config"][1], *EXAMPLES["service install"]]
    sh("\n".join(used_commands), environment)
    keep_something(write("qwen3", tmp_path / "tiny"), environment)
    open_history(history_file({"XDG_STATE_HOME": str(home / ".local" / "state")})).store_string("Hi")
    used = {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()}
    assert len(used) > 6, used
    assert ".cache/mlx-serve/responses.sqlite3" in used
    assert not any(path.stat().st_mode & SHARED for path in (home / ".cache").rglob("*.sqlite3"))
    [block] = re.findall(r"```sh\n(.*?)```", DOCS, re.DOTALL)
    sh(block, environment)
    assert [path for path in home.rglob("*") if path.is_file() or "mlx-serve" in path.name] == []


def keep_something(model: Path, environment: Mapping[str, str]) -> None:
    """Has a server write conversations and responses to the disk."""
    arguments = [str(model), "--port", "0", "--cache-disk", "100MB", "--slots", "1", "--cache-memory", "1GiB"]
    server = Process(*arguments, environment={"HOME": environment["HOME"], "XDG_CONFIG_HOME": ""}, fresh=True)
    try:
        body = b'{"input": "Tell me something.", "max_output_tokens": 16, "store": true}'
        url, headers = f"http://127.0.0.1:{server.port}/v1/responses", {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=120) as answer:
            assert answer.status == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    finally:
        server.close()
