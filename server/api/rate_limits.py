"""Limits each key's use per minute and at once. Pure: callers pass the time, in seconds of any steady clock.

An allowance is a bucket that holds a minute's worth and fills steadily. A request's tokens are known only at its end:
the request is admitted while the bucket is not empty, and tokens beyond must flow in before the next.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from server.app.keys import ApiKey

BUSY_RETRY_SECONDS = 1
"""Nobody knows when a running request ends."""


class OverLimit(Exception):
    """A request that its key may send only after some seconds."""

    def __init__(self, limit: str, seconds: float) -> None:
        super().__init__(f"this key may send only so many requests: {limit}")
        self.retry_after_seconds = max(1, math.ceil(seconds))


@dataclass
class Bucket:
    """One allowance of a key."""

    per_minute: int
    amount: float
    """Negative after use beyond the bucket."""
    filled_at: float

    def fill(self, per_minute: int, now: float) -> None:
        """Adds what came in since; the limit may have changed."""
        self.per_minute = per_minute
        self.amount = min(per_minute, self.amount + (now - self.filled_at) * per_minute / 60)
        self.filled_at = now

    def seconds_until(self, amount: float) -> float:
        """Returns the seconds until `amount` is available."""
        return max(0.0, amount - self.amount) * 60 / self.per_minute

    def headers(self, what: str) -> dict[str, str]:
        """Returns the headers that OpenAI's clients read."""
        return {
            f"x-ratelimit-limit-{what}": str(self.per_minute),
            f"x-ratelimit-remaining-{what}": str(max(0, math.floor(self.amount))),
            f"x-ratelimit-reset-{what}": duration_text(self.seconds_until(self.per_minute)),
        }


@dataclass
class KeyUsage:
    """One key's use."""

    num_running: int = 0
    requests: Bucket | None = None
    tokens: Bucket | None = None

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.requests is None else self.requests.headers("requests")
        return headers if self.tokens is None else headers | self.tokens.headers("tokens")


@dataclass
class Permit:
    """An admitted request; only the first `close` counts."""

    usage: KeyUsage
    is_closed: bool = False

    def close(self, num_tokens: int) -> None:
        """Ends the request; `num_tokens` includes its prompt."""
        if self.is_closed:
            return
        self.is_closed = True
        self.usage.num_running -= 1
        if self.usage.tokens is not None:
            self.usage.tokens.amount -= num_tokens


@dataclass
class RateLimits:
    """The use of all keys. Event loop only."""

    clock: Callable[[], float]
    usages: dict[bytes, KeyUsage] = field(default_factory=dict)
    """By the key's digest; only keys with a limit."""

    def admit(self, key: ApiKey, headers: dict[str, str]) -> Permit:
        """Admits a request, or raises OverLimit; adds the limits to `headers` either way."""
        usage = self._filled(key)
        try:
            _check(key, usage)
            if usage.requests is not None:
                usage.requests.amount -= 1
        finally:
            headers.update(usage.headers)
        usage.num_running += 1
        return Permit(usage)

    def _filled(self, key: ApiKey) -> KeyUsage:
        usage, now = self.usages.setdefault(key.digest, KeyUsage()), self.clock()
        usage.requests = _filled(usage.requests, key.requests_per_minute, now)
        usage.tokens = _filled(usage.tokens, key.tokens_per_minute, now)
        return usage


def duration_text(seconds: float) -> str:
    """Returns a time in OpenAI's form, rounded up: `0s`, `20ms`, `1s`, `1m30s`."""
    if seconds < 1:
        milliseconds = math.ceil(seconds * 1000)
        return f"{milliseconds}ms" if 0 < milliseconds < 1000 else f"{milliseconds // 1000}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def _filled(bucket: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    bucket = bucket or Bucket(per_minute, per_minute, now)
    bucket.fill(per_minute, now)
    return bucket


def _check(key: ApiKey, usage: KeyUsage) -> None:
    if key.concurrent_requests is not None and usage.num_running >= key.concurrent_requests:
        raise OverLimit(f"{key.concurrent_requests} at once", BUSY_RETRY_SECONDS)
    if usage.requests is not None and usage.requests.amount < 1:
        raise OverLimit(f"{key.requests_per_minute} a minute", usage.requests.seconds_until(1))
    if usage.tokens is not None and usage.tokens.amount < 1:
        raise OverLimit(f"as take {key.tokens_per_minute} tokens a minute", usage.tokens.seconds_until(1))
