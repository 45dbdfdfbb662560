"""Where a setting comes from: names, order of precedence, and mistakes told with the nearest name."""

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.app.config import (
    SETTINGS,
    ConfigError,
    ServerConfig,
    checked,
    from_environment,
    from_file,
    from_flags,
    merge,
    parse_size,
    parse_size_per_day,
    size_literal,
    toml_value,
)

FLAG, VARIABLE, FILE = {"port": 1}, {"MLX_SERVE_PORT": "2"}, "port = 3"


def config_of(
    flags: dict[str, Any] | None = None, environment: dict[str, str] | None = None, file: str = ""
) -> ServerConfig:
    return checked(merge([from_flags(flags or {}), from_environment(environment or {}), from_file(file, "F")]))


@pytest.mark.parametrize(
    ("sources", "port", "origin", "where"),
    [
        ((FLAG, VARIABLE, FILE), 1, "flag", "--port"),
        (({}, VARIABLE, FILE), 2, "variable", "MLX_SERVE_PORT"),
        (({}, {}, FILE), 3, "file", "port in F"),
        (({}, {}, ""), 8080, "default", "--port"),
    ],
)
def test_a_flag_goes_before_a_variable_and_that_before_the_file(
    sources: tuple[dict[str, Any], dict[str, str], str], port: int, origin: str, where: str
) -> None:
    flags, environment, file = sources
    told = merge([from_flags(flags), from_environment(environment), from_file(file, "F")])["port"]
    assert (told.value, told.origin, told.where) == (port, origin, where)


def test_names_are_made_of_flags_and_none_is_there_twice() -> None:
    names = {name: (setting.key, setting.variable) for name, setting in SETTINGS.items()}
    assert names["cache_memory_bytes"] == ("cache_memory", "MLX_SERVE_CACHE_MEMORY")
    assert names["models"] == ("model", "MLX_SERVE_MODEL")
    assert names["prompt_hygiene"] == ("prompt_hygiene", "MLX_SERVE_PROMPT_HYGIENE")
    assert names["insecure_no_key"] == ("insecure_no_key", "MLX_SERVE_INSECURE_NO_KEY")
    assert len({key for key, _ in names.values()}) == len(SETTINGS)


EXAMPLES: dict[str, tuple[Any, str, str]] = {
    "models": (("a/b", "demo"), '["a/b", "demo"]', "a/b, demo"),
    "aliases": (("gpt-*=demo",), '"gpt-*=demo"', "gpt-*=demo"),
    "keep_alive": ("-1", "-1", "-1"),
    "max_models": (2, "2", "2"),
    "cache_memory_bytes": (2 << 30, '"2GiB"', "2GiB"),
    "cache_disk_bytes": (4194304, "4194304", "4194304"),
    "cache_disk_write_bytes_per_day": (None, '"none"', "none"),
    "heartbeat_seconds": (2, "2", "2"),
    "drain_seconds": (0.5, "0.5", "0.5"),
    "handover": ("http://10.0.0.6:8080", '"http://10.0.0.6:8080"', "http://10.0.0.6:8080"),
    "prompt_hygiene": (False, "false", "off"),
    "log_format": ("json", '"json"', "json"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_file_and_a_variable_can_say_the_same(name: str) -> None:
    value, literal, text = EXAMPLES[name]
    setting = SETTINGS[name]
    by_file = config_of(file=f"{setting.key} = {literal}")
    by_variable = config_of(environment={setting.variable: text})
    assert getattr(by_file, name) == getattr(by_variable, name) == value
    assert value != setting.default


@pytest.mark.parametrize(
    ("environment", "file", "words"),
    [
        ({"MLX_SERVE_PROT": "1"}, "", "'MLX_SERVE_PROT' is no setting; did you mean MLX_SERVE_PORT?"),
        ({"MLX_SERVE_XYZZY": "1"}, "", "'MLX_SERVE_XYZZY' is no setting; `mlx-serve config` lists them all"),
        ({"MLX_SERVE_PORT": "eight"}, "", "MLX_SERVE_PORT is 'eight'; it must be a whole number"),
        (
            {"MLX_SERVE_INSECURE_NO_KEY": "maybe"},
            "",
            "INSECURE_NO_KEY is 'maybe'; it must be true or false",
        ),
        ({"MLX_SERVE_CACHE_MEMORY": "lots"}, "", "MLX_SERVE_CACHE_MEMORY: 'lots' is not a size"),
        ({}, "cache-memory = 1", "'cache-memory' in F is no setting; did you mean cache_memory?"),
        ({}, "[server]\nport = 1", "'server' in F is no setting"),
        ({}, "port = true", "port in F is True; it must be a whole number"),
        ({}, "port = 70000", "port in F is 70000; it must be at most 65535"),
        ({}, "slots = 0", "slots in F is 0; it must be at least 1"),
        ({}, "cache_memory = true", "cache_memory in F is True; it must be a whole number"),
        ({}, "cache_disk_writes = '5GB'", "cache_disk_writes in F: '5GB' is not a size per day"),
        ({}, "model = []", "model in F is []; it must hold at least one name"),
        ({}, "model = [1]", "model in F is 1; it must be a printable text"),
        ({}, "host = 1", "host in F is 1; it must be a printable text"),
        ({}, "speculate = false", "speculate in F is False; it must be one of auto, off, history, draft=MODEL"),
        ({}, "port = ", "F is no TOML: Invalid value (at end of document)"),
    ],
)
def test_a_mistake_is_told_with_its_place(environment: dict[str, str], file: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(environment=environment, file=file)
    assert words in str(caught.value)


def test_an_empty_variable_and_those_of_others_say_nothing() -> None:
    environment = {
        "PORT": "1", "MLX_SERVE_PORT": "", "MLX_SERVE_CONFIG": "f", "MLX_SERVE_SERVICE_HOST": "10.0.0.1",
        "MLX_SERVE_SERVICE_PORT_HTTP": "80", "MLX_SERVE_PORT_8080_TCP_ADDR": "10.0.0.1",
    }  # fmt: skip
    assert from_environment(environment) == {}
    assert from_environment({"MLX_SERVE_PORT": "tcp://10.0.0.1:8080"}) == {}


def test_a_key_replaces_the_keys_of_weaker_sources_and_no_others() -> None:
    environment = {"MLX_SERVE_API_KEY": "second"}
    assert config_of({"api_key": "first"}, environment, "api_key = 'third'").api_key == "first"
    by_file = config_of({"api_key_file": "k"}, environment)
    assert (by_file.api_key, by_file.api_key_file) == (None, "k")
    assert config_of({"api_keys_file": "k"}, environment).api_key is None
    both = config_of({}, environment, "api_keys = 'keys'\napi_key_file = 'k'")
    assert (both.api_key, both.api_keys_file, both.api_key_file) == ("second", "keys", None)


@given(st.integers(0, 2**60))
def test_a_size_is_written_so_that_it_is_read_again(num_bytes: int) -> None:
    assert parse_size(size_literal(SETTINGS["cache_memory_bytes"], num_bytes)) == num_bytes
    assert parse_size_per_day(size_literal(SETTINGS["cache_disk_write_bytes_per_day"], num_bytes)) == num_bytes


@given(st.lists(st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1), min_size=1, unique=True))
def test_texts_are_written_so_that_they_are_read_again(names: list[str]) -> None:
    written = toml_value(SETTINGS["models"], tuple(names))
    assert tomllib.loads(f"x = {written}")["x"] == names
