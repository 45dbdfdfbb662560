"""`mlx-serve config` as a person meets it, and what a server takes from file and environment."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from server.app.config import SETTINGS, ConfigError, ServerConfig, from_file, merge
from server.cli import ask
from server.cli.config import config_file, load_config, load_model_config
from server.cli.main import execute


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "mlx-serve" / "config.toml"
    path.parent.mkdir()
    path.write_text("port = 9000\nslots = 2\n")
    return path


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert execute(["config", "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_each_value_is_shown_with_its_origin(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLX_SERVE_HOST", "localhost")
    assert execute(["config", "--slots", "3"]) == 0
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert ["port", "9000", f"port in {file}"] in lines
    assert ["slots", "3", "--slots"] in lines
    assert ["host", '"localhost"', "MLX_SERVE_HOST"] in lines
    assert ["max_waiting", "64", "default"] in lines
    assert lines[-1] == ["file:", str(file)]


def test_programs_get_the_same(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(capsys, "--cache-memory", "2GiB")
    assert (found["file"], found["exists"]) == (str(file), True)
    by_key = {record["key"]: record for record in found["settings"]}
    assert len(by_key) == len(SETTINGS)
    assert by_key["port"] == {
        "key": "port", "value": 9000, "origin": "file", "where": f"port in {file}", "flag": "--port",
        "variable": "MLX_SERVE_PORT",
    }  # fmt: skip
    assert (by_key["cache_memory"]["value"], by_key["cache_memory"]["origin"]) == (2 << 30, "flag")


def test_no_key_is_shown(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MLX_SERVE_API_KEY", "geheim")
    for arguments in ([], ["--json"]):
        assert execute(["config", *arguments]) == 0
        output = capsys.readouterr().out
        assert "geheim" not in output and "(not shown)" in output


def test_a_wrong_file_is_one_line_and_status_2(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("prot = 1")
    for command in ("config", "serve", "run"):
        assert execute([command]) == 2
        captured = capsys.readouterr()
        assert captured.err == f"mlx-serve: 'prot' in {file} is no setting; did you mean port?\n"
        assert captured.out == ""


def test_a_file_that_was_named_has_to_be_there(tmp_path: Path) -> None:
    environment = {"MLX_SERVE_CONFIG": str(tmp_path / "none.toml")}
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read"):
        load_config({}, environment)
    (tmp_path / "none.toml").write_text("slots = 5")
    assert load_config({}, environment).slots == 5
    assert load_config({}, {"XDG_CONFIG_HOME": str(tmp_path)}) == ServerConfig()


def test_a_file_with_a_key_is_its_owners_alone(file: Path) -> None:
    file.write_text("api_key = 'geheim'")
    file.chmod(0o640)
    environment = {"MLX_SERVE_CONFIG": str(file)}
    with pytest.raises(ConfigError, match="chmod 600"):
        load_config({}, environment)
    file.chmod(0o600)
    assert load_config({}, environment).api_key == "geheim"


def test_the_key_may_stand_in_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("geheim\n")
    assert load_config({"api_key_file": str(tmp_path / "key")}, {"MLX_SERVE_API_KEY": "x"}).api_key == "geheim"
    with pytest.raises(ConfigError, match="give --api-key or --api-key-file, not both"):
        load_config({"api_key": "a", "api_key_file": str(tmp_path / "key")}, {})
    with pytest.raises(ConfigError, match=r"--api-key-file: .*gone cannot be read"):
        load_config({"api_key_file": str(tmp_path / "gone")}, {})


def test_the_usual_place_is_that_of_xdg() -> None:
    assert config_file({"XDG_CONFIG_HOME": "/c"}) == Path("/c/mlx-serve/config.toml")
    assert config_file({}) == Path("~/.config/mlx-serve/config.toml").expanduser()
    assert config_file({"MLX_SERVE_CONFIG": "~/x", "XDG_CONFIG_HOME": "/c"}) == Path("~/x").expanduser()


def test_the_template_has_every_setting_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["config", "--template"]) == 0
    text = capsys.readouterr().out
    assert tomllib.loads(text) == {}
    lines = [line[1:] for line in text.splitlines() if line.startswith("#") and not line.startswith("# ")]
    assert [line.partition(" = ")[0].removesuffix(" =") for line in lines] == [s.key for s in SETTINGS.values()]
    told = merge([from_file("\n".join(line for line in lines if not line.endswith("=")), "F")])
    assert {name: one.value for name, one in told.items() if one.origin == "file"} == {
        name: setting.default for name, setting in SETTINGS.items() if setting.default is not None
    }


def test_run_takes_the_model_of_the_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("model = ['org/unknown', 'demo']")
    for question in ([], ["What is an hourglass?"], ["what is", "it"], ["word " * 1000]):
        assert execute(["run", *question]) == 1
        assert "mlx-serve pull org/unknown" in capsys.readouterr().err


def test_the_doctor_asks_the_server_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, own = "http://127.0.0.1:8080", "http://127.0.0.1:9000"
    for known, url in (([usual], usual), ([own, usual], own)):
        monkeypatch.setattr(ask, "known_urls", lambda known=known: known)
        assert ask.AskedServer(None, None).url == url


def test_the_cache_is_listed_where_the_file_puts_it(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(f"cache_dir = '{file.parent}/kept'")
    assert execute(["cache", "list"]) == 0
    assert f"{file.parent}/kept" in capsys.readouterr().out


def test_the_docs_name_what_rules_the_file() -> None:
    docs = (Path(__file__).parents[3] / "docs" / "cli.md").read_text(encoding="utf-8")
    section = docs.partition("## `mlx-serve config`")[2].partition("\n## ")[0]
    for word in ("XDG_CONFIG_HOME", "MLX_SERVE_CONFIG", "config.toml", SETTINGS["cache_memory_bytes"].variable):
        assert word in section


def test_without_a_model_the_one_used_last_is_taken_and_named(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("server.cli.config.used_last", lambda: None)
    assert load_model_config({}, {}).models == ("demo",)
    monkeypatch.setattr("server.cli.config.used_last", lambda: "org/mine")
    environment = {"XDG_CONFIG_HOME": str(file.parents[1])}
    assert load_model_config({"models": None}, environment).models == ("org/mine",)
    assert capsys.readouterr().err.startswith("No MODEL is named, so it is org/mine")
    file.write_text('model = "demo"')
    for given in ({}, {"models": ["demo"]}):
        assert load_model_config(given, environment).models == ("demo",)
    assert capsys.readouterr().err == ""
