"""What each setting is, and who said so: a flag, a variable of the environment, the file, or nobody. Pure.

A setting has one name, made of its flag: `--cache-memory` is `cache_memory` in the file and `MLX_SERVE_CACHE_MEMORY`
in the environment. A flag goes before a variable, a variable before the file, the file before the default.
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, fields
from enum import StrEnum
from fractions import Fraction
from typing import Any

from server.config import GIGABYTE, MEBIBYTE, ConfigError, ServerConfig

PREFIX = "MLX_SERVE_"
FILE_VARIABLE = f"{PREFIX}CONFIG"
"""Names another file than the usual one."""
KEY_VARIABLE = f"{PREFIX}API_KEY"

SETTINGS: Mapping[str, "Field[Any]"] = {setting.name: setting for setting in fields(ServerConfig)}

_UNIT_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_SWITCH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_ONE_KEY = {"api_key", "api_key_file"}
_KEYS = {*_ONE_KEY, "api_keys_file"}
# Kubernetes gives every container such variables for a service that is called mlx-serve.
_INJECTED = re.compile(rf"{PREFIX}(SERVICE_(HOST|PORT\w*)|PORT_\d+_\w+)")


class SettingOrigin(StrEnum):
    """Who said what a setting is, first come first."""

    FLAG = "flag"
    VARIABLE = "variable"
    FILE = "file"
    DEFAULT = "default"


@dataclass(frozen=True)
class ToldSetting:
    """What was said of one setting."""

    value: Any
    """As `ServerConfig` takes it."""
    origin: SettingOrigin
    where: str
    """What a person changes to change it: `--port`, `MLX_SERVE_PORT`, `port in FILE`; the flag for a default."""


Layer = Mapping[str, ToldSetting]
"""What one source said, by the name of the field of `ServerConfig`."""


def key_of(setting: "Field[Any]") -> str:
    """Returns a setting's name in the file. A switch that turns something off is named for what it turns off."""
    flag = str(setting.metadata["flag"]).lstrip("-").lower()
    if setting.type is bool and setting.default is True:
        flag = flag.removeprefix("no-")
    return flag.replace("-", "_")


def variable_of(setting: "Field[Any]") -> str:
    """Returns the name of a setting's variable in the environment."""
    return PREFIX + key_of(setting).upper()


def from_flags(given: Mapping[str, Any]) -> Layer:
    """Returns what the command line says, by field name; None means not given. Raises ConfigError."""
    told = {name: value for name, value in given.items() if value not in (None, [], ())}
    return {name: _told(SETTINGS[name], _flag_value(name, value), SettingOrigin.FLAG) for name, value in told.items()}


def from_environment(environment: Mapping[str, str]) -> Layer:
    """Returns what variables say; an empty one says nothing. Raises ConfigError for one that no setting has."""
    names = {variable_of(setting): name for name, setting in SETTINGS.items()}
    layer = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable == FILE_VARIABLE or not text or _is_injected(variable, text):
            continue
        if variable not in names:
            raise ConfigError(f"{variable} belongs to no setting{_nearest(variable, names)}")
        setting = SETTINGS[names[variable]]
        layer[setting.name] = _told(setting, _parsed(setting, text, variable), SettingOrigin.VARIABLE, variable)
    return layer


