"""The command notices packages that are not its own before it runs any, and leaves nothing when uninstalled."""

import base64
import hashlib
import os
import re
import signal
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import pytest

from server.app.keys import SHARED
from server.cli.main import COMMANDS
from server.cli.repl.terminal import history_file, open_history
from tests.support.server_process import Process
from tests.support.tiny_models import write

ROOT = Path(__file__).parents[1]
ENTRY = ROOT / "mlx_serve.py"
OURS = {
    "server/__init__.py": "",
    "server/cli/__init__.py": "",
    "server/cli/main.py": "def main():\n    print('runs')\n",
    "models/__init__.py": "",
    "cache/__init__.py": "",
}


Result: TypeAlias = "subprocess.CompletedProcess[str]"


def install(site: Path, name: str, files: dict[str, str]) -> None:
    """Writes a distribution's files and the list of them, as an installer does."""
    lines = []
    for file, text in files.items():
        path = site / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{file},sha256={digest},{len(text)}\n")
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(lines))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    site = tmp_path / "site"
    install(site, "mlx-serve", {**OURS, "mlx_serve.py": ENTRY.read_text()})
    return site


def start(*path: Path, run: tuple[str, ...] = ("-c", "import mlx_serve; mlx_serve.main()")) -> Result:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, "-S", "-P", *run]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


def says_one_sentence(result: Result, *words: str) -> None:
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("mlx-serve: ") and len(result.stderr.splitlines()) == 1, result.stderr
    assert all(word in result.stderr for word in (*words, "environment of its own")), result.stderr


def test_its_own_packages_are_run(site: Path) -> None:
    result = start(site)
    assert (result.stdout, result.stderr) == ("runs\n", "")


def test_the_version_is_said_before_any_package_is_looked_at(site: Path) -> None:
    (site / "server" / "cli" / "main.py").write_text("raise SystemExit('imported for nothing')\n")
    result = start(site, run=("-c", "import sys, mlx_serve; sys.argv[1:] = ['--version']; mlx_serve.main()"))
    assert (result.returncode, result.stdout, result.stderr) == (0, "mlx-serve 1.0\n", "")


def test_it_runs_as_a_module_too(site: Path) -> None:
    assert start(site, run=("-m", "mlx_serve")).stdout == "runs\n"


def test_ctrl_c_while_the_packages_are_imported_is_no_error_of_the_program(site: Path) -> None:
    (site / "server" / "cli" / "main.py").write_text("raise KeyboardInterrupt\n")
    result = start(site)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


@pytest.mark.parametrize("file", OURS)
def test_a_file_that_another_distribution_wrote_over_is_told(site: Path, file: str) -> None:
    install(site, "flask-server", {file: "raise SystemExit('foreign code was run')\n", "flask_server.py": ""})
    says_one_sentence(start(site), "flask-server", str(site / file))


def test_files_of_others_beside_ours_do_no_harm(site: Path) -> None:
    install(site, "flask-server", {"server/extra.py": "", "flask_server.py": ""})
    assert start(site).stdout == "runs\n"


def test_a_change_by_hand_is_theirs_to_make(site: Path) -> None:
    (site / "server" / "cli" / "main.py").write_text("def main():\n    print('changed')\n")
    assert start(site).stdout == "changed\n"


@pytest.mark.parametrize("file", OURS)
def test_a_file_that_went_with_another_distribution_is_told(site: Path, file: str) -> None:
    (site / file).unlink()
    says_one_sentence(start(site), "missing", file.split("/")[0])


@pytest.mark.parametrize("package", ["server", "models", "cache"])
def test_a_package_of_that_name_that_comes_first_is_told(site: Path, package: str, tmp_path: Path) -> None:
    install(tmp_path / "other", "other", {f"{package}/__init__.py": "raise SystemExit('foreign code was run')\n"})
    says_one_sentence(start(tmp_path / "other", site), str(tmp_path / "other" / package))


def test_a_checkout_needs_no_list_of_files(tmp_path: Path) -> None:
    for file, text in {**OURS, "mlx_serve.py": ENTRY.read_text()}.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    assert start(tmp_path).stdout == "runs\n"


def test_every_package_of_the_product_is_installed_and_nothing_else() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {file.parent for name in ("cache", "models", "server") for file in (ROOT / name).rglob("__init__.py")}
    packages = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(setup["packages"]) == packages | {"models.demo", "models.demo_hybrid"}
    assert setup["py-modules"] == ["mlx_serve"]


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
