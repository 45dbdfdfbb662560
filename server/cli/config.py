"""`mlx-serve config`, and settings from all sources."""

import inspect
import os
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import Field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from models.names import used_last
from server.app import config
from server.app.config import SETTINGS, ConfigError, Layer, ServerConfig, SettingOrigin, ToldSetting
from server.app.keys import read_private
from server.cli.options import Json, command_group, model_names, plain_table, print_json

app = command_group()

HIDDEN = "(not shown)"
"""Stands for a secret."""

_HEAD = """\
# Settings of mlx-serve. A line takes effect without its '#'.
# A variable of the environment goes before this file, a flag before both; `mlx-serve config` shows the result.
"""


_TEMPLATE_HELP = "Print a file of all settings, to be edited."
_MODEL_DEFAULT = "Default: the pulled model that was used last, else demo."


def with_settings(**others: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command a flag for each setting; `others` are the command's own switches."""
    options: dict[str, tuple[Any, object]] = {name: (_option(setting), None) for name, setting in SETTINGS.items()}
    options |= {name: (annotation, False) for name, annotation in others.items()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (annotation, default) in options.items()
        ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _option(setting: "Field[Any]") -> Any:
    metadata, kind = setting.metadata, setting.type
    if metadata["flag"] == "MODEL":
        told = f"{metadata['help']} {_MODEL_DEFAULT}"
        return Annotated[list[str] | None, typer.Argument(metavar="MODEL", help=told, autocompletion=model_names)]
    info = typer.Option(
        metadata["flag"],
        help=metadata["help"] + _default(setting),
        metavar=None if kind is bool else _metavar(setting),
        autocompletion=(lambda: list(metadata["choices"])) if metadata["choices"] else None,
    )
    # A text is read like one from the file or a variable.
    return Annotated[(bool if kind is bool else list[str] if kind == tuple[str, ...] else str) | None, info]


def _default(setting: "Field[Any]") -> str:
    default: Any = setting.default
    if default in (None, ()) or setting.type is bool:
        return ""
    return f" Default: {config.size_literal(setting, default) if config.is_size(setting) else default}."


def _metavar(setting: "Field[Any]") -> str:
    if setting.metadata["choices"]:
        return "|".join(setting.metadata["choices"])
    if config.is_size(setting):
        return "SIZE" if setting.metadata["unit"] == "bytes" else "SIZE/day"
    return (setting.metadata["unit"] or ("TEXT" if setting.type in (str, str | None) else "NUMBER")).upper()


def config_file(environment: Mapping[str, str]) -> Path:
    """The settings file's path, which need not exist."""
    named = environment.get(config.FILE_VARIABLE)
    if named:
        return Path(named).expanduser()
    folder = environment.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(folder).expanduser() / "mlx-serve" / "config.toml"


def read_settings(given: Mapping[str, Any], environment: Mapping[str, str]) -> Layer:
    """Every setting with its origin; raises ConfigError."""
    return config.merge([config.from_flags(given), config.from_environment(environment), _read_file(environment)])


def load_config(given: Mapping[str, Any], environment: Mapping[str, str]) -> ServerConfig:
    """The checked settings, with the key from a key file. Raises ConfigError."""
    return config.checked(_with_key(read_settings(given, environment)))


def load_model_config(given: Mapping[str, Any], environment: Mapping[str, str]) -> ServerConfig:
    """As `load_config`; without a MODEL, takes the one used last, and says so."""
    settings = read_settings(given, environment)
    found = used_last() if settings["models"].origin is SettingOrigin.DEFAULT else None
    if found is not None:
        settings = {**settings, "models": replace(settings["models"], value=(found,))}
        typer.echo(f"No MODEL is named: taking {found}, which was used last; 'demo' is the built-in one.", err=True)
    return config.checked(_with_key(settings))


@app.command("config")
@with_settings(as_json=Json, as_template=Annotated[bool, typer.Option("--template", help=_TEMPLATE_HELP)])
def show_settings(*, as_json: bool, as_template: bool, **given: Any) -> None:
    """Prints settings and their sources, or a template. Raises ConfigError."""
    if as_template:
        typer.echo("\n".join([_HEAD, *map(_template_entry, SETTINGS.values())]), nl=False)
        return
    settings = read_settings(given, os.environ)
    config.checked(settings)
    file = config_file(os.environ)
    if as_json:
        records = [_record(name, told) for name, told in settings.items()]
        print_json({"file": str(file), "exists": file.is_file(), "settings": records})
    else:
        typer.echo(plain_table([_row(*entry) for entry in settings.items()]))
        typer.echo(f"\nfile: {file}{'' if file.is_file() else ', which is not there'}")


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
    file = settings["api_key_file"]
    if not isinstance(file.value, str):
        return settings
    if settings["api_key"].value is not None:
        raise ConfigError(f"give {settings['api_key'].where} or {file.where}, not both")
    key, _ = read_private(Path(file.value).expanduser(), f"{file.where}: {file.value}")
    return {**settings, "api_key": ToldSetting(key.strip(), file.origin, file.where)}


def _shown(name: str, told: ToldSetting) -> Any:
    return told.value if SETTINGS[name].repr or told.value is None else HIDDEN


def _record(name: str, told: ToldSetting) -> dict[str, Any]:
    setting = SETTINGS[name]
    return {
        "key": config.key_of(setting),
        "value": _shown(name, told),
        "origin": str(told.origin),
        "where": "" if told.origin is SettingOrigin.DEFAULT else told.where,
        "flag": setting.metadata["flag"],
        "variable": config.variable_of(setting),
    }


def _row(name: str, told: ToldSetting) -> tuple[str, ...]:
    value = _shown(name, told)
    shown = value if value == HIDDEN else config.toml_value(SETTINGS[name], value)
    where = "default" if told.origin is SettingOrigin.DEFAULT else told.where
    return config.key_of(SETTINGS[name]), shown or "-", where


def _template_entry(setting: "Field[Any]") -> str:
    told = textwrap.fill(setting.metadata["help"], 100, initial_indent="# ", subsequent_indent="# ")
    return f"{told}\n#{config.key_of(setting)} = {config.toml_value(setting, setting.default)}".rstrip() + "\n"
