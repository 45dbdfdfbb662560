"""Every setting: its default, range, unit, help text and origin, in one place. Pure.

Command line, `--help` and documentation are made from these fields. `--cache-memory` is `cache_memory` in the file
and `MLX_SERVE_CACHE_MEMORY` in the environment. Flags go before variables, variables before the file. No part of the
server reads variables.
"""

import contextlib
import difflib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from enum import StrEnum
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from models.adapter import parse_adapter
from server.pool.names import parse_alias, parse_keep_alive

MEBIBYTE = 1024 * 1024
GIGABYTE = 10**9
DEFAULT_URL = "http://127.0.0.1:8080"
ANY_ORIGIN = "*"
MAX_FILES = 8192
"""Files that a server may have open; launchd, and a terminal of macOS, allow 256."""
_DRAFT = "draft="
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+", re.IGNORECASE)


class ConfigError(ValueError):
    """Names setting, value and what would be accepted."""


def _setting(
    default: Any,
    help_text: str,
    *,
    between: tuple[float, float] = (-math.inf, math.inf),
    choices: tuple[str, ...] | None = None,
    is_secret: bool = False,
    **names: str,
) -> Any:
    """`names` holds `flag` and `unit` unless they follow from the field's name."""
    told = {"help": help_text, "between": between, "choices": choices}
    return field(default=default, repr=not is_secret, metadata={**told, **names})


