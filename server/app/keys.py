"""Keys that clients may send, their file, and each key's use per minute and at once. Pure.

Only digests are kept; logs and answers have a key's name. Only the owner may read the file. A limit per minute is a
bucket that holds a minute's worth and fills steadily; callers pass the time. A request's tokens are known only at its
end: it is admitted while the bucket is not empty, and tokens beyond must flow in before the next.
"""

import hashlib
import hmac
import math
import os
import shlex
import stat
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.errors import told_as
from server.app.config import ConfigError, ServerConfig

MAX_NAME_CHARACTERS = 64
LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent_requests")


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

    @property
    def per_minute(self) -> dict[str, int]:
        """The key's limits of requests and tokens, where it has any."""
        limits = {"requests": self.requests_per_minute, "tokens": self.tokens_per_minute}
        return {what: limit for what, limit in limits.items() if limit is not None}


class KeyRing:
    """Accepted keys; none if the server requires no key."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self.keys = tuple(keys)
        self._names = {key.digest.hex()[:32]: key.name for key in self.keys}

    def find(self, given: str) -> ApiKey | None:
        """The key that was sent, in a time that reveals nothing of it."""
        digest, match = digest_of(given), None
        for key in self.keys:
            if hmac.compare_digest(key.digest, digest):
                match = key
        return match

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
    with told_as(ConfigError, "is not TOML", tomllib.TOMLDecodeError, RecursionError):
        document = tomllib.loads(text)
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


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != "" and value.isprintable() and value == value.strip()


_TEXT = "a printable text without spaces around it"
_FORMS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "name": (
        lambda name: _is_text(name) and len(name) <= MAX_NAME_CHARACTERS,
        f"{_TEXT}, at most {MAX_NAME_CHARACTERS} of them",
    ),
    "key": (_is_text, _TEXT),
    **dict.fromkeys(
        LIMITS, (lambda count: count is None or (type(count) is int and count > 0), "a whole number of at least 1")
    ),
    "operator": (lambda value: value is None or isinstance(value, bool), "true or false"),
}
"""What a key's fields must be; None where a field is missing."""


def _read_key(entry: Mapping[str, Any], place: str) -> ApiKey:
    unknown = [name for name in entry if name not in _FORMS]
    if unknown:
        raise ConfigError(f"{place}: {unknown[0]!r} is not one of {', '.join(_FORMS)}")
    for name, (is_right, wanted) in _FORMS.items():
        if not is_right(entry.get(name)):
            raise ConfigError(f"{place}: {name} must be {wanted}")
    limits = {limit: entry.get(limit) for limit in LIMITS}
    return ApiKey(entry["name"], digest_of(entry["key"]), is_operator=entry.get("operator", False), **limits)


SHARED = stat.S_IRWXG | stat.S_IRWXO


def read_keys(config: ServerConfig) -> KeyRing:
    """The keys of all settings. Raises ConfigError."""
    single = () if config.api_key is None else (ApiKey("", digest_of(config.api_key)),)
    if config.api_keys_file is None:
        return KeyRing(single)
    path = Path(config.api_keys_file).expanduser()
    name = f"--api-keys {path}"
    text, fault = read_private(path, name)
    if fault:
        raise ConfigError(f"{name} {fault}")
    with told_as(ConfigError, name, ConfigError):
        return KeyRing((*single, *parse_keys(text).keys))


def read_private(path: Path, name: str) -> tuple[str, str]:
    """A file's text, and a warning where others may open it. Raises ConfigError."""
    with told_as(ConfigError, f"{name} cannot be read"), path.open(encoding="utf-8") as file:
        is_shared = os.fstat(file.fileno()).st_mode & SHARED
        text = file.read()
    fault = f"is open to other users of this machine; run: chmod 600 {shlex.quote(str(path))}"
    return text, fault if is_shared else ""


# ------------------------------------------------------------------------------------------------------- limits

BUSY_RETRY_SECONDS = 1
"""A running request's end is unknown."""


class OverLimit(Exception):
    """A request that its key may send only after some seconds."""

    def __init__(self, limit: str, seconds: float) -> None:
        super().__init__(f"this key's limit is reached: {limit}")
        self.retry_after_seconds = max(1, math.ceil(seconds))


@dataclass
class KeyUsage:
    """One key's use."""

    num_running: int = 0
    left: dict[str, float] = field(default_factory=dict)
    """Requests and tokens that may be used now, if the key has such limits; negative after use beyond them."""
    filled_at: float = 0.0

    def fill(self, key: ApiKey, now: float) -> None:
        """Adds what flowed in since the last call, by the key's current limits."""
        minutes, self.filled_at = (now - self.filled_at) / 60, now
        self.left = {
            what: min(limit, self.left.get(what, limit) + minutes * limit) for what, limit in key.per_minute.items()
        }

    def use(self, what: str, amount: int) -> None:
        """Takes an amount; there may be less."""
        if what in self.left:
            self.left[what] -= amount

    def end(self, num_tokens: int) -> None:
        """Ends one admitted request; `num_tokens` includes its prompt."""
        self.num_running -= 1
        self.use("tokens", num_tokens)


@dataclass
class RateLimits:
    """The use of all keys. Event loop only."""

    clock: Callable[[], float]
    usages: dict[bytes, KeyUsage] = field(default_factory=dict)
    """By the key's digest; only keys with a limit."""

    def admit(self, key: ApiKey, headers: dict[str, str]) -> KeyUsage:
        """Admits a request, or raises OverLimit; adds the limits to `headers` either way."""
        usage = self.usages.setdefault(key.digest, KeyUsage())
        usage.fill(key, self.clock())
        try:
            _check(key, usage)
            usage.use("requests", 1)
        finally:
            for what, limit in key.per_minute.items():
                # As OpenAI's clients read them.
                headers[f"x-ratelimit-limit-{what}"] = str(limit)
                headers[f"x-ratelimit-remaining-{what}"] = str(max(0, math.floor(usage.left[what])))
                headers[f"x-ratelimit-reset-{what}"] = duration_text((limit - usage.left[what]) * 60 / limit)
        usage.num_running += 1
        return usage


def _check(key: ApiKey, usage: KeyUsage) -> None:
    if key.concurrent_requests is not None and usage.num_running >= key.concurrent_requests:
        raise OverLimit(f"{key.concurrent_requests} at once", BUSY_RETRY_SECONDS)
    for what, limit in key.per_minute.items():
        if usage.left[what] < 1:
            value = f"as take {limit} tokens" if what == "tokens" else str(limit)
            raise OverLimit(f"{value} a minute", (1 - usage.left[what]) * 60 / limit)


def duration_text(seconds: float) -> str:
    """A time in OpenAI's form, rounded up: `0s`, `20ms`, `1s`, `1m30s`."""
    if seconds < 1:
        milliseconds = math.ceil(seconds * 1000)
        return f"{milliseconds}ms" if 0 < milliseconds < 1000 else f"{milliseconds // 1000}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
