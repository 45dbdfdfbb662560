"""What a key may use in a minute and at once, and what its client is told of it."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from server.app.config import ServerConfig
from server.app.keys import ApiKey, KeyRing, OverLimit, RateLimits, digest_of, duration_text
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, fake_model

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
KEY = {"Authorization": "Bearer geheim"}


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Limited:
    """A key with limits, and a clock in hand."""

    key: ApiKey
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.limits = RateLimits(self.clock)
        self.headers: dict[str, str] = {}

    def take(self, num_tokens: int = 0) -> None:
        self.limits.admit(self.key, self.headers).end(num_tokens)

    def refused_for(self) -> int:
        with pytest.raises(OverLimit) as caught:
            self.take()
        return caught.value.retry_after_seconds


def key_with(**limits: Any) -> ApiKey:
    return ApiKey("alice", digest_of("geheim"), **limits)


def test_requests_fill_up_steadily() -> None:
    limited = Limited(key_with(requests_per_minute=6))
    for left in range(5, -1, -1):
        limited.take()
        assert limited.headers["x-ratelimit-remaining-requests"] == str(left)
    assert limited.headers["x-ratelimit-reset-requests"] == "1m0s"
    assert limited.refused_for() == 10
    limited.clock.now += 9.5
    assert limited.refused_for() == 1
    limited.clock.now += 0.5
    limited.take()
    assert limited.refused_for() == 10
    limited.clock.now += 1000
    for _ in range(6):
        limited.take()
    assert limited.refused_for() == 10


def test_tokens_beyond_the_limit_are_paid_by_waiting() -> None:
    limited = Limited(key_with(tokens_per_minute=600))
    limited.take(1200)
    assert limited.refused_for() == 61
    assert limited.headers["x-ratelimit-remaining-tokens"] == "0"
    assert limited.headers["x-ratelimit-reset-tokens"] == "2m0s"
    limited.clock.now += 61
    limited.take(1)
    assert limited.headers == {
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "10",
        "x-ratelimit-reset-tokens": "59s",
    }


def test_a_request_counts_until_it_ends() -> None:
    limits = RateLimits(Clock())
    key = key_with(concurrent_requests=1, tokens_per_minute=100)
    usage = limits.admit(key, {})
    with pytest.raises(OverLimit, match="1 at once"):
        limits.admit(key, {})
    usage.end(30)
    headers: dict[str, str] = {}
    limits.admit(key, headers)
    assert headers["x-ratelimit-remaining-tokens"] == "70"
    with pytest.raises(OverLimit):
        limits.admit(key, {})


def test_a_limit_that_changes_counts_from_then_on() -> None:
    limited = Limited(key_with(requests_per_minute=2))
    limited.take()
    limited.key = key_with(requests_per_minute=1)
    limited.take()
    assert limited.refused_for() == 60
    limited.key = key_with()
    limited.take()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.0201, "21ms"), (0.9999, "1s"), (1, "1s"), (59.1, "1m0s"), (90, "1m30s"), (3600, "60m0s")],
)
def test_a_time_is_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def app_with(engine: FakeEngine, **limits: int) -> Any:
    """An application whose limits do not fill up: its clock stands still."""
    app = create_app(engine, fake_model(), ServerConfig(api_key="geheim"))
    app.state.api.rate_limits = RateLimits(Clock())
    app.state.api.keys = KeyRing([key_with(**limits)])
    return app


def test_a_key_over_its_limit_is_refused_answers_alone() -> None:
    client = TestClient(app_with(FakeEngine(), requests_per_minute=1))
    assert client.post(CHAT, json=HI, headers=KEY).status_code == 200
    refused = client.post(CHAT, json=HI, headers=KEY)
    assert refused.status_code == 429 and refused.json()["error"]["type"] == "rate_limit_error", refused.text
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.headers["x-ratelimit-limit-requests"] == "1"
    assert client.get("/v1/models", headers=KEY).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_and_answer_are_counted_and_a_stream_ends(stream: bool) -> None:
    engine = FakeEngine()
    client = TestClient(app_with(engine, tokens_per_minute=1000, concurrent_requests=1))
    for _ in range(3):
        answer = client.post(CHAT, json={**HI, "stream": stream}, headers=KEY)
        assert answer.status_code == 200
    num_tokens = sum(len(request.tokens) + 3 for request in engine.requests[:2])
    assert 1000 - int(answer.headers["x-ratelimit-remaining-tokens"]) == num_tokens


def test_what_fails_or_is_left_gives_its_place_back() -> None:
    async def run() -> None:
        engine = FakeEngine(max_texts=0)
        transport = httpx.ASGITransport(app_with(engine, concurrent_requests=1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=KEY) as client:
            assert (await client.post(CHAT, json={"messages": 3})).status_code == 400
            running = asyncio.create_task(client.post(CHAT, json=HI))
            async with asyncio.timeout(120):
                while not engine.requests:  # noqa: ASYNC110 - the fake tells nobody
                    await asyncio.sleep(0.001)
            assert (await client.post(CHAT, json=HI)).status_code == 429
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            engine.max_texts = None
            assert (await client.post(CHAT, json=HI)).status_code == 200

    asyncio.run(run())