@dataclass(frozen=True)
class ServerConfig:
    """None means: chosen at the start, as the help text says."""

    models: tuple[str, ...] = _setting(
        ("demo",),
        "Models to serve: 'demo', a folder, or a Hugging Face repository in the local cache. The first is loaded at "
        "the start, others when requests name them.",
        flag="MODEL",
    )
    aliases: tuple[str, ...] = _setting(
        (),
        "Another name for a model, or a pattern of names, such as 'gpt-*=qwen3:8b'; may be given several times.",
        flag="--alias",
        unit="pattern=model",
    )
    adapters: tuple[str, ...] = _setting(
        (),
        "A LoRA adapter of the first MODEL, served under a name of its own beside it; may be given several times.",
        flag="--adapter",
        unit="name=folder",
    )
    max_models: int | None = _setting(
        None,
        "Models that may be loaded at once; by default as many as fit. With 1 only MODEL is served.",
        between=(1, 1024),
    )
    keep_alive: str | None = _setting(
        None,
        "How long an unused model stays loaded, such as 30m, or -1 for ever; by default for ever, or 30m if the "
        "weights take more than half of the memory.",
        unit="duration",
    )
    host: str = _setting("127.0.0.1", "Address to listen on.")
    port: int = _setting(8080, "Port to listen on; 0 takes a free one.", between=(0, 65535))
    name: str | None = _setting(
        None,
        "Name in the header X-Served-By of every answer, to tell several servers apart; by default this machine's "
        "name.",
    )
    slots: int = _setting(8, "Sequences that are live on the device at once.", between=(1, 1024))
    cache_memory_bytes: int | None = _setting(
        None,
        "Memory for the state of past tokens, live and stored, at any time; by default from the machine's memory.",
        between=(MEBIBYTE, math.inf),
    )
    share_heads: bool = _setting(
        True,
        "Give each running conversation its own copy of a beginning that several have in common; by default they "
        "share one, where that is faster or memory is short. With half precision the last bits of an answer may then "
        "depend on what else runs.",
    )
    wire_weights: bool = _setting(
        True,
        "Let macOS page out the weights like other memory; by default they are wired, so that a Mac whose memory is "
        "nearly full stays quick.",
    )
    cache_disk_bytes: int | None = _setting(
        None,
        "Disk space for state that outlives memory and restarts; by default nothing is written.",
        between=(MEBIBYTE, math.inf),
    )
    cache_disk_write_bytes_per_day: int | None = _setting(
        100 * GIGABYTE,
        "Most that is written to --cache-disk in 24 hours, so that the disk does not wear out; 'none' for no limit.",
        flag="--cache-disk-writes",
        unit="bytes/day",
        between=(MEBIBYTE, math.inf),
    )
    cache_dir: str = _setting(
        "~/.cache/mlx-serve",
        "Folder for --cache-disk; it holds people's conversations, readable by their owner only.",
    )
    context_tokens: int | None = _setting(
        None,
        "Longest prompt and answer together; by default the model's own limit.",
        flag="--context",
        between=(16, math.inf),
    )
    max_waiting: int = _setting(
        64, "Requests that may wait for a slot; one more is answered with status 429.", between=(0, 100_000)
    )
    speculate: str = _setting(
        "auto",
        "Guess the next tokens of an answer from earlier text, a grammar or the model's own MTP module, and evaluate "
        "several in one step: 'auto' wherever that is faster, 'history' without that module, 'draft=MODEL' with a "
        "smaller model of the same tokenizer in its place, 'off' never. The answer stays the same.",
        choices=("auto", "off", "history", f"{_DRAFT}MODEL"),
    )
    chunk_tokens: int = _setting(
        256,
        "Prompt tokens evaluated per step; running answers pause for at most one such step. On a GPU eight times as "
        "many while nothing else runs or waits, up to token 65 536, except for models with sliding windows.",
        between=(16, 65_536),
    )
    max_body_bytes: int = _setting(
        32 * MEBIBYTE, "Largest request body; a larger one is answered with status 413.", between=(1024, math.inf)
    )
    api_key: str | None = _setting(
        None, "Key that clients must send as a bearer token; by default no key is required.", is_secret=True
    )
    allowed_hosts: tuple[str, ...] = _setting(
        (),
        "Name by which browsers reach this server, besides this machine's name, addresses and local names; may be "
        "given several times. With a key every name is taken.",
        flag="--allowed-host",
        unit="name",
    )
    cors: tuple[str, ...] = _setting(
        (),
        "Origin whose web pages may use this server, such as https://chat.example.org; may be given several times. "
        "'*' lets every page use it, and needs a key.",
        unit="origin",
    )
    api_key_file: str | None = _setting(
        None,
        "File that holds the key, since anyone on this machine can read the command line. Or set MLX_SERVE_API_KEY.",
    )
    api_keys_file: str | None = _setting(
        None, "TOML file of several keys, each with a name and limits; SIGHUP has it read again.", flag="--api-keys"
    )
    insecure_no_key: bool = _setting(
        False,
        "Let anyone who reaches the address use the server; by default a key is needed where others can reach it.",
    )
    otlp: str | None = _setting(
        None,
        "Address of an OpenTelemetry collector that gets a trace of each request, such as http://127.0.0.1:4318.",
        unit="URL",
    )
    console: bool = _setting(
        True, "Serve no console; by default / is a page for browsers on the server's own machine, or with a key."
    )
    prompt_hygiene: bool = _setting(
        True,
        "Keep each request's head as the client sent it; by default headers that Claude Code changes each time are "
        "made constant, and tools keep the first order of their keys, so that prompts are reused.",
    )
    default_max_tokens: int | None = _setting(
        None,
        "Longest answer when the request names no limit; by default until the context is full.",
        between=(1, math.inf),
    )
    heartbeat_seconds: float = _setting(
        5.0, "Silence on a stream after which a comment is sent, so that proxies keep it open.", between=(0.01, 3600)
    )
    client_seconds: float = _setting(
        10.0,
        "Time in which a client must send its request, or take some of its answer; then its connection is closed.",
        flag="--client-timeout",
        between=(0.1, 3600),
    )
    drain_seconds: float = _setting(
        10.0, "Time that running answers have to finish once the server is asked to stop.", between=(0, 3600)
    )
    log_level: str = _setting("info", "Least severe messages to log.", choices=("debug", "info", "warning", "error"))
    log_format: str = _setting(
        "text",
        "How the log is written: 'text' for people, 'json' for programs, one object per line.",
        choices=("text", "json"),
    )

    @property
    def draft_model(self) -> str | None:
        """The model that drafts for others."""
        return self.speculate.removeprefix(_DRAFT) if self.speculate.startswith(_DRAFT) else None

    @property
    def needs_key(self) -> bool:
        return self.api_key is not None or self.api_keys_file is not None

    def check(self) -> None:
        """Raises ConfigError for the first unusable setting."""
        for setting in fields(self):
            _check_setting(setting.name, setting.type, getattr(self, setting.name), setting.metadata)
        for name, parse in (("aliases", parse_alias), ("keep_alive", parse_keep_alive), ("adapters", parse_adapter)):
            value = getattr(self, name) or ()
            try:
                for text in (value,) if isinstance(value, str) else value:
                    parse(text)
            except ValueError as error:
                raise ConfigError(f"{name} is wrong: {error}") from error
        names = [parse_adapter(adapter).name for adapter in self.adapters]
        for name in names:
            if names.count(name) > 1 or name in self.models:
                raise ConfigError(f"adapters is wrong: {name!r} stands for something else already")
        for origin in self.cors:
            if origin != ANY_ORIGIN and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors is {origin!r}; it must be an origin such as https://chat.example.org, or '*'"
                )
        if ANY_ORIGIN in self.cors and not self.needs_key:
            raise ConfigError("cors is '*', which lets every web page use this server; it must have --api-key then")


