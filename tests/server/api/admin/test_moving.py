"""`/v1/cache/export` and `/v1/cache/import`, on a tiny hybrid model behind real servers."""

import contextlib
import http.client
import io
import logging
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.app.config import ServerConfig
from tests.server.api.admin.test_cache import ask, bearer, serving
from tests.support import tiny_models
from tests.support.bundles import reader_of

TAR = {"Content-Type": "application/x-tar"}
KEYS = """
[[keys]]
name = "operator"
key = "o"
operator = true
[[keys]]
name = "anna"
key = "a"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_models.write("lfm2", tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def here(folder: str) -> Iterator[httpx.Client]:
    with serving(ServerConfig(models=(folder,), cache_memory_bytes=1 << 26)) as client:
        yield client


@pytest.fixture(scope="module")
def there(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server with keys and a disk."""
    top = tmp_path_factory.mktemp("there")
    (top / "keys.toml").write_text(KEYS)
    (top / "keys.toml").chmod(0o600)
    settings: dict[str, Any] = {
        "cache_disk_bytes": 10**8,
        "cache_dir": str(top),
        "api_keys_file": str(top / "keys.toml"),
    }
    with serving(ServerConfig(models=(folder,), cache_memory_bytes=1 << 26, **settings)) as client:
        yield client


def question(number: int) -> dict[str, str]:
    return {"role": "user", "content": f"{number}. What is the weather in Paris, and why? " * 20}


def converse(server: httpx.Client, session: str, number: int, key: str = "") -> list[dict[str, str]]:
    """One turn of a session; returns the messages so far."""
    body = {"messages": [question(number)], "max_tokens": 4, "ignore_eos": True, "session_id": session}
    answer = server.post("/v1/chat/completions", json={**body, "temperature": 0}, headers=bearer(key) if key else {})
    return [question(number), answer.json()["choices"][0]["message"]]


def cached(server: httpx.Client, messages: list[dict[str, str]], key: str) -> tuple[float, str]:
    """Which part of the next prompt was cached, and the answer."""
    more = [*messages, {"role": "user", "content": "Go on."}]
    answer = ask(server, key, *more, temperature=0, ignore_eos=True)
    usage = answer["usage"]
    share = usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]
    return share, answer["choices"][0]["message"]["content"]


def export(server: httpx.Client, **query: str) -> httpx.Response:
    return server.get("/v1/cache/export", params=query)


def take_in(server: httpx.Client, data: bytes, key: str = "o", **query: str) -> httpx.Response:
    return server.post("/v1/cache/import", content=data, headers={**TAR, **bearer(key)}, params=query)


def test_a_session_goes_on_at_another_server(here: httpx.Client, there: httpx.Client) -> None:
    messages = converse(here, "mine", 1)
    converse(here, "other", 2)
    answer = export(here, session="mine")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-tar")
    assert {piece.session_id for piece, _ in reader_of(answer.content).pieces()} == {"mine"}
    taken = take_in(there, answer.content)
    assert taken.status_code == 200, taken.text
    body = taken.json()
    assert (body["object"], body["conversations"], body["bytes"] > 0) == ("cache.imported", 1, True)
    assert body["new_bytes"] == body["bytes"]
    assert take_in(there, answer.content).json() == {**body, "new_bytes": 0}, "all of it is there"
    share, text = cached(there, messages, "o")
    assert share > 0.9
    assert text == cached(here, messages, "cold")[1], "as a key evaluates it that has no state"
    assert cached(there, messages, "a")[0] == 0, "another key has nothing of it"
    again = there.get("/v1/cache/export", params={"session": "mine"}, headers=bearer("o"))
    assert again.status_code == 200, "the session came with its name"


def test_the_operator_names_where_to(here: httpx.Client, there: httpx.Client) -> None:
    messages = converse(here, "for anna", 3)
    anna = there.get("/v1/cache", headers=bearer("a")).json()["namespace"]
    assert take_in(there, export(here, session="for anna").content, namespace=anna).status_code == 200
    assert cached(there, messages, "a")[0] > 0.9


def test_all_namespaces_move_each_into_its_own(here: httpx.Client, there: httpx.Client) -> None:
    messages = {key: converse(here, "same name", number, key) for number, key in ((4, "a"), (5, "o"))}
    data = export(here, namespace="all").content
    assert len({piece.namespace for piece, _ in reader_of(data).pieces()}) >= 3
    assert take_in(there, data, namespace="all").status_code == 200
    assert all(cached(there, own, key)[0] > 0.9 for key, own in messages.items())


