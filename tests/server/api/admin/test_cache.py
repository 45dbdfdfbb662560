"""`/v1/cache`, priming and pins: on a tiny hybrid model behind a real server, and over the fake engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from cache.budget import PinLimit
from server.app.config import ServerConfig
from server.app.service import open_service
from server.engine import engine as engine_module
from server.engine.commands import pin_turn
from tests.server.api.test_live import raw_post, until
from tests.support import tiny_models
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, Script, fake_model
from tests.support.live_server import running

SYSTEM = {"role": "system", "content": "You are a careful assistant. " * 12}
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}
ANSWER = {"role": "assistant", "content": "Rain."}
MORE = {"role": "user", "content": "And tomorrow?"}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a running server with a tiny model that has attention and recurrent layers."""
    folder = tiny_models.write("lfm2", tmp_path_factory.mktemp("models") / "tiny")
    with serving(ServerConfig(models=(str(folder),), cache_memory_bytes=1 << 26)) as client:
        yield client


@contextmanager
def serving(config: ServerConfig) -> Iterator[httpx.Client]:
    """Serves, and yields a client."""
    service = open_service(config)
    service.engine.start()
    try:
        with (
            running(create_app(service.engine, service.model, config)) as address,
            httpx.Client(base_url=address, timeout=120) as client,
        ):
            yield client
    finally:
        service.engine.stop()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def ask(server: httpx.Client, key: str, *messages: Any, **fields: Any) -> Any:
    """The body of a chat completion of up to four tokens."""
    body = {"messages": messages, "max_tokens": 4, **fields}
    answer = server.post("/v1/chat/completions", json=body, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    return answer.json()


def prime(server: httpx.Client, key: str, **fields: Any) -> Any:
    answer = server.post("/v1/cache/prime", json=fields, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    return answer.json()


def held(server: httpx.Client, key: str, **params: Any) -> Any:
    answer = server.get("/v1/cache", headers=bearer(key), params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def code_of(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


HISTORIES = {"system": [SYSTEM], "user": [SYSTEM, QUESTION], "assistant": [SYSTEM, QUESTION, ANSWER]}


@pytest.mark.parametrize("name", HISTORIES)
def test_a_primed_conversation_is_restored_whole_by_whatever_follows(server: httpx.Client, name: str) -> None:
    history, key = HISTORIES[name], f"prime {name}"
    primed = prime(server, key, messages=history)
    assert primed["object"] == "cache.prime" and primed["cached_tokens"] == 0 and primed["ms"] > 0
    assert primed["tokens"] == primed["evaluated_tokens"] > 40
    after = [ANSWER, MORE] if name == "user" else [MORE]
    usage = ask(server, key, *history, *after)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == primed["tokens"]
    again = prime(server, key, messages=history)
    assert again["cached_tokens"] == again["tokens"] == primed["tokens"]


def test_a_plain_prompt_can_be_primed(server: httpx.Client) -> None:
    primed = prime(server, "plain", prompt="Once upon a time there was a careful assistant. ", session_id="s")
    body = {"prompt": "Once upon a time there was a careful assistant. It was in Paris.", "max_tokens": 1}
    usage = server.post("/v1/completions", json=body, headers=bearer("plain")).json()["usage"]
    assert primed["session_id"] == "s"
    assert usage["prompt_tokens_details"]["cached_tokens"] == primed["tokens"]
    ids = prime(server, "plain", prompt=[5, 6, 7, 8])
    assert ids["tokens"] == 4


def test_the_cache_is_shown_to_its_own_namespace_with_words_and_bytes(server: httpx.Client) -> None:
    primed = prime(server, "show", messages=[SYSTEM])
    ask(server, "show", SYSTEM, QUESTION)
    ask(server, "show", SYSTEM, MORE)
    state = held(server, "show")
    nodes = state["nodes"]
    assert state["object"] == "cache" and state["model"] == "tiny" and not state["truncated"]
    assert state["disk_writes"] is None
    assert state["num_nodes"] == len(nodes) >= 3
    head = next(node for node in nodes if node["stop"] == primed["tokens"])
    assert head["explicit"] and head["restore_point"] and head["parent"] is None
    assert "You are a careful" in head["preview"]
    assert {node["tier"] for node in nodes} <= {"live", "memory"}
    assert state["bytes"]["live"] > 0 and state["bytes"]["point"] > 0 and state["bytes"]["window"] == 0
    ranks = sorted({node["last_used"] for node in nodes})
    assert ranks == list(range(1, len(ranks) + 1)), "how often others asked is nobody's business"
    assert len(held(server, "show", limit=1)["nodes"]) == 1 and held(server, "show", limit=1)["truncated"]
    other = held(server, "somebody else")
    assert other["nodes"] == [] and not any(other["bytes"].values()) and other["evictions"] == 0
    assert held(server, "show", cache_salt="x")["nodes"] == []


def test_who_owns_the_server_sees_the_sums_of_all_namespaces_and_one_on_demand(server: httpx.Client) -> None:
    for key in ("large", "small"):
        ask(server, key, SYSTEM, *([QUESTION] if key == "small" else [QUESTION, ANSWER, MORE]))
    theirs = {key: held(server, key) for key in ("large", "small")}

    def are_told() -> bool:
        # The beginnings of next turns are still being evaluated for a moment behind the answers.
        theirs.update({key: held(server, key) for key in theirs})
        told = {one["namespace"]: one for one in server.get("/v1/cache").json()["namespaces"]}
        seen = {name: server.get("/v1/cache", params={"namespace": name}).json()["nodes"] for name in told}
        return all(
            told[one["namespace"]].items() <= {**one, "adapter": None}.items()
            and seen[one["namespace"]] == one["nodes"] != []
            for one in theirs.values()
        )

    until(are_told)
    state = server.get("/v1/cache").json()
    sizes = [sum(one["bytes"].values()) for one in state["namespaces"]]
    assert state["namespace"] == "" and len(sizes) >= 2
    assert sizes == sorted(sizes, reverse=True)
    assert all(one["namespaces"] is None for one in theirs.values())
    assert held(server, "large", namespace=theirs["small"]["namespace"])["namespace"] != theirs["small"]["namespace"]


def test_what_is_on_disk_is_shown_and_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "QUIET_SECONDS", 0.1)
    folder = tiny_models.write("llama", tmp_path / "tiny")
    config = ServerConfig(
        models=(str(folder),),
        cache_disk_bytes=1 << 26,
        cache_disk_write_bytes_per_day=1 << 30,
        cache_dir=str(tmp_path / "cache"),
    )
    with serving(config) as server:
        primed = prime(server, "disk", messages=[SYSTEM])
        until(lambda: held(server, "disk")["disk_nodes"])
        state = held(server, "disk")
        (node,) = state["disk_nodes"]
        assert node == {
            "id": 1, "parent": None, "start": 0, "stop": primed["tokens"], "tokens": primed["tokens"],
            "snapshot": False, "memory_id": 1, "memory_tokens": primed["tokens"], "last_used": 1,
            "bytes": state["bytes"]["disk"], "preview": node["preview"], "name": node["name"],
        }  # fmt: skip
        assert node["name"]["sessions"] == [""], "a primed prompt has no session"
        assert "You are a careful" in node["preview"] and state["num_disk_nodes"] == 1
        assert state["disk_writes"] == {"today_bytes": node["bytes"], "budget_bytes": 1 << 30}
        assert held(server, "disk", limit=0)["truncated"]
        assert held(server, "somebody else")["disk_nodes"] == []
        freed = server.post("/v1/cache/clear", headers=bearer("disk")).json()
        assert freed["freed_disk_bytes"] == node["bytes"]
        state = held(server, "disk")
        assert state["disk_nodes"] == [] and state["disk_writes"]["today_bytes"] == node["bytes"]


def test_clearing_forgets_one_namespace(server: httpx.Client) -> None:
    for key in ("clear", "keep"):
        prime(server, key, messages=[SYSTEM])
    kept = held(server, "keep")["num_tokens"]
    freed = server.post("/v1/cache/clear", headers=bearer("clear")).json()
    assert freed["freed_tokens"] > 40 and freed["freed_bytes"] > 0 and freed["freed_disk_bytes"] == 0
    assert held(server, "clear")["nodes"] == []
    assert held(server, "keep")["num_tokens"] == kept
    assert prime(server, "clear", messages=[SYSTEM])["cached_tokens"] == 0


def test_a_session_is_pinned_and_unpinned(server: httpx.Client) -> None:
    ask(server, "pin", SYSTEM, QUESTION, session_id="chat/1")
    path = "/v1/sessions/chat/1"
    assert code_of(server.post(f"{path}/pin", headers=bearer("another"))) == (404, "session_not_found")
    assert code_of(server.post(f"{path}/unpin", headers=bearer("pin"))) == (404, "session_not_found")
    pinned = server.post(f"{path}/pin", headers=bearer("pin")).json()
    assert pinned["id"] == "chat/1" and pinned["pinned"] and pinned["pinned_tokens"] > 40
    state = held(server, "pin")
    assert state["pinned_sessions"] == ["chat/1"] and any(node["pinned"] for node in state["nodes"])
    assert server.post(f"{path}/unpin", headers=bearer("pin")).json()["pinned"] is False
    assert held(server, "pin")["pinned_sessions"] == []


def test_deleting_a_session_ends_its_pin(server: httpx.Client) -> None:
    ask(server, "delete", SYSTEM, QUESTION, session_id="s")
    server.post("/v1/sessions/s/pin", headers=bearer("delete"))
    assert server.delete("/v1/sessions/s", headers=bearer("delete")).status_code == 200
    assert held(server, "delete")["pinned_sessions"] == []


class FullEngine(FakeEngine):
    """Refuses every further pin."""

    async def execute(self, command: Any, *given: Any) -> Any:
        raise PinLimit(pinned_bytes=9_000_000, limit_bytes=8_000_000)


def test_more_than_half_of_the_memory_cannot_be_pinned() -> None:
    client = TestClient(create_app(FullEngine(), fake_model(), ServerConfig()))
    answer = client.post("/v1/sessions/s/pin")
    assert code_of(answer) == (409, "pin_limit") and "half" in answer.json()["error"]["message"]


CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "missing_required_parameter"),
    ({**CHAT, "prompt": "Hi"}, "missing_required_parameter"),
    ({"messages": []}, "invalid_value"),
    ({"prompt": ""}, "empty_prompt"),
    ({**CHAT, "stream": True}, "unsupported_parameter"),
    ({**CHAT, "cache_prompt": False}, "unsupported_parameter"),
    ({"prompt": "x" * 200}, "context_length_exceeded"),
    ({"prompt": [5, 9999]}, "invalid_value"),
]


@pytest.mark.parametrize(("body", "code"), REFUSED)
def test_what_cannot_be_primed_is_refused_before_the_engine(body: dict[str, Any], code: str) -> None:
    engine = FakeEngine()
    client = TestClient(create_app(engine, fake_model(), ServerConfig()))
    assert code_of(client.post("/v1/cache/prime", json=body)) == (400, code)
    assert not engine.requests


def test_a_prime_asks_the_engine_for_no_tokens() -> None:
    engine = FakeEngine(script=Script(texts=()))
    client = TestClient(create_app(engine, fake_model(), ServerConfig()))
    assert client.post("/v1/cache/prime", json={**CHAT, "max_tokens": 7}).status_code == 200
    assert [request.max_tokens for request in engine.requests] == [0]


def test_a_client_that_leaves_ends_its_prime() -> None:
    engine = FakeEngine(script=Script(texts=(), prefill_seconds=60))
    app = create_app(engine, fake_model(), ServerConfig())
    with running(app) as address:
        with raw_post(address, "/v1/cache/prime", CHAT):
            until(lambda: bool(engine.requests))
        assert engine.cancel_seen.wait(120)


@pytest.mark.parametrize("limit", ["-1", "x", "1e3", "99999", "²"])
def test_a_limit_that_is_none_is_refused(limit: str) -> None:
    client = TestClient(create_app(FakeEngine(), fake_model(), ServerConfig()))
    assert code_of(client.get("/v1/cache", params={"limit": limit})) == (400, "invalid_value")


def test_an_engine_that_ended_says_so() -> None:
    client = TestClient(create_app(FakeEngine(is_running=False), fake_model(), ServerConfig()))
    for method, path in (("GET", ""), ("POST", "/clear")):
        answer = client.request(method, f"/v1/cache{path}")
        assert code_of(answer) == (503, "server_stopping") and "Retry-After" in answer.headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("texts", "is_held"), [((CALL,), True), (("Hello.",), False)])