def _check_setting(name: str, kind: Any, value: Any, metadata: Any) -> None:
    if value is None and type(None) in getattr(kind, "__args__", ()):
        return
    if kind == tuple[str, ...]:
        _check_names(name, value)
    elif kind is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}; it must be true or false")
    elif kind in (str, str | None):
        _check_text(name, value, metadata["choices"])
    else:
        _check_number(name, value, kind in (int, int | None), *metadata["between"])


def _check_names(name: str, value: Any) -> None:
    if not isinstance(value, tuple) or (name == "models" and not value):
        raise ConfigError(f"{name} is {value!r}; it must hold at least one name")
    for entry in value:
        _check_text(name, entry, None)
    if len(set(value)) != len(value):
        raise ConfigError(f"{name} is {value!r}; a name stands there twice")


def _check_text(name: str, value: Any, choices: tuple[str, ...] | None) -> None:
    is_text = isinstance(value, str) and value and value.isprintable()
    if not is_text or (choices is not None and not any(_is_choice(value, choice) for choice in choices)):
        # A key is a secret and stays out of messages: only its name is given.
        shown = "unusable" if name == "api_key" else repr(value)
        wanted = f"one of {', '.join(choices)}" if choices else "a printable text that is not empty"
        raise ConfigError(f"{name} is {shown}; it must be {wanted}")


def _is_choice(value: str, choice: str) -> bool:
    head, _, _ = choice.partition("MODEL")  # which stands for any name
    return value == choice if head == choice else value.startswith(head) and value != head


def _check_number(name: str, value: Any, is_whole: bool, minimum: float, maximum: float) -> None:
    accepted = (int,) if is_whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, accepted) or not math.isfinite(value):
        raise ConfigError(f"{name} is {value!r}; it must be a {'whole ' if is_whole else ''}number")
    if value < minimum:
        raise ConfigError(f"{name} is {value}; it must be at least {minimum}")
    if value > maximum:
        raise ConfigError(f"{name} is {value}; it must be at most {maximum}")


PREFIX = "MLX_SERVE_"
FILE_VARIABLE = f"{PREFIX}CONFIG"
KEY_VARIABLE = f"{PREFIX}API_KEY"


