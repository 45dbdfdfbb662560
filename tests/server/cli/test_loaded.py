"""`mlx-serve ps` and `mlx-serve stop` against servers on this machine."""

import json
from collections.abc import Iterator

import httpx
import pytest

from server.api.app import create_pool_app
from server.app.config import ServerConfig, StartError
from server.cli import ask
from server.pool.memory import PoolSettings
from server.pool.pool import ModelPool
from tests.support.fake_opener import FakeOpener, catalog
from tests.support.live_server import running

NOBODY = "http://127.0.0.1:9"


def show_loaded(urls: list[str], key: str | None, *, as_json: bool) -> None:
    """`mlx-serve ps` where servers stand at `urls`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ask, "known_urls", lambda: urls)
        ask.ps(key, as_json)


def unload(name: str, urls: list[str], key: str | None, *, as_json: bool) -> None:
    """`mlx-serve stop` where servers stand at `urls`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ask, "known_urls", lambda: urls)
        ask.stop(name, key, as_json)


@pytest.fixture
def url() -> Iterator[str]:
    settings = PoolSettings(keep_alive_seconds=1800)
    pool = ModelPool(catalog("a", "b"), opener=FakeOpener(), settings=settings)
    with running(create_pool_app(pool, ServerConfig())) as address:
        httpx.post(f"{address}/v1/models/load", json={"model": "a"}).raise_for_status()
        yield address


def test_ps_tells_what_is_loaded_where_and_until_when(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    show_loaded([NOBODY, url], None, as_json=True)
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["name"], entry["server"], entry["context_tokens"]) == ("a", url, 200)
    assert 1700 < entry["idle_seconds_left"] <= 1800
    show_loaded([url], None, as_json=False)
    heading, line = capsys.readouterr().out.splitlines()
    assert heading.split()[0] == "NAME" and line.split()[0] == "a" and "30 minutes" in line


def test_ps_says_how_to_start_a_server_where_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    show_loaded([NOBODY], None, as_json=False)
    assert "mlx-serve serve" in capsys.readouterr().out
    show_loaded([NOBODY], None, as_json=True)
    assert json.loads(capsys.readouterr().out) == []


def test_ps_advises_to_start_no_server_where_one_runs_without_models(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    unload("a", [url], None, as_json=True)
    capsys.readouterr()
    show_loaded([NOBODY, url], None, as_json=False)
    assert capsys.readouterr().out == f"No model is loaded at {url}; one is loaded when a request names it.\n"


def test_ps_shows_what_the_other_servers_have_where_one_refuses(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    pool = ModelPool(catalog("c"), opener=FakeOpener(), settings=PoolSettings())
    with running(create_pool_app(pool, ServerConfig(api_key="secret"))) as locked:
        for urls in ([locked, url], [url, locked]):
            with pytest.raises(StartError, match=locked):
                show_loaded(urls, None, as_json=True)
            assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == ["a"]
        with pytest.raises(StartError, match=locked):
            show_loaded([locked], None, as_json=False)
        assert capsys.readouterr().out == ""


def test_stop_unloads_a_model_and_names_one_that_is_not_loaded(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    unload("a:latest", [NOBODY, url], None, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"name": "a:latest", "servers": [url]}
    for name in ("a", "b", "nope"):
        with pytest.raises(StartError, match="is not loaded by any server"):
            unload(name, [url], None, as_json=False)


def test_stop_says_why_a_server_refuses(url: str) -> None:
    with pytest.raises(StartError, match="operator's key"):
        unload("a", [url], "guest", as_json=False)


def test_stop_asks_the_other_servers_where_one_refuses(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    pool = ModelPool(catalog("a"), opener=FakeOpener(), settings=PoolSettings())
    app = create_pool_app(pool, ServerConfig(api_key="secret"))
    with running(app) as locked, pytest.raises(StartError, match=locked):
        unload("a", [locked, url], None, as_json=False)
    assert capsys.readouterr().out == "a is unloaded.\n"
