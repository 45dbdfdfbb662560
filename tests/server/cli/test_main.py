"""The command line as a person meets it: help, versions, mistakes. Nothing here loads a model."""

import inspect
import json
import os
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from models.names import FAMILIES, SHORT_NAMES
from server.app.config import SETTINGS, ConfigError, ServerConfig, parse_size, parse_size_per_day
from server.cli.chat import HELP
from server.cli.config import load_config
from server.cli.main import COMMANDS, execute

PORT = {"serve": ("--port", "0"), "run": ()}
DOCS = (Path(__file__).parents[3] / "docs" / "cli.md").read_text(encoding="utf-8")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Returns exit status, standard output and standard error."""
    status = execute(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize("words", ["", "cache", "service"])
def test_the_help_has_every_command_once_and_whole_on_a_line_of_80_columns(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, output, _ = run(capsys, *words.split(), "--help")
    assert all(len(line) <= 80 and not re.search(r"\w\.\.\.$", line) for line in output.splitlines())
    for name, command in COMMANDS.items():
        if name.rpartition(" ")[0] == words:
            told = command["help"].partition(".")[0]
            assert len(re.findall(rf"^  {name.split()[-1]} +{re.escape(told)}$", output, re.M)) == 1


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"mlx-serve {version('mlx-serve')}\n", "")


def test_help_has_every_setting_with_its_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setenv("TERMINAL_WIDTH", "1000")
    _, output, _ = run(capsys, "serve", "--help")
    shown = " ".join(output.split())
    for setting in SETTINGS.values():
        assert setting.flag in shown
        assert setting.help in shown


def test_help_has_no_flag_that_is_no_setting(capsys: pytest.CaptureFixture[str]) -> None:
    _, output, _ = run(capsys, "serve", "--help")
    flags = {setting.flag for setting in SETTINGS.values()} | {"--help"}
    assert set(re.findall(r"--[a-z-]+", output)) <= flags


def test_the_docs_have_one_row_per_setting() -> None:
    rows = dict(re.findall(r"^\| `(MODEL|--[a-z-]+)` \|( .* \| .*) \|$", DOCS, re.MULTILINE))
    expected = {}
    for setting in SETTINGS.values():
        value: Any = setting.default
        is_shown = value not in (None, ()) and not isinstance(value, bool)
        default = (value[0] if isinstance(value, tuple) else value) if is_shown else ""
        if value and setting.unit == "bytes":
            default = f"{value // 2**20}MiB"
        if setting.unit == "bytes/day":
            default = f"{value // 10**9}GB/day"
        expected[setting.flag] = f" {default} | {setting.help}"
    assert rows == expected


def test_the_docs_have_every_short_name() -> None:
    rows = re.findall(r"^(\S+:\S+) +(mlx-community/\S+)(.*)$", DOCS, re.MULTILINE)
    assert {name: repository for name, repository, _ in rows} == {
        one.name: one.repository for ones in FAMILIES.values() for one in ones
    }
    told = {
        f"{name}-{kind}" for name, _, kinds in rows for kind in kinds.replace(" or ", "").replace(",", "").split()
    }
    usual = {repository for _, repository, _ in rows}
    assert told == {name for name, one in SHORT_NAMES.items() if one.repository not in usual}


def test_the_docs_have_every_command_of_the_chat() -> None:
    assert set(re.findall(r"^(/[a-z]+)", HELP, re.MULTILINE)) <= set(re.findall(r"`(/[a-z]+)", DOCS))


def one_line(errors: str) -> str:
    assert errors.startswith("mlx-serve: ")
    assert errors.count("\n") == 1
    return errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("serv", "No such command 'serv'"),
        ("serve --prot 1", "No such option: --prot"),
        ("serve --port", "--port"),
        ("serve --port eight", "--port"),
        ("serve --port 70000", "--port is 70000; it must be at most 65535"),
        ("serve --cache-memory lots", "--cache-memory: 'lots' is not a size"),
        ("serve --drain nan", "--drain"),
        ("run --context 3", "--context is 3"),
        ("pull", "org/name"),
        ("pull a/b c/d", "c/d"),
    ],
)
def test_wrong_arguments_get_one_line_and_status_2(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, output, errors = run(capsys, *arguments.split())
    assert (status, output) == (2, "")
    assert words in one_line(errors)


@pytest.mark.parametrize("command", ["serve", "run"])
def test_an_unknown_model_gets_one_line_and_status_1(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, output, errors = run(capsys, command, "org/unknown", *PORT[command])
    assert (status, output) == (1, "")
    assert "mlx-serve pull org/unknown" in one_line(errors)


def test_flags_become_settings() -> None:
    config = load_config({"models": ["demo"], "port": 9000, "cache_memory_bytes": "2GiB", "api_key": None}, {})
    assert config == ServerConfig(models=("demo",), port=9000, cache_memory_bytes=2 << 30)


def test_a_switch_is_given_without_a_value() -> None:
    assert load_config({"prompt_hygiene": None}, {}).prompt_hygiene
    assert not load_config({"prompt_hygiene": True}, {}).prompt_hygiene


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        *(("4096", 4096), ("8GB", 8_000_000_000), ("8gib", 8 << 30), ("512 MiB", 512 << 20)),
        *(("1.5g", 1_500_000_000), ("2k", 2000), ("1T", 10**12), (" 3MB ", 3_000_000)),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("200GB/day", 200 * 10**9), ("1.5 TiB / Day", 3 << 39), ("none", None), (" None ", None)]
)
def test_sizes_per_day(text: str, num_bytes: int | None) -> None:
    assert parse_size_per_day(text) == num_bytes
    config = load_config({"cache_disk_write_bytes_per_day": text}, {})
    assert config.cache_disk_write_bytes_per_day == num_bytes


@pytest.mark.parametrize(
    "text", ["", "/day", "200GB", "200GB/", "200GB/week", "200GB/day/day", "-1GB/day", "nonesuch"]
)
def test_what_is_no_size_per_day(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size per day"):
        parse_size_per_day(text)


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "8QB", "8 GB GB", "nan", "1e9", "8i", "0x10", "١"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text)


def test_quick_commands_do_not_load_what_is_slow() -> None:
    code = """
