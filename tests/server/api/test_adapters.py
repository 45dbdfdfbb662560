"""Adapters over HTTP, on real models: names, answers, and states that never meet."""

import asyncio
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from server.api.app import create_pool_app
from server.app.config import ConfigError, ServerConfig
from server.app.service import open_service
from server.cli.config import load_config
from server.engine.messages import on_thread
from server.pool.catalog import Catalog
from server.pool.members import Around
from server.pool.memory import PoolMemory
from server.pool.names import ModelSource
from server.pool.pool import ModelPool
from tests.support import adapters as tiny_adapters
from tests.support import tiny_models
from tests.support.live_server import running

MODELS = ("llama", "lfm2", "gpt_oss")
QUESTION = {"role": "user", "content": "Tell me of rivers and of the sea, and of the rain between them."}
LONG = {"role": "user", "content": "Tell me of rivers and of the sea. " * 40}
"""Reading less than that from a disk takes longer than evaluating it."""
WAIT_SECONDS = 120.0


class Server:
    """A server of a model and its adapters."""

    def __init__(self, address: str, pool: ModelPool) -> None:
        self.address = address
        self.pool = pool
        self.http = httpx.Client(base_url=address, timeout=WAIT_SECONDS)

    def ask(self, model: str, *messages: Any, **fields: Any) -> tuple[str, int]:
        """Returns the answer, and how many tokens of the prompt were restored."""
        body = {"model": model, "messages": list(messages) or [QUESTION], "max_tokens": 12, "temperature": 0}
        answer = self.http.post("/v1/chat/completions", json={**body, "ignore_eos": True, **fields})
        assert answer.status_code == 200, answer.text
        told = answer.json()
        assert told["model"] == model
        return told["choices"][0]["message"]["content"], told["usage"]["prompt_tokens_details"]["cached_tokens"]


@contextmanager
def serving(folder: Path, adapters: dict[str, Path], **settings: Any) -> Iterator[Server]:
    named = tuple(f"{name}={path}" for name, path in adapters.items())
    config = ServerConfig(models=(str(folder),), adapters=named, cache_memory_bytes=1 << 28, **settings)
    service = open_service(config)
    service.engine.start()
    first = service.opened.source
    # What the configured name means may change later: the adapters stay with the model of the start.
    opener = replace(service.opener, memory=PoolMemory(1 << 40, 1 << 28), config=replace(config, models=("other",)))
    sources = [first, *(replace(first, adapter=name) for name in service.opened.variants)]
    pool = ModelPool(Catalog(sources, has_others=False), [service.opened], opener)
    try:
        with running(create_pool_app(pool, config)) as address:
            yield Server(address, pool)
    finally:
        pool.stop()


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write(name, tmp_path_factory.mktemp(name) / "base")


