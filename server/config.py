"""Every setting of the server: its default, range, unit and help text, in one place.

The command line, `--help` and the documentation are made from the fields below, so a setting is added here
and nowhere else. Nothing in the project reads environment variables for these: what a part needs is handed
to it. `ServerConfig.check` is called once, where the process starts.
"""

import math
import re
from dataclasses import dataclass, field, fields
from typing import Any

from models.adapter import parse_adapter
from server.pool.names import parse_alias, parse_keep_alive

MEBIBYTE = 1024 * 1024
GIGABYTE = 10**9
ANY_ORIGIN = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+", re.IGNORECASE)


class ConfigError(ValueError):
    """A setting cannot be used; the message names it, its value and what would be accepted."""


def _setting(
    default: Any,
    help_text: str,
    *,
    flag: str,
    unit: str | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] | None = None,
    secret: bool = False,
) -> Any:
    """Returns a dataclass field whose metadata is what a command line and a page of documentation need."""
    metadata = {
        "help": help_text,
        "flag": flag,
        "unit": unit,
        "minimum": minimum,
        "maximum": maximum,
        "choices": choices,
        "secret": secret,
    }
    return field(default=default, repr=not secret, metadata=metadata)


@dataclass(frozen=True)
class ServerConfig:
    """Settings of one server process. None means: chosen when the server starts, as the help text says."""

    models: tuple[str, ...] = _setting(
        ("demo",),
        "Models to serve: 'demo', a folder, or a Hugging Face repository in the local cache. The first is loaded "
        "now, others when they are asked for.",
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
        flag="--max-models",
        minimum=1,
        maximum=1024,
    )
    keep_alive: str | None = _setting(
        None,
        "How long a model stays loaded that nobody uses, such as 30m, or -1 for ever; by default for ever, or 30m "
        "where the weights take more than half of the memory.",
        flag="--keep-alive",
        unit="duration",
    )
    host: str = _setting("127.0.0.1", "Address to listen on.", flag="--host")
    port: int = _setting(8080, "Port to listen on; 0 takes a free one.", flag="--port", minimum=0, maximum=65535)
    name: str | None = _setting(
        None,
        "Name in the header X-Served-By of every answer, to tell several servers apart; by default this machine's "
        "name.",
        flag="--name",
    )
    slots: int = _setting(
        8, "Sequences that are live on the device at once.", flag="--slots", minimum=1, maximum=1024
    )
    cache_memory_bytes: int | None = _setting(
        None,
        "Memory for the state of past tokens, live and stored, at any time; by default from the machine's memory.",
        flag="--cache-memory",
        unit="bytes",
        minimum=MEBIBYTE,
    )
    cache_disk_bytes: int | None = _setting(
        None,
        "Disk space for state that outlives memory and restarts; by default nothing is written.",
        flag="--cache-disk",
        unit="bytes",
        minimum=MEBIBYTE,
    )
    cache_disk_write_bytes_per_day: int | None = _setting(
        100 * GIGABYTE,
        "Most that is written to --cache-disk in 24 hours, so that the disk does not wear out; 'none' for no limit.",
        flag="--cache-disk-writes",
        unit="bytes/day",
        minimum=MEBIBYTE,
    )
    cache_dir: str = _setting(
        "~/.cache/mlx-serve",
        "Folder for --cache-disk; it holds people's conversations, readable by their owner only.",
        flag="--cache-dir",
    )
    context_tokens: int | None = _setting(
        None,
        "Longest prompt and answer together; by default the model's own limit.",
        flag="--context",
        unit="tokens",
        minimum=16,
    )
    max_waiting: int = _setting(
        64,
        "Requests that may wait for a slot; one more is answered with status 429.",
        flag="--max-waiting",
        minimum=0,
        maximum=100_000,
    )
    chunk_tokens: int = _setting(
        256,
        "Prompt tokens evaluated per step; running answers pause for at most one such step.",
        flag="--chunk-tokens",
        unit="tokens",
        minimum=16,
        maximum=65_536,
    )
    max_body_bytes: int = _setting(
        32 * MEBIBYTE,
        "Largest request body; a larger one is answered with status 413.",
        flag="--max-body",
        unit="bytes",
        minimum=1024,
    )
    api_key: str | None = _setting(
        None,
        "Key that clients must send as a bearer token; by default none is asked for.",
        flag="--api-key",
        secret=True,
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
        flag="--cors",
        unit="origin",
    )
    api_key_file: str | None = _setting(
        None,
        "File that holds the key instead; on the command line anyone on this machine can read it. Or set "
        "MLX_SERVE_API_KEY.",
        flag="--api-key-file",
    )
    api_keys_file: str | None = _setting(
        None,
        "TOML file of several keys, each with a name and limits; SIGHUP has it read again.",
        flag="--api-keys",
    )
    insecure_no_key: bool = _setting(
        False,
        "Let anyone who reaches the address use the server; by default a key is needed where others can reach it.",
        flag="--insecure-no-key",
    )
    otlp: str | None = _setting(
        None,
        "Address of an OpenTelemetry collector that gets a trace of each request, such as http://127.0.0.1:4318.",
        flag="--otlp",
        unit="URL",
    )
    console: bool = _setting(
        True,
        "Serve no page; by default / is one in a browser, on the server's own machine or with a key.",
        flag="--no-console",
    )
    prompt_hygiene: bool = _setting(
        True,
        "Keep each request's head as the client sent it; by default headers that Claude Code changes each time are "
        "made constant, so that prompts are reused.",
        flag="--no-prompt-hygiene",
    )
    default_max_tokens: int | None = _setting(
        None,
        "Longest answer when the request names no limit; by default until the context is full.",
        flag="--default-max-tokens",
        unit="tokens",
        minimum=1,
    )
    heartbeat_seconds: float = _setting(
        5.0,
        "Silence on a stream after which a comment is sent, so that proxies keep it open.",
        flag="--heartbeat",
        unit="seconds",
        minimum=0.01,
        maximum=3600,
    )
    client_seconds: float = _setting(
        10.0,
        "Time in which a client must send its request, or take some of its answer; then its connection is closed.",
        flag="--client-timeout",
        unit="seconds",
        minimum=0.1,
        maximum=3600,
    )
    drain_seconds: float = _setting(
        10.0,
        "Time that running answers have to finish once the server is asked to stop.",
        flag="--drain",
        unit="seconds",
        minimum=0,
        maximum=3600,
    )
    log_level: str = _setting(
        "info",
        "Least severe messages to log.",
        flag="--log-level",
        choices=("debug", "info", "warning", "error"),
    )
    log_format: str = _setting(
        "text",
        "How the log is written: 'text' for people, 'json' for programs, one object per line.",
        flag="--log-format",
        choices=("text", "json"),
    )

    @property
    def needs_key(self) -> bool:
        """Whether clients must send a key."""
        return self.api_key is not None or self.api_keys_file is not None

    def check(self) -> None:
        """Raises ConfigError for the first setting that cannot be used."""
        for setting in fields(self):
            _check_setting(setting.name, setting.type, getattr(self, setting.name), setting.metadata)
        self._check_origins()
        self._check_pool()

    def _check_pool(self) -> None:
        try:
            for alias in self.aliases:
                parse_alias(alias)
        except ValueError as error:
            raise ConfigError(f"aliases is wrong: {error}") from error
        self._check_adapters()
        try:
            parse_keep_alive(self.keep_alive or 0)
        except ValueError as error:
            raise ConfigError(f"keep_alive is wrong: {error}") from error

    def _check_adapters(self) -> None:
        try:
            names = [parse_adapter(adapter).name for adapter in self.adapters]
        except ValueError as error:
            raise ConfigError(f"adapters is wrong: {error}") from error
        for name in names:
            if names.count(name) > 1 or name in self.models:
                raise ConfigError(f"adapters is wrong: {name!r} stands for something else already")

    def _check_origins(self) -> None:
        for origin in self.cors:
            if not is_origin(origin):
                raise ConfigError(
                    f"cors is {origin!r}; it must be an origin such as https://chat.example.org, or '*'"
                )
        if ANY_ORIGIN in self.cors and not self.needs_key:
            raise ConfigError("cors is '*', which lets every web page use this server; it must have --api-key then")