def _named(setting: "Field[Any]") -> "Field[Any]":
    stem, _, last = setting.name.rpartition("_")
    flag = (stem if last in ("bytes", "seconds") else setting.name).replace("_", "-")
    unit = last if last in ("bytes", "seconds", "tokens") else None
    own = {"flag": f"--no-{flag}" if setting.default is True else f"--{flag}", "unit": unit}
    setting.metadata = MappingProxyType({**own, **setting.metadata})
    return setting


SETTINGS: Mapping[str, "Field[Any]"] = {setting.name: _named(setting) for setting in fields(ServerConfig)}

_SWITCH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_ONE_KEY = {"api_key", "api_key_file"}
_KEYS = {*_ONE_KEY, "api_keys_file"}
# Kubernetes gives every container such variables for a service that is called mlx-serve.
_INJECTED = re.compile(rf"{PREFIX}(SERVICE_(HOST|PORT\w*)|PORT_\d+_\w+)")


class SettingOrigin(StrEnum):
    """Sources of a setting, the strongest first."""

    FLAG = "flag"
    VARIABLE = "variable"
    FILE = "file"
    DEFAULT = "default"


@dataclass(frozen=True)
class ToldSetting:
    """A checked value, and its source."""

    value: Any
    origin: SettingOrigin
    where: str
    """What a person edits: `--port`, `MLX_SERVE_PORT`, `port in FILE`."""


Layer = Mapping[str, ToldSetting]


def key_of(setting: "Field[Any]") -> str:
    """The setting's key in the file: `x` for a switch `--no-x`."""
    flag = str(setting.metadata["flag"]).lstrip("-").lower()
    if setting.type is bool and setting.default is True:
        flag = flag.removeprefix("no-")
    return flag.replace("-", "_")


def variable_of(setting: "Field[Any]") -> str:
    """The variable's name."""
    return PREFIX + key_of(setting).upper()


def from_flags(given: Mapping[str, Any]) -> Layer:
    """The settings given as flags; raises ConfigError."""
    layer = {}
    for name, value in given.items():
        if value not in (None, [], ()):
            setting, flag = SETTINGS[name], SETTINGS[name].metadata["flag"]
            # A switch sets the opposite of the default.
            is_switch = setting.type is bool
            read = not setting.default if is_switch else _read(setting, value, flag)
            layer[name] = ToldSetting(read, SettingOrigin.FLAG, flag)
    return layer


def from_environment(environment: Mapping[str, str]) -> Layer:
    """Settings of non-empty variables; raises ConfigError, also for an unknown name."""
    names = {variable_of(setting): setting for setting in SETTINGS.values()}
    layer = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable == FILE_VARIABLE or not text:
            continue
        if _INJECTED.fullmatch(variable) or (variable == f"{PREFIX}PORT" and text.startswith("tcp://")):
            continue
        if variable not in names:
            raise ConfigError(f"{variable} belongs to no setting{_nearest(variable, names)}")
        setting = names[variable]
        layer[setting.name] = ToldSetting(_read(setting, text, variable), SettingOrigin.VARIABLE, variable)
    return layer


