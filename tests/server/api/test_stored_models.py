"""Names of our own over HTTP, on a real model: one set of weights, and the defaults of each name in every dialect."""

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from models.store import library
from models.store.manifest import Manifest
from models.store.stored_model import ExampleMessage, ModelDefaults, StoredModel, WeightsPlace
from server.api.app import create_pool_app
from server.app.config import ServerConfig
from server.app.memory_budget import Claim, runtime_folder, take
from server.app.service import ServiceOpener, open_service
from server.pool.catalog import Catalog
from server.pool.memory import PoolMemory
from server.pool.names import ModelSource
from server.pool.pool import ModelPool
from tests.models.test_names import hub_cache, write_download
from tests.support import tiny_models
from tests.support.fake_opener import FakeOpener
from tests.support.live_server import running

__all__ = ["hub_cache"]

NOW = datetime(2026, 11, 23, tzinfo=UTC)
SYSTEM, QUESTION = "You write of rivers, and of nothing else.", "Tell me of the sea."
USER = {"role": "user", "content": QUESTION}
EXAMPLES = (ExampleMessage("user", "Hills?"), ExampleMessage("assistant", "Rivers."))
GREEDY = {"temperature": 0, "repetition_penalty": 1.3}


class Server:
    def __init__(self, address: str, pool: ModelPool, manifest: Manifest, folder: Path) -> None:
        self.pool = pool
        self._manifest = manifest
        self._folder = folder
        self.http = httpx.Client(base_url=address, timeout=120)

    def store(self, name: str, defaults: ModelDefaults) -> None:
        place = WeightsPlace("folder", str(self._folder))
        with self._manifest.change() as stored:
            stored[f"{name}:latest"] = StoredModel(f"{name}:latest", place, NOW, NOW, defaults)

    def post(self, path: str, **body: Any) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


@contextmanager
def serving_names(place: Path) -> Iterator[tuple[str, ModelPool, Manifest, Path]]:
    """Serves a tiny model `base` under names of one's own; gives address, pool, manifest and the model's folder."""
    folder = tiny_models.write("llama", place / "base")
    config = ServerConfig(models=(str(folder),), cache_memory_bytes=1 << 28)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(place / "data"))
        service = open_service(config)
        service.engine.start()
        opener = ServiceOpener(config, PoolMemory(1 << 40, 1 << 28), 1 << 39)
        pool = ModelPool(Catalog([ModelSource("base", folder)]), [service.opened], opener)
        try:
            with running(create_pool_app(pool, config)) as address:
                yield address, pool, Manifest(place / "data" / "mlx-serve"), folder
        finally:
            pool.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving_names(tmp_path_factory.mktemp("stored")) as names:
        yield Server(*names)


def test_a_name_gives_what_its_defaults_say_from_the_same_weights_and_state(server: Server) -> None:
    server.store("poet", ModelDefaults(SYSTEM, EXAMPLES, GREEDY, max_tokens=9))
    shown = [{"role": "system", "content": SYSTEM}, *({"role": e.role, "content": e.content} for e in EXAMPLES), USER]
    said = server.post("/v1/chat/completions", model="base", messages=shown, max_tokens=9, **GREEDY)
    found = server.post("/v1/chat/completions", model="poet", messages=[USER])
    assert found["choices"] == said["choices"]
    assert found["model"] == "poet"
    assert found["usage"]["prompt_tokens"] == said["usage"]["prompt_tokens"]
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "the state of the model is shared"
    assert list(server.pool.engines) == ["base"]


def test_every_dialect_has_the_defaults(server: Server) -> None:
    server.store("poet", ModelDefaults(SYSTEM, (), GREEDY, max_tokens=9))
    expected = server.post("/v1/chat/completions", model="poet", messages=[USER])
    text, num_prompt = expected["choices"][0]["message"]["content"], expected["usage"]["prompt_tokens"]
    chat = server.post("/api/chat", model="poet", messages=[USER], stream=False)
    assert (chat["message"]["content"], chat["prompt_eval_count"], chat["model"]) == (text, num_prompt, "poet")
    generated = server.post("/api/generate", model="poet:latest", prompt=QUESTION, stream=False)
    assert (generated["response"], generated["prompt_eval_count"]) == (text, num_prompt)
    message = server.post("/v1/messages", model="poet", messages=[USER], max_tokens=9)
    assert message["content"][0]["text"] == text
    counted = server.post("/v1/messages/count_tokens", model="poet", messages=[USER])
    assert counted["input_tokens"] == num_prompt
    response = server.post("/v1/responses", model="poet", input=QUESTION, store=False)
    assert response["output"][0]["content"][0]["text"] == text
    rendered = server.post("/apply-template", model="poet", messages=[USER])
    assert SYSTEM in rendered["prompt"]