def is_origin(text: str) -> bool:
    """Whether a text is an origin as browsers write it, `scheme://host[:port]`, or `*`."""
    return text == ANY_ORIGIN or _ORIGIN.fullmatch(text) is not None


def _check_setting(name: str, kind: Any, value: Any, metadata: Any) -> None:
    if value is None and _allows_none(kind):
        return
    if kind == tuple[str, ...]:
        _check_names(name, value)
    elif kind is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}; it must be true or false")
    elif kind in (str, str | None):
        _check_text(name, value, metadata["choices"])
    else:
        _check_number(name, value, kind in (int, int | None), metadata["minimum"], metadata["maximum"])


def _allows_none(kind: Any) -> bool:
    return type(None) in getattr(kind, "__args__", ())


def _check_names(name: str, value: Any) -> None:
    if not isinstance(value, tuple) or (name == "models" and not value):
        raise ConfigError(f"{name} is {value!r}; it must hold at least one name")
    for entry in value:
        _check_text(name, entry, None)
    if len(set(value)) != len(value):
        raise ConfigError(f"{name} is {value!r}; a name stands there twice")


def _check_text(name: str, value: Any, choices: tuple[str, ...] | None) -> None:
    if not isinstance(value, str) or not value or not value.isprintable():
        # A key is a secret and stays out of messages: only its name is given.
        shown = "unusable" if name == "api_key" else repr(value)
        raise ConfigError(f"{name} is {shown}; it must be a printable text that is not empty")
    if choices is not None and value not in choices:
        raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")


def _check_number(name: str, value: Any, is_whole: bool, minimum: float | None, maximum: float | None) -> None:
    accepted = (int,) if is_whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, accepted) or not math.isfinite(value):
        raise ConfigError(f"{name} is {value!r}; it must be a {'whole ' if is_whole else ''}number")
    if minimum is not None and value < minimum:
        raise ConfigError(f"{name} is {value}; it must be at least {minimum}")
    if maximum is not None and value > maximum:
        raise ConfigError(f"{name} is {value}; it must be at most {maximum}")
