"""Every setting: its default, text and range, and what flags, variables and the file say of it. Pure.

Command line, `--help` and documentation are made from `ServerConfig` and settings.toml. `--cache-memory` is
`cache_memory` in the file and `MLX_SERVE_CACHE_MEMORY` in the environment. Flags go before variables, variables
before the file. No part of the server reads variables.
"""

import contextlib
import difflib
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

from models.adapter import parse_adapter
from models.errors import told_as
from server.diagnosis.causes import OPT_IN
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


@dataclass(frozen=True)
class ServerConfig:
    """None means: chosen at the start, as the help text says."""

    models: tuple[str, ...] = ("demo",)
    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    max_models: int | None = None
    keep_alive: str | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    name: str | None = None
    slots: int = 8
    cache_memory_bytes: int | None = None
    share_heads: bool = True
    wire_weights: bool = True
    cache_bits: tuple[str, ...] = ()
    cache_disk_bytes: int | None = None
    cache_disk_write_bytes_per_day: int | None = 100 * GIGABYTE
    cache_dir: str = "~/.cache/mlx-serve"
    context_tokens: int | None = None
    max_waiting: int = 64
    speculate: str = "auto"
    bind_calls: str = "strict"
    loop_guard: bool = False
    chunk_tokens: int = 256
    provider_check_seconds: float = 300.0
    max_image_tokens: int | None = None
    max_body_bytes: int = 64 * MEBIBYTE
    api_key: str | None = field(default=None, repr=False)
    allowed_hosts: tuple[str, ...] = ()
    cors: tuple[str, ...] = ()
    api_key_file: str | None = None
    api_keys_file: str | None = None
    insecure_no_key: bool = False
    otlp: str | None = None
    console: bool = True
    prompt_hygiene: bool = True
    heals: tuple[str, ...] = ()
    default_max_tokens: int | None = None
    heartbeat_seconds: float = 5.0
    client_seconds: float = 10.0
    drain_seconds: float = 10.0
    handover: str | None = None
    handover_key_file: str | None = None
    stuck_after_seconds: float = 60.0
    exit_when_stuck: bool = False
    ranks: int = 1
    rank_key_file: str | None = None
    log_level: str = "info"
    log_format: str = "text"

    @property
    def draft_model(self) -> str | None:
        """The model that drafts for others."""
        return self.speculate.removeprefix(_DRAFT) if self.speculate.startswith(_DRAFT) else None

    @property
    def needs_key(self) -> bool:
        return self.api_key is not None or self.api_keys_file is not None


PREFIX = "MLX_SERVE_"
FILE_VARIABLE = f"{PREFIX}CONFIG"
KEY_VARIABLE = f"{PREFIX}API_KEY"


@dataclass(frozen=True)
class Setting:
    """One field of `ServerConfig`, with what settings.toml says of it."""

    name: str
    kind: type
    """The type of the value, or of each of several values."""
    default: Any
    flag: str
    help: str
    unit: str = ""
    at_least: float = -math.inf
    at_most: float = math.inf
    choices: Sequence[str] = ()
    """MODEL stands for any name."""

    @property
    def key(self) -> str:
        """The setting's name in the file: `x` for a switch `--no-x`."""
        stem = self.flag.removeprefix("--no-") if self.default is True else self.flag.lstrip("-")
        return stem.lower().replace("-", "_")

    @property
    def variable(self) -> str:
        return PREFIX + self.key.upper()

    @property
    def is_size(self) -> bool:
        """Whether the value is in bytes, or bytes a day."""
        return self.unit in ("bytes", "bytes/day")


_TOLD = tomllib.loads(Path(__file__).with_name("settings.toml").read_text(encoding="utf-8"))
SETTINGS: Mapping[str, Setting] = {
    one.name: Setting(one.name, (*get_args(one.type), one.type)[0], one.default, **_TOLD[one.name])
    for one in fields(ServerConfig)
}

_ONE_KEY = {"api_key", "api_key_file"}
_KEYS = {*_ONE_KEY, "api_keys_file"}
# Kubernetes gives every container such variables for a service that is called mlx-serve.
_INJECTED = re.compile(rf"{PREFIX}(SERVICE_(HOST|PORT\w*)=.*|PORT_\d+_\w+=.*|PORT=tcp://.*)", re.DOTALL)


