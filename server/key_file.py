"""Reads the keys that a server takes: the one of its settings, and those of a file that only its owner may read."""

import os
import shlex
import stat
from pathlib import Path

from models.errors import reason
from server.api_keys import ApiKey, KeyRing, digest_of, parse_keys
from server.config import ConfigError, ServerConfig

SHARED = stat.S_IRWXG | stat.S_IRWXO


def read_keys(config: ServerConfig) -> KeyRing:
    """Returns all keys of the settings; raises ConfigError for a file that cannot be used."""
    single = () if config.api_key is None else (ApiKey("", digest_of(config.api_key)),)
    if config.api_keys_file is None:
        return KeyRing(single)
    listed = _read_file(Path(config.api_keys_file).expanduser())
    return KeyRing((*single, *listed.keys))


def _read_file(path: Path) -> KeyRing:
    try:
        with path.open(encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_mode & SHARED:
                command = f"chmod 600 {shlex.quote(str(path))}"
                raise ConfigError(f"--api-keys {path} is open to other users of this machine; run: {command}")
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-keys {path} cannot be read: {reason(error)}") from error
    try:
        return parse_keys(text)
    except ConfigError as error:
        raise ConfigError(f"--api-keys {path} {error}") from error