def from_file(text: str, path: str) -> Layer:
    """A file's settings; raises ConfigError, also for an unknown name."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from error
    names = {key_of(setting): setting for setting in SETTINGS.values()}
    layer = {}
    for key, value in table.items():
        if key not in names:
            raise ConfigError(f"{key!r} in {path} is no setting{_nearest(key, names)}")
        setting, where = names[key], f"{key} in {path}"
        layer[setting.name] = ToldSetting(_read(setting, value, where), SettingOrigin.FILE, where)
    return layer


def merge(layers: Iterable[Layer]) -> Layer:
    """The strongest layer comes first. A source that names a key or a file of keys replaces the keys of weaker
    sources.
    """
    merged: dict[str, ToldSetting] = {}
    is_key_told = False
    for layer in layers:
        for name, told in layer.items():
            if name not in merged and not (is_key_told and name in _ONE_KEY):
                merged[name] = told
        is_key_told = is_key_told or not _KEYS.isdisjoint(layer)
    return {
        name: merged.get(name) or ToldSetting(setting.default, SettingOrigin.DEFAULT, setting.metadata["flag"])
        for name, setting in SETTINGS.items()
    }


def checked(settings: Layer) -> ServerConfig:
    """The settings. Raises ConfigError, which names the flag, variable or file."""
    config = ServerConfig(**{name: told.value for name, told in settings.items()})
    try:
        config.check()
    except ConfigError as error:
        name, _, rest = str(error).partition(" ")
        raise ConfigError(f"{settings[name].where} {rest}" if name in settings else str(error)) from error
    return config


def toml_value(setting: "Field[Any]", value: Any) -> str:
    """A value as the file has it; empty for None."""
    if is_size(setting) and isinstance(value, int):
        return f'"{size_literal(setting, value)}"'
    if value is None:
        return '"none"' if setting.metadata["unit"] == "bytes/day" else ""
    # For the other kinds JSON is valid TOML.
    return json.dumps(value, ensure_ascii=False)


def size_literal(setting: "Field[Any]", num_bytes: int) -> str:
    """Text that reads back as the same number."""
    suffix = "/day" if setting.metadata["unit"] == "bytes/day" else ""
    for unit, unit_bytes in (("GB", GIGABYTE), ("GiB", 2**30), ("MiB", MEBIBYTE), ("MB", 10**6)):
        if num_bytes and num_bytes % unit_bytes == 0:
            return f"{num_bytes // unit_bytes}{unit}{suffix}"
    return f"{num_bytes}{suffix}"


def is_size(setting: "Field[Any]") -> bool:
    """Whether the setting is in bytes, or bytes a day."""
    return setting.metadata["unit"] in ("bytes", "bytes/day")


def parse_size(text: str) -> int:
    """Reads `8GB` (10^9), `512 MiB` (2^20), `1.5g` or `4096`; raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?", text.strip().lower(), re.ASCII)
    if match is None:
        raise ConfigError(f"{text!r} is not a size; write it like 8GB, 512MB or 2GiB")
    unit_bytes = (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " ")
    return int(Fraction(match[1]) * unit_bytes)


def parse_size_per_day(text: str) -> int | None:
    """Reads `200GB/day`, and `none` as None; raises ConfigError."""
    if text.strip().lower() == "none":
        return None
    size, _, unit = text.partition("/")
    with contextlib.suppress(ConfigError):
        if unit.strip().lower() == "day":
            return parse_size(size)
    raise ConfigError(f"{text!r} is not a size per day; write it like 200GB/day, or none for no limit")


def _read(setting: "Field[Any]", value: Any, where: str) -> Any:
    """Reads a value; an unreadable one stays unchanged, for `check` to refuse."""
    if isinstance(value, list):
        return tuple(value)
    if not isinstance(value, str):
        is_duration = setting.metadata["unit"] == "duration" and type(value) is int
        return str(value) if is_duration else value
    if is_size(setting):
        try:
            return parse_size(value) if setting.metadata["unit"] == "bytes" else parse_size_per_day(value)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
    if setting.type == tuple[str, ...]:
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if setting.type is bool:
        return _SWITCH.get(value.strip().lower(), value)
    with contextlib.suppress(ValueError):
        if setting.type in (int, int | None):
            return int(value)
        if setting.type is float:
            return float(value)
    return value


def _nearest(name: str, names: Iterable[str]) -> str:
    own_parts = {other.removeprefix(PREFIX): other for other in names}
    near = difflib.get_close_matches(name.removeprefix(PREFIX), own_parts, n=1)
    return f"; did you mean {own_parts[near[0]]}?" if near else "; `mlx-serve config` lists them all"


class StartError(Exception):
    """A command cannot do what was asked; the message is one sentence for a person."""