@dataclass(frozen=True)
class ToldSetting:
    """A value, and its source."""

    value: Any
    origin: str
    """`flag`, `variable`, `file` or `default`."""
    where: str
    """What a person edits: `--port`, `MLX_SERVE_PORT`, `port in FILE`."""


Layer = Mapping[str, ToldSetting]


def from_flags(given: Mapping[str, Any]) -> Layer:
    """The settings given as flags."""
    layer = {}
    for name, value in given.items():
        if value not in (None, [], ()):
            setting = SETTINGS[name]
            # A switch sets the opposite of the default.
            said = not setting.default if setting.kind is bool else value
            layer[name] = ToldSetting(said, "flag", setting.flag)
    return layer


def from_environment(environment: Mapping[str, str]) -> Layer:
    """Settings of non-empty variables; raises ConfigError for an unknown name."""
    given = {
        variable: text
        for variable, text in environment.items()
        if variable.startswith(PREFIX) and variable != FILE_VARIABLE and text
        if not _INJECTED.fullmatch(f"{variable}={text}")
    }
    return _layer(given, {setting.variable: setting.name for setting in SETTINGS.values()}, "variable")


def from_file(text: str, path: str) -> Layer:
    """A file's settings; raises ConfigError, also for an unknown name."""
    with told_as(ConfigError, f"{path} is no TOML", tomllib.TOMLDecodeError, RecursionError):
        table = tomllib.loads(text)
    return _layer(table, {setting.key: setting.name for setting in SETTINGS.values()}, "file", f" in {path}")


def _layer(given: Mapping[str, Any], names: Mapping[str, str], origin: str, place: str = "") -> Layer:
    for name in given:
        if name not in names:
            raise ConfigError(f"{name!r}{place} is no setting{_nearest(name, names)}")
    return {names[name]: ToldSetting(value, origin, f"{name}{place}") for name, value in given.items()}


def _nearest(name: str, names: Iterable[str]) -> str:
    own_parts = {other.removeprefix(PREFIX): other for other in names}
    near = difflib.get_close_matches(name.removeprefix(PREFIX), own_parts, n=1)
    return f"; did you mean {own_parts[near[0]]}?" if near else "; `mlx-serve config` lists them all"


def merge(layers: Iterable[Layer]) -> Layer:
    """Every setting, read from the strongest layer that has it. The strongest layer comes first.

    A source that names a key or a file of keys replaces the keys of weaker sources. Raises ConfigError, which names
    the flag, variable or file.
    """
    merged: dict[str, ToldSetting] = {}
    is_key_told = False
    for layer in layers:
        for name, setting in layer.items():
            if name not in merged and not (is_key_told and name in _ONE_KEY):
                merged[name] = read(SETTINGS[name], setting)
        is_key_told = is_key_told or not _KEYS.isdisjoint(layer)
    defaults = {name: ToldSetting(setting.default, "default", setting.flag) for name, setting in SETTINGS.items()}
    return {**defaults, **merged}


def checked(settings: Layer) -> ServerConfig:
    """The settings together. Raises ConfigError for two that contradict each other."""
    config = ServerConfig(**{name: setting.value for name, setting in settings.items()})
    names = [name for name, _ in map(parse_adapter, config.adapters)]
    for name in names:
        if names.count(name) > 1 or name in config.models:
            raise ConfigError(f"{settings['adapters'].where}: {name!r} stands for something else already")
    if ANY_ORIGIN in config.cors and not config.needs_key:
        where = settings["cors"].where
        raise ConfigError(f"{where} is '*', which lets every web page use this server; that needs --api-key")
    return config


def read(setting: Setting, source: ToldSetting) -> ToldSetting:
    """With the value as `ServerConfig` has it. Raises ConfigError, which names the source."""
    value = source.value
    if not isinstance(setting.default, tuple):
        return replace(source, value=_read_one(setting, value, source.where))
    if isinstance(value, str):
        # What is healed for one model has commas of its own.
        value = [part.strip() for part in (value.split(",") if setting.name != "heals" else [value]) if part.strip()]
    if not isinstance(value, list) or not (value or setting.default == ()):
        raise ConfigError(f"{source.where} is {value!r}; it must hold at least one name")
    values = tuple(_read_one(setting, one, source.where) for one in value)
    if len(set(values)) != len(values):
        raise ConfigError(f"{source.where} is {value!r}; a name stands there twice")
    return replace(source, value=values)


