"""What is stored survives a restart, stays within its limits, and is seen by its namespace only."""

import gzip
import json
import os
import resource
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from models.errors import InvalidParameter
from models.prompt import tokenize
from models.prompt.tokenize import Abandoned, abandoned_when
from server.api import wire
from server.api.errors import ApiError, Code
from server.api.responses import store as store_module
from server.api.responses.store import (
    FILE_NAME,
    Held,
    Link,
    PageWish,
    ResponseStore,
    StoredConversation,
    StoredResponse,
    choose_evictions,
    store_of,
)
from server.app.config import ServerConfig
from server.app.keys import ApiKey, KeyRing, digest_of
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, fake_model

Make = Callable[[], ResponseStore]


def response(name: str, parent: str | None = None, text: str = "Hi") -> StoredResponse:
    item = {"id": f"in_{name}", "type": "message", "role": "user", "content": text}
    body = {"id": name, "status": "completed", "output": [{"id": f"msg_{name}", "type": "message"}]}
    return StoredResponse(name, body, [item], parent, session=name[0])


def ids(chain: list[Link]) -> list[str]:
    return [one.id for one in chain]


@pytest.fixture(params=["memory", "disk"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    return ResponseStore if request.param == "memory" else lambda: ResponseStore(tmp_path / "a" / FILE_NAME)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the bytes that a store may hold."""

    def set_to(num_bytes: int) -> None:
        for name in ("MAX_MEMORY_BYTES", "MAX_DISK_BYTES"):
            monkeypatch.setattr(store_module, name, num_bytes)

    return set_to


def test_a_chain_is_read_from_its_beginning(make: Make) -> None:
    store = make()
    for number in range(5):
        store.save("n", response(f"a{number}", f"a{number - 1}" if number else None))
    assert ids(store.chain("n", "a3")) == ["a0", "a1", "a2", "a3"]
    last = store.chain("n", "a3")[-1]
    assert (last.parent, last.session, last.status) == ("a2", "a", "completed")
    assert [item["id"] for item in last.items] == ["in_a3", "msg_a3"]
    found = store.find("n", "a2")
    assert found is not None and (found[0], json.loads(found[1])) == ("completed", response("a2").body)
    assert ids(store.chain("other", "a3")) == [] and store.find("other", "a2") is None
    assert not store.delete("other", "a2") and store.delete("n", "a2") and not store.delete("n", "a2")
    assert [(one.id, one.parent) for one in store.chain("n", "a4")] == [("a3", "a2"), ("a4", "a3")]


def test_a_response_that_is_saved_again_replaces_itself(make: Make) -> None:
    store = make()
    for status in ("queued", "completed"):
        one = response("a1")
        store.save("n", StoredResponse(one.id, {**one.body, "status": status}, one.input, None, "a"))
    (found,) = store.chain("n", "a1")
    assert (found.status, len(found.items)) == ("completed", 2)


def seen(store: ResponseStore, kind: Any, name: str, *wish: Any) -> tuple[list[str], bool]:
    page = store.page("n", name, kind, PageWish(*wish))
    assert page is not None and all(json.loads(text)["id"] == item_id for item_id, text in page.rows)
    return [item_id for item_id, _ in page.rows], page.has_more


def test_items_are_read_page_by_page(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make()
    for number in range(3):
        store.save("n", response(f"a{number}", f"a{number - 1}" if number else None))
    whole = ["in_a0", "msg_a0", "in_a1", "msg_a1", "in_a2"]
    assert seen(store, "response", "a2", 5, True) == (whole, False)
    assert seen(store, "response", "a2", 5, False) == (whole[::-1], False)
    assert seen(store, "response", "a2", 2, True, "msg_a0") == (["in_a1", "msg_a1"], True)
    assert seen(store, "response", "a2", 2, False, "in_a1") == (["msg_a0", "in_a0"], False)
    assert seen(store, "response", "a2", 9, True, "in_a2") == ([], False)
    with pytest.raises(ApiError, match="no item"):
        store.page("n", "a2", "response", PageWish(2, True, "msg_a2"))
    assert store.page("n", "b", "response", PageWish(2, True)) is None
    store.put_conversation("n", StoredConversation("c", 1, {}), [{"id": "x"}, {"id": "y"}, {"id": "x"}])
    assert seen(store, "conversation", "c", 2, False) == (["x", "y"], True)
    assert seen(store, "conversation", "c", 2, False, "y") == (["x"], False)
    assert store.page("n", "a", "conversation", PageWish(2, True)) is None, "a chain is no conversation"
    monkeypatch.setattr(store_module, "MAX_PAGE_BYTES", 80)
    assert seen(store, "conversation", "c", 3, True) == (["x", "y", "x"], False)
    store.put_conversation("n", StoredConversation("d", 1, {}), [{"id": str(n), "text": "x" * 60} for n in range(3)])
    assert seen(store, "conversation", "d", 3, True) == (["0"], True), "large items come one by one"


def test_an_item_is_found_by_its_owner(make: Make) -> None:
    store = make()
    store.save("n", response("a1"))
    store.put_conversation("n", StoredConversation("c", 1, {}), [{"id": "x", "n": 1}, {"id": "x", "n": 2}])
    assert json.loads(store.find_item("n", "msg_a1", "response", "a1") or b"0") == response("a1").body["output"][0]
    assert json.loads(store.find_item("n", "x", "conversation", "c") or b"0") == {"id": "x", "n": 1}
    for place in (
        ("o", "msg_a1", "response", "a1"),
        ("n", "x", "response", "a1"),
        ("n", "msg_a1", "conversation", "a"),
    ):
        assert store.find_item(*place) is None
    assert store.delete_item("n", "x", "c") and not store.delete_item("n", "x", "c") and store.items("n", "c") == []


def test_a_conversation_gets_a_responses_items(make: Make) -> None:
    store = make()
    store.put_conversation("n", StoredConversation("c", 1, {"a": "b"}), [{"id": "x"}])
    for name, conversation, kept in (("a1", "c", "c"), ("a2", "gone", None)):
        one = response(name)
        one.body["conversation"] = conversation
        assert store.save("n", one, conversation) is (kept is not None)
        assert json.loads((store.find("n", name) or ("", b"{}"))[1])["conversation"] == kept
    assert [item["id"] for item in store.items("n", "c") or ()] == ["x", "in_a1", "msg_a1"]
    assert store.count() == 3
    assert store.find_conversation("n", "c") == StoredConversation("c", 1, {"a": "b"})
    assert store.delete_conversation("n", "c") and store.items("n", "c") is None and store.find("n", "a1") is not None
    assert not store.add_items("n", "c", [{"id": "i"}]) and not store.delete_conversation("n", "c")


# ------------------------------------------------------------------------------------------------------ limits


def test_the_oldest_chains_go_first_as_a_whole(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_RESPONSES", 4)
    store = make()
    for name, parent in (("a1", None), ("b1", None), ("a2", "a1"), ("b2", "b1"), ("a3", "a2")):
        store.save("n", response(name, parent))
    # The chain of b was used before a3 made them too many.
    assert ids(store.chain("n", "a3")) == ["a1", "a2", "a3"] and ids(store.chain("n", "b2")) == []


def test_order_of_use_is_counted_and_no_clock_counts(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time_ns", iter(range(10**6, 0, -1)).__next__)
    monkeypatch.setattr("time.time", iter(range(10**6, 0, -1)).__next__)
    monkeypatch.setattr(store_module, "MAX_RESPONSES", 3)
    store = make()
    for number in range(6):
        store.save("n", response(f"{number}"))
    assert [number for number in range(6) if store.find("n", f"{number}")] == [3, 4, 5]
    store.save("n", response("3"))
    store.save("n", response("6"))
    assert [number for number in range(7) if store.find("n", f"{number}")] == [3, 5, 6]


def test_a_key_over_its_share_loses_its_own(make: Make, limit: Callable[[int], None]) -> None:
    limit(60_000)
    store = make()
    store.save("one", response("a1", text="x" * 20_000))
    store.put_conversation("one/salt", StoredConversation("c", 1, {}), [{"id": "i", "text": "x" * 6000}])
    for number in range(20):
        store.save(f"two/{number % 4}", response(f"{number}", text="x" * 10_000))
        store.put_conversation("two", StoredConversation(f"d{number}", 1, {"k" * 9000: ""}))
    assert store.find("one", "a1") and store.items("one/salt", "c"), "within its share"
    assert store.find("two/3", "19") and store.find_conversation("two", "d19"), "the newest of the other"
    assert not store.find("two/0", "0")
    store.save("three", response("b1", text="x" * 15_000))
    assert store.find("three", "b1"), "a newcomer finds its share"


def test_what_does_not_fit_is_refused_and_costs_nothing(make: Make, limit: Callable[[int], None]) -> None:
    limit(20_000)
    store = make()
    store.save("n", response("a1"))
    store.put_conversation("n", StoredConversation("c", 1, {}), [{"id": "i"}])
    for refused in (
        lambda: store.save("n", response("b", text="x" * 60_000), "c"),
        lambda: store.save("n", response("a2", "a1", text="x" * 60_000)),
        lambda: store.add_items("n", "c", [{"id": "i", "text": "x" * 60_000}]),
        lambda: store.put_conversation("n", StoredConversation("d", 1, {"é" * 15_000: ""})),
    ):
        with pytest.raises(ApiError, match="larger than this key's share") as caught:
            refused()
        assert caught.value.status == 507
        assert store.items("n", "c") == [{"id": "i"}] and ids(store.chain("n", "a1")) == ["a1"]
    assert store.find("n", "b") is None and store.find_conversation("n", "d") is None
    store.save("n", response("b", text="x" * 12_000))
    assert store.delete("n", "b") and store.delete_conversation("n", "c")
    store.save("n", response("e", text="x" * 15_000))
    assert store.find("n", "a1") is not None, "what is deleted counts no more"


def test_whoever_is_over_its_share_goes_whatever_is_measured() -> None:
    held = [Held("old", "a", (10, 1)), Held("many", "b", (1, store_module.MAX_RESPONSES)), Held("new", "a", (80, 1))]
    assert choose_evictions(held, ["new"], (100, store_module.MAX_RESPONSES)) == ["many"]
    assert choose_evictions(held, ["many"], (200, store_module.MAX_RESPONSES)) is None


# --------------------------------------------------------------------------------------------------------- files


def picture(data: str, size: int = 9000) -> dict[str, Any]:
    return {"type": "input_image", "image_url": f"data:image/png;base64,{data * (size // len(data))}=="}


def shows(name: str, *files: str, parent: str | None = None) -> StoredResponse:
    one = response(name, parent)
    return one._replace(input=[{**one.input[0], "content": [picture(data) for data in files]}])


def blobs_of(store: ResponseStore) -> list[int]:
    unused = "SELECT COUNT(*) FROM blobs WHERE blob NOT IN (SELECT blob FROM blob_uses)"
    dangling = "SELECT COUNT(*) FROM blob_uses WHERE place NOT IN (SELECT place FROM items)"
    with store._reading() as database:
        assert database.execute(unused).fetchone() == database.execute(dangling).fetchone() == (0,)
        return [size for (size,) in database.execute("SELECT LENGTH(data) FROM blobs ORDER BY blob")]


def test_a_file_is_kept_once_and_goes_with_its_last_item(make: Make) -> None:
    store = make()
    store.put_conversation(
        "n", StoredConversation("c", 1, {}), [{"id": "x", "content": [picture("B"), picture("B")]}]
    )
    for number in range(3):
        store.save("n", shows(f"{number}", "A", "B", "A"), "c")
    store.save("n", shows("0", "A", "B", "A"))
    assert blobs_of(store) == [9002, 9002]
    (link,) = store.chain("n", "1")
    whole = [picture(data) for data in "ABA"]
    assert link.items[0]["content"] == whole == (store.items("n", "c") or [])[3]["content"]
    assert json.loads(store.find_item("n", "in_2", "response", "2") or b"0")["content"] == whole
    (page,) = (store.page("n", "c", "conversation", PageWish(9, True)),)
    assert page is not None and json.loads(page.rows[1][1])["content"] == whole
    assert store.delete("n", "0") and store.delete("n", "1") and store.delete("n", "2")
    assert store.delete_item("n", "in_0", "c") and len(blobs_of(store)) == 2
    assert store.delete_item("n", "in_1", "c") and store.delete_item("n", "in_2", "c") and len(blobs_of(store)) == 1
    assert store.delete_conversation("n", "c") and blobs_of(store) == []


def test_no_key_reads_anothers_file(make: Make) -> None:
    store = make()
    store.save("n", shows("a", "A"))
    forged = f"\0{store_module._digest(picture('A')['image_url'][22:].encode()).decode()}"
    for namespace, one in (("m", response("b", text=forged)), ("m/salt", shows("c", "A"))):
        store.save(namespace, one)
        assert store.chain(namespace, one.id)[0].items[0] == one.input[0]
    assert blobs_of(store) == [9002, 9002] and store.delete("n", "a") and len(blobs_of(store)) == 1
    assert store.chain("m/salt", "c")[0].items[0] == shows("c", "A").input[0]


def test_files_count_once_for_who_used_them_last(make: Make, limit: Callable[[int], None]) -> None:
    limit(45_000)
    store = make()
    for name in "abcdef":
        store.save("n", shows(name, "A", "B", "C"))
    assert all(store.find("n", name) for name in "abcdef") and len(blobs_of(store)) == 3
    store.save("n", shows("g", "D", "E"))
    assert [name for name in "abcdefg" if store.find("n", name)] == ["g"], "f held what all others held too"
    assert len(blobs_of(store)) == 2
    with pytest.raises(ApiError, match="larger than this key's share"):
        store.save("n", shows("h", *"FGHIJ"))
    assert store.find("n", "g") and len(blobs_of(store)) == 2


def test_a_damaged_file_is_told_and_mended_by_sending_it_again(make: Make) -> None:
    store = make()
    for name in "ab":
        store.save("n", shows(name, "A"))
    with store._change() as database:
        database.execute("UPDATE blobs SET data = CAST(SUBSTR(data, 3) AS BLOB)")
    for read in (
        lambda: store.chain("n", "a"),
        lambda: store.find_item("n", "in_a", "response", "a"),
        lambda: store.page("n", "a", "response", PageWish(9, True)),
    ):
        with pytest.raises(ApiError, match="is damaged") as caught:
            read()
        assert caught.value.status == 404
    assert store.find("n", "a")
    store.save("n", shows("c", "A"))
    assert store.chain("n", "a")[0].items[0] == shows("a", "A").input[0]


def test_a_file_of_the_version_before_is_read_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, one = tmp_path / FILE_NAME, shows("a", "A")
    with sqlite3.connect(path) as database:
        database.executescript(f"{store_module._SCHEMA} PRAGMA user_version = 2;")
        text, columns = json.dumps(one.input[0]).encode(), "thread, response, is_output, id, item"
        database.execute("INSERT INTO threads (namespace, holder, kind, name) VALUES ('n', 'n', 'response', 'a')")
        database.execute("INSERT INTO responses VALUES (1, 1, 'n', 'a', NULL, 'completed', ?, '{}')", (len(text),))
        database.execute(f"INSERT INTO items ({columns}) VALUES (1, 1, 0, 'in_a', ?)", (text,))
    for _ in range(2):
        store = ResponseStore(path)
        store.save("n", shows("b", "A", parent="a"))
        assert [link.items[0]["content"] for link in store.chain("n", "b")] == [[picture("A")]] * 2
        assert blobs_of(store) == [9002] and not caplog.text
        store.close()


# ------------------------------------------------------------------------------------------------------ planning


def test_what_a_prompt_brings_in_is_bounded_and_ends_with_its_client(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make()
    store.put_conversation("n", StoredConversation("c", 1, {}), [{"id": str(n), "t": "x" * 1000} for n in range(9)])
    for number in range(9):
        store.save("n", response(f"a{number}", f"a{number - 1}" if number else None, text="x" * 1000))
    parsed, loads = list[bytes](), json.loads

    def counted(text: bytes) -> Any:
        parsed.append(text)
        return loads(text)

    monkeypatch.setattr(json, "loads", counted)
    monkeypatch.setattr(tokenize, "MAX_REPEATED_BYTES", 30_000)
    for read in (lambda: store.items("n", "c"), lambda: store.chain("n", "a8")):
        with abandoned_when(lambda: False), pytest.raises(InvalidParameter, match="more than 30000 bytes"):
            read()
        with abandoned_when(lambda: True), pytest.raises(Abandoned):
            read()
    assert len(parsed) <= 14, "reading stopped where the bound was reached"


# ------------------------------------------------------------------------------------------------------ the file


def test_a_file_outlives_its_server_and_is_its_owners_only(tmp_path: Path) -> None:
    path = tmp_path / "new" / FILE_NAME
    ResponseStore(path).save("n", response("a"))
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in path.parent.iterdir())
    assert ids(ResponseStore(path).chain("n", "a")) == ["a"]


def test_a_store_that_is_closed_leaves_no_log(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / FILE_NAME)
    store.save("n", response("a"))
    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(lambda _: store.find("n", "a"), range(4)))
        store.close()
    assert {file.name for file in tmp_path.iterdir()} == {FILE_NAME, f"{FILE_NAME}-reserve"}


def test_what_is_deleted_is_in_no_file_any_more(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / FILE_NAME)
    store.save("n", response("a", text="a secret " * 1000))
    store.put_conversation("n", StoredConversation("c", 1, {}), [{"id": "x", "text": "a secret " * 1000}])
    store.delete("n", "a")
    store.delete_item("n", "x", "c")
    store.find("n", "a")
    assert all(b"a secret" not in file.read_bytes() for file in tmp_path.iterdir())


def test_two_servers_share_a_file(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        one, other, *_ = threads.map(lambda _: ResponseStore(tmp_path / FILE_NAME), range(8))
    with ThreadPoolExecutor(8) as threads:
        for index in range(40):
            threads.submit((one, other)[index % 2].save, "n", response(f"{index // 2}{index % 2 == 0}"))
    assert other.find("n", "3True") is not None


def test_reading_waits_for_no_writer(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / FILE_NAME)
    store.save("n", response("a"))
    with store._change() as database, ThreadPoolExecutor(1) as threads:
        database.execute("DELETE FROM responses")
        assert threads.submit(store.find, "n", "a").result(30) is not None


def test_a_file_that_cannot_be_opened_costs_only_its_durability(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE_NAME).mkdir()
    store = store_of(ServerConfig(cache_dir=str(tmp_path), cache_disk_bytes=1 << 20))
    store.save("n", response("a"))
    assert ids(store.chain("n", "a")) == ["a"] and "kept in memory" in caplog.text


def test_a_file_of_another_version_begins_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / FILE_NAME
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE responses (namespace TEXT, id TEXT, body TEXT)")
        database.execute("INSERT INTO responses VALUES ('n', 'a', ?)", ("a secret " * 1000,))
        database.execute("PRAGMA user_version = 1")
    store = ResponseStore(path)
    assert store.find("n", "a") is None and "are not kept" in caplog.text
    store.save("n", response("a"))
    store.close()
    assert b"a secret" not in path.read_bytes()
    assert ResponseStore(path).find("n", "a") is not None and caplog.text.count("are not kept") == 1


def test_it_stands_beside_the_disk_cache(tmp_path: Path) -> None:
    store_of(ServerConfig(cache_dir=str(tmp_path))).save("n", response("a"))
    assert list(tmp_path.iterdir()) == []
    store_of(ServerConfig(cache_dir=str(tmp_path), cache_disk_bytes=1 << 20)).save("n", response("a"))
    assert (tmp_path / FILE_NAME).exists()


@pytest.mark.usual("0", "3")
@pytest.mark.parametrize("seed", range(4))
def test_a_server_that_is_killed_leaves_whole_responses(tmp_path: Path, seed: int) -> None:
    path, text = tmp_path / FILE_NAME, "x" * 200_000
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path), str(seed)], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    assert child.stdout is not None
    told = [child.stdout.readline() for _ in range(10 + 7 * seed)]
    child.kill()
    child.communicate()
    store = ResponseStore(path)
    for line in told:
        assert line.strip() and store.find("n", line.strip()) is not None
    database = sqlite3.connect(path)
    assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    counted = "SELECT thread, num_bytes, number FROM threads ORDER BY thread"
    held = """SELECT thread, TOTAL(num_bytes), COUNT(*) FROM responses GROUP BY thread"""
    assert database.execute(counted).fetchall() == database.execute(held).fetchall()
    assert len(blobs_of(store)) <= 1
    store.save("n", response("z", text=text))


KILLED = """
import sys
from pathlib import Path
from server.api.responses.store import ResponseStore
from server.api.responses.store import StoredResponse
store, number = ResponseStore(Path(sys.argv[1])), int(sys.argv[2])
while True:
    number += 1
    item = {"id": f"in_{number}", "text": "x" * 200_000 * (number % 3), "url": "data:;base64," + "A" * 50_000}
    store.save("n", StoredResponse(f"a{number}", {"output": []}, [item], None, f"a{number}"))
    store.delete("n", f"a{number}") if number % 5 == 4 else print(f"a{number}", flush=True)
"""


# ------------------------------------------------------------------------------------------------------ a full disk


@contextmanager
def files_end_at(num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_told_in_words(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / FILE_NAME)
    store.save("n", response("a"))
    store._empty_log()
    with files_end_at(1 << 20):
        attempts: list[Callable[[], object]] = [
            lambda: store.save("n", response("c", text="x" * 2_000_000)),
            lambda: store.put_conversation("n", StoredConversation("c", 1, {"k": "x" * 2_000_000})),
        ]
        for attempt in attempts:
            with pytest.raises(ApiError, match="cannot be stored: the file of responses cannot be written") as caught:
                attempt()
            assert caught.value.code is Code.INSUFFICIENT_STORAGE
        store.save("n", response("d"))
        assert store.find("n", "a") and store.find("n", "d") and not store.find("n", "c"), "others are not lost"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 16 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if sys.platform != "linux" or os.geteuid() != 0 or subprocess.run(command, check=False).returncode != 0:
        pytest.skip("only root mounts a small disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_something_is_deleted_where_not_one_byte_is_left(small_disk: Path) -> None:
    store = ResponseStore(small_disk / FILE_NAME)
    store.put_conversation("n", StoredConversation("c", 1, {}), [{"id": f"{n}"} for n in range(5000)])
    for name in ("a", "b"):
        store.save("n", response(name, text="a secret " * 220_000))
    store._empty_log()
    with (small_disk / "other").open("wb", buffering=0) as other, pytest.raises(OSError, match="No space"):
        all(other.write(bytes(1024)) for _ in range(20_000))
    with pytest.raises(ApiError, match="cannot be stored"):
        store.save("n", response("c", text="x" * 2_000_000))
    before = os.statvfs(small_disk).f_bavail
    assert before < 8
    assert store.delete("n", "a") and store.delete_conversation("n", "c")
    assert store.find("n", "b") and not store.find("n", "a")
    assert os.statvfs(small_disk).f_bavail > before + 400
    assert store.delete("n", "b")
    assert all(b"a secret" not in file.read_bytes() for file in small_disk.iterdir())
    store.save("n", response("d", text="x" * 1_000_000))
    assert store.find("n", "d")
    store.close()


# ------------------------------------------------------------------------------------------------------ the answer


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    def fails(self: Any, namespace: str, kept: StoredResponse, conversation: str | None = None) -> None:
        raise ApiError(Code.INSUFFICIENT_STORAGE, "disk full")

    monkeypatch.setattr(ResponseStore, "save", fails)
    return TestClient(create_app(FakeEngine(), fake_model(), ServerConfig()))


def test_an_answer_that_cannot_be_kept_says_so(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    answer = client.post("/v1/responses", json={"input": "Hi"})
    told = answer.json()
    assert (answer.status_code, told["status"], told["store"]) == (200, "completed", False)
    assert "is not kept: disk full" in caplog.text
    stream = client.post("/v1/responses", json={"input": "Hi", "stream": True}).text
    last = json.loads(stream.strip().rpartition("data: ")[2])
    assert (last["type"], last["response"]["store"]) == ("response.completed", False)


def test_a_response_in_the_background_is_not_begun_if_it_cannot_be_kept(client: TestClient) -> None:
    told = client.post("/v1/responses", json={"input": "Hi", "background": True}).json()
    assert (told["status"], told["error"]["message"], told["store"]) == ("failed", "disk full", False)


def test_a_response_whose_conversation_was_deleted_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    client = TestClient(create_app(FakeEngine(), fake_model(), ServerConfig()))
    name = client.post("/v1/conversations", json={}).json()["id"]
    wish, save = {"input": "Hi", "conversation": name}, ResponseStore.save
    assert client.post("/v1/responses", json=wish).json()["conversation"] == {"id": name}

    def late(store: ResponseStore, namespace: str, *kept: Any) -> bool:
        store.delete_conversation(namespace, name)
        return save(store, namespace, *kept)

    monkeypatch.setattr(ResponseStore, "save", late)
    told = client.post("/v1/responses", json=wish).json()
    assert (told["status"], told["store"], told["conversation"]) == ("completed", True, None)
    assert client.get(f"/v1/responses/{told['id']}").json()["conversation"] is None


# ------------------------------------------------------------------------------------------------------ threads


def test_each_kind_of_work_has_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[str]] = {}

    def note(owner: Any, name: str) -> None:
        work = getattr(owner, name)

        def noted(*args: Any, **fields: Any) -> Any:
            seen.setdefault(name, set()).add(threading.current_thread().name.partition("_")[0])
            return work(*args, **fields)

        monkeypatch.setattr(owner, name, noted)

    for name in ("save", "find", "page", "delete", "put_conversation", "delete_conversation"):
        note(ResponseStore, name)
    note(wire, "expand")
    app = create_app(FakeEngine(), fake_model(), ServerConfig())
    client, clients, take = TestClient(app), list[str](), app.state.api.storing.take

    async def taken(who: str) -> None:
        clients.append(who)
        await take(who)

    monkeypatch.setattr(app.state.api.storing, "take", taken)
    for salt in "ab":
        path = f"/v1/responses/{client.post('/v1/responses', json={'input': 'Hi', 'cache_salt': salt}).json()['id']}"
    assert len(clients) == 2 and len({*clients}) == 1, "a key's salts have one turn"
    for ask in (client.get, client.delete):
        ask(f"{path}?cache_salt=b").raise_for_status()
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    told = client.post("/v1/conversations", content=gzip.compress(b"{}"), headers=headers).json()
    client.get(f"/v1/conversations/{told['id']}/items").raise_for_status()
    client.delete(f"/v1/conversations/{told['id']}").raise_for_status()
    kinds = {name: {"store"} for name in ("save", "delete", "put_conversation", "delete_conversation")}
    assert seen == {**kinds, "find": {"read"}, "page": {"read"}, "expand": {"expand"}}


# ------------------------------------------------------------------------------------------------------ what repeats


class Serving:
    """A server, and how often a response's item was looked up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lookups = 0
        find_item = ResponseStore.find_item

        def counted(*place: Any) -> bytes | None:
            self.lookups += 1
            return find_item(*place)

        monkeypatch.setattr(ResponseStore, "find_item", counted)
        self.client = TestClient(create_app(FakeEngine(), fake_model(context_tokens=10**9), ServerConfig()))
        self.first = self.client.post("/v1/responses", json={"input": "x" * 1000}).json()

    def count(self, *items: Any, **fields: Any) -> Any:
        return self.client.post("/v1/responses/input_tokens", json={"input": list(items), **fields})


def test_a_stored_item_is_read_once_and_counted_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    serving = Serving(monkeypatch)
    reference = {"type": "item_reference", "id": f"in_{serving.first['id'][5:]}_0"}
    assert serving.count(*[reference] * 700).status_code == 200 and serving.lookups == 1
    earlier = {"previous_response_id": serving.first["id"]}
    assert serving.count(*[reference] * 700, **earlier).status_code == 200 and serving.lookups == 1
    monkeypatch.setattr(tokenize, "MAX_REPEATED_BYTES", 100_000)
    for fields in ({}, earlier):
        refused = serving.count(*[reference] * 700, **fields)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "input"
        assert "more than 100000 bytes" in refused.json()["error"]["message"]
    missing = [{"type": "item_reference", "id": f"in_{number}_0"} for number in range(700)]
    assert serving.count(*missing).status_code == 404, "the first one ends it"


def test_conversations_count_for_a_keys_limits_and_are_bounded() -> None:
    keys = KeyRing((ApiKey("mine", digest_of("secret"), requests_per_minute=2),))
    app = create_app(FakeEngine(), fake_model(), ServerConfig(api_key="unused"), keys=keys)
    app.state.api.rate_limits.clock = lambda: 0.0
    client = TestClient(app, headers={"Authorization": "Bearer secret"})
    name = client.post("/v1/conversations", json={}).json()["id"]
    path, item = f"/v1/conversations/{name}", {"role": "user", "content": "Hi"}
    assert client.post(f"{path}/items", json={"items": [item] * 10_001}).json()["error"]["param"] == "items"
    for refused in ("/v1/conversations", path, f"{path}/items"):
        body: Any = {"items": [item]} if refused.endswith("items") else {"metadata": {}}
        assert client.post(refused, json=body).status_code == 429
    assert client.get(path).status_code == client.delete(path).status_code == 200
