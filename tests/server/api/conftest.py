"""What several tests of the HTTP side watch."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from starlette.testclient import TestClient

from server.api import answer
from server.app.config import ServerConfig
from tests.support import tiny_models
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, FakeRenderer, fake_model

if TYPE_CHECKING:
    from tests.server.api.test_live import Live


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def renderer() -> FakeRenderer:
    return FakeRenderer()


@pytest.fixture
def client(engine: FakeEngine, renderer: FakeRenderer) -> TestClient:
    return TestClient(create_app(engine, fake_model(renderer=renderer), ServerConfig()))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Live]":
    """A server of a tiny model with random weights."""
    from tests.server.api.test_live import serving

    with serving(tiny_models.write("qwen3", tmp_path_factory.mktemp("models") / "tiny")) as server:
        yield server


@pytest.fixture(scope="module")
def demo() -> "Iterator[Live]":
    """A server of the demo model, which answers."""
    from tests.server.api.test_live import serving

    with serving("demo") as server:
        yield server


@pytest.fixture
def num_ahead(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows by one with each turn that was evaluated ahead."""
    done: list[None] = []
    evaluate_ahead = answer._evaluate_ahead

    async def watch(*args: Any) -> None:
        await evaluate_ahead(*args)
        done.append(None)

    monkeypatch.setattr(answer, "_evaluate_ahead", watch)
    return done
