"""`/v1/stats` and `/v1/events`: what a real server tells of real requests, to whom, and how it ends."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from server.api.admin import state as endpoint
from server.api.app import start_draining
from server.api.record import Arrival, OpenRequest
from server.app.config import ServerConfig
from server.app.service import open_service
from server.engine import engine as engine_module
from server.engine.request import EngineStats, GenerationRequest, Started, Wait, WaitReason
from tests.server.api.test_live import until
from tests.support import tiny_models
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, fake_model
from tests.support.live_server import running

SYSTEM = {"role": "system", "content": "You are a careful assistant. " * 60}
USER = {"role": "user", "content": "What is the weather in Paris?"}
MORE = {"role": "user", "content": "And tomorrow?"}


class Listening:
    """Collects events in a thread."""

    def __init__(self, client: httpx.Client, path: str = "/v1/events", **headers: str) -> None:
        self.events: list[dict[str, Any]] = []
        self.begun = threading.Event()
        self._address, self._headers = f"{str(client.base_url).rstrip('/')}{path}", headers
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self.begun.wait(120)

    def _run(self) -> None:
        with httpx.stream("GET", self._address, headers=self._headers, timeout=120) as answer:
            for line in answer.iter_lines():
                self.begun.set()
                if line.startswith("data: "):
                    self.events.append(json.loads(line.removeprefix("data: ")))

    def of(self, prefix: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"].startswith(prefix)]

    def wait_for(self, name: str, count: int = 1) -> list[dict[str, Any]]:
        until(lambda: len(self.of(name)) >= count)
        return self.of(name)

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()


@contextmanager
def draining(app: Starlette) -> Iterator[str]:
    """Serves `app`, which is told to drain at the end, as the command does it."""
    loops: list[asyncio.AbstractEventLoop] = []

    async def noting(scope: Scope, receive: Receive, send: Send) -> None:
        loops[:] = [asyncio.get_running_loop()]
        await app(scope, receive, send)

    with running(noting) as address:
        httpx.get(f"{address}/health")
        yield address
        loops[0].call_soon_threadsafe(start_draining, app)


@contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[httpx.Client]:
    config = ServerConfig(models=(str(folder),), **settings)
    service = open_service(config)
    service.engine.start()
    try:
        with (
            draining(create_app(service.engine, service.model, config)) as address,
            httpx.Client(base_url=address, timeout=120) as client,
        ):
            yield client
    finally:
        service.engine.stop()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write("llama", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def server(tiny: Path) -> Iterator[httpx.Client]:
    with serving(tiny, cache_memory_bytes=1 << 26, slots=2) as client:
        yield client


def ask(client: httpx.Client, *messages: Any, key: str | None = None, **fields: Any) -> Any:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"messages": messages, "max_tokens": 4, **fields}
    answer = client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stats(client: httpx.Client, **headers: str) -> Any:
    answer = client.get("/v1/stats", headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_request_is_told_of_from_its_arrival_to_its_end(server: httpx.Client) -> None:
    listening = Listening(server)
    first = ask(server, SYSTEM, USER, session_id="s1", temperature=0.25, seed=5)
    listening.wait_for("request.ended")
    queued, started, *progress, token, ended = listening.of("request.")
    names = [event["type"] for event in (queued, started, token, ended)]
    assert names == ["request.queued", "request.started", "request.first_token", "request.ended"]
    assert {event["type"] for event in progress} == {"request.progress"}
    tokens = first["usage"]["prompt_tokens"]
    assert {event["id"] for event in listening.of("request.")} == {first["id"]}
    assert {event["session_id"] for event in listening.of("request.")} == {"s1"}
    assert queued["endpoint"] == "/v1/chat/completions" and queued["prompt_tokens"] == tokens
    assert (queued["max_tokens"], queued["temperature"], queued["seed"]) == (4, 0.25, 5)
    assert started["cached_tokens"] == 0 and started["tier"] is None and started["slot"] in (0, 1)
    assert [one["evaluated"] for one in progress] == sorted(one["evaluated"] for one in progress)
    assert progress[-1]["total"] == tokens
    assert ended["evaluated_tokens"] == tokens and ended["completion_tokens"] == 4 and ended["finish"] == "length"
    assert 0 < token["ms"] <= ended["total_ms"]
    assert [one["time"] for one in listening.events] == sorted(one["time"] for one in listening.events)

    again = ask(server, SYSTEM, MORE)
    *_, ended = listening.wait_for("request.ended", 2)
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert ended["id"] == again["id"] and ended["cached_tokens"] == cached > 0


def test_the_stats_are_those_of_what_was_asked(server: httpx.Client) -> None:
    before = stats(server)
    assert before["object"] == "stats" and before["scope"] == "all" and before["requests"] == []
    assert before["totals"]["requests"] == before["sessions"] == 0
    answers = [ask(server, SYSTEM, USER), ask(server, SYSTEM, USER, MORE), ask(server, SYSTEM, MORE, cache_salt="x")]
    until(lambda: stats(server)["totals"]["requests"] == 3)
    after = stats(server)
    usage = [one["usage"] for one in answers]
    totals = after["totals"]
    assert totals["succeeded"] == 3 and totals["failed"] == totals["cancelled"] == 0
    assert totals["prompt_tokens"] == sum(one["prompt_tokens"] for one in usage)
    assert totals["completion_tokens"] == sum(one["completion_tokens"] for one in usage)
    cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in usage)
    assert totals["cached_tokens"] == sum(totals["restored_tokens"].values()) == cached > 0
    assert totals["evaluated_tokens"] == totals["prompt_tokens"] - cached
    assert totals["saved_seconds"] > 0 and after["sessions"] == 2
    (model,) = after["models"]
    assert model["id"] == "tiny" and model["slots"]["total"] == 2 and model["cache"]["stored_bytes"] >= 0
    assert model["disk_budget_bytes"] is None and model["moved"]["page_outs"] >= 1


def test_a_key_hears_and_sees_of_its_own_requests_only(server: httpx.Client) -> None:
    mine = Listening(server, Authorization="Bearer mine")
    owner = Listening(server)
    ask(server, SYSTEM, USER, key="theirs")
    answer = ask(server, SYSTEM, USER, key="mine")
    owner.wait_for("request.ended", 2)
    mine.wait_for("request.ended")
    assert {event["id"] for event in mine.of("request.")} == {answer["id"]}
    assert {event["namespace"] for event in owner.of("cache.")} >= {event["namespace"] for event in mine.of("cache.")}
    assert len({event["namespace"] for event in mine.events}) == 1
    until(lambda: stats(server)["totals"]["requests"] == 2)
    own = stats(server, Authorization="Bearer mine")
    assert own["scope"] == "namespace" and own["totals"]["requests"] == own["sessions"] == 1
    assert stats(server, Authorization="Bearer nobody")["totals"]["requests"] == 0


def test_requests_of_before_are_listed_for_their_own_key(server: httpx.Client) -> None:
    ask(server, SYSTEM, USER, key="theirs", session_id="theirs")
    answer = ask(server, SYSTEM, USER, key="mine", session_id="s1", temperature=0.25)
    until(lambda: stats(server)["totals"]["requests"] == 2)
    mine = server.get("/v1/requests", headers={"Authorization": "Bearer mine"}).json()
    (one,) = mine["data"]
    assert (one["id"], one["session_id"], one["title"]) == (answer["id"], "s1", USER["content"])
    assert one["prompt_tokens"] == one["cached_tokens"] + one["evaluated_tokens"] == answer["usage"]["prompt_tokens"]
    assert one["temperature"] == 0.25 and one["finish"] == "length" and one["saved_seconds"] == 0
    assert one["received"] + one["first_ms"] / 1000 <= one["ended"] + 0.01 and one["queue_ms"] >= 0
    (level, *_) = mine["levels"]
    assert level[0] <= one["ended"] and level[1] > 0
    everybody = server.get("/v1/requests").json()["data"]
    assert [request["session_id"] for request in everybody] == ["s1", "theirs"]
    assert server.delete("/v1/sessions/s1", headers={"Authorization": "Bearer mine"}).status_code == 200
    assert [request["session_id"] for request in server.get("/v1/requests").json()["data"]] == ["theirs"]


def test_a_waiting_request_says_for_whose_beginning() -> None:
    def open_request(name: str, started: Started | None) -> OpenRequest:
        request = GenerationRequest(name, np.arange(9, dtype=np.int32), 1, session_id=f"of-{name}")
        return OpenRequest(request, "tiny", Arrival("/v1/completions", 0.0), started=started)

    waits = {"late": Wait(WaitReason.BEGINNING, "first", 4, 8), "first": Wait(WaitReason.SLOT)}
    running = [open_request("first", Started(0, 9, 0, 0)), open_request("late", None), open_request("new", None)]
    context: Any = SimpleNamespace(
        pool=SimpleNamespace(engines={"tiny": SimpleNamespace(stats=lambda: EngineStats(waits=waits))}),
        activity=SimpleNamespace(open_requests=lambda namespace: running, unplanned=()),
    )
    told = [one["waits_for"] for one in endpoint._open_bodies(context, None, 1.0)]
    assert told == [None, {"reason": "beginning", "session_id": "of-first", "evaluated": 4, "total": 8}, None]


def test_paging_writing_and_reading_are_told_of(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "QUIET_SECONDS", 0.05)
    disk = {"cache_disk_bytes": 1 << 26, "cache_dir": str(tmp_path / "cache"), "slots": 1}
    with serving(tiny, **disk) as server:
        listening = Listening(server)
        ask(server, SYSTEM, USER)
        # The cache notices that a file was written when it is next asked.
        until(lambda: bool(server.get("/v1/cache").json()["disk_nodes"]))
        written = listening.wait_for("disk.written")
        assert all(one["bytes"] > 0 and one["kind"] == "rows" and one["model"] == "tiny" for one in written)
        ask(server, {"role": "user", "content": "Something else."}, cache_salt="other")
        (out,) = listening.wait_for("cache.page_out")[:1]
        assert out["namespace"] == "" and out["tokens"] > 300 and out["slot"] == 0
        ask(server, SYSTEM, MORE)
        page_in = listening.wait_for("cache.page_in")[-1]
        assert page_in["tokens"] > 250
        moved = stats(server)["models"][0]["moved"]
        assert moved["disk_written_bytes"] >= sum(one["bytes"] for one in written)
        assert moved["page_ins"] >= 1 and moved["disk_read_bytes"] == 0
    until(lambda: listening.is_over)
    with serving(tiny, **disk) as server:
        listening = Listening(server)
        ask(server, SYSTEM, MORE)
        (read,) = listening.wait_for("disk.read")
        started = listening.wait_for("request.started")[0]
        assert read["tokens"] >= started["cached_tokens"] > 250 and started["tier"] == "disk"
        moved = stats(server)["models"][0]["moved"]
        assert moved["disk_read_bytes"] == read["bytes"] > 0


def test_one_that_comes_back_misses_nothing(server: httpx.Client) -> None:
    with server.stream("GET", "/v1/events?seconds=0") as answer:
        head = answer.read().decode()
    place = head.split("\n")[0].removeprefix("id: ")
    listening = Listening(server)
    first = ask(server, USER)
    listening.wait_for("request.ended")
    again = Listening(server, **{"Last-Event-ID": place})
    assert [one["id"] for one in again.wait_for("request.queued")] == [first["id"]]
    assert not again.of("lost")
    lost = Listening(server, **{"Last-Event-ID": "before-7"})
    assert [one["count"] for one in lost.wait_for("lost")] == [None]


def test_a_stream_ends_with_the_server_and_in_its_time(tiny: Path) -> None:
    with serving(tiny) as server:
        listening = Listening(server)
        for seconds in ("0", "1"):
            assert server.get(f"/v1/events?seconds={seconds}").text.startswith("id: ")
        assert not listening.is_over
    until(lambda: listening.is_over)


@pytest.mark.parametrize("seconds", ["x", "-1", "1.5", "99999", "٣"])
def test_a_time_that_is_none_is_refused(seconds: str) -> None:
    app = create_app(FakeEngine(), fake_model(), ServerConfig())
    with running(app) as address:
        answer = httpx.get(f"{address}/v1/events", params={"seconds": seconds})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "seconds"


def test_only_so_many_listen_and_who_leaves_makes_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MAX_LISTENERS", 2)
    app = create_app(FakeEngine(), fake_model(), ServerConfig())
    with running(app) as address, httpx.Client(base_url=address, timeout=120) as client:
        with client.stream("GET", "/v1/events"), client.stream("GET", "/events"):
            refused = client.get("/v1/events")
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "too_many_listeners"
        until(lambda: not app.state.api.activity.log.listeners)
        assert client.get("/v1/events?seconds=0").status_code == 200


def test_an_open_request_is_shown_with_its_phase() -> None:
    app = create_app(FakeEngine(max_texts=1), fake_model(), ServerConfig())
    with running(app) as address, httpx.Client(base_url=address, timeout=120) as client:
        body = {"messages": [USER], "stream": True, "session_id": "s"}
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            pieces = answer.iter_bytes()  # dropped, it would close the connection
            next(pieces)
            (one,) = stats(client)["requests"]
            assert one["session_id"] == "s" and one["phase"] in ("waiting", "prefill", "decode")
            assert one["endpoint"] == "/v1/chat/completions" and one["seconds"] >= 0
        until(lambda: stats(client)["requests"] == [])
        assert stats(client)["totals"]["cancelled"] == 1
