"""Several keys: what their file may hold, who may read it, and what each key is let see."""

import logging
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from server.app.config import ConfigError, ServerConfig
from server.app.keys import KeyRing, digest_of, namespace_of_key, parse_keys, read_keys
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, fake_model

TWO = """
[[keys]]
name = "alice"
key = "key-of-alice"
requests_per_minute = 60
tokens_per_minute = 1000
concurrent_requests = 2

[[keys]]
name = "boss"
key = "key-of-boss"
operator = true
"""
CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}], "session_id": "s"}


def write(tmp_path: Path, text: str = TWO, mode: int = 0o600) -> Path:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    file.chmod(mode)
    return file


def app_of(tmp_path: Path, **settings: Any) -> Any:
    return create_app(FakeEngine(), fake_model(), ServerConfig(api_keys_file=str(write(tmp_path)), **settings))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_key_is_found_by_all_of_its_text_and_not_kept() -> None:
    ring = parse_keys(TWO)
    alice, boss = ring.keys
    assert ring.find("key-of-alice") is alice and ring.find("key-of-boss") is boss
    assert ring.find("key-of-alic") is None and ring.find("") is None
    assert (alice.requests_per_minute, alice.tokens_per_minute, alice.concurrent_requests) == (60, 1000, 2)
    assert (alice.is_operator, boss.is_operator, boss.requests_per_minute) == (False, True, None)
    assert "key-of" not in repr(vars(ring)) and digest_of("key-of-alice").hex() not in repr(alice)
    assert ring.name_of(namespace_of_key("key-of-alice") + "/salt") == "alice"
    assert ring.name_of("") is None and KeyRing().find("") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"holds no \[\[keys\]\]"),
        ("keys = 3", r"holds no \[\[keys\]\]"),
        ("keys = [3]", r"holds no \[\[keys\]\]"),
        ("[[keys]", "is not TOML"),
        ("other = 1", "holds 'other'"),
        ("[[keys]]\nkey = 'geheim'", "key 1: name must be"),
        ("[[keys]]\nname = 'a'\nkey = ''", "key 1: key must be"),
        ("[[keys]]\nname = 'a'\nkey = 'geheim '", "key 1: key must be"),
        (f"[[keys]]\nname = '{'a' * 65}'\nkey = 'geheim'", "at most 64"),
        ("[[keys]]\nname = 'a'\nkey = 'geheim'\nlimit = 3", "'limit' is not one of"),
        ("[[keys]]\nname = 'a'\nkey = 'geheim'\ntokens_per_minute = 0", "tokens_per_minute must be"),
        ("[[keys]]\nname = 'a'\nkey = 'geheim'\nconcurrent_requests = true", "concurrent_requests must be"),
        ("[[keys]]\nname = 'a'\nkey = 'geheim'\noperator = 1", "operator must be"),
        ("[[keys]]\nname = 'a'\nkey = 'geheim'\n" * 2, "two keys have the name 'a'"),
        ("[[keys]]\nname = 'a'\nkey = 'geheim'\n[[keys]]\nname = 'b'\nkey = 'geheim'", "'a' and 'b' have the same"),
    ],
)
def test_a_file_that_is_wrong_is_told_without_its_keys(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse_keys(text)
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_file_that_others_may_open_is_refused_with_the_cure(mode: int, tmp_path: Path) -> None:
    file = write(tmp_path, mode=mode)
    config = ServerConfig(api_keys_file=str(file))
    with pytest.raises(ConfigError, match=f"chmod 600 {file}"):
        read_keys(config)
    file.chmod(0o600)
    assert [key.name for key in read_keys(config).keys] == ["alice", "boss"]
    file.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(config)


def test_the_key_of_the_command_line_is_taken_besides(tmp_path: Path) -> None:
    client = TestClient(app_of(tmp_path, api_key="third"))
    for key, status in (("third", 200), ("key-of-alice", 200), ("key-of-boss", 200), ("fourth", 401), ("", 401)):
        assert client.get("/v1/models", headers=bearer(key)).status_code == status
    assert client.get("/v1/models").status_code == 401
    assert client.get("/health").status_code == client.get("/ready").status_code == 200
    assert "engines" not in client.get("/health").json()
    assert "engines" in client.get("/health", headers=bearer("key-of-alice")).json()


def test_only_an_operator_sees_what_others_have(tmp_path: Path) -> None:
    client = TestClient(app_of(tmp_path, api_key="third"))
    for key in ("key-of-alice", "third"):
        client.post(CHAT, json=HI, headers=bearer(key))

    def names(key: str, **params: str) -> list[str | None]:
        listed = client.get("/v1/sessions", headers=bearer(key), params=params).json()["data"]
        return sorted((session["key"] for session in listed), key=str)

    namespace = namespace_of_key("key-of-alice")
    assert names("key-of-boss") == [None, "alice"]
    assert names("key-of-boss", namespace=namespace) == ["alice"]
    assert names("key-of-boss", cache_salt="x") == []
    assert names("key-of-alice") == names("key-of-alice", namespace=namespace_of_key("third")) == ["alice"]
    assert names("third", namespace=namespace) == [None]
    path = f"/v1/sessions/s?namespace={namespace}"
    assert client.get(path, headers=bearer("key-of-boss")).json()["key"] == "alice"
    assert client.delete("/v1/sessions/s", headers=bearer("key-of-boss")).status_code == 404
    assert client.delete(path, headers=bearer("key-of-boss")).status_code == 200
    assert names("key-of-boss") == [None]


def test_the_log_has_the_name_of_a_key_and_never_the_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    client = TestClient(app_of(tmp_path, api_key="third"))
    with caplog.at_level(logging.INFO):
        for key in ("key-of-alice", "third"):
            client.post(CHAT, json=HI, headers=bearer(key))
            client.post(CHAT, json={}, headers=bearer(key))
    entries: list[Any] = [record.msg for record in caplog.records if hasattr(record.msg, "key")]
    assert [(entry.event, entry.key) for entry in entries] == [
        ("request", "alice"),
        ("refused", "alice"),
        ("request", None),
        ("refused", None),
    ]
    assert "key alice" in caplog.text and "key-of" not in caplog.text and "third" not in caplog.text


def test_keys_are_replaced_while_the_server_runs(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    client = TestClient(app)
    app.state.api.keys = parse_keys("[[keys]]\nname = 'new'\nkey = 'newer'")
    assert client.get("/v1/models", headers=bearer("key-of-alice")).status_code == 401
    assert client.get("/v1/models", headers=bearer("newer")).status_code == 200


def test_what_the_file_belongs_to_is_looked_at_when_it_is_open(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(write(tmp_path, mode=0o644))
    with pytest.raises(ConfigError, match="open to other users"):
        read_keys(ServerConfig(api_keys_file=str(link)))