def test_what_a_request_says_goes_before(server: Server) -> None:
    server.store("poet", ModelDefaults(SYSTEM, (), GREEDY, stop=("e", "a", "o"), max_tokens=9))
    own = [{"role": "system", "content": "Be long."}, USER]
    asked = {"messages": own, "max_tokens": 12, "stop": ["zqx"], **GREEDY, "temperature": 0.0}
    base = server.post("/v1/chat/completions", model="base", **asked)
    assert server.post("/v1/chat/completions", model="poet", **asked)["choices"] == base["choices"]


def test_stop_strings_and_the_context_are_those_of_the_name(server: Server) -> None:
    server.store("short", ModelDefaults(context_tokens=24, sampling=GREEDY))
    answer = server.http.post("/v1/chat/completions", json={"model": "short", "messages": [USER] * 9})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    asked = {"messages": [USER], "max_tokens": 12, "ignore_eos": True}
    text = server.post("/v1/chat/completions", model="base", **asked, **GREEDY)["choices"][0]["message"]["content"]
    server.store("stopping", ModelDefaults(sampling=GREEDY, stop=(text[-1],)))
    stopped = server.post("/v1/chat/completions", model="stopping", **asked)["choices"][0]
    assert stopped["message"]["content"] == text[: text.index(text[-1])]
    assert stopped["finish_reason"] == "stop"


def test_a_changed_name_counts_from_the_next_request_on(server: Server) -> None:
    counts = []
    for system in ("", SYSTEM, SYSTEM * 2):
        server.store("changing", ModelDefaults(system))
        usage = server.post("/v1/chat/completions", model="changing", messages=[USER], max_tokens=1)["usage"]
        counts.append(usage["prompt_tokens"])
    assert counts == sorted(set(counts))


def test_lists_hold_the_names(server: Server) -> None:
    server.store("listed", ModelDefaults(SYSTEM, context_tokens=77))
    one = server.http.get("/v1/models/listed").json()
    assert (one["id"], one["parent"], one["loaded"]) == ("listed", "base", True)
    found = server.post("/api/show", model="listed")
    assert found["model_info"]["llama.context_length"] == 77


def test_a_name_is_removed_and_nothing_but_names_and_downloads(server: Server) -> None:
    server.store("gone", ModelDefaults(SYSTEM))
    removed = server.http.delete("/v1/models/gone")
    assert removed.json() == {"id": "gone", "object": "model", "deleted": True}
    assert server.http.get("/v1/models/gone").status_code == 404
    server.store("base", ModelDefaults(SYSTEM))  # which the served folder of that name hides
    for name, status in (("base", 400), ("nope", 404)):
        refused = server.http.delete(f"/v1/models/{name}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (
            status,
            "model_id" if status == 400 else "model",
        )
    assert library.remove("base"), "it is still there"
    assert server.post("/v1/chat/completions", model="base", messages=[USER], max_tokens=1)


def test_a_download_in_use_is_not_deleted(hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    write_download(hub_cache, "org/name")
    draft = write_download(hub_cache, "mlx-community/Qwen3-0.6B-4bit")
    opener, config = FakeOpener(), ServerConfig(speculate="draft=qwen3")
    opener.may_finish.clear()
    pool = ModelPool(Catalog([ModelSource("base", hub_cache)]), opener=opener)
    with running(create_pool_app(pool, config)) as url, ThreadPoolExecutor() as threads:
        ask = partial(httpx.request, timeout=120)
        loading = threads.submit(ask, "POST", f"{url}/v1/models/load", json={"model": "org/name"})
        assert opener.has_begun.wait(120)
        during = ask("DELETE", f"{url}/v1/models/org/name")
        opener.may_finish.set()
        assert loading.result().status_code == 200
        names = "org/name", "mlx-community/Qwen3-0.6B-4bit"
        refused = [during, *(ask("DELETE", f"{url}/v1/models/{name}") for name in names)]
        assert [one.json()["error"]["code"] for one in refused] == ["model_in_use"] * 3
        ask("POST", f"{url}/v1/models/unload", json={"model": "org/name"})
        shutil.rmtree(draft)  # by another program
        other, _ = take(runtime_folder(os.environ), Claim(os.getppid(), "demo, org/name", 0, "http://127.0.0.1:1"))
        in_use = ask("DELETE", f"{url}/v1/models/org/name")
        assert in_use.status_code == 409 and "in use by the server at http://127.0.0.1:1" in in_use.text
        other.close()
        assert ask("DELETE", f"{url}/v1/models/org/name").json()["deleted"]


def test_the_library_says_what_can_be_pulled_and_what_fits(server: Server) -> None:
    found = server.http.get("/v1/library").json()
    sizes = {one["id"]: (one["repository"], one["size_bytes"]) for one in found["data"]}
    assert sizes["qwen3:0.6b"][0] == "mlx-community/Qwen3-0.6B-4bit"
    assert sizes["qwen3:0.6b"][1] < sizes["qwen3:8b"][1]
    assert len({repository for repository, _ in sizes.values()}) == len(sizes), "a repository is listed once"
    assert 0 < found["comfortable_bytes"] < found["largest_bytes"]
