"""Whatever fails in a request, and whenever its client leaves, nothing of what it took stays taken."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from server.api.activity import Activity, Sums
from server.api.answer import Run
from server.api.app import create_pool_app
from server.api.call import Call
from server.api.openai.generate import ChatExchange
from server.api.planning import Planning
from server.api.wire import JsonBody
from server.app.config import ServerConfig
from server.app.keys import ApiKey, KeyRing, digest_of
from server.pool.pool import ModelPool
from tests.support.fake_engine import FakeEngine, Script
from tests.support.fake_opener import FakeOpener, catalog

STAGES: list[tuple[type[Any], str]] = [
    (Planning, "run"),
    (Call, "_read"),
    (ModelPool, "load"),
    (ModelPool, "try_hold"),
    (Call, "_begin"),
    (FakeEngine, "submit"),
    (Run, "_explained"),
    (Run, "observe"),
    (ChatExchange, "_take"),
    (Run, "_keep_turn"),
    (Activity, "note"),
    (Sums, "add"),
    (JsonBody, "render"),
]
"""Methods through which a request for chat goes, in about this order; each is a stage at each of its calls."""
MOST_CALLS = 30
WAIT_SECONDS = 120.0


class Client:
    """One request, straight to the application; it leaves when it is told to."""

    def __init__(self, **fields: Any) -> None:
        body = {"model": "a", "messages": [{"role": "user", "content": "Hi"}], **fields}
        self._body = json.dumps(body).encode()
        self._has_sent = False
        self._has_left = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.said = b""
        self.status = 0

    def leave(self) -> None:
        """May be called on any thread."""
        self._loop.call_soon_threadsafe(self._has_left.set)

    async def receive(self) -> dict[str, Any]:
        if not self._has_sent:
            self._has_sent = True
            return {"type": "http.request", "body": self._body}
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        self.said += message.get("body", b"")

    async def ask(self, app: Any) -> None:
        headers = [(b"authorization", b"Bearer geheim"), (b"content-type", b"application/json"), (b"host", b"a")]
        scope = {
            "type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": headers,
            "client": ("127.0.0.1", 5), "scheme": "http", "server": ("a", 80), "root_path": "", "http_version": "1.1",
        }  # fmt: skip
        await asyncio.wait_for(app(scope, self.receive, self.send), WAIT_SECONDS)


@dataclass
class Stage:
    """Makes something happen at one call of a method."""

    happen: Callable[[], None]
    at_call: int
    num_calls: int = 0

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.num_calls += 1
            if self.num_calls == self.at_call:
                self.happen()
            return method(*args, **kwargs)

        return call

    @property
    def was_reached(self) -> bool:
        return self.num_calls >= self.at_call


def fail() -> None:
    raise RuntimeError("at this stage")


class Server:
    """A server whose only model is not loaded yet, and whose only key may send one request at a time."""

    def __init__(self) -> None:
        self.opener = FakeOpener()
        self.pool = ModelPool(catalog("a"), opener=self.opener)
        keys = KeyRing([ApiKey("alice", digest_of("geheim"), concurrent_requests=1)])
        self.app = create_pool_app(self.pool, ServerConfig(api_key="geheim", heartbeat_seconds=0.01), keys=keys)
        self.context = self.app.state.api

    async def check_nothing_is_held(self) -> None:
        # The engine, and work that no client waits for, take a step to notice.
        for _ in range(20_000):
            if not self.context.background and not self._unfinished():
                break
            await asyncio.sleep(0.005)
        assert [usage.num_running for usage in self.context.rate_limits.usages.values()] == [0], "a permit is held"
        assert not any(member.num_holds for member in self.pool.members), "a model is held"
        assert not self.context.activity.open_requests(None), "a request is open"
        assert not self._unfinished(), "a slot is taken"

    def _unfinished(self) -> set[str]:
        return {
            request.request_id
            for engine in self.opener.engines.values()
            for request in engine.requests
            if request.request_id not in engine.cancelled | engine.finished
        }


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 2}, {"n": 2, "stream": True}], ids=str)
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: f"{stage[0].__name__}.{stage[1]}")
def test_nothing_stays_taken(
    stage: tuple[type[Any], str], fields: dict[str, Any], leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(at_call: int) -> bool:
        server, client = Server(), Client(**fields)
        found = Stage(client.leave if leaves else fail, at_call)
        with monkeypatch.context() as patch:
            patch.setattr(*stage, found.around(getattr(*stage)))
            # What fails behind the last byte closes the connection.
            with contextlib.suppress(RuntimeError):
                await client.ask(server.app)
        await server.check_nothing_is_held()
        again = Client()
        await again.ask(server.app)
        assert (again.status, b"there" in again.said) == (200, True)
        await server.check_nothing_is_held()
        return found.was_reached

    num_reached = next(n for n in range(MOST_CALLS) if not asyncio.run(run(n + 1)))
    assert num_reached > 0 or (stage == (JsonBody, "render") and "stream" in fields), "the stage is never reached"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stays_taken_of_a_model_that_loads_for_long(stream: bool, fails: bool) -> None:
    async def run() -> None:
        server, client = Server(), Client(stream=stream)
        server.opener.may_finish.clear()
        if fails:
            server.opener.broken.add("a")
        asking = asyncio.create_task(client.ask(server.app))
        await asyncio.to_thread(server.opener.has_begun.wait, WAIT_SECONDS)
        for _ in range(20_000 if stream else 0):
            if b"loading a" in client.said:
                break
            await asyncio.sleep(0.005)
        if not fails:
            client.leave()
            await asking
        server.opener.may_finish.set()
        await asking
        await server.check_nothing_is_held()

    asyncio.run(run())


def test_a_full_queue_gives_back_the_choices_that_it_took() -> None:
    async def run() -> None:
        server = Server()
        await Client().ask(server.app)
        server.opener.engines["a"].max_waiting = 1
        server.opener.engines["a"].script = Script(step_seconds=0.01)
        client = Client(n=3)
        await client.ask(server.app)
        assert client.status == 429
        await server.check_nothing_is_held()

    asyncio.run(run())
