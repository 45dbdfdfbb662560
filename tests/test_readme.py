"""The README's example runs as it stands, against the server that the README starts."""

import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from models.names import SHORT_NAMES
from server.app.config import ServerConfig
from server.app.service import open_service
from server.cli.main import app, execute
from server.cli.serve import Surroundings, _show_banner
from tests.support.apps import create_app
from tests.support.live_server import running

TEXT = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
REUSE = re.compile(r"  (\d+) of (\d+) prompt tokens reused, (\d+) evaluated")


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    return [text for found, text in fenced if found == language]


def test_the_example_asks_every_question_and_reuses_what_it_said(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = blocks("python")
    config = ServerConfig()
    service = open_service(config)
    service.engine.start()
    try:
        with running(create_app(service.engine, service.model, config)) as url:
            code = program.replace("http://127.0.0.1:8080", url)
            command = [sys.executable, "-c", code]
            ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
            assert execute(["doctor", url]) == 0
        banner, around = io.StringIO(), Surroundings((), "libopenblas.so.0", ["http://127.0.0.1:8080"])
        _show_banner(Console(file=banner, soft_wrap=True, highlight=False), service, config, around)
    finally:
        service.engine.stop()
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert [line for line in lines if line.startswith("> ")] == [
        "> My name is Ada and I live in Paris.",
        "> What is my name?",
        "> Where do I live?",
    ]
    assert "Ada" in lines[4] and "Paris" in lines[7]
    counts = [tuple(map(int, match.groups())) for match in map(REUSE.fullmatch, lines) if match is not None]
    assert len(counts) == 3 and all(reused + evaluated == prompt for reused, prompt, evaluated in counts)
    # The example sends a key, which is no hindrance to who owns the server.
    told = capsys.readouterr().out.splitlines()[0]
    assert told in blocks("")[0] and "mlx-serve doctor\n" in blocks("")[0]
    if sys.platform == "linux":  # elsewhere there are other lines
        facts, _, example = banner.getvalue().partition("\n\n")
        assert example.strip() in blocks("")[0]
        told_labels = {line.split()[0] for line in facts.splitlines()} | {"blas"}
        assert told_labels == set(re.findall(r"^([a-z]+) {2,}", blocks("")[0], re.MULTILINE))
    assert counts[0][0] == 0 and all(reused > counts[0][1] for reused, _, _ in counts[1:])


def test_the_terminal_shows_what_the_example_asks() -> None:
    (program,) = blocks("python")
    picture = blocks("")[0]
    for question in re.findall(r'"([^"]+[.?])"', program):
        assert f"> {question}" in picture
    assert len(REUSE.findall(picture)) == 3
    assert all(len(line) <= 80 for line in picture.splitlines())


def test_every_command_and_short_name_in_it_exists() -> None:
    commands = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    commands |= {str(group.name) for group in app.registered_groups}
    lines = [line.partition("#")[0] for line in "\n".join(blocks("")).splitlines()]
    used = [shlex.split(found[1]) for line in lines if (found := re.search(r"mlx-serve ((?!--)[a-z].*)", line))]
    assert len(used) > 5
    assert {words[0] for words in used} <= commands
    assert set(re.findall(r"\b[a-z0-9.-]+:[0-9.]+b\b", TEXT)) <= set(SHORT_NAMES)
