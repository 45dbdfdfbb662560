"""Requests that name models which are loaded when they are asked for, over HTTP and without weights."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from server.api.app import create_pool_app
from server.api.planning import Planning
from server.app.config import ServerConfig
from server.pool.memory import PoolSettings
from server.pool.names import Alias
from server.pool.pool import ModelPool
from tests.support.fake_engine import Script
from tests.support.fake_opener import FakeOpener, catalog
from tests.support.live_server import running

HEARTBEAT_SECONDS = 0.02
WAIT_SECONDS = 120.0
MESSAGES = [{"role": "user", "content": "Hi"}]

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES}, "/v1/completions": {"prompt": "Hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 10}, "/v1/responses": {"input": "Hi", "store": False},
    "/api/chat": {"messages": MESSAGES}, "/api/generate": {"prompt": "Hi"},
}  # fmt: skip
COUNTS: dict[str, dict[str, Any]] = {
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"content": "Hi"},
}


class Server:
    """A server of three models, none of them loaded, and how to ask it."""

    def __init__(self, **settings: Any) -> None:
        self.opener = FakeOpener()
        self.pool = ModelPool(
            catalog("a", "b", "c"),
            opener=self.opener,
            settings=PoolSettings(aliases=(Alias("gpt-*", "b"), Alias("claude-sonnet*", "c")), **settings),
        )
        config = ServerConfig(heartbeat_seconds=HEARTBEAT_SECONDS)
        self._running = running(create_pool_app(self.pool, config))

    def __enter__(self) -> "Server":
        self.client = httpx.Client(base_url=self._running.__enter__(), timeout=WAIT_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self.opener.may_finish.set()
        self.client.close()
        self._running.__exit__(None, None, None)

    def post(self, path: str, model: str, **fields: Any) -> httpx.Response:
        body = {**BODIES, **COUNTS}.get(path, {})
        return self.client.post(path, json={"model": model, "stream": False, **body, **fields})

    def stream(self, path: str, model: str, finish_at: str = "") -> str:
        """Returns all of a stream; once `finish_at` has come in it, the loading may end."""
        said = ""
        with self.client.stream("POST", path, json={"model": model, "stream": True, **BODIES[path]}) as answer:
            assert answer.status_code == 200
            for chunk in answer.iter_text():
                said += chunk
                if finish_at in said:
                    self.opener.may_finish.set()
        return said

    def wait_until_idle(self) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while any(member.is_busy for member in self.pool.members):
            assert time.monotonic() < deadline, "somebody holds a model for ever"
            time.sleep(0.001)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as one:
        yield one


@pytest.mark.parametrize("path", [*BODIES, *COUNTS])
def test_every_dialect_has_the_model_loaded_that_it_names(server: Server, path: str) -> None:
    assert server.post(path, "a").status_code == 200
    assert server.post(path, "gpt-4o").status_code == 200
    assert server.opener.opened == ["a", "b"]
    if path in BODIES:
        assert [len(server.opener.engines[name].requests) for name in "ab"] == [1, 1]


def test_requests_whose_model_is_loaded_are_listed_with_that_reason_the_oldest_first(server: Server) -> None:
    def listed() -> list[dict[str, Any]]:
        requests: list[dict[str, Any]] = server.client.get("/v1/stats").json()["requests"]
        return requests

    server.opener.may_finish.clear()
    with ThreadPoolExecutor(6) as threads:
        asked = []
        for number in range(6):
            asked.append(threads.submit(server.post, "/v1/chat/completions", "a", session_id=f"s{number}"))
            deadline = time.monotonic() + WAIT_SECONDS
            while len(listed()) < len(asked):
                assert time.monotonic() < deadline, "a request is not listed"
        waiting = listed()
        server.opener.may_finish.set()
        assert [one["id"] for one in waiting] == [one.result().json()["id"] for one in asked]
    assert [one["session_id"] for one in waiting] == [f"s{number}" for number in range(6)]
    assert {(one["model"], one["phase"], one["waits_for"]["reason"]) for one in waiting} == {
        ("a", "waiting", "model")
    }
    later = server.client.get("/v1/stats").json()["requests"]
    assert not any(one["waits_for"] for one in later)


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_is_kept_open_while_its_model_is_loaded(server: Server, path: str) -> None:
    server.opener.may_finish.clear()
    if path.startswith("/api/"):  # lines of JSON have no heartbeats
        server.opener.may_finish.set()
    said = server.stream(path, "a", finish_at="loading a")
    assert "there" in said
    if not path.startswith("/api/"):
        assert "loading a: reading weights" in said and said.index("loading a") < said.index("there")
    server.wait_until_idle()


@pytest.mark.parametrize("path", COUNTS)
def test_what_only_counts_is_never_a_stream_however_long_its_model_is_loaded(server: Server, path: str) -> None:
    server.opener.may_finish.clear()
    later = threading.Timer(10 * HEARTBEAT_SECONDS, server.opener.may_finish.set)
    later.start()
    answer = server.post(path, "a", stream=True)
    later.join()
    assert answer.headers["content-type"].startswith("application/json"), answer.text
    assert isinstance(answer.json(), dict)


@pytest.mark.parametrize("path", [*BODIES, *COUNTS])
def test_a_model_that_cannot_be_loaded_is_a_clear_error_in_every_dialect(server: Server, path: str) -> None:
    server.opener.missing.add("a")
    answer = server.post(path, "a")
    assert answer.status_code == 503
    assert "a: model.safetensors is missing" in answer.text
    assert server.post(path, "b").status_code == 200


def test_a_stream_that_began_before_its_model_failed_ends_with_the_error(server: Server) -> None:
    server.opener.may_finish.clear()
    server.opener.broken.add("a")
    path = "/v1/chat/completions"
    said = server.stream(path, "a", finish_at="loading a")
    events = [json.loads(line.removeprefix("data: ")) for line in said.splitlines() if line.startswith("data: {")]
    assert events[-1]["error"]["code"] == "model_unusable" and "a is damaged" in events[-1]["error"]["message"]


def test_a_body_that_is_wrong_loads_nothing(server: Server) -> None:
    assert server.post("/v1/chat/completions", "a", temperature="warm").status_code == 400
    assert not server.opener.opened


def test_a_stream_whose_client_left_while_its_model_was_loaded_holds_nothing(server: Server) -> None:
    server.opener.may_finish.clear()
    body = {"model": "a", "stream": True, "messages": MESSAGES}
    with server.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        next(answer.iter_text())
    server.opener.may_finish.set()
    assert server.post("/v1/chat/completions", "a").status_code == 200
    server.wait_until_idle()
    assert len(server.opener.engines["a"].requests) == 1


def test_models_that_do_not_fit_together_take_turns_without_cutting_answers_off() -> None:
    with Server(max_models=1) as server:
        assert server.post("/v1/chat/completions", "a").status_code == 200
        engine, path = server.opener.engines["a"], "/v1/chat/completions"
        # The answer goes on once the other model waits for its place.
        engine.script, engine.max_texts = Script(texts=("one", " two") * 10), 1

        async def both() -> tuple[httpx.Response, httpx.Response]:
            async with httpx.AsyncClient(base_url=server.client.base_url, timeout=WAIT_SECONDS) as client:
                first = asyncio.create_task(client.post(path, json={"model": "a", "messages": MESSAGES}))
                async with asyncio.timeout(WAIT_SECONDS):
                    while len(engine.requests) < 2:  # noqa: ASYNC110 - the server is on another thread
                        await asyncio.sleep(0.001)
                second = asyncio.create_task(client.post(path, json={"model": "b", "messages": MESSAGES}))
                await asyncio.sleep(0.05)
                assert not second.done()
                engine.max_texts = None
                return await asyncio.gather(first, second)

        first, second = asyncio.run(both())
        assert first.json()["choices"][0]["message"]["content"] == "one two" * 10
        assert second.json()["model"] == "b"
        assert list(server.pool.engines) == ["b"]


@pytest.mark.parametrize("is_early", [False, True])
def test_prompts_that_take_long_to_plan_keep_the_model_that_was_loaded_for_them(
    is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Planning.run

    async def slow(self: Planning, *args: Any) -> Any:
        # Long enough for the other model's files to be looked at, after which this one takes no more requests.
        await asyncio.sleep(0.05 if is_early else 0)
        plan = await run(self, *args)
        await asyncio.sleep(0 if is_early else 0.05)
        return plan

    monkeypatch.setattr(Planning, "run", slow)
    with Server(max_models=1) as server:

        async def both() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=server.client.base_url, timeout=120) as client:
                bodies = [{"model": name, "messages": MESSAGES} for name in "ab"]
                return await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for body in bodies))

        assert [answer.status_code for answer in asyncio.run(both())] == [200, 200]
        assert sorted(server.opener.opened) == ["a", "b"]


def test_an_alias_for_claude_comes_before_the_default_model() -> None:
    with Server(default_id="a") as server:
        assert server.post("/v1/messages", "claude-sonnet-4").json()["model"] == "c"
        assert server.post("/v1/messages", "claude-opus-4").json()["model"] == "a"


def test_ollamas_clients_load_and_unload_by_requests_without_a_prompt(server: Server) -> None:
    assert server.post("/api/generate", "a", prompt="", keep_alive=0).json()["done_reason"] == "unload"
    assert not server.opener.opened, "a model was loaded to be unloaded"
    assert server.post("/api/generate", "a", prompt="").json()["done_reason"] == "load"
    assert server.opener.opened == ["a"]
    assert server.post("/api/chat", "a", messages=[], keep_alive="0s").json()["done_reason"] == "unload"
    deadline = time.monotonic() + WAIT_SECONDS
    while server.pool.engines:
        assert time.monotonic() < deadline, "it was not unloaded"
        time.sleep(0.001)
    assert server.post("/api/chat", "a", keep_alive="soon").status_code == 400


def test_all_models_are_listed_and_what_is_loaded_is_told(server: Server) -> None:
    assert server.post("/v1/models/load", "b").json() == {
        "id": "b",
        "object": "model.state",
        "loaded": True,
        "changed": True,
    }
    listed = server.client.get("/v1/models").json()["data"]
    assert [(model["id"], model["loaded"]) for model in listed] == [("a", False), ("b", True), ("c", False)]
    assert server.client.get("/v1/models/gpt-4").json()["id"] == "b"
    assert server.client.get("/v1/models/c").json()["context_length"] == 100
    assert [model["name"] for model in server.client.get("/api/tags").json()["models"]] == [
        "a:latest",
        "b:latest",
        "c:latest",
    ]
    anthropic = server.client.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert [model["id"] for model in anthropic["data"]] == ["a", "b", "c"]
    assert [model["name"] for model in server.client.get("/api/ps").json()["models"]] == ["b:latest"]
    assert server.client.get("/health").json()["models"] == ["b"]
    assert server.client.post("/api/show", json={"model": "c"}).json()["details"]["family"] == "fake"
    as_lm_studio = server.client.get("/api/v1/models").json()["models"]
    assert [(one["key"], len(one["loaded_instances"])) for one in as_lm_studio] == [("a", 0), ("b", 1), ("c", 0)]
    assert as_lm_studio[1]["loaded_instances"] == [{"id": "b", "config": {"context_length": 200}}]
    assert as_lm_studio[2]["max_context_length"] == 100 and as_lm_studio[2]["architecture"] == "fake"
    assert server.opener.opened == ["b"], "a description loaded a model"


def test_a_model_is_unloaded_by_hand_unless_it_answers(server: Server) -> None:
    assert not server.post("/v1/models/unload", "a").json()["changed"]
    assert server.post("/v1/chat/completions", "a").status_code == 200
    assert server.post("/v1/models/unload", "gpt-4").json() == {
        "id": "b",
        "object": "model.state",
        "loaded": False,
        "changed": False,
    }
    server.opener.engines["a"].max_texts = 1
    body = {"model": "a", "stream": True, "messages": MESSAGES}
    with server.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        chunks = answer.iter_text()
        next(chunks)
        refused = server.post("/v1/models/unload", "a")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_in_use")
    server.wait_until_idle()
    assert server.post("/v1/models/unload", "a").json()["changed"]
    assert server.post("/v1/models/unload", "nope").status_code == 404
    assert server.client.get("/v1/cache?model=a").json()["error"]["code"] == "model_not_loaded"


@pytest.mark.parametrize("verb", ["load", "unload"])
def test_only_who_runs_the_server_loads_and_unloads_by_hand(server: Server, verb: str) -> None:
    for headers in ({"authorization": "Bearer guest"}, {"x-forwarded-for": "10.0.0.1"}):
        answer = server.client.post(f"/v1/models/{verb}", json={"model": "a"}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "operator_only")
    page = {"origin": "https://elsewhere.example", "sec-fetch-site": "cross-site"}
    assert server.client.post(f"/v1/models/{verb}", json={"model": "a"}, headers=page).status_code == 403
    assert not server.opener.opened


@pytest.mark.parametrize(("disk_bytes", "status"), [(None, 200), (1 << 20, 409)])
def test_state_on_disk_is_cleared_only_while_its_model_is_loaded(disk_bytes: int | None, status: int) -> None:
    pool = ModelPool(catalog("a"), opener=FakeOpener())
    app = create_pool_app(pool, ServerConfig(cache_disk_bytes=disk_bytes))
    assert TestClient(app).post("/v1/cache/clear?model=a").status_code == status
