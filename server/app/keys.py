"""Keys that clients may send, and their file. Pure.

Only digests are kept; logs and answers have a key's name. Only the owner may read the file.
"""

import hashlib
import hmac
import os
import shlex
import stat
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.errors import reason
from server.app.config import ConfigError, ServerConfig

MAX_NAME_CHARACTERS = 64
LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent_requests")
FIELDS = ("name", "key", *LIMITS, "operator")


@dataclass(frozen=True)
class ApiKey:
    """One key. A limit of None does not bind."""

    name: str
    """Empty for the command line's key."""
    digest: bytes = field(repr=False)
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    is_operator: bool = False
    """Sees the sessions and the cache of all keys."""


class KeyRing:
    """Accepted keys; none if the server requires no key."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self.keys = tuple(keys)
        self._names = {key.digest.hex()[:32]: key.name for key in self.keys}

    def find(self, given: str) -> ApiKey | None:
        """The key that was sent, in a time that reveals nothing of it."""
        digest, found = digest_of(given), None
        for key in self.keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def name_of(self, namespace: str) -> str | None:
        """The name of the key of a namespace."""
        return self._names.get(namespace.partition("/")[0]) or None


def digest_of(key: str) -> bytes:
    """The digest that stands for a key."""
    return hashlib.sha256(key.encode()).digest()


def namespace_of_key(key: str) -> str:
    """Requests with the key share state in this namespace; nobody can derive the key from it."""
    return digest_of(key).hex()[:32]


def parse_keys(text: str) -> KeyRing:
    """Reads TOML with `[[keys]]`. Raises ConfigError, which contains no key."""
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"is not TOML: {error}") from error
    entries = document.pop("keys", None)
    if document:
        raise ConfigError(f"holds {next(iter(document))!r}; only [[keys]] is known")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError("holds no [[keys]]")
    keys: list[ApiKey] = []
    for number, entry in enumerate(entries, 1):
        key = _read_key(entry, f"key {number}")
        for other in keys:
            if key.name == other.name:
                raise ConfigError(f"two keys have the name {key.name!r}")
            if key.digest == other.digest:
                raise ConfigError(f"{other.name!r} and {key.name!r} have the same key")
        keys.append(key)
    return KeyRing(keys)


def _read_key(entry: Mapping[str, Any], place: str) -> ApiKey:
    unknown = [name for name in entry if name not in FIELDS]
    if unknown:
        raise ConfigError(f"{place}: {unknown[0]!r} is not one of {', '.join(FIELDS)}")
    name = _read_text(entry, "name", place)
    if len(name) > MAX_NAME_CHARACTERS:
        raise ConfigError(f"{place}: name has more than {MAX_NAME_CHARACTERS} characters")
    digest = digest_of(_read_text(entry, "key", place))
    is_operator = entry.get("operator", False)
    if not isinstance(is_operator, bool):
        raise ConfigError(f"{place}: operator must be true or false")
    limits = {limit: _read_limit(entry, limit, place) for limit in LIMITS}
    return ApiKey(name, digest, is_operator=is_operator, **limits)


def _read_text(entry: Mapping[str, Any], field_name: str, place: str) -> str:
    value = entry.get(field_name)
    if not isinstance(value, str) or not value or not value.isprintable() or value != value.strip():
        raise ConfigError(f"{place}: {field_name} must be a printable text without spaces around it")
    return value


def _read_limit(entry: Mapping[str, Any], limit: str, place: str) -> int | None:
    value = entry.get(limit)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"{place}: {limit} must be a whole number of at least 1")
    return value


SHARED = stat.S_IRWXG | stat.S_IRWXO


def read_keys(config: ServerConfig) -> KeyRing:
    """The keys of all settings. Raises ConfigError."""
    single = () if config.api_key is None else (ApiKey("", digest_of(config.api_key)),)
    if config.api_keys_file is None:
        return KeyRing(single)
    listed = _read_file(Path(config.api_keys_file).expanduser())
    return KeyRing((*single, *listed.keys))


def _read_file(path: Path) -> KeyRing:
    text, fault = read_private(path, f"--api-keys {path}")
    if fault:
        raise ConfigError(f"--api-keys {path} {fault}")
    try:
        return parse_keys(text)
    except ConfigError as error:
        raise ConfigError(f"--api-keys {path} {error}") from error


def read_private(path: Path, name: str) -> tuple[str, str]:
    """A file's text, and a warning where others may open it. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8") as file:
            is_shared = os.fstat(file.fileno()).st_mode & SHARED
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} cannot be read: {reason(error)}") from error
    fault = f"is open to other users of this machine; run: chmod 600 {shlex.quote(str(path))}"
    return text, fault if is_shared else ""
