"""What is stored survives a restart, stays within its limits, and is seen by its namespace only."""

import sqlite3
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from server.api.responses import store as responses_store
from server.api.responses.store import FILE_NAME, ResponseStore, StoredConversation, StoredResponse, store_of
from server.app.config import ServerConfig
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, fake_model


def response(name: str, parent: str | None = None, text: str = "Hi") -> StoredResponse:
    item = {"id": f"in_{name}", "type": "message", "role": "user", "content": text}
    return StoredResponse(name, {"id": name, "output": []}, [item], parent, session=name[0])


def ids(chain: list[StoredResponse]) -> list[str]:
    return [one.id for one in chain]


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_chain_is_read_from_its_beginning(tmp_path: Path, on_disk: bool) -> None:
    store = ResponseStore(tmp_path / "a" / FILE_NAME if on_disk else None)
    for number in range(5):
        store.save("n", response(f"a{number}", f"a{number - 1}" if number else None))
    assert ids(store.chain("n", "a3")) == ["a0", "a1", "a2", "a3"]
    assert store.find("n", "a2") == response("a2", "a1")
    assert ids(store.chain("other", "a3")) == [] and store.find("other", "a2") is None
    assert not store.delete("other", "a2") and store.delete("n", "a2")
    assert [(one.id, one.parent) for one in store.chain("n", "a4")] == [("a3", "a2"), ("a4", "a3")]


def test_a_file_outlives_its_server_and_is_its_owners_only(tmp_path: Path) -> None:
    path = tmp_path / "new" / FILE_NAME
    ResponseStore(path).save("n", response("a"))
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in path.parent.iterdir())
    assert ids(ResponseStore(path).chain("n", "a")) == ["a"]


def test_what_is_deleted_is_in_no_file_any_more(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / FILE_NAME)
    store.save("n", response("a", text="a secret " * 1000))
    store.delete("n", "a")
    store.find("n", "a")
    assert all(b"a secret" not in file.read_bytes() for file in tmp_path.iterdir())


def test_two_servers_share_a_file(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        opened = threads.map(lambda _: ResponseStore(tmp_path / FILE_NAME), range(8))
    one, other, *_ = opened
    with ThreadPoolExecutor(8) as threads:
        for index in range(40):
            threads.submit((one, other)[index % 2].save, "n", response(f"{index // 2}{index % 2 == 0}"))
    assert other.find("n", "3True") is not None


def test_the_oldest_chains_go_first_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_store, "MAX_RESPONSES", 4)
    store = ResponseStore()
    for name, parent in (("a1", None), ("b1", None), ("a2", "a1"), ("b2", "b1"), ("a3", "a2")):
        store.save("n", response(name, parent))
    # The chain of b was used before a3 made them too many.
    assert ids(store.chain("n", "a3")) == ["a1", "a2", "a3"] and ids(store.chain("n", "b2")) == []


def test_bytes_are_bounded_and_conversations_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_store, "MAX_MEMORY_BYTES", 10_000)
    store = ResponseStore()
    store.put_conversation("n", StoredConversation("c", 1, {}))
    assert store.add_items("n", "c", [{"id": "i", "text": "x" * 6000}])
    store.save("n", response("a", text="x" * 6000))
    assert store.find_conversation("n", "c") is None and store.items("n", "c") is None
    assert store.find("n", "a") is not None
    assert not store.add_items("n", "c", [{"id": "i"}])
    store.save("n", response("b", text="x" * 60_000))
    assert store.find("n", "b") is None


def test_a_file_that_cannot_be_opened_costs_only_its_durability(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE_NAME).mkdir()
    store = ResponseStore(tmp_path / FILE_NAME)
    store.save("n", response("a"))
    assert ids(store.chain("n", "a")) == ["a"] and "kept in memory" in caplog.text


def test_a_file_of_another_version_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    ResponseStore(path).save("n", response("a"))
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 99")
    assert ids(ResponseStore(path).chain("n", "a")) == []


def test_it_stands_beside_the_disk_cache(tmp_path: Path) -> None:
    store_of(ServerConfig(cache_dir=str(tmp_path))).save("n", response("a"))
    assert list(tmp_path.iterdir()) == []
    store_of(ServerConfig(cache_dir=str(tmp_path), cache_disk_bytes=1 << 20)).save("n", response("a"))
    assert (tmp_path / FILE_NAME).exists()


def test_an_answer_is_given_though_it_cannot_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any, namespace: str, kept: StoredResponse, conversation: str | None = None) -> None:
        raise sqlite3.OperationalError("disk full")

    monkeypatch.setattr(ResponseStore, "save", fails)
    client = TestClient(create_app(FakeEngine(), fake_model(), ServerConfig()))
    answer = client.post("/v1/responses", json={"input": "Hi"})
    assert answer.status_code == 200 and answer.json()["status"] == "completed"
