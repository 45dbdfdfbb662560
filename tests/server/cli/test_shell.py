"""Completion in real shells, where this machine has them, and the manual page."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from server.app.config import SETTINGS, variable_of
from server.cli.main import app, execute
from server.cli.shell import EXIT_STATUSES, FILES, SCRIPTS, CommandOutline, outline

DOCS = (Path(__file__).parents[3] / "docs" / "cli.md").read_text(encoding="utf-8")
MODELS = ["demo", "qwen3:8b", "qwen3:0.6b", "org/name"]


def needs(program: str) -> Any:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"there is no {program} here")


@pytest.fixture
def root() -> CommandOutline:
    return outline(typer.main.get_command(app))


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for the program, of which scripts ask nothing but the models."""
    program = tmp_path / "bin" / "mlx-serve"
    program.parent.mkdir()
    rows = "".join(f"echo '{name}  1 GB'\n" for name in MODELS)
    program.write_text(f'#!/bin/sh\n[ "$1" = list ] || exit 9\necho NAME  SIZE\n{rows}')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "work" / "folder").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def shell(*command: str, **variables: str) -> list[str]:
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **variables}
    )
    assert ended.stderr == ""
    return ended.stdout.splitlines()


def complete_in_bash(stub: Path, root: CommandOutline, line: str) -> list[str]:
    script = stub / "script"
    script.write_text(SCRIPTS["bash"](root))
    run = f'source {script}; _mlx_serve; [ ${{#COMPREPLY[@]}} = 0 ] || printf "%s\\n" "${{COMPREPLY[@]}}"'
    variables = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_WORDBREAKS": " \t\n\"'><=;|&(:"}
    return sorted(shell("bash", "-c", run, **variables))


def complete_in_fish(stub: Path, root: CommandOutline, line: str) -> list[str]:
    script = stub / "script"
    script.write_text(SCRIPTS["fish"](root))
    shown = shell("fish", "-N", "-c", f"source {script}; complete -C '{line}'", HOME=str(stub))
    return sorted(row.partition("\t")[0] for row in shown)


COMPLETERS = [
    pytest.param(complete_in_bash, marks=needs("bash"), id="bash"),
    pytest.param(complete_in_fish, marks=needs("fish"), id="fish"),
]


@pytest.mark.parametrize("complete", COMPLETERS)
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("mlx-serve ser", ["serve", "service"]),
        ("mlx-serve cache ", ["list", "rm", "tree"]),
        ("mlx-serve serve --log-f", ["--log-format"]),
        ("mlx-serve serve demo --log-format ", ["json", "text"]),
        ("mlx-serve serve --log-level de", ["debug"]),
        ("mlx-serve serve --cache-dir fo", ["folder"]),
        ("mlx-serve run or", ["org/name"]),
        ("mlx-serve completion z", ["zsh"]),
        ("mlx-serve cache rm --al", ["--all"]),
        ("mlx-serve list --al", []),
        ("mlx-serve serve --port 8", []),
    ],
)
def test_what_is_typed_is_completed(
    complete: Any, line: str, words: list[str], stub: Path, root: CommandOutline
) -> None:
    assert [word.rstrip("/") for word in complete(stub, root, line)] == words


@pytest.mark.parametrize("complete", COMPLETERS)
def test_every_command_and_flag_is_completed(complete: Any, stub: Path, root: CommandOutline) -> None:
    names = [command.words[-1] for command in root.commands]
    assert set(complete(stub, root, "mlx-serve ")) >= set(names)
    for command in root.walk():
        flags = {flag for option in command.options for flag in option.flags if flag.startswith("--")}
        assert set(complete(stub, root, f"mlx-serve {command.name} --".replace("  ", " "))) == flags


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_bash_goes_on_behind_a_colon(stub: Path, root: CommandOutline) -> None:
    assert complete_in_bash(stub, root, "mlx-serve run qwen3:") == ["0.6b", "8b"]
    assert complete_in_bash(stub, root, "mlx-serve run q") == ["qwen3:0.6b", "qwen3:8b"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(name)) for name in SCRIPTS])
def test_the_shell_understands_its_script(name: str, stub: Path, root: CommandOutline) -> None:
    script = stub / "script"
    script.write_text(SCRIPTS[name](root))
    assert shell(name, "-n", str(script)) == []


def test_a_shell_without_completion_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["completion", "tcsh"]) == 2
    assert "there is one for bash, zsh, fish" in capsys.readouterr().err
    assert execute(["completion", "bash"]) == 0
    assert capsys.readouterr().out.startswith("# Completion of mlx-serve for bash.")


def test_the_manual_has_every_command_flag_and_variable(
    capsys: pytest.CaptureFixture[str], root: CommandOutline
) -> None:
    assert execute(["man"]) == 0
    page = capsys.readouterr().out.replace("\\-", "-")
    for command in root.walk():
        assert f".SS mlx-serve {command.name}\n" in page or not command.words
        for option in command.options:
            assert all(f"\\fB{flag}\\fR" in page for flag in option.flags)
    assert all(f"\\fB{variable_of(setting)}\\fR" in page for setting in SETTINGS.values())


@pytest.mark.skipif(shutil.which("groff") is None, reason="there is no groff here")
def test_the_manual_is_understood(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    execute(["man"])
    page = tmp_path / "mlx-serve.1"
    page.write_text(capsys.readouterr().out, encoding="utf-8")
    shown = "\n".join(shell("groff", "-man", "-Tutf8", "-Kutf8", "-ww", "-P-cbou", str(page)))
    assert "mlx-serve serve qwen3:8b --cache-disk 20GB" in shown.replace("‐", "-").replace("−", "-")


def test_the_docs_say_the_same_of_exit_status_and_files() -> None:
    assert set(re.findall(r"^\| (\d+) \|", DOCS, re.MULTILINE)) == {str(status) for status in EXIT_STATUSES}
    assert all(f"`{path}`" in DOCS for path in FILES)
