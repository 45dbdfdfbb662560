"""`--handover` in one process: what is sent, when, and what is said of the rest."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.app.config import ServerConfig
from server.app.service import Service, open_service
from server.cli import handover as handover_module
from server.cli.handover import Handover
from server.pool.pool import ModelPool
from tests.server.api.admin.test_cache import serving
from tests.server.api.admin.test_moving import KEYS, cached, converse
from tests.support import tiny_models
from tests.support.apps import create_app, member
from tests.support.live_server import running


@pytest.fixture(scope="module")
def top(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("handover")
    tiny_models.write("lfm2", top / "tiny")
    for name, text in (("keys.toml", KEYS), ("key", "o\n"), ("wrong", "guessed\n")):
        (top / name).write_text(text)
        (top / name).chmod(0o600)
    return top


@pytest.fixture(scope="module")
def heir(top: Path) -> Iterator[httpx.Client]:
    with serving(config_of(top, api_keys_file=str(top / "keys.toml"))) as client:
        yield client


@pytest.fixture(scope="module")
def service(top: Path) -> Iterator[Service]:
    service = open_service(config_of(top))
    service.engine.start()
    yield service
    service.engine.stop()


@pytest.fixture
def client(service: Service, top: Path) -> Iterator[httpx.Client]:
    with (
        running(create_app(service.engine, service.model, config_of(top))) as address,
        httpx.Client(base_url=address, timeout=120) as client,
    ):
        for key in ("", "a", "o"):
            client.post("/v1/cache/clear", headers={"Authorization": f"Bearer {key}"} if key else {})
        yield client


def config_of(top: Path, **fields: Any) -> ServerConfig:
    return ServerConfig(models=(str(top / "tiny"),), cache_memory_bytes=1 << 26, **fields)


def handover_of(
    service: Service, top: Path, url: httpx.URL | str, key: str | None = None, num_stored: int = 0
) -> Handover:
    pool = ModelPool.of(member(service.model, service.engine))
    config = config_of(top, handover=str(url), handover_key_file=None if key is None else str(top / key))
    return Handover(pool, config, lambda: num_stored)


def hand_over(handover: Handover, *seconds: float) -> None:
    async def run() -> None:
        for part in seconds:
            await handover.send(part)
        await handover.tell()

    asyncio.run(run())


def test_each_key_finds_its_own(
    client: httpx.Client, heir: httpx.Client, service: Service, top: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    messages = {key: converse(client, f"of {key}", number, key) for number, key in enumerate(("a", "o"))}
    hand_over(handover_of(service, top, heir.base_url, "key"), 60.0, 60.0)
    assert all(cached(heir, own, key)[0] > 0.9 for key, own in messages.items())
    assert cached(heir, messages["a"], "o")[0] < 0.5
    assert "handed over to http://127.0.0.1" in caplog.text and ": 2 (" in caplog.text
    assert "not handed over" not in caplog.text


def test_stored_responses_are_told_to_stay(
    heir: httpx.Client, service: Service, top: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hand_over(handover_of(service, top, heir.base_url, "key", 3))
    assert "stored responses and conversations not handed over: 3, which were only in memory" in caplog.text


def test_what_came_since_follows(client: httpx.Client, heir: httpx.Client, service: Service, top: Path) -> None:
    handover = handover_of(service, top, heir.base_url, "key")

    async def run() -> tuple[list[dict[str, str]], int]:
        await asyncio.to_thread(converse, client, "one", 2, "a")
        await handover.send(60.0)
        (export,) = handover._departures.values()
        before = export.num_bytes
        later = await asyncio.to_thread(converse, client, "two", 3, "a")
        await handover.send(60.0)
        return later, export.num_bytes - before

    later, num_bytes = asyncio.run(run())
    assert cached(heir, later, "a")[0] > 0.9
    assert num_bytes > 0


@pytest.mark.parametrize(("key", "said"), [("wrong", "asks for a key"), (None, "asks for a key")])
def test_a_refusal_is_said(
    client: httpx.Client,
    heir: httpx.Client,
    service: Service,
    top: Path,
    key: str | None,
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    converse(client, "mine", 4, "a")
    hand_over(handover_of(service, top, heir.base_url, key), 60.0, 60.0)
    assert caplog.text.count(said) == 2, "it is tried again"
    assert "not handed over, or not to their end: 1" in caplog.text


def test_nobody_there(client: httpx.Client, service: Service, top: Path, caplog: pytest.LogCaptureFixture) -> None:
    converse(client, "mine", 5)
    hand_over(handover_of(service, top, "http://127.0.0.1:9"), 60.0)
    assert "no server answers" in caplog.text and "to their end: 1" in caplog.text


def test_time_that_runs_out_leaves_the_oldest(
    client: httpx.Client,
    heir: httpx.Client,
    service: Service,
    top: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    older, newer = (converse(client, str(number), number, "a") for number in (6, 7))
    handover = handover_of(service, top, heir.base_url, "key")

    class Clock:
        @staticmethod
        def monotonic() -> float:
            has_begun_second = any(export.num_conversations > 1 for export in handover._departures.values())
            return 100.0 if has_begun_second else 0.0

    monkeypatch.setattr(handover_module, "time", Clock)
    hand_over(handover, 60.0)
    assert "to their end: 1" in caplog.text
    shares = cached(heir, newer, "a")[0], cached(heir, older, "a")[0]
    assert shares[0] > 0.5 > shares[1]
