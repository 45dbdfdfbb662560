"""Every setting is checked, and every setting says what a command line needs to know about it."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from server.app import config
from server.app.config import (
    SETTINGS,
    ConfigError,
    ServerConfig,
    Setting,
    ToldSetting,
    checked,
    merge,
    parse_cache_bits,
    read,
)


def test_defaults_pass_the_check() -> None:
    assert checked(merge([])) == ServerConfig()
    for setting in SETTINGS.values():
        told = ToldSetting(list(value) if isinstance(value := setting.default, tuple) else value, "file", "F")
        assert value is None or read(setting, told).value == value


def test_what_is_said_of_settings_is_said_of_those_that_there_are() -> None:
    told = tomllib.loads(Path(config.__file__).with_name("settings.toml").read_text(encoding="utf-8"))
    assert list(told) == list(SETTINGS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("models", []),
        ("models", ["a", "a"]),
        ("host", ""),
        ("host", "a\nb"),
        ("port", -1),
        ("port", 65536),
        ("port", 80.5),
        ("slots", 0),
        ("cache_memory_bytes", 1000),
        ("cache_disk_write_bytes_per_day", 1000),
        ("context_tokens", 1),
        ("chunk_tokens", 0),
        ("heartbeat_seconds", 0),
        ("heartbeat_seconds", float("nan")),
        ("log_level", "loud"),
        ("prompt_hygiene", 1),
        *(("otlp", url) for url in ("", "localhost:4318", "ftp://x", "http://", "http://x:0")),
    ],
)
def test_a_setting_that_cannot_be_used_is_named_with_its_value(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} in F") as caught:
        read(SETTINGS[name], ToldSetting(value, "file", f"{name} in F"))
    assert repr(value) in str(caught.value)


def test_stored_state_has_8_bits_or_all_of_them() -> None:
    assert [parse_cache_bits(text) for text in ("8", " qwen*=8", "a=b=8")] == ["*", "qwen*", "a=b"]
    for text in ("4", "qwen*=4", "8=", "16", "=7"):
        with pytest.raises(ConfigError, match="is not 8 or MODEL=8; with fewer bits answers change"):
            read(SETTINGS["cache_bits"], ToldSetting([text], "file", "cache_bits"))


def test_a_model_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="models is ''"):
        read(SETTINGS["models"], ToldSetting(["demo", ""], "file", "models"))


def test_the_key_appears_in_no_message() -> None:
    assert "cret" not in repr(ServerConfig(api_key="secret"))
    with pytest.raises(ConfigError, match="api_key") as caught:
        read(SETTINGS["api_key"], ToldSetting("se\ncret", "file", "api_key"))
    assert "cret" not in str(caught.value)


def test_every_setting_has_help_and_a_flag_of_its_own() -> None:
    assert len({setting.flag for setting in SETTINGS.values()}) == len(SETTINGS)
    assert all(setting.help.endswith(".") for setting in SETTINGS.values())
    assert all(setting.flag.startswith("--no-") == (setting.default is True) for setting in SETTINGS.values())


@pytest.mark.parametrize("setting", [s for s in SETTINGS.values() if s.name.endswith(("bytes", "seconds", "tokens"))])
def test_a_setting_with_a_unit_in_its_name_states_that_unit(setting: Setting) -> None:
    assert setting.unit and setting.name.endswith(setting.unit)