def _read_one(setting: Setting, value: Any, where: str) -> Any:
    if isinstance(value, str) or (setting.unit == "duration" and type(value) is int):
        with told_as(ConfigError, where, ValueError):
            value = _parse(setting, str(value))
    wanted = _wanted(setting, value)
    if wanted is not None:
        # A key is a secret and stays out of messages: only its name is given.
        shown = "unusable" if setting.name == "api_key" else repr(value)
        raise ConfigError(f"{where} is {shown}; it must be {wanted}")
    return value


def _parse(setting: Setting, text: str) -> Any:
    """Returns a text of no number or switch as it is, for `_wanted` to refuse. Raises ValueError for other forms."""
    if setting.name in _FORMS:
        _FORMS[setting.name](text)
    if setting.is_size:
        return parse_size(text) if setting.unit == "bytes" else parse_size_per_day(text)
    if setting.kind is bool:
        return _SWITCH.get(text.strip().lower(), text)
    with contextlib.suppress(ValueError):
        return setting.kind(text)
    return text


def _wanted(setting: Setting, value: Any) -> str | None:
    """What a value must be, if it is not."""
    kind = setting.kind
    if kind is bool:
        return None if isinstance(value, bool) else "true or false"
    if kind is str:
        is_text = isinstance(value, str) and value and value.isprintable()
        if setting.choices:
            pattern = "|".join(setting.choices).replace("MODEL", ".+")
            return None if is_text and re.fullmatch(pattern, value) else f"one of {', '.join(setting.choices)}"
        return None if is_text else "a printable text that is not empty"
    if value is None:  # `none` for no limit
        return None
    accepted = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, accepted) or not math.isfinite(value):
        return "a whole number" if kind is int else "a number"
    if value < setting.at_least:
        return f"at least {setting.at_least}"
    return f"at most {setting.at_most}" if value > setting.at_most else None


_SWITCH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def _check_origin(text: str) -> None:
    if text != ANY_ORIGIN and not _ORIGIN.fullmatch(text):
        raise ValueError(f"{text!r} is no origin; write it like https://chat.example.org, or '*' for any")


def parse_heal(text: str) -> tuple[str, frozenset[str]]:
    """A model's name or pattern, and what is healed for it; raises ValueError."""
    model, _, kinds = text.rpartition("=")
    wanted = frozenset(kind.strip() for kind in kinds.split(","))
    if not model.strip() or not wanted.issubset(OPT_IN):
        raise ValueError(f"{text!r} heals nothing; write it like qwen3:8b={','.join(OPT_IN)}")
    return model.strip(), wanted


def parse_cache_bits(text: str) -> str:
    """The model's name or pattern whose stored state gets 8 bits: any for a mere 8. Raises ValueError."""
    model, _, bits = text.strip().rpartition("=")
    if bits.strip() != "8":
        raise ValueError(f"{text!r} is not 8 or MODEL=8; with fewer bits answers change")
    return model.strip() or "*"


def _check_address(text: str) -> None:
    parts = urlsplit(text)  # raises ValueError too
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError(f"{text!r} is no address; write it like http://127.0.0.1:4318")


_FORMS: Mapping[str, Callable[[str], object]] = {
    "aliases": parse_alias,
    "adapters": parse_adapter,
    "keep_alive": parse_keep_alive,
    "heals": parse_heal,
    "cache_bits": parse_cache_bits,
    "cors": _check_origin,
    "otlp": _check_address,
    "handover": _check_address,
}
"""Raise ValueError for a text of another form."""


def toml_value(setting: Setting, value: Any) -> str:
    """A value as the file has it; empty for None."""
    if setting.is_size and isinstance(value, int):
        return f'"{size_literal(setting, value)}"'
    if value is None:
        return '"none"' if setting.unit == "bytes/day" else ""
    # For the other kinds JSON is valid TOML.
    return json.dumps(value, ensure_ascii=False)


def size_literal(setting: Setting, num_bytes: int) -> str:
    """Text that reads back as the same number."""
    suffix = "/day" if setting.unit == "bytes/day" else ""
    for unit, unit_bytes in (("GB", GIGABYTE), ("GiB", 2**30), ("MiB", MEBIBYTE), ("MB", 10**6)):
        if num_bytes and num_bytes % unit_bytes == 0:
            return f"{num_bytes // unit_bytes}{unit}{suffix}"
    return f"{num_bytes}{suffix}"


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


class StartError(Exception):
    """A command cannot do what was asked; the message is one sentence for a person."""