def test_it_is_for_the_owner(here: httpx.Client, there: httpx.Client) -> None:
    for key, status in (("a", 403), ("wrong", 401)):
        assert there.get("/v1/cache/export", headers=bearer(key)).status_code == status
        assert take_in(there, b"", key).status_code == status
    refused = here.get("/v1/cache/export", headers=bearer("anyone"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "operator_only")


def test_what_is_not_here_cannot_leave(here: httpx.Client) -> None:
    missing = export(here, session="unknown")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "session_not_found")
    assert "'unknown'" in missing.json()["error"]["message"]
    assert export(here, cache_salt="nobody").status_code == 404


def test_a_session_of_another_key_is_named_with_its_namespace(here: httpx.Client) -> None:
    converse(here, "with a key", 9, "none")
    refused = export(here, session="with a key")
    namespaces = {one["namespace"] for one in here.get("/v1/sessions").json()["data"] if one["id"] == "with a key"}
    (namespace,) = namespaces
    assert refused.status_code == 404
    assert repr(namespace) in refused.json()["error"]["message"]
    assert export(here, session="with a key", namespace=namespace).status_code == 200


def test_state_that_is_not_stored_is_left_out_and_counted(here: httpx.Client) -> None:
    converse(here, "half", 6)
    body = {"model": "tiny", "input": "A secret. " * 50, "max_output_tokens": 2, "store": False, "session_id": "half"}
    assert here.post("/v1/responses", json=body).status_code == 200
    answer = export(here)
    assert int(answer.headers["x-left-out-tokens"]) > 50
    assert reader_of(answer.content).head.left_out_tokens == int(answer.headers["x-left-out-tokens"])
    assert int(export(here, session="half").headers["x-left-out-tokens"]) > 50


def test_pages_and_other_types_are_refused(here: httpx.Client) -> None:
    for headers in ({"Content-Type": "text/plain"}, {**TAR, "Origin": "https://evil.example"}, {}):
        assert here.post("/v1/cache/import", content=b"x", headers=headers).status_code in (403, 415)


@pytest.mark.parametrize("change", ["cut", "foreign", "no bundle"])
def test_a_bad_bundle_is_refused_in_words(here: httpx.Client, there: httpx.Client, change: str) -> None:
    converse(here, "good", 7)
    data = bytearray(export(here, session="good").content)
    if change == "cut":
        data = data[: len(data) // 2]
    if change == "foreign":
        place = data.index(b'"fingerprint":"') + 20
        data[place : place + 4] = b"zzzz"
    if change == "no bundle":
        data = bytearray(b"GIF89a" * 1000)
    answer = take_in(there, bytes(data))
    error = answer.json()["error"]
    words = {"cut": "cut off", "foreign": "other weights", "no bundle": "this is no bundle"}
    assert answer.status_code == 400 and words[change] in error["message"], error
    assert ask(there, "o", question(8))["usage"]["completion_tokens"] > 0


def test_ten_gigabytes_are_refused_by_their_header(there: httpx.Client) -> None:
    host = there.base_url.netloc.decode()
    with contextlib.closing(http.client.HTTPConnection(host, timeout=60)) as connection:
        connection.putrequest("POST", "/v1/cache/import")
        for name, value in {**TAR, **bearer("o"), "Content-Length": str(10 << 30)}.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        assert answer.status == 413 and b"100000000 bytes" in answer.read()


def test_a_long_bundle_without_a_length_is_refused_where_it_gets_too_long(
    here: httpx.Client, there: httpx.Client
) -> None:
    converse(here, "long", 9)
    data = export(here, session="long").content
    info = tarfile.TarInfo("bundle.json")
    info.size = 1 << 32

    def parts() -> Iterator[bytes]:
        yield info.tobuf(tarfile.USTAR_FORMAT)
        yield data

    answer = there.post("/v1/cache/import", content=parts(), headers={**TAR, **bearer("o")})
    assert answer.status_code == 413


def test_a_client_that_leaves_in_the_middle_leaves_whole_pieces(
    here: httpx.Client, there: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    messages = converse(here, "half way", 10)
    data = export(here, session="half way").content
    assert data.endswith(bytes(1024))

    class Gone(Exception):
        pass

    def parts() -> Iterator[bytes]:
        yield data[: len(data) * 3 // 4]
        raise Gone

    with pytest.raises(Gone):
        there.post("/v1/cache/import", content=parts(), headers={**TAR, **bearer("o")})
    assert 0 <= cached(there, messages, "o")[0] <= 1
    assert take_in(there, data).status_code == 200, "it may be sent again"
    (left,) = [record.message for record in caplog.records if "; then: " in record.message]
    assert left.endswith("; then: the client left")
    assert cached(there, messages, "o")[0] > 0.9


def test_other_programs_can_list_a_bundle(here: httpx.Client, tmp_path: Path) -> None:
    converse(here, "listed", 11)
    with tarfile.open(fileobj=io.BytesIO(export(here, session="listed").content)) as listed:
        assert listed.getnames()[:2] == ["bundle.json", "000000.json"]
