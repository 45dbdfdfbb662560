"""A server whose model several machines hold, here threads: what it does, and what it goes without."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import mlx.core as mx
import pytest

from cache.layers import state
from models.weights import MTP_FILE
from server.api.app import create_pool_app
from server.app.config import ServerConfig
from server.app.service import Service
from server.cli import serve
from server.pool.pool import ModelPool
from tests.support import divided, loopback, tiny_models
from tests.support.live_server import running
from tests.support.tiny_mtp import CONFIGS, model_of, module_of, tensors_of

CONFIG = ServerConfig(models=("tiny",), cache_memory_bytes=1 << 26)
SECONDS = 300.0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Of a model with an MTP module in its folder."""
    folder = tiny_models.write_model(model_of("qwen3_5"), CONFIGS["qwen3_5"], tmp_path_factory.mktemp("a") / "tiny")
    mx.save_safetensors(str(folder / MTP_FILE), tensors_of(module_of("qwen3_5"), "qwen3_5"))
    with loopback.loopback():
        service = divided.opened(replace(CONFIG, models=(str(folder),)))
        service.start()
        yield service
        service.engine.stop()
    state.count_by_size(False)


@pytest.fixture(scope="module")
def pool(service: Service) -> ModelPool:
    return serve._make_pool(service, CONFIG, serve.Surroundings((), None, ["http://127.0.0.1:1"]))


@pytest.fixture(scope="module")
def client(pool: ModelPool) -> Iterator[httpx.Client]:
    with running(create_pool_app(pool, CONFIG)) as address, httpx.Client(base_url=address, timeout=SECONDS) as client:
        yield client


def ask(client: httpx.Client, **fields: Any) -> Any:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 8, **fields}
    return client.post("/v1/chat/completions", json=body)


def test_it_answers_as_it_did(client: httpx.Client) -> None:
    first, second = (ask(client, temperature=0).json() for _ in range(2))
    assert first["choices"] == second["choices"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_an_mtp_module_is_left_out(service: Service) -> None:
    """It would draft on each machine by what that has measured."""
    assert service.loaded.mtp is None and "MTP" not in service.engine.stats().drafts_form


def test_conversations_do_not_move(client: httpx.Client) -> None:
    ask(client, session_id="s")
    for refused in (client.get("/v1/cache/export?session=s"), client.post("/v1/cache/import", content=b"")):
        assert refused.status_code == 400 and "conversations cannot move" in refused.json()["error"]["message"]


def test_it_stays_loaded(client: httpx.Client, pool: ModelPool) -> None:
    """To unload it would end the other machines."""
    refused = client.post("/v1/models/unload", json={"model": "tiny"})
    assert refused.status_code == 409 and "stays loaded until the server ends" in refused.json()["error"]["message"]
    pool.members[0].keep_alive_seconds = 0
    assert not pool._expired()
    assert pool.idle_seconds_left(pool.members[0]) == math.inf, "as `ps` and Ollama's clients are told"


def test_no_other_model_takes_its_place(client: httpx.Client) -> None:
    """That would be loaded on one machine, and then this one whole."""
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["tiny"]
    refused = ask(client, model="demo")
    assert refused.status_code == 404 and refused.json()["error"]["code"] == "model_not_found"
