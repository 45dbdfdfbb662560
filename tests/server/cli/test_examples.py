"""Every command shows an example, and every example is a command line that is understood."""

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from server.cli.main import COMMANDS as NAMES
from server.cli.main import app, execute, load

ROOT: Any = typer.main.get_command(app)
ROOT.commands = {name: load(name) for name in ROOT.commands}
EXAMPLES = {"": ["mlx-serve serve demo", "mlx-serve run demo"]} | {
    name: told["examples"] for name, told in NAMES.items()
}


def commands(group: Any = ROOT, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yields every command with the words behind `mlx-serve`."""
    yield " ".join(words), group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*words, name))


COMMANDS = dict(commands())


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_command_has_an_example(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert execute([*name.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    for example in EXAMPLES[name]:
        assert f"\n    {example}\n" in shown


def test_there_is_no_example_without_its_command() -> None:
    assert set(EXAMPLES) == set(COMMANDS)


@pytest.mark.parametrize("example", [example for examples in EXAMPLES.values() for example in examples])
def test_an_example_is_understood(example: str) -> None:
    """Parses it down to the last command, without running any."""
    words = shlex.split(example.rpartition("|")[2].partition(">")[0])
    assert words.pop(0) == "mlx-serve"
    command = ROOT
    while words and getattr(command, "commands", None):
        command = command.commands[words.pop(0)]
    assert not getattr(command, "commands", None) or command.invoke_without_command, "it lacks a command"
    with command.make_context(command.name, words):
        pass


@pytest.mark.parametrize("name", [name for name, examples in EXAMPLES.items() if name])
def test_the_examples_of_a_command_are_its_own(name: str) -> None:
    assert all(f"mlx-serve {name}" in example for example in EXAMPLES[name])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_parameter_says_what_it_is(name: str) -> None:
    assert all(parameter.help and parameter.help.endswith(".") for parameter in COMMANDS[name].params)
