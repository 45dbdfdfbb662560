"""Limits each key's use per minute and at once. Pure: callers pass the time, in seconds of any steady clock.

An allowance is a bucket that holds a minute's worth and fills steadily. A request's tokens are known only at its end:
the request is admitted while the bucket is not empty, and tokens beyond must flow in before the next.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from server.app.keys import ApiKey

BUSY_RETRY_SECONDS = 1
"""A running request's end is unknown."""


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
        """Adds what flowed in since the last call."""
        self.per_minute = per_minute
        self.amount = min(per_minute, self.amount + (now - self.filled_at) * per_minute / 60)
        self.filled_at = now

    def seconds_until(self, amount: float) -> float:
        """The seconds until `amount` is available."""
        return max(0.0, amount - self.amount) * 60 / self.per_minute

    def headers(self, what: str) -> dict[str, str]:
        """The headers that OpenAI's clients read."""
        return {
            f"x-ratelimit-limit-{what}": str(self.per_minute),
            f"x-ratelimit-remaining-{what}": str(max(0, math.floor(self.amount))),
            f"x-ratelimit-reset-{what}": duration_text(self.seconds_until(self.per_minute)),
        }


@dataclass
class KeyUsage:
    """One key's use."""

    num_running: int = 0
    buckets: dict[str, Bucket] = field(default_factory=dict)
    """Buckets of `requests` and `tokens`, if the key has such limits."""

    def fill(self, key: ApiKey, now: float) -> None:
        """Fills the buckets by the key's current limits."""
        for what, per_minute in (("requests", key.requests_per_minute), ("tokens", key.tokens_per_minute)):
            if per_minute is None:
                self.buckets.pop(what, None)
            else:
                self.buckets.setdefault(what, Bucket(per_minute, per_minute, now)).fill(per_minute, now)

    def use(self, what: str, amount: int) -> None:
        """Takes an amount; the bucket may hold less."""
        if what in self.buckets:
            self.buckets[what].amount -= amount

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
            for what, bucket in usage.buckets.items():
                headers.update(bucket.headers(what))
        usage.num_running += 1
        return usage


def duration_text(seconds: float) -> str:
    """A time in OpenAI's form, rounded up: `0s`, `20ms`, `1s`, `1m30s`."""
    if seconds < 1:
        milliseconds = math.ceil(seconds * 1000)
        return f"{milliseconds}ms" if 0 < milliseconds < 1000 else f"{milliseconds // 1000}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def _check(key: ApiKey, usage: KeyUsage) -> None:
    if key.concurrent_requests is not None and usage.num_running >= key.concurrent_requests:
        raise OverLimit(f"{key.concurrent_requests} at once", BUSY_RETRY_SECONDS)
    for what, bucket in usage.buckets.items():
        if bucket.amount < 1:
            limit = f"as take {bucket.per_minute} tokens" if what == "tokens" else str(bucket.per_minute)
            raise OverLimit(f"{limit} a minute", bucket.seconds_until(1))