def test_a_turn_that_ends_in_tool_calls_is_held_and_no_other(
    stream: bool, texts: tuple[str, ...], is_held: bool
) -> None:
    engine = FakeEngine(script=Script(texts=texts))
    client = TestClient(create_app(engine, fake_model(), ServerConfig()))
    body = {**CHAT, "tools": [TOOL], "stream": stream, "session_id": "s"}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    holds = [given for command, *given in engine.commands if command is pin_turn]
    assert len(holds) == is_held
    if holds:
        _, label, prompt, reply, _ = holds[0]
        assert (label, list(reply)) == ("s", [0])
        assert prompt is engine.requests[0].tokens


def test_edges_are_named_found_and_remembered_for_their_own_key_only(server: httpx.Client) -> None:
    ask(server, "named", SYSTEM, {"role": "user", "content": "Where is the violet door?"}, session_id="doors")
    until(lambda: held(server, "named")["earlier"] != [])
    now = held(server, "named")
    (session,) = now["sessions"]
    assert session == {"id": "doors", "title": "Where is the violet door?", "question": "Where is the violet door?"}
    assert {one["name"]["role"] for one in now["nodes"]} >= {"system"}
    assert all(one["name"]["sessions"] == ["doors"] for one in now["nodes"])
    found = server.get("/v1/cache/search", params={"text": "VIOLET door"}, headers=bearer("named")).json()
    assert len(found["nodes"]) == 1 and not found["truncated"]
    earlier = held(server, "named", at=int(now["earlier"][-1]))
    assert earlier["sessions"] == [session] and earlier["num_nodes"] > 0
    for key in ("others", "more"):
        theirs = held(server, key)
        assert (theirs["sessions"], theirs["earlier"]) == ([], [])
        searched = server.get("/v1/cache/search", params={"text": "violet door"}, headers=bearer(key)).json()
        assert searched["nodes"] == []
        answer = server.get("/v1/cache", params={"at": int(now["earlier"][-1])}, headers=bearer(key))
        assert answer.status_code == 400 and "earlier" in answer.text
    assert server.post("/v1/cache/clear", headers=bearer("named")).status_code == 200
    assert held(server, "named")["earlier"] == []
