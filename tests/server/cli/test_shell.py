"""Completion in real shells, where this machine has them, with the program itself."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from server.cli.main import COMMANDS, app, execute, load
from server.cli.options import SHELLS

ROOT = Path(__file__).parents[3]
LINES = [
    ("mlx-serve ser", ["serve", "service"]),
    ("mlx-serve cache ", ["export", "import", "list", "rm", "tree"]),
    ("mlx-serve serve --log-f", ["--log-format"]),
    ("mlx-serve serve demo --log-format ", ["json", "text"]),
    ("mlx-serve serve --log-level de", ["debug"]),
    ("mlx-serve run demo-h", ["demo-hybrid"]),
    ("mlx-serve launch --model demo-h", ["demo-hybrid"]),
    ("mlx-serve launch co", ["codex"]),
    ("mlx-serve completion z", ["zsh"]),
    ("mlx-serve cache rm --al", ["--all"]),
    ("mlx-serve list --al", []),
]


def needs(program: str) -> Any:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"there is no {program} here")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with the program on the path, and a folder to be completed."""
    program = tmp_path / "bin" / "mlx-serve"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m mlx_serve "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    (tmp_path / "work" / "folder").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert execute(["completion", shell]) == 0
    return capsys.readouterr().out


def run(*command: str) -> list[str]:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.stderr == ""
    return ended.stdout.splitlines()


def in_bash(text: str, line: str) -> list[str]:
    words = " ".join(f"'{word}'" for word in line.split(" "))
    ask = f"COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _mlx_serve_completion mlx-serve"
    return sorted(run("bash", "-c", f'{text}\n{ask}\nprintf "%s\\n" "${{COMPREPLY[@]}}"'))


def in_fish(text: str, line: str) -> list[str]:
    return sorted(row.partition("\t")[0] for row in run("fish", "-N", "-c", f"{text}\ncomplete -C '{line}'"))


def in_zsh(text: str, line: str) -> list[str]:
    """Has zsh show what it would hand to `_arguments`, since it completes in a terminal only."""
    words = " ".join(f"'{word}'" for word in line.split(" "))
    stubs = "compdef() { : }; _files() { : }; _arguments() { print -r -- $1 }"
    ask = f"words=({words}); CURRENT=${{#words}}; _mlx_serve_completion"
    shown = " ".join(run("zsh", "-f", "-c", f"{stubs}\n{text}\n{ask}")).partition("((")[2]
    return sorted(re.findall(r'"([^"]+)"(?::"[^"]*")?', shown))


COMPLETERS = [
    pytest.param("bash", in_bash, marks=needs("bash"), id="bash"),
    pytest.param("zsh", in_zsh, marks=needs("zsh"), id="zsh"),
    pytest.param("fish", in_fish, marks=needs("fish"), id="fish"),
]


@pytest.mark.parametrize(("line", "words"), LINES)
def test_what_is_typed_is_completed(
    line: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_MLX_SERVE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    with pytest.raises(SystemExit):
        execute([])
    assert sorted(capsys.readouterr().out.split()) == words


@pytest.mark.parametrize(("shell", "complete"), COMPLETERS)
def test_a_shell_asks_the_program(shell: str, complete: Any, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    for line, words in (LINES[0], LINES[5]):
        assert complete(text, line) == words, line


@pytest.mark.parametrize("name", [name for name in COMMANDS if " " not in name])
def test_every_flag_is_completed(name: str) -> None:
    command = load(name)
    with command.make_context(name, [], resilient_parsing=True) as context:
        found = {item.value for item in command.shell_complete(context, "--")}
    assert found == {flag for one in command.params for flag in one.opts if flag.startswith("--")} | {"--help"}


def test_every_command_is_completed() -> None:
    group: Any = typer.main.get_command(app)
    with group.make_context("mlx-serve", [], resilient_parsing=True) as context:
        assert {item.value for item in group.shell_complete(context, "")} == {n for n in COMMANDS if " " not in n}


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_bash_takes_a_colon_as_part_of_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    text = script("bash", capsys)
    assert run("bash", "-c", f"COMP_WORDBREAKS=' =:'\n{text}\necho \"$COMP_WORDBREAKS|\"") == [" =|"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(name)) for name in SHELLS])
def test_the_shell_understands_its_script(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script").write_text(script(name, capsys))
    assert run(name, "-n", str(tmp_path / "script")) == []


def test_a_shell_without_completion_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["completion", "tcsh"]) == 2
    assert "there is one for bash, zsh, fish" in capsys.readouterr().err