@pytest.fixture(scope="module")
def adapters(name: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp(f"{name}-adapters")
    return {
        word: tiny_adapters.write_mlx(name, at / word, seed=seed, size=0.3)
        for seed, word in enumerate(("poet", "cook"))
    }


@pytest.fixture(scope="module")
def server(folder: Path, adapters: dict[str, Path]) -> Iterator[Server]:
    with serving(folder, adapters) as server:
        yield server


def test_each_has_a_name_and_a_parent(server: Server) -> None:
    listed = server.http.get("/v1/models").json()["data"]
    assert [(one["id"], one["parent"], one["root"], one["loaded"]) for one in listed] == [
        ("base", None, "base", True),
        ("poet", "base", "base", True),
        ("cook", "base", "base", True),
    ]
    assert server.http.get("/v1/models/cook").json()["parent"] == "base"
    tags = ollama.Client(server.address).list().models
    assert [one.model for one in tags] == ["base:latest", "poet:latest", "cook:latest"]
    missing = server.http.post("/v1/chat/completions", json={"model": "poem", "messages": [QUESTION]})
    assert missing.status_code == 404 and "did you mean poet" in missing.text


def test_answers_are_their_own_and_states_never_meet(server: Server, folder: Path) -> None:
    cold = {model: server.ask(model) for model in ("base", "poet", "cook")}
    assert [restored for _, restored in cold.values()] == [0, 0, 0]
    assert len({text for text, _ in cold.values()}) == 3
    for model, (text, _) in cold.items():
        again, restored = server.ask(model)
        assert again == text and restored > 20
    with serving(folder, {}) as plain:
        assert plain.ask("base")[0] == cold["base"][0]


def test_together_they_answer_as_alone(server: Server) -> None:
    models = ["base", "poet", "cook", "poet", "base"]
    asked = [{"role": "user", "content": f"Number {number} of the questions."} for number in range(len(models))]
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        found[number] = server.ask(models[number], asked[number], max_tokens=20, cache_prompt=False)[0]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    for number, (model, question) in enumerate(zip(models, asked, strict=True)):
        assert server.ask(model, question, max_tokens=20, cache_prompt=False)[0] == found[number]


def test_other_dialects_and_vectors_know_them(server: Server) -> None:
    client = ollama.Client(server.address)
    said = {
        model: client.chat(model, [QUESTION], options={"temperature": 0, "num_predict": 12}).message.content
        for model in ("poet", "poet:latest", "cook")
    }
    assert said["poet"] == said["poet:latest"] != said["cook"]
    vectors = {
        model: server.http.post("/v1/embeddings", json={"model": model, "input": "rivers"}).json()["data"][0][
            "embedding"
        ]
        for model in ("base", "poet", "cook")
    }
    assert vectors["base"] != vectors["poet"] != vectors["cook"]


def test_no_name_is_made_that_an_adapter_has(server: Server) -> None:
    base = next(iter(server.pool.engines))
    body = {"model": "poet", "from": base}
    refused = server.http.post("/api/create", json=body)
    assert refused.status_code == 400 and "poet is an adapter" in refused.json()["error"]
    copied = server.http.post("/api/copy", json={"source": base, "destination": "poet"})
    assert copied.status_code == 400 and "poet is an adapter" in copied.json()["error"]


def test_cache_and_sessions_are_told_by_adapter(server: Server) -> None:
    server.http.post("/v1/cache/clear?model=poet", json={})
    for model in ("base", "poet"):
        server.ask(model, session_id="river")
    held = server.http.get("/v1/cache?model=poet").json()
    assert held["model"] == "poet" and held["num_tokens"] > 20
    by_adapter = {one["adapter"]: one["num_nodes"] for one in held["namespaces"] if one["namespace"] == ""}
    assert by_adapter["poet"] > 0 and by_adapter[None] > 0
    assert server.http.post("/v1/sessions/river/pin?model=poet").json()["pinned_tokens"] > 20
    assert "river" in server.http.get("/v1/cache?model=poet").json()["pinned_sessions"]
    assert server.http.delete("/v1/sessions/river").json()["deleted"]
    assert server.http.get("/v1/cache?model=poet").json()["pinned_sessions"] == []
    base_before = server.http.get("/v1/cache?model=base").json()["num_tokens"]
    assert server.http.post("/v1/cache/clear?model=poet", json={}).json()["freed_tokens"] > 20
    assert server.http.get("/v1/cache?model=poet").json()["num_tokens"] == 0
    assert server.http.get("/v1/cache?model=base").json()["num_tokens"] == base_before


def test_an_adapter_is_loaded_again_with_its_model(server: Server) -> None:
    before = server.ask("poet")[0]
    assert server.http.post("/v1/models/unload", json={"model": "poet"}).json() == {
        "id": "base",
        "object": "model.state",
        "loaded": False,
        "changed": True,
    }
    assert [one["loaded"] for one in server.http.get("/v1/models").json()["data"]] == [False] * 3
    text, restored = server.ask("poet")
    assert text == before and restored > 20


def test_another_model_has_no_adapters(server: Server) -> None:
    opener, source = server.pool._opener, ModelSource("other", server.pool.source_of("base").path)
    assert opener is not None
    opening = partial(opener.open, source, Around((), 1 << 28), lambda step: None)
    other = asyncio.run(on_thread("loader", opening))
    other.unload()
    assert other.variants == {}


# Whose state is found is decided by names and digests, whatever the model's layers.
@pytest.mark.parametrize("name", ["lfm2"], indirect=True, scope="module")
def test_a_disk_gives_an_adapter_its_own_states_and_none_of_changed_files(
    name: str, folder: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    own = {word: Path(shutil.copytree(path, tmp_path / word)) for word, path in adapters.items()}
    disk: dict[str, Any] = {"cache_disk_bytes": 1 << 30, "cache_dir": str(tmp_path / "disk")}
    with serving(folder, own, **disk) as first:
        text, _ = first.ask("poet", LONG)
    with serving(folder, dict(reversed(own.items())), **disk) as second:
        assert second.ask("base", LONG)[1] == second.ask("cook", LONG)[1] == 0
        again, restored = second.ask("poet", LONG)
        assert again == text and restored > 300
    tiny_adapters.write_mlx(name, own["poet"], seed=9, size=0.3)
    with serving(folder, own, **disk) as third:
        changed, restored = third.ask("poet", LONG)
        assert changed != text and restored == 0


@pytest.mark.parametrize(
    ("adapters", "words"),
    [
        (("poet",), "write it like poet=adapters/poet"),
        (("=a",), "write it like"),
        (("a b=c",), "is no name"),
        (("poet=a", "poet=b"), "stands for something else already"),
        (("demo=a",), "stands for something else already"),
    ],
)
def test_a_wrong_adapter_is_a_wrong_setting(adapters: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config({"adapters": [*adapters]}, {})