import sys
from server.cli.main import execute
for command in ("serve --help", "run --help", "list", "ps", "pull", "cache list", "doctor 127.0.0.1:9"):
    execute(command.split())
    slow = {"mlx", "mlx_lm", "transformers", "starlette", "uvicorn", "numpy"}
    if command in ("serve --help", "run --help", "list", "ps"):
        slow |= {"asyncio", "httpx2", "rich.console", "pydantic", "huggingface_hub.utils"}
    slow &= set(sys.modules)
    if slow:
        sys.exit(f"{command} loaded {slow}")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr


def test_the_signature_of_serve_is_that_of_the_settings() -> None:
    from server.cli.start import serve

    assert list(inspect.signature(serve).parameters) == [*SETTINGS]


@pytest.fixture
def long_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose path is wider than any terminal, and the only model."""
    folder = tmp_path / ("x" * 120) / ("y" * 120)
    folder.mkdir(parents=True)
    figures: dict[str, Any] = {"path": folder, "architecture": "llama", "stored": None}
    told = {"size_bytes": 2_500_000, "quantization": "4 bit", "short_name": "cat:1b"}
    model = SimpleNamespace(name="org/猫", **told, **figures)
    own = SimpleNamespace(name="猫", size_bytes=1000, quantization="", short_name="", **figures)
    monkeypatch.setattr("models.names.installed", lambda: [model, own])
    return folder


def test_the_list_has_the_name_that_is_short_and_what_is_long_is_in_its_json(
    long_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.utime(long_path, (0, time.time() - 3 * 86_400 - 5))
    status, output, _ = run(capsys, "list")
    assert status == 0
    head, row, own = output.splitlines()
    assert head == "NAME    SIZE    WEIGHTS  ARCHITECTURE  MODIFIED"
    assert row == "cat:1b  2.5 MB  4 bit    llama         3 days ago"
    assert own.split() == ["猫", "1.0", "kB", "llama", "3", "days", "ago"]


def test_the_list_as_json(long_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, output, _ = run(capsys, "list", "--json")
    model, _ = json.loads(output)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", model.pop("modified"))
    assert model == {
        "name": "org/猫", "short_name": "cat:1b", "size_bytes": 2_500_000, "architecture": "llama",
        "quantization": "4 bit", "path": str(long_path), "from": None,
    }  # fmt: skip
    page = DOCS.partition("## `mlx-serve list`")[2].partition("##")[0]
    assert set(model) <= set(re.findall(r"`(\w+)`", page))