def from_file(text: str, path: str) -> Layer:
    """Returns what the text of a file says; `path` is for messages. Raises ConfigError for an unknown key."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from error
    names = {key_of(setting): name for name, setting in SETTINGS.items()}
    layer = {}
    for key, value in table.items():
        if key not in names:
            raise ConfigError(f"{key!r} in {path} is no setting{_nearest(key, names)}")
        setting, where = SETTINGS[names[key]], f"{key} in {path}"
        layer[setting.name] = _told(setting, _file_value(setting, value, where), SettingOrigin.FILE, where)
    return layer


def merge(layers: Iterable[Layer]) -> Layer:
    """Returns every setting, given what the sources say, the strongest first.

    One key replaces the other: where a source names a key or a file of keys, those of weaker sources are not used.
    """
    merged: dict[str, ToldSetting] = {}
    is_key_told = False
    for layer in layers:
        for name, told in layer.items():
            if name not in merged and not (is_key_told and name in _ONE_KEY):
                merged[name] = told
        is_key_told = is_key_told or not _KEYS.isdisjoint(layer)
    defaults = {name: _told(setting, setting.default, SettingOrigin.DEFAULT) for name, setting in SETTINGS.items()}
    return {name: merged.get(name, told) for name, told in defaults.items()}


def checked(settings: Layer) -> ServerConfig:
    """Returns the settings; raises ConfigError, which names the flag, the variable or the file that is wrong."""
    config = ServerConfig(**{name: told.value for name, told in settings.items()})
    try:
        config.check()
    except ConfigError as error:
        name, _, rest = str(error).partition(" ")
        raise ConfigError(f"{settings[name].where} {rest}" if name in settings else str(error)) from error
    return config


def toml_value(setting: "Field[Any]", value: Any) -> str:
    """Returns a value as the file has it; empty for None, which only stands for what is chosen at the start."""
    if is_size(setting) and isinstance(value, int):
        return f'"{size_literal(setting, value)}"'
    if value is None:
        return '"none"' if setting.metadata["unit"] == "bytes/day" else ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_quoted, value))}]"
    return _quoted(value) if isinstance(value, str) else str(value)


def size_literal(setting: "Field[Any]", num_bytes: int) -> str:
    """Returns a size so that reading it again gives the same number."""
    suffix = "/day" if setting.metadata["unit"] == "bytes/day" else ""
    for unit, unit_bytes in (("GB", GIGABYTE), ("GiB", 2**30), ("MiB", MEBIBYTE), ("MB", 10**6)):
        if num_bytes and num_bytes % unit_bytes == 0:
            return f"{num_bytes // unit_bytes}{unit}{suffix}"
    return f"{num_bytes}{suffix}"


def is_size(setting: "Field[Any]") -> bool:
    """Whether a setting is a number of bytes, or of bytes a day."""
    return setting.metadata["unit"] in ("bytes", "bytes/day")


def parse_size(text: str) -> int:
    """Returns a number of bytes from `8GB`, `512 MiB`, `1.5g` or `4096`; raises ConfigError.

    GB is 10^9 bytes and GiB is 2^30, and so on for the other units.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower(), re.ASCII)
    if match is None or match[2] not in _UNIT_BYTES:
        raise ConfigError(f"{text!r} is not a size; write it like 8GB, 512MB or 2GiB")
    return int(Fraction(match[1]) * _UNIT_BYTES[match[2]])


def parse_size_per_day(text: str) -> int | None:
    """Returns a number of bytes from `200GB/day`, None from `none`; raises ConfigError."""
    if text.strip().lower() == "none":
        return None
    size, slash, unit = text.partition("/")
    try:
        if slash and unit.strip().lower() == "day":
            return parse_size(size)
    except ConfigError:
        pass
    raise ConfigError(f"{text!r} is not a size per day; write it like 200GB/day, or none for no limit")


def _told(setting: "Field[Any]", value: Any, origin: SettingOrigin, where: str = "") -> ToldSetting:
    return ToldSetting(value, origin, where or setting.metadata["flag"])


def _flag_value(name: str, value: Any) -> Any:
    setting = SETTINGS[name]
    if isinstance(value, str) and is_size(setting):
        return _size(setting, value, setting.metadata["flag"])
    if setting.type is bool:
        # A switch is given to get what is not the default.
        return not setting.default
    return tuple(value) if isinstance(value, list) else value


def _file_value(setting: "Field[Any]", value: Any, where: str) -> Any:
    if isinstance(value, str) and (is_size(setting) or setting.type == tuple[str, ...]):
        return _parsed(setting, value, where)
    if setting.metadata["unit"] == "duration" and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return tuple(value) if isinstance(value, list) else value


def _parsed(setting: "Field[Any]", text: str, where: str) -> Any:
    """Returns what a text stands for; one that is no number stays a text, for the check to complain of."""
    if is_size(setting):
        return _size(setting, text, where)
    if setting.type == tuple[str, ...]:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if setting.type is bool:
        return _SWITCH.get(text.strip().lower(), text)
    for kind in (int, float):
        if setting.type in (kind, kind | None):
            return _number(kind, text)
    return text


def _number(kind: type[int] | type[float], text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        return text


def _size(setting: "Field[Any]", text: str, where: str) -> int | None:
    try:
        return parse_size(text) if setting.metadata["unit"] == "bytes" else parse_size_per_day(text)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _is_injected(variable: str, text: str) -> bool:
    return _INJECTED.fullmatch(variable) is not None or (variable == f"{PREFIX}PORT" and text.startswith("tcp://"))


def _nearest(name: str, names: Iterable[str]) -> str:
    own_parts = {other.removeprefix(PREFIX): other for other in names}
    near = difflib.get_close_matches(name.removeprefix(PREFIX), own_parts, n=1)
    return f"; did you mean {own_parts[near[0]]}?" if near else "; `mlx-serve config` lists them all"


def _quoted(text: str) -> str:
    """Returns a TOML string; settings are printable texts."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
