"""`mlx-serve config`, and settings from all sources."""

import inspect
import os
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from models.names import used_last
from server.app import config
from server.app.config import SETTINGS, ConfigError, Layer, ServerConfig, Setting, ToldSetting
from server.app.keys import read_private
from server.cli.options import Json, model_names, plain_table, taking, tell

HIDDEN = "(not shown)"
"""Stands for a secret."""

_HEAD = """\
# Settings of mlx-serve. A line takes effect without its '#'.
# A variable of the environment goes before this file, a flag before both; `mlx-serve config` shows the result.
"""

_MODEL_DEFAULT = "Default: the pulled model that was used last, else demo."


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command a flag for each setting in place of its `given`."""
    parameters = inspect.signature(command).parameters.values()
    own = [parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    return taking(command, {name: _option(setting) for name, setting in SETTINGS.items()}, own)


def _option(setting: Setting) -> Any:
    is_list = isinstance(setting.default, tuple)
    if setting.flag == "MODEL":
        text = f"{setting.help} {_MODEL_DEFAULT}"
        return Annotated[list[str] | None, typer.Argument(metavar="MODEL", help=text, autocompletion=model_names)]
    is_switch, default = setting.kind is bool, setting.default
    shown = config.size_literal(setting, default) if setting.is_size and default else default
    info = typer.Option(
        setting.flag,
        help=setting.help if is_switch or default in (None, ()) else f"{setting.help} Default: {shown}.",
        metavar=None if is_switch else _metavar(setting),
        autocompletion=(lambda: list(setting.choices)) if setting.choices else None,
    )
    # A text is read like one from the file or a variable.
    return Annotated[(bool if is_switch else list[str] if is_list else str) | None, info]


def _metavar(setting: Setting) -> str:
    if setting.choices:
        return "|".join(setting.choices)
    usual = setting.unit.upper() or ("TEXT" if setting.kind is str else "NUMBER")
    return {"bytes": "SIZE", "bytes/day": "SIZE/day"}.get(setting.unit, usual)


def config_file(environment: Mapping[str, str]) -> Path:
    """The settings file's path, which need not exist."""
    folder = environment.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(environment.get(config.FILE_VARIABLE) or f"{folder}/mlx-serve/config.toml").expanduser()


def read_settings(given: Mapping[str, Any], environment: Mapping[str, str]) -> Layer:
    """Every setting with its origin; raises ConfigError."""
    return config.merge([config.from_flags(given), config.from_environment(environment), _read_file(environment)])


def load_config(given: Mapping[str, Any], environment: Mapping[str, str]) -> ServerConfig:
    """The checked settings, with the key from a key file. Raises ConfigError."""
    return config.checked(_with_key(read_settings(given, environment)))


def load_model_config(given: Mapping[str, Any], environment: Mapping[str, str]) -> ServerConfig:
    """As `load_config`; without a MODEL, takes the one used last, and says so."""
    settings = read_settings(given, environment)
    model = used_last() if settings["models"].origin == "default" else None
    if model is not None:
        settings = {**settings, "models": replace(settings["models"], value=(model,))}
        typer.echo(
            f"No MODEL is named, so it is {model}, which was used last; 'demo' is the built-in model.", err=True
        )
    return config.checked(_with_key(settings))


@with_settings
def show_settings(
    *, as_json: Json = False, as_template: Annotated[bool, typer.Option("--template")] = False, **given: Any
) -> None:
    """Prints settings and their sources, or a template. Raises ConfigError."""
    if as_template:
        typer.echo("\n".join([_HEAD, *map(_template_entry, SETTINGS.values())]), nl=False)
        return
    settings = read_settings(given, os.environ)
    config.checked(settings)
    file = config_file(os.environ)
    records = [_record(name, setting) for name, setting in settings.items()]
    shown = {"file": str(file), "exists": file.is_file(), "settings": records}
    table = plain_table(list(map(_row, settings, records)))
    tell(shown, f"{table}\n\nfile: {file}{'' if file.is_file() else ', which is not there'}", as_json)


def _read_file(environment: Mapping[str, str]) -> Layer:
    path = config_file(environment)
    # A named file must exist.
    if not environment.get(config.FILE_VARIABLE) and not path.is_file():
        return {}
    text, fault = read_private(path, str(path))
    layer = config.from_file(text, str(path))
    if "api_key" in layer and fault:
        raise ConfigError(f"{path} holds a key and {fault}")
    return layer


def _with_key(settings: Layer) -> Layer:
    file, key = settings["api_key_file"], settings["api_key"]
    if file.value is None:
        return settings
    if key.value is not None:
        raise ConfigError(f"give {key.where} or {file.where}, not both")
    text, _ = read_private(Path(file.value).expanduser(), f"{file.where}: {file.value}")
    return {**settings, "api_key": config.read(SETTINGS["api_key"], replace(file, value=text.strip()))}


def _record(name: str, source: ToldSetting) -> dict[str, Any]:
    setting, is_default = SETTINGS[name], source.origin == "default"
    return {
        "key": setting.key,
        "value": HIDDEN if name == "api_key" and source.value is not None else source.value,
        "origin": source.origin,
        "where": "" if is_default else source.where,
        "flag": setting.flag,
        "variable": setting.variable,
    }


def _row(name: str, record: Mapping[str, Any]) -> tuple[str, ...]:
    value = record["value"]
    shown = value if value == HIDDEN else config.toml_value(SETTINGS[name], value)
    return record["key"], shown or "-", record["where"] or "default"


def _template_entry(setting: Setting) -> str:
    comment = textwrap.fill(setting.help, 100, initial_indent="# ", subsequent_indent="# ")
    return f"{comment}\n#{setting.key} = {config.toml_value(setting, setting.default)}".rstrip() + "\n"
