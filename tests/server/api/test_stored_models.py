"""Names of our own over HTTP, on a real model: one set of weights, and the defaults of each name in every dialect."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from models.store.manifest import Manifest
from models.store.stored_model import ExampleMessage, ModelDefaults, StoredModel, WeightsPlace
from server.api.app import create_pool_app
from server.app.config import ServerConfig
from server.app.service import ServiceOpener, open_service
from server.pool.catalog import Catalog
from server.pool.memory import PoolMemory
from server.pool.names import ModelSource
from server.pool.pool import ModelPool
from tests.support import tiny_models
from tests.support.live_server import running

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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("stored")
    folder = tiny_models.write("llama", place / "base")
    config = ServerConfig(models=(str(folder),), cache_memory_bytes=1 << 28)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(place))
        service = open_service(config)
        service.engine.start()
        opener = ServiceOpener(config, PoolMemory(1 << 40, 1 << 28), 1 << 39)
        pool = ModelPool(Catalog([ModelSource("base", folder)]), [service.opened], opener)
        try:
            with running(create_pool_app(pool, config)) as address:
                yield Server(address, pool, Manifest(place / "mlx-serve"), folder)
        finally:
            pool.stop()


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


def test_conversations_under_a_name_are_found_again(server: Server) -> None:
    server.store("poet", ModelDefaults(SYSTEM, EXAMPLES, GREEDY, max_tokens=9))
    first = server.post("/v1/chat/completions", model="poet", messages=[USER])
    turns = [USER, first["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    second = server.post("/v1/chat/completions", model="poet", messages=turns)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 8


def test_lists_hold_the_names(server: Server) -> None:
    server.store("listed", ModelDefaults(SYSTEM, context_tokens=77))
    one = server.http.get("/v1/models/listed").json()
    assert (one["id"], one["parent"], one["loaded"]) == ("listed", "base", True)
    found = server.post("/api/show", model="listed")
    assert found["model_info"]["llama.context_length"] == 77
