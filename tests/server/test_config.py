"""Every setting is checked, and every setting says what a command line needs to know about it."""

from dataclasses import fields, replace
from typing import Any

import pytest

from server.app.config import ConfigError, ServerConfig


def test_defaults_pass_the_check() -> None:
    ServerConfig().check()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("models", ()),
        ("models", ("a", "a")),
        ("models", "demo"),
        ("host", ""),
        ("host", "a\nb"),
        ("port", -1),
        ("port", 65536),
        ("port", 80.5),
        ("port", True),
        ("slots", 0),
        ("cache_memory_bytes", 1000),
        ("cache_disk_write_bytes_per_day", 1000),
        ("cache_disk_write_bytes_per_day", 1.5e9),
        ("context_tokens", 1),
        ("max_waiting", -1),
        ("chunk_tokens", 0),
        ("max_body_bytes", 0),
        ("default_max_tokens", 0),
        ("heartbeat_seconds", 0),
        ("heartbeat_seconds", float("nan")),
        ("drain_seconds", float("inf")),
        ("drain_seconds", None),
        ("log_level", "loud"),
        ("prompt_hygiene", 1),
    ],
)
def test_a_setting_that_cannot_be_used_is_named_with_its_value(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        replace(ServerConfig(), **{name: value}).check()
    assert str(value) in str(caught.value) or repr(value) in str(caught.value)


def test_a_model_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="models is ''"):
        ServerConfig(models=("demo", "")).check()


def test_the_key_appears_in_no_message() -> None:
    config = ServerConfig(api_key="se\ncret")
    assert "cret" not in repr(config)
    with pytest.raises(ConfigError, match="api_key") as caught:
        config.check()
    assert "cret" not in str(caught.value)


def test_every_setting_has_help_and_a_flag_of_its_own() -> None:
    flags = [setting.metadata["flag"] for setting in fields(ServerConfig)]
    assert len(set(flags)) == len(flags)
    assert all(setting.metadata["help"].endswith(".") for setting in fields(ServerConfig))


@pytest.mark.parametrize("setting", [s for s in fields(ServerConfig) if s.name.endswith(("bytes", "seconds"))])
def test_a_setting_with_a_unit_in_its_name_states_that_unit(setting: Any) -> None:
    assert setting.name.endswith(setting.metadata["unit"])
